"""Compiled memory of the log-prob and update programs: the chunked vocabulary projection against the plain one.

    python benchmarks/step_memory.py [--vocabulary 151936] [--tokens 8192] [--chunk 512]

Both are the trainer's own programs, for a model of two layers with the width of SmolLM2-135M; in the plain ones the
log-probs come from logits of [tokens, vocabulary], and JAX differentiates them. Nothing of that size is allocated:
temporaries are the compiler's own count. Gradients are compared at a size that fits anywhere.
"""

from __future__ import annotations

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training import programs as training_programs
from jaxrl_ppo.training.setup import policy_programs

GIB = 2**30
CHUNKED = training_programs.token_log_probs


def plain(hidden, kernel, target, temperature, chunk, with_entropy, *rest):
    logits = jnp.einsum("gtd,dv->gtv", hidden, kernel, preferred_element_type=jnp.float32) / temperature
    return jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], -1)[..., 0], None


def make_programs(vocabulary: int, chunk: int):
    config = ActorRolloutRefConfig()
    config.actor.fsdp_config.dtype = "float32"
    config.actor.log_prob_chunk_size = chunk
    model = DecoderConfig("llama", vocabulary, 576, 1536, 2, 9, 3, 64, 8192)
    return policy_programs(config, AlgorithmConfig(), model, make_mesh(config.actor.mesh, jax.devices()[:1]), 1)


def make_arrays(tokens: int, length: int) -> dict[str, tuple]:
    rows = dict.fromkeys(("tokens", "positions", "segment_ids"), (np.int32, (tokens // length, length)))
    slots = dict.fromkeys(("source", "target", "sequence"), (np.int32, (1, tokens)))
    return rows | slots | dict.fromkeys(("advantages", "old_log_probs", "weights", "mask"), (np.float32, (1, tokens)))


def temporaries(vocabulary: int, tokens: int, chunk: int, log_probs) -> dict[str, int]:
    training_programs.token_log_probs = log_probs
    programs = make_programs(vocabulary, chunk)
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in make_arrays(tokens, 1024).items()}
    arguments = (programs.abstract_params(jnp.float32), arrays, jnp.float32(1))
    functions = {"log-probs": programs.log_probs, "update": programs.first_gradient}
    return {
        name: function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
        for name, function in functions.items()
    }


def gradient(log_probs) -> list[np.ndarray]:
    training_programs.token_log_probs = log_probs
    programs, rng = make_programs(vocabulary=4096, chunk=64), np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(size=leaf.shape, scale=0.05), jnp.float32),
        programs.abstract_params("float32"),
    )
    arrays = {
        name: rng.integers(0, 256, shape, dtype) if dtype == np.int32 else rng.normal(size=shape).astype(dtype)
        for name, (dtype, shape) in make_arrays(tokens=256, length=256).items()
    }
    arrays["segment_ids"][:] = 1
    arrays["old_log_probs"] -= 8
    return jax.tree.leaves(programs.first_gradient(params, arrays, jnp.float32(1))[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=ActorRolloutRefConfig().actor.log_prob_chunk_size)
    args = parser.parse_args()
    print(f"{args.tokens} tokens, vocabulary {args.vocabulary}, chunks of {args.chunk} tokens; temporaries in GiB")
    ours, theirs = (temporaries(args.vocabulary, args.tokens, args.chunk, each) for each in (CHUNKED, plain))
    for name, size in ours.items():
        ratio = size / theirs[name]
        print(f"{name:>10}: chunked {size / GIB:6.2f}, plain {theirs[name] / GIB:6.2f}, ratio {ratio:.3f}")
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(gradient(CHUNKED), gradient(plain), strict=True)]
    print(f"largest difference of the gradients, relative to their largest entry: {max(errors):.1e}")


if __name__ == "__main__":
    main()

"""Seconds to compile the update for a model of 4 layers and of 64: layers are scanned, so it should not grow.

    python benchmarks/compile_time.py [--layers 4 64] [--repeats 3]

The best of several compilations each, taken in turns, without any cache; tracing is included.
"""

from __future__ import annotations

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_ppo.models.architecture import DecoderConfig
from jaxrl_ppo.schema.config import ActorRolloutRefConfig, AlgorithmConfig
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.setup import policy_programs

ROWS, LENGTH, TARGETS = 2, 512, 768
MODEL = DecoderConfig("qwen3", 32_000, 512, 1536, 4, 8, 4, 64, 4096, qk_norm=True)


def seconds(layers: int) -> float:
    config = ActorRolloutRefConfig()
    model = dataclasses.replace(MODEL, num_layers=layers)
    programs = policy_programs(config, AlgorithmConfig(), model, make_mesh(config.actor.mesh, jax.devices()[:1]), 1)
    rows = dict.fromkeys(("tokens", "positions", "segment_ids", "branch_ids"), (np.int32, (ROWS, LENGTH)))
    slots = dict.fromkeys(("source", "target", "sequence"), (np.int32, (1, TARGETS)))
    slots |= dict.fromkeys(("advantages", "old_log_probs", "weights", "mask"), (np.float32, (1, TARGETS)))
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, shape) in (rows | slots).items()}
    begin = time.perf_counter()
    programs.first_gradient.lower(programs.abstract_params(jnp.float32), arrays, jnp.float32(1)).compile()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=(4, 64))
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    best = dict.fromkeys(args.layers, float("inf"))
    for _ in range(args.repeats):
        for layers in args.layers:
            best[layers] = min(best[layers], seconds(layers))
    few, many = args.layers
    print(f"{few} layers {best[few]:.2f} s, {many} layers {best[many]:.2f} s: ratio {best[many] / best[few]:.2f}")


if __name__ == "__main__":
    main()

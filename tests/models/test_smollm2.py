"""The decoder and the JAX engine on the quickstart's real model, against transformers in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.rollout.engine import Request, SamplingParams
from jaxrl_ppo.rollout.jax_engine import JaxEngine
from jaxrl_ppo.schema.config import RolloutConfig

QUESTIONS = ["What is 7 + 8? Answer with the number only.", "Name the capital of France.", "Count to five.", "Why?"]
CHECKED = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.14.self_attn.k_proj.weight",
    "model.layers.14.mlp.down_proj.weight",
    "model.layers.29.self_attn.o_proj.weight",
    "model.layers.29.input_layernorm.weight",
    "model.norm.weight",
)


@pytest.fixture(scope="module")
def prompts(smollm2):
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [
        tuple(tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True)["input_ids"])
        for m in messages
    ]


@pytest.fixture(scope="module")
def oracle(smollm2):
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def decoder(smollm2):
    config = load_decoder_config(smollm2)
    decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), remat="dots"))
    nnx.update(decoder, load_params(smollm2, config))
    return decoder


@nnx.jit
def log_probs_of(decoder, tokens, length):
    """Log-probs [R, S - 1] of right-padded tokens [R, S] after the first."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden = decoder.hidden(tokens, positions, (positions < length[:, None]).astype(jnp.int32))
    log_probs = jax.nn.log_softmax(hidden[:, :-1] @ decoder.head())
    return jnp.take_along_axis(log_probs, tokens[:, 1:, None], 2)[..., 0]


def test_log_probs_and_gradients_equal_transformers(decoder, oracle, prompts):
    tokens = jnp.array([prompts[0]])
    length = jnp.array([len(prompts[0])])
    targets = torch.tensor([prompts[0]])
    logits = oracle(targets).logits
    expected = torch.log_softmax(logits[:, :-1], -1).gather(-1, targets[:, 1:, None])[..., 0]
    expected.mean().backward()
    log_probs = log_probs_of(decoder, tokens, length)
    np.testing.assert_allclose(log_probs, expected.detach(), rtol=1e-4, atol=1e-4)

    grads = nnx.jit(nnx.grad(lambda d: log_probs_of(d, tokens, length).mean()))(decoder)
    flat = dict(flatten(nnx.to_pure_dict(grads)))
    plan, named = tensor_plan(decoder.config), dict(oracle.named_parameters())
    assert plan.keys() == named.keys()
    for name in CHECKED:
        theirs = named[name].grad.numpy()
        ours = np.asarray(plan[name].to_tensor(flat[plan[name].parameter][plan[name].index]))
        if name == "model.embed_tokens.weight":
            # transformers gives the padding token's embedding no gradient; here it ends messages and is trained.
            ours, theirs = (np.delete(x, decoder.config.pad_token_id, axis=0) for x in (ours, theirs))
        assert np.linalg.norm(ours - theirs) < 1e-4 * np.linalg.norm(theirs), name


async def test_engine_equals_transformers_and_the_decoder(smollm2, decoder, oracle, prompts):
    engine = await JaxEngine.create(smollm2, RolloutConfig(prompt_length=64, response_length=64, load_format="auto"))
    greedy = SamplingParams(max_new_tokens=16, temperature=0.0)
    sampled = SamplingParams(max_new_tokens=16)
    requests = [Request(f"greedy {i}", prompt, 0, greedy) for i, prompt in enumerate(prompts)]
    requests += [Request(f"sampled {i}", prompts[i % 4], i, sampled) for i in range(12)]
    done = {c.request_id: c async for c in engine.generate(requests)}
    await engine.close()
    for i, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = oracle.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0, len(prompt) :]
        assert done[f"greedy {i}"].token_ids.tolist() == expected.tolist()

    rows, lengths = np.zeros((len(requests), 64), np.int32), np.zeros(len(requests), np.int32)
    for row, request in enumerate(requests):
        sequence = [*request.prompt_ids, *done[request.id].token_ids]
        rows[row, : len(sequence)], lengths[row] = sequence, len(sequence)
    log_probs = np.asarray(log_probs_of(decoder, jnp.asarray(rows), jnp.asarray(lengths)))
    ours, trainers = [], []
    for row, request in enumerate(requests):
        ours.append(done[request.id].log_probs)
        trainers.append(log_probs[row, len(request.prompt_ids) - 1 : lengths[row] - 1])
    ours, trainers = np.concatenate(ours), np.concatenate(trainers)
    # Each differs from float64 by 8e-6 (root mean square, 4e-5 at most), as transformers in float32 does: probabilities
    # are equal to 1e-5, and so are all log-probs but a few unlikely tokens'.
    difference = np.abs(ours - trainers)
    assert np.abs(np.exp(ours) - np.exp(trainers)).max() < 1e-5
    assert (difference < 1e-5 + 1e-5 * np.abs(trainers)).mean() > 0.97
    assert difference.mean() < 1e-5
    assert difference.max() < 1e-4

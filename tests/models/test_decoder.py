"""The decoder against transformers on tiny random models, and packed rows against samples alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from tiny_models import CONFIGS, checkpoint_gradients

from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.decoder import Decoder
from jaxrl_ppo.models.huggingface import load_params
from jaxrl_ppo.models.layers import softcap
from jaxrl_ppo.models.parameters import flatten
from jaxrl_ppo.models.tensor_plan import tensor_plan


def load(folder, **kwargs):
    config = load_decoder_config(folder)
    decoder = Decoder(config, rngs=nnx.Rngs(0), **kwargs)
    nnx.update(decoder, load_params(folder, config))
    return decoder


def logits_of(decoder, tokens, positions=None, segment_ids=None, branch_ids=None):
    tokens = jnp.asarray(tokens)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    return compute_logits(decoder, tokens, positions, segment_ids, branch_ids)[0]


@nnx.jit
def compute_logits(decoder, *row):
    hidden, balance = decoder.hidden_and_balance(*row)
    return softcap(hidden @ decoder.head(), decoder.config.logit_softcap), balance


def random_tokens(rows, length, seed=0):
    return np.random.default_rng(seed).integers(6, 97, (rows, length)).astype(np.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_log_probs_and_gradients_equal_transformers(model_folders, name):
    decoder = load(model_folders[name])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model_folders[name], attn_implementation="eager")
    tokens = random_tokens(2, 100)  # more than one chunk of queries
    targets = torch.tensor(tokens[:, 1:], dtype=torch.long)

    output = oracle(torch.tensor(tokens, dtype=torch.long))
    expected = output.logits
    expected_log_probs = torch.log_softmax(expected[:, :-1], -1).gather(-1, targets[..., None])[..., 0]
    total = (expected_log_probs * torch.linspace(-1, 1, 99)).sum()
    if decoder.config.num_experts:
        total = total + 50 * output.aux_loss
    total.backward()

    def loss(decoder):
        positions = jnp.broadcast_to(jnp.arange(100), tokens.shape)
        logits, balance = compute_logits(decoder, jnp.asarray(tokens), positions, jnp.ones_like(tokens))
        log_probs = jax.nn.log_softmax(logits[:, :-1])
        log_probs = jnp.take_along_axis(log_probs, jnp.asarray(tokens)[:, 1:, None], -1)[..., 0]
        total = (log_probs * jnp.linspace(-1, 1, 99)).sum()
        return total if balance is None else total + 50 * balance, (logits, log_probs)

    (_, (logits, log_probs)), grads = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(decoder)
    np.testing.assert_allclose(logits, expected.detach(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(log_probs, expected_log_probs.detach(), rtol=1e-4, atol=1e-4)

    flat = dict(flatten(nnx.to_pure_dict(grads)))
    named = checkpoint_gradients(oracle)
    plan = tensor_plan(decoder.config)
    assert plan.keys() == named.keys()
    for entry in plan.values():
        ours = np.asarray(entry.to_tensor(flat[entry.parameter][entry.index]))
        theirs = named[entry.name].numpy()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max(), err_msg=entry.name)


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
def test_packed_row_equals_its_segments_alone(model_folders, remat):
    decoder = load(model_folders["qwen3"], remat=remat)
    first, second = random_tokens(1, 11, seed=1), random_tokens(1, 17, seed=2)
    padding = random_tokens(1, 4, seed=3)
    row = np.concatenate([first, second, padding], 1)
    positions = np.concatenate([np.arange(11), np.arange(17), np.zeros(4)])[None].astype(np.int32)
    segments = np.repeat([1, 2, 0], [11, 17, 4])[None]
    packed = logits_of(decoder, row, positions, segments)
    np.testing.assert_allclose(packed[:, :11], logits_of(decoder, first), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(packed[:, 11:28], logits_of(decoder, second), rtol=1e-5, atol=1e-5)

    row[:, 28:] = random_tokens(1, 4, seed=4)
    np.testing.assert_array_equal(packed[:, :28], logits_of(decoder, row, positions, segments)[:, :28])
    assert np.isfinite(packed).all()


@pytest.mark.parametrize("name", ["llama_llama3", "gemma3"])
def test_responses_sharing_a_prompt_equal_each_alone(model_folders, name):
    decoder = load(model_folders[name])
    # With gemma3, each response's window leaves some of the prompt behind, and by its own positions.
    prompt, one, two = random_tokens(1, 24, 1), random_tokens(1, 6, 2), random_tokens(1, 8, 3)
    row = np.concatenate([prompt, one, two], 1)
    positions = np.concatenate([np.arange(30), np.arange(24, 32)])[None].astype(np.int32)
    branches = np.repeat([0, 1, 2], [24, 6, 8])[None]
    shared = logits_of(decoder, row, positions, np.ones_like(branches), branches)
    alone = [logits_of(decoder, np.concatenate([prompt, response], 1)) for response in (one, two)]
    np.testing.assert_allclose(shared[:, :30], alone[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(shared[:, 30:], alone[1][:, 24:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_leaves_gradients_unchanged(model_folders, remat):
    tokens = random_tokens(2, 16)

    def grads(remat):
        decoder = load(model_folders["llama"], remat=remat)
        return nnx.jit(nnx.grad(lambda d: jnp.square(logits_of(d, tokens)).mean()))(decoder)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), grads("none"), grads(remat))


def test_bfloat16_compute_stays_near_float32(model_folders):
    tokens = random_tokens(2, 16)
    exact = logits_of(load(model_folders["llama"]), tokens)
    half = logits_of(load(model_folders["llama"], dtype=jnp.bfloat16), tokens)
    assert half.dtype == jnp.bfloat16
    assert 0 < np.abs(half.astype(np.float32) - exact).max() < 0.1 * np.abs(exact).max()

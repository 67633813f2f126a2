"""The load-balance loss of a mixture in the update's loss and gradient, against transformers' own function."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from family_models import save_family
from training_cases import arrays, assert_close, make_batch, make_config, make_trainer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.schema.config import AlgorithmConfig, RolloutCorrectionConfig
from jaxrl_ppo.training.minibatches import make_mini_batch

COEFFICIENT = 0.1  # family_models'


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return save_family("mixtral", tmp_path_factory.mktemp("mixtral"))


def gradient(folder, batch, correction=None, **actor):
    config = make_config(prefix_sharing="false", ppo_max_token_len_per_gpu=512, **actor)
    algorithm = AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(**(correction or {})))
    trainer = make_trainer(folder, config, algorithm=algorithm)
    everything, rejecting = np.arange(len(batch.group)), trainer.programs.rejecting
    mini_batch = make_mini_batch(
        batch, everything, config.actor, trainer.loss, response_length=12, seed=0, rejecting=rejecting
    )
    grads, sums, packing = trainer.gradient(batch, mini_batch)
    assert len(packing.steps) == 1
    return trainer.model, arrays(grads), {name: float(value) for name, value in sums.items()}, packing.steps[0]


@pytest.fixture(scope="module")
def silent(mixtral, tmp_path_factory):
    """The same model without the loss."""
    folder = tmp_path_factory.mktemp("silent")
    for file in mixtral.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((mixtral / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"output_router_logits": False}))
    return folder


def test_it_counts_as_in_transformers(mixtral, silent):
    batch = make_batch(prompts=2, samples=2)
    model, grads, sums, step = gradient(mixtral, batch)
    without_model, without, other, _ = gradient(silent, batch)
    assert dataclasses.replace(model, balance_coef=0.0) == without_model
    assert "aux_loss" not in other

    oracle = transformers.AutoModelForCausalLM.from_pretrained(mixtral)
    by_layer = []
    for row, segments in zip(step.tokens, step.segment_ids):
        for segment in range(1, segments.max() + 1):
            tokens = torch.tensor(row[segments == segment], dtype=torch.long)[None]
            by_layer.append(oracle(tokens, output_router_logits=True).router_logits)
    logits = tuple(torch.cat(layer) for layer in zip(*by_layer))
    expected = load_balancing_loss_func(logits, 4, 2)
    expected.backward()
    assert sums["aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    named = dict(oracle.named_parameters())
    routers = [entry for entry in tensor_plan(model).values() if "router" in entry.parameter]
    assert len(routers) == 2
    for layer, entry in enumerate(routers):
        ours = (grads[entry.parameter] - without[entry.parameter])[entry.index]
        theirs = COEFFICIENT * named[f"model.layers.{layer}.mlp.gate.weight"].grad.numpy()
        np.testing.assert_allclose(entry.to_tensor(ours), theirs, rtol=1e-3, atol=1e-3 * np.abs(theirs).max())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_what_the_loss_rejects_leaves_it_as_it_is(mixtral, silent, mode):
    batch = make_batch(prompts=2, samples=2)  # the last response is empty
    log_probs = make_trainer(silent, make_config()).log_probs(batch)
    away = np.where(np.random.default_rng(0).random(log_probs.shape) < 0.4, 1.0, 0.0)
    away[0] = 1
    batch.rollout_log_probs = (log_probs - away).astype(np.float32)
    reject = {"bypass_mode": True, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    grads, sums = [], []
    for correction in (reject, {"bypass_mode": True}):
        for folder in (mixtral, silent):
            _, gradients, totals, _ = gradient(folder, batch, correction, loss_agg_mode=mode)
            grads.append(gradients)
            sums.append(totals)
    assert sums[0]["rollout_corr/rollout_rs_masked_fraction"] > 0
    rejected, plain = ({path: a[path] - b[path] for path in a} for a, b in (grads[:2], grads[2:]))
    assert_close(rejected, plain, 1e-4)
    assert sums[0]["aux_loss"] == pytest.approx(sums[2]["aux_loss"], rel=1e-5)

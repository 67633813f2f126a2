"""The load-balance loss of a mixture in the update's loss and gradient, against transformers' own function."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from family_models import save_family
from training_cases import arrays, make_batch, make_config, make_trainer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.training.minibatches import make_mini_batch

COEFFICIENT = 0.1  # family_models'


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return save_family("mixtral", tmp_path_factory.mktemp("mixtral"))


def gradient(folder, batch):
    config = make_config(prefix_sharing="false", ppo_max_token_len_per_gpu=512)
    trainer = make_trainer(folder, config)
    everything = np.arange(len(batch.group))
    mini_batch = make_mini_batch(batch, everything, config.actor, trainer.loss, response_length=12, seed=0)
    grads, sums, packing = trainer.gradient(batch, mini_batch)
    assert len(packing.steps) == 1
    return trainer.model, arrays(grads), {name: float(value) for name, value in sums.items()}, packing.steps[0]


def test_it_counts_as_in_transformers(mixtral, tmp_path):
    batch = make_batch(prompts=2, samples=2)
    model, grads, sums, step = gradient(mixtral, batch)
    silent = tmp_path / "silent"
    silent.mkdir()
    for file in mixtral.iterdir():
        (silent / file.name).write_bytes(file.read_bytes())
    raw = json.loads((mixtral / "config.json").read_text())
    (silent / "config.json").write_text(json.dumps(raw | {"output_router_logits": False}))
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

"""The update's loss and gradient against transformers and torch, however the batch is packed, split or left out."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch_oracle import torch_gradients, torch_log_probs
from training_cases import TEMPERATURE, arrays, assert_close, make_batch, make_config, make_trainer

from jaxrl_ppo.training import setup
from jaxrl_ppo.training.minibatches import make_mini_batch

EVERYTHING = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.05}


def gradient(trainer, batch):
    """Gradient and metric sums of one optimizer step on the whole batch."""
    samples = np.arange(len(batch.group))
    length = trainer.config.rollout.response_length
    mini_batch = make_mini_batch(batch, samples, trainer.config.actor, trainer.loss, response_length=length, seed=0)
    grads, sums, packing = trainer.gradient(batch, mini_batch)
    return arrays(grads), {name: float(value) for name, value in sums.items()}, packing


def torch_loss(model, batch, actor):
    """Vanilla PPO with dual clip, importance weights, k3 to the reference and entropy; token-mean; by formula."""
    total = float(batch.response_mask.sum())
    sums = {"pg_loss": 0.0, "entropy": 0.0, "kl_loss": 0.0, "ppo_kl": 0.0}
    for sample in range(len(batch.group)):
        counted = np.flatnonzero(batch.response_mask[sample])
        pick = lambda column: torch.tensor(column[sample, counted])  # noqa: B023, E731
        log_probs, entropy = (x[counted] for x in torch_log_probs(model, batch, sample))
        advantage = pick(batch.advantages)
        ratio = torch.exp(log_probs - pick(batch.old_log_probs))
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantage < 0, torch.minimum(loss, -advantage * 3.0), loss) * pick(batch.importance_weights)
        away = pick(batch.ref_log_probs) - log_probs
        sums["pg_loss"] += loss.sum() / total
        sums["entropy"] += entropy.sum() / total
        sums["kl_loss"] += (torch.exp(away) - away - 1).clamp(-10, 10).sum() / total
        sums["ppo_kl"] += (pick(batch.old_log_probs) - log_probs).sum()
    kl, entropy = actor.kl_loss_coef * sums["kl_loss"], actor.entropy_coeff * sums["entropy"]
    return sums["pg_loss"] + kl - entropy, {name: float(value.detach()) for name, value in sums.items()}


@pytest.fixture(scope="module")
def batch():
    return make_batch()


@pytest.fixture
def expected(torch_model, batch):
    loss, sums = torch_loss(torch_model, batch, make_config(**EVERYTHING).actor)
    loss.backward()
    return torch_model, sums


SPLITS = [
    {"ppo_max_token_len_per_gpu": 512, "log_prob_chunk_size": 1000},
    {"ppo_max_token_len_per_gpu": 18, "log_prob_chunk_size": 7},
    {"ppo_max_token_len_per_gpu": 18, "prefix_sharing": "false"},
    {"ppo_micro_batch_size_per_gpu": 2},
]


@pytest.mark.parametrize("remat", ["none", "full", "dots"])
@pytest.mark.parametrize("settings", SPLITS, ids=str)
def test_gradient_equals_torch_for_any_packing(tiny_model, batch, expected, settings, remat, monkeypatch):
    config = make_config(**EVERYTHING, **settings)
    monkeypatch.setattr(setup, "_remat", lambda enabled, mesh: remat)  # it would be the device's
    trainer = make_trainer(tiny_model, config)
    assert trainer.programs.remat == remat
    grads, sums, packing = gradient(trainer, batch)
    model, expected_sums = expected
    assert_close(grads, torch_gradients(model, trainer.model))
    for name, value in expected_sums.items():
        assert sums[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    if "ppo_max_token_len_per_gpu" in settings:
        assert packing.steps[0].tokens.size <= settings["ppo_max_token_len_per_gpu"]
    if "ppo_micro_batch_size_per_gpu" in settings:
        assert all(len(np.unique(step.sample[step.sample >= 0])) <= 2 for step in packing.steps)


def test_log_probs_equal_transformers(tiny_model, torch_model, batch):
    trainer = make_trainer(tiny_model)
    ours = trainer.log_probs(batch)
    with torch.no_grad():
        theirs = np.stack([torch_log_probs(torch_model, batch, i)[0].numpy() for i in range(len(batch.group))])
    np.testing.assert_allclose(ours, np.where(batch.response_mask > 0, theirs, 0), rtol=1e-5, atol=1e-5)


def test_sums_of_squared_probabilities_equal_transformers(tiny_model, torch_model, batch):
    trainer = make_trainer(tiny_model)
    ours = trainer.sum_pi_squared(batch, trainer.log_probs(batch))
    np.testing.assert_array_equal(trainer.sum_pi_squared(batch, None), ours)
    for sample in range(len(batch.group)):
        prompt, response = list(batch.prompts[batch.group[sample]].token_ids), batch.response_ids[sample].tolist()
        with torch.no_grad():
            logits = torch_model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
        squares = torch.softmax(logits / TEMPERATURE, -1).square().sum(-1).numpy()
        np.testing.assert_allclose(ours[sample], np.where(batch.response_mask[sample] > 0, squares, 0), rtol=1e-4)

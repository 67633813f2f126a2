"""Rollout correction in whole updates: rollout weights one, then four versions old, against the formula and torch."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from test_policy_gradient import gradient
from torch_oracle import torch_gradients, torch_log_probs
from training_cases import assert_close, make_batch, make_config, make_trainer
from training_cases import copy as copy_of

from jaxrl_ppo.models.pretrained import save_pretrained
from jaxrl_ppo.pipeline.estimation import Estimation
from jaxrl_ppo.schema.config import AlgorithmConfig, Config
from jaxrl_ppo.weights.export import export_buckets

LOW, HIGH, DUAL = 0.2, 0.2, 3.0
BYPASS = {"bypass_mode": True}
# What the section may say, and how far the policy may be from the rollout's without a difference.
OPTIONS = {
    "none": {},
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.1},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 1.2},
    "band": {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1"},
    "normalised": {"rollout_is": "token", "rollout_is_threshold": 1.1, "rollout_is_batch_normalize": True},
    "rejection": {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.8_1.25,0.1"},
    "bypass": BYPASS,
    "bypass, token": BYPASS | {"rollout_is": "token", "rollout_is_threshold": 1.1},
    "bypass, rejection": BYPASS | {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"},
    "bypass, reinforce": BYPASS | {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_is_threshold": 1.2},
}


@pytest.fixture(scope="module")
def stale(tiny_model, tmp_path_factory):
    """By how many versions lie between: a batch, the newer weights in transformers, and as parameters."""
    trainer = make_trainer(tiny_model, make_config(ppo_max_token_len_per_gpu=512, optim__lr=2e-3))
    batch = make_batch(holes=False)
    batch.importance_weights = batch.old_log_probs = None
    batch.rollout_log_probs = trainer.log_probs(batch)
    found = {}
    for version in range(1, 5):
        other = make_batch(seed=version, holes=False)
        other.importance_weights = None
        other.old_log_probs = trainer.log_probs(other)
        trainer.update(other)
        if version in (1, 4):
            folder = tmp_path_factory.mktemp("stale") / str(version)
            save_pretrained(folder, export_buckets(trainer.model, trainer.params, np.float32, 1 << 30), tiny_model)
            newer = copy.copy(batch)
            newer.old_log_probs = trainer.log_probs(batch)
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            found[version] = newer, model, copy_of(trainer.params)
    return found


@pytest.fixture(scope="module")
def trainers(tiny_model):
    """A trainer by settings of rollout correction; those that only the host reads share one, and its programs."""
    made = {}

    def find(algorithm):
        correction = algorithm.rollout_correction
        key = repr(correction) if correction.bypass_mode else ""
        if key not in made:
            config = make_config(ppo_max_token_len_per_gpu=512, calculate_entropy=True)  # no sample is left out
            made[key] = make_trainer(tiny_model, config, algorithm=algorithm)
        return made[key]

    return find


def coefficients(batch, log_probs, options):
    """How much each token's log-prob counts in the loss's gradient, float64 [B, T]: the options as they are written."""
    mask = batch.response_mask > 0
    advantages = np.where(mask, batch.advantages, 0).astype(np.float64)
    log_ratio = np.where(mask, log_probs - batch.rollout_log_probs, 0).astype(np.float64)
    ratio = np.exp(log_ratio)
    weights, kept = np.ones(mask.shape), mask.copy()
    if level := options.get("rollout_is"):
        weights = ratio if level == "token" else np.exp(log_ratio.sum(axis=1, keepdims=True)) * np.ones(mask.shape)
        *low, high = (float(part) for part in str(options["rollout_is_threshold"]).split("_"))
        inside = (weights >= low[0]) & (weights <= high) if low else True
        weights = np.where(inside, weights, 0) if low else np.minimum(weights, high)
        if options.get("rollout_is_batch_normalize"):
            weights = weights / weights[mask].mean()
    for rule, bound in zip(
        options.get("rollout_rs", "").split(","), options.get("rollout_rs_threshold", "").split(","), strict=True
    ):
        if rule == "token_k1":
            low, high = (float(part) for part in bound.split("_"))
            kept &= (1 / ratio >= low) & (1 / ratio <= high)  # k1 is the log of rollout to trainer
        elif rule == "seq_max_k3":
            divergence = np.where(mask, ratio - 1 - log_ratio, 0)
            kept &= (divergence.max(axis=1) <= float(bound))[:, None]
    to_rollout = options.get("bypass_mode") and "rollout_is" not in options
    if to_rollout:  # PPO's own ratio is then to the rollout's policy, clipped
        rising = (advantages > 0) & (ratio > 1 + HIGH)
        falling = (advantages < 0) & ((ratio < 1 - LOW) | (ratio > DUAL))
        weights = ratio * ~(rising | falling)
    return -advantages * weights * kept / kept.sum()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_changes_the_update_as_written(stale, trainers, options):
    config = Config(algorithm=AlgorithmConfig(adv_estimator="grpo"))
    for name, value in options.items():
        setattr(config.algorithm.rollout_correction, name, value)
    changed = {}
    for version, (clean, model, params) in stale.items():
        batch = copy.copy(clean)
        log_probs = batch.old_log_probs
        if options.get("bypass_mode"):
            batch.old_log_probs = batch.rollout_log_probs
        else:
            Estimation(config)._correct(batch)
        trainer = trainers(config.algorithm)
        trainer.params = params
        grads, _, _ = gradient(trainer, batch)

        factors = coefficients(batch, log_probs, options)
        model.zero_grad()
        for sample in range(len(batch.group)):
            counted = np.flatnonzero(batch.response_mask[sample])
            log_prob = torch_log_probs(model, batch, sample)[0][counted]
            (log_prob * torch.tensor(factors[sample, counted])).sum().backward()
        assert_close(grads, torch_gradients(model, trainer.model), 1e-4)
        naive = coefficients(batch, log_probs, {})
        changed[version] = np.abs(factors - naive).sum() / np.abs(naive).sum()
    if options:
        assert 1e-4 < changed[1] < changed[4]  # the older the rollout's weights, the more there is to correct

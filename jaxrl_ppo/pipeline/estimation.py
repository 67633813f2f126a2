"""From rewards and log-probs to advantages: KL in the reward, rollout correction, the estimator. On the controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_ppo.algorithms.advantages import advantage_function, find_advantage
from jaxrl_ppo.algorithms.advantages.inputs import AdvantageInputs
from jaxrl_ppo.algorithms.correction import correct_on_host
from jaxrl_ppo.algorithms.diagnostics import rollout_metrics, weight_metrics
from jaxrl_ppo.algorithms.kl import KlController, penalise_rewards
from jaxrl_ppo.algorithms.resampling import resample
from jaxrl_ppo.algorithms.token_rewards import place_scores
from jaxrl_ppo.algorithms.value_loss import explained_variance
from jaxrl_ppo.pipeline.batching import part_columns
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.records import Batch, Sample


class Estimation:
    """Fills a batch's `token_rewards`, `advantages` and `returns`; holds the KL controller."""

    def __init__(self, config: Config):
        """Raises UserCodeError when the configured estimator is a user's and cannot be loaded."""
        self.algorithm = config.algorithm
        self._seed = config.actor_rollout_ref.actor.data_loader_seed
        self._estimator = find_advantage(config.algorithm.adv_estimator)
        self._advantage = advantage_function(self._estimator, config.algorithm)
        self._controller = KlController(config.algorithm.kl_ctrl)
        self.needs_reference = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss

    def needs(self, name: str) -> bool:
        """Whether the estimator needs the field `name` of AdvantageInputs."""
        return name in self._estimator.needs

    def estimate(self, batch: Batch, samples: Sequence[Sample]) -> dict[str, float]:
        """Compute the batch's advantages; `samples` are its rows.

        Needs its scores, old log-probs and, with a KL term, reference log-probs; and what the estimator asks for.
        """
        metrics: dict[str, float] = {}
        mask = batch.response_mask
        rewards = place_scores(batch.scores, mask)
        assert batch.old_log_probs is not None
        if self.algorithm.use_kl_in_reward:
            assert batch.ref_log_probs is not None
            coefficient = self._controller.coefficient
            rewards, kl = penalise_rewards(
                rewards, batch.old_log_probs, batch.ref_log_probs, mask, coefficient, self.algorithm.kl_penalty
            )
            self._controller.update(kl, len(mask))
            metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": coefficient}
        batch.token_rewards = np.asarray(rewards, np.float32)
        batch.advantages, batch.returns = self._advantage(
            AdvantageInputs(
                token_rewards=batch.token_rewards,
                mask=mask,
                group=batch.group,
                values=batch.values,
                greedy_scores=batch.greedy_scores,
                old_log_probs=batch.old_log_probs,
                sum_pi_squared=batch.sum_pi_squared,
                **self._reward_parts(samples),
            )
        )
        if batch.values is not None:
            metrics["critic/vf_explained_var"] = explained_variance(batch.values, batch.returns, mask)
        if not self.algorithm.rollout_correction.bypass_mode:
            metrics |= self._correct(batch)
        return metrics

    def to_learn_from(self, batch: Batch, step: int) -> Batch:
        """The batch that models are updated with: the one given, or, under PF-PPO, its samples drawn anew.

        The same draw for the same step, a resumed one's included.
        """
        if not self.algorithm.use_pf_ppo:
            return batch
        settings = self.algorithm.pf_ppo
        rng = np.random.default_rng((self._seed, step))
        rows = resample(batch.scores, settings.reweight_method, settings.weight_pow, rng)
        columns = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        drawn = {name: column[rows] for name, column in columns.items() if isinstance(column, np.ndarray)}
        return dataclasses.replace(batch, **drawn)

    def _reward_parts(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        names, weights = self.algorithm.gdpo_reward_keys, self.algorithm.gdpo_reward_weights
        if not (self.needs("reward_parts") and names):
            return {}
        weights = weights or [1.0] * len(names)
        return {"reward_parts": part_columns(samples, names), "reward_weights": np.asarray(weights, np.float32)}

    def _correct(self, batch: Batch) -> dict[str, float]:
        """Rollout correction on the host: what the trainer's old log-probs say of the engine's. Fills its columns."""
        assert batch.old_log_probs is not None
        mask, settings = batch.response_mask, self.algorithm.rollout_correction
        metrics = rollout_metrics(batch.old_log_probs, batch.rollout_log_probs, mask)
        if settings.rollout_is is None and settings.rollout_rs is None:
            return metrics
        correction = correct_on_host(batch.old_log_probs, batch.rollout_log_probs, mask, settings)
        batch.kept_mask, batch.importance_weights = correction.mask, correction.importance_weights
        tokens = max(float(mask.sum()), 1.0)
        metrics |= {name: float((values * mask).sum()) / tokens for name, values in correction.metrics.items()}
        if correction.importance_weights is not None:
            metrics |= weight_metrics(correction.importance_weights, mask)
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return self._controller.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._controller.restore(state)

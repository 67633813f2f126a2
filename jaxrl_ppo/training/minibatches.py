"""On the host, before anything is compiled: which samples make an optimizer step, with which weights and columns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_ppo.algorithms.aggregation import token_weights

if TYPE_CHECKING:
    from jaxrl_ppo.algorithms.registry import PolicyLoss
    from jaxrl_ppo.schema.config import ActorConfig
    from jaxrl_ppo.schema.records import Batch

# Losses that are 0, and have no gradient, on a sample whose advantages are all 0.
LOSSES_OF_ADVANTAGE = frozenset(
    {"vanilla", "gspo", "sapo", "cispo", "gpg", "geo_mean", "clip_cov", "dppo_tv", "dppo_kl"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class MiniBatch:
    """The samples of one optimizer step. `samples` index the batch; columns are [B, T] over the whole batch.

    `computed` are the samples that the step needs to compute: the others add nothing to loss or gradient. `tokens` and
    `computed_tokens` count the mask's tokens of either.
    """

    samples: np.ndarray
    computed: np.ndarray
    columns: dict[str, np.ndarray]
    tokens: int
    computed_tokens: int


def optimizer_steps(
    batch: Batch, seed: tuple[int, ...], *, epochs: int, prompts_per_step: int, shuffle: bool
) -> Iterator[tuple[np.ndarray, int]]:
    """For each optimizer step of a batch: its sample indices and a seed of its own, in order.

    Each of `epochs` passes cuts the batch's prompts into pieces of `prompts_per_step`, shuffled first if `shuffle` is
    on; the last piece may be smaller. A pure function of its arguments.
    """
    prompts = np.arange(len(batch.prompts))
    for epoch in range(epochs):
        order = np.random.default_rng((*seed, epoch)).permutation(prompts) if shuffle else prompts
        for start in range(0, len(order), prompts_per_step):
            chosen = order[start : start + prompts_per_step]
            step_seed = np.random.SeedSequence((*seed, epoch, start)).generate_state(1)[0]
            yield np.flatnonzero(np.isin(batch.group, chosen)), int(step_seed)


def make_mini_batch(
    batch: Batch,
    samples: np.ndarray,
    actor: ActorConfig,
    loss: PolicyLoss,
    *,
    response_length: int,
    seed: int,
    rejecting: bool = False,
) -> MiniBatch:
    """Weights and columns of one optimizer step on `samples`.

    Weights follow `loss_agg_mode` (or the loss's own aggregation) over all of `samples`, so that neither packing nor
    what is left uncomputed can change a divisor. With `rejecting`, the loss decides what leaves the divisor, and needs
    all samples for that. Raises ValueError when a column that the settings need is missing.
    """
    mask = batch.response_mask[samples]
    columns = {"advantages": _needed(batch, "advantages")}
    for name in ("old_log_probs", "importance_weights", "rollout_log_probs"):
        column = getattr(batch, name)
        if column is not None:
            columns[name] = column
    if actor.use_kl_loss:
        columns["ref_log_probs"] = _needed(batch, "ref_log_probs")
    mode = loss.aggregation or actor.loss_agg_mode
    scale = actor.loss_scale_factor or response_length
    weights = columns["weights"] = np.zeros(batch.response_mask.shape, np.float32)
    kept = mask if batch.kept_mask is None else batch.kept_mask[samples]
    weights[samples] = token_weights(mode, kept, scale, response_mask=mask)
    columns["mask"] = batch.response_mask if batch.kept_mask is None else batch.kept_mask
    if loss.select is not None:
        old, advantages = _needed(batch, "old_log_probs")[samples], columns["advantages"][samples]
        selected = columns["selected"] = np.zeros(batch.response_mask.shape, np.float32)
        selected[samples] = loss.select(old, advantages, mask, actor, seed)
    computed = samples if rejecting or _touches_all(actor, loss) else samples[_has_signal(columns, mask, samples)]
    tokens = np.sum(batch.response_mask > 0, axis=1)
    return MiniBatch(samples, computed, columns, int(tokens[samples].sum()), int(tokens[computed].sum()))


def make_value_mini_batch(batch: Batch, samples: np.ndarray, mode: str, loss_scale_factor: float) -> MiniBatch:
    """Weights and columns of one of the critic's optimizer steps on `samples`; all of them are computed.

    Weights follow `mode` (critic.loss_agg_mode) over what rollout correction has kept, as the policy's do. Raises
    ValueError when the batch has no values or returns.
    """
    mask = batch.response_mask[samples]
    kept = batch.response_mask if batch.kept_mask is None else batch.kept_mask
    weights = np.zeros(batch.response_mask.shape, np.float32)
    weights[samples] = token_weights(mode, kept[samples], loss_scale_factor, response_mask=mask)
    columns = {name: _needed(batch, name) for name in ("values", "returns")} | {"weights": weights, "mask": kept}
    tokens = int(np.sum(mask > 0))
    return MiniBatch(samples, samples, columns, tokens, tokens)


def _needed(batch: Batch, name: str) -> np.ndarray:
    column = getattr(batch, name)
    if column is None:
        raise ValueError(f"the update needs the batch's {name}, which nothing has computed")
    return column


def _touches_all(actor: ActorConfig, loss: PolicyLoss) -> bool:
    """Whether samples without advantage matter: to the loss, or to a metric that was asked for."""
    return (
        loss.name not in LOSSES_OF_ADVANTAGE or actor.use_kl_loss or actor.calculate_entropy or actor.entropy_coeff != 0
    )


def _has_signal(columns: dict[str, np.ndarray], mask: np.ndarray, samples: np.ndarray) -> np.ndarray:
    factors = [columns[name][samples] for name in ("advantages", "weights", "importance_weights") if name in columns]
    return ((np.prod(factors, axis=0) != 0) & (mask > 0)).any(axis=1)

"""Sums over an update's optimizer steps, from which its metrics come."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from jaxrl_ppo.training.minibatches import MiniBatch
    from jaxrl_ppo.training.packing import Packing


class Totals:
    """Metrics of one update of the model that `prefix` (actor, critic) names.

    Sums called in `weighted` are aggregated as the loss is: each optimizer step's is a mean already. The others are
    over tokens: all of them, or, for those in `computed` and for rollout_corr/*, those computed.
    """

    def __init__(self, prefix: str, weighted: Collection[str], computed: Collection[str] = ()):
        self.prefix, self.weighted, self.computed = prefix, weighted, computed
        self.skipped = self.applied = 0
        self.tokens = self.computed_tokens = self.used = self.slots = 0
        self.norm = 0.0
        self.sums: dict[str, float] = {}

    def add(self, mini_batch: MiniBatch, packing: Packing, sums: Mapping[str, jax.Array], norm: float) -> None:
        """Count one optimizer step; one that was skipped, its norm not finite, counts as skipped only."""
        self.used += packing.used
        self.slots += packing.slots
        if not math.isfinite(norm):
            self.skipped += 1
            return
        self.applied += 1
        self.norm += norm
        self.tokens += mini_batch.tokens
        self.computed_tokens += mini_batch.computed_tokens
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def metrics(self) -> dict[str, float]:
        """The update's metrics; a name with a slash in it keeps it, the others get the prefix."""
        out = {
            f"{self.prefix}/skipped_updates": float(self.skipped),
            f"{self.prefix}/padding_waste": 1 - self.used / self.slots if self.slots else 0.0,
        }
        if self.applied:
            out[f"{self.prefix}/grad_norm"] = self.norm / self.applied
            out[f"{self.prefix}/computed_token_ratio"] = self.computed_tokens / max(self.tokens, 1)
        for name, total in self.sums.items():
            if name in self.weighted:
                divisor = self.applied
            else:
                computed = name in self.computed or name.startswith("rollout_corr/")
                divisor = self.computed_tokens if computed else self.tokens
            out[name if "/" in name else f"{self.prefix}/{name}"] = total / max(divisor, 1)
        return out

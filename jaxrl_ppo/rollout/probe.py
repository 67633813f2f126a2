"""Does a replica run the weights it was given? Its log-probs of a fixed token sequence against the trainer's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_ppo.weights.manifest import WeightError, WeightManifest

if TYPE_CHECKING:
    from jaxrl_ppo.rollout.engine import RolloutEngine

# Mean absolute log-prob difference, in nats, that the data types explain. On a 135M model bfloat16 compute makes 0.06,
# float16 0.008 and rounding the weights to bfloat16 0.001; one transposed projection makes 0.8.
THRESHOLDS = {"float32": 0.02, "float16": 0.05, "bfloat16": 0.2}
BFLOAT16_DRIFT = 0.12  # twice what was measured: more than that is no rounding


class ProbeMismatch(WeightError):
    """A replica does not compute what the trainer computes with the weights it was given."""


def check_probe(
    *,
    replica: int,
    version: int,
    measured: np.ndarray,
    expected: np.ndarray,
    dtype: str,
    tolerance: float | None = None,
    previous: np.ndarray | None = None,
    measured_before: np.ndarray | None = None,
) -> float:
    """The mean absolute difference of `measured` and `expected`, if it is what the data types explain.

    Args:
        measured: the replica's log-probs [n] of the probe's tokens, after it loaded `version`.
        expected: the trainer's, for `version`.
        dtype: the coarser of those that trainer and replica compute in.
        tolerance: what may pass instead of what `dtype` explains.
        previous: the trainer's for the version the replica ran before.
        measured_before: the replica's from before the load; only if the weights differ.

    Raises ProbeMismatch, which tells a replica that is still on its old weights from one with wrong ones.
    """
    where = f"replica {replica}, after loading weight version {version}"
    if measured.shape != expected.shape:
        raise ProbeMismatch(f"{where}: {len(measured)} log-probs of the probe, the trainer has {len(expected)}")
    difference = distance(measured, expected)
    found = f"{where}: its log-probs of the probe differ from the trainer's by {difference:.4g} nats per token"
    if measured_before is not None and np.array_equal(measured, measured_before):
        raise ProbeMismatch(f"{found} and are exactly those from before: it is still on the old weights")
    threshold = THRESHOLDS[dtype] if tolerance is None else tolerance
    # Below a hundredth of the threshold both distances are noise.
    if previous is not None and difference > threshold / 100 and distance(measured, previous) < difference / 2:
        raise ProbeMismatch(
            f"{found}, from those of the version before by {distance(measured, previous):.4g}: it is still on the old "
            "weights"
        )
    if looks_like_rounding(difference, threshold):
        raise ProbeMismatch(
            f"{found}; {dtype} explains {threshold:g}, and this is what bfloat16 makes: one side computes in a coarser "
            "data type than it is told (actor_rollout_ref.rollout.dtype, actor_rollout_ref.actor.fsdp_config.dtype)"
        )
    if not difference <= threshold:  # also when it is no number
        raise ProbeMismatch(
            f"{found}; {dtype} explains {threshold:g}, and it is not on the old weights. "
            "Either what it loaded is not what the trainer has (a tensor exported in a wrong layout or under a wrong "
            "name), or it computes something else (rope, attention window, data type)"
        )
    return difference


class WeightProbe:
    """Checks every weight load of every replica; `verify` is made for the Router.

    Args:
        token_ids: the probe, at least two tokens; better some dozens, of the kind the model is trained on.
        dtypes: those that trainer and replicas compute in; the coarsest decides what passes.
        tolerance: what may pass instead, in nats per token.
    """

    def __init__(self, token_ids: Sequence[int], dtypes: Iterable[str], tolerance: float | None = None) -> None:
        self.token_ids = list(token_ids)
        self.tolerance = tolerance
        self.differences: dict[int, float] = {}  # of each replica, as of its last load
        self.dtype = max(dtypes, key=lambda dtype: THRESHOLDS[dtype])
        self._expected: dict[int, np.ndarray] = {}
        self._last: dict[int, tuple[RolloutEngine, WeightManifest, np.ndarray]] = {}

    def expect(self, version: int, scores: np.ndarray) -> None:
        """Note the trainer's log-probs [n] of the probe for `version`, before the version is given to a replica."""
        self._expected[version] = scores
        for old in list(self._expected)[:-2]:
            del self._expected[old]

    async def verify(self, index: int, replica: RolloutEngine, manifest: WeightManifest) -> None:
        """Score the probe on a replica that has loaded `manifest`. Raises ProbeMismatch."""
        measured = await replica.score(self.token_ids)
        before, previous = None, None
        if index in self._last and self._last[index][0] is replica:
            _, old, scores = self._last[index]
            if _checksums(old) != _checksums(manifest):
                before, previous = scores, self._expected.get(old.version)
        self.differences[index] = check_probe(
            replica=index,
            version=manifest.version,
            measured=measured,
            expected=self._expected[manifest.version],
            dtype=self.dtype,
            tolerance=self.tolerance,
            previous=previous,
            measured_before=before,
        )
        self._last[index] = (replica, manifest, measured)


def looks_like_rounding(difference: float, threshold: float) -> bool:
    """Whether a difference in nats per token is too much, but no more than bfloat16 computation makes."""
    return threshold < difference <= BFLOAT16_DRIFT


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean absolute difference of two arrays."""
    return float(np.mean(np.abs(one.astype(np.float64) - other.astype(np.float64))))


def _checksums(manifest: WeightManifest) -> dict[str, int]:
    return {name: record.checksum for name, record in manifest.tensors.items()}

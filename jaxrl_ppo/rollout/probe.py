"""After each weight load: does the replica run the trainer's weights? A comparison of log-probs on a probe prompt."""

from __future__ import annotations

import numpy as np

from jaxrl_ppo.weights.manifest import WeightError

# Largest difference of a probe token's log-prob that the replica's dtype and kernels explain.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.1}


def check_probe(
    *,
    replica: int,
    version: int,
    measured: np.ndarray,
    expected: np.ndarray,
    previous: np.ndarray | None,
    dtype: str,
) -> float:
    """The largest difference between the replica's and the trainer's log-probs [n] on the probe.

    `previous` are the trainer's under the weights before. Raises WeightError when it is more than `dtype` explains,
    saying whether the replica seems to run the previous weights still.
    """
    difference = float(np.max(np.abs(measured - expected)))
    if np.isfinite(difference) and difference <= TOLERANCE[dtype]:
        return difference
    stale = previous is not None and float(np.max(np.abs(measured - previous))) <= TOLERANCE[dtype]
    raise WeightError(
        f"rollout replica {replica} does not run weight version {version}: its log-probs on the probe prompt differ "
        f"from the trainer's by up to {difference:.3g} (at most {TOLERANCE[dtype]} for {dtype}). "
        + ("It still runs the weights before." if stale else "Its weights, or how it computes with them, are others.")
    )

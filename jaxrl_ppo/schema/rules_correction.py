"""The rules of `algorithm.rollout_correction`: thresholds that parse, rejection rules that exist."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault, show

PREFIX = "algorithm.rollout_correction"
REJECTION_RULES = tuple(
    f"{level}_{kl}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for kl in ("k1", "k2", "k3")
    if (level, kl) != ("seq_max", "k1")
)


def rollout_correction(config: Config) -> Iterator[Fault]:
    """Faults of the section."""
    correction = config.algorithm.rollout_correction
    threshold = f"{PREFIX}.rollout_is_threshold"
    if _band(correction.rollout_is_threshold) is None:
        text = "must be a number above 0, or a band lo_hi such as 0.5_2.0"
        yield Fault((threshold,), f"{threshold}={show(correction.rollout_is_threshold)}: {text}.")
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        key = f"{PREFIX}.rollout_is_batch_normalize"
        yield Fault((key, f"{PREFIX}.rollout_is"), f"{key}=true needs {PREFIX}.rollout_is.")
    yield from _rejection(config)
    wants = [name for name in ("rollout_is", "rollout_rs") if getattr(correction, name) is not None]
    wants += ["bypass_mode"] if correction.bypass_mode else []
    if wants and not config.actor_rollout_ref.rollout.calculate_log_probs:
        key = "actor_rollout_ref.rollout.calculate_log_probs"
        yield Fault((key,), f"{key}=false: {PREFIX}.{wants[0]} needs the engine's log-probs.")


def _rejection(config: Config) -> Iterator[Fault]:
    correction = config.algorithm.rollout_correction
    key, threshold = f"{PREFIX}.rollout_rs", f"{PREFIX}.rollout_rs_threshold"
    if correction.rollout_rs is None:
        if correction.rollout_rs_threshold is not None:
            yield Fault((threshold, key), f"{threshold} needs {key}.")
        return
    rules = [rule.strip() for rule in correction.rollout_rs.split(",")]
    for rule in rules:
        if rule not in REJECTION_RULES:
            yield Fault((key,), f"{key}={correction.rollout_rs}: {rule!r} is not one of {', '.join(REJECTION_RULES)}.")
    if correction.rollout_rs_threshold is None:
        yield Fault((threshold,), f"{key}={correction.rollout_rs} needs {threshold}.")
        return
    bounds = [bound.strip() for bound in str(correction.rollout_rs_threshold).split(",")]
    if len(bounds) not in (1, len(rules)):
        text = f"has {len(bounds)} bounds for {len(rules)} rules"
        yield Fault((threshold, key), f"{threshold}={correction.rollout_rs_threshold} {text}.")
    for bound in bounds:
        if _band(bound) is None:
            yield Fault((threshold,), f"{threshold}: {bound!r} must be a number above 0, or a band lo_hi.")


def _band(text: float | str) -> tuple[float, float] | None:
    """(low, high) of a threshold: a number bounds from above, lo_hi from both sides. None when it is neither."""
    parts = str(text).split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        return None
    low, high = (0.0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[-1])
    return (low, high) if len(numbers) <= 2 and 0 <= low < high else None

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


# Policy losses whose ratio is to the rollout policy already.
TO_ROLLOUT_POLICY = ("dppo_tv", "dppo_kl")


def rollout_correction(config: Config) -> Iterator[Fault]:
    """Faults of the section: values that are not allowed, options that could have no effect."""
    correction = config.algorithm.rollout_correction
    weights, threshold = f"{PREFIX}.rollout_is", f"{PREFIX}.rollout_is_threshold"
    bounds = _numbers(str(correction.rollout_is_threshold))
    if not (len(bounds) == 1 and bounds[0] > 0) and not (len(bounds) == 2 and 0 <= bounds[0] < bounds[1]):
        text = "must be a number above 0, or a band lo_hi such as 0.5_5.0"
        yield Fault((threshold,), f"{threshold}={show(correction.rollout_is_threshold)}: {text}.")
    normalise = f"{PREFIX}.rollout_is_batch_normalize"
    if correction.rollout_is_batch_normalize and correction.rollout_is is None:
        yield Fault((normalise, weights), f"{normalise}=true needs {weights}.")
    if correction.rollout_is_batch_normalize and correction.bypass_mode:
        keys = (normalise, f"{PREFIX}.bypass_mode")
        yield Fault(keys, f"{normalise}=true needs {keys[1]}=false: it takes a forward pass over the whole batch.")
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if correction.rollout_is is not None and mode in TO_ROLLOUT_POLICY:
        text = "whose ratio is to the rollout policy already"
        yield Fault((weights, loss), f"{weights}={correction.rollout_is} must be null with {loss}={mode}, {text}.")
    loss_type = f"{PREFIX}.loss_type"
    if correction.loss_type == "reinforce":
        if not correction.bypass_mode:
            yield Fault((loss_type, f"{PREFIX}.bypass_mode"), f"{loss_type}=reinforce needs {PREFIX}.bypass_mode=true.")
        if mode != "vanilla":
            text = f"{loss_type}=reinforce takes the place of {loss}={mode}; leave one of them at its default"
            yield Fault((loss_type, loss), f"{text}.")
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
    texts = [text.strip() for text in str(correction.rollout_rs_threshold).split(",")]
    if len(texts) not in (1, len(rules)):
        text = f"has {len(texts)} bounds for {len(rules)} rules"
        yield Fault((threshold, key), f"{threshold}={correction.rollout_rs_threshold} {text}.")
        return
    for rule, bound in zip(rules, texts * len(rules) if len(texts) == 1 else texts, strict=True):
        numbers = _numbers(bound)
        if rule.endswith("k1"):  # its bounds are of the probability ratio
            fits = (len(numbers) == 1 and numbers[0] > 1) or (len(numbers) == 2 and 0 < numbers[0] < numbers[1])
            allowed = "a number above 1, or a band lo_hi"
        else:
            fits, allowed = len(numbers) == 1 and numbers[0] > 0, "one number above 0"
        if not fits:
            yield Fault((threshold,), f"{threshold} for {rule} is {bound}: must be {allowed}.")


def _numbers(text: str) -> list[float]:
    """The numbers of `1.5` or `0.5_2.0`; none when a part is no number."""
    try:
        return [float(part) for part in text.split("_")]
    except ValueError:
        return []

"""Before the first step: do engine and trainer give what the engine sampled the same log-probs? If not, what is off."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_ppo.rollout.engine import Completion, SamplingParams
from jaxrl_ppo.rollout.probe import THRESHOLDS, distance, looks_like_rounding

if TYPE_CHECKING:
    from jaxrl_ppo.schema.records import Prompt

NEW_TOKENS = 16  # of each response
TOLERANCE_KEY = "actor_rollout_ref.rollout.log_prob_tolerance"


@dataclasses.dataclass(frozen=True, slots=True)
class Contract:
    """What is compared, and how closely.

    `prompts` are answered by the engine; `end_ids` are the model's end tokens; `dtype` is the coarser of those that
    engine and trainer compute in; `tolerance`, in nats per token, replaces what that explains.
    """

    prompts: list[Prompt]
    end_ids: tuple[int, ...]
    dtype: str
    tolerance: float | None


class ContractMismatch(RuntimeError):
    """The engine's log-probs are not those that training would take them for."""


def check_completions(completions: Sequence[Completion], sampling: SamplingParams, end_ids: Sequence[int]) -> None:
    """Raise ContractMismatch unless each response ends with a sampled end token, or at its full length without one."""
    for completion in completions:
        where = f"request {completion.request_id} ended with finish_reason={completion.finish_reason!r}"
        length, last = len(completion.token_ids), int(completion.token_ids[-1]) if len(completion.token_ids) else None
        if not length == len(completion.log_probs) == len(completion.versions):
            raise ContractMismatch(
                f"{where}: {length} tokens, {len(completion.log_probs)} log-probs, {len(completion.versions)} versions"
            )
        if completion.finish_reason == "length" and length != sampling.max_new_tokens:
            raise ContractMismatch(f"{where} after {length} tokens of {sampling.max_new_tokens}")
        if completion.finish_reason == "stop" and last not in end_ids:
            raise ContractMismatch(
                f"{where}, and its last token is {last}, none of the model's end tokens {sorted(end_ids)}: the end "
                "token that was sampled is missing from the response, or the engine stops at other tokens"
            )


def check_log_probs(
    measured: np.ndarray,
    expected: np.ndarray,
    *,
    at_one: np.ndarray,
    temperature: float,
    contract: Contract,
) -> float:
    """The mean absolute difference of the engine's and the trainer's log-probs, if it is what may pass.

    Args:
        measured: the engine's log-probs [n] of the tokens that it sampled at `temperature`, without truncation.
        expected: the trainer's of the same tokens, at the same temperature.
        at_one: the trainer's at temperature 1.

    Raises ContractMismatch, which says what is off as far as the numbers tell.
    """
    dtype = contract.dtype
    limit = THRESHOLDS[dtype] if contract.tolerance is None else contract.tolerance
    difference = distance(measured, expected)
    if difference <= limit:
        return difference
    found = (
        f"before the first step the engine's log-probs of its own {len(measured)} tokens differ from the trainer's by "
        f"{difference:.4g} nats per token, and {limit:g} may pass ({TOLERANCE_KEY})"
    )
    if temperature != 1 and (plain := distance(measured, at_one)) < difference / 2:
        raise ContractMismatch(
            f"{found}. TEMPERATURE is off: they are those of temperature 1 (within {plain:.4g}), and "
            f"actor_rollout_ref.rollout.temperature={temperature:g}. The engine does not apply the temperature, or "
            "reports log-probs from before it (vLLM: logprobs_mode must be processed_logprobs)"
        )
    if looks_like_rounding(difference, limit):
        raise ContractMismatch(
            f"{found}. DATA TYPE is off: that is what computing in bfloat16 makes, and both are told to compute in "
            f"{dtype}. Give actor_rollout_ref.rollout.dtype and actor_rollout_ref.actor.fsdp_config.dtype what the "
            "machine really does"
        )
    raise ContractMismatch(
        f"{found}. Neither temperature nor data type explains it, and the weights passed their probe: what the engine "
        "computes while it GENERATES is off (positions, attention window, cached keys and values), or it samples "
        "otherwise than it is told (top-k, top-p, penalties from the model folder's generation_config.json)"
    )

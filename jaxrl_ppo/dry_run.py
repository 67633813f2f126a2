"""What a start looks at beyond the configuration: data rows, the run folder; in a dry run users' code as well."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

from jaxrl_ppo.first_rows import TOOLS, is_faulty, look_at_rows
from jaxrl_ppo.observability.run_folder import obstacle
from jaxrl_ppo.rewards import RewardError, RewardManager
from jaxrl_ppo.rollout.tools import configured_tools
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError, Fault, named
from jaxrl_ppo.schema.rules_reward_model import judge_served
from jaxrl_ppo.user_code import UserCodeError

FOLDER = "trainer.default_local_dir"


@dataclasses.dataclass(frozen=True, slots=True)
class Looked:
    """What was looked at, a line each, and what is worth knowing."""

    lines: list[str]
    notes: list[str]


def look(
    config: Config, known: Sequence[Fault] = (), *, everything: bool = True, here: bool = True, fetch: bool = False
) -> Looked:
    """Look at what `config` names. Without `everything` not at users' code, which is what a run's start does.

    `known` are faults of the configuration: what they are about is left out, and they are told with the others. `here`
    says that the run's folder will be on this machine. `fetch` is `look_at_rows`'s. The reward function is loaded in a
    process of its own, which ends again.

    Raises ConfigError with every fault.
    """
    found = look_at_rows(config, known, fetch=fetch)
    lines, faults = found.lines, [*known, *found.faults]
    if here and not is_faulty(known, FOLDER) and (why := obstacle(folder := config.trainer.default_local_dir)):
        faults.append(Fault((FOLDER,), f"{FOLDER}={folder}: {why}."))
    if everything:
        more, further = _users_code(config, known, found.sources)
        lines, faults = lines + more, faults + further
    if faults:
        raise ConfigError(faults, config)
    return Looked(lines, found.notes)


def _users_code(config: Config, known: Sequence[Fault], sources: set[str]) -> tuple[list[str], list[Fault]]:
    lines: list[str] = []
    faults: list[Fault] = []
    try:
        if not is_faulty(known, TOOLS):
            lines += _tools(config)
    except UserCodeError as error:
        faults.append(Fault((f"{TOOLS}.tool_config_path",), str(error)))
    try:
        if not any(is_faulty(known, key) for key in ("algorithm", "actor_rollout_ref.actor")):
            lines += _own_algorithms(config)
    except ConfigError as error:
        faults += error.faults
    except UserCodeError as error:
        faults.append(Fault(("algorithm",), str(error)))
    try:
        if not any(is_faulty(known, key) for key in ("reward", "data.reward_fn_key")):
            asyncio.run(_load_rewards(config, sources))
            lines.append("reward: loaded, and it takes the arguments that it will be called with")
    except RewardError as error:
        faults.append(Fault(("reward",), named("reward", error)))
    return lines, faults


def _own_algorithms(config: Config) -> list[str]:
    own = (config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode)
    named = [spec for spec in own if ".py:" in spec]
    if not named:
        return []
    import jax  # takes a second

    from jaxrl_ppo.pipeline.algorithm_checks import check_algorithms

    jax.config.update("jax_platforms", "cpu")  # accelerators may be a run's
    check_algorithms(config)
    return [f"{spec}: tried on made-up samples" for spec in named]


def _tools(config: Config) -> Iterator[str]:
    names = [tool["function"]["name"] for tool in configured_tools(config.actor_rollout_ref.rollout.multi_turn)]
    if names:
        yield f"tools: {', '.join(names)}"


async def _load_rewards(config: Config, sources: set[str]) -> None:
    judge = config.reward.reward_model.model_path if judge_served(config) else None
    manager = RewardManager(config, cast(Any, None), judge)  # no sample is scored, so nothing is decoded
    try:
        await manager.start(sources)
    finally:
        await manager.close()

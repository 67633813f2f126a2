"""What `trainer.dry_run` looks at beyond the configuration: rows of the data files, the reward function, the tools."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, cast

from jaxrl_ppo.data.columns import OPTIONAL_COLUMNS, RowReader
from jaxrl_ppo.data.rows import DataError, FileRows
from jaxrl_ppo.rewards import RewardError, RewardManager
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError, Fault
from jaxrl_ppo.user_code import UserCodeError

ROWS = 1000  # looked at in each file


def look(config: Config) -> list[str]:
    """What was looked at, a line each. The reward function is loaded in a process of its own, which ends again.

    Raises ConfigError with every fault found.
    """
    lines: list[str] = []
    faults: list[Fault] = []
    sources: set[str] = set()
    for key, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        for file in [files] if isinstance(files, str) else files or []:
            try:
                lines.append(f"{key}: {_rows(config, key, file, sources)}")
            except DataError as error:
                text = str(error)
                faults.append(Fault((key,), text if text.startswith(key) else f"{key}: {text}"))
    try:
        lines += _tools(config)
    except UserCodeError as error:
        faults.append(Fault(("actor_rollout_ref.rollout.multi_turn.tool_config_path",), str(error)))
    try:
        lines += _own_algorithms(config)
    except ConfigError as error:
        faults += error.faults
    except UserCodeError as error:
        faults.append(Fault(("algorithm",), str(error)))
    try:
        asyncio.run(_load_rewards(config, sources))
        lines.append("reward: loaded, and it takes the arguments that it will be called with")
    except RewardError as error:
        faults.append(Fault(("reward",), f"reward: {error}"))
    if faults:
        raise ConfigError(faults)
    return lines


def _own_algorithms(config: Config) -> list[str]:
    own = (config.algorithm.adv_estimator, config.actor_rollout_ref.actor.policy_loss.loss_mode)
    named = [spec for spec in own if ".py:" in spec]
    if not named:
        return []
    from jaxrl_ppo.pipeline.algorithm_checks import check_algorithms  # JAX takes a second to import

    check_algorithms(config)
    return [f"{spec}: tried on made-up samples" for spec in named]


def _rows(config: Config, key: str, file: str, sources: set[str]) -> str:
    """Read the first rows of one file; adds their data sources."""
    if "://" in file:
        return f"{file} is not on this machine, and was not fetched"
    if config.data.custom_cls.path:
        return f"{file} is read by data.custom_cls, and was not opened"
    reader = RowReader(config.data)
    rows = FileRows(file, reader.columns, OPTIONAL_COLUMNS, key)
    if not len(rows):
        raise DataError(f"{file} has no rows")
    for index in range(min(ROWS, len(rows))):
        row, where = rows.row(index), rows.where(index)
        reader.messages(row, where)
        reader.agent(row, where)
        sources.add(reader.task(row, where)[0])
    looked = "all" if len(rows) <= ROWS else f"the first {ROWS:,}"
    return f"{file}: {looked} of {len(rows):,} rows are as they should be"


def _tools(config: Config) -> Iterator[str]:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    if multi_turn.enable and multi_turn.tool_config_path:
        from jaxrl_ppo.rollout.tools import load_tools  # transformers, which writes the schemas, takes a second

        names = [schema["function"]["name"] for schema in load_tools(multi_turn.tool_config_path)]
        yield f"tools: {', '.join(names)}"


async def _load_rewards(config: Config, sources: set[str]) -> None:
    manager = RewardManager(config, cast(Any, None))  # no sample is scored, so nothing is decoded
    try:
        await manager.start(sources)
    finally:
        await manager.close()

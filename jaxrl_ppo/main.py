"""`python -m jaxrl_ppo.main`: the Hydra entry. Checks the configuration, says what it means, and runs it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import difflib
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from device import DeviceError, auto_set_device, check_local_devices, check_shareable
from jaxrl_ppo.models.families import FAMILIES
from jaxrl_ppo.schema import sizes, table
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError, Fault
from jaxrl_ppo.schema.legacy import migrate_legacy_reward_impl
from jaxrl_ppo.schema.overrides import flaw, given_keys, normalise
from jaxrl_ppo.schema.rules import nothing_to_compare
from jaxrl_ppo.schema.rules_reward_model import judge_served
from jaxrl_ppo.schema.validate import Checked, validate_config

if TYPE_CHECKING:
    from jaxrl_ppo.dry_run import Looked

# What a verl reader looks for here, and where it is; found on first use, since a dry run does without Ray and Grain.
ELSEWHERE = {
    "TaskRunner": "jaxrl_ppo.cluster.task_runner",
    "OneStepTaskRunner": "jaxrl_ppo.cluster.task_runner",
    "AsyncTaskRunner": "jaxrl_ppo.cluster.task_runner",
    "create_resource_pool_manager": "jaxrl_ppo.cluster.roles",
    "create_role_worker_mapping": "jaxrl_ppo.cluster.roles",
    "create_rl_dataset": "jaxrl_ppo.data",
    "create_rl_sampler": "jaxrl_ppo.data",
}
__all__ = ["auto_set_device", "main", "migrate_legacy_reward_impl", "run_ppo", *ELSEWHERE]


def __getattr__(name: str) -> Any:
    if name in ELSEWHERE:
        return getattr(importlib.import_module(ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The tree lies beside the package in a checkout, an editable install and a wheel alike; by path, since a `config` of
# the user's own in the working directory would come first on the import path.
CONFIG_FOLDER = Path(__file__).resolve().parents[1] / "config"
BAD_CONFIGURATION = 2
TURNS = "actor_rollout_ref.hybrid_engine=true"
REFERENCE = re.compile(r"\$\{([\w.]+)\}")
INTERRUPTED, TERMINATED = 130, 143  # as shells say it


class PackagedConfigs(SearchPathPlugin):
    """Lets a user's own configuration, in a folder of theirs, build on ours: `defaults: [ppo_trainer, _self_]`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Look in our tree after all others."""
        search_path.append(provider="jaxrl_ppo", path=f"file://{CONFIG_FOLDER}")


def main() -> None:
    """The command. Exits 0 after a run or a dry run, 2 on a configuration that cannot be run, else 1."""
    Plugins.instance().register(PackagedConfigs)
    sys.argv[1:] = normalise(sys.argv[1:], CONFIG_FOLDER)
    check_config_name(sys.argv[1:])
    try:
        check_arguments(sys.argv[1:])
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_CONFIGURATION)
    composed = False

    def job(configuration: DictConfig) -> None:
        nonlocal composed
        composed = True
        check_and_run(configuration)

    try:
        hydra.main(config_path=str(CONFIG_FOLDER), config_name="ppo_trainer", version_base="1.3")(job)()
    except SystemExit as stop:
        if stop.code == 1 and not composed:  # Hydra could not make a configuration of the command line
            sys.exit(BAD_CONFIGURATION)
        raise


def check_config_name(arguments: Sequence[str]) -> None:
    """Exit 2, naming those that there are, for a configuration that is none; folders of a user's own are Hydra's."""
    given = dict(text.split("=", 1) for text in arguments if text.startswith("--config-") and "=" in text)
    name = given.get("--config-name", "").removesuffix(".yaml")
    if not name or given.keys() != {"--config-name"} or (CONFIG_FOLDER / f"{name}.yaml").is_file():
        return
    names = sorted(file.stem for file in CONFIG_FOLDER.glob("*.yaml"))
    near = difflib.get_close_matches(name, names, n=1)
    meant, there = f" Did you mean {near[0]}?" if near else "", ", ".join(names)
    print(f"--config-name={name}: there is no such configuration; there are {there}.{meant}", file=sys.stderr)
    sys.exit(BAD_CONFIGURATION)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ConfigError, naming each, for arguments (as `normalise` gives them) that Hydra could not read."""
    parser, faults = OverridesParser.create(), []
    for argument in arguments:
        if argument.startswith("-"):
            continue
        given, said = argument.removeprefix("++"), None
        try:
            parser.parse_override(argument)
        except HydraException as error:
            said = str(error).splitlines()[0]
        if said is not None or argument.startswith("="):
            faults.append(Fault((given.partition("=")[0],), f"{given}: {flaw(given, str(said))}"))
    if faults:
        raise ConfigError(faults)


def check_and_run(composed: DictConfig) -> None:
    """One run of the configuration that Hydra has composed."""
    signal.signal(signal.SIGTERM, stop_at_once)
    show_warnings()
    try:
        overrides: Any = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
        try:
            checked = read_config(composed, given_keys(overrides))
        except ConfigError as error:
            if error.config is not None:
                look_further(error.config, error.faults)
            raise
        print(table.render(checked.config, checked.notes, steps_known(checked.config)), flush=True)
        looked = look_further(checked.config)
        print(*(f"note: {note}" for note in looked.notes), sep="\n", end="\n" * bool(looked.notes), flush=True)
        if checked.config.trainer.dry_run:
            try:
                check_devices(checked.config)
            except DeviceError as error:  # it may be tried on another machine than it will run on
                print(f"note: a run would stop here: {error}")
            tell_what_resumes(checked.config)
            print(*looked.lines, sep="\n")
            print("dry run: nothing was started")
            return
        check_devices(checked.config)
    except (ConfigError, DeviceError) as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_CONFIGURATION)
    run_ppo(checked.config)


def show_warnings() -> None:
    """Have what the package warns of in this process look as on a run's console, without Hydra's prefix."""
    handler, logger = logging.StreamHandler(sys.stdout), logging.getLogger("jaxrl_ppo")
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logger.handlers, logger.propagate = [handler], False


def steps_known(config: Config) -> int | None:
    """The run's steps where the data files tell them; None where they do not, or cannot be read, which is told later.

    Fewer where prompts will be left out.
    """
    from jaxrl_ppo.cluster.before_ray import most_steps  # reads data with pyarrow
    from jaxrl_ppo.data.rows import DataError

    try:
        return most_steps(config)
    except DataError:
        return None


def tell_what_resumes(config: Config) -> None:
    """Print which checkpoint a run would go on from, if any; exit 2 where the run would refuse it."""
    from jaxrl_ppo.cluster.before_ray import what_resumes
    from jaxrl_ppo.data.rows import DataError
    from jaxrl_ppo.pipeline.checkpoints import CheckpointError

    try:
        told = None if joins_cluster(config) else what_resumes(config)  # a cluster may have the folder elsewhere
    except (CheckpointError, DataError) as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_CONFIGURATION)
    if told:
        print(told)


def look_further(config: Config, known: Sequence[Fault] = ()) -> Looked:
    """What can be known before anything is started, a dry run's part or a start's.

    `known` are the faults found so far. Raises ConfigError with these and all others.
    """
    from jaxrl_ppo.dry_run import look  # reads data with pyarrow; a configuration that Hydra refuses does without

    dry, here = config.trainer.dry_run, not joins_cluster(config)
    return look(config, known, everything=dry, here=here, fetch=not dry and here)


def stop_at_once(*_: object) -> None:
    """What SIGTERM does until Ray has been started."""
    print("stopped before anything was started: the same command starts again")
    sys.exit(TERMINATED)


def read_config(composed: DictConfig, given: Collection[str]) -> Checked:
    """The checked configuration of what Hydra composed; `given` are the keys set on the command line.

    Devices left at auto are looked for on this machine, unless the run joins a cluster, which then decides.
    Raises ConfigError with every fault, DeviceError for devices that JAX cannot drive.
    """
    raw, faults = resolve(composed)
    checked = validate_config(raw, given, model_types=FAMILIES, copies=copied_keys(composed), known=faults)
    if alone := nothing_to_compare(checked.config):
        checked = dataclasses.replace(checked, notes=(*checked.notes, alone))
    if joins_cluster(checked.config):
        return checked
    trainer, was = checked.config.trainer, checked.config.trainer.device
    auto_set_device(checked.config)
    if (was, trainer.device) != ("auto", "cpu") or trainer.n_gpus_per_node == 1:
        return checked
    devices = sizes.trainer_devices(checked.config)
    note = f"trainer.device=auto: {devices} virtual CPU devices: no accelerator was found here"
    return dataclasses.replace(checked, notes=(*checked.notes, note))


def resolve(composed: DictConfig) -> tuple[dict[str, Any], list[Fault]]:
    """The composed tree as plain containers, without the keys that refer to none: those have a fault each.

    Raises ConfigError for a reference that cannot be left out.
    """
    tree = copy.deepcopy(composed)
    faults: list[Fault] = []
    while True:
        try:
            raw: Any = OmegaConf.to_container(tree, resolve=True, throw_on_missing=False)
            return raw, faults
        except OmegaConfBaseException as error:
            key = str(error.full_key or "?")
            faults.append(Fault((key,), f"{key}: {str(error).splitlines()[0]}."))
            section, _, name = key.rpartition(".")
            holder = OmegaConf.select(tree, section) if section else tree
            if not isinstance(holder, DictConfig) or name not in list(holder):  # by itself, `in` follows references
                raise ConfigError(faults) from error
            with open_dict(holder):
                del holder[name]


def copied_keys(composed: DictConfig) -> dict[str, str]:
    """Each key of the composed tree that only stands for another: `data.max_prompt_length` under `rollout`, say."""
    found: dict[str, str] = {}

    def visit(tree: Any, path: str) -> None:
        if isinstance(tree, dict):
            for name, value in tree.items():
                visit(value, f"{path}.{name}" if path else str(name))
        elif isinstance(tree, str) and (match := REFERENCE.fullmatch(tree)):
            sibling = path.rpartition(".")[0] + match[1]
            found[path] = sibling if match[1].startswith(".") else match[1]

    visit(OmegaConf.to_container(composed, resolve=False), "")
    return found


def joins_cluster(config: Config) -> bool:
    """Whether the run joins a Ray cluster that is already there; else it starts one on this machine."""
    address = config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS")
    return address is not None and address != "local"


def check_devices(config: Config) -> None:
    """Whether the pools' devices are on this machine; a cluster's are checked when it is joined.

    Raises DeviceError when there are too few, or when the pools would have to share what cannot be shared.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    if sizes.takes_turns(config) and trainer.device != "auto":
        check_shareable(trainer.device, TURNS)
    if joins_cluster(config):
        return
    kinds = (trainer.device, str(rollout.device))
    needs = dict.fromkeys(kinds, 0)
    own_pools = {
        "critic's, critic.nnodes": sizes.critic_devices(config),
        "reward model's, reward.reward_model.nnodes": sizes.reward_model_devices(config),
    }
    needs[kinds[0]] += sizes.trainer_devices(config) + sizes.critic_devices(config)
    needs[kinds[judge_served(config)]] += sizes.reward_model_devices(config)
    needs[kinds[1]] += 0 if sizes.takes_turns(config) else sizes.rollout_devices(config)
    keys = "trainer.nnodes x n_gpus_per_node and, for the rollout pool, rollout.nnodes x n_gpus_per_node"
    keys += "".join(f", for the {pool} x n_gpus_per_node" for pool, devices in own_pools.items() if devices)
    check_local_devices(needs, keys, jax_kinds={trainer.device})


def run_ppo(config: Config) -> None:
    """Run a checked configuration to its end on a Ray cluster, started here or joined.

    Exits 1 when the run fails, 143 when SIGTERM ended it early, 130 when Ctrl-C did.
    """
    from jaxrl_ppo.cluster import before_ray, launch  # Ray takes a second to import; a dry run does without
    from jaxrl_ppo.pipeline.checkpoints import CheckpointError

    try:
        # A cluster that is joined may have the folder elsewhere.
        told = None if joins_cluster(config) else asyncio.run(before_ray.look_at_run_folder(config))
        if told:
            print(told)
        else:
            launch.run_ppo(config)
    except (launch.RunFailed, CheckpointError) as error:
        sys.exit(before_ray.then_what(str(error), config))
    except launch.RunStopped as stopped:
        if str(stopped):
            print(stopped)
        sys.exit(INTERRUPTED if stopped.by == signal.SIGINT else TERMINATED)
    except KeyboardInterrupt:
        print(f"stopped; {before_ray.going_on(config)}")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()

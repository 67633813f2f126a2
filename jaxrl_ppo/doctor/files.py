"""Checks of what a command line names: its configuration, model, data, trackers, engine and Ray cluster."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import hydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from device import DeviceError
from jaxrl_ppo.data.dataset import create_rl_dataset
from jaxrl_ppo.data.local import LocalCopyError, copy_to_local
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.data.tokenizer import TokenizerError, hf_tokenizer
from jaxrl_ppo.doctor.finding import Finding, looking, note, ok, problem, try_in_child
from jaxrl_ppo.main import CONFIG_FOLDER, PackagedConfigs, check_arguments, check_devices, joins_cluster, read_config
from jaxrl_ppo.models.config import ModelFolderError, load_decoder_config
from jaxrl_ppo.observability.trackers import TrackerError, check_trackers
from jaxrl_ppo.rollout.tools import configured_tools
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError, named
from jaxrl_ppo.schema.overrides import given_keys, normalise
from jaxrl_ppo.user_code import UserCodeError

RAY_SECONDS = 60.0


def configuration(name: str, overrides: Sequence[str]) -> tuple[list[Finding], Config | None]:
    """The configuration that `python -m jaxrl_ppo.main` would make of this command line, if it can be run."""
    Plugins.instance().register(PackagedConfigs)
    arguments = normalise(overrides, CONFIG_FOLDER)
    try:
        check_arguments(arguments)
        with hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
            composed = hydra.compose(name, arguments)
        checked = read_config(composed, given_keys(arguments))
    except ConfigError as error:
        return [problem(fault.message, f"change {' or '.join(fault.keys)}") for fault in error.faults], None
    except (HydraException, OmegaConfBaseException, DeviceError) as error:
        return [problem(f"the configuration: {error}", "mend the command line")], None
    changed = f"{len(overrides)} override{'s' * (len(overrides) != 1)}"
    return [ok(f"the configuration {name} with {changed} is valid")], checked.config


def check_files(config: Config) -> Iterator[Finding]:
    """Every finding about what a valid configuration names."""
    yield from model(config)
    yield from trackers(config)
    yield from devices(config)


def model(config: Config) -> Iterator[Finding]:
    """Whether the model, its tokenizer and, with it, the data can be read."""
    settings = config.actor_rollout_ref.model
    key = "actor_rollout_ref.model.path"
    looking(f"the model {settings.path} and its tokenizer")
    try:
        folder = copy_to_local(str(settings.path), key=key)
        decoder = load_decoder_config(folder)
        count = parameters(folder)
    except (LocalCopyError, ModelFolderError) as error:
        yield problem(named(key, error), "give a local Hugging Face folder or a model id that this machine can reach")
        return
    except (OSError, ValueError, struct.error) as error:
        yield problem(f"{key}={folder}: its weights cannot be read: {error}", "fetch or save the model again")
        return
    yield ok(f"the model has {count / 1e6:.0f} million parameters in {decoder.num_layers} layers ({folder})")
    try:
        tokenizer = hf_tokenizer(
            settings.tokenizer_path or folder,
            trust_remote_code=settings.trust_remote_code,
            custom_chat_template=settings.custom_chat_template,
        )
    except (LocalCopyError, TokenizerError) as error:
        yield problem(f"the tokenizer: {error}", "set actor_rollout_ref.model.tokenizer_path to a folder with one")
        return
    try:
        tools = configured_tools(config.actor_rollout_ref.rollout.multi_turn)
    except UserCodeError as error:
        yield problem(str(error), "mend the file")
        return
    for key, files, is_train in (("train", config.data.train_files, True), ("val", config.data.val_files, False)):
        if not files:
            continue
        looking(f"the rows of data.{key}_files")
        try:
            dataset = create_rl_dataset(files, config.data, tokenizer, is_train=is_train, tools=tools)
        except (DataError, LocalCopyError, UserCodeError) as error:
            yield problem(named(f"data.{key}_files", error), f"mend the file, or set data.{key}_files to another")
        else:
            length = len(dataset[0].token_ids)
            yield ok(f"data.{key}_files hold {len(dataset)} usable prompts; the first has {length} tokens")


def parameters(folder: Path) -> int:
    """Parameters in a folder's safetensors files, counted from their headers."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        total += sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    return total


def trackers(config: Config) -> Iterator[Finding]:
    """Whether the trackers of trainer.logger are installed."""
    try:
        check_trackers(config.trainer.logger)
    except TrackerError as error:
        yield problem(str(error), "install what is missing, or take it out of trainer.logger")
    else:
        yield ok(f"trainer.logger={list(config.trainer.logger)}: all there")


def devices(config: Config) -> Iterator[Finding]:
    """Whether the pools have their devices: here, or in the Ray cluster that the run would join."""
    if not joins_cluster(config):
        try:
            check_devices(config)
        except DeviceError as error:
            yield problem(str(error), "see above")
        else:
            yield ok("this machine has the devices that the pools need; Ray will be started here")
        return
    address = config.ray_kwargs.ray_init.address or os.environ["RAY_ADDRESS"]
    script = (
        "import json, sys, ray\n"
        f"ray.init({address!r}, log_to_driver=False, logging_level='error')\n"
        "print(json.dumps([{'Alive': n['Alive'], 'Resources': n['Resources']} for n in ray.nodes()]))"
    )
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    joined, said = try_in_child(
        script, environment, about=f"can the Ray cluster at {address} be joined?", seconds=RAY_SECONDS
    )
    if not joined:
        yield problem(
            f"the Ray cluster at {address} cannot be joined: {said}",
            "start it (ray start --head), give its address in ray_kwargs.ray_init.address, and use its Ray and Python "
            "versions here",
        )
        return
    yield from cluster(config, json.loads(said))


def cluster(config: Config, nodes: list[dict]) -> Iterator[Finding]:
    """Whether a Ray cluster of these nodes (as `ray.nodes()` gives them) holds the pools."""
    from device import auto_set_device
    from jaxrl_ppo.cluster.pools import PlacementError
    from jaxrl_ppo.cluster.roles import create_resource_pool_manager, create_role_worker_mapping

    resources: dict[str, float] = {}
    for node in nodes:
        if node["Alive"]:
            for name, amount in node["Resources"].items():
                resources[name] = resources.get(name, 0.0) + amount
    shown = ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU", "TPU", "NPU") if name in resources)
    yield note(f"the Ray cluster has {sum(node['Alive'] for node in nodes)} node(s): {shown}")
    auto_set_device(config, resources=resources)
    try:
        create_resource_pool_manager(config, create_role_worker_mapping(config)).check(nodes)
    except PlacementError as error:
        yield problem(str(error), "make the pool smaller or add nodes")
    else:
        yield ok("the cluster holds every pool")

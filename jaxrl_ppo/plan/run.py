"""One plan from command line to verdict: configuration, model, mesh, every program compiled, printed as it comes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import psutil
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from device import DeviceError
from device.chips import Chip, find_chip
from jaxrl_ppo.data.local import LocalCopyError, copy_to_local
from jaxrl_ppo.main import CONFIG_FOLDER, PackagedConfigs
from jaxrl_ppo.models.config import ModelFolderError, load_decoder_config
from jaxrl_ppo.models.families import FAMILIES
from jaxrl_ppo.plan import report
from jaxrl_ppo.plan.compile import measure
from jaxrl_ppo.plan.topology import INTERCONNECT, KEY, Topology
from jaxrl_ppo.plan.workload import make_workload
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError
from jaxrl_ppo.schema.overrides import given_keys, normalise
from jaxrl_ppo.schema.validate import validate_config
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.sharding.rules import ShardingError
from jaxrl_ppo.training.packing import PackingError
from jaxrl_ppo.training.setup import policy_model
from jaxrl_ppo.user_code import UserCodeError

RESERVED = 2**28  # bytes of a TPU's memory that XLA does not give to programs
DEVICES = ("trainer.nnodes", "trainer.n_gpus_per_node")


class PlanError(ValueError):
    """A command line, configuration or model that no plan can be made for."""


def plan(config_name: str, overrides: Sequence[str], topology: Topology) -> bool:
    """Print what each program of the run takes on `topology`; returns whether all of them fit.

    Raises PlanError or TopologyError.
    """
    config = _configuration(config_name, overrides, topology)
    folder = _model_folder("actor_rollout_ref.model.path", str(config.actor_rollout_ref.model.path))
    devices = topology.open()
    chip = _chip(devices[0], topology)
    needs_reference = config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
    try:
        model = policy_model(config.actor_rollout_ref.model, folder)
        critic = None
        if config.critic.enable and not config.critic.enable_resource_pool:
            path = str(config.critic.model.path or folder)
            critic = load_decoder_config(_model_folder("critic.model.path", path), "value")
        mesh = make_mesh(config.actor_rollout_ref.actor.mesh, devices)
        workload = make_workload(config, model, critic, mesh, needs_reference=needs_reference)
    except (ModelFolderError, ShardingError, PackingError, UserCodeError, ValueError) as error:
        raise PlanError(str(error)) from error
    print(report.heading(config, workload, topology, chip), flush=True)
    interconnect = INTERCONNECT.get(devices[0].device_kind)
    measured = []
    for work in workload.works:
        measured.append(measure(work, chip if topology.kind == "tpu" else None, len(devices), model.num_experts))
        print(report.program(measured[-1], chip, interconnect), flush=True)
    print(report.verdict(config, workload, measured, chip, interconnect, len(devices)), flush=True)
    return all(each.memory.peak <= chip.memory_bytes for each in measured)


def _configuration(config_name: str, overrides: Sequence[str], topology: Topology) -> Config:
    """The run's configuration, the topology being the trainer's devices; no file but the model's is looked at."""
    Plugins.instance().register(PackagedConfigs)
    arguments = normalise(overrides, CONFIG_FOLDER)
    given = given_keys(arguments)
    assumed = {"trainer.device": topology.kind}
    if not given.intersection(DEVICES):
        assumed |= {"trainer.nnodes": "1", "trainer.n_gpus_per_node": str(topology.devices)}
    if "data.train_files" not in given:
        assumed["data.train_files"] = "[not-read.parquet]"
    try:
        with hydra.initialize_config_dir(str(CONFIG_FOLDER), version_base="1.3"):
            composed = hydra.compose(config_name, [*arguments, *(f"++{key}={text}" for key, text in assumed.items())])
        raw: Any = OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
        config = validate_config(raw, given, model_types=FAMILIES, files=False).config
    except (ConfigError, HydraException, OmegaConfBaseException, DeviceError) as error:
        raise PlanError(str(error)) from error
    here = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if here != topology.devices:
        raise PlanError(
            f"{' x '.join(DEVICES)} = {here} devices, and {KEY}={topology.name} has {topology.devices}: make them "
            "equal, or leave the former out"
        )
    return config


def _model_folder(key: str, path: str) -> Path:
    """A folder with the model's config.json; of a hub id, that file alone is fetched."""
    try:
        return copy_to_local(path, key=key, hub_files=["config.json"])
    except LocalCopyError as error:
        raise PlanError(str(error)) from error


def _chip(first: Any, topology: Topology) -> Chip:
    """Peaks of one device; a virtual CPU device has a share of this machine's memory and no peak worth the name."""
    if topology.kind == "cpu":
        return Chip(f"CPU device of {os.cpu_count()} cores", float("inf"), float("inf"), _host_memory(topology.devices))
    name = first.device_kind if first.device_kind.lower().startswith("tpu") else f"TPU {first.device_kind}"
    chip = find_chip(name)
    if chip is None:
        raise PlanError(f"{KEY}={topology.name}: nothing is known about the chip {first.device_kind!r}")
    return dataclasses.replace(chip, memory_bytes=chip.memory_bytes - RESERVED)


def _host_memory(devices: int) -> float:
    return psutil.virtual_memory().total / devices

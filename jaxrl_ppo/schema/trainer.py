"""Keys of `trainer` and `ray_kwargs`: the run, its devices and its outputs."""

# ruff: noqa: RUF009 - key() and section() return dataclass fields, not shared values
from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_ppo.schema.keys import key, section
from jaxrl_ppo.schema.rollout import DEVICES

TRACKERS = ("console", "tensorboard", "wandb", "mlflow", "trackio")


@dataclasses.dataclass(kw_only=True, slots=True)
class DeadlinesConfig:
    """`trainer.deadlines`: how many seconds each kind of wait may take before the run stops and says why."""

    start_s: float = key(1800.0, "Ray starts or is joined; a process starts and reads its model.", gt=0)
    generation_s: float = key(7200.0, "A batch is generated.", gt=0)
    update_s: float = key(7200.0, "A batch's log-probs, or its update, are computed.", gt=0)
    scoring_s: float = key(1800.0, "The reward model scores a batch of responses.", gt=0)
    weights_s: float = key(900.0, "New weights reach every replica.", gt=0)
    checkpoint_s: float = key(3600.0, "A checkpoint is written or read.", gt=0)


@dataclasses.dataclass(kw_only=True, slots=True)
class TrainerConfig:
    """`trainer`: how long, how often, where, on what."""

    mode: str = key(
        "sync",
        "Pipeline: generate and train in turn, overlapped by one batch, or all the time.",
        choices=("sync", "one_step_off", "async"),
    )
    total_epochs: int = key(30, "Passes over the training rows.", ge=1)
    total_training_steps: int | None = key(None, "Steps; null: as many as total_epochs make.", ge=1)
    project_name: str = key("jaxrl_ppo", "Project, for trackers and the default folder.")
    experiment_name: str = key("default", "Name of the run, likewise.")
    logger: list[str] = key(["console"], "Where metrics go.", choices=TRACKERS)
    log_val_generations: int = key(0, "Validation answers shown to the trackers.", ge=0)
    rollout_data_dir: str | None = key(None, "Folder for every training sample, as jsonl.")
    validation_data_dir: str | None = key(None, "Folder for every validation sample, as jsonl.")
    nnodes: int = key(1, "Trainer nodes.", ge=1)
    n_gpus_per_node: int = key(8, "Trainer devices per node, of whatever kind.", ge=1)
    device: str = key("auto", "Kind of the trainer's devices; auto looks at the machine.", choices=DEVICES)
    node_resource: str | None = key(
        None, "A Ray resource that only the trainer's nodes have, e.g. the name of their TPU slice."
    )
    cpu_affinity: list[int] | None = key(None, "CPU cores of the trainer processes; null: no pinning.", ge=0)
    save_freq: int = key(
        -1, "Steps between checkpoints; -1: none but when SIGTERM ends the run.", ge=1, or_minus_one=True
    )
    test_freq: int = key(-1, "Steps between validations; -1: none between.", ge=1, or_minus_one=True)
    val_before_train: bool = key(True, "Validate before the first step.")
    val_only: bool = key(False, "Validate and stop; what it finds is in the run folder's val_only/.")
    resume_mode: str = key(
        "auto",
        "Go on after the newest checkpoint, start anew, or go on from resume_from_path.",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(None, "A global_step_N folder.")
    critic_warmup: int = key(0, "Steps that train only the critic.", ge=0)
    balance_batch: bool = key(True, "Spread tokens evenly over the trainer's devices.")
    default_local_dir: str = key("checkpoints/jaxrl_ppo/default", "The run's folder.")
    max_actor_ckpt_to_keep: int | None = key(None, "Checkpoints kept.", ge=1)
    max_critic_ckpt_to_keep: int | None = key(None, "The critic's checkpoints kept.", ge=1)
    max_consecutive_skips: int = key(10, "Optimizer steps in a row that may be skipped as non-finite.", ge=1)
    compilation_cache_dir: str | None = key(
        "~/.cache/jaxrl_ppo/compiled", "Folder where compiled programs are kept for the next run; null: nowhere."
    )
    dry_run: bool = key(False, "Check the configuration and the files it names, print the table and stop.")
    deadlines: DeadlinesConfig = section(DeadlinesConfig)


@dataclasses.dataclass(kw_only=True, slots=True)
class AsyncTrainingConfig:
    """`async_training`: how far generation runs ahead in trainer.mode=async."""

    max_staleness: int = key(1, "Updates that a sample's oldest token may be behind when it trains.", ge=0, le=32)
    trigger_parameter_sync_step: int = key(1, "Steps between two weight updates of the rollouts.", ge=1)
    partial_rollout: bool = key(True, "Load weights under running requests; false: once nothing runs.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RayInitConfig:
    """`ray_kwargs.ray_init`: arguments of ray.init."""

    address: str | None = key(None, "Cluster to join; null: start one here.")
    num_cpus: int | None = key(None, "CPUs of a cluster started here; null: the machine's.", ge=1)
    runtime_env: dict[str, Any] = key({}, "Ray's runtime environment, merged over ours.")


@dataclasses.dataclass(kw_only=True, slots=True)
class RayConfig:
    """`ray_kwargs`: the Ray cluster."""

    ray_init: RayInitConfig = section(RayInitConfig)
    timeline_json_file: str | None = key(None, "File for Ray's own timeline at the end of the run.")

"""The whole configuration as dataclasses: one attribute per key of the Hydra tree, with verl's names and defaults."""

# ruff: noqa: RUF009 - key() and section() return dataclass fields, not shared values
from __future__ import annotations

import dataclasses

from jaxrl_ppo.schema.actor import (
    ActorConfig,
    CheckpointConfig,
    CriticConfig,
    CriticModelConfig,
    FsdpConfig,
    MeshConfig,
    ModelPathConfig,
    OptimConfig,
    PolicyLossConfig,
    RefConfig,
    RefFsdpConfig,
)
from jaxrl_ppo.schema.algorithm import (
    AlgorithmConfig,
    FilterGroupsConfig,
    KlCtrlConfig,
    PfPpoConfig,
    RolloutCorrectionConfig,
)
from jaxrl_ppo.schema.data import (
    CustomClassConfig,
    CustomRewardFunctionConfig,
    DataConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardKwargsConfig,
    RewardManagerConfig,
    RewardManagerModuleConfig,
    RewardModelConfig,
    RewardModelRolloutConfig,
    SamplerConfig,
    SandboxFusionConfig,
)
from jaxrl_ppo.schema.keys import key, section
from jaxrl_ppo.schema.rollout import (
    AgentConfig,
    CheckpointEngineConfig,
    EngineKwargsConfig,
    MultiTurnConfig,
    RolloutConfig,
    RolloutPoolConfig,
    ValKwargsConfig,
)
from jaxrl_ppo.schema.trainer import AsyncTrainingConfig, DeadlinesConfig, RayConfig, RayInitConfig, TrainerConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentConfig",
    "AlgorithmConfig",
    "AsyncTrainingConfig",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "Config",
    "CriticConfig",
    "CriticModelConfig",
    "CustomClassConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "DeadlinesConfig",
    "EngineKwargsConfig",
    "FilterGroupsConfig",
    "FsdpConfig",
    "KlCtrlConfig",
    "MeshConfig",
    "ModelPathConfig",
    "MultiTurnConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PfPpoConfig",
    "PolicyLossConfig",
    "RayConfig",
    "RayInitConfig",
    "RefConfig",
    "RefFsdpConfig",
    "RewardConfig",
    "RewardKwargsConfig",
    "RewardManagerConfig",
    "RewardManagerModuleConfig",
    "RewardModelConfig",
    "RewardModelRolloutConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RolloutPoolConfig",
    "SamplerConfig",
    "SandboxFusionConfig",
    "TrainerConfig",
    "ValKwargsConfig",
]


@dataclasses.dataclass(kw_only=True, slots=True)
class ActorRolloutRefConfig:
    """`actor_rollout_ref`: one model as it is trained, generated with and compared to."""

    model: ModelPathConfig = section(ModelPathConfig)
    actor: ActorConfig = section(ActorConfig)
    ref: RefConfig = section(RefConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    hybrid_engine: bool = key(True, "Trainer and rollout take turns on the same devices.")


@dataclasses.dataclass(kw_only=True, slots=True)
class Config:
    """Everything a run is told. `jaxrl_ppo.schema.load` makes one from a mapping and reports every fault in it."""

    actor_rollout_ref: ActorRolloutRefConfig = section(ActorRolloutRefConfig)
    critic: CriticConfig = section(CriticConfig)
    data: DataConfig = section(DataConfig)
    reward: RewardConfig = section(RewardConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    rollout: RolloutPoolConfig = section(RolloutPoolConfig)
    async_training: AsyncTrainingConfig = section(AsyncTrainingConfig)
    ray_kwargs: RayConfig = section(RayConfig)

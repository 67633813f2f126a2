"""The trainer pool's process: one JAX process of one program, behind a Ray actor."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - numpy learns "bfloat16" from it
import numpy as np
import ray

from device import find_chip
from jaxrl_ppo.cluster.process import enter
from jaxrl_ppo.observability.metrics import mfu_metrics, prompt_lengths, response_lengths, training_flops

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.schema.records import Batch
    from jaxrl_ppo.training.model_trainer import ModelTrainer

FILE_BYTES = 4 << 30  # of a safetensors file in an exported folder


@ray.remote(concurrency_groups={"saving": 1})
class TrainerWorker:
    """Process `rank` of the trainer pool. Every call but `address` is made on all processes alike, in one order."""

    def __init__(self, folder: str, config: Config, rank: int, processes: int):
        enter(folder, config.trainer.cpu_affinity, config.trainer.compilation_cache_dir)
        self.config, self.rank, self.processes = config, rank, processes
        self.models: dict[str, ModelTrainer] = {}  # by role: actor, critic
        self.model_folders: dict[str, str] = {}

    def address(self) -> str:
        """A free address on this host, for the processes to find one another."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def device_ids(self, resource: str) -> list[str]:
        """Which of its host's devices, by Ray's name for them, this process has; none of CPU's, which are virtual."""
        return ray.get_runtime_context().get_accelerator_ids().get(resource, [])

    def join(self, coordinator: str) -> None:
        """Join the JAX program at `coordinator`."""
        from jaxrl_ppo.training.distributed import initialize

        initialize(self.config.trainer, coordinator, self.processes, self.rank)

    def _mesh(self) -> Mesh:
        """The mesh of what is trained, over all devices of this JAX program."""
        import jax

        from jaxrl_ppo.sharding.mesh import make_mesh

        return make_mesh(self.config.actor_rollout_ref.actor.mesh, jax.devices())

    def load_actor(self, model_folder: str, total_steps: int, needs_reference: bool) -> None:
        """Load the policy. `total_steps` counts optimizer steps."""
        from jaxrl_ppo.training.policy import PolicyTrainer

        self.trainer = PolicyTrainer(
            self.config.actor_rollout_ref,
            self.config.algorithm,
            model_folder=model_folder,
            mesh=self._mesh(),
            total_steps=total_steps,
            needs_reference=needs_reference,
            seed=self.config.actor_rollout_ref.actor.data_loader_seed,
        )
        self.models["actor"], self.model_folders["actor"] = self.trainer, model_folder

    def load_critic(self, model_folder: str, total_steps: int) -> None:
        """Load the critic. `total_steps` counts its optimizer steps."""
        from jaxrl_ppo.training.critic import CriticTrainer

        self.critic = CriticTrainer(
            self.config.critic,
            self.config.actor_rollout_ref,
            model_folder=model_folder,
            mesh=self._mesh(),
            total_steps=total_steps,
            seed=self.config.actor_rollout_ref.actor.data_loader_seed,
        )
        self.models["critic"], self.model_folders["critic"] = self.critic, model_folder

    def load_reward_model(self, model_folder: str) -> None:
        """Load the reward model, its parameters spread over all devices of this JAX program."""
        import jax

        from jaxrl_ppo.schema.config import MeshConfig
        from jaxrl_ppo.sharding.mesh import make_mesh
        from jaxrl_ppo.training.sequence_scorer import SequenceScorer

        self.scorer = SequenceScorer(
            self.config.reward.reward_model,
            self.config.actor_rollout_ref.actor,
            model_folder=model_folder,
            mesh=make_mesh(MeshConfig(), jax.devices()),
        )

    def score_sequences(self, sequences: Sequence[np.ndarray]) -> np.ndarray:
        """The reward model's score of each token sequence, float32 [N]."""
        return self.scorer.scores(sequences)

    def log_probs(self, batch: Batch, temperature: float | None) -> np.ndarray:
        """Log-probs [B, T] under the current weights, at the sampling temperature unless another is given."""
        return self.trainer.log_probs(batch, temperature)

    def ref_log_probs(self, batch: Batch) -> np.ndarray:
        """Log-probs [B, T] under the reference weights."""
        return self.trainer.ref_log_probs(batch)

    def sum_pi_squared(self, batch: Batch, log_probs: np.ndarray | None) -> np.ndarray:
        """Sums of squared probabilities [B, T]; `log_probs` are those under the current weights, where known."""
        return self.trainer.sum_pi_squared(batch, log_probs)

    def update_actor(self, batch: Batch) -> dict[str, float]:
        """Every optimizer step of one batch."""
        begin = time.perf_counter()
        metrics = self.trainer.update(batch)
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        return metrics | self._device_metrics("actor", batch, epochs, time.perf_counter() - begin)

    def values(self, batch: Batch) -> np.ndarray:
        """The critic's value [B, T] before each response token."""
        return self.critic.values(batch)

    def update_critic(self, batch: Batch) -> dict[str, float]:
        """Every optimizer step of the critic on one batch."""
        begin = time.perf_counter()
        metrics = self.critic.update(batch)
        epochs = self.config.critic.ppo_epochs
        return metrics | self._device_metrics("critic", batch, epochs, time.perf_counter() - begin)

    def _device_metrics(self, role: str, batch: Batch, epochs: int, seconds: float) -> dict[str, float]:
        """`perf/max_memory_allocated_gb` of this process's first device, and `perf/mfu/<role>`, where those are known.

        Work that an update saves counts as done.
        """
        import jax

        from jaxrl_ppo.models.parameters import multiplied_parameters

        first = jax.local_devices()[0]
        memory = first.memory_stats() or {}
        metrics = {}
        if "peak_bytes_in_use" in memory:
            metrics["perf/max_memory_allocated_gb"] = memory["peak_bytes_in_use"] / 2**30
        chip = find_chip(first.device_kind)
        if chip is None:
            return metrics
        model = self.models[role].model
        flops = training_flops(
            prompt_lengths(batch) + response_lengths(batch),
            parameters=multiplied_parameters(model),
            layers=model.num_layers,
            attention_width=model.num_heads * model.head_dim,
        )
        return metrics | mfu_metrics(
            {role: flops * epochs},
            {role: seconds},
            peak_flops=chip.bf16_flops,
            devices=jax.device_count(),
        )

    def score_tokens(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-prob of each token after the first, temperature 1."""
        return self.trainer.score_tokens(token_ids)

    def stage_weights(self, stores: Mapping[str, Any], bucket_bytes: int) -> int:
        """Send the current weights to `stores`, by node, bucket by bucket, uncommitted; returns their version.

        Raises RayActorError and NotBegunError when a store dies meanwhile, StoreFullError when one is full.
        """
        from jaxrl_ppo.cluster.staging import stage
        from jaxrl_ppo.weights.export import export_buckets

        version = self.trainer.version
        dtype = np.dtype(self.config.actor_rollout_ref.rollout.dtype)
        with self.trainer.in_use():
            buckets = export_buckets(self.trainer.model, self.trainer.params, dtype, bucket_bytes)
            if self.rank == 0:
                stage(buckets, stores, version)
            else:
                deque(buckets, maxlen=0)  # takes part in the gathering
        return version

    def save(self, role: str, folder: str) -> None:
        """Start saving the model of `role`; returns once its next update cannot touch what is saved."""
        self.models[role].save(folder)

    @ray.method(concurrency_group="saving")
    def wait_until_saved(self, role: str) -> None:
        """Return when the last save of that model is on disk."""
        self.models[role].wait_until_saved()

    def restore(self, role: str, folder: str) -> None:
        """Take up the state that `save` wrote."""
        self.models[role].restore(folder)

    def save_pretrained(self, role: str, folder: str) -> None:
        """Write the current weights of the model of `role` as a Hugging Face folder.

        The data type is the rollouts', so that what was validated is what is exported. A LoRA adapter is merged into
        them, and written alone, as PEFT does, into `lora_adapter` there.
        """
        from jaxrl_ppo.models.lora import gather_adapter, save_adapter
        from jaxrl_ppo.models.pretrained import save_pretrained
        from jaxrl_ppo.weights.export import export_buckets

        trainer = self.models[role]
        dtype = np.dtype(self.config.actor_rollout_ref.rollout.dtype)
        adapter = None
        with trainer.in_use():
            buckets = export_buckets(trainer.model, trainer.params, dtype, FILE_BYTES)
            if self.rank == 0:
                save_pretrained(folder, buckets, self.model_folders[role], trainer.model.head)
            else:
                for _ in buckets:  # the others take part in the gathering
                    continue
            if trainer.model.lora is not None:
                adapter = gather_adapter(trainer.model, trainer.params)
        if adapter is not None and self.rank == 0:
            save_adapter(f"{folder}/lora_adapter", trainer.model, adapter, self.model_folders[role])

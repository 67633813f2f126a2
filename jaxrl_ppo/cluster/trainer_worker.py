"""The trainer pool's process: one JAX process of one program, behind a Ray actor."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - numpy learns "bfloat16" from it
import numpy as np
import ray

from device import find_chip
from jaxrl_ppo.cluster.process import enter
from jaxrl_ppo.observability.metrics import mfu_metrics, prompt_lengths, response_lengths, training_flops

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import Config
    from jaxrl_ppo.schema.records import Batch

FILE_BYTES = 4 << 30  # of a safetensors file in an exported folder
PUTS_IN_FLIGHT = 2  # buckets on their way to the stores while the next one leaves the devices


@ray.remote(concurrency_groups={"saving": 1})
class TrainerWorker:
    """Process `rank` of the trainer pool. Every call but `address` is made on all processes alike, in one order."""

    def __init__(self, folder: str, config: Config, rank: int, processes: int):
        enter(folder, config.trainer.cpu_affinity, config.trainer.compilation_cache_dir)
        self.config, self.rank, self.processes = config, rank, processes

    def address(self) -> str:
        """A free address on this host, for the processes to find one another."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def start(self, coordinator: str, model_folder: str, total_steps: int, needs_reference: bool) -> None:
        """Join the JAX program at `coordinator`, build the mesh and load the model.

        `total_steps` counts optimizer steps.
        """
        from jaxrl_ppo.training.distributed import initialize
        from jaxrl_ppo.training.policy import PolicyTrainer

        self.model_folder = model_folder
        initialize(self.config.trainer, coordinator, self.processes, self.rank)
        import jax

        from jaxrl_ppo.sharding.mesh import make_mesh

        self.trainer = PolicyTrainer(
            self.config.actor_rollout_ref,
            self.config.algorithm,
            model_folder=model_folder,
            mesh=make_mesh(self.config.actor_rollout_ref.actor.mesh, jax.devices()),
            total_steps=total_steps,
            needs_reference=needs_reference,
            seed=self.config.actor_rollout_ref.actor.data_loader_seed,
        )

    def log_probs(self, batch: Batch) -> np.ndarray:
        """Log-probs [B, T] under the current weights."""
        return self.trainer.log_probs(batch)

    def ref_log_probs(self, batch: Batch) -> np.ndarray:
        """Log-probs [B, T] under the reference weights."""
        return self.trainer.ref_log_probs(batch)

    def update_actor(self, batch: Batch) -> dict[str, float]:
        """Every optimizer step of one batch."""
        begin = time.perf_counter()
        metrics = self.trainer.update(batch)
        return metrics | self._device_metrics(batch, time.perf_counter() - begin)

    def _device_metrics(self, batch: Batch, seconds: float) -> dict[str, float]:
        """`perf/max_memory_allocated_gb` of this process's first device, and `perf/mfu/actor`, where those are known.

        Work that an update saves counts as done.
        """
        import jax

        first = jax.local_devices()[0]
        memory = first.memory_stats() or {}
        metrics = {}
        if "peak_bytes_in_use" in memory:
            metrics["perf/max_memory_allocated_gb"] = memory["peak_bytes_in_use"] / 2**30
        chip = find_chip(first.device_kind)
        if chip is None:
            return metrics
        model, actor = self.trainer.model, self.config.actor_rollout_ref.actor
        size = sum(leaf.size for leaf in jax.tree.leaves(self.trainer.params))
        if not model.tie_embeddings:
            size -= model.vocab_size * model.hidden_size  # looked up, not multiplied
        flops = training_flops(
            prompt_lengths(batch) + response_lengths(batch),
            parameters=size,
            layers=model.num_layers,
            attention_width=model.num_heads * model.head_dim,
        )
        return metrics | mfu_metrics(
            {"actor": flops * actor.ppo_epochs},
            {"actor": seconds},
            peak_flops=chip.bf16_flops,
            devices=jax.device_count(),
        )

    def score_tokens(self, token_ids: Sequence[int]) -> np.ndarray:
        """Log-prob of each token after the first, temperature 1."""
        return self.trainer.score_tokens(token_ids)

    def stage_weights(self, stores: list[Any], bucket_bytes: int) -> int:
        """Send the current weights to `stores`, bucket by bucket, uncommitted; returns their version."""
        from jaxrl_ppo.weights.export import export_buckets

        version = self.trainer.version
        dtype = np.dtype(self.config.actor_rollout_ref.rollout.dtype)
        if self.rank == 0:
            ray.get([store.begin.remote(version) for store in stores])
        sending: list[Any] = []
        for bucket in export_buckets(self.trainer.model, self.trainer.params, dtype, bucket_bytes):
            if self.rank == 0:
                shared = ray.put(bucket)
                sending += [store.put.remote(version, shared) for store in stores]
                while len(sending) > PUTS_IN_FLIGHT * len(stores):
                    ray.get(sending.pop(0))
        ray.get(sending)
        return version

    def save(self, folder: str) -> None:
        """Start saving; returns once the next update cannot touch what is saved."""
        self.trainer.save(folder)

    @ray.method(concurrency_group="saving")
    def wait_until_saved(self) -> None:
        """Return when the last save is on disk."""
        self.trainer.wait_until_saved()

    def restore(self, folder: str) -> None:
        """Take up the state that `save` wrote."""
        self.trainer.restore(folder)

    def save_pretrained(self, folder: str) -> None:
        """Write the current weights, in bfloat16, as a Hugging Face folder."""
        from jaxrl_ppo.models.pretrained import save_pretrained
        from jaxrl_ppo.weights.export import export_buckets

        buckets = export_buckets(self.trainer.model, self.trainer.params, np.dtype("bfloat16"), FILE_BYTES)
        if self.rank == 0:
            save_pretrained(folder, buckets, self.model_folder)
        else:
            for _ in buckets:  # the others take part in the gathering
                continue

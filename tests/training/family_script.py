"""Run as a program, one of one or several processes: three updates of each family on each of its meshes; prints JSON.

Arguments: a JSON object {family: [its folder, [meshes], keys of actor_rollout_ref.model]}; with several processes also
their number, this one's, and an address to meet at. Each mesh takes the first of all their devices.
Results: {family: [[loss, entropy, norm] * 3 of each mesh]}.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from types import SimpleNamespace
from typing import Any

import jax
from training_cases import make_batch, make_config

from jaxrl_ppo.schema.config import AlgorithmConfig
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.distributed import initialize
from jaxrl_ppo.training.policy import PolicyTrainer

COMPARED = ("actor/pg_loss", "actor/entropy", "actor/grad_norm")


def updates(folder: str, sizes: dict[str, int], model: dict[str, Any]) -> list[list[float]]:
    config = make_config(entropy_coeff=0.01, ppo_max_token_len_per_gpu=256)
    config.model = dataclasses.replace(config.model, **model)
    config.actor.mesh.fsdp = 1
    for axis, size in sizes.items():
        setattr(config.actor.mesh, axis, size)
    mesh = make_mesh(config.actor.mesh, jax.devices()[: math.prod(sizes.values())])
    trainer = PolicyTrainer(
        config,
        AlgorithmConfig(),
        model_folder=folder,
        mesh=mesh,
        total_steps=10,
        needs_reference=False,
        seed=42,
    )
    results = []
    for _ in range(3):
        metrics = trainer.update(make_batch())
        names = [*COMPARED, "actor/aux_loss"] if trainer.model.num_experts else COMPARED
        results.append([metrics[name] for name in names])
    return results


if len(sys.argv) > 2:
    processes, rank, coordinator = sys.argv[2:]
    initialize(SimpleNamespace(deadlines=SimpleNamespace(start_s=60)), coordinator, int(processes), int(rank))
results = {}
for name, (folder, meshes, model) in json.loads(sys.argv[1]).items():
    results[name] = [updates(folder, mesh, model) for mesh in meshes]
print("RESULT " + json.dumps(results))

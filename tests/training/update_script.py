"""Run as a program: three updates of the tiny model, as actor and critic, on each of some meshes; prints JSON metrics.

Several processes, or one; each mesh takes the first of all their devices. Arguments: a JSON object {model, meshes,
processes, rank, coordinator, settings, save, restore, steps}.
"""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import jax
from training_cases import make_batch, make_config, make_critic, make_trainer, with_returns

from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.training.distributed import initialize

arguments = SimpleNamespace(**json.loads(sys.argv[1]))
deadlines = SimpleNamespace(deadlines=SimpleNamespace(start_s=60))
initialize(deadlines, arguments.coordinator, arguments.processes, arguments.rank)


def updates(mesh: dict[str, int]) -> dict:
    config = make_config(use_kl_loss=True, entropy_coeff=0.01, **arguments.settings)
    config.actor.mesh.fsdp = 1
    for axis, size in mesh.items():
        setattr(config.actor.mesh, axis, size)
    devices = make_mesh(config.actor.mesh, jax.devices()[: math.prod(mesh.values())])
    trainer = make_trainer(arguments.model, config, needs_reference=True, mesh=devices)
    # Adam turns a gradient near zero into a whole step of either sign: small steps, so that it does not show.
    critic = make_critic(arguments.model, tokens=64, mesh=devices, optim__lr=1e-3)
    if arguments.restore:
        trainer.restore(arguments.restore)
        critic.restore(arguments.restore + "_critic")
    results = []
    for _ in range(arguments.steps):
        batch = make_batch()  # the same each time: one set of compiled shapes
        batch.old_log_probs = trainer.log_probs(batch)
        batch.ref_log_probs = trainer.ref_log_probs(batch)
        metrics = trainer.update(batch)
        values = critic.values(batch)
        metrics |= critic.update(with_returns(batch, values))
        sums = {"log_prob": float(batch.old_log_probs.sum()), "ref": float(batch.ref_log_probs.sum())}
        results.append(metrics | sums | {"values": float(values.sum())})
    if arguments.save:
        trainer.save(arguments.save)
        critic.save(arguments.save + "_critic")
        trainer.wait_until_saved()
        critic.wait_until_saved()
    probe = trainer.score_tokens(range(3, 30)).tolist() + critic.values(make_batch()).sum(1).tolist()
    return {"steps": results, "probe": probe}


print("RESULT " + json.dumps([updates(mesh) for mesh in arguments.meshes]))

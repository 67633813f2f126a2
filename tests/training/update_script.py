"""Run as a program: three updates of the tiny model on some mesh, by one or several processes; prints metrics as JSON.

Arguments: a JSON object {model, mesh, processes, rank, coordinator, settings, save, restore, steps}.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

from training_cases import make_batch, make_config, make_trainer

from jaxrl_ppo.training.distributed import initialize

arguments = SimpleNamespace(**json.loads(sys.argv[1]))
deadlines = SimpleNamespace(deadlines=SimpleNamespace(start_s=60))
initialize(deadlines, arguments.coordinator, arguments.processes, arguments.rank)
config = make_config(use_kl_loss=True, entropy_coeff=0.01, **arguments.settings)
for axis, size in arguments.mesh.items():
    setattr(config.actor.mesh, axis, size)
trainer = make_trainer(arguments.model, config, needs_reference=True)
if arguments.restore:
    trainer.restore(arguments.restore)
results = []
for _ in range(arguments.steps):
    batch = make_batch()  # the same each time: one set of compiled shapes
    batch.old_log_probs = trainer.log_probs(batch)
    batch.ref_log_probs = trainer.ref_log_probs(batch)
    metrics = trainer.update(batch)
    results.append(metrics | {"log_prob": float(batch.old_log_probs.sum()), "ref": float(batch.ref_log_probs.sum())})
if arguments.save:
    trainer.save(arguments.save)
    trainer.wait_until_saved()
probe = trainer.score_tokens(range(3, 30)).tolist()
print("RESULT " + json.dumps({"steps": results, "probe": probe}))

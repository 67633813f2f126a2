"""Run as a program: policy and critic trained on eight devices, saved, and taken up again on two of them.

Arguments: the model's folder, a folder for the states. Prints, as JSON, what each does in its second update.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from training_cases import arrays, make_batch, make_config, make_critic, make_trainer, with_returns

from jaxrl_ppo.sharding.mesh import make_mesh

folder, states = Path(sys.argv[1]), Path(sys.argv[2])
meshes = {count: make_mesh(make_config().actor.mesh, jax.devices()[:count]) for count in (8, 2)}  # all fsdp


def policy(devices: int) -> Any:
    return make_trainer(folder, mesh=meshes[devices])


def critic(devices: int) -> Any:
    return make_critic(folder, tokens=64, mesh=meshes[devices])


def second_update(make: Callable[[int], Any]) -> dict[str, Any]:
    batch = with_returns(make_batch(), np.zeros((12, 12)))
    first = make(8)
    first.update(batch)
    first.save(states / make.__name__)
    metrics = first.update(batch)
    first.wait_until_saved()
    again = make(2)
    again.restore(states / make.__name__)
    others = again.update(batch)
    mine, theirs = arrays(first.params), arrays(again.params)
    apart = max(float(np.abs(mine[path] - theirs[path]).max()) for path in mine)
    same = metrics.keys() - {"training/compilations", *(name for name in metrics if name.endswith("/padding_waste"))}
    pairs = {name: (metrics[name], others[name]) for name in sorted(same)}
    return {"metrics": pairs, "apart": apart, "version": again.version}


print("RESULT " + json.dumps({make.__name__: second_update(make) for make in (policy, critic)}))

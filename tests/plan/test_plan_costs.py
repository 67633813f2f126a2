"""A program's cost against what its formula says: loops by their trips, collectives by kind, on CPU and TPU alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxrl_ppo.plan.arithmetic import matrix_flops
from jaxrl_ppo.plan.topology import TopologyError, parse

WIDTH, ROWS, TRIPS, DEVICES = 256, 64, 7, 4

# Each trip gathers a [WIDTH, WIDTH] float32 matrix that lies on DEVICES devices, and multiplies ROWS rows with it.
PROGRAM = f"""
import json, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxrl_ppo.plan import hlo
from jaxrl_ppo.plan.costs import cost_of
from jaxrl_ppo.plan.topology import parse
devices = parse(TOPOLOGY).open()
mesh = jax.make_mesh(({DEVICES},), ("d",), axis_types=(AxisType.Auto,), devices=devices)
spread = lambda *names: NamedSharding(mesh, P(*names))
x = jax.ShapeDtypeStruct(({ROWS} * {DEVICES}, {WIDTH}), jnp.float32, sharding=spread("d"))
w = jax.ShapeDtypeStruct(({TRIPS}, {WIDTH}, {WIDTH}), jnp.float32, sharding=spread(None, "d"))
def step(x, w):
    return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, spread())), None
program = jax.jit(lambda x, w: jax.lax.scan(step, x, w)[0], out_shardings=spread("d"))
compiled = program.lower(x, w).compile()
cost = cost_of(hlo.parse(compiled.as_text()), peak_flops=1e9, bandwidth=1e12)
found = {{k: [c.count, c.bytes, c.sent] for k, c in cost.collectives.items()}}
print("RESULT " + json.dumps([cost.flops, cost.bytes, cost.seconds, found, compiled.cost_analysis()["flops"]]))
"""


@pytest.mark.parametrize("topology", [f"cpu:{DEVICES}", "v5e:2x2"])
def test_a_loop_counts_as_often_as_it_turns(topology):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("TOPOLOGY", repr(topology))],
        env=os.environ | parse(topology).environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    flops, traffic, seconds, collectives, xla_flops = json.loads(done.stdout.rsplit("RESULT ", 1)[1])
    assert flops == TRIPS * 2 * ROWS * WIDTH * WIDTH
    assert xla_flops < flops / 3  # what counting the loop's body once comes to
    matrix = (4 if topology.startswith("cpu") else 2) * WIDTH * WIDTH  # TPU multiplies, and so gathers, in bfloat16
    assert list(collectives) == ["all-gather"]
    count, received, sent = collectives["all-gather"]
    assert received == pytest.approx(TRIPS * matrix)
    assert sent == pytest.approx(TRIPS * matrix * (DEVICES - 1) / DEVICES)
    assert count in (TRIPS, 1)  # the compiler may gather all of them at once, before the loop
    assert seconds == pytest.approx(flops / 1e9, rel=0.2)
    if topology.startswith("cpu"):  # on TPU so little may lie in a core's own memory all the time
        assert TRIPS * matrix < traffic < 12 * TRIPS * matrix


@pytest.mark.parametrize("text", ["v5e", "v9z:2x2", "v5e:8y8", "cpu:", "cpu:0", "8x8"])
def test_topologies_that_are_none(text):
    with pytest.raises(TopologyError, match=r"plan\.topology="):
        parse(text)


def test_matrix_products_of_a_traced_program():
    x, w = jnp.ones((3, 5)), jnp.ones((7, 5, 5))

    def loss(w):
        step = jax.checkpoint(lambda x, w: jnp.sin(jnp.cos(x @ w)))
        return jax.lax.scan(lambda x, w: (step(x, w), None), x, w)[0].sum()

    # Forward, once more for the backward pass, and a product each for both operands' gradients; x itself has none in
    # the first turn, but the loop does not know.
    assert matrix_flops(jax.make_jaxpr(jax.grad(loss))(w).jaxpr) == 4 * 7 * 2 * 3 * 5 * 5
    mesh = jax.make_mesh((1,), ("d",))
    spread = jax.shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    assert matrix_flops(jax.make_jaxpr(spread)(x, w[0]).jaxpr) == 2 * 3 * 5 * 5

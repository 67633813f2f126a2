"""A program's cost against what its formula says: loops by their trips, collectives by kind, on CPU and TPU alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxrl_ppo.plan import hlo
from jaxrl_ppo.plan.arithmetic import matrix_flops
from jaxrl_ppo.plan.costs import cost_of
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
one = jax.sharding.SingleDeviceSharding(devices[0])
abstract = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=one)
rows, matrices = abstract(jnp.bfloat16, {ROWS}, {WIDTH}), abstract(jnp.bfloat16, 8, {WIDTH}, 128)
ragged = jax.jit(lambda x, w, g: jax.grad(lambda x, w: jax.lax.ragged_dot(x, w, g).sum(), (0, 1))(x, w))
text = ragged.lower(rows, matrices, abstract(jnp.int32, 8)).compile().as_text()
experts = [cost_of(hlo.parse(text), experts=count).flops for count in (0, 8, 32)]
results = [cost.flops, cost.bytes, cost.seconds, found, compiled.cost_analysis()["flops"], experts]
print("RESULT " + json.dumps(results))
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
    flops, traffic, seconds, collectives, xla_flops, experts = json.loads(done.stdout.rsplit("RESULT ", 1)[1])
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
    else:  # the gradients of both operands of a ragged product; of 32 experts, a quarter of the rows is for these 8
        assert experts == [2 * 2 * ROWS * WIDTH * 128] * 2 + [2 * 2 * ROWS * WIDTH * 128 / 4]


# A loop that turns from 0 to 8 by 2, as compilers unroll them, and within it one from 3 to 5 whose test is fused: each
# turn of the one sends [64, 256] to a neighbour twice, of the other multiplies [64, 256] with [256, 128] once. Kernels
# carry texts of several lines.
LOOPS = """
HloModule loops

%inner_test (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%inner_condition (state.1: (s32[], f32[64,256])) -> pred[] {
  %state.1 = (s32[], f32[64,256]) parameter(0)
  %five = s32[] constant(5)
  %count.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %test = pred[] fusion(%count.1, %five), kind=kLoop, calls=%inner_test
}

%inner_body (state.2: (s32[], f32[64,256])) -> (s32[], f32[64,256]) {
  %state.2 = (s32[], f32[64,256]) parameter(0)
  %one = s32[] constant(1)
  %count.2 = s32[] get-tuple-element(%state.2), index=0
  %next.2 = s32[] add(%count.2, %one)
  %x.2 = f32[64,256] get-tuple-element(%state.2), index=1
  %w = f32[256,128] constant({...})
  %product = f32[64,128] dot(%x.2, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %turned.2 = (s32[], f32[64,256]) tuple(%next.2, %x.2)
}

%condition (state.3: (f32[64,256], u32[])) -> pred[] {
  %state.3 = (f32[64,256], u32[]) parameter(0)
  %eight = u32[] constant(8)
  %sixteen = u32[] constant(16)
  %count.3 = u32[] get-tuple-element(%state.3), index=1
  ROOT %test.3 = pred[] compare(%count.3, %eight), direction=LT
}

%body (state.4: (f32[64,256], u32[])) -> (f32[64,256], u32[]) {
  %state.4 = (f32[64,256], u32[]) parameter(0)
  %two = u32[] constant(2)
  %three = s32[] constant(3)
  %x.4 = f32[64,256] get-tuple-element(%state.4), index=0
  %count.4 = u32[] get-tuple-element(%state.4), index=1
  %there = f32[64,256] collective-permute(%x.4), channel_id=1, source_target_pairs={{0,1},{1,0}}
  %back = f32[64,256] collective-permute(%there), channel_id=2, source_target_pairs={{0,1},{1,0}}
  %kernel = f32[64,256] custom-call(%back), custom_call_target="tpu_custom_call", backend_config={"settings": {"of":
"several lines, such as
}}, metadata={op_name="kernel"}
  %start = (s32[], f32[64,256]) tuple(%three, %kernel)
  %inner = (s32[], f32[64,256]) while(%start), condition=%inner_condition, body=%inner_body
  %out = f32[64,256] get-tuple-element(%inner), index=1
  %next.4 = u32[] add(%count.4, %two)
  ROOT %turned.4 = (f32[64,256], u32[]) tuple(%out, %next.4)
}

ENTRY %main (x: f32[64,256]) -> f32[64,256] {
  %x = f32[64,256] parameter(0)
  %zero = u32[] constant(0)
  %begin = (f32[64,256], u32[]) tuple(%x, %zero)
  %loop = (f32[64,256], u32[]) while(%begin), condition=%condition, body=%body
  ROOT %result = f32[64,256] get-tuple-element(%loop), index=0
}
"""


def test_loops_count_from_their_start_by_their_step():
    cost = cost_of(hlo.parse(LOOPS))
    assert cost.flops == 4 * 2 * (2 * 64 * 256 * 128)
    sent = cost.collectives["collective-permute"]
    assert (sent.count, sent.sent) == (4 * 2, 4 * 2 * 64 * 256 * 4)


# A gather that a TPU's sparse cores make, with a launch in three parts; XLA ends such computations with their thread.
OFFLOADED = """
%gather (table: bf16[512,64], rows: s32[8]) -> bf16[8,64] {
  %table = bf16[512,64] parameter(0)
  %rows = s32[8] parameter(1)
  ROOT %taken = bf16[8,64] custom-call(%table, %rows), custom_call_target="offloaded"
}, execution_thread="sparsecore"

ENTRY %main (table: bf16[512,64], rows: s32[8]) -> bf16[8,64] {
  %table = bf16[512,64] parameter(0)
  %rows = s32[8] parameter(1)
  %start = ((), (), s32[1]) async-start(), async_execution_thread="sparsecore", calls=%gather
  %update = ((bf16[512,64], s32[8]), bf16[8,64], s32[1]) async-update(%start, %table, %rows)
  ROOT %done = bf16[8,64] async-done(%update)
}
"""


def test_what_sparse_cores_do_counts_once():
    assert cost_of(hlo.parse(OFFLOADED)).bytes == 512 * 64 * 2 + 8 * 4 + 8 * 64 * 2


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


def test_a_ragged_product_multiplies_each_row_once():
    rows, width, inner, groups = 12, 5, 7, 4
    x, w, sizes = jnp.ones((rows, width)), jnp.ones((groups, width, inner)), jnp.full(groups, 3, jnp.int32)

    def loss(x, w):
        return jax.lax.ragged_dot(x, w, sizes).sum()

    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, w).jaxpr
    assert matrix_flops(jaxpr) == 3 * 2 * rows * width * inner
    assert matrix_flops(jaxpr, experts=2 * groups) == 3 * 2 * rows * width * inner / 2

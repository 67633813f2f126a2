"""Sharding rules and meshes: what they place where, and what they refuse."""

import subprocess
import sys
import types

import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_ppo.sharding.mesh import make_mesh, mesh_shape
from jaxrl_ppo.sharding.rules import MESH_AXES, ShardingError, ShardingRules


def mesh_config(**sizes):
    return types.SimpleNamespace(**({"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1, "expert": 1} | sizes))


def test_specs_follow_the_table():
    rules = ShardingRules()
    assert rules.spec(("layers", "embed", "heads", "head_dim")) == P(None, ("fsdp", "sequence"), ("tensor",), None)
    assert rules.spec(("rows", "length", "features")) == P(("replica", "fsdp", "expert"), ("sequence",), None)
    assert rules.spec(("vocab", None)) == P(("tensor",), None)


def test_a_mesh_axis_used_twice_is_refused_with_both_names():
    with pytest.raises(ShardingError, match="'vocab' and 'mlp' are both split over the mesh axis 'tensor'"):
        ShardingRules().spec(("vocab", "mlp"))
    with pytest.raises(ShardingError, match="names a mesh axis twice"):
        ShardingRules(embed=("fsdp", "fsdp"))


def test_unknown_names_are_refused():
    with pytest.raises(ShardingError, match="unknown logical axis 'headz'"):
        ShardingRules().spec(("headz",))
    with pytest.raises(ShardingError, match="unknown mesh axis 'data'"):
        ShardingRules(embed=("data",))


def test_minus_one_takes_what_remains():
    assert mesh_shape(mesh_config(), 8) == (1, 8, 1, 1, 1)
    assert mesh_shape(mesh_config(replica=2, tensor=2), 8) == (2, 2, 1, 2, 1)
    assert mesh_shape(mesh_config(fsdp=2, sequence=2, tensor=2), 8) == (1, 2, 2, 2, 1)
    assert mesh_shape(mesh_config(replica=-1, fsdp=2), 8) == (4, 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        ({"tensor": 3}, 8, r"actor_rollout_ref\.actor\.mesh\.tensor=3.*multiple of 3 devices, the trainer has 8"),
        ({"fsdp": 4}, 8, r"actor_rollout_ref\.actor\.mesh\.fsdp=4.*exactly 4 devices, the trainer has 8"),
        ({"fsdp": 1}, 8, r"exactly 1 devices, the trainer has 8"),
        ({"replica": 0}, 8, r"actor_rollout_ref\.actor\.mesh\.replica=0: must be positive"),
        ({"replica": -1}, 8, r"mesh\.replica and .*mesh\.fsdp are both -1"),
    ],
)
def test_devices_that_do_not_divide_name_the_key(sizes, devices, message):
    with pytest.raises(ShardingError, match=message):
        mesh_shape(mesh_config(**sizes), devices)


def test_mesh_on_one_device_states_its_axis_types():
    import jax
    from jax.sharding import AxisType

    mesh = make_mesh(mesh_config(), jax.devices()[:1])
    assert mesh.axis_names == MESH_AXES
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_a_dimension_that_does_not_divide_is_kept_whole():
    script = """
import types, jax
jax.config.update("jax_platforms", "cpu"); jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import PartitionSpec as P
from jaxrl_ppo.sharding.mesh import make_mesh
from jaxrl_ppo.sharding.rules import ShardingRules
mesh = make_mesh(types.SimpleNamespace(replica=1, fsdp=-1, sequence=1, tensor=4, expert=1))
assert mesh.shape["fsdp"] == 2
rules = ShardingRules()
axes, embed = ("embed", "kv_heads", "head_dim"), ("fsdp", "sequence")
assert rules.sharding(mesh, axes, (8, 3, 4)).spec == P(embed, None, None)
assert rules.sharding(mesh, axes, (8, 4, 4)).spec == P(embed, ("tensor",), None)
"""
    subprocess.run([sys.executable, "-c", script], check=True)

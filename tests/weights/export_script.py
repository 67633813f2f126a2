"""Run by test_export in a process with eight virtual devices, since a process's device count is fixed at start."""

from __future__ import annotations

import re

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from jaxrl_ppo.models.architecture import DecoderConfig  # noqa: E402
from jaxrl_ppo.models.decoder import Decoder  # noqa: E402
from jaxrl_ppo.models.parameters import flatten, nest  # noqa: E402
from jaxrl_ppo.models.tensor_plan import tensor_plan  # noqa: E402
from jaxrl_ppo.weights.export import export_buckets  # noqa: E402

config = DecoderConfig(
    model_type="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    qk_norm=True,
)
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
split = {"embed": "fsdp", "vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
state = nnx.state(Decoder(config, rngs=nnx.Rngs(0)), nnx.Param)
plain, sharded = {}, {}
for path, leaf in flatten(state):
    plain[path] = leaf.get_value()
    spec = PartitionSpec(*(split.get(axis) for axis in leaf.get_metadata()["logical_axes"]))
    sharded[path] = jax.device_put(leaf.get_value(), NamedSharding(mesh, spec))

expected = {
    entry.name: np.asarray(entry.to_tensor(plain[entry.parameter][entry.index])).astype("bfloat16")
    for entry in tensor_plan(config).values()
}
largest = max(tensor.nbytes for tensor in expected.values())
layer = sum(tensor.nbytes for name, tensor in expected.items() if ".layers.0." in name)
limit = 3 * layer
for params in (plain, sharded):
    buckets = list(export_buckets(config, nest(params), np.dtype("bfloat16"), limit))
    assert len(buckets) > 3
    assert all(sum(tensor.nbytes for tensor in bucket.values()) <= limit + max(layer, largest) for bucket in buckets)
    names = [name for bucket in buckets for name in bucket]
    assert sorted(names) == sorted(expected)
    layers = [int(found.group(1)) for name in names if (found := re.search(r"layers\.(\d+)\.", name))]
    assert layers == sorted(layers)
    for bucket in buckets:
        for name, tensor in bucket.items():
            assert tensor.tobytes() == expected[name].tobytes(), name
print("equal")

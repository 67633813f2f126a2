"""Parameters and optimizer state in host memory between their uses: the same training, to the bit."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from training_cases import arrays, make_batch, make_config, make_trainer

from jaxrl_ppo.sharding import memory
from jaxrl_ppo.sharding.rules import ShardingError

ONE_SHAPE = {"ppo_max_token_len_per_gpu": 512, "ppo_mini_batch_size": 2}
OFFLOAD = {"fsdp_config__param_offload": True, "fsdp_config__optimizer_offload": True}


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


def test_offloaded_training_equals_the_other_and_rests_in_host_memory(tiny_model, tmp_path):
    config = make_config(**ONE_SHAPE, **OFFLOAD)
    config.ref.fsdp_config.param_offload = True
    plain = make_trainer(tiny_model, make_config(**ONE_SHAPE), needs_reference=True)
    offloaded = make_trainer(tiny_model, config, needs_reference=True)
    for _ in range(2):
        batch = make_batch()
        np.testing.assert_array_equal(offloaded.ref_log_probs(batch), plain.ref_log_probs(batch))
        np.testing.assert_array_equal(offloaded.log_probs(batch), plain.log_probs(batch))
        assert offloaded.update(batch)["actor/grad_norm"] == plain.update(batch)["actor/grad_norm"]
        assert kinds((offloaded.params, offloaded.state, offloaded.reference)) == {memory.HOST}
        assert memory.HOST not in kinds((plain.params, plain.state, plain.reference))
    with offloaded.in_use():
        assert memory.HOST not in kinds(offloaded.params)
        for path, leaf in arrays(offloaded.params).items():
            np.testing.assert_array_equal(leaf, arrays(plain.params)[path], err_msg=path)

    plain.save(tmp_path / "state")
    plain.wait_until_saved()
    again = make_trainer(tiny_model, config, needs_reference=True)
    again.restore(tmp_path / "state")
    assert kinds((again.params, again.state)) == {memory.HOST}
    assert again.update(make_batch())["actor/grad_norm"] == plain.update(make_batch())["actor/grad_norm"]


def test_devices_without_such_memory_are_told_by_key(tiny_model, monkeypatch):
    monkeypatch.setattr(memory, "HOST", "another_host")
    with pytest.raises(ShardingError, match=r"actor_rollout_ref\.actor\.fsdp_config\.param_offload=true: devices of"):
        make_trainer(tiny_model, make_config(fsdp_config__param_offload=True))

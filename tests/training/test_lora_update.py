"""Training a LoRA adapter: what moves, what the reference is, what a checkpoint holds."""

from __future__ import annotations

import jax
import numpy as np
import torch
import transformers
from torch_oracle import torch_log_probs
from training_cases import arrays, copy, make_batch, make_config, make_trainer

from jaxrl_ppo.models.parameters import is_adapter
from jaxrl_ppo.models.pretrained import save_pretrained
from jaxrl_ppo.weights.export import export_buckets


def lora_config():
    config = make_config(use_kl_loss=True)
    config.model.lora_rank, config.model.lora_alpha = 4, 8.0
    return config


def test_an_update_moves_the_adapter_alone_and_the_reference_stays(tiny_model, tmp_path):
    trainer = make_trainer(tiny_model, lora_config(), needs_reference=True)
    batch = make_batch()
    before = arrays(copy(trainer.params))
    reference = trainer.ref_log_probs(batch)
    np.testing.assert_array_equal(reference, trainer.log_probs(batch))  # a new adapter adds nothing
    plain = make_trainer(tiny_model).log_probs(batch)
    np.testing.assert_allclose(reference, plain, rtol=1e-5, atol=1e-5)

    sizes = [leaf.size for leaf in jax.tree.leaves(trainer.state)]
    assert sum(sizes) < 2.1 * sum(value.size for path, value in before.items() if is_adapter(path))
    assert trainer.update(batch)["actor/grad_norm"] > 0
    trainer.update(batch)
    after = arrays(trainer.params)
    for path, value in before.items():
        assert (after[path] == value).all() != is_adapter(path), path
    np.testing.assert_array_equal(trainer.ref_log_probs(batch), reference)
    assert np.abs(trainer.log_probs(batch) - reference).max() > 1e-3

    # What rollouts are given: merged, it is the trained model to transformers.
    save_pretrained(tmp_path / "merged", export_buckets(trainer.model, trainer.params, np.float32, 1 << 30), tiny_model)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        theirs = np.stack([torch_log_probs(merged, batch, i)[0].numpy() for i in range(len(batch.group))])
    expected = np.where(batch.response_mask > 0, theirs, 0)
    np.testing.assert_allclose(trainer.log_probs(batch), expected, rtol=1e-4, atol=1e-4)

    trainer.save(tmp_path / "state")
    trainer.wait_until_saved()
    resumed = make_trainer(tiny_model, lora_config(), needs_reference=True)
    resumed.restore(tmp_path / "state")
    trainer.update(batch)
    resumed.update(batch)
    for path, value in arrays(trainer.params).items():
        np.testing.assert_array_equal(arrays(resumed.params)[path], value, err_msg=path)

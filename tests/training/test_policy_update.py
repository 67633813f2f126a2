"""Whole updates: what is skipped, left out, shuffled, counted, saved and taken up again."""

from __future__ import annotations

import dataclasses
import os
import shutil

import numpy as np
import pytest
from test_policy_gradient import gradient
from training_cases import arrays, assert_close, copy, make_batch, make_config, make_trainer

from jaxrl_ppo.training.checkpoint import StateError
from jaxrl_ppo.training.minibatches import optimizer_steps
from jaxrl_ppo.training.packing import PackingError

ONE_SHAPE = {"ppo_max_token_len_per_gpu": 512}  # a single micro-step: fewer programs to compile


@pytest.fixture(scope="module")
def trainer(tiny_model):
    """Three optimizer steps an update, shuffled; tests that train it must not expect the initial weights."""
    return make_trainer(tiny_model, make_config(ppo_mini_batch_size=2, ppo_epochs=2, shuffle=True, **ONE_SHAPE))


def test_an_update_moves_the_policy_and_counts_its_steps(trainer):
    before = copy(trainer.params)
    version = trainer.version
    metrics = trainer.update(make_batch())
    assert trainer.version == version + 4  # two mini-batches, two epochs
    assert metrics["actor/lr"] == pytest.approx(1e-2)
    assert metrics["actor/skipped_updates"] == 0
    assert 0 < metrics["actor/padding_waste"] < 1
    changed = [
        not np.array_equal(new, old) for new, old in zip(arrays(trainer.params).values(), arrays(before).values())
    ]
    assert all(changed)
    for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "grad_norm"):
        assert np.isfinite(metrics[f"actor/{name}"])
    assert "actor/entropy" not in metrics
    assert "actor/kl_loss" not in metrics


def test_a_second_update_of_the_same_shape_compiles_nothing(trainer):
    trainer.update(make_batch())
    assert trainer.update(make_batch())["training/compilations"] == 0


def test_a_gradient_that_is_not_finite_skips_the_step(trainer):
    batch = make_batch()
    batch.advantages[tuple(np.argwhere(batch.response_mask > 0)[0])] = np.inf
    before, version = copy((trainer.params, trainer.state)), trainer.version
    metrics = trainer.update(batch)
    # The spoilt sample is in one of two mini-batches, in both epochs.
    assert metrics["actor/skipped_updates"] == 2
    assert trainer.version == version + 2
    assert np.isfinite(list(metrics.values())).all()
    everywhere = dataclasses.replace(batch, advantages=np.full_like(batch.advantages, np.nan))
    before, version = copy((trainer.params, trainer.state)), trainer.version
    metrics = trainer.update(everywhere)
    assert (metrics["actor/skipped_updates"], trainer.version) == (4, version)
    assert_close(arrays(trainer.params), arrays(before[0]), 0)
    assert "actor/grad_norm" not in metrics


def test_samples_without_signal_are_left_out_and_change_nothing(tiny_model):
    batch = make_batch(prompts=6, holes=False)
    batch.advantages[np.isin(batch.group, [0, 3, 4]) & (batch.group >= 0)] = 0
    batch.importance_weights[5] = 0
    some = make_trainer(tiny_model, make_config(**ONE_SHAPE))
    every = make_trainer(tiny_model, make_config(calculate_entropy=True, **ONE_SHAPE))
    some_grads, some_sums, some_packing = gradient(some, batch)
    every_grads, every_sums, every_packing = gradient(every, batch)
    assert some_packing.used < 0.6 * every_packing.used
    assert_close(some_grads, every_grads)
    for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower"):
        assert some_sums[name] == pytest.approx(every_sums[name], rel=1e-5), name
    metrics = some.update(batch)
    tokens = batch.response_mask.sum(axis=1)
    signal = ~np.isin(batch.group, [0, 3, 4]) & (np.arange(len(tokens)) != 5)
    assert metrics["actor/computed_token_ratio"] == pytest.approx(tokens[signal].sum() / tokens.sum())


def test_without_any_signal_the_gradient_is_zero_and_the_step_is_made(tiny_model):
    trainer = make_trainer(tiny_model, make_config(optim__weight_decay=0.0, **ONE_SHAPE))
    batch = make_batch()
    batch.advantages[:] = 0
    before = copy(trainer.params)
    metrics = trainer.update(batch)
    assert (trainer.version, metrics["actor/grad_norm"], metrics["actor/padding_waste"]) == (1, 0.0, 0.0)
    assert_close(arrays(trainer.params), arrays(before), 0)


def test_missing_old_log_probs_are_those_before_the_update(tiny_model):
    plain = {"optim__optimizer": "SGD", "optim__weight_decay": 0.0}  # Adam would blow rounding errors up
    given, taken, several = (make_trainer(tiny_model, make_config(**plain, **ONE_SHAPE)) for _ in range(3))
    several.config.actor.ppo_mini_batch_size = 2
    batch = make_batch()
    batch.old_log_probs = given.log_probs(batch)
    first = given.update(batch)
    batch.old_log_probs = None
    second = taken.update(batch)
    assert_close(arrays(taken.params), arrays(given.params), 1e-5)
    assert second["actor/pg_loss"] == pytest.approx(first["actor/pg_loss"], rel=1e-5)
    several.update(batch)
    assert batch.old_log_probs is not None


def test_metrics_do_not_depend_on_how_a_step_is_split(tiny_model):
    batch = make_batch()
    whole = make_trainer(tiny_model, make_config(**ONE_SHAPE)).update(batch)
    split = make_trainer(tiny_model, make_config(ppo_max_token_len_per_gpu=32)).update(batch)
    apart = {"actor/padding_waste", "training/compilations"}
    for name in whole.keys() - apart:
        assert split[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-6), name


def test_mini_batches_cover_every_prompt_once_an_epoch_in_a_reproducible_order():
    batch = make_batch(prompts=5)
    cut = {"epochs": 2, "prompts_per_step": 2, "shuffle": True}
    steps = [samples.tolist() for samples, _ in optimizer_steps(batch, (42, 7), **cut)]
    assert [len(samples) // 3 for samples in steps] == [2, 2, 1] * 2
    for epoch in (steps[:3], steps[3:]):
        assert sorted(sample for samples in epoch for sample in samples) == list(range(15))
    assert steps == [samples.tolist() for samples, _ in optimizer_steps(batch, (42, 7), **cut)]
    assert steps != [samples.tolist() for samples, _ in optimizer_steps(batch, (42, 8), **cut)]
    assert steps[:3] != steps[3:]


def test_a_resumed_trainer_goes_on_to_the_bit(trainer, tiny_model, tmp_path):
    trainer.update(make_batch())
    trainer.save(tmp_path / "state")
    version = trainer.version
    metrics = trainer.update(make_batch())  # donates the buffers that are being saved
    trainer.wait_until_saved()
    other = make_trainer(tiny_model, trainer.config)
    other.restore(tmp_path / "state")
    assert other.version == version
    assert other.update(make_batch()) | {"training/compilations": 0} == metrics | {"training/compilations": 0}
    for name in ("params", "state"):
        for new, old in zip(arrays(other.params).values(), arrays(trainer.params).values(), strict=True):
            np.testing.assert_array_equal(new, old, err_msg=name)

    shutil.copytree(tmp_path / "state", tmp_path / "damaged")
    shutil.rmtree(tmp_path / "damaged" / "optimizer")
    with pytest.raises(StateError, match="holds no optimizer"):
        other.restore(tmp_path / "damaged")
    shutil.copytree(tmp_path / "state", tmp_path / "emptied")
    for file in (tmp_path / "emptied" / "model").rglob("*"):
        if file.is_file() and file.name.startswith(("_METADATA", "manifest")):
            file.unlink()
    with pytest.raises(StateError, match="damaged"):
        other.restore(tmp_path / "emptied")
    shutil.copytree(tmp_path / "state", tmp_path / "cut")
    for file in (tmp_path / "cut" / "model").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(StateError, match=r"cut is damaged, (.|\n)*trainer\.resume_mode=resume_path"):
        other.restore(tmp_path / "cut")
    with pytest.raises(StateError, match="does not exist"):
        other.restore(tmp_path / "nothing")


def test_without_the_model_in_it_a_state_is_nothing_to_go_on_from(tiny_model, tmp_path):
    config = make_config()
    checkpoint = config.actor.checkpoint
    checkpoint.save_contents = checkpoint.load_contents = ["hf_model"]
    trainer = make_trainer(tiny_model, config)
    trainer.save(tmp_path / "state")  # the exported folder is another's part
    trainer.wait_until_saved()
    assert not (tmp_path / "state").exists()
    with pytest.raises(StateError, match="leaves its weights behind"):
        trainer.restore(tmp_path / "state")


def test_a_sample_over_the_budget_is_refused_with_key_and_prompt(tiny_model):
    trainer = make_trainer(tiny_model, make_config(ppo_max_token_len_per_gpu=4))
    with pytest.raises(PackingError, match=r"prompt 10\d: .*actor_rollout_ref\.actor\.ppo_max_token_len_per_gpu=4"):
        trainer.update(make_batch())


def test_reference_log_probs_stay_those_of_the_folder(tiny_model):
    trainer = make_trainer(tiny_model, make_config(**ONE_SHAPE), needs_reference=True)
    batch = make_batch()
    before = trainer.log_probs(batch)
    np.testing.assert_array_equal(trainer.ref_log_probs(batch), before)
    trainer.update(batch)
    np.testing.assert_array_equal(trainer.ref_log_probs(batch), before)
    assert np.abs(trainer.log_probs(batch) - before).max() > 1e-3
    with pytest.raises(ValueError, match="needs_reference"):
        make_trainer(tiny_model, make_config(**ONE_SHAPE)).ref_log_probs(batch)

"""PPO with a critic in every mode: values and updates in order, warm-up, checkpoints, exact resume."""

from __future__ import annotations

import asyncio
import contextlib
import pickle

import numpy as np
import pytest
from test_pipeline_modes import MODES, finish, make_run

from jaxrl_ppo.pipeline.checkpoints import CheckpointError, Checkpoints
from jaxrl_ppo.pipeline.step import DivergedError

PARTS = ["model", "optimizer", "extra"]


class Critic:
    """A "critic" that is one number, which its values show."""

    def __init__(self, world):
        self.world, self.state = world, 3

    async def values(self, batch):
        self.world.log.append(("values", self.state))
        return np.full(batch.response_mask.shape, self.state % 10, np.float32)

    async def update(self, batch):
        self.world.log.append(("critic begins", self.state))
        for _ in range(3):
            await asyncio.sleep(0)
        self.state = hash((self.state, batch.returns.tobytes(), batch.values.tobytes()))
        self.world.log.append(("critic ends", self.state))
        return {"critic/vf_loss": 1.0, "critic/grad_norm": 1.0}

    async def save(self, folder):
        folder.mkdir()
        (folder / "state").write_bytes(pickle.dumps(self.state))

    async def save_pretrained(self, folder):
        folder.mkdir()

    async def wait_until_saved(self):
        await asyncio.sleep(0)

    def restore(self, folder):
        self.state = pickle.loads((folder / "state").read_bytes())


def make_critic_run(root, steps, *, warmup=0, own_pool=False, save_contents=(), **settings):
    run, world, observer = make_run(root, steps, **settings)
    run.critic = Critic(world)
    config = run.config
    config.algorithm.adv_estimator, config.critic.enable = "gae", True
    config.trainer.critic_warmup = warmup
    config.critic.enable_resource_pool = own_pool
    config.critic.checkpoint.save_contents = [*PARTS, *save_contents]
    run.estimation = type(run.estimation)(config)
    return run, world, observer


@pytest.mark.parametrize("mode", MODES)
async def test_values_come_before_and_the_critic_learns_before_the_actor(tmp_path, mode):
    run, world, observer = make_critic_run(tmp_path, 3)
    await finish(mode, run)
    ours = ("values", "critic begins", "critic ends", "update begins", "update ends")
    assert [event[0] for event in world.log if event[0] in ours] == list(ours) * 3
    for metrics in observer.steps.values():
        for name in ("critic/vf_loss", "critic/vf_explained_var", "critic/values/mean", "timing_s/update_critic"):
            assert np.isfinite(metrics[name]), name
    assert observer.steps[1]["critic/values/mean"] == 3


async def test_with_devices_of_its_own_the_critic_learns_while_the_actor_does(tmp_path):
    run, world, _ = make_critic_run(tmp_path, 2, own_pool=True)
    await finish("sync", run)
    names = [event[0] for event in world.log]
    assert names.index("update begins") < names.index("critic ends")


@pytest.mark.parametrize("mode", MODES)
async def test_during_warm_up_only_the_critic_learns_and_checkpoints_are_written(tmp_path, mode):
    run, world, observer = make_critic_run(tmp_path, 4, warmup=2, save_freq=1, test_freq=2)
    await finish(mode, run)
    assert [event[1] for event in world.log if event[0] == "update begins"] == [0, 1]
    assert len([event for event in world.log if event[0] == "critic begins"]) == 4
    assert ("load", 0) in world.log  # the rollouts have the trainer's weights from the start
    assert [step in observer.steps and "timing_s/update_actor" in observer.steps[step] for step in (1, 2, 3, 4)] == [
        False, False, True, True,
    ]  # fmt: skip
    late = 1 if mode == "one_step_off" else 0
    assert [observer.steps[step]["training/staleness"] for step in (1, 2, 3, 4)] == [0, 0, 0, late]
    checkpoints = Checkpoints(tmp_path, keep=None)
    assert sorted(checkpoints.committed()) == [1, 2, 3, 4]
    assert all((checkpoints.folder(step) / "critic" / "state").exists() for step in (1, 2, 3, 4))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [1, 2, 3])
async def test_resume_is_exact_with_a_critic(tmp_path, mode, cut):
    settings = {"warmup": 2, "save_freq": 1}
    whole, _, _ = make_critic_run(tmp_path / "whole", 4, **settings)
    await finish(mode, whole)

    root = tmp_path / "cut"
    first, _, _ = make_critic_run(root, 4, **settings)
    with contextlib.suppress(ZeroDivisionError):
        first.finish = lambda step, finish=first.finish: (finish(step), 1 / (step - cut))  # killed after step `cut`
        await finish(mode, first)
    with contextlib.suppress(asyncio.CancelledError):
        await first.saving.finish()
    folder = Checkpoints(root, keep=None).to_resume("auto", None)
    second, _, _ = make_critic_run(root, 4, **settings)
    second.trainer.restore(folder / "actor")
    second.critic.restore(Checkpoints.critic(folder))
    controller = Checkpoints.load(folder)
    second.prompts.restore(controller["prompts"])
    second.restore(controller)
    await finish(mode, second)
    assert (second.trainer.state, second.critic.state) == (whole.trainer.state, whole.critic.state)


async def test_older_checkpoints_let_go_of_their_critic_and_hf_model_exports_it(tmp_path):
    run, _, _ = make_critic_run(tmp_path, 4, save_freq=1, save_contents=["hf_model"])
    run.saving.checkpoints = Checkpoints(tmp_path, keep=3, keep_critic=1)
    await finish("sync", run)
    checkpoints = run.saving.checkpoints
    assert sorted(checkpoints.committed()) == [2, 3, 4]
    assert (checkpoints.folder(4) / "huggingface_critic").is_dir()
    assert Checkpoints.critic(checkpoints.folder(4)).is_dir()
    with pytest.raises(CheckpointError, match=r"global_step_3 holds no critic: .*max_critic_ckpt_to_keep"):
        Checkpoints.critic(checkpoints.folder(3))


async def test_a_critic_that_diverges_stops_the_run(tmp_path):
    run, _, _ = make_critic_run(tmp_path, 9)
    run.config.trainer.max_consecutive_skips = 3

    async def diverged(batch):
        return {"critic/skipped_updates": 1.0}

    run.critic.update = diverged
    with pytest.raises(DivergedError, match=r"step 3: the critic's gradient .* Lower critic\.optim\.lr"):
        await finish("sync", run)

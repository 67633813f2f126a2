"""The critic's settings, and those of the estimators that need something of their own: rules, table, no silent keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from jaxrl_ppo.schema import sizes, table
from jaxrl_ppo.schema.validate import Checked

ACTOR = "actor_rollout_ref.actor"
GAE = "algorithm.adv_estimator=gae"


def test_a_critic_is_there_when_the_estimator_needs_one(check: Callable[..., Checked]) -> None:
    config = check(GAE, "critic.ppo_epochs=3", "trainer.critic_warmup=5").config
    assert config.critic.enable
    assert config.critic.model.path == config.actor_rollout_ref.model.path
    assert sizes.critic_steps_per_step(config) == 16 // 8 * 3
    text = table.render(config)
    assert "alone in the first 5 steps" in text
    assert "the trainer's devices" in text
    assert not check().config.critic.enable


def test_a_pool_of_its_own(check: Callable[..., Checked]) -> None:
    config = check(GAE, "critic.enable_resource_pool=true", "critic.n_gpus_per_node=4").config
    assert sizes.critic_devices(config) == 4
    assert "1 node x 4" in table.render(config)
    assert sizes.critic_devices(check("critic.enable_resource_pool=true").config) == 0


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([GAE, "critic.enable=false"], "critic.enable=false: algorithm.adv_estimator=gae needs a critic"),
        (["trainer.critic_warmup=2"], "trainer.critic_warmup=2 needs a critic"),
        ([GAE, "critic.ppo_mini_batch_size=6"], "does not divide by critic.ppo_mini_batch_size=6"),
        ([GAE, "critic.ppo_max_token_len_per_gpu=1000"], "critic.ppo_max_token_len_per_gpu=1000 holds less than one"),
        ([GAE, "critic.enable_resource_pool=true", "critic.n_gpus_per_node=3"], "do not divide over 3 data-parallel"),
        (
            [GAE, "critic.enable_resource_pool=true", "critic.n_gpus_per_node=1", f"{ACTOR}.mesh.tensor=8"],
            "does not multiply to the 1 devices of the critic's pool",
        ),
        ([GAE, "critic.checkpoint.load_contents=[hf_model]"], "critic.checkpoint.load_contents asks for hf_model"),
        (
            [GAE, "trainer.max_actor_ckpt_to_keep=1", "trainer.max_critic_ckpt_to_keep=2"],
            "trainer.max_critic_ckpt_to_keep=2 is more than",
        ),
        ([GAE, "critic.optim.optimizer=adamv"], "critic.optim.optimizer=adamv: must be one of"),
        (["algorithm.use_pf_ppo=true"], "algorithm.use_pf_ppo=true needs algorithm.adv_estimator=gae"),
        (["algorithm.adv_estimator=gdpo"], "needs algorithm.gdpo_reward_keys"),
        (["algorithm.gdpo_reward_keys=[a]"], "algorithm.gdpo_reward_keys needs algorithm.adv_estimator=gdpo"),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a,b]", "algorithm.gdpo_reward_weights=[1]"],
            "has 1 numbers for 2",
        ),
        (
            ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[a]", "algorithm.use_kl_in_reward=true"],
            "algorithm.use_kl_in_reward=true: gdpo takes its rewards",
        ),
        (["algorithm.filter_groups.enable=true"], "needs actor_rollout_ref.rollout.n of at least 2"),
        (
            [
                "algorithm.filter_groups.enable=true",
                "algorithm.filter_groups.max_num_gen_batches=1",
                "data.gen_batch_size=8",
            ],
            "= 8 prompts are less than one step's data.train_batch_size=16",
        ),
        (["algorithm.rollout_correction.loss_type=reinforce"], "needs algorithm.rollout_correction.bypass_mode=true"),
        (
            [
                "algorithm.rollout_correction.loss_type=reinforce",
                "algorithm.rollout_correction.bypass_mode=true",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            ],
            "takes the place of actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        ),
    ],
)  # fmt: skip
def test_faults(faults: Callable[..., list[str]], overrides: list[str], words: str) -> None:
    found = faults(*overrides)
    assert any(words in text for text in found), found


def test_settings_of_a_critic_that_is_not_there_are_told(check: Callable[..., Checked]) -> None:
    (note,) = check("critic.optim.lr=1e-3", "trainer.max_critic_ckpt_to_keep=2").notes
    assert note.startswith("no effect here: ")
    assert "critic.optim.lr (no critic is trained)" in note
    assert "trainer.max_critic_ckpt_to_keep (no critic is trained)" in note
    (note,) = check(GAE, "critic.nnodes=2").notes
    assert note == "no effect here: critic.nnodes (critic.enable_resource_pool=false)"
    assert not check(GAE, "critic.optim.lr=1e-3").notes

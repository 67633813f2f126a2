"""Bad configurations: each fault names its key, its value and what is allowed, and all come at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxrl_ppo.schema.coerce import walk
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import ConfigError, Fault, named
from jaxrl_ppo.schema.legacy import assign
from jaxrl_ppo.schema.validate import Checked, validate_config

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # types, bounds, choices
        ("trainer.total_epochs=1.5", "trainer.total_epochs=1.5: must be a whole number."),
        ("trainer.total_epochs=true", "trainer.total_epochs=true: must be a whole number."),
        ("trainer.total_epochs=null", "trainer.total_epochs=null: must be a whole number."),
        ("trainer.val_only=1", "trainer.val_only=1: must be true or false."),
        (f"{ACTOR}.optim.lr=fast", f"{ACTOR}.optim.lr=fast: must be a number."),
        (f"{ACTOR}.optim.lr=-1e-6", f"{ACTOR}.optim.lr=-1e-06: must be at least 0."),
        (f"{ACTOR}.optim.lr=nan", "must be at least 0"),
        (
            f"{ACTOR}.optim.betas=[0.9,1]",
            f"{ACTOR}.optim.betas=[0.9, 1.0]: must be a list whose items are each at least 0",
        ),
        (f"{ACTOR}.optim.betas=[0.9]", f"{ACTOR}.optim.betas=[0.9]: must be two numbers."),
        (f"{ACTOR}.mesh.fsdp=0", f"{ACTOR}.mesh.fsdp=0: must be at least 1, or -1."),
        ("trainer.device=gpu", "cpu (did you mean cuda?)."),
        (f"{ROLLOUT}.top_p=1.1", f"{ROLLOUT}.top_p=1.1: must be more than 0 and at most 1."),
        (f"{ROLLOUT}.top_p=0", f"{ROLLOUT}.top_p=0.0: must be more than 0 and at most 1."),
        (f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.name=sglang: must be one of auto, vllm, jax."),
        (f"{ROLLOUT}.cpu_affinity=[0,1]", f"{ROLLOUT}.cpu_affinity=[0, 1]: must be a list, each item a list"),
        ("algorithm.adv_estimator=grop", "(did you mean grpo?)"),
        ("trainer.logger=[console,swanlab]", "must be a list whose items are each one of console, tensorboard"),
        ("data.apply_chat_template_kwargs=1", "data.apply_chat_template_kwargs=1: must be a mapping."),
        (f"{ROLLOUT}=1", f"{ROLLOUT}=1: is a section, set its keys one by one."),
        # unknown keys
        ("trainer.tset_freq=1", "trainer.tset_freq: unknown key. Did you mean trainer.test_freq?"),
        ("trainer.lr=1", f"Did you mean {ACTOR}.optim.lr or critic.optim.lr?"),
        ("actor.ppo_epochs=1", f"actor: unknown key. Did you mean {ACTOR}?"),
        ("traner.test_freq=1", "traner: unknown key. Did you mean trainer?"),
        ("zzz=1", "zzz: unknown key."),
        # batch sizes and devices
        (
            "data.train_batch_size=20",
            f"data.train_batch_size=20 does not divide by {ACTOR}.ppo_mini_batch_size=8; e.g. 16 or 24 does.",
        ),
        ("data.train_batch_size=4", f"{ACTOR}.ppo_mini_batch_size=8 is larger than data.train_batch_size=4"),
        ("trainer.n_gpus_per_node=3", "= 8 sequences do not divide over 3 data-parallel devices"),
        (f"{ACTOR}.mesh.tensor=3", "does not multiply to trainer.nnodes=1 x trainer.n_gpus_per_node=8 = 8 devices."),
        (f"{ACTOR}.mesh.replica=-1", "only one axis may be -1"),
        (
            f"{ROLLOUT}.tensor_model_parallel_size=3",
            f"= 8 devices do not hold whole replicas of 3 ({ROLLOUT}.tensor_model_parallel_size=3)",
        ),
        (f"{ROLLOUT}.n_gpus_per_node=0", "the rollout pool has no devices"),
        (f"{ROLLOUT}.cpu_affinity=[[0]]", f"{ROLLOUT}.cpu_affinity has 1 entries for 8 replicas."),
        (f"{ROLLOUT}.expert_parallel_size=2", "is more than the 1 devices of a replica"),
        # lengths
        (f"{ROLLOUT}.response_length=9", "are one length in two places: give data.max_response_length."),
        (
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000",
            f"{ACTOR}.ppo_max_token_len_per_gpu=1000 holds less than one longest",
        ),
        (
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1000",
            "per_gpu=1000 holds less than one longest sample",
        ),
        (f"{ACTOR}.optim.optimizer=adamv", f"{ACTOR}.optim.optimizer=adamv: must be one of adabelief, "),
        (
            f"{ACTOR}.optim.optimizer=SGD",
            f"optimizer=SGD has no weight decay, so {ACTOR}.optim.weight_decay must be 0.",
        ),
        (f"{ROLLOUT}.max_model_len=1000", f"{ROLLOUT}.max_model_len=1000 is less than data.max_prompt_length=512"),
        (
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward.reward_kwargs.overlong_buffer_cfg.len=0 must be",
        ),
        # algorithm
        ("algorithm.adv_estimator=rloo", f"algorithm.adv_estimator=rloo needs {ROLLOUT}.n of at least 2."),
        (f"{ACTOR}.policy_loss.loss_mode=dro", f"needs {ACTOR}.policy_loss.dro_beta"),
        (f"{ACTOR}.policy_loss.clip_cov_lb=9", "clip_cov_lb is more than"),
        ("algorithm.rollout_correction.rollout_is_threshold=2_1", "must be a number above 0, or a band lo_hi"),
        (
            "algorithm.rollout_correction.rollout_is_batch_normalize=true",
            "needs algorithm.rollout_correction.rollout_is.",
        ),
        ("algorithm.rollout_correction.rollout_rs=token_k1", "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ("algorithm.rollout_correction.rollout_rs=token_k9", "'token_k9' is not one of token_k1"),
        ("algorithm.rollout_correction.rollout_rs_threshold=2", "needs algorithm.rollout_correction.rollout_rs."),
        # sampling, modes, users' code
        (f"{ROLLOUT}.val_kwargs.do_sample=true", f"needs {ROLLOUT}.val_kwargs.temperature of more than 0"),
        (f"{ACTOR}.checkpoint.load_contents=[hf_model]", "asks for hf_model, which"),
        (
            "trainer.mode=one_step_off",
            "actor_rollout_ref.hybrid_engine=true: trainer.mode=one_step_off generates while",
        ),
        (
            f"{ROLLOUT}.n_gpus_per_node=4",
            f"{ROLLOUT}.n_gpus_per_node=4 is not trainer.n_gpus_per_node=8, but with actor_rollout_ref.hybrid_engine",
        ),
        (f"{ROLLOUT}.tensor_model_parallel_size=16", "have 8 devices, and a replica needs 16: replicas must fit in."),
        (f"{ROLLOUT}.over_sample_rate=1", "starts prompts of later batches, which only trainer.mode=async does."),
        ("trainer.resume_mode=resume_path", "needs trainer.resume_from_path"),
        ("trainer.resume_from_path=x", "is not used with trainer.resume_mode=auto"),
        ("data.sampler.class_name=A", "data.sampler.class_name is given without data.sampler.class_path."),
        ("reward.reward_manager.source=importlib", "needs reward.reward_manager.module.path"),
    ],
)
def test_fault(faults: Callable[..., list[str]], override: str, message: str) -> None:
    found = faults(override)
    assert any(message in text for text in found), found


def test_running_ahead_of_the_staleness_limit(faults: Callable[..., list[str]]) -> None:
    found = faults(
        "async_training.trigger_parameter_sync_step=3", f"{ROLLOUT}.over_sample_rate=1.5", name="async_ppo_trainer"
    )
    assert any("over_sample_rate=1.5 starts prompts that async_training.max_staleness=1" in text for text in found)
    assert any("trigger_parameter_sync_step=3 leaves the rollouts" in text and "at most 2." in text for text in found)


def test_two_rules_of_a_pair(faults: Callable[..., list[str]]) -> None:
    assert any(
        "has 2 bounds for 3 rules" in text
        for text in faults(
            "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k2,seq_max_k3'",
            "algorithm.rollout_correction.rollout_rs_threshold='2.0,0.5_2.0'",
        )
    )
    assert any("data.val_files" in text for text in faults("data.val_files=null", "trainer.test_freq=5"))
    assert any(
        "calculate_log_probs=false" in text
        for text in faults(f"{ROLLOUT}.calculate_log_probs=false", "algorithm.rollout_correction.rollout_is=token")
    )
    assert any("equal responses" in text for text in faults(f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.n=4"))


def test_all_faults_come_at_once(faults: Callable[..., list[str]]) -> None:
    found = faults(
        "trainer.tset_freq=1",
        f"{ACTOR}.optim.lr=fast",
        f"{ROLLOUT}.temperature=-1",
        "data.train_batch_size=20",
        "actor_rollout_ref.model.mtp.enable=true",
        "data.train_files=nowhere.parquet",
    )
    assert len(found) == 6


def test_a_bad_value_brings_no_faults_of_its_default(faults: Callable[..., list[str]]) -> None:
    assert faults("data.train_batch_size=many") == ["data.train_batch_size=many: must be a whole number."]


def test_error_text_lists_the_faults(check: Callable[..., Checked]) -> None:
    with pytest.raises(ConfigError) as caught:
        check("trainer.save_freq=0", "trainer.total_epochs=0")
    assert str(caught.value).splitlines() == [
        "2 faults in the configuration:",
        "  - trainer.total_epochs=0: must be at least 1.",
        "  - trainer.save_freq=0: must be at least 1, or -1.",
    ]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("trainer.total_epochs=2.0", "total_epochs", 2),
        ("trainer.experiment_name=7", "experiment_name", "7"),
        ("trainer.logger=console", "logger", ["console"]),
    ],
)
def test_values_that_pass(check: Callable[..., Checked], override: str, key: str, value: object) -> None:
    got = getattr(check(override).config.trainer, key)
    assert got == value
    assert type(got) is type(value)


def test_bounds_that_are_allowed_themselves(check: Callable[..., Checked]) -> None:
    assert check(f"{ACTOR}.optim.lr=0", f"{ROLLOUT}.top_p=1", "data.seed=0", "trainer.save_freq=1").config


def test_a_band_is_not_one_number(check: Callable[..., Checked]) -> None:
    config = check("algorithm.rollout_correction.rollout_is_threshold=1_2").config
    assert config.algorithm.rollout_correction.rollout_is_threshold == "1_2"


def test_required_values() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config({"algorithm": {"adv_estimator": "grpo"}, "trainer": {"nnodes": "???"}})
    assert [fault.message.split(":")[0] for fault in caught.value.faults] == [
        "trainer.nnodes must be given",
        "actor_rollout_ref.model.path must be given",
        "data.train_files must be given",
    ]


def test_rollout_on_no_nodes_of_its_own_takes_the_trainers(check: Callable[..., Checked]) -> None:
    rollout = check(f"{ROLLOUT}.nnodes=0", "trainer.n_gpus_per_node=4").config.actor_rollout_ref.rollout
    assert (rollout.nnodes, rollout.n_gpus_per_node) == (1, 4)


def test_prefix_sharing_takes_a_yaml_boolean(check: Callable[..., Checked]) -> None:
    assert check(f"{ACTOR}.prefix_sharing=true").config.actor_rollout_ref.actor.prefix_sharing == "true"


ANY_VALUE = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers() | st.text())
ANY_VALUE |= st.dictionaries(st.text(min_size=1), st.integers(), max_size=2)
KEYS = [path for path, _, _ in walk()]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS) | st.text("abc.", min_size=1), ANY_VALUE, max_size=6))
def test_nothing_but_a_config_error_comes_out(values: dict[str, object]) -> None:
    raw: dict[str, object] = {}
    for path, value in values.items():
        assign(raw, path, value)
    with contextlib.suppress(ConfigError):
        assert isinstance(validate_config(raw).config, Config)


def test_several_reward_functions_may_take_lists(check: Callable[..., Checked]) -> None:
    reward = check("+reward.functions.right={weight: 2}", "reward.reward_manager.name=batch").config.reward
    assert (list(reward.functions), reward.reward_manager.name) == (["right"], "batch")


def test_a_fault_ends_with_one_full_stop() -> None:
    for text in ("is not a parquet file..", "is not a parquet file", "is not a parquet file. \n"):
        assert Fault(("a",), text).message == "is not a parquet file."
    assert Fault(("a",), "Did you mean b?").message == "Did you mean b?"


def test_a_key_is_said_once() -> None:
    assert named("data.train_files", "x.parquet: no rows") == "data.train_files: x.parquet: no rows"
    assert named("data.train_files", "data.parquet: no rows") == "data.train_files: data.parquet: no rows"
    for text in ("reward: no scorer", "reward.functions.a: no file"):
        assert named("reward", text) == text
    beside = "actor_rollout_ref.model.custom_chat_template: no file"
    assert named("actor_rollout_ref.model.path", beside) == beside
    assert named("reward", "rewards failed") == "reward: rewards failed"

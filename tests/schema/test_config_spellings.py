"""verl's other spellings, keys that do nothing here, and what is not built yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from schema_cases import compose

from jaxrl_ppo.schema.coerce import walk
from jaxrl_ppo.schema.legacy import REWARD_SPELLINGS, SPELLINGS, lookup, migrate_legacy_reward_impl
from jaxrl_ppo.schema.no_effect import CONDITIONAL
from jaxrl_ppo.schema.validate import Checked, validate_config

ACTOR = "actor_rollout_ref.actor"


def value_of(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{ACTOR}.grad_clip=0.5", f"{ACTOR}.optim.clip_grad", 0.5),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.mesh.sequence", 2),
        (f"{ACTOR}.megatron.tensor_model_parallel_size=4", f"{ACTOR}.mesh.tensor", 4),
        (f"{ACTOR}.optim.warmup_style=cosine", f"{ACTOR}.optim.lr_scheduler_type", "cosine"),
        (f"{ACTOR}.fsdp_config.fsdp_size=4", f"{ACTOR}.mesh.fsdp", 4),
        (f"{ACTOR}.fsdp_config.fsdp_size=4", f"{ACTOR}.mesh.replica", -1),
        ("critic.grad_clip=0.5", "critic.optim.clip_grad", 0.5),
        ("reward_model.reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("+reward_manager=dapo", "reward.reward_manager.name", "dapo"),
        ("+reward_manager.name=dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.num_workers=3", "reward.num_workers", 3),
        ("custom_reward_function.name=f", "reward.custom_reward_function.name", "f"),
        ("+custom_reward_function.reward_kwargs.x=1", "reward.custom_reward_function.reward_kwargs", {"x": 1}),
        ("+reward_model.overlong_buffer.len=5", "reward.reward_kwargs.overlong_buffer_cfg.len", 5),
        ("+reward_model.reward_kwargs.max_resp_len=9", "reward.reward_kwargs.max_resp_len", 9),
    ],
)
def test_spelling_is_migrated_with_a_line(check: Callable[..., Checked], override: str, key: str, value: Any) -> None:
    checked = check(override)
    assert value_of(checked.config, key) == value
    old = override.lstrip("+").split("=")[0]
    assert any(old in note and " is read as " in note for note in checked.notes)


def test_fsdp_size_of_minus_one_means_nothing(check: Callable[..., Checked]) -> None:
    checked = check(f"{ACTOR}.fsdp_config.fsdp_size=-1")
    assert checked.config.actor_rollout_ref.actor.mesh.fsdp == -1
    assert checked.notes == ()


def test_two_spellings_must_agree(check: Callable[..., Checked], faults: Callable[..., list[str]]) -> None:
    key, old = f"{ACTOR}.optim.clip_grad", f"{ACTOR}.grad_clip"
    assert check(f"{key}=0.5", f"{old}=0.5").config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    expected = [f"{old}=0.5 and {key}=1.0 are two spellings of one key: give one."]
    assert faults(f"{key}=1.0", f"{old}=0.5") == expected  # 1.0 is the default, but it was asked for
    assert faults("reward_model.num_workers=3", "reward.num_workers=4") == [
        "reward_model.num_workers=3 and reward.num_workers=4 are two spellings of one key: give one."
    ]


def test_migrate_legacy_reward_impl_stands_alone() -> None:
    raw = migrate_legacy_reward_impl({"custom_reward_function": {"path": "f.py"}, "reward_model": {"enable": True}})
    assert raw == {"reward": {"custom_reward_function": {"path": "f.py"}, "reward_model": {"enable": True}}}


def test_spellings_lead_to_keys() -> None:
    keys = {path for path, _, _ in walk()}
    sections = {path.rpartition(".")[0] for path in keys}
    for new in [*SPELLINGS.values(), *REWARD_SPELLINGS.values()]:
        assert new in keys | sections
    assert not set(SPELLINGS) & keys


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ACTOR}.use_torch_compile=False", f"{ACTOR}.use_torch_compile (XLA compiles everything)"),
        ("actor_rollout_ref.ref.fsdp_config.forward_prefetch=True", "fsdp_config.forward_prefetch (XLA schedules)"),
        ("actor_rollout_ref.rollout.mode=async", "rollout.mode (engines are always asynchronous)"),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
            "rollout.log_prob_micro_batch_size_per_gpu (",
        ),
        ("global_profiler.global_tool_config.nsys.discrete=True", "global_profiler.global_tool_config.nsys.discrete ("),
        ("critic.model.fsdp_config.param_offload=False", "critic.model.fsdp_config.param_offload ("),
        ("data.return_raw_chat=True", "data.return_raw_chat ("),
        ("actor_rollout_ref.model.use_remove_padding=False", "use_remove_padding (samples are always packed)"),
        (f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.strategy (every strategy means the mesh)"),
    ],
)
def test_keys_without_effect_are_reported_in_one_line(check: Callable[..., Checked], override: str, words: str) -> None:
    notes = check(override, "trainer.use_legacy_worker_impl=auto").notes
    line = [note for note in notes if note.startswith("no effect here: ")]
    assert len(line) == 1
    assert words in line[0]
    assert "trainer.use_legacy_worker_impl (" in line[0]


def test_keys_of_vllm_have_no_effect_on_the_jax_engine(check: Callable[..., Checked]) -> None:
    eager = "actor_rollout_ref.rollout.enforce_eager"
    assert not check("actor_rollout_ref.rollout.name=vllm", f"{eager}=true").notes
    (note,) = check("actor_rollout_ref.rollout.name=jax", f"{eager}=true").notes
    assert note == f"no effect here: {eager} (the jax engine has no such setting)"


@pytest.mark.parametrize("name", ["ppo_trainer", "one_step_off_ppo_trainer", "async_ppo_trainer", "quickstart"])
def test_our_own_configurations_set_nothing_that_has_no_effect_in_them(name: str) -> None:
    given = [] if name == "quickstart" else ["data.train_files=a.parquet", "actor_rollout_ref.model.path=a"]
    raw, _ = compose([*given, "trainer.test_freq=-1"], name)
    assert not validate_config(raw, files=False).notes


def test_asking_for_what_happens_anyway_needs_no_line(check: Callable[..., Checked]) -> None:
    assert not check(
        "actor_rollout_ref.model.use_remove_padding=True", f"{ACTOR}.fsdp_config.param_offload=False"
    ).notes
    assert not check(f"{ACTOR}.loss_agg_mode=token-mean").notes


def test_aggregation_of_a_loss_that_has_its_own(check: Callable[..., Checked]) -> None:
    (note,) = check(f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean").notes
    assert "loss_agg_mode (the policy loss is a seq-mean-token-mean)" in note


def test_hydra_targets_are_ignored(check: Callable[..., Checked]) -> None:
    assert not check("trainer._target_=x.y").notes


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.mtp.enable=true",
        f"{ACTOR}.router_replay.mode=R2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
    ],
)
def test_what_is_not_built_is_refused(faults: Callable[..., list[str]], override: str) -> None:
    (message,) = faults(override)
    value = override.split("=")[1]
    assert f"={value}: not available yet (" in message
    available = message.partition("; available: ")[2]
    assert available
    assert value not in available.rstrip(".").split(", ")


@pytest.mark.parametrize(
    "override",
    ["actor_rollout_ref.model.mtp.enable=false", f"{ACTOR}.router_replay.mode=disabled", "algorithm.use_pf_ppo=false"],
)
def test_what_is_not_built_may_be_switched_off(check: Callable[..., Checked], override: str) -> None:
    assert check(override).config


def test_tables_name_keys_of_the_schema() -> None:
    keys = {path for path, _, _ in walk()}
    assert set(CONDITIONAL) <= keys


def test_lookup_of_a_path_that_leads_nowhere() -> None:
    assert lookup({"a": {"b": 1}}, "a.b.c") is None

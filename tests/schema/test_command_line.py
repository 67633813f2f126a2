"""The command itself: exit codes, the table, and the ways verl's users write a command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from schema_cases import CONFIG_FOLDER, ROOT, compose_tree

import device
from jaxrl_ppo.main import check_arguments, read_config
from jaxrl_ppo.schema.coerce import walk
from jaxrl_ppo.schema.faults import ConfigError
from jaxrl_ppo.schema.overrides import given_keys, normalise

# A verl recipe, argument for argument; {model}, {train} and {val} stand for local paths.
RECIPE = """
algorithm.adv_estimator=grpo data.train_files={train} data.val_files={val} data.train_batch_size=1024
data.max_prompt_length=512 data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error
actor_rollout_ref.model.path={model} actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=80 actor_rollout_ref.actor.use_kl_loss=True
actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.n=5 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=160
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger=["console","wandb"]
trainer.project_name=p trainer.experiment_name=e trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20
trainer.test_freq=5 trainer.total_epochs=15
"""


def run(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-m", "jaxrl_ppo.main", *arguments],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def many_rows(files: Path) -> Path:
    """`val.jsonl` repeated: rows enough for the recipe."""
    file = files / "many.jsonl"
    file.write_text((files / "val.jsonl").read_text() * 1024)
    return file


def test_a_verl_recipe_prints_its_table(files: Path, many_rows: Path) -> None:
    recipe = RECIPE.format(model=files / "model", train=many_rows, val=files / "val.jsonl").split()
    result = run(*recipe, "trainer.dry_run=true")
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    lines = [line.split("  ")[-1].strip() for line in result.stdout.splitlines()]
    for value in ("1,024", "5, temperature 1", "5,120", "1,280", "4", "512 prompt + 1,024 response"):
        assert value in lines
    assert not (ROOT / "outputs").exists()  # Hydra leaves nothing behind


def test_bad_configuration_exits_2_without_a_traceback(needed: list[str]) -> None:
    result = run(*needed, "trainer.tset_freq=1", "trainer.nnodes=0", "trainer.dry_run=true")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.splitlines()[0] == "2 faults in the configuration:"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.logger=[console", "  - trainer.logger=[console: the [ is not closed. A value with such"),
        ("--config-name=nowhere", "--config-name=nowhere: there is no such configuration"),
        ("data.seed=${no.such.key}", "data.seed: Interpolation key 'no.such.key' not found"),
    ],
)
def test_what_hydra_cannot_compose_exits_2(needed: list[str], argument: str, words: str) -> None:
    result = run(*needed, "trainer.dry_run=true", argument)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_devices_that_are_not_here_stop_a_run_but_not_a_dry_run(needed: list[str]) -> None:
    tpu = [*needed, "trainer.device=tpu", "trainer.n_gpus_per_node=4", "actor_rollout_ref.hybrid_engine=false"]
    dry = run(*tpu, "trainer.dry_run=true")
    assert dry.returncode == 0
    assert "note: a run would stop here: 8 TPU device(s) are needed here" in dry.stdout
    result = run(*tpu)
    assert result.returncode == 2
    assert "8 TPU device(s) are needed here" in result.stderr
    assert "this machine has 0" in result.stderr


def test_turns_on_accelerators_that_belong_to_one_process_are_refused(needed: list[str]) -> None:
    result = run(*needed, "trainer.device=tpu")
    assert result.returncode == 2
    assert "actor_rollout_ref.hybrid_engine=true: trainer and rollout cannot take turns on" in result.stderr
    assert "set actor_rollout_ref.hybrid_engine=false" in result.stderr


def test_cfg_job(needed: list[str]) -> None:
    result = run("--cfg", "job", "--package", "trainer", "+trainer.total_epochs=3", "--config-name", "quickstart")
    assert result.returncode == 0
    assert "total_epochs: 3" in result.stdout
    assert "mode: one_step_off" in result.stdout


def test_multirun(needed: list[str], tmp_path: Path) -> None:
    result = run(*needed, "trainer.dry_run=true", "--multirun", "trainer.total_epochs=1,2", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    lengths = [line.split("  ")[-1].strip() for line in result.stdout.splitlines() if line.startswith("  length")]
    assert lengths == ["1 epoch = 2 steps", "2 epochs = 4 steps"]


def test_a_users_own_configuration_builds_on_ours(needed: list[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "experiment").mkdir(parents=True)
    # The search path is what verl's own one-step-off file has; the folder does not exist here.
    head = "hydra:\n  searchpath: [file://verl/trainer/config]\ndefaults:\n  - one_step_off_ppo_trainer\n  - _self_\n"
    (mine / "my_run.yaml").write_text(head + "trainer:\n  total_epochs: 3\n  save_freq: 4\n")
    (mine / "experiment" / "long.yaml").write_text("# @package _global_\ntrainer:\n  total_epochs: 9\n")
    result = run(
        *needed,
        *("--config-path", "mine", "--config-name", "my_run", "+experiment=long", "trainer.dry_run=true"),
        folder=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    for line in ("one_step_off", "9 epochs = 18 steps", "every 4 steps"):
        assert line in [text.split("  ")[-1].strip() for text in result.stdout.splitlines()]


def test_works_beside_a_config_folder_of_the_users(needed: list[str], tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "__init__.py").touch()
    assert run(*needed, "trainer.dry_run=true", folder=tmp_path).returncode == 0


def test_normalise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    arguments = [
        "a.b=1",
        "+a.c=x=y",
        "++a.d=[1,2]",
        "~a.e",
        "actor=dp_actor",
        "actor@a.b=dp_actor",
        "hydra.verbose=true",
    ]
    arguments += ["trainr=1", "+experiment=x", "-m", "--config-path", "mine", "-cn=x", "--info", "defaults"]
    assert normalise(arguments, CONFIG_FOLDER) == [
        *("-m", f"--config-path={tmp_path}/mine", "-cn=x", "--info=defaults"),
        *("++a.b=1", "++a.c=x=y", "++a.d=[1,2]", "~a.e", "actor=dp_actor", "actor@a.b=dp_actor", "hydra.verbose=true"),
        *("++trainr=1", "+experiment=x"),
    ]


def test_config_path_of_verls_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalise(["--config-path=config"], CONFIG_FOLDER) == [f"--config-path={CONFIG_FOLDER}"]
    (tmp_path / "config").mkdir()
    assert normalise(["--config-path", "config"], CONFIG_FOLDER) == [f"--config-path={tmp_path}/config"]
    assert normalise(["--config-path", "none"], CONFIG_FOLDER) == ["--config-path=none"]


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("trainer.logger=[console]]", "a ] closes nothing"),
        ("a.b={x: [1}", "a [ is closed by }"),
        ("a.b=it's", "the quote ' is not closed"),
        ("a.b=[1,]", "there is a comma with nothing after it"),
        ("a.b==3", "there is a second ="),
        ("a.b=3;", "Hydra cannot read it: token recognition error at: ';'"),
        ("a.b", "is no setting: one is KEY=VALUE"),
        ("=3", "has no key"),
    ],
)
def test_an_argument_that_cannot_be_read_is_named_with_what_is_wrong(argument: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_arguments(normalise(["-m", "trainer.nnodes=1", argument, "~a.c"], CONFIG_FOLDER))
    (only,) = caught.value.faults
    assert only.message.startswith(f"{argument}: {wrong}")


def test_arguments_that_can_be_read() -> None:
    check_arguments(
        normalise(["a.b='x=[y'", "a.b=[1, {x: 'it'}]", "a.b=", "~a", "a@b=c", "a=1,2", r"a=\[", "-cn=="], CONFIG_FOLDER)
    )


def test_given_keys() -> None:
    assert given_keys(["++a.b=1", "~a.c", "actor@x=y", "a.d=${e.f}"]) == {"a.b", "a.d"}


def test_a_bad_value_that_other_keys_copy_is_told_once(needed: list[str]) -> None:
    for override, fault in (
        ("data.max_response_length=-5", "data.max_response_length=-5: must be at least 1."),
        ("actor_rollout_ref.actor.clip_ratio=wide", "actor_rollout_ref.actor.clip_ratio=wide: must be a number."),
        (
            "actor_rollout_ref.actor.checkpoint.save_contents=[everything]",
            "actor_rollout_ref.actor.checkpoint.save_contents=[everything]: must be a list whose items are each one of",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            read_config(compose_tree([*needed, override]), [])
        (only,) = caught.value.faults
        assert only.message.startswith(fault)


def test_references_that_lead_nowhere_are_told_with_the_other_faults(needed: list[str]) -> None:
    """Once each, though the rollout's keys refer to that of the data."""
    wrong = ["data.seed=${no.such.key}", "data.max_response_length=${nor.this}", "trainer.nnodes=0"]
    with pytest.raises(ConfigError) as caught:
        read_config(compose_tree([*needed, *wrong]), [])
    assert sorted(fault.keys[0] for fault in caught.value.faults) == sorted(text.split("=")[0] for text in wrong)


@pytest.mark.parametrize(
    ("estimator", "n", "told"),
    [
        ("grpo", 1, "each sample's advantage is its score itself"),
        ("opo", 1, "every advantage is 0, and the rewards teach nothing. Set actor_rollout_ref.rollout.n"),
        ("grpo", 2, ""),
        ("reinforce_plus_plus", 1, ""),
    ],
)
def test_estimators_with_nothing_to_compare_are_noted(needed: list[str], estimator: str, n: int, told: str) -> None:
    keys = (f"algorithm.adv_estimator={estimator}", f"actor_rollout_ref.rollout.n={n}")
    notes = [note for note in read_config(compose_tree([*needed, *keys]), []).notes if note.startswith(keys[0])]
    assert len(notes) == bool(told)
    assert all(told in note for note in notes)


def test_help_names_configurations_and_keys_that_exist() -> None:
    result = run("--help")
    assert result.returncode == 0, result.stderr
    words = set(re.split(r"[\s,=]+", result.stdout))
    configurations = {path.stem for path in CONFIG_FOLDER.glob("*.yaml")}
    assert configurations <= words
    sections = {path.split(".")[0] for path, _, _ in walk()}
    keys = {word for word in words if word.split(".")[0] in sections and "." in word}
    assert len(keys) > 10
    assert keys <= {path for path, _, _ in walk()}


def test_a_dry_run_reads_rows_and_loads_the_reward_function(needed: list[str], files: Path, tmp_path: Path) -> None:
    result = run(*needed, "trainer.dry_run=true")
    assert result.returncode == 0, result.stderr
    *_, train, val, reward, last = result.stdout.splitlines()
    assert train.startswith("data.train_files: ")
    assert "30 epochs = 60 steps" in result.stdout  # of 40 rows, 16 a step
    assert train.endswith("train.parquet: all of 40 rows are as they should be")
    assert val.endswith("val.jsonl: all of 1 rows are as they should be")
    assert reward.startswith("reward: loaded")
    assert last == "dry run: nothing was started"
    rows = [json.loads((files / "val.jsonl").read_text()) for _ in range(3)]
    rows[2]["prompt"] = []
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text("def compute_score(solution_str): return 1.0\n")
    result = run(
        *needed,
        f"data.val_files={tmp_path / 'rows.jsonl'}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.dry_run=true",
        "trainer.nnodes=0",
        "data.max_prompt_length=4",
    )
    assert result.returncode == 2
    assert result.stderr.splitlines()[0] == "4 faults in the configuration:"
    assert "trainer.nnodes=0: must be at least 1." in result.stderr
    # "What is 1 + 1?" has five words
    assert "data.train_files: 40 of 40 prompts are longer than data.max_prompt_length=4" in result.stderr
    assert f"data.val_files: {tmp_path / 'rows.jsonl'}, line 3: the prompt is empty" in result.stderr
    assert "  - reward.custom_reward_function: compute_score(solution_str) is called with" in result.stderr
    assert "nothing was started" not in result.stdout


def test_a_start_finds_before_anything_is_started_that_every_prompt_is_too_long(needed: list[str]) -> None:
    result = run(*needed, "data.max_prompt_length=4", "data.filter_overlong_prompts=true")
    assert result.returncode == 2
    assert "data.train_files: no rows left: all 40 prompts looked at in " in result.stderr
    assert "the shortest has 5, the longest 5. Raise data.max_prompt_length." in result.stderr


def test_a_dry_run_finds_a_task_that_nothing_scores(needed: list[str], tmp_path: Path) -> None:
    row = {"data_source": "riddles", "prompt": [{"role": "user", "content": "?"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    result = run(*needed, f"data.val_files={tmp_path / 'rows.jsonl'}", "trainer.dry_run=true")
    assert result.returncode == 2
    assert "reward: no scorer for data_source 'riddles'" in result.stderr


def test_a_misspelt_configuration_is_told_with_those_that_there_are() -> None:
    result = run("--config-name", "quickstrat")
    assert result.returncode == 2
    assert "there are async_ppo_trainer, one_step_off_ppo_trainer, ppo_trainer, quickstart" in result.stderr
    assert "Did you mean quickstart?" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("dry", ["true", "false"])
def test_a_run_folder_that_cannot_be_made_is_a_fault(needed: list[str], files: Path, dry: str) -> None:
    folder = files / "reward.py" / "run"
    result = run(*needed, f"trainer.default_local_dir={folder}", f"trainer.dry_run={dry}")
    assert result.returncode == 2
    told = f"trainer.default_local_dir={folder}: cannot be made: {files / 'reward.py'} is in the way, and is no folder."
    assert told in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(("here", "devices", "noted"), [("cpu", 4, True), ("cpu", 1, False), ("cuda", 4, False)])
def test_devices_that_are_virtual_for_want_of_others_are_noted(
    needed: list[str], monkeypatch: pytest.MonkeyPatch, here: str, devices: int, noted: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(device, "choose", lambda machine: SimpleNamespace(kind=here))
    checked = read_config(compose_tree([*needed, f"trainer.n_gpus_per_node={devices}"]), [])
    note = f"trainer.device=auto: {devices} virtual CPU devices: no accelerator was found here"
    assert (note in checked.notes) == noted
    asked_for = read_config(compose_tree([*needed, "trainer.n_gpus_per_node=4", "trainer.device=cpu"]), [])
    assert not any("virtual" in note for note in asked_for.notes)

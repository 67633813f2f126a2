"""Reward processes: how they start, are replaced when they are lost, and end with their pool or its run."""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time

import pytest
from test_reward_pool import FAULTS, make_prompt, score_all

from jaxrl_ppo.rewards import RewardError


def alive(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def wait_until_gone(*pids):
    deadline = time.time() + 20
    while any(map(alive, pids)) and time.time() < deadline:
        await asyncio.sleep(0.05)
    return not any(map(alive, pids))


CHILD = """
    import ctypes, os, signal, subprocess, sys, time
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(extra_info["file"], "w") as file: file.write(f"{os.getpid()} {child.pid}")
        if solution_str == "hang": time.sleep(1000)
        if solution_str == "holds the lock": ctypes.PyDLL(None).sleep(1000)
        if solution_str == "is stopped": os.kill(os.getpid(), signal.SIGSTOP)
        return 1.0
"""


async def test_processes_and_their_children_end_with_the_pool(started, patient, tokenizer, function_file, tmp_path):
    for text in ("hang", "good"):
        async with started(function_file(CHILD), timeout_s=1.0) as manager:
            file = tmp_path / text
            await score_all(manager, tokenizer, [text], make_prompt(info={"file": str(file)}))
            if text == "good":
                await manager.close()
            assert await wait_until_gone(*map(int, file.read_text().split()))


@pytest.mark.parametrize("how", ["hang", "holds the lock", "is stopped"])
async def test_reward_processes_end_when_their_parent_is_killed(function_file, tmp_path, how):
    script = tmp_path / "parent.py"
    script.write_text(f"""
import asyncio
from jaxrl_ppo.rewards.functions import FunctionSpec
from jaxrl_ppo.rewards.methods import Call, MethodSpec
from jaxrl_ppo.rewards.pool import RewardPool

async def main():
    pool = RewardPool(MethodSpec(FunctionSpec({function_file(CHILD)!r})), num_workers=1, timeout_s=600, memory_mb=None)
    await pool.start()
    await pool.score(Call("x", {how!r}, None, {{"file": {str(tmp_path / "pids")!r}}}, 1, 0, 0))

asyncio.run(main())
""")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.time() + 60
    while not (tmp_path / "pids").exists() and time.time() < deadline:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.2)
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert all(map(alive, pids))
    parent.kill()
    await parent.wait()
    assert await wait_until_gone(*pids)


KILLED_WHILE_IT_STARTS = """
    import os, pathlib, signal
    starts = pathlib.Path(__file__).with_name("starts")
    starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
    if len(starts.read_text()) <= {kills}:
        os.kill(os.getpid(), signal.SIGKILL)
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return 1
"""


async def test_a_process_killed_while_it_starts_is_replaced(started, tokenizer, function_file):
    async with started(function_file(KILLED_WHILE_IT_STARTS.format(kills=2)), num_workers=1) as manager:
        (sample,) = await score_all(manager, tokenizer, ["x"])
        assert sample.reward == 1
    with pytest.raises(RewardError, match="killed by SIGKILL before it was ready, 3 times in a row"):
        async with started(function_file(KILLED_WHILE_IT_STARTS.format(kills=99))):
            pass


async def test_a_process_has_no_accelerator_and_no_jax(started, tokenizer, function_file):
    path = function_file("""
        import os, sys
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            heavy = {"jax", "ray", "numpy", "torch", "transformers", "flax", "grain"} & set(sys.modules)
            return {"score": len(heavy), "heavy": " ".join(heavy), "cpu": os.environ["JAX_PLATFORMS"] == "cpu"}
    """)
    async with started(path) as manager:
        (sample,) = await score_all(manager, tokenizer, ["x"])
        assert (sample.reward, sample.reward_parts["cpu"]) == (0, 1)


async def test_a_lost_process_is_told_once(started, patient, tokenizer, function_file):
    faults = []
    async with started(function_file(FAULTS), timeout_s=1.0) as manager:
        manager.report_faults(lambda name, message: faults.append((name, message)))
        await score_all(manager, tokenizer, ["good", "hang", "good"])
        await score_all(manager, tokenizer, ["crash"])
    assert {name for name, _ in faults} == {"reward_worker_lost"}
    assert [message.split(":")[0] for _, message in faults] == [
        "a reward process was killed, since a call took more than 1 s",
        *["the reward process ended with exit status 5"] * 2,
    ]
    for (_, message), index in zip(faults, (1, 0, 0)):
        assert re.search(
            r"; the call was of compute_score of .*reward\.py \(reward\.custom_reward_function\), "
            rf"for prompt 7, sample {index}, data_source 'mine'$",
            message,
        )


async def test_an_idle_process_that_is_killed_is_told_and_replaced(started, tokenizer, function_file):
    path = function_file("""
        import os
        def compute_score(data_source, solution_str, ground_truth, extra_info):
            return {"score": 1, "pid": os.getpid()}
    """)
    faults = []
    async with started(path, num_workers=1) as manager:
        manager.report_faults(lambda name, message: faults.append((name, message)))
        (first,) = await score_all(manager, tokenizer, ["x"])
        os.kill(int(first.reward_parts["pid"]), signal.SIGKILL)
        await wait_until_gone(int(first.reward_parts["pid"]))
        (second,) = await score_all(manager, tokenizer, ["x"])
        assert second.reward == 1
        assert second.reward_parts["pid"] != first.reward_parts["pid"]
    ((name, message),) = faults  # seen before the next call, or by it
    assert name == "reward_worker_lost"
    assert re.fullmatch(
        "a reward process ended while it had no call: it is replaced|"
        ".* killed by SIGKILL: it is replaced; the call was of compute_score .* for prompt 7, sample 0, .*",
        message,
    )

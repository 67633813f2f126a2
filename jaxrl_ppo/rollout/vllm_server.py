"""A judge's server: vLLM's own OpenAI-compatible one, as a child process, started, watched and ended."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from importlib.util import find_spec
from typing import TYPE_CHECKING

from jaxrl_ppo.rollout import vllm_setup
from jaxrl_ppo.rollout.deadline import within
from jaxrl_ppo.rollout.errors import EngineDead
from jaxrl_ppo.rollout.select import INSTALL_VLLM

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import RewardModelConfig

NOT_INSTALLED = (
    f"reward.reward_model.rollout.name=vllm, but vLLM is not installed where the judge is to run: {INSTALL_VLLM}"
)
POLL_S, ANSWER_S, END_S = 0.5, 10.0, 10.0
LINES_KEPT, LINES_SHOWN = 400, 6  # of what it prints, for the error when it does not start
ERROR_LINE = re.compile(r"\b\w*(Error|Exception): ")


class VllmServer:
    """A running server; `address` is host:port. Made by `start`, in a process of its own that lives as long."""

    def __init__(self, process: subprocess.Popen[str], address: str):
        self._process, self.address = process, address
        self._printed: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @classmethod
    async def start(cls, model_folder: str, model: RewardModelConfig, *, host: str, deadline_s: float) -> VllmServer:
        """Start the server on this machine, and wait until it answers.

        `host` is the address under which the reward processes reach this machine. Sets environment variables of this
        process, whose end is the server's too. Raises ImportError when vLLM is not installed, EngineDead with what the
        server printed last when it ends, DeadlineExceeded.
        """
        if find_spec("vllm") is None:
            raise ImportError(NOT_INSTALLED)
        from jaxrl_ppo.weights import vllm_owner

        cpu, cores = vllm_setup.is_cpu_build(), sorted(os.sched_getaffinity(0))
        settings = vllm_setup.judge_settings(model)
        os.environ.update(vllm_setup.environment(settings, 0, cpu, cores))
        vllm_owner.claim()
        port = _free_port(host)
        server = cls(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                    *vllm_setup.server_arguments(model, model_folder, cpu, host, port),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that its engine's processes can be killed with it
            ),
            f"{host}:{port}",
        )
        try:
            await within(server._until_it_answers(), deadline_s, f"vLLM's server to start {model_folder}")
        except BaseException:
            server.kill()
            raise
        return server

    async def answers(self) -> bool:
        """Whether it says that it can serve."""
        return self._process.poll() is None and await asyncio.to_thread(self._answers)

    async def ended(self) -> str:
        """Wait for its end; how it ended, in words."""
        how = _in_words(await asyncio.to_thread(self._process.wait))
        self.kill()  # what is left of its engine
        return how

    async def close(self) -> None:
        """End it and its engine's processes; what does not end is killed."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, END_S)
        self.kill()

    def kill(self) -> None:
        """End it and its engine's processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def _until_it_answers(self) -> None:
        while not await self.answers():
            if self._process.poll() is not None:
                await asyncio.to_thread(self._reading.join, POLL_S)
                errors = [line for line in self._printed if ERROR_LINE.search(line)] or list(self._printed)
                how, why = _in_words(self._process.returncode), "\n".join(errors[-LINES_SHOWN:])
                raise EngineDead(f"vLLM's server {how} before it answered:\n{why}")
            await asyncio.sleep(POLL_S)

    def _answers(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"http://{self.address}/health", timeout=ANSWER_S):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def _read(self) -> None:
        """Pass on what it prints."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._printed.append(line.rstrip())
            sys.stderr.write(line)


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def _in_words(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

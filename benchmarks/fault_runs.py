"""Short runs of the command on a tiny model, which a fault campaign watches, hurts and judges."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from fault_checks import PROMPTS, REWARD, SAMPLES
from safetensors.numpy import save_file

from jaxrl_ppo.cluster.stores import store_root
from jaxrl_ppo.models.config import load_decoder_config
from jaxrl_ppo.models.tensor_plan import tensor_plan
from jaxrl_ppo.observability.run_folder import read_metrics

HERE = Path(__file__).parent
MODEL = HERE.parent / ".quickstart" / "SmolLM2-135M-Instruct"  # for its tokenizer
DEADLINE_S = 900  # a run that takes longer hangs; enough for a machine with other work, too
GONE_S = 60  # in which what a run had started ends by itself
LOOK_S = 0.03  # between two looks at what a run does
SETTINGS = (
    "trainer.logger=[console]",
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    "data.max_response_length=16",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=1",
    "reward.num_workers=2",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
)


class Hang(Exception):
    """Something that had to happen did not."""


def prepare(folder: Path) -> None:
    """A random two-layer Llama with the quickstart's tokenizer, and a reward function, in `folder`."""
    model = folder / "model"
    model.mkdir(parents=True)
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    source = json.loads((MODEL / "config.json").read_text())
    settings |= {name: source[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    (model / "config.json").write_text(json.dumps(settings))
    for file in (*MODEL.glob("token*"), MODEL / "generation_config.json", *MODEL.glob("chat_template*")):
        if file.is_file():
            shutil.copy(file, model)
    rng = np.random.default_rng(0)
    tensors = {
        name: np.ones(entry.shape, np.float32)
        if "norm" in name
        else rng.normal(0, 0.02, entry.shape).astype(np.float32)
        for name, entry in tensor_plan(load_decoder_config(model)).items()
    }
    save_file(tensors, model / "model.safetensors")
    (folder / "reward.py").write_text(REWARD)


@dataclasses.dataclass
class Run:
    """One run folder and the processes of the command that works in it."""

    base: Path  # with the model and the reward function
    folder: Path
    settings: tuple[str, ...]
    rng: random.Random
    output: str = ""
    process: subprocess.Popen[str] | None = None
    seen: set[psutil.Process] = dataclasses.field(default_factory=set)  # what the command had started

    def start(self) -> None:
        """Start the command; the same one goes on after a crash."""
        arguments = [
            *(sys.executable, "-m", "jaxrl_ppo.main", "--config-name", "quickstart", *SETTINGS),
            f"actor_rollout_ref.model.path={self.base / 'model'}",
            f"reward.custom_reward_function.path={self.base / 'reward.py'}",
            f"trainer.default_local_dir={self.folder}",
            *self.settings,
        ]
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.folder.with_suffix(".log").open("a")
        self.process = subprocess.Popen(
            arguments,
            cwd=HERE.parent,
            text=True,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Programs that compile fast are kept too: they are most of a short run.
            env=os.environ | {"COLUMNS": "250", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )

    def end(self, deadline_s: float = DEADLINE_S) -> int:
        """Wait for the command; its exit status. Raises Hang, and kills what it started, when it does not end."""
        assert self.process is not None
        children = self._descendants()
        try:
            code = self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            for process in (*children, *self._descendants(), psutil.Process(self.process.pid)):
                if process.is_running():
                    process.kill()
            raise Hang(f"the command had not ended after {deadline_s:.0f} s") from None
        self._log.close()
        self.output = self.folder.with_suffix(".log").read_text()
        return code

    @property
    def alive(self) -> bool:
        """Whether the command runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """`kill -9` of the command; what it had started must go by itself."""
        assert self.process is not None
        self._descendants()
        self.process.kill()
        self.process.wait()

    def leftovers(self) -> list[str]:
        """The processes that the command had started, and that do not end by themselves; they are killed."""
        end = time.monotonic() + GONE_S
        while (left := [process for process in self.seen if lives(process)]) and time.monotonic() < end:
            time.sleep(1)
        for process in left:
            process.kill()
        return [f"still running {GONE_S} s after the end: {process.name()}" for process in left]

    def _descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self.seen.update(found)
        return found

    def find(self, title: str) -> psutil.Process | None:
        """One of the run's processes whose command line has `title` in it, at random, but none that is stopped."""
        found = []
        for process in self._descendants():
            try:
                if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_STOPPED:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return self.rng.choice(found) if found else None

    def wait_for(self, what: str, condition: Any, deadline_s: float = 600) -> Any:
        """The first true value of `condition()`; None when the command ends before. Raises Hang."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if value := condition():
                return value
            if not self.alive:
                return None
            time.sleep(LOOK_S)
        raise Hang(f"{what}: not within {deadline_s:.0f} s")

    def wait_for_process(self, title: str) -> psutil.Process | None:
        """A living process of that title, once there is one."""
        return self.wait_for(f"a process {title}", lambda: self.find(title))

    def step(self) -> int:
        """The last step in the run's metrics."""
        try:
            return max((row["step"] for row in read_metrics(self.folder)), default=0)
        except (OSError, ValueError):
            return 0

    def wait_for_step(self, step: int) -> None:
        """Until that step is in the metrics, or the command has ended."""
        self.wait_for(f"step {step}", lambda: self.step() >= step)

    def weight_versions(self) -> set[str]:
        """The versions that the weight store holds."""
        root = Path(store_root(str(self.folder)))
        return {path.name for path in root.glob("*-version-*")} if root.exists() else set()

    def signal(self, title: str, number: int) -> bool:
        """Send a signal to one such process, as soon as there is one; false when the command ended before."""
        process = self.wait_for_process(title)
        if process is not None:
            process.send_signal(number)
        return process is not None


def pause(rng: random.Random, longest_s: float) -> None:
    """Wait a random while."""
    time.sleep(rng.uniform(0, longest_s))


def lives(process: psutil.Process) -> bool:
    """Whether a process runs; one that has ended and that nobody asks about does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def slow_down(process: psutil.Process, seconds: float) -> None:
    """Freeze a process for a while."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    if process.is_running():
        process.send_signal(signal.SIGCONT)

"""Scoring programs: the code in a response is run on test cases, by a sandbox service or in limited subprocesses."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from jaxrl_ppo.rewards.scorers import scorer

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
OUTPUT_BYTES = 1 << 20
ATTEMPTS = 3  # at the service, when it is overloaded
# What turns a test case with a function's name into a program: arguments come as JSON, one a line.
CALL = """
import json as _json, sys as _sys
_function = getattr(Solution(), {name!r}) if "Solution" in globals() else globals()[{name!r}]
print(_json.dumps(_function(*[_json.loads(line) for line in _sys.stdin.read().splitlines() if line.strip()])))
"""
# Sets its own limits before it runs the program: memory, processor time, file size; no core dump; an end of its own,
# later than the one that it is given from outside, for when whoever started it was killed.
LAUNCH = """
import resource, runpy, signal, sys
memory, seconds = int(sys.argv[2]) << 20, int(sys.argv[3])
for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, 1 << 24),
                   (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64)):
    resource.setrlimit(what, (most, most))
signal.alarm(2 * seconds + 1)
runpy.run_path(sys.argv[1], run_name="__main__")
"""


@dataclasses.dataclass(frozen=True)
class CodeRunner:
    """Where programs run: at the service `url` (Sandbox Fusion's run_code), or on this machine if `locally`.

    `at_once` calls of the service are made at a time; a program has `seconds` and `memory_mb`.
    """

    url: str | None = None
    locally: bool = False
    at_once: int = 8
    memory_mb: int = 1024
    seconds: int = 10

    def run(self, program: str, inputs: list[str]) -> list[str | None]:
        """What the program prints for each input; None where it fails or takes too long.

        Raises RuntimeError when programs may not be run, or the service does not answer.
        """
        if self.url:
            with concurrent.futures.ThreadPoolExecutor(self.at_once) as threads:
                return list(threads.map(lambda text: self._at_service(program, text), inputs))
        if self.locally:
            return [self._on_this_machine(program, text) for text in inputs]
        raise RuntimeError(
            "running the model's code is off: set reward.sandbox_fusion.url, a sandbox service, or "
            "reward.run_code_locally=true, which protects this machine from accidents only"
        )

    def _at_service(self, program: str, text: str) -> str | None:
        body = {
            "code": program,
            "language": "python",
            "stdin": text,
            "compile_timeout": self.seconds,
            "run_timeout": self.seconds,
            "memory_limit_MB": self.memory_mb,
        }
        request = urllib.request.Request(
            str(self.url), json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        for attempt in range(ATTEMPTS):
            try:
                with urllib.request.urlopen(request, timeout=3 * self.seconds) as response:
                    answer = json.load(response)
                break
            except (urllib.error.URLError, TimeoutError, ValueError) as error:
                if attempt + 1 == ATTEMPTS:
                    raise RuntimeError(f"the code sandbox {self.url} does not answer: {error}") from error
                time.sleep(2**attempt)
        if answer.get("status") == "SandboxError":
            raise RuntimeError(f"the code sandbox {self.url} failed: {answer.get('message')}")
        result = answer.get("run_result") or {}
        finished = result.get("status") == "Finished" and result.get("return_code") == 0
        return result.get("stdout") if finished else None

    def _on_this_machine(self, program: str, text: str) -> str | None:
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "program.py").write_text(program, encoding="utf-8")
            command = [sys.executable, "-I", "-c", LAUNCH, "program.py", str(self.memory_mb), str(self.seconds)]
            with open(Path(folder, "output"), "w+b") as output:
                process = subprocess.Popen(
                    command,
                    cwd=folder,
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # so that what it starts can be killed with it
                    env={"PATH": os.defpath, "HOME": folder, "OMP_NUM_THREADS": "1"},
                )
                try:
                    process.communicate(text.encode(), timeout=2 * self.seconds)
                except subprocess.TimeoutExpired:
                    return None
                finally:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                output.seek(0)
                printed = output.read(OUTPUT_BYTES).decode(errors="replace")
            return printed if process.returncode == 0 else None


@scorer("codecontests", "apps", "codeforces", "taco", "code/*", needs=("runner",))
def program_tests(solution_str: str, ground_truth: Any, runner: CodeRunner, continuous: bool = True) -> dict[str, Any]:
    """The share of test cases that the last code block passes; all or nothing with `continuous` off.

    `ground_truth` is JSON as verl's code data sets have it: {"inputs": […], "outputs": […]}, standard input and output,
    or with "fn_name", arguments and result as JSON.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    blocks = BLOCK.findall(solution_str)
    if not blocks:
        return {"score": 0.0, "acc": False, "found": False}
    name = tests.get("fn_name")
    program = blocks[-1] + (CALL.format(name=name) if name else "")
    printed = runner.run(program, [str(text) for text in tests["inputs"]])
    same = _same_value if name else _same_text
    passed = sum(p is not None and same(p, expected) for p, expected in zip(printed, tests["outputs"], strict=True))
    share = passed / max(len(printed), 1)
    return {"score": share if continuous else float(share == 1), "acc": share == 1, "found": True}


def _same_text(printed: str, expected: Any) -> bool:
    """Equal line by line, blanks at their ends apart."""
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, str(expected))]
    return lines[0] == lines[1]


def _same_value(printed: str, expected: Any) -> bool:
    last = (printed.strip().splitlines() or [""])[-1]
    try:
        return json.loads(last) == (json.loads(expected) if isinstance(expected, str) else expected)
    except ValueError:
        return False

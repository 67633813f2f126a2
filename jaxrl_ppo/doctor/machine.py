"""Checks of the machine: accelerators, memory, shared memory, disk, network, limits."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import device
from jaxrl_ppo.doctor.finding import Finding, note, ok, problem
from jaxrl_ppo.observability.run_folder import obstacle

GIB = 2**30
LEAST_OPEN_FILES = 4096
LEAST_SHARED = 1 * GIB
LEAST_DISK = 10 * GIB
QUICKSTART_MEMORY = 4 * GIB
# Two versions of bf16 weights in the node's store while one replaces the other, and as much again for Ray's objects.
SHARED_PER_PARAMETER = 2 * 2 * 2
# float32 weights and two AdamW moments.
CHECKPOINT_PER_PARAMETER = 12
RAY_PORTS = {6379: "a Ray head node", 8265: "Ray's dashboard"}


def check_machine(
    found: Sequence[device.Found], *, run_folder: Path, parameters: int | None, checkpoints: int = 4
) -> Iterator[Finding]:
    """Every finding about this machine.

    `parameters` of the model to train, where it is known; `checkpoints` that a run will add to those in `run_folder`.
    """
    yield from accelerators(found)
    yield memory(Path("/"))
    yield shared_memory(free_bytes(Path("/dev/shm")) if Path("/dev/shm").exists() else None, parameters)
    yield disk(run_folder, free_bytes(existing(run_folder)), parameters, checkpoints)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield from network()


def accelerators(found: Sequence[device.Found]) -> Iterator[Finding]:
    """What devices are here, and whether JAX can drive them."""
    for kind in found:
        what = f"{kind.count} x {kind.name or kind.kind} ({kind.evidence})"
        if kind.kind == "cpu":
            yield ok(what)
        elif kind.plugin is None:
            install = device.capabilities(kind.kind).install
            yield problem(f"{what}, and JAX has no plugin for {kind.kind}", f"{install}; or set trainer.device=cpu")
        else:
            yield ok(f"{what}, JAX's plugin {kind.plugin}")
            if kind.chip is None:
                yield note("the peak FLOP/s of these devices is not known here, so perf/mfu/* will be absent")
    yield note(f"trainer.device=auto takes {found[0].kind}")


def memory(root: Path) -> Finding:
    """Main memory that is free now."""
    path = root / "proc/meminfo"
    match = re.search(r"MemAvailable:\s+(\d+) kB", path.read_text()) if path.exists() else None
    if match is None:
        return note("how much memory is free is not known on this system")
    free = int(match[1]) * 1024
    text = f"{gib(free)} of memory is free; the quickstart, a model of 135 million parameters, wants "
    text += gib(QUICKSTART_MEMORY)
    remedy = "free some, or take a machine with more; only a smaller model than the quickstart's wants less"
    return ok(text) if free >= QUICKSTART_MEMORY else problem(text, remedy)


def shared_memory(free: int | None, parameters: int | None) -> Finding:
    """Room in /dev/shm, where weights wait for the rollout replicas and Ray keeps its objects."""
    needed = LEAST_SHARED if parameters is None else max(LEAST_SHARED, parameters * SHARED_PER_PARAMETER)
    if free is None:
        return note("there is no /dev/shm; weights are passed through the temporary folder, which is slower")
    text = f"{gib(free)} of shared memory (/dev/shm) is free, {gib(needed)} is needed"
    return ok(text) if free >= needed else problem(text, f"start the container with --shm-size={-(-needed // GIB)}g")


def disk(folder: Path, free: int, parameters: int | None, checkpoints: int = 4) -> Finding:
    """Room in the run folder for `checkpoints` more than are there, the one being written among them."""
    needed = LEAST_DISK if parameters is None else parameters * CHECKPOINT_PER_PARAMETER * checkpoints
    what = "a run with some checkpoints"
    if parameters is not None:
        added = f"{checkpoints} checkpoint{'s' * (checkpoints != 1)} more than it holds"
        what = f"{added} (trainer.max_actor_ckpt_to_keep, and one being written)"
    text = f"{gib(free)} of disk is free at {folder}, about {gib(needed)} is needed for {what}"
    if why := obstacle(folder):
        return problem(f"{folder} {why}", "set trainer.default_local_dir to a folder of yours")
    remedy = "free some, set trainer.default_local_dir elsewhere, or trainer.max_actor_ckpt_to_keep lower"
    return ok(text) if free >= needed else problem(text, remedy)


def open_files(limit: int) -> Finding:
    """How many files a process may have open; Ray needs many."""
    if limit == resource.RLIM_INFINITY or limit >= LEAST_OPEN_FILES:
        return ok(f"a process may open {'any number of' if limit == resource.RLIM_INFINITY else limit} files")
    return problem(f"a process may open {limit} files, too few for Ray", f"ulimit -n {LEAST_OPEN_FILES}")


def network() -> Iterator[Finding]:
    """Whether processes of this host reach one another by the host's name, and which of Ray's ports are taken."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname()[:2], 5):
            yield ok(f"processes reach one another at {name} ({address})")
    except OSError as error:
        yield problem(
            f"processes cannot reach one another at this host's name {name}: {error}",
            f"add '127.0.0.1 {name}' to /etc/hosts, or let the firewall pass connections of the host to itself",
        )
    for port, user in RAY_PORTS.items():
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                yield note(f"port {port}, which {user} takes, is in use: by a Ray cluster, or by something else")


def free_bytes(path: Path) -> int:
    """Bytes an ordinary user can still write where `path` is."""
    state = os.statvfs(path)
    return state.f_bavail * state.f_frsize


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def gib(size: int) -> str:
    """A size for people."""
    return f"{size / GIB:.1f} GiB"

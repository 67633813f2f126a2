"""A campaign of injected faults over short runs: which end properly, which stop with the right cause, and what is lost.

    python benchmarks/faults.py [--list] [--only NAME …] [--rounds 1] [--seed 0] [--results faults.jsonl]

Each scenario starts the command with a tiny model and the JAX engine, hurts it, and judges what it left: every prompt
trained once (in order, where the mode has an order), every step in the metrics, every fault visible in them, and, after
kills of the driver, the same parameters to the bit as in a run that nobody disturbed. Results are added to a file,
so that the campaign can be run in slices; `--table` prints the table of what the file holds.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fault_runs import Hang, Run, moments, pause, prepare, slow_down
from ray.cluster_utils import Cluster

ROLLOUT, TRAINER, STORE, REWARD = "ray::RolloutWorker", "ray::TrainerWorker", "ray::StoreWorker", "rewards.worker"
TWO_REPLICAS = ("rollout.n_gpus_per_node=2",)
STEPS = 30  # of a run in which something other than the driver is hurt
SHORT = 6  # of a run whose driver is killed
MODES = {
    "sync": ("trainer.mode=sync",),
    "one-step-off": ("trainer.mode=one_step_off",),
    "async, drained": ("trainer.mode=async", "async_training.max_staleness=1", "async_training.partial_rollout=false"),
    "async(4)": (
        "trainer.mode=async",
        "async_training.max_staleness=4",
        "actor_rollout_ref.rollout.over_sample_rate=2",
    ),
}


@dataclasses.dataclass
class Verdict:
    """What became of one run: how many faults were injected, whether it ended, stopped with its cause, or failed us."""

    injected: int
    ended: int = 0
    stopped: int = 0
    hangs: int = 0
    lost_prompts: int = 0
    silent_errors: int = 0
    notes: list[str] = dataclasses.field(default_factory=list)


def judge(run: Run, injected: int, steps: int, *, visible: str | None = None, in_order: bool = True) -> Verdict:
    """Wait for a run that has to end properly, and look at what it left. `visible` is the fault that must show."""
    verdict = Verdict(injected)
    code = run.end()
    if code:
        verdict.silent_errors += 1
        verdict.notes.append(f"exit status {code}: {run.output[-600:]}")
        return verdict
    verdict.ended = 1
    if lost := run.lost_prompts(steps, in_order=in_order):
        verdict.lost_prompts += 1
        verdict.notes += lost
    faults = run.faults()
    if injected and visible and not any(name.startswith(visible) for name in faults):
        verdict.silent_errors += 1
        verdict.notes.append(f"{injected} faults and no {visible} in the metrics, only {faults}")
    verdict.notes.append(f"seen: {faults}" if faults else "nothing in the metrics")
    return verdict


def steps_of(count: int) -> str:
    return f"trainer.total_training_steps={count}"


def kill_replicas_generating(run: Run) -> Verdict:
    """A rollout replica is killed while it generates."""
    run.settings = (*TWO_REPLICAS, steps_of(STEPS), "trainer.save_freq=10")
    run.start()
    injected = 0
    for step in moments(run.rng, 4, STEPS):
        run.wait_for_step(step)
        pause(run.rng, 0.5)
        injected += run.signal(ROLLOUT, signal.SIGKILL)
    return judge(run, injected, STEPS, visible="fault/replica_failed")


def kill_replicas_loading(run: Run) -> Verdict:
    """A rollout replica is killed while it loads weights."""
    run.settings = (*TWO_REPLICAS, steps_of(STEPS), "trainer.save_freq=10")
    run.start()
    injected = 0
    for step in moments(run.rng, 4, STEPS):
        run.wait_for_step(step)
        before = run.weight_versions()
        run.wait_for("new weights", lambda before=before: run.weight_versions() - before)
        pause(run.rng, 0.05)
        injected += run.signal(ROLLOUT, signal.SIGKILL)
    return judge(run, injected, STEPS, visible="fault/replica_failed")


def kill_replicas_starting(run: Run) -> Verdict:
    """A rollout replica is killed while it starts."""
    run.settings = (*TWO_REPLICAS, steps_of(5))
    run.start()
    injected = 0
    for _ in range(2):
        injected += run.signal(ROLLOUT, signal.SIGKILL)
        time.sleep(2)
    return judge(run, injected, 5, visible="fault/replica_failed")


def kill_reward_workers(run: Run) -> Verdict:
    """A reward worker is killed."""
    run.settings = (steps_of(STEPS), "trainer.save_freq=10")
    run.start()
    injected = 0
    for step in moments(run.rng, 6, STEPS):
        run.wait_for_step(step)
        pause(run.rng, 0.3)
        injected += run.signal(REWARD, signal.SIGKILL)
    return judge(run, injected, STEPS)


def hang_reward_workers(run: Run) -> Verdict:
    """A reward worker hangs."""
    run.settings = (steps_of(STEPS), "trainer.save_freq=10", "reward.timeout_s=3")
    run.start()
    injected = 0
    for step in moments(run.rng, 3, STEPS):
        run.wait_for_step(step)
        injected += run.signal(REWARD, signal.SIGSTOP)
    return judge(run, injected, STEPS, visible="fault/rewards_failed")


def kill_trainer(run: Run) -> Verdict:
    """The trainer process is killed; the same command goes on."""
    run.settings = (*MODES["one-step-off"], steps_of(SHORT))
    run.start()
    run.wait_for_step(run.rng.randint(1, SHORT - 2))
    pause(run.rng, 0.5)
    injected = int(run.signal(TRAINER, signal.SIGKILL))
    code = run.end()
    stopped = code == 1 and "a trainer process died during" in run.output
    run.start()
    verdict = judge(run, injected, SHORT)
    verdict.stopped, verdict.ended = int(stopped), 0 if stopped else verdict.ended
    if not stopped:
        verdict.silent_errors += 1
        verdict.notes.append(f"the killed run ended with {code}: {run.output[-400:]}")
    return verdict


def kill_stores(run: Run) -> Verdict:
    """A node's weight store is killed."""
    run.settings = (steps_of(STEPS), "trainer.save_freq=10")
    run.start()
    injected = 0
    for step in moments(run.rng, 4, STEPS):
        run.wait_for_step(step)
        pause(run.rng, 0.5)
        injected += run.signal(STORE, signal.SIGKILL)
    return judge(run, injected, STEPS)


def slow_replicas(run: Run) -> Verdict:
    """A rollout replica stands still for some seconds."""
    run.settings = (*TWO_REPLICAS, steps_of(STEPS), "trainer.save_freq=10")
    run.start()
    injected = 0
    for step in moments(run.rng, 3, STEPS):
        run.wait_for_step(step)
        if process := run.wait_for_process(ROLLOUT):
            slow_down(process, 4)
            injected += 1
    return judge(run, injected, STEPS)


def hang_replicas(run: Run) -> Verdict:
    """A rollout replica stands still for good."""
    deadlines = ("trainer.deadlines.generation_s=20", "trainer.deadlines.weights_s=20")
    run.settings = (*TWO_REPLICAS, steps_of(STEPS), "trainer.save_freq=10", *deadlines)
    run.start()
    injected = 0
    for step in (5, 15):
        run.wait_for_step(step)
        injected += run.signal(ROLLOUT, signal.SIGSTOP)
    return judge(run, injected, STEPS, visible="fault/replica_failed")


def fill_the_disk(run: Run) -> Verdict:
    """The disk is full during a checkpoint; once there is room the same command goes on."""
    run.folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(run.folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        return Verdict(0, notes=["not run: mounting a small file system needs root"])
    try:
        run.settings = (*MODES["sync"], steps_of(SHORT))
        run.start()
        run.wait_for("a checkpoint", lambda: (run.folder / "global_step_1" / "COMMITTED").exists())
        code = run.end()
        stopped = code == 1 and "could not be written" in run.output
        subprocess.run(["mount", "-o", "remount,size=2g", str(run.folder)], check=True)
        run.start()
        verdict = judge(run, 1, SHORT)
        verdict.stopped, verdict.ended = int(stopped), 0 if stopped else verdict.ended
        if not stopped:
            verdict.silent_errors += 1
            verdict.notes.append(f"with a full disk it ended with {code}: {run.output[-400:]}")
        return verdict
    finally:
        subprocess.run(["umount", str(run.folder)], check=False)


def remove_node(run: Run) -> Verdict:
    """A Ray node with a rollout replica on it leaves the cluster."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trainer_host": 1}})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    try:
        run.settings = (*TWO_REPLICAS, steps_of(STEPS), "trainer.save_freq=10")
        os.environ["RAY_ADDRESS"] = cluster.address
        run.start()
        run.wait_for_step(5)
        cluster.remove_node(nodes[0], allow_graceful=False)
        return judge(run, 1, STEPS)
    finally:
        del os.environ["RAY_ADDRESS"]
        run.process and run.process.kill()
        cluster.shutdown()


def tell_to_stop(run: Run) -> Verdict:
    """The command gets SIGTERM, twice; the same command goes on."""
    run.settings = (*MODES["one-step-off"], steps_of(SHORT), "trainer.save_freq=100")
    verdict = Verdict(2)
    for after in (1, 3):
        run.start()
        run.wait_for_step(after)
        assert run.process is not None
        run.process.terminate()
        code = run.end()
        if code == 143 and "stopped after step" in run.output:
            verdict.stopped += 1
        else:
            verdict.silent_errors += 1
            verdict.notes.append(f"ended with {code}: {run.output[-400:]}")
    run.start()
    last = judge(run, 2, SHORT)
    verdict.lost_prompts, verdict.notes = last.lost_prompts, verdict.notes + last.notes
    verdict.silent_errors += last.silent_errors
    return verdict


def kill_driver(run: Run, mode: str, kills: int) -> Verdict:
    """`kill -9` of the driver at random moments; the same command goes on, exactly where the mode is exact."""
    exact = mode != "async(4)"
    run.settings = (*MODES[mode], steps_of(SHORT))
    undisturbed = Run(run.base, run.folder.with_name("undisturbed"), run.settings, run.rng)
    verdict = Verdict(kills)
    if exact:
        undisturbed.start()
        if undisturbed.end():
            raise RuntimeError(undisturbed.output[-2000:])
    for _ in range(kills):
        run.start()
        begin = run.step()
        # Anywhere from the first import to some steps on.
        run.wait_for("progress", lambda begin=begin: run.step() > begin or run.rng.random() < 0.0005)
        pause(run.rng, 0.6)
        if run.alive:
            run.kill()
        if run.step() >= SHORT - 1:
            break
    run.start()
    last = judge(run, kills, SHORT, in_order=exact)
    verdict = dataclasses.replace(last, injected=kills)
    if exact and verdict.ended and run.weights(SHORT) != undisturbed.weights(SHORT):
        verdict.silent_errors += 1
        verdict.notes.append("the parameters are not those of the undisturbed run")
    return verdict


SCENARIOS: dict[str, Callable[[Run], Verdict]] = {
    "replica killed while it generates": kill_replicas_generating,
    "replica killed while it loads weights": kill_replicas_loading,
    "replica killed while it starts": kill_replicas_starting,
    "replica slow": slow_replicas,
    "replica hangs": hang_replicas,
    "reward worker killed": kill_reward_workers,
    "reward worker hangs": hang_reward_workers,
    "trainer process killed (1)": kill_trainer,
    "trainer process killed (2)": kill_trainer,
    "trainer process killed (3)": kill_trainer,
    "weight store killed": kill_stores,
    "Ray node removed": remove_node,
    "disk full during a checkpoint (1)": fill_the_disk,
    "disk full during a checkpoint (2)": fill_the_disk,
    "SIGTERM": tell_to_stop,
    "driver killed, sync": lambda run: kill_driver(run, "sync", 7),
    "driver killed, one-step-off": lambda run: kill_driver(run, "one-step-off", 7),
    "driver killed, async drained": lambda run: kill_driver(run, "async, drained", 6),
    "driver killed, async(4)": lambda run: kill_driver(run, "async(4)", 6),
}


def main() -> None:
    """Run the scenarios that are asked for, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the scenarios")
    parser.add_argument("--only", nargs="+", default=list(SCENARIOS), help="parts of the names of those to run")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=Path("runs/faults.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of the results and stop")
    args = parser.parse_args()
    if args.list:
        print("\n".join(SCENARIOS))
    elif args.table:
        print(table(args.results))
    else:
        chosen = [name for name in SCENARIOS if any(part in name for part in args.only)]
        with tempfile.TemporaryDirectory() as base:
            prepare(Path(base))
            for number in range(args.rounds):
                for name in chosen:
                    carry_out(name, Path(base), args.seed + number, args.results)
        print(table(args.results))


def carry_out(name: str, base: Path, seed: int, results: Path) -> None:
    """One scenario, its verdict added to `results`."""
    folder = Path(tempfile.mkdtemp(dir=base)) / "run"
    run = Run(base, folder, (), random.Random(f"{seed} {name}"))
    begin = time.monotonic()
    try:
        verdict = SCENARIOS[name](run)
    except Hang as hang:
        verdict = Verdict(1, hangs=1, notes=[str(hang)])
        if run.alive:
            run.kill()
    row = {"scenario": name, "seed": seed, "seconds": round(time.monotonic() - begin), **dataclasses.asdict(verdict)}
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def table(results: Path) -> str:
    """The results as Markdown, scenarios of one kind in one line."""
    columns = ("injected", "ended", "stopped", "hangs", "lost_prompts", "silent_errors")
    sums: dict[str, collections.Counter[str]] = {}
    for line in results.read_text().splitlines():
        row = json.loads(line)
        kind = sums.setdefault(row["scenario"].rpartition(" (")[0] or row["scenario"], collections.Counter())
        kind.update({column: row[column] for column in columns} | {"runs": 1})
    total = sum(sums.values(), collections.Counter())
    lines = [
        "| fault | runs | injected | ended properly | stopped, right cause | hangs | lost prompts | silent errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in [*sums.items(), ("**all**", total)]:
        lines.append(f"| {kind} | " + " | ".join(str(row[column]) for column in ("runs", *columns)) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

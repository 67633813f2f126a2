"""The fault campaign's scenarios: what is hurt, when, and what has to become of the run."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import psutil
from fault_runs import Run, pause, slow_down
from fault_verdicts import MODES, ONE_STEP_OFF, SHORT, STEPS, Mode, Scenario
from ray._private.node import Node
from ray.cluster_utils import Cluster

ROLLOUT, TRAINER, STORE, REWARD = "ray::RolloutWorker", "ray::TrainerWorker", "ray::StoreWorker", "rewards.worker"
TWO_REPLICAS, SAVE = "rollout.n_gpus_per_node=2", "trainer.save_freq=8"
LOST_REPLICAS = ("fault/replica_failed", "fault/replacement_failed")
VLLM = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_num_seqs=16")


def at_steps(scenario: Scenario, run: Run, count: int, longest_pause_s: float) -> Iterator[None]:
    """`count` moments of a run: some time after steps drawn at random, none of them the last two."""
    run.start()
    for step in sorted(scenario.rng.choices(range(1, STEPS - 2), k=count)):
        run.wait_for_step(step)
        pause(scenario.rng, longest_pause_s)
        yield


def hurt_processes(
    scenario: Scenario,
    kind: str,
    times: int,
    *settings: str,
    how: signal.Signals = signal.SIGKILL,
    mode: Mode = ONE_STEP_OFF,
    longest_pause_s: float = 0.3,
    visible: tuple[str, ...],
    exact: bool = False,
) -> None:
    """A run goes on to its end though processes of `kind` get the signal `how`, at so many moments."""
    run = scenario.run(mode, STEPS, SAVE, *settings)
    for _ in at_steps(scenario, run, times, longest_pause_s):
        scenario.hurt(run.signal(kind, how))
    scenario.ends(run, mode, STEPS, visible=visible, exact=exact)


def kill_replicas_generating(scenario: Scenario) -> None:
    """A rollout replica is killed while it generates."""
    hurt_processes(scenario, ROLLOUT, 5, TWO_REPLICAS, visible=LOST_REPLICAS)


def kill_replicas_loading(scenario: Scenario) -> None:
    """A rollout replica is killed while it loads weights."""
    run = scenario.run(ONE_STEP_OFF, STEPS, TWO_REPLICAS, SAVE)
    for _ in at_steps(scenario, run, 5, 0):
        before = run.weight_versions()
        run.wait_for("new weights", lambda before=before: run.weight_versions() - before)
        pause(scenario.rng, 0.05)
        scenario.hurt(run.signal(ROLLOUT, signal.SIGKILL))
    scenario.ends(run, ONE_STEP_OFF, STEPS, visible=LOST_REPLICAS)


def kill_replicas_starting(scenario: Scenario) -> None:
    """A rollout replica is killed while it starts."""
    run = scenario.run(ONE_STEP_OFF, SHORT, TWO_REPLICAS, SAVE)
    run.start()
    for _ in range(2):
        scenario.hurt(run.signal(ROLLOUT, signal.SIGKILL))
        time.sleep(2)
    scenario.ends(run, ONE_STEP_OFF, SHORT, visible=LOST_REPLICAS)


def kill_replicas_taking_turns(scenario: Scenario) -> None:
    """The only replica is killed, awake or asleep; it takes turns with the trainer on its devices."""
    turns = MODES["sync, in turns"]
    hurt_processes(scenario, ROLLOUT, 4, mode=turns, longest_pause_s=0.5, visible=LOST_REPLICAS)


def slow_replicas(scenario: Scenario) -> None:
    """A rollout replica stands still for some seconds: the run waits, and nothing else."""
    run = scenario.run(ONE_STEP_OFF, STEPS, TWO_REPLICAS, SAVE)
    for _ in at_steps(scenario, run, 3, 0.3):
        if process := run.wait_for_process(ROLLOUT):
            slow_down(process, 4)
            scenario.hurt(True)
    scenario.ends(run, ONE_STEP_OFF, STEPS, exact=True)


def hang_replicas(scenario: Scenario) -> None:
    """A rollout replica stands still for good."""
    deadlines = ("trainer.deadlines.generation_s=20", "trainer.deadlines.weights_s=20")
    hurt_processes(scenario, ROLLOUT, 2, TWO_REPLICAS, *deadlines, how=signal.SIGSTOP, visible=LOST_REPLICAS)


def kill_reward_workers(scenario: Scenario) -> None:
    """A reward worker is killed: its calls are made again."""
    hurt_processes(scenario, REWARD, 6, visible=("fault/reward_worker_lost",), exact=True)


def hang_reward_workers(scenario: Scenario) -> None:
    """A reward worker hangs: the samples that it had get no reward."""
    limits = ("reward.timeout_s=3", "reward.max_failure_rate=1")
    hurt_processes(scenario, REWARD, 3, *limits, how=signal.SIGSTOP, visible=("reward/failures",))


def kill_stores(scenario: Scenario) -> None:
    """A node's weight store is killed: it comes back, and weights on their way are staged again."""
    hurt_processes(scenario, STORE, 4, visible=("fault/store_lost",), exact=True)


def kill_trainer(scenario: Scenario) -> None:
    """The trainer process is killed; the same command goes on."""
    run = scenario.run(ONE_STEP_OFF, SHORT)
    for kill in range(3):
        run.start()
        run.wait_for_step(1 + kill)
        pause(scenario.rng, 0.5)
        if scenario.hurt(run.signal(TRAINER, signal.SIGKILL)):
            scenario.stops(run, 1, "trainer_pool died during")
    run.start()
    scenario.ends(run, ONE_STEP_OFF, SHORT, exact=True)


def fill_the_disk(scenario: Scenario) -> None:
    """The disk is full during a checkpoint; once there is room the same command goes on."""
    run = scenario.run(MODES["sync"], SHORT)
    run.folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=120m", "tmpfs", str(run.folder)], check=True)
    try:
        for room in ("170m", "2g"):
            run.start()
            scenario.hurt(True)
            scenario.stops(run, 1, "could not be written")
            subprocess.run(["mount", "-o", f"remount,size={room}", str(run.folder)], check=True)
        run.start()
        scenario.ends(run, MODES["sync"], SHORT, exact=True)
    finally:
        subprocess.run(["umount", str(run.folder)], check=False)


def remove_node(scenario: Scenario) -> None:
    """The Ray node with the rollout replicas and their weights leaves the cluster; the command goes on on another."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    nodes = [cluster.add_node(num_cpus=2, num_gpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    places = (
        "+ray_kwargs.ray_init.runtime_env.env_vars={JAXRL_PPO_EMULATE: '1'}",
        f"ray_kwargs.ray_init.address={cluster.address}",
        "actor_rollout_ref.rollout.device=cuda",
        TWO_REPLICAS,
    )
    run = scenario.run(ONE_STEP_OFF, STEPS, *places)
    try:
        run.start()
        run.wait_for_step(5)
        cluster.remove_node(next(filter(_has_replica, nodes)), allow_graceful=False)
        scenario.hurt(True)
        scenario.stops(run, 1, "no weight store is left")
        run.start()
        scenario.ends(run, ONE_STEP_OFF, STEPS)
    finally:
        cluster.shutdown()


def _has_replica(node: Node) -> bool:
    """Whether a rollout replica runs on a Ray node of this machine."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return any(ROLLOUT in " ".join(process.cmdline()) for process in raylet.children())


def tell_to_stop(scenario: Scenario) -> None:
    """The command gets SIGTERM, twice; the same command goes on."""
    run = scenario.run(ONE_STEP_OFF, STEPS)
    for _ in range(2):
        run.start()
        run.wait_for_step(run.step() + 1)  # a step of its own: before that it may not know the signal yet
        assert run.process is not None
        run.process.terminate()
        scenario.hurt(True)
        scenario.stops(run, 143, "stopped after step")
    run.start()
    scenario.ends(run, ONE_STEP_OFF, STEPS, exact=True)


def kill_driver(scenario: Scenario, mode: Mode, kills: int, *more: str, exact: bool = True) -> None:
    """`kill -9` of the command at random moments, from its first import to its last step; the same command goes on.

    Where a run nears its end before all kills are made, it is judged, and another begins.
    """
    while scenario.verdict.injected < kills:
        run = scenario.run(mode, SHORT, *more)
        while scenario.verdict.injected < kills and run.step() < SHORT - 1:
            run.start()
            if scenario.rng.random() < 0.4:
                pause(scenario.rng, 12)
            else:
                begin = run.step()
                run.wait_for("progress", lambda run=run, begin=begin: run.step() > begin)
                pause(scenario.rng, 0.6)
            if not scenario.hurt(run.alive):
                break
            run.kill()
        run.start()
        scenario.ends(run, mode, SHORT, exact=exact and mode.exact)


def kill_vllm_cores(scenario: Scenario) -> None:
    """vLLM's engine core is killed under its actor; the engine sleeps and wakes in each step."""
    run = scenario.run(MODES["sync, in turns"], STEPS, SAVE, *VLLM)
    run.start()
    for step in (3, 12):
        run.wait_for_step(step)
        scenario.hurt(run.signal("VLLM::EngineCore", signal.SIGKILL))
    scenario.ends(run, MODES["sync, in turns"], STEPS, visible=LOST_REPLICAS)


SCENARIOS: dict[str, Callable[[Scenario], None]] = {
    "replica killed while it generates": kill_replicas_generating,
    "replica killed while it loads weights": kill_replicas_loading,
    "replica killed while it starts": kill_replicas_starting,
    "replica killed while it takes turns": kill_replicas_taking_turns,
    "replica slow": slow_replicas,
    "replica hangs": hang_replicas,
    "reward worker killed": kill_reward_workers,
    "reward worker hangs": hang_reward_workers,
    "trainer process killed": kill_trainer,
    "weight store killed": kill_stores,
    "Ray node removed": remove_node,
    "disk full during a checkpoint": fill_the_disk,
    "SIGTERM": tell_to_stop,
    "driver killed, sync": lambda scenario: kill_driver(scenario, MODES["sync"], 7),
    "driver killed, one-step-off": lambda scenario: kill_driver(scenario, ONE_STEP_OFF, 7),
    "driver killed, async drained": lambda scenario: kill_driver(scenario, MODES["async, drained"], 6),
    "driver killed, async(4)": lambda scenario: kill_driver(scenario, MODES["async(4)"], 3),
    "vLLM: driver killed": lambda scenario: kill_driver(scenario, ONE_STEP_OFF, 2, *VLLM, exact=False),
    "vLLM: engine core killed": kill_vllm_cores,
}

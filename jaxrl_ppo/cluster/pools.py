"""Which devices each role gets: resource pools on Ray placement groups, checked against what the cluster has."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# Virtual CPU devices share their host's cores, so a process on them claims next to nothing of Ray's CPU count.
CPU_SHARE = 0.01
NODE_SHARE = 0.001  # of a resource that marks a node: any number of processes may go there


class Role(enum.Enum):
    """What a worker process does in a run; verl's names."""

    ActorRollout = "actor_rollout"
    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "rm"


class PlacementError(RuntimeError):
    """The cluster lacks the devices that a pool needs."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool of `processes` processes with `devices` devices each.

    `resource` is Ray's name of the device, `node_resource` of something that only the pool's nodes have. `within` names
    the pool whose devices it takes turns on: such a pool claims nothing of its own.
    """

    name: str
    processes: int
    devices: int
    resource: str
    keys: str  # the configuration keys that decide its size
    node_resource: str | None = None
    within: str | None = None

    def bundle(self) -> dict[str, float]:
        """What one process claims from Ray."""
        node = {self.node_resource: NODE_SHARE} if self.node_resource else {}
        if self.resource == "CPU":
            return {"CPU": CPU_SHARE, **node}
        return {self.resource: float(self.devices), "CPU": 1.0, **node}


class ResourcePoolManager:
    """Creates the pools' placement groups and hands out where each process goes."""

    def __init__(self, pools: dict[str, PoolSpec], mapping: dict[Role, str]):
        self.pools = pools
        self.mapping = mapping
        self._groups: dict[str, PlacementGroup] = {}

    def pool_of(self, role: Role) -> PoolSpec:
        """The pool that serves `role`."""
        return self.pools[self.mapping[role]]

    @property
    def claiming(self) -> list[PoolSpec]:
        """The pools with devices of their own; those that any CPU will do for come last, and take nobody's place."""
        own = [pool for pool in self.pools.values() if pool.within is None]
        return sorted(own, key=lambda pool: pool.bundle().keys() == {"CPU"})

    @property
    def devices(self) -> int:
        """Devices of all pools together."""
        return sum(pool.processes * pool.devices for pool in self.claiming)

    def shares(self, pool: PoolSpec) -> bool:
        """Whether a pool's devices are another's too."""
        return pool.within is not None or any(other.within == pool.name for other in self.pools.values())

    def host_of(self, role: Role, process: int) -> tuple[int, slice]:
        """Of a pool within another: the other's process whose devices process number `process` shares, and which."""
        pool = self.pool_of(role)
        assert pool.within is not None
        host, first = divmod(process * pool.devices, self.pools[pool.within].devices)
        return host, slice(first, first + pool.devices)

    def check(self, nodes: list[dict[str, Any]]) -> None:
        """Raise PlacementError unless `nodes` (as `ray.nodes()` gives them) hold every pool at once."""
        free = [dict(node["Resources"]) for node in nodes if node["Alive"]]
        for pool in self.claiming:
            bundle = pool.bundle()
            for process in range(pool.processes):
                fitting = [node for node in free if all(node.get(k, 0.0) >= v for k, v in bundle.items())]
                if not fitting:
                    raise PlacementError(self._lacks(pool, process, free, nodes))
                for k, v in bundle.items():
                    fitting[0][k] -= v

    def _lacks(self, pool: PoolSpec, process: int, free: list[dict[str, float]], nodes: list[dict[str, Any]]) -> str:
        """Which pool lacks what, in words."""
        bundle = pool.bundle()
        have = {k: sum(n["Resources"].get(k, 0.0) for n in nodes if n["Alive"]) for k in bundle}
        most = {k: max((node.get(k, 0.0) for node in free), default=0.0) for k in bundle}
        lacking = ", ".join(f"{k} ({v:g} needed, {most[k]:g} left on the node with most)" for k, v in bundle.items()
                            if most[k] < v)  # fmt: skip
        where = lacking or f"a node that has {bundle} at once"
        return (
            f"pool '{pool.name}' lacks {where}: it needs {pool.processes} process(es) with {bundle} each "
            f"({pool.keys}), and there is no room for process {process}. The cluster has {have} on "
            f"{len(free)} node(s), for the pools {sorted(self.pools)}. Make the pool smaller or add such nodes."
        )

    def create(self, timeout_s: float) -> None:
        """Reserve every pool. Raises PlacementError when the cluster cannot hold them within `timeout_s`."""
        self.check(ray.nodes())
        for pool in self.claiming:
            group = placement_group([pool.bundle()] * pool.processes, strategy="PACK", name=pool.name)
            self._groups[pool.name] = group
            if not group.wait(timeout_s):
                raise PlacementError(
                    f"pool '{pool.name}' ({pool.processes} x {pool.bundle()}, {pool.keys}) was not placed within "
                    f"{timeout_s:.0f} s: other jobs hold the devices"
                )

    def options(self, role: Role, process: int) -> dict[str, Any]:
        """Actor options that put process number `process` of `role` where it belongs."""
        pool, bundle_index = self.pool_of(role), process
        if pool.within is not None:
            bundle_index, _ = self.host_of(role, process)
        options: dict[str, Any] = {
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[pool.within or pool.name], placement_group_bundle_index=bundle_index
            )
        }
        if pool.within is not None:
            return options | {"num_cpus": 0}
        bundle = pool.bundle()
        options["num_cpus"] = bundle.pop("CPU")
        if "GPU" in bundle:
            options["num_gpus"] = bundle.pop("GPU")
        options["resources"] = bundle
        return options

    def close(self) -> None:
        """Give the devices back."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

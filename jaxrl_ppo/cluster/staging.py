"""A weight version's way from a trainer process to the stores: files where a store is on its node, else through Ray."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from jaxrl_ppo.weights.manifest import WeightError
from jaxrl_ppo.weights.store import write_bucket

if TYPE_CHECKING:
    import numpy as np

IN_FLIGHT = 2  # buckets on their way to each store while the next one leaves the devices


class Staging:
    """Sends the buckets of one version, which stays uncommitted, to every store.

    Its methods raise RayError when a store dies meanwhile or fails, and what `write_bucket` does.
    """

    def __init__(self, stores: Mapping[str, Any], version: int):
        """`stores` are StoreWorkers, by the Ray node that each is on."""
        here = ray.get_runtime_context().get_node_id()
        folders = ray.get([store.begin.remote(version) for store in stores.values()])
        self._version, self._files = version, 0
        self._near: list[tuple[Any, str]] = []
        self._far: list[Any] = []
        for (node, store), folder in zip(stores.items(), folders):
            if node == here and Path(folder).is_dir():  # it would not be there for a process in a container of its own
                self._near.append((store, folder))
            else:
                self._far.append(store)
        self._writer = ThreadPoolExecutor(1)
        self._sending: deque[Callable[[], object]] = deque()  # each waits until a bucket has arrived in a store

    def send(self, bucket: dict[str, np.ndarray]) -> None:
        """Start sending a bucket; waits while more than IN_FLIGHT others are on their way."""
        for store, folder in self._near:
            self._sending.append(self._writer.submit(self._write, store, folder, self._files, bucket).result)
        self._files += 1
        if self._far:
            shared = ray.put(bucket)
            for store in self._far:
                self._sending.append(functools.partial(ray.get, store.put.remote(self._version, shared)))
        while len(self._sending) > IN_FLIGHT * (len(self._near) + len(self._far)):
            self._sending.popleft()()

    def finish(self) -> None:
        """Wait until everything has arrived."""
        while self._sending:
            self._sending.popleft()()

    def close(self) -> None:
        """End the writing, arrived or not."""
        self._writer.shutdown(cancel_futures=True)

    def _write(self, store: Any, folder: str, number: int, bucket: dict[str, np.ndarray]) -> None:
        ray.get(store.add.remote(self._version, write_bucket(folder, number, bucket)))


def stage(buckets: Iterable[dict[str, np.ndarray]], stores: Mapping[str, Any], version: int) -> None:
    """Send all of `buckets`. They are iterated to their end whatever becomes of a store, and its failure raised then.

    The gathering behind them takes all processes of the trainer: one that stopped would leave the others waiting.
    """
    failure: Exception | None = None
    staging: Staging | None = None
    try:
        for bucket in buckets:
            if failure is not None:
                continue
            try:
                staging = staging or Staging(stores, version)
                staging.send(bucket)
            except (ray.exceptions.RayError, WeightError, OSError) as error:
                failure = error
        if failure is not None:
            raise failure
        if staging is not None:
            staging.finish()
    finally:
        if staging is not None:
            staging.close()

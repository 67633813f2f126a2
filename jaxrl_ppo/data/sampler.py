"""The order of rows: in file order, shuffled as a pure function of seed and epoch, or by a user's class."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from jaxrl_ppo.data.dataset import RLDataset, seed_of
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.user_code import UserCodeError, load_name, located

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import DataConfig


class Order(Protocol):
    """An order that is known in advance: any position of any epoch can be asked for."""

    def __len__(self) -> int:
        """Rows in an epoch."""
        ...

    def row(self, epoch: int, position: int) -> int:
        """The row at `position` of `epoch`."""
        ...

    def fingerprint(self) -> dict[str, Any]:
        """JSON-able data that is equal for equal orders of equal data."""
        ...


@runtime_checkable
class UserSampler(Protocol):
    """A user's sampler, `data.sampler`, made with keyword arguments `data_source` (the data set) and `data_config`.

    `len()` is the number of rows in an epoch, `iter()` gives their numbers. Optional methods:
    `set_epoch(epoch)`, called before each `iter()`;
    `update(prompts, samples)`, called with each finished batch, by which a curriculum learns;
    `state_dict()` and `load_state_dict(state)`, JSON-able: all that its coming numbers depend on, the position in the
    epoch included. After loading, the next `iter()` goes on from that position;
    where the epoch was over it begins the next one. A sampler without them is resumed by
    skipping what was used, and its order must be the same each time.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...


Sampler = Order | UserSampler


class SequentialOrder:
    """Every epoch in file order."""

    def __init__(self, rows: int):
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def row(self, epoch: int, position: int) -> int:
        """`position` itself."""
        return position

    def fingerprint(self) -> dict[str, Any]:
        """The kind of order."""
        return {"order": "sequential"}


class ShuffledOrder:
    """A new shuffle every epoch, a pure function of seed and epoch.

    Where all blocks fit into memory together it is a uniform shuffle of all rows. Where they do not, the blocks are
    shuffled, taken `window` at a time, and the rows of each window are shuffled: rows are then drawn from as many
    blocks as memory holds, and every block is read once an epoch.
    """

    def __init__(self, block_sizes: np.ndarray, window: int, seed: int):
        self._sizes = np.asarray(block_sizes, np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._sizes)])
        self._window = min(window, len(self._sizes))
        self._seed = seed
        # A step may reach into the next window or epoch, and rows are read a little ahead.
        self._epoch = functools.lru_cache(2)(self._make_epoch)
        self._rows_of_window = functools.lru_cache(3)(self._make_window)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, epoch: int, position: int) -> int:
        """The row at `position` of `epoch`."""
        _, ends = self._epoch(epoch)
        window = int(np.searchsorted(ends, position, side="right"))
        start = int(ends[window - 1]) if window else 0
        return int(self._rows_of_window(epoch, window)[position - start])

    def fingerprint(self) -> dict[str, Any]:
        """The kind of order, its seed, and the blocks that it depends on when there are several windows."""
        several = self._window < len(self._sizes)
        return {"order": "shuffled", "data.seed": self._seed} | ({"window": self._window} if several else {})

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The blocks in this epoch's order, and where in the epoch each window of them ends."""
        blocks = _permutation(self._seed, epoch, 0, len(self._sizes))
        if self._window == len(self._sizes):
            blocks = np.sort(blocks)  # one window: the order of blocks within it has no meaning
        ends = np.cumsum(self._sizes[blocks])
        last = np.append(np.arange(self._window, len(blocks), self._window), len(blocks)) - 1
        return blocks, ends[last]

    def _make_window(self, epoch: int, window: int) -> np.ndarray:
        blocks, _ = self._epoch(epoch)
        members = blocks[window * self._window : (window + 1) * self._window]
        rows = np.concatenate([np.arange(self._starts[b], self._starts[b + 1]) for b in members])
        return rows[_permutation(self._seed, epoch, window + 1, len(rows))]


class MixedOrder:
    """Several files in given proportions: in every epoch, file i has weights[i] / sum(weights) of the rows.

    An epoch has as many rows as the files together. Each file is gone through in an order of its own and begins anew
    when it is through, so a file of small weight takes several epochs and one of large weight comes several times.
    Which file has its turn is a shuffle of seed and epoch.
    """

    def __init__(self, orders: Sequence[Order], weights: Sequence[float], seed: int):
        """`orders[i]` gives the rows of file i by their number in it."""
        self._orders, self._weights, self._seed = orders, list(weights), seed
        sizes = [len(order) for order in orders]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        exact = np.array(weights) / np.sum(weights) * sum(sizes)
        self._shares = np.floor(exact).astype(np.int64)
        rest = sum(sizes) - int(self._shares.sum())
        self._shares[np.argsort(self._shares - exact, kind="stable")[:rest]] += 1  # the largest remainders
        self._epoch = functools.lru_cache(2)(self._make_epoch)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, epoch: int, position: int) -> int:
        """The row at `position` of `epoch`."""
        files, turns = self._epoch(epoch)
        file = int(files[position])
        drawn = epoch * int(self._shares[file]) + int(turns[position])
        return int(self._starts[file]) + self._orders[file].row(*divmod(drawn, len(self._orders[file])))

    def fingerprint(self) -> dict[str, Any]:
        """The files' orders and their weights."""
        orders = {f"file {i}": order.fingerprint() for i, order in enumerate(self._orders)}
        return {"order": "mixed", "data.train_files_weights": self._weights, "data.seed": self._seed, **orders}

    def _make_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The file at each position, and how many rows of that file came before it in the epoch."""
        files = np.repeat(np.arange(len(self._shares), dtype=np.int32), self._shares)
        files = files[_permutation(self._seed, epoch, 0, len(files))]
        turns = np.empty(len(files), np.int64)
        for file, share in enumerate(self._shares):
            turns[files == file] = np.arange(share)
        return files, turns


def _permutation(seed: int, epoch: int, stream: int, size: int) -> np.ndarray:
    """A permutation of `size` numbers; sorts raw generator output, which numpy promises never to change."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch, stream)))
    return np.argsort(generator.random_raw(size), kind="stable")


def create_rl_sampler(data_config: DataConfig, dataset: RLDataset) -> Sampler:
    """The order in which `dataset` is gone through: `data.sampler`'s class, else shuffled or sequential.

    Raises UserCodeError for a user's class that is missing or lacks a method, DataError for weights that do not fit.
    """
    path, name = data_config.sampler.class_path, data_config.sampler.class_name
    if path or name:
        if not path or not name:
            raise UserCodeError("data.sampler needs both class_path and class_name")
        make = load_name(path, name, "data.sampler")
        with located(path, "data.sampler"):
            sampler = make(data_source=dataset, data_config=data_config)
        if not isinstance(sampler, UserSampler):
            raise UserCodeError(f"data.sampler: {name} in {path} needs __len__ and __iter__")
        if hasattr(sampler, "state_dict") != hasattr(sampler, "load_state_dict"):
            raise UserCodeError(f"data.sampler: {name} in {path} needs both state_dict and load_state_dict, or neither")
        with located(path, "data.sampler"):
            _try(sampler)
        return sampler
    if data_config.train_files_weights is not None:
        return _mixed(data_config, dataset, data_config.train_files_weights)
    if data_config.shuffle:
        return ShuffledOrder(dataset.block_sizes, dataset.window, seed_of(data_config))
    return SequentialOrder(len(dataset))


def _try(sampler: Any) -> None:
    """Draw the first row, as the stream will, so that a broken sampler shows at once; leaves no trace in its state."""
    state = copy.deepcopy(sampler.state_dict()) if hasattr(sampler, "state_dict") else None
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(0)
    if len(sampler):
        next(iter(sampler))
    if state is not None:
        sampler.load_state_dict(state)


def _mixed(data_config: DataConfig, dataset: RLDataset, weights: Sequence[float]) -> MixedOrder:
    key = "data.train_files_weights"
    blocks = np.split(dataset.block_sizes, np.cumsum(dataset.blocks_of_files)[:-1])
    if len(blocks) != len(weights):
        raise DataError(f"{key} has {len(weights)} numbers for {len(blocks)} files")
    if empty := [number for number, sizes in enumerate(blocks) if not sizes.sum()]:
        raise DataError(f"{key}: file {empty[0]} of data.train_files has no usable rows; leave it out")
    seed, window = seed_of(data_config), max(1, dataset.window // len(blocks))
    orders: list[Order] = [
        ShuffledOrder(sizes, window, seed + number) if data_config.shuffle else SequentialOrder(int(sizes.sum()))
        for number, sizes in enumerate(blocks)
    ]
    return MixedOrder(orders, weights, seed)

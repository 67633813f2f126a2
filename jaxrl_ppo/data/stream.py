"""The stream of training prompts: endless over epochs, read ahead through Grain, resumable to the prompt."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain

from jaxrl_ppo.data.dataset import RLDataset
from jaxrl_ppo.data.fingerprint import check_same_data
from jaxrl_ppo.data.rows import DataError
from jaxrl_ppo.data.sampler import Order, Sampler, UserSampler
from jaxrl_ppo.schema.records import Prompt, Sample

Numbered = tuple[int, int]  # ordinal, row


class PromptStream:
    """Prompts in the sampler's order, batch after batch, epoch after epoch.

    An epoch is cut into whole batches of `batch_size`; rows that do not fill one are left out of it. Prompts are
    numbered from 0 over all epochs (`Prompt.ordinal`), and a number is never given twice.
    """

    def __init__(self, dataset: RLDataset, sampler: Sampler, batch_size: int, *, read_ahead_threads: int = 0):
        """`read_ahead_threads` read and tokenise coming prompts; 0: a prompt is read when it is asked for.

        A user's sampler is never read ahead of, since its order may depend on results still to come. Raises DataError
        when an epoch does not fill one batch.
        """
        if len(sampler) < batch_size:
            raise DataError(
                f"data.train_batch_size={batch_size} is more than the {len(sampler)} rows of an epoch. "
                "Lower it (and ppo_mini_batch_size), or give more rows"
            )
        self._dataset = dataset
        self._sampler = sampler
        self.batch_size = batch_size
        self.steps_per_epoch = len(sampler) // batch_size
        prompts: grain.IterDataset
        rows_per_epoch = self.steps_per_epoch * batch_size
        if isinstance(sampler, UserSampler):
            prompts = _SampledRows(sampler, len(dataset), rows_per_epoch).map(self._prompt)
        else:
            order = _OrderSource(sampler, rows_per_epoch)
            options = grain.ReadOptions(
                num_threads=read_ahead_threads, prefetch_buffer_size=2 * batch_size if read_ahead_threads else 0
            )
            prompts = grain.MapDataset.source(order).map(self._prompt).to_iter_dataset(options)
        self._iterator = iter(prompts)
        self._consumed = 0
        self._fingerprint = self._make_fingerprint()

    def _prompt(self, numbered: Numbered) -> Prompt:
        ordinal, row = numbered
        return self._dataset.prompt(row, ordinal=ordinal)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts. Raises DataError for a row that cannot be used."""
        prompts = [next(self._iterator) for _ in range(count)]
        self._consumed += count
        return prompts

    def update(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> None:
        """Tell a curriculum sampler the results of a batch; other samplers do not care."""
        if hasattr(self._sampler, "update"):
            self._sampler.update(prompts, samples)

    def state(self) -> dict[str, Any]:
        """Where the stream stands, at the first prompt that was not taken, as JSON-able data."""
        return {
            "ordinal": self._consumed,
            "iterator": self._iterator.get_state(),
            "data": self._fingerprint,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`: the next prompt is the one that was next when it was taken.

        Raises DataError, with what differs, when the data, their order or the batch size are not those of `state`.
        """
        check_same_data(state["data"], self._fingerprint)
        self._iterator.set_state(state["iterator"])
        self._consumed = state["ordinal"]

    def close(self) -> None:
        """Stop reading ahead."""
        self._iterator.close()

    def _make_fingerprint(self) -> dict[str, Any]:
        if isinstance(self._sampler, UserSampler):
            order = {"data.sampler": type(self._sampler).__name__}
        else:
            order = self._sampler.fingerprint()
        return self._dataset.fingerprint() | order | {"data.train_batch_size": self.batch_size}


class _OrderSource:
    """(ordinal, row) by ordinal: what Grain reads from when the order is known in advance."""

    def __init__(self, order: Order, rows_per_epoch: int):
        self._order = order
        self._rows_per_epoch = rows_per_epoch

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, ordinal: int) -> Numbered:
        epoch, position = divmod(ordinal, self._rows_per_epoch)
        return ordinal, self._order.row(epoch, position)


class _SampledRows(grain.IterDataset[Numbered]):
    """(ordinal, row) one after the other, as a user's sampler gives them."""

    def __init__(self, sampler: UserSampler, rows: int, rows_per_epoch: int):
        super().__init__()
        self.sampler = sampler
        self.rows = rows
        self.rows_per_epoch = rows_per_epoch

    def __iter__(self) -> _SampledRowsIterator:
        return _SampledRowsIterator(self)


class _SampledRowsIterator(grain.DatasetIterator[Numbered]):
    def __init__(self, source: _SampledRows):
        super().__init__()
        self._source = source
        self._sampler: Any = source.sampler
        self._ordinal = 0
        self._epoch: Iterator[int] | None = None  # opened when its first row is asked for

    def __next__(self) -> Numbered:
        epoch, position = divmod(self._ordinal, self._source.rows_per_epoch)
        if self._epoch is None:
            self._epoch = self._open(epoch)
        name = type(self._sampler).__name__
        try:
            row = int(next(self._epoch))
        except StopIteration:
            raise DataError(
                f"data.sampler: {name} gave {position} rows in epoch {epoch}, its length is {len(self._sampler)}"
            ) from None
        if not 0 <= row < self._source.rows:
            raise DataError(f"data.sampler: {name} gave row {row}; there are rows 0 to {self._source.rows - 1}")
        self._ordinal += 1
        if position + 1 == self._source.rows_per_epoch:
            # The rows that fill no batch are drawn all the same, so that the sampler knows its epoch is over, and its
            # state says so. An endless iterator is left after as many rows as its length promises.
            for _ in itertools.islice(self._epoch, len(self._sampler) - position):
                pass
            self._epoch = None
        return self._ordinal - 1, row

    def _open(self, epoch: int) -> Iterator[int]:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        return iter(self._sampler)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"ordinal": self._ordinal}
        if hasattr(self._sampler, "state_dict"):
            state["sampler"] = self._sampler.state_dict()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        self._ordinal = state["ordinal"]
        epoch, position = divmod(self._ordinal, self._source.rows_per_epoch)
        self._epoch = None
        if "sampler" in state:
            self._sampler.load_state_dict(state["sampler"])
        elif position:
            self._epoch = self._open(epoch)
            for _ in range(position):
                next(self._epoch)

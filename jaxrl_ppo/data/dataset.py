"""The data set: rows that can be used, as prompts by number."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_ppo.data.columns import OPTIONAL_COLUMNS
from jaxrl_ppo.data.prompts import PromptBuilder
from jaxrl_ppo.data.rows import DataError, FileRows, Rows, UserRows
from jaxrl_ppo.data.survey import Survey, survey
from jaxrl_ppo.schema.faults import named
from jaxrl_ppo.schema.records import Prompt
from jaxrl_ppo.user_code import UserCodeError, load_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from jaxrl_ppo.schema.config import DataConfig

log = logging.getLogger(__name__)

# Data sets of up to so many rows are looked through before a run starts (about 0.15 ms a row); in larger ones a bad
# row is found when it is reached, unless filter_overlong_prompts asks for the pass anyway.
SURVEY_ROWS = 50_000
DEFAULT_SEED = 1


def create_rl_dataset(
    files: str | Sequence[str],
    data_config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None = None,
    *,
    is_train: bool = True,
    tools: Sequence[Mapping[str, Any]] = (),
) -> RLDataset:
    """The training (or validation) data set in `files`: parquet, json or jsonl, paths or URLs, verl's row form.

    `data.custom_cls` puts a user's class in the files' place: it is made with keyword arguments `data_files`,
    `tokenizer`, `processor`, `config`, and has `__len__` and `__getitem__(i)`, a row in the same form.

    `tools` are the JSON schemas of functions that the prompts tell the model of.

    Raises DataError, before any training, for what can be known now: a file that is missing, damaged or without the
    configured columns, no rows left, and (up to 50,000 rows, or with filter_overlong_prompts any number) every row
    that cannot be used. UserCodeError for a user's class.
    """
    key = "data.train_files" if is_train else "data.val_files"
    with _naming(key):
        return _create(files, data_config, PromptBuilder(tokenizer, data_config, tools), processor, key)


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """Errors about data name the configuration key that led there."""
    try:
        yield
    except DataError as error:
        raise DataError(named(key, error)) from error


def _create(
    files: str | Sequence[str],
    data_config: DataConfig,
    builder: PromptBuilder,
    processor: ProcessorMixin | None,
    key: str,
) -> RLDataset:
    is_train = key == "data.train_files"
    rows: Rows
    if data_config.custom_cls.path or data_config.custom_cls.name:
        rows = UserRows(_user_dataset(files, data_config, builder.tokenizer, processor))
    else:
        rows = FileRows(files, builder.reader.columns, OPTIONAL_COLUMNS, key)
    if not len(rows):
        raise DataError(f"{key}: no rows in {files}")

    limit = data_config.train_max_samples if is_train else data_config.val_max_samples
    chosen = np.arange(len(rows))
    if 0 < limit < len(rows):
        shuffled = data_config.shuffle if is_train else data_config.validation_shuffle
        rng = np.random.Generator(np.random.PCG64(seed_of(data_config)))
        chosen = np.sort(rng.choice(len(rows), limit, replace=False)) if shuffled else chosen[:limit]

    found = None
    if data_config.filter_overlong_prompts or len(chosen) <= SURVEY_ROWS:
        found = survey(rows, chosen, builder, data_config.filter_overlong_prompts_workers)
        chosen = _apply_length_limit(chosen, found, rows, data_config, key)
    else:
        log.info("%s: %d rows, read when their turn comes", key, len(chosen))
    return RLDataset(rows, chosen, builder, found, key)


def seed_of(data_config: DataConfig) -> int:
    """`data.seed`, or its default."""
    return DEFAULT_SEED if data_config.seed is None else data_config.seed


class RLDataset:
    """Usable rows by number, 0 .. len - 1, each a Prompt when asked for. May be read from several threads."""

    def __init__(self, rows: Rows, chosen: np.ndarray, builder: PromptBuilder, found: Survey | None, key: str):
        """`chosen` are the usable rows, sorted; `found` is what looking through them has found, where that was done;
        `key` is the configuration key they come from, for messages."""
        self._rows = rows
        self._chosen = chosen
        self._builder = builder
        self._key = key
        self.data_sources = found.sources if found else None
        self.agent_names = found.agents if found else None
        # Blocks of neighbours that are read from disk together, and how many of them fit into memory at a time.
        edges = np.concatenate([[0], np.cumsum(rows.block_sizes)])
        self.block_sizes = np.diff(np.searchsorted(chosen, edges))
        self.window = rows.window
        self.blocks_of_files = rows.blocks_of_files

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Prompt:
        """The prompt of row `index`, its ordinal the same number (as validation wants it)."""
        return self.prompt(index, ordinal=index)

    def prompt(self, index: int, *, ordinal: int) -> Prompt:
        """The prompt of row `index`, as number `ordinal` of a stream. Raises DataError for an unusable row."""
        row = int(self._chosen[index])
        with _naming(self._key):
            return self._builder.build(self._rows.row(row), self._rows.where(row), ordinal)

    def fingerprint(self) -> dict[str, Any]:
        """JSON-able data that is equal for equal prompts in equal order."""
        return {"rows": len(self), "sources": self._rows.fingerprint()}


def _apply_length_limit(chosen: np.ndarray, found: Survey, rows: Rows, config: DataConfig, key: str) -> np.ndarray:
    """The rows to keep of `chosen`. DataError when an overlong prompt is an error, or when nothing is left."""
    limit = config.max_prompt_length
    overlong = found.lengths > limit
    if not overlong.any():
        return chosen
    files = ", ".join(map(str, rows.paths)) if isinstance(rows, FileRows) else "data.custom_cls"
    fault = overlong_fault(found.lengths, config, files, lambda first: rows.where(int(chosen[first])))
    if fault:
        raise DataError(f"{key}: {fault}")
    if config.filter_overlong_prompts:
        log.info("%s: %d of %d rows dropped, longer than %d tokens", key, overlong.sum(), len(chosen), limit)
        return chosen[~overlong]
    log.info("%s: %d of %d prompts are cut to %d tokens", key, overlong.sum(), len(chosen), limit)
    return chosen


def overlong_fault(lengths: np.ndarray, config: DataConfig, files: str, where: Callable[[int], str]) -> str | None:
    """Why prompts of these `lengths` (tokens) cannot be used; None where they can, cut or without those too long.

    `files` are what they come from and `where(i)` names the row of `lengths[i]`, for the message.
    """
    limit = config.max_prompt_length
    overlong = lengths > limit
    if config.filter_overlong_prompts and overlong.all():
        return (
            f"no rows left: all {len(lengths):,} prompts looked at in {files} are longer than "
            f"data.max_prompt_length={limit} tokens; the shortest has {lengths.min()}, the longest {lengths.max()}. "
            "Raise data.max_prompt_length"
        )
    if config.filter_overlong_prompts or config.truncation != "error" or not overlong.any():
        return None
    first = int(np.flatnonzero(overlong)[0])
    shortest = f"the shortest: {lengths.min()}, " if overlong.all() else ""
    return (
        f"{overlong.sum():,} of {len(lengths):,} prompts are longer than data.max_prompt_length={limit} tokens. "
        f"The first: {where(first)}, {lengths[first]} tokens; {shortest}the longest: {lengths.max()}. Raise "
        "data.max_prompt_length, set data.filter_overlong_prompts=true to drop such rows, or data.truncation to left, "
        "right or middle"
    )


def _user_dataset(
    files: str | Sequence[str],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
) -> Any:
    path, name = config.custom_cls.path, config.custom_cls.name
    if not path or not name:
        raise UserCodeError("data.custom_cls needs both path and name")
    make = load_name(path, name, "data.custom_cls")
    dataset = make(data_files=files, tokenizer=tokenizer, processor=processor, config=config)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UserCodeError(f"data.custom_cls: {name} in {path} needs __len__ and __getitem__")
    return dataset

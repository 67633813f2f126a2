"""What a start looks at before any process is started: the first rows of the data files, their prompts' lengths."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from jaxrl_ppo.data.columns import OPTIONAL_COLUMNS, RowReader
from jaxrl_ppo.data.dataset import SURVEY_ROWS, overlong_fault
from jaxrl_ppo.data.local import SMALL_FILES, LocalCopyError, copy_to_local
from jaxrl_ppo.data.prompts import PromptBuilder
from jaxrl_ppo.data.quick_tokenizer import QuickTokenizer
from jaxrl_ppo.data.rows import DataError, FileRows
from jaxrl_ppo.data.tokenizer import TokenizerError, hf_tokenizer
from jaxrl_ppo.rollout.tools import configured_tools
from jaxrl_ppo.schema.config import Config
from jaxrl_ppo.schema.faults import Fault, named, trimmed
from jaxrl_ppo.schema.places import is_address, is_hub_id
from jaxrl_ppo.schema.preflight import files_of, models
from jaxrl_ppo.user_code import UserCodeError

ROWS = 1000  # looked at in each file; more only while every prompt is too long
ROWS_NAMED = 3  # of those that cannot be used
ROW_KEYS = ("data.prompt_key", "data.reward_fn_key", "data.custom_cls")
TOOLS = "actor_rollout_ref.rollout.multi_turn"
LENGTH_KEYS = (
    "actor_rollout_ref.model",
    TOOLS,
    *(f"data.{name}" for name in ("apply_chat_template_kwargs", "filter_overlong_prompts", "max_prompt_length")),
    *(f"data.{name}" for name in ("system_prompt", "truncation")),
)


@dataclasses.dataclass
class Found:
    """A line for each file that is as it should be, what is worth knowing, what is wrong, and the data sources."""

    lines: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    sources: set[str] = dataclasses.field(default_factory=set)


def look_at_rows(config: Config, known: Sequence[Fault] = (), *, fetch: bool) -> Found:
    """Look at the first rows of each data file that is on this machine.

    What a fault of `known` is about (a missing file, an unreadable key) is left out. With `fetch` the small files of
    models on the Hugging Face Hub are fetched, so that a wrong name is found now; without, lengths are looked at where
    the tokenizer is here.
    """
    found = Found()
    if fetch:
        for key, place in models(config).items():
            if is_hub_id(place) and not is_faulty(known, key):
                try:
                    copy_to_local(place, key=key, hub_files=SMALL_FILES)
                except LocalCopyError as error:
                    found.faults.append(Fault((key,), str(error)))
    if any(is_faulty(known, key) for key in ROW_KEYS):
        return found
    measures = not any(is_faulty([*known, *found.faults], key) for key in LENGTH_KEYS)
    builders = _builders(config, found) if measures else iter(())
    builder, quick = next(builders, NOTHING)
    for key in ("data.train_files", "data.val_files"):
        files = files_of(getattr(config.data, key.removeprefix("data.")))
        files = [file for file in files if not any(file in fault.message for fault in known)]
        try:
            looked = _files(config, key, files, builder, quick=quick)
        except _Doubt:
            builder, quick = next(builders, NOTHING)
            looked = _files(config, key, files, builder, quick=quick)
        for name in ("lines", "notes", "faults"):
            getattr(found, name).extend(getattr(looked, name))
        found.sources |= looked.sources
    return found


def is_faulty(known: Collection[Fault], key: str) -> bool:
    """Whether a fault is first of all about `key`, a key below it or a section around it."""
    first = [fault.keys[0] for fault in known]
    return any(f"{one}.".startswith(f"{key}.") or f"{key}.".startswith(f"{one}.") for one in first)


class _Doubt(Exception):
    """The quick tokenizer finds something wrong: the model's own is asked."""


NOTHING: tuple[PromptBuilder | None, bool] = (None, False)


def _builders(config: Config, found: Found) -> Iterator[tuple[PromptBuilder | None, bool]]:
    """What makes prompts, and whether by the quick tokenizer: first by it, then by the model's own, where they load."""
    model = config.actor_rollout_ref.model
    key = "actor_rollout_ref.model." + ("tokenizer_path" if model.tokenizer_path else "path")
    tools = []
    with contextlib.suppress(UserCodeError):  # which the run tells, and a dry run
        tools = configured_tools(config.actor_rollout_ref.rollout.multi_turn)
    place = model.tokenizer_path or str(model.path)
    folder = None
    with contextlib.suppress(LocalCopyError):
        folder = copy_to_local(place, fetch=False, hub_files=SMALL_FILES)
    # Of a model of the hub there may be some files only.
    if folder is None or (is_hub_id(place) and not (folder / "tokenizer.json").is_file()):
        found.lines.append(f"{key}: not on this machine, so prompts were not measured")
        return
    try:
        quick = QuickTokenizer(folder, model.custom_chat_template)
    except (OSError, ValueError, KeyError, TokenizerError):  # the other one tells what is wrong, if anything is
        pass
    else:
        yield PromptBuilder(quick, config.data, tools), True
    try:
        tokenizer = hf_tokenizer(
            folder, trust_remote_code=model.trust_remote_code, custom_chat_template=model.custom_chat_template
        )
    except TokenizerError as error:
        found.faults.append(Fault((key,), named(key, error)))
    else:
        yield PromptBuilder(tokenizer, config.data, tools), False


def _files(config: Config, key: str, files: Sequence[str], builder: PromptBuilder | None, *, quick: bool) -> Found:
    """What there is to say of the files of one key. Raises _Doubt for a fault that only `builder` finds, if `quick`."""
    found, data = Found(), config.data
    lengths: list[np.ndarray] = []
    wheres: list[str] = []
    rows_there = 0
    for file in files:
        if is_address(file):
            found.lines.append(f"{key}: {file} is not on this machine, and was not fetched")
        elif data.custom_cls.path:
            found.lines.append(f"{key}: {file} is read by data.custom_cls, and was not opened")
        else:
            try:
                rows = FileRows(file, RowReader(data).columns, OPTIONAL_COLUMNS, key)
                measured = _rows(rows, data.max_prompt_length, RowReader(data), builder, found.sources, quick)
            except DataError as error:
                found.faults.append(Fault((key,), named(key, error)))
                continue
            looked = len(measured)
            said = "all" if looked == len(rows) else f"the first {looked:,}"
            found.lines.append(f"{key}: {file}: {said} of {len(rows):,} rows are as they should be")
            if builder is None:
                continue
            rows_there += len(rows)
            lengths.append(measured)
            wheres += [rows.where(index) for index in np.flatnonzero(measured > data.max_prompt_length)[:1].tolist()]
            if overlong := int((measured > data.max_prompt_length).sum()):
                what = f"{overlong:,} of {said} {looked:,}" if looked == len(rows) else f"{overlong:,} of {said}"
                found.notes.append(
                    f"{key}: {file}: {what} prompts are longer than data.max_prompt_length={data.max_prompt_length} "
                    f"tokens: they are {_fate(config)}"
                )
    samples = data.train_max_samples if key == "data.train_files" else data.val_max_samples
    # Whether the run itself would look at all these rows before its first step.
    certain = rows_there <= SURVEY_ROWS and not 0 < samples < rows_there
    if lengths and not any(is_address(file) for file in files) and (certain or data.filter_overlong_prompts):
        fault = overlong_fault(np.concatenate(lengths), data, ", ".join(files), lambda _: wheres[0])
        if fault and quick:
            raise _Doubt
        if fault:
            found.faults.append(Fault((key, "data.max_prompt_length"), f"{key}: {fault}"))
    return found


def _rows(
    rows: FileRows, limit: int, reader: RowReader, builder: PromptBuilder | None, sources: set[str], quick: bool
) -> np.ndarray:
    """Read the first rows, and add their data sources; returns the tokens of each prompt (0 without `builder`)."""
    lengths: list[int] = []
    while len(lengths) < min(len(rows), SURVEY_ROWS) and (len(lengths) < ROWS or min(lengths) > limit):
        texts = []
        part = range(len(lengths), min(len(lengths) + ROWS, len(rows)))
        bad = []
        for index in part:
            try:
                row, where = rows.row(index), rows.where(index)
                messages, agent = reader.messages(row, where), reader.agent(row, where)
                sources.add(reader.task(row, where)[0])
                if builder is not None:
                    with _doubted(quick):
                        texts.append(builder.render(messages, where, agent))
            except DataError as error:
                bad.append(trimmed(error))
        if bad:
            raise DataError(_all_of(bad, part.stop))
        lengths += [len(ids) for ids in builder.encode(texts)] if builder is not None else [0] * len(part)
    return np.array(lengths, np.int64)


@contextlib.contextmanager
def _doubted(quick: bool) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise _Doubt if quick else error from error


def _all_of(bad: Sequence[str], looked_at: int) -> str:
    """What is wrong with some of the first rows: the only one, or how many there are and the first few of them."""
    if len(bad) == 1:
        return bad[0]
    more = f"; and {len(bad) - ROWS_NAMED:,} more" if len(bad) > ROWS_NAMED else ""
    return f"{len(bad):,} of the first {looked_at:,} rows cannot be used: {'; '.join(bad[:ROWS_NAMED])}{more}"


def _fate(config: Config) -> str:
    data = config.data
    if data.filter_overlong_prompts:
        return "left out (data.filter_overlong_prompts=true)"
    if data.truncation == "error":
        return "an error when their turn comes (data.truncation=error)"
    return f"cut (data.truncation={data.truncation})"

"""One pass over the prompts before a run: how many tokens each has, and whether every row can be used at all."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_ppo.data.local import cache_folder
from jaxrl_ppo.data.prompts import PromptBuilder
from jaxrl_ppo.data.rows import FileRows, Rows
from jaxrl_ppo.guard import guard_pool_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.schema.config import DataConfig

BATCH = 1024  # rows tokenised in one call


@dataclasses.dataclass(frozen=True)
class Survey:
    """What the pass found, of the rows it was asked about and in their order."""

    lengths: np.ndarray  # int32, prompt tokens before truncation
    sources: frozenset[str]  # data sources
    agents: frozenset[str]  # agent loops that rows name


def survey(rows: Rows, indices: np.ndarray, builder: PromptBuilder, workers: int = 1) -> Survey:
    """Surveys rows `indices` (sorted) in `workers` processes. Raises DataError for the first row that cannot be used.

    For files the result is kept in this node's cache, under their content's and the tokenizer's checksums.
    """
    if not isinstance(rows, FileRows):
        return _survey(rows, indices, builder)
    file = cache_folder() / "surveys" / f"{_key(rows, indices, builder)}.npz"
    if file.is_file():
        with np.load(file) as saved:
            return Survey(*(saved["lengths"], *(frozenset(saved[name].tolist()) for name in ("sources", "agents"))))
    if workers > 1 and len(indices) > BATCH:
        parts = np.array_split(indices, min(workers * 4, -(-len(indices) // BATCH)))
        builder_arguments = (builder.tokenizer, builder.config, builder.tools)
        context = multiprocessing.get_context("spawn")  # a forked child would inherit this process's locks as they are
        with concurrent.futures.ProcessPoolExecutor(workers, context, guard_pool_process) as pool:
            calls = [pool.submit(_survey_part, rows.opened, p, *builder_arguments) for p in parts]
            results = [call.result() for call in calls]
        result = Survey(
            np.concatenate([part.lengths for part in results]),
            frozenset().union(*(part.sources for part in results)),
            frozenset().union(*(part.agents for part in results)),
        )
    else:
        result = _survey(rows, indices, builder)
    _save(file, result)
    return result


def _survey_part(
    opened: tuple[Any, ...],
    indices: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    tools: Sequence[Mapping[str, Any]],
) -> Survey:
    return _survey(FileRows(*opened), indices, PromptBuilder(tokenizer, config, tools))


def _survey(rows: Rows, indices: np.ndarray, builder: PromptBuilder) -> Survey:
    lengths = np.empty(len(indices), np.int32)
    sources, agents = set(), set()
    for start in range(0, len(indices), BATCH):
        texts = []
        for index in indices[start : start + BATCH].tolist():
            row, where = rows.row(index), rows.where(index)
            sources.add(builder.reader.task(row, where)[0])
            agent = builder.reader.agent(row, where)
            agents.add(agent)
            texts.append(builder.render(builder.reader.messages(row, where), where, agent))
        lengths[start : start + len(texts)] = [len(ids) for ids in builder.encode(texts)]
    return Survey(lengths, frozenset(sources), frozenset(agent for agent in agents if agent is not None))


def _key(rows: FileRows, indices: np.ndarray, builder: PromptBuilder) -> str:
    """Checksum of everything that the result depends on."""
    digest = hashlib.sha256(indices.tobytes())
    # Times too: a file changed in its middle keeps its ends.
    times = [path.stat().st_mtime_ns for path in rows.paths]
    tokenizer = builder.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    texts = [builder.config.system_prompt, list(builder.tools), tokenizer.chat_template]
    arguments = [builder.reader.columns, builder.template_arguments, *texts, vocabulary]
    digest.update(json.dumps([rows.fingerprint(), times, arguments], default=repr).encode())
    return digest.hexdigest()[:32]


def _save(file: Path, result: Survey) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".partial-{uuid.uuid4().hex}.npz")
    sources, agents = (np.array(sorted(names), np.str_) for names in (result.sources, result.agents))
    np.savez(partial, lengths=result.lengths, sources=sources, agents=agents)
    os.replace(partial, file)

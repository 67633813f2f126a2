"""Rollout samples on disk: what the policy was asked, what it answered, what that was worth; one file a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_ppo.observability.files import json_line, write_atomically
from jaxrl_ppo.observability.metrics import own_log_probs

if TYPE_CHECKING:
    from jaxrl_ppo.schema.records import Batch, Prompt, Sample

ROLLOUT, VALIDATION = "rollout", "validation"
SAMPLES_PER_STEP = 512
DETAILED_PER_STEP = 64
BYTES_IN_ALL = 1 << 30
QUESTION_LENGTH = 200  # characters, for lists of samples
VALIDATION_SEED = 42  # of the choice of generations shown to trackers: the same ones at every validation


class SampleWriter:
    """Writes samples into `folder`, a file a step, and keeps the folder's size bounded.

    `decode` turns token ids into text (special tokens included). At most `SAMPLES_PER_STEP` samples of a step are
    kept, in whole groups of one prompt; the first `DETAILED_PER_STEP` with their tokens, log-probs and weight versions.
    When the folder passes `BYTES_IN_ALL`, its oldest files go.
    """

    def __init__(self, folder: str | Path, decode: Callable[[Sequence[int]], str]) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def drop_after(self, step: int) -> None:
        """Delete the files of later steps: a run resumed at `step` writes them again."""
        for path in self._folder.glob("*.jsonl"):
            if step_of(path) > step:
                path.unlink()

    def write_rollout(
        self, step: int, batch: Batch, samples: Sequence[Sample], *, trainer_log_probs: np.ndarray | None = None
    ) -> Path:
        """Write the samples of a training step; `samples` are the batch's rows, in the same order.

        `trainer_log_probs` [B, T] are the trainer's log-probs where `batch.old_log_probs` are not (bypass mode).
        """
        trainer = own_log_probs(batch) if trainer_log_probs is None else trainer_log_probs
        rows: list[dict[str, Any]] = []
        for number in _whole_groups(batch.group, SAMPLES_PER_STEP):
            sample, prompt = samples[number], batch.prompts[batch.group[number]]
            row = self._row(step, prompt, sample, detailed=len(rows) < DETAILED_PER_STEP)
            length = len(sample.response_ids)
            if batch.advantages is not None and length:
                row["advantage"] = round(float(batch.advantages[number, 0]), 5)
            if "tokens" in row and trainer is not None:
                row["trainer_log_probs"] = _rounded(trainer[number, :length])
            rows.append(row)
        return self._write(ROLLOUT, step, rows)

    def write_validation(self, step: int, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Path:
        """Write the answers of one validation; `prompts[i]` is the question of `samples[i]`."""
        pairs = list(zip(prompts, samples))[:SAMPLES_PER_STEP]
        rows = [self._row(step, *pair, detailed=number < DETAILED_PER_STEP) for number, pair in enumerate(pairs)]
        return self._write(VALIDATION, step, rows)

    def _row(self, step: int, prompt: Prompt, sample: Sample, *, detailed: bool) -> dict[str, Any]:
        row = {
            "step": step,
            "ordinal": sample.ordinal,
            "index": sample.index,
            "source": prompt.data_source,
            "prompt": self._decode(prompt.token_ids),
            "question": question_of(prompt.messages),
            "response": self._decode(sample.response_ids.tolist()) if sample.text is None else sample.text,
            "ground_truth": prompt.ground_truth,
            "reward": sample.reward,
            "reward_parts": sample.reward_parts,
            "length": len(sample.response_ids),
            "finish_reason": sample.finish_reason,
            "versions": _runs(sample.versions),
        }
        if sample.reward_labels:
            row["labels"] = sample.reward_labels
        if len(sample.turns) > 1:
            row["turns"] = [[turn.role, turn.start, turn.end] for turn in sample.turns]
        if detailed:
            row["tokens"] = self._texts(sample.response_ids.tolist())
            row["log_probs"] = _rounded(sample.log_probs)
            if not sample.mask.all():
                row["mask"] = _runs(sample.mask.astype(np.int32))
        return row

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """Each token's text; a character spread over several tokens is given to the last of them."""
        texts: list[str] = []
        held: list[int] = []
        for token in ids:
            held.append(token)
            text = self._piece(token) if len(held) == 1 else self._decode(held)
            if text.endswith("\ufffd") and len(held) < 4:  # UTF-8 has at most four bytes a character
                texts.append("")
            else:
                texts.append(text)
                held = []
        if held:
            texts[-1] = self._decode(held)
        return texts

    def _piece(self, token: int) -> str:
        if token not in self._pieces:
            self._pieces[token] = self._decode([token])
        return self._pieces[token]

    def _write(self, kind: str, step: int, rows: Iterable[dict[str, Any]]) -> Path:
        path = self._folder / f"{kind}_{step:06d}.jsonl"
        write_atomically(path, "".join(map(json_line, rows)))
        files = sorted(self._folder.glob("*.jsonl"), key=step_of)
        size = sum(file.stat().st_size for file in files)
        for old in files[:-1]:
            if size <= BYTES_IN_ALL:
                break
            size -= old.stat().st_size
            old.unlink()
        return path


def question_of(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of the user's last message in one line, cut to QUESTION_LENGTH: what tells prompts apart in a list."""
    content = next((message.get("content") for message in reversed(messages) if message.get("role") == "user"), None)
    if isinstance(content, list):  # parts, of which only texts can be shown
        content = " ".join(str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content)
    text = " ".join(str(content or "").split())
    return text if len(text) <= QUESTION_LENGTH else text[: QUESTION_LENGTH - 1] + "…"


def step_of(path: Path) -> int:
    """The step in a sample file's name, `rollout_000012.jsonl` or `validation_000012.jsonl`."""
    return int(path.stem.rpartition("_")[2])


def dump_generations(
    folder: str | Path,
    step: int,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    decode: Callable[[Sequence[int]], str],
) -> Path:
    """Write every sample to `folder/<step>.jsonl` in verl's form, as `trainer.rollout_data_dir` and
    `trainer.validation_data_dir` ask for: input, output, gts, score, step, and one key for each reward part.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for prompt, sample in zip(prompts, samples, strict=True):
        text = decode(sample.response_ids.tolist()) if sample.text is None else sample.text
        row = {"input": decode(prompt.token_ids), "output": text, "gts": prompt.ground_truth, "score": sample.reward}
        rows.append({**sample.reward_parts, **row, "step": step})
    path = folder / f"{step}.jsonl"
    write_atomically(path, "".join(map(json_line, rows)))
    return path


def choose_generations(rows: Sequence[tuple[str, str, float]], count: int) -> list[tuple[str, str, float]]:
    """`count` of the (input, output, score) rows for the trackers (`trainer.log_val_generations`).

    The same questions at every validation: sorted by input, then shuffled with a fixed seed, as verl does.
    """
    ordered = sorted(rows, key=lambda row: row[0])
    return [ordered[i] for i in np.random.RandomState(VALIDATION_SEED).permutation(len(ordered))[:count]]


def _whole_groups(group: np.ndarray, limit: int) -> list[int]:
    """The first rows, in whole groups, up to `limit`; at least one group."""
    kept: list[int] = []
    for _, rows in itertools.groupby(range(len(group)), key=lambda i: group[i]):
        members = list(rows)
        if kept and len(kept) + len(members) > limit:
            break
        kept += members
    return kept


def _runs(values: np.ndarray) -> list[list[int]]:
    """Run-length form: [[value, count], …]."""
    return [[int(value), len(list(run))] for value, run in itertools.groupby(values.tolist())]


def _rounded(values: np.ndarray) -> list[float]:
    return [round(value, 4) for value in values.tolist()]

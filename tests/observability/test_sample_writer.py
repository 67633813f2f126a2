"""Samples on disk: rows, token texts, bounds, verl's dump form, the choice shown to trackers."""

import json

import numpy as np
import pytest

from jaxrl_ppo.observability import samples as module
from jaxrl_ppo.observability.files import read_json_lines
from jaxrl_ppo.observability.samples import SampleWriter, choose_generations, dump_generations, question_of


def decode(ids):
    return "".join(f"<{token}>" for token in ids)


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def test_a_rollout_row_says_all_there_is_to_say(tmp_path, batch, samples):
    batch.old_log_probs = np.full((4, 4), -0.123456, np.float32)
    batch.advantages = batch.response_mask * 0.5
    rows = read_json_lines(SampleWriter(tmp_path, decode).write_rollout(3, batch, samples))
    assert [(row["ordinal"], row["index"]) for row in rows] == [(7, 0), (7, 1), (8, 0), (8, 1)]
    assert rows[1] == {
        "step": 3,
        "ordinal": 7,
        "index": 1,
        "source": "sums",
        "prompt": "<1><2><3>",
        "question": "a",
        "response": "<4><5><6><7>",
        "ground_truth": "4",
        "reward": 0.5,
        "reward_parts": {"format": 1.0},
        "length": 4,
        "finish_reason": "stop",
        "versions": [[3, 2], [4, 2]],
        "tokens": ["<4>", "<5>", "<6>", "<7>"],
        "log_probs": [-0.6931] * 4,
        "trainer_log_probs": [-0.1235] * 4,
        "advantage": 0.5,
    }
    assert rows[2]["mask"] == [[1, 1], [0, 1], [1, 1]]
    assert rows[3]["tokens"] == []


def test_the_question_is_the_users_last_message_in_a_line(monkeypatch):
    system = {"role": "system", "content": "Be brief."}
    first, last = ({"role": "user", "content": text} for text in ("first", "two\n  lines"))
    assert question_of([system, first, {"role": "assistant", "content": "yes"}, last]) == "two lines"
    parts = [{"type": "image"}, {"type": "text", "text": "what?"}]
    assert question_of([{"role": "user", "content": parts}]) == "what?"
    assert question_of([{"role": "user", "content": ["say", {"type": "text", "text": "when"}]}]) == "say when"
    assert question_of([system]) == ""
    monkeypatch.setattr(module, "QUESTION_LENGTH", 5)
    assert question_of([{"role": "user", "content": "abcdef"}]) == "abcd…"


def test_characters_over_several_tokens_go_to_the_last_of_them(tmp_path, batch, samples):
    text = "é→𝛑"
    samples[0].response_ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    row = read_json_lines(SampleWriter(tmp_path, decode_bytes).write_rollout(1, batch, samples))[0]
    assert row["tokens"] == ["", "é", "", "", "→", "", "", "", "𝛑"]
    samples[0].response_ids = np.array([*b"ab", 0xF0, 0x9D], np.int32)  # cut in the middle of a character
    row = read_json_lines(SampleWriter(tmp_path, decode_bytes).write_rollout(1, batch, samples))[0]
    assert "".join(row["tokens"]) == row["response"] == "ab\ufffd"


def test_steps_are_cut_at_whole_groups_and_details_bounded(tmp_path, monkeypatch, batch, samples):
    monkeypatch.setattr(module, "SAMPLES_PER_STEP", 3)
    monkeypatch.setattr(module, "DETAILED_PER_STEP", 1)
    rows = read_json_lines(SampleWriter(tmp_path, decode).write_rollout(1, batch, samples))
    assert [row["ordinal"] for row in rows] == [7, 7]
    assert ["tokens" in row for row in rows] == [True, False]


def test_oldest_files_go_when_the_folder_is_full(tmp_path, monkeypatch, batch, samples):
    writer = SampleWriter(tmp_path, decode)
    size = writer.write_rollout(1, batch, samples).stat().st_size
    monkeypatch.setattr(module, "BYTES_IN_ALL", 3 * size)
    for step in (2, 3, 4):
        writer.write_rollout(step, batch, samples)
    writer.write_validation(4, [batch.prompts[0]], samples[:1])
    assert sorted(path.name for path in tmp_path.glob("*.jsonl")) == [
        "rollout_000003.jsonl",
        "rollout_000004.jsonl",
        "validation_000004.jsonl",
    ]


def test_resume_drops_later_files(tmp_path, batch, samples):
    writer = SampleWriter(tmp_path, decode)
    for step in (1, 2, 3):
        writer.write_rollout(step, batch, samples)
        writer.write_validation(step, batch.prompts, samples[::2])
    SampleWriter(tmp_path, decode).drop_after(1)
    assert sorted(path.name for path in tmp_path.glob("*")) == ["rollout_000001.jsonl", "validation_000001.jsonl"]


def test_dump_has_the_keys_that_readers_of_verl_dumps_expect(tmp_path, batch, samples):
    samples[0].text = "four"
    path = dump_generations(tmp_path / "dump", 12, [batch.prompts[g] for g in batch.group], samples, decode)
    assert path.name == "12.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4
    assert rows[0] == {"format": 1.0, "input": "<1><2><3>", "output": "four", "gts": "4", "score": 0.5, "step": 12}
    with pytest.raises(ValueError, match="zip"):
        dump_generations(tmp_path, 12, batch.prompts, samples, decode)


def test_the_same_generations_are_shown_at_every_validation():
    rows = [(f"question {n}", f"answer {n}", float(n)) for n in range(20)]
    chosen = choose_generations(rows, 5)
    assert len(set(chosen)) == 5
    assert choose_generations(rows[::-1], 5) == chosen
    assert len(choose_generations(rows, 50)) == 20

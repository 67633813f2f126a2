"""The examples' data preprocessing, from raw files as published to training rows, and the example reward function."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_files import row, write_rows

from jaxrl_ppo.data.dataset import create_rl_dataset
from jaxrl_ppo.rewards.math_answers import boxed_math  # noqa: F401 - registers the scorers
from jaxrl_ppo.rewards.scorers import score_by_source
from jaxrl_ppo.user_code import load_name

EXAMPLES = Path(__file__).parents[2] / "examples"
RAW = [
    {
        "question": "Natalia sold 48 clips in April, half as many in May. How many in all?",
        "answer": "48+24 = 72\n#### 72",
    },
    {"question": "A ranch?", "answer": "It is 1,250.\n#### 1,250"},
]


def gsm8k(*arguments):
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "data_preprocess/gsm8k.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("kind", ["hub clone", "jsonl", "json"])
def test_gsm8k(tmp_path, tokenizer, data_config, kind):
    raw = tmp_path / "raw"
    for split in ("train", "test"):
        if kind == "hub clone":
            for configuration in ("main", "socratic"):
                (raw / configuration).mkdir(parents=True, exist_ok=True)
                name = f"{split}-00000-of-00001.parquet"
                pq.write_table(pa.Table.from_pylist(RAW), raw / configuration / name)
        else:
            raw.mkdir(exist_ok=True)
            text = json.dumps(RAW) if kind == "json" else "".join(json.dumps(row) + "\n" for row in RAW)
            (raw / f"{split}.{kind}").write_text(text)
    done = gsm8k("--local_dataset_path", raw, "--local_save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for split in ("train", "test"):
        data = create_rl_dataset(
            str(tmp_path / "out" / f"{split}.parquet"), data_config(max_prompt_length=300), tokenizer
        )
        assert len(data) == 2
        assert [data[i].ground_truth for i in range(2)] == ["72", "1250"]
        assert data.data_sources == {"openai/gsm8k"}
        assert data[0].messages[0]["content"].startswith(RAW[0]["question"])
        assert data[0].messages[0]["content"].endswith('output the final answer after "####".')
        assert data[1].extra_info["split"] == split


def test_gsm8k_bad_input(tmp_path):
    assert "no .parquet, .json, .jsonl file with 'train'" in gsm8k("--local_dataset_path", tmp_path).stderr
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "x", "solution": "y"}))
    assert "no column answer; it has question, solution" in gsm8k("--local_dataset_path", tmp_path).stderr
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "x", "answer": "y"}))
    assert (
        "train, row 0 (counted from 0): its answer has no '#### number'"
        in gsm8k("--local_dataset_path", tmp_path).stderr
    )


def test_example_reward_function():
    compute_score = load_name(str(EXAMPLES / "rewards/brief_answer.py"), "compute_score", "reward")
    assert compute_score("arithmetic", "14", "14", {}) == {"score": 1.0, "acc": True, "characters": 2}
    assert compute_score("arithmetic", "x" * 68 + "14", "14", {})["score"] == pytest.approx(0.9)
    assert compute_score("arithmetic", "15", "14", {})["score"] == 0


def preprocess(script, *arguments):
    command = [sys.executable, str(EXAMPLES / "data_preprocess" / script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_math(tmp_path, tokenizer, data_config):
    raw = {
        "problem": "What?",
        "solution": r"So \boxed{2}, no, \boxed{\frac{1}{2}}.",
        "level": "Level 5",
        "type": "Algebra",
    }
    for split in ("train", "test"):
        (tmp_path / "raw").mkdir(exist_ok=True)
        (tmp_path / "raw" / f"{split}.jsonl").write_text(json.dumps(raw))
    done = preprocess("math_dataset.py", "--local_dataset_path", tmp_path / "raw", "--local_save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    data = create_rl_dataset(str(tmp_path / "out" / "test.parquet"), data_config(), tokenizer)
    assert (data[0].ground_truth, data[0].extra_info["level"]) == (r"\frac{1}{2}", "Level 5")
    assert score_by_source(data[0].data_source, r"\boxed{0.5}", data[0].ground_truth, {}) == 1
    (tmp_path / "raw" / "train.jsonl").write_text(json.dumps({"problem": "x", "solution": "none"}))
    done = preprocess("math_dataset.py", "--local_dataset_path", tmp_path / "raw", "--local_save_dir", tmp_path / "out")
    assert r"train, row 0 (counted from 0): its solution has no \boxed{…}" in done.stderr


def test_dapo_math_keeps_every_question_once(tmp_path, tokenizer, data_config):
    rows = [row(i, data_source="math_dapo") for i in (0, 1, 0, 1, 1, 2)]
    (tmp_path / "raw").mkdir()
    write_rows(tmp_path / "raw" / "dapo-math-17k.parquet", rows)
    write_rows(tmp_path / "raw" / "aime-2024.parquet", [row(7, data_source="aime2024")])
    done = preprocess("dapo_math.py", "--local_dataset_path", tmp_path / "raw", "--local_save_dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    data = create_rl_dataset(str(tmp_path / "out" / "train.parquet"), data_config(), tokenizer)
    assert [data[i].ground_truth for i in range(len(data))] == ["0", "2", "4"]
    test = create_rl_dataset(str(tmp_path / "out" / "test.parquet"), data_config(), tokenizer)
    assert score_by_source(test[0].data_source, "Answer: 14", test[0].ground_truth, {})["score"] == 1

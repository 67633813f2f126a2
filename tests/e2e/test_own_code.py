"""A user's estimator, loss, reward and sampler, from one file outside the package; a broken one is named at once."""

from __future__ import annotations

import json
import textwrap

import numpy as np
import pyarrow.parquet as pq
import pytest

FAILED = 1

GOOD = """
    import jax.numpy as jnp

    from jaxrl_ppo.algorithms.registry import advantage, policy_loss


    @advantage("own_centred")
    def centred(inputs, config):
        advantages = inputs.spread(inputs.scores - jnp.mean(inputs.scores))
        return advantages, advantages


    @policy_loss("own_squared", needs=("rollout_log_probs",))
    def squared(inputs, config):
        penalty = 0.5 * jnp.square(inputs.log_probs - inputs.rollout_log_probs)
        return -inputs.advantages * jnp.exp(inputs.log_ratio) + penalty, {"own_penalty": penalty}


    def reward(data_source, solution_str, ground_truth, extra_info, most=7):
        score = sum(map(ord, solution_str)) % most / most
        return {"score": score, "characters": len(solution_str)}


    class Backwards:
        def __init__(self, data_source, data_config):
            self.rows = len(data_source)

        def __len__(self):
            return self.rows

        def __iter__(self):
            yield from reversed(range(self.rows))
"""


@pytest.fixture
def own(tmp_path):
    """Writes a user's file, and gives the settings that name what is in it."""

    def write(text: str) -> list[str]:
        file = tmp_path / "own.py"
        file.write_text(textwrap.dedent(text))
        return [
            f"algorithm.adv_estimator={file}:centred",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={file}:squared",
            f"reward.custom_reward_function.path={file}",
            "reward.custom_reward_function.name=reward",
            "+reward.custom_reward_function.reward_kwargs.most=5",
            f"data.sampler.class_path={file}",
            "data.sampler.class_name=Backwards",
        ]

    return write


def test_one_file_of_a_users_own_runs(command, own, quickstart):
    command.run(
        *own(GOOD),
        "trainer.mode=sync",
        "trainer.total_training_steps=2",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "algorithm.rollout_correction.bypass_mode=false",
    )
    for step in (1, 2):
        row = command.metrics()[step]
        assert row["actor/own_penalty"] >= 0
        assert row["reward/characters/mean"] > 0
        assert round(row["critic/score/max"] * 5) == pytest.approx(row["critic/score/max"] * 5)
    folder = command.folder / "samples"
    rows = pq.read_table(quickstart / "train.parquet").to_pylist()
    for step in (1, 2):
        samples = [json.loads(line) for line in (folder / f"rollout_{step:06d}.jsonl").read_text().splitlines()]
        asked = [samples[4 * i]["prompt"] for i in range(4)]
        for text, row in zip(asked, rows[::-1][4 * (step - 1) :]):
            assert row["prompt"][-1]["content"] in text
        scores, advantages = (np.array([sample[name] for sample in samples]) for name in ("reward", "advantage"))
        np.testing.assert_allclose(advantages, scores - scores.mean(), atol=1e-4)


def test_what_is_broken_is_named_by_file_and_line_before_anything_starts(command, own):
    output = command.run(*own(GOOD.replace("jnp.square(inputs", "jnp.squared(inputs")), code=FAILED)
    assert "Traceback" not in output, output
    for word in ("policy_loss.loss_mode", "squared", "own.py, line 15"):
        assert word in output, (word, output)
    assert not (command.folder / "metrics.jsonl").exists()

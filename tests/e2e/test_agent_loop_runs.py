"""A whole run whose responses take several turns: a user's loop and its tools, the timeline, and exact resume."""

from __future__ import annotations

import json
import shutil

from jaxrl_ppo.observability.timeline import read_spans

LOOP = '''
from jaxrl_ppo.schema.hermes import ToolCall


class Twice:
    """A random model calls no tool by itself: this loop calls one for it, and lets it answer again."""

    def __init__(self, tokenizer, config, tools):
        self.tools = tools

    async def run(self, prompt, conversation):
        await conversation.generate(max_new_tokens=8)
        with conversation.outside():
            answer = await self.tools.call(ToolCall("calculator", {"expression": f"{prompt.ground_truth} * 2"}))
        if conversation.add([{"role": "user", "content": answer.text}], calls=["calculator"]):
            await conversation.generate()
        return conversation.completion()
'''


def rows_of(folder, step):
    return [json.loads(line) for line in (folder / f"samples/rollout_{step:06d}.jsonl").read_text().splitlines()]


def test_a_run_of_several_turns_and_its_resume(command, tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    settings = (
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "data.max_prompt_length=200",
        "data.max_response_length=56",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:Twice",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/tools/calculator.py",
    )
    output = command.run(*settings)
    assert "turns  " in output
    metrics = command.metrics()
    assert [metrics[step]["training/staleness"] for step in (1, 2, 3)] == [0, 1, 1]
    rows = rows_of(command.folder, 3)
    for row in rows:
        assert row["length"] <= 56
        inside = [value for value, count in row["mask"] for _ in range(count)]
        (_, start, end) = row["turns"][1]
        assert [role for role, _, _ in row["turns"]] == ["assistant", "tool", "assistant"]
        assert set(inside[start:end]) == {0}
        assert set(inside[:start] + inside[end:]) == {1}
        assert f"user\n{2 * int(row['ground_truth'])}" in row["response"]
    assert any(span.track == "tools" for span in read_spans(command.folder / "timeline.json"))

    shutil.rmtree(command.folder / "global_step_3")
    assert "going on after step 2" in command.run(*settings)
    assert rows_of(command.folder, 3) == rows

"""Agent loops: turns, masks, limits, tools and users' loops; tokens against the chat template of the real model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import textwrap
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from jaxrl_ppo.rollout.agent_loop import AgentLoops, SingleTurnLoop, create_agent_loops
from jaxrl_ppo.rollout.conversation import ChatFormat
from jaxrl_ppo.rollout.engine import Completion, Request, SamplingParams
from jaxrl_ppo.rollout.errors import EngineDead
from jaxrl_ppo.rollout.tools import Tools, load_tools
from jaxrl_ppo.rollout.turn_client import TurnClient
from jaxrl_ppo.schema.config import DataConfig, RolloutConfig
from jaxrl_ppo.schema.hermes import ToolCall, knows_tools, parse_tool_calls
from jaxrl_ppo.schema.records import Prompt
from jaxrl_ppo.user_code import UserCodeError

ROOT = Path(__file__).parents[2]
CALCULATOR = str(ROOT / "examples/tools/calculator.py")


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return AutoTokenizer.from_pretrained(smollm2)


def call(expression: str) -> str:
    body = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>{body}</tool_call>"


class Scripted:
    """An engine that answers from a script: the answers of each conversation's turns, by its first request's id."""

    def __init__(self, tokenizer, script, cut=()):
        self.tokenizer, self.script, self.cut = tokenizer, script, cut
        self.requests: dict[str, Request] = {}
        self.calls: list[list[str]] = []

    async def generate(self, requests):
        self.calls.append([request.id for request in requests])
        for request in requests:
            self.requests[request.id] = request
            await asyncio.sleep(0)
            ordinal, index, *turn = request.id.split(".")
            answer = self.script[f"{ordinal}.{index}"][int(turn[0]) if turn else 0]
            if isinstance(answer, Exception):
                raise answer
            ids = [*self.tokenizer(answer)["input_ids"], self.tokenizer.eos_token_id]
            reason = "stop" if len(ids) <= request.sampling.max_new_tokens else "length"
            ids = ids[: request.sampling.max_new_tokens]
            version = int(turn[0]) if turn else 0
            log_probs = -np.arange(1, len(ids) + 1, dtype=np.float32)
            yield Completion(
                request.id, np.array(ids, np.int32), log_probs, np.full(len(ids), version, np.int32), reason
            )


def make_prompt(tokenizer, ordinal=0, agent=None):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True, tokenize=False
    )
    return Prompt(ordinal, tuple(tokenizer(ids)["input_ids"]), [], "arithmetic", "5", {}, agent)


def make_request(prompt, new=200, index=0):
    return Request(f"{prompt.ordinal}.{index}", prompt.token_ids, 7, SamplingParams(new))


def settings(**changes) -> RolloutConfig:
    config = RolloutConfig()
    config.multi_turn.enable = True
    config.multi_turn.tool_config_path = CALCULATOR
    config.agent.num_workers = 1
    for name, value in changes.items():
        section = config.agent if hasattr(config.agent, name) else config.multi_turn
        setattr(section, name, value)
    return config


@contextlib.asynccontextmanager
async def agents_of(config, tokenizer):
    agents = create_agent_loops(config, DataConfig(), tokenizer)
    try:
        yield agents
    finally:
        await agents.close()


async def run(agents, engine, prompts, **request):
    requests = [make_request(prompt, **request) for prompt in prompts]
    return {c.request_id: c async for c in agents.generate(engine, requests, prompts)}


async def test_tool_turns_are_the_templates_tokens_and_are_masked_out(tokenizer):
    """The whole response equals what the chat template makes of the finished dialogue, encoded at once."""
    script = {"0.0": [call("2+3") + call("1+1"), "It is 5."]}
    engine, prompt = Scripted(tokenizer, script), make_prompt(tokenizer)
    async with agents_of(settings(), tokenizer) as agents:
        completion = (await run(agents, engine, [prompt]))["0.0"]
    dialogue = [
        {"role": "user", "content": "What is 2 + 3?"},
        {"role": "assistant", "content": script["0.0"][0]},
        {"role": "user", "content": "<tool_response>\n5\n</tool_response>"},
        {"role": "assistant", "content": "It is 5."},
    ]
    text = tokenizer.apply_chat_template(dialogue, tokenize=False)
    assert [*prompt.token_ids, *completion.token_ids] == tokenizer(text.rstrip("\n"))["input_ids"]
    written = tokenizer.decode(completion.token_ids[completion.mask > 0])
    assert written == script["0.0"][0] + "<|im_end|>It is 5.<|im_end|>"
    first, tool, last = completion.turns
    assert (first.role, tool.role, last.role) == ("assistant", "tool", "assistant")
    assert tool.calls == ("calculator",)
    assert (completion.mask[tool.start : tool.end] == 0).all()
    assert (completion.log_probs[tool.start : tool.end] == 0).all()
    assert (completion.versions[: tool.end] == 0).all()
    assert (completion.versions[last.start :] == 1).all()
    assert (last.start, last.end) == (tool.end, len(completion.token_ids))
    # What was sampled is given back to the engine as it was, and the second turn has a seed of its own.
    second = engine.requests["0.0.1"]
    assert second.prompt_ids == (*prompt.token_ids, *completion.token_ids[: tool.end].tolist())
    assert second.sampling.max_new_tokens == 200 - tool.end
    assert second.seed != engine.requests["0.0"].seed == 7


async def test_single_turn_is_the_engines_own_answer(tokenizer):
    engine, prompt = Scripted(tokenizer, {"0.0": [call("2+3")]}), make_prompt(tokenizer)
    agents = AgentLoops({"single_turn_agent": SingleTurnLoop()}, "single_turn_agent", ChatFormat(tokenizer, {}))
    completion = (await run(agents, engine, [prompt]))["0.0"]
    assert tokenizer.decode(completion.token_ids) == call("2+3") + "<|im_end|>"
    assert completion.mask.all()
    assert len(completion.turns) == 1


async def test_requests_made_together_reach_the_engine_in_one_call(tokenizer):
    prompts = [make_prompt(tokenizer, ordinal) for ordinal in range(5)]
    engine = Scripted(tokenizer, {f"{i}.0": [call("1+1"), "2"] for i in range(5)})
    async with agents_of(settings(), tokenizer) as agents:
        done = await run(agents, engine, prompts)
    assert engine.calls[0] == [f"{i}.0" for i in range(5)]
    assert len(done) == 5


@pytest.mark.parametrize(
    ("limits", "turns"),
    [
        ({}, ["assistant", "tool"] * 3 + ["assistant"]),
        ({"max_assistant_turns": 1}, ["assistant"]),
        ({"max_assistant_turns": 2}, ["assistant", "tool", "assistant"]),
        ({"max_user_turns": 1}, ["assistant", "tool", "assistant"]),
    ],
)
async def test_limits_on_turns(tokenizer, limits, turns):
    engine = Scripted(tokenizer, {"0.0": [call("1+1")] * 3 + ["2"]})
    async with agents_of(settings(**limits), tokenizer) as agents:
        completion = (await run(agents, engine, [make_prompt(tokenizer)], new=400))["0.0"]
    assert [turn.role for turn in completion.turns] == turns
    assert completion.finish_reason == "stop"


async def test_length_is_that_of_all_turns_together(tokenizer):
    """Every budget: never more than it, and what ends the response is the policy's, never half a tool's answer."""
    script = {"0.0": [call("2+3"), call("1+1"), "5"]}
    ended = set()
    async with agents_of(settings(), tokenizer) as agents:
        for new in range(10, 140, 9):
            completion = (await run(agents, Scripted(tokenizer, script), [make_prompt(tokenizer)], new=new))["0.0"]
            assert len(completion.token_ids) <= new
            assert completion.turns[-1].role == "assistant"
            assert completion.mask[-1] == 1
            ended.add((len(completion.turns), completion.finish_reason))
    assert {(1, "length"), (3, "length"), (5, "stop")} <= ended


async def test_long_answers_of_tools_are_cut(tokenizer, tmp_path):
    tools = tmp_path / "tools.py"
    tools.write_text('def letters() -> str:\n    """Letters."""\n    return "abcdefghij" * 10\n')
    for side, shown in (("left", "abcdef...(truncated)"), ("right", "(truncated)...efghij"), ("middle", "abc...")):
        config = settings(
            tool_config_path=str(tools), max_tool_response_length=6, tool_response_truncate_side=side
        )  # fmt: skip
        engine = Scripted(tokenizer, {"0.0": ['<tool_call>{"name": "letters"}</tool_call>', "done"]})
        async with agents_of(config, tokenizer) as agents:
            completion = (await run(agents, engine, [make_prompt(tokenizer)]))["0.0"]
        assert f"<tool_response>\n{shown}" in tokenizer.decode(completion.token_ids)


async def test_broken_calls_and_tools_are_told_to_the_model(tmp_path):
    file = tmp_path / "tools.py"
    file.write_text(
        textwrap.dedent('''
            import os, time
            def slow() -> str:
                """Hangs."""
                time.sleep(60)
            def crash() -> str:
                """Ends its process."""
                os._exit(3)
            async def later(n: int) -> dict:
                """Waits.

                Args:
                    n: A number.
                """
                return {"n": n}
            def _hidden(): ...
        ''')
    )
    tools = Tools(str(file), workers=2, timeout_s=1.0)
    assert [schema["function"]["name"] for schema in tools.schemas] == ["slow", "crash", "later"]
    try:
        calls = parse_tool_calls(
            "<tool_call>{no json}</tool_call><tool_call>[1]</tool_call><tool_call>\n"
            '{"name": "later", "arguments": {"n": 4}}\n</tool_call><tool_call>{"name": "later", "arguments": 1}'
            '</tool_call><tool_call>{"name": "other"}</tool_call><tool_call>{"name": "open"'
        )
        calls += [ToolCall("later", {"m": 1}), ToolCall("crash", {}), ToolCall("slow", {})]
        answers = [await tools.call(call) for call in calls]
        again = await tools.call(ToolCall("later", {"n": 5}))
    finally:
        await tools.close()
    kinds = [answer.failure for answer in answers]
    assert kinds == ["call", "call", None, "call", "unknown", "exception", "crash", "timeout"]
    assert answers[2].text == '{"n": 4}'
    assert "slow, crash, later" in answers[4].text
    assert "TypeError" in answers[5].text
    assert "1 s" in answers[7].text
    assert again.text == '{"n": 5}'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1", "defines no function"),
        ('def f(x):\n    """F.\n\n    Args:\n        x: A number.\n    """', "line 1) needs type hints"),
        ("def f(x: int): ...", "needs type hints, and a docstring"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_tool_files_that_cannot_be_used(tmp_path, text, told):
    file = tmp_path / "tools.py"
    file.write_text(text)
    with pytest.raises(UserCodeError, match=r"multi_turn\.tool_config_path") as error:
        load_tools(str(file))
    assert told in str(error.value)


USER_LOOP = '''
class Echo:
    """Answers the model with its own words."""

    def __init__(self, tokenizer, config, tools, times=1):
        self.times = times

    async def run(self, prompt, conversation):
        await conversation.generate()
        for _ in range(self.times):
            if not conversation.add([{"role": "user", "content": conversation.text.upper()}]):
                break
            await conversation.generate()
        return conversation.completion()
'''


async def test_users_loops(tokenizer, tmp_path):
    (tmp_path / "loops.py").write_text(USER_LOOP)
    (tmp_path / "loops.yaml").write_text(f"- {{name: echo, class: '{tmp_path}/loops.py:Echo', times: 2}}\n")
    config = settings(agent_loop_config_path=str(tmp_path / "loops.yaml"))
    script = {"0.0": ["one", "two", "three"], "1.0": ["plain"], "2.0": ["tool"]}
    names = ("echo", "single_turn_agent", None)
    prompts = [make_prompt(tokenizer, i, name) for i, name in enumerate(names)]
    async with agents_of(config, tokenizer) as agents:
        done = await run(agents, Scripted(tokenizer, script), prompts)
        agents.check(["echo", None])
        with pytest.raises(UserCodeError, match="'other'; the agent loops are: single_turn_agent, tool_agent, echo"):
            agents.check(["other"])
    text = tokenizer.decode(done["0.0"].token_ids)
    assert "user\nONE" in text
    assert "user\nTWO" in text
    assert [len(done[f"{i}.0"].turns) for i in range(3)] == [5, 1, 1]

    config = RolloutConfig()
    config.agent.default_agent_loop = f"{tmp_path}/loops.py:Echo"
    async with agents_of(config, tokenizer) as agents:
        done = await run(agents, Scripted(tokenizer, script), [make_prompt(tokenizer)])
    assert len(done["0.0"].turns) == 3


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("{name: echo}", "must be a list of entries"),
        ("[{name: echo, class: 'FILE:Nobody'}]", "has no 'Nobody'"),
        ("[{name: echo, class: 'FILE:Echo', sometimes: 2}]", "sometimes"),
        ("{", "cannot be read"),
    ],
)
def test_loop_files_that_cannot_be_used(tokenizer, tmp_path, entry, told):
    (tmp_path / "loops.py").write_text(USER_LOOP)
    (tmp_path / "loops.yaml").write_text(entry.replace("FILE", str(tmp_path / "loops.py")))
    config = RolloutConfig()
    config.agent.agent_loop_config_path = str(tmp_path / "loops.yaml")
    with pytest.raises(UserCodeError, match="agent_loop_config_path") as error:
        create_agent_loops(config, DataConfig(), tokenizer)
    assert told in str(error.value)


async def test_a_turn_may_have_a_limit_of_its_own(tokenizer, tmp_path):
    """A turn that is cut is closed by the template's own tokens, which the policy did not sample."""
    (tmp_path / "loops.py").write_text(USER_LOOP.replace("generate()", "generate(max_new_tokens=3)"))
    config = RolloutConfig()
    config.agent.default_agent_loop = f"{tmp_path}/loops.py:Echo"
    script = {"0.0": ["one two three four five", "six"]}
    async with agents_of(config, tokenizer) as agents:
        completion = (await run(agents, Scripted(tokenizer, script), [make_prompt(tokenizer)]))["0.0"]
    first, user, last = completion.turns
    assert (first.end, completion.finish_reason) == (3, "stop")
    assert tokenizer.decode(completion.token_ids[: user.end]) == (
        "one two three<|im_end|>\n<|im_start|>user\nONE TWO THREE<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (completion.mask[3 : user.end] == 0).all()
    assert tokenizer.decode(completion.token_ids[last.start :]) == "six<|im_end|>"


async def test_an_engines_error_ends_the_generation(tokenizer):
    engine = Scripted(tokenizer, {"0.0": ["one"], "1.0": [EngineDead("gone")]})
    agents = AgentLoops({"single_turn_agent": SingleTurnLoop()}, "single_turn_agent", ChatFormat(tokenizer, {}))
    with pytest.raises(EngineDead, match="gone"):
        await run(agents, engine, [make_prompt(tokenizer, 0), make_prompt(tokenizer, 1)])


async def test_leaving_early_aborts_what_runs(tokenizer):
    aborted = asyncio.Event()

    class Endless:
        async def generate(self, requests):
            try:
                yield Completion(requests[0].id, np.zeros(1, np.int32), np.zeros(1), np.zeros(1, np.int32), "stop")
                await asyncio.sleep(60)
            finally:
                aborted.set()

    agents = AgentLoops({"single_turn_agent": SingleTurnLoop()}, "single_turn_agent", ChatFormat(tokenizer, {}))
    prompts = [make_prompt(tokenizer, 0), make_prompt(tokenizer, 1)]
    completions = agents.generate(Endless(), [make_request(prompt) for prompt in prompts], prompts)
    await anext(completions)
    await completions.aclose()
    await asyncio.wait_for(aborted.wait(), 5)


async def test_tools_time_is_one_span_while_any_runs(tokenizer):
    spans = []

    @contextlib.contextmanager
    def outside():
        spans.append("open")
        yield
        spans.append("closed")

    prompts = [make_prompt(tokenizer, i) for i in range(3)]
    engine = Scripted(tokenizer, {f"{i}.0": [call("1+1"), "2"] for i in range(3)})
    async with agents_of(settings(), tokenizer) as agents:
        requests = [make_request(prompt) for prompt in prompts]
        _ = [c async for c in agents.generate(engine, requests, prompts, outside)]
    assert spans[::2] == ["open"] * (len(spans) // 2)
    assert spans[1::2] == ["closed"] * (len(spans) // 2)
    assert 1 <= len(spans) // 2 <= 3


TEMPLATE_WITH_TOOLS = (
    "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_a_template_with_a_place_for_tools_is_used(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tools = load_tools(CALCULATOR)
    assert not knows_tools(tokenizer, tools)
    tokenizer.chat_template = TEMPLATE_WITH_TOOLS
    assert knows_tools(tokenizer, tools)
    engine = Scripted(tokenizer, {"0.0": [call("2+3"), "5"]})
    async with agents_of(settings(), tokenizer) as agents:
        completion = (await run(agents, engine, [make_prompt(tokenizer)]))["0.0"]
    assert "<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n5" in tokenizer.decode(completion.token_ids)


def test_a_template_that_rewrites_answers_is_refused(smollm2):
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="changes the answers of earlier turns"):
        ChatFormat(tokenizer, {}).continuation([{"role": "user", "content": "and?"}], None)


async def test_a_cancelled_waiter_does_not_disturb_the_others(tokenizer):
    engine = Scripted(tokenizer, {"0.0": ["one"], "1.0": ["two"]})
    client = TurnClient(engine)
    first, second = (
        asyncio.ensure_future(client.complete(make_request(make_prompt(tokenizer, ordinal)))) for ordinal in (0, 1)
    )
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).request_id == "1.0"

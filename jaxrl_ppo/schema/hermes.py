"""Tools as the Hermes format writes them: how they are shown to a model, how it calls them, how they answer.

After NousResearch's Hermes function calling; Qwen's chat templates use the same marks.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wrote. `problem` says why it cannot be made; name and arguments are empty then."""

    name: str
    arguments: dict[str, Any]
    problem: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a model's answer, in order: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    return [_parse(body) for body in CALL.findall(text)]


def _parse(body: str) -> ToolCall:
    try:
        value = json.loads(body)
    except ValueError as error:
        return ToolCall("", {}, f"the call is not valid JSON: {error}")
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall("", {}, 'the call has no "name"')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall("", {}, '"arguments" must be an object')
    return ToolCall(value["name"], arguments)


def tools_prompt(schemas: Sequence[Mapping[str, Any]]) -> str:
    """The part of the system message that shows tools to a model whose chat template has no place for them."""
    lines = [json.dumps(schema, ensure_ascii=False) for schema in schemas]
    return "\n".join(
        [
            "You can call these functions:",
            "<tools>",
            *lines,
            "</tools>",
            "To call one, write its name and arguments as JSON between these tags:",
            "<tool_call>",
            '{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}',
            "</tool_call>",
        ]
    )


def tool_message(content: str, *, template_knows_tools: bool) -> dict[str, str]:
    """A tool's answer as a chat message: the template's own role for it, or a marked user message."""
    if template_knows_tools:
        return {"role": "tool", "content": content}
    return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}


def knows_tools(tokenizer: Any, schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the tokenizer's chat template shows tools to the model by itself."""
    messages = [{"role": "user", "content": "-"}]
    plain, shown = (
        tokenizer.apply_chat_template(messages, tools=tools, tokenize=False) for tools in (None, list(schemas))
    )
    return plain != shown

"""The tool loop: the policy calls functions and goes on with their answers until it calls none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from jaxrl_ppo.rollout.conversation import Conversation
from jaxrl_ppo.rollout.engine import Completion
from jaxrl_ppo.rollout.tools import Tools
from jaxrl_ppo.schema.hermes import parse_tool_calls, tool_message

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import MultiTurnConfig
    from jaxrl_ppo.schema.records import Prompt


class ToolLoop:
    """An AgentLoop over the functions of `tools`."""

    def __init__(self, tools: Tools, config: MultiTurnConfig, *, template_knows_tools: bool):
        self._tools, self._config = tools, config
        self._template_knows_tools = template_knows_tools

    async def run(self, prompt: Prompt, conversation: Conversation) -> Completion:
        """See AgentLoop. Of the calls in one answer the first `max_parallel_calls` are made, at the same time."""
        while True:
            await conversation.generate()
            calls = parse_tool_calls(conversation.text)[: self._config.max_parallel_calls]
            if not calls or conversation.finished:
                break
            with conversation.outside():
                answers = await asyncio.gather(*map(self._tools.call, calls))
            messages = [
                tool_message(self._cut(answer.text), template_knows_tools=self._template_knows_tools)
                for answer in answers
            ]
            failures = sum(answer.failure is not None for answer in answers)
            if not conversation.add(messages, calls=[call.name for call in calls], failures=failures):
                break
        return conversation.completion()

    def _cut(self, text: str) -> str:
        limit, side = self._config.max_tool_response_length, self._config.tool_response_truncate_side
        if len(text) <= limit:
            return text
        if side == "left":
            return text[:limit] + "...(truncated)"
        if side == "right":
            return "(truncated)..." + text[-limit:]
        return text[: limit // 2] + "...(truncated)..." + text[len(text) - limit // 2 :]

"""From a row in verl's form to a `Prompt`: checks, chat template, token ids, length."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.data.columns import RowReader
from jaxrl_ppo.data.rows import DataError, Row
from jaxrl_ppo.schema.hermes import knows_tools, tools_prompt
from jaxrl_ppo.schema.records import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from jaxrl_ppo.schema.config import DataConfig

WITHOUT_TOOLS = "single_turn_agent"  # the agent loop whose prompts show no tools


class PromptBuilder:
    """Makes prompts of rows. May be used from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: DataConfig, tools: Sequence[Mapping[str, Any]] = ()):
        """`tools` are the JSON schemas of the functions that the model is told of."""
        self.tokenizer = tokenizer
        self.config = config
        self.tools = tools
        self._tools_by_template = bool(tools) and knows_tools(tokenizer, tools)
        self._system = config.system_prompt
        self.max_length = config.max_prompt_length
        self.truncation = config.truncation
        self.reader = RowReader(config)
        self.template_arguments = {"add_generation_prompt": True, **config.apply_chat_template_kwargs}
        # Hugging Face tokenizers may change their own state in a call.
        self._lock = threading.Lock()

    def build(self, row: Row, where: str, ordinal: int) -> Prompt:
        """The prompt of `row`, which `where` names in messages. Raises DataError for a row that cannot be used."""
        messages = self.reader.messages(row, where)
        source, ground_truth, extra_info = self.reader.task(row, where)
        agent = self.reader.agent(row, where)
        token_ids = self.fit(self.encode([self.render(messages, where, agent)])[0], where)
        return Prompt(ordinal, tuple(token_ids), messages, source, ground_truth, extra_info, agent)

    def render(self, messages: list[dict[str, Any]], where: str, agent: str | None = None) -> str:
        """The messages as text, in the model's chat format, with data.system_prompt and the tools that `agent` has."""
        from jinja2 import TemplateError

        arguments = dict(self.template_arguments)
        tools = self.tools if agent != WITHOUT_TOOLS else ()
        if tools and self._tools_by_template:
            arguments["tools"] = list(tools)
        messages = self._with_system(messages, tools_prompt(tools) if tools and not self._tools_by_template else None)
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        except (TemplateError, TypeError, KeyError, ValueError) as error:
            raise DataError(
                f"{where}: the chat template refuses the prompt: {type(error).__name__}: {error}"
            ) from error
        assert isinstance(text, str)
        return text

    def _with_system(self, messages: list[dict[str, Any]], tools: str | None) -> list[dict[str, Any]]:
        """The messages under their system message, or data.system_prompt; `tools` is put at its end."""
        own = messages[0] if messages[0]["role"] == "system" else None
        system = str(own["content"]) if own else self._system
        if tools is None and (own or system is None):
            return messages
        content = "\n\n".join(part for part in (system, tools) if part)
        return [{"role": "system", "content": content}, *(messages[1:] if own else messages)]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered prompts; the template has put every special token in already."""
        with self._lock:
            return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]

    def fit(self, token_ids: list[int], where: str) -> list[int]:
        """`token_ids`, cut to data.max_prompt_length as data.truncation says; DataError where it says `error`."""
        limit = self.max_length
        if len(token_ids) <= limit:
            return token_ids
        if self.truncation == "left":
            return token_ids[-limit:]
        if self.truncation == "right":
            return token_ids[:limit]
        if self.truncation == "middle":
            return token_ids[: limit // 2] + token_ids[len(token_ids) - (limit - limit // 2) :]
        raise DataError(
            f"{where}: the prompt has {len(token_ids)} tokens, data.max_prompt_length is {limit}. Raise it, set "
            "data.filter_overlong_prompts=true to drop such rows, or data.truncation to left, right or middle"
        )

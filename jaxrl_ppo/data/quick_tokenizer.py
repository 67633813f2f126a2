"""A tokenizer for counting a prompt's tokens before a run: loaded in a moment, where the model's own takes seconds.

It is made of the `tokenizers` library and of the part of transformers that renders chat templates. AutoTokenizer also
imports torch where that is installed, which a run's driver does without.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_ppo.data.tokenizer import default_template, given_template

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class QuickTokenizer:
    """As much of a Hugging Face tokenizer as PromptBuilder needs."""

    def __init__(self, folder: Path, custom_chat_template: str | None = None):
        """Reads `folder`. Raises OSError, ValueError or KeyError without a tokenizer.json and a template to read."""
        from tokenizers import Tokenizer

        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        own = folder / "chat_template.jinja"
        if custom_chat_template is not None:
            template: str | None = given_template(custom_chat_template)
        else:
            template = own.read_text(encoding="utf-8") if own.is_file() else default_template(settings)
        if template is None:
            raise ValueError(f"{folder}: no chat template")
        self.chat_template = template
        self._special = {name: _text(settings[name]) for name in SPECIAL_TOKENS if settings.get(name) is not None}
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        try:
            self._backend = Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{folder}: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        tools: list[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool,
        **arguments: Any,
    ) -> str:
        """The messages as text; `tokenize` must be false."""
        # Without torch it says at its import that models cannot be had: none is wanted here.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        texts, _ = render_jinja_template(
            conversations=[conversation], tools=tools, chat_template=self.chat_template, **self._special | arguments
        )
        return texts[0]

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        # One by one: a batch would start threads, and a process with threads of this library warns when it is forked.
        return {"input_ids": [self._backend.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]}


def _text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])

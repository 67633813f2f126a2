"""The tokenizer (and, for multimodal models, the processor) of a Hugging Face folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_ppo.data.local import SMALL_FILES, copy_to_local

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

log = logging.getLogger(__name__)


class TokenizerError(Exception):
    """A folder without a usable tokenizer or chat template."""


def hf_tokenizer(
    path: str | Path,
    *,
    trust_remote_code: bool = False,
    custom_chat_template: str | None = None,
    needs_template: bool = True,
) -> PreTrainedTokenizerBase:
    """The tokenizer in `path` (folder, URL or hub id), with a padding token and a chat template if it `needs_template`.

    `custom_chat_template` replaces the tokenizer's own: a Jinja template, or the path of a file with one. Raises
    TokenizerError when there is no tokenizer in the folder, no template to be had, or two that contradict one another.
    """
    # Imported here: transformers takes seconds to import, and more where torch is installed.
    from transformers import AutoTokenizer

    folder = copy_to_local(path, key="actor_rollout_ref.model.tokenizer_path", hub_files=SMALL_FILES)
    if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
        raise TokenizerError(f"{folder}: no tokenizer there (no tokenizer*.json, tokenizer.model or vocab file)")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise TokenizerError(f"{folder}: its tokenizer cannot be loaded: {error}") from error
    if custom_chat_template is None:
        _check_templates(folder)
    else:
        tokenizer.chat_template = given_template(custom_chat_template)
    if needs_template and tokenizer.chat_template is None:
        raise TokenizerError(
            f"{folder}: its tokenizer has no chat template; give one with actor_rollout_ref.model.custom_chat_template"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        log.info("the tokenizer has no padding token; %r is used", tokenizer.eos_token)
    return tokenizer


def _check_templates(folder: Path) -> None:
    """Raise TokenizerError when `folder` has two chat templates that differ: programs disagree on which one counts."""
    own, file = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if not (own.is_file() and file.is_file()):
        return
    second = default_template(json.loads(file.read_text(encoding="utf-8")))
    if second is not None and second.strip() != own.read_text(encoding="utf-8").strip():
        raise TokenizerError(
            f"{folder}: chat_template.jinja and the chat_template in tokenizer_config.json are different templates: a "
            "prompt would read one way here and another way where the model is served. Keep the one that the model was "
            "trained with and delete the other, or name it: actor_rollout_ref.model.custom_chat_template="
            f"{own}"
        )


def default_template(settings: Mapping[str, Any]) -> str | None:
    """The chat template in the content of a tokenizer_config.json, the one named default where there are several."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
    return found if isinstance(found, str) else None


def given_template(text: str) -> str:
    """`text` itself, or the content of the file it names. What holds no Jinja mark can only be a file's name."""
    if "{{" in text or "{%" in text:
        return text
    file = Path(text).expanduser()
    if not file.is_file():
        raise TokenizerError(
            f"actor_rollout_ref.model.custom_chat_template: {text!r} is neither a Jinja template nor a file"
        )
    return file.read_text(encoding="utf-8")


def hf_processor(path: str | Path, *, trust_remote_code: bool = False) -> ProcessorMixin | None:
    """The processor of a multimodal model folder; None for a text model."""
    folder = copy_to_local(path, key="actor_rollout_ref.model.tokenizer_path", hub_files=SMALL_FILES)
    if not any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json")):
        return None
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)

"""What a row in verl's form says: its messages, its task for the reward function, its agent loop. All checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxrl_ppo.data.rows import DataError, Row

if TYPE_CHECKING:
    from jaxrl_ppo.schema.config import DataConfig

OPTIONAL_COLUMNS = ("reward_model", "extra_info", "agent_name")


class RowReader:
    """Reads rows by the columns that `data.prompt_key` and `data.reward_fn_key` name.

    In every method `where` names the row in messages, and a row that cannot be used raises DataError.
    """

    def __init__(self, config: DataConfig):
        self.prompt_key, self.source_key = config.prompt_key, config.reward_fn_key

    @property
    def columns(self) -> tuple[str, str]:
        """Columns that every row must have."""
        return self.prompt_key, self.source_key

    def messages(self, row: Row, where: str) -> list[dict[str, Any]]:
        """The row's chat messages."""
        if self.prompt_key not in row:
            raise DataError(f"{where}: no column {self.prompt_key!r} (data.prompt_key); it has {', '.join(row)}")
        messages = row[self.prompt_key]
        if messages is None or (isinstance(messages, list | str) and not len(messages)):
            raise DataError(f"{where}: the prompt is empty")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise DataError(
                f"{where}: the prompt (column {self.prompt_key!r}) must be a list of {{role, content}} messages, "
                f"as the chat template takes them, not {_shown(messages)}"
            )
        # Parquet gives every message the keys of all messages, None where it has none of its own.
        messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
        for message in messages:
            if "role" not in message:
                raise DataError(f"{where}: a message of the prompt has no role: {_shown(message)}")
        if not any(_has_content(message) for message in messages):
            raise DataError(f"{where}: the prompt is empty: none of its messages has any content")
        return messages

    def task(self, row: Row, where: str) -> tuple[str, Any, dict[str, Any]]:
        """What the reward function gets beside the response: data source, ground truth, extra information."""
        source = row.get(self.source_key)
        if not isinstance(source, str):
            raise DataError(
                f"{where}: column {self.source_key!r} (data.reward_fn_key) must be text, not {_shown(source)}"
            )
        ground_truth = self._mapping(row, "reward_model", where).get("ground_truth")
        return source, ground_truth, self._mapping(row, "extra_info", where)

    def agent(self, row: Row, where: str) -> str | None:
        """The agent loop that the row names, if it does."""
        name = row.get("agent_name")
        if name is not None and not isinstance(name, str):
            raise DataError(f"{where}: column 'agent_name' must be text, not {_shown(name)}")
        return name

    @staticmethod
    def _mapping(row: Row, column: str, where: str) -> dict[str, Any]:
        value = row.get(column)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise DataError(f"{where}: column {column!r} must be a mapping, not {_shown(value)}")
        return value


def _has_content(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip()) if isinstance(content, str) else bool(content)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"

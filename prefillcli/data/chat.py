"""Chat messages to the text that the model was trained on."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

from prefillcli.data.rows import RowError

Message = dict[str, Any]

_DAY = datetime.datetime(2024, 7, 26)  # the day Llama 3's template falls back to


def messages_of(value: Sequence[Any], system: str | None) -> list[Message] | RowError:
    """The messages of a row, with the `system` message before them unless the row has its own.

    Keys with a null are left out: Parquet gives every message the keys of all others.
    """
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            return RowError("wrong_type", f"message {number} is no object with a role and a content")
        message = {key: part for key, part in item.items() if part is not None}
        if "content" not in message and "tool_calls" not in message:
            return RowError("chat_error", f"message {number} has no content")
        messages.append(message)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def render_chats(tokenizer: Any, chats: Sequence[list[Message]]) -> list[str | RowError]:
    """Every chat as text up to where the assistant answers, by the tokenizer's chat template."""
    if not chats:
        return []
    try:
        return list(_apply(tokenizer, list(chats)))
    except Exception:  # some chat: find out which one
        return [_render_one(tokenizer, chat) for chat in chats]


def _render_one(tokenizer: Any, chat: list[Message]) -> str | RowError:
    try:
        return str(_apply(tokenizer, [chat])[0])
    except Exception as error:  # the model's template may raise anything
        return RowError("chat_error", f"{type(error).__name__}: {str(error)[:300]}")


def _apply(tokenizer: Any, chats: list[list[Message]]) -> list[str]:
    # Some templates print today's date. A score must not depend on the day, nor a resume on midnight.
    rendered: list[str] = tokenizer.apply_chat_template(
        chats, tokenize=False, add_generation_prompt=True, strftime_now=_DAY.strftime
    )
    return rendered

"""Chat messages to the text that the model was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prefillcli.data.prompts.rendering import Renderer, RenderLimits
from prefillcli.data.rows import ErrorCode, RowError
from prefillcli.errors import UsageError

Message = dict[str, Any]


def messages_of(value: Sequence[Any], system: str | None) -> list[Message] | RowError:
    """The messages of a row, with the `system` message before them unless the row has its own.

    Keys with a null are left out: Parquet gives every message the keys of all others.
    """
    messages: list[Message] = []
    for number, item in enumerate(value, 1):
        if not isinstance(item, dict) or not isinstance(item.get("role"), str):
            return RowError(ErrorCode.WRONG_TYPE, f"message {number} is not an object with a role and a content")
        message = {key: part for key, part in item.items() if part is not None}
        if "content" not in message and "tool_calls" not in message:
            return RowError(ErrorCode.CHAT_ERROR, f"message {number} has no content")
        messages.append(message)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


class ChatTemplate:
    """The chat template of a tokenizer. Where a model `answers`, chats end where the assistant begins to.

    Raises UsageError if there is none, or if it cannot be compiled within the limits.
    """

    def __init__(self, tokenizer: Any, limits: RenderLimits | None = None, *, answers: bool = True) -> None:
        from transformers import PreTrainedTokenizerBase  # takes long to import; the tokenizer has done so

        if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            raise UsageError(
                f"{type(tokenizer).__name__} turns chats into text by code of its own, which is not run\n"
                "write the messages as text with --template, and give --no-chat"
            )
        try:
            text = tokenizer.get_chat_template()
        except ValueError as error:
            raise UsageError(f"the model's chat template: {error}") from None
        spec = {
            "kind": "chat",
            "text": text,
            "answers": answers,
            "variables": dict(tokenizer.special_tokens_map),
            "name": "the model's chat template",
        }
        self._renderer = Renderer(spec, code=ErrorCode.CHAT_ERROR, limits=limits)

    def render(self, chats: Sequence[list[Message]]) -> list[str | RowError]:
        """Every chat as text, or why there is none."""
        return self._renderer.render(chats)

    def close(self) -> None:
        """Stop rendering, in whatever thread it goes on, for good."""
        self._renderer.close()

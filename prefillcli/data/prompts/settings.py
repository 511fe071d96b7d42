"""How rows become prompts, and which of these settings a tokenizer and an input allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefillcli.data.prompts.lengths import OnLong
from prefillcli.errors import UsageError

DEFAULT_COLUMN = "prompt"
_FALLBACK_COLUMNS = (DEFAULT_COLUMN, "messages", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """How a row becomes a prompt."""

    prompt_column: str = DEFAULT_COLUMN
    """Column with text, chat messages or token ids; not used with a template."""
    template: str | None = None
    """Jinja text, or a file with it."""
    chat: bool | None = None
    """Wrap text as a user message: yes, no, or (None) if the tokenizer has a chat template."""
    system: str | None = None
    """System message of every chat that has none of its own."""
    max_length: int
    """Longest prompt in tokens."""
    on_long: OnLong = "error"
    """What happens to a longer one."""
    vocab_size: int
    """Token ids are below this."""
    literal: bool = True
    """Whether the text of a control token in the data stays text."""
    max_row_bytes: int | None = None
    """Longest row, and longest prompt made of one, in bytes; None: as `default_row_bytes` has it."""
    compression: bool = False
    """Whether the columns `keep` and `specprefill` say how a row is compressed."""
    classifies: bool = False
    """Whether a classification head reads the prompt: text is no chat unless `chat` says so, and no answer begins."""
    padding: int | None = None
    """The token that such a head takes for padding where it ends a prompt."""
    adapter_column: str | None = None
    """Column with the name of the row's adapter; null or empty: none."""
    adapters: tuple[str, ...] = ()
    """The names that it may hold."""
    sections: bool = False
    """Whether prompts note what they were made of, so that sections of them can be left out."""


def has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def wants_chat(settings: PromptSettings, tokenizer: Any) -> bool:
    """Whether text becomes a user message."""
    has_template = has_chat_template(tokenizer)
    if settings.chat and not has_template:
        raise UsageError("--chat: the tokenizer has no chat template\nleave --chat out, or write one with --template")
    chat = (has_template and not settings.classifies) if settings.chat is None else settings.chat
    if settings.system is not None and not chat:
        why = (
            "a classification head reads text as it is: give --chat"
            if settings.classifies
            else ("the tokenizer has no chat template, or --no-chat is given")
        )
        raise UsageError(f"--system needs a chat: {why}")
    return chat


def require_chat(settings: PromptSettings, tokenizer: Any) -> None:
    if settings.chat is False:
        raise UsageError("--no-chat: the prompt column is 'messages', which only a chat template turns into text")
    if not has_chat_template(tokenizer):
        raise UsageError(
            "the prompt column is 'messages', but the tokenizer has no chat template\n"
            "use a model that has one, or write the messages as text with --template"
        )


def refuse_chat(settings: PromptSettings) -> None:
    for option, given in (("--chat", settings.chat), ("--system", settings.system is not None)):
        if given:
            raise UsageError(f"{option}: the prompt column is 'prompt_token_ids', and no chat is made of token ids")


def prompt_column(settings: PromptSettings, available: Sequence[str]) -> str:
    """The column named, or if none was, the first usual one that the input has."""
    if settings.prompt_column != DEFAULT_COLUMN:
        return settings.prompt_column
    return next((name for name in _FALLBACK_COLUMNS if name in available), DEFAULT_COLUMN)

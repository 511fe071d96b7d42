"""How rows become prompts, which of these settings a tokenizer and an input allow, and the length of a prompt."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from prefillcli.data.rows import MAX_ROW_BYTES, ErrorCode, Int32Array, RowError
from prefillcli.errors import UsageError

OnLong = Literal["error", "truncate-left", "truncate-middle", "skip"]


_LEAST_ROW_BYTES = 8 << 20  # a row also has what the prompt does not need


def default_row_bytes(max_length: int, longest_token: int, on_long: OnLong) -> int:
    """Bytes of the longest row that is worth reading, where a token has at most `longest_token` bytes.

    Twice what can make a prompt of `max_length` tokens, within bounds. With `truncate-*` longer rows count too, and
    the bound is `MAX_ROW_BYTES`.
    """
    if on_long in ("truncate-left", "truncate-middle"):
        return MAX_ROW_BYTES
    return min(max(2 * max_length * longest_token, _LEAST_ROW_BYTES), MAX_ROW_BYTES)


def fit(tokens: Int32Array, max_length: int, on_long: OnLong, start_ids: Set[int]) -> Int32Array | RowError:
    """At most `max_length` of the tokens, or why the row has no prompt.

    `truncate-left` drops the oldest tokens but keeps those of `start_ids` (BOS) at the very start;
    `truncate-middle` keeps the first and the last half.
    """
    if len(tokens) <= max_length:
        return tokens
    if on_long in ("error", "skip"):
        code = ErrorCode.PROMPT_TOO_LONG if on_long == "error" else ErrorCode.SKIPPED_TOO_LONG
        return RowError(code, f"{len(tokens)} tokens, the limit is {max_length}")
    head = 0
    if on_long == "truncate-middle":
        head = max_length // 2
    else:
        while head < max_length - 1 and int(tokens[head]) in start_ids:
            head += 1
    return np.concatenate([tokens[:head], tokens[len(tokens) - (max_length - head) :]])


def without_padding(tokens: Int32Array, padding: int) -> Int32Array:
    """The tokens int32 [tokens] up to the last one that is no padding; of padding alone the first one, as transformers
    has it."""
    last = np.flatnonzero(tokens != padding)[-1:]
    return tokens[: int(last[0]) + 1] if len(last) else tokens[:1]


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


def prompt_column(named: str, available: Sequence[str]) -> str:
    """The column `named`, or if none was, the first usual one that the input has."""
    if named != DEFAULT_COLUMN:
        return named
    return next((name for name in _FALLBACK_COLUMNS if name in available), DEFAULT_COLUMN)

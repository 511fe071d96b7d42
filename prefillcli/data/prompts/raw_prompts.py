"""Prompts as the rows have them, before chats are rendered and texts tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from prefillcli.data.prompts.chat import Message, messages_of
from prefillcli.data.prompts.controls import Controls, Marks, NotLiteral, not_literal, protect
from prefillcli.data.prompts.settings import PromptSettings
from prefillcli.data.prompts.templates import RowTemplate
from prefillcli.data.rows import ErrorCode, Int32Array, RowBatch, RowError, row_too_large


class RawPrompt(NamedTuple):
    """The prompt of a row before it is tokenised: a text, a chat that becomes a text, or token ids."""

    row: int
    text: str = ""
    chat: list[Message] | None = None
    tokens: Int32Array | None = None
    marks: Marks | None = None
    """What stands in the text for other characters; None if the data has no text of a control token."""


class RawPromptReader:
    """Takes raw prompts out of rows: through the template, or from the prompt's column.

    `typed` are the characters of templates and system messages, which are not data. A template renders rows in groups
    of about `group_chars` characters.
    """

    def __init__(
        self,
        settings: PromptSettings,
        *,
        template: RowTemplate | None,
        columns: Sequence[str],
        chat: bool,
        has_chat_template: bool,
        controls: Controls,
        typed: frozenset[str],
        max_row_bytes: int,
        group_chars: int,
    ) -> None:
        self._settings = settings
        self._template = template
        self._columns = tuple(columns)
        self._column = columns[0] if template is None else None
        self._chat = chat
        self._has_chat_template = has_chat_template
        self._controls = controls
        self._typed = typed
        self._max_row_bytes = max_row_bytes
        self._group_chars = group_chars

    def read(self, batch: RowBatch, errors: dict[int, RowError]) -> Iterator[RawPrompt]:
        """The raw prompts of the rows that are not in `errors`; rows that have none are added there."""
        for row, value, marks in self._values(batch, errors):
            raw = value if isinstance(value, RowError) else self._raw(row, value)
            if isinstance(raw, RowError):
                errors[row] = raw
            else:
                yield raw._replace(marks=marks)

    def _values(
        self, batch: RowBatch, errors: dict[int, RowError]
    ) -> Iterator[tuple[int, str | RowError | Any, Marks | None]]:
        """The rows without an error, each with the text of the template or what is in the prompt's column."""
        columns = [batch.columns[name] for name in self._columns]
        places = [(at, row) for at, row in enumerate(batch.rows.tolist()) if row not in errors]
        if self._template is None:
            for at, row in places:
                yield row, *self._literal(columns[0][at], joined=self._chat or self._column == "messages")
            return
        rows, values, marked = [], [], []
        for at, row in places:
            given = dict(zip(self._columns, (column[at] for column in columns), strict=True))
            value, marks = self._literal(given, joined=True)
            if isinstance(value, RowError):
                errors[row] = value
            else:
                rows.append(row)
                values.append(value)
                marked.append(marks)
        done = 0
        while done < len(values):
            texts = self._template.render(values[done:], self._group_chars)
            end = done + len(texts)
            yield from zip(rows[done:end], texts, marked[done:end], strict=True)
            done = end

    def _literal(self, value: Any, *, joined: bool) -> tuple[Any, Marks | None]:
        """Values of a row in which the tokenizer finds no control token, and what was replaced for that."""
        is_ids = self._template is None and isinstance(value, list) and value and not isinstance(value[0], dict)
        if not self._settings.literal or is_ids:
            return value, None
        try:
            return protect(self._controls, value, self._typed, joined=joined)
        except NotLiteral as error:
            return not_literal(error), None
        except RecursionError:
            code = ErrorCode.TEMPLATE_ERROR if self._template else ErrorCode.CHAT_ERROR
            return RowError(code, "RecursionError: a value is nested too deeply"), None

    def _raw(self, row: int, value: Any) -> RawPrompt | RowError:
        if isinstance(value, str):
            return self._from_text(row, value)
        if value is None:
            return RowError(ErrorCode.NULL_PROMPT, "the prompt is null")
        if not isinstance(value, list | np.ndarray):
            return RowError(ErrorCode.WRONG_TYPE, f"the prompt is {type(value).__name__}, not text")
        if len(value) == 0:
            ids = isinstance(value, np.ndarray) or self._column == "prompt_token_ids"
            return RowError(ErrorCode.INVALID_TOKEN_IDS if ids else ErrorCode.EMPTY_PROMPT, "the list is empty")
        if isinstance(value, np.ndarray) or set(map(type, value)) == {int}:
            return self._from_ids(row, value)
        return self._from_messages(row, value)

    def _from_text(self, row: int, text: str) -> RawPrompt | RowError:
        if not text or text.isspace():
            return RowError(
                ErrorCode.EMPTY_PROMPT, "the prompt is white space only" if text else "the prompt is empty"
            )
        wrong = text_error(text, "the prompt", self._max_row_bytes)
        if wrong is not None:
            return wrong
        if not self._chat:
            return RawPrompt(row, text)
        return self._from_messages(row, [{"role": "user", "content": text}])

    def _from_messages(self, row: int, value: list[Any]) -> RawPrompt | RowError:
        if self._column == "prompt_token_ids":
            return RowError(ErrorCode.INVALID_TOKEN_IDS, "not every token id is an integer")
        messages = messages_of(value, self._settings.system)
        if isinstance(messages, RowError):
            return messages
        if not self._has_chat_template or self._settings.chat is False:
            return RowError(ErrorCode.CHAT_ERROR, "the prompt is a list of messages, and no chat template is applied")
        return RawPrompt(row, chat=messages)

    def _from_ids(self, row: int, value: Any) -> RawPrompt | RowError:
        ends = (min(value), max(value)) if isinstance(value, list) else (value.min(), value.max())
        for number in ends:
            if not 0 <= number < self._settings.vocab_size:
                return not_in_vocabulary(number, self._settings.vocab_size)
        return RawPrompt(row, tokens=np.asarray(value, np.int32))


def not_in_vocabulary(token: int, vocab_size: int) -> RowError:
    """The error of a row with a token id that the model does not have."""
    return RowError(ErrorCode.INVALID_TOKEN_IDS, f"id {token} is not in 0..{vocab_size - 1}")


def text_error(text: str, what: str, max_bytes: int) -> RowError | None:
    """Why a text, of which `what` is a part or the whole, cannot be a prompt; None if it can."""
    if text.isascii():
        size = len(text)
    else:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return RowError(ErrorCode.INVALID_UTF8, f"{what} has half a surrogate pair")
    return row_too_large("the prompt", size, max_bytes) if size > max_bytes else None

"""From row batches to prompts: template, chat, tokens, length."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from prefillcli.data.prompts.chat import ChatTemplate, Message, messages_of
from prefillcli.data.prompts.controls import Marks, NotLiteral, not_literal, protect
from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import LabelError, Labels, tail_of
from prefillcli.data.prompts.lengths import OnLong, default_row_bytes, fit
from prefillcli.data.prompts.templates import RowTemplate
from prefillcli.data.rows import ErrorCode, Int32Array, Prompt, RowBatch, RowError, row_too_large
from prefillcli.errors import UsageError

DEFAULT_COLUMN = "prompt"
_FALLBACK_COLUMNS = (DEFAULT_COLUMN, "messages", "prompt_token_ids")
_TAIL_TOKENS = 16
_GROUP_CHARS = 16 << 20


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


class _Draft(NamedTuple):
    """What a row asks, before it is tokenised: a text, a chat that becomes a text, or token ids."""

    row: int
    text: str = ""
    chat: list[Message] | None = None
    tokens: Int32Array | None = None
    marks: Marks | None = None
    """What stands in the text for other characters; None if the data has no text of a control token."""


class PromptBuilder:
    """Makes prompts of rows.

    `available` are the column names of the input (`Source.available`). Raises UsageError if the settings
    contradict each other or the tokenizer.
    """

    def __init__(self, tokenizer: Any, settings: PromptSettings, available: Sequence[str] = ()) -> None:
        self.settings = settings
        self.chat = _wants_chat(settings, tokenizer)
        """Whether text is wrapped by the chat template."""
        self.template = None if settings.template is None else RowTemplate(settings.template)
        self.column = _prompt_column(settings, available)
        """The column with the prompt, where there is no template."""
        self.columns: tuple[str, ...] = self.template.columns if self.template else (self.column,)
        """The columns that `build` needs."""
        self.optional: tuple[str, ...] = ("keep", "specprefill") if settings.compression else ()
        """Columns that `build` uses where they are there."""
        if self.template is None and self.column == "messages":
            _require_chat(settings, tokenizer)
        if self.template is None and self.column == "prompt_token_ids":
            _refuse_chat(settings)
        self.render_seconds = 0.0
        self.tokenize_seconds = 0.0
        self._tokenizer = tokenizer
        self._chat_template: ChatTemplate | None = None
        self._has_chat_template = _has_chat_template(tokenizer)
        self._encoder = Encoder(tokenizer)
        typed = (self.template and self.template.text, settings.system, getattr(tokenizer, "chat_template", None))
        self._typed = frozenset("".join(map(str, typed)))
        self.max_row_bytes = settings.max_row_bytes or default_row_bytes(
            settings.max_length, self._encoder.longest_token(), settings.on_long
        )
        """Longer rows are no prompts."""
        self._may_exceed_vocabulary = self._encoder.size > settings.vocab_size

    def fingerprint(self) -> str:
        """Digest of everything here that changes a prompt, the text of the template included."""
        settings = self.settings
        parts = [self.column, self.template and self.template.text, self.chat, settings.system]
        text = json.dumps([*parts, settings.max_length, settings.on_long, self.max_row_bytes, settings.literal])
        return hashlib.sha256(text.encode()).hexdigest()

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """The prompts of a batch, ascending by row, and the errors of all its other rows."""
        errors = dict(batch.errors)
        prompts: list[Prompt] = []
        started = time.perf_counter()
        for drafts in _groups(self._drafts(batch, errors)):
            drafts = self._with_chats_rendered(drafts, errors)
            rendered = time.perf_counter()
            self.render_seconds += rendered - started
            prompts += self._prompts(drafts, labels, errors)
            started = time.perf_counter()
            self.tokenize_seconds += started - rendered
        if self.optional:
            prompts = _with_compression(prompts, batch, errors)
        return prompts, errors

    def close(self) -> None:
        """Stop what is being rendered, in whatever thread, for good."""
        for renderer in (self.template, self._chat_template):
            if renderer is not None:
                renderer.close()

    def _drafts(self, batch: RowBatch, errors: dict[int, RowError]) -> Iterator[_Draft]:
        for row, value, marks in self._values(batch, errors):
            draft = value if isinstance(value, RowError) else self._draft(row, value)
            if isinstance(draft, RowError):
                errors[row] = draft
            else:
                yield draft._replace(marks=marks)

    def _values(
        self, batch: RowBatch, errors: dict[int, RowError]
    ) -> Iterator[tuple[int, str | RowError | Any, Marks | None]]:
        """The rows without an error, each with the text of the template or what is in the prompt's column."""
        columns = [batch.columns[name] for name in self.columns]
        places = [(at, row) for at, row in enumerate(batch.rows.tolist()) if row not in errors]
        if self.template is None:
            for at, row in places:
                yield row, *self._literal(columns[0][at], joined=self.chat or self.column == "messages")
            return
        rows, values, marked = [], [], []
        for at, row in places:
            given = dict(zip(self.columns, (column[at] for column in columns), strict=True))
            value, marks = self._literal(given, joined=True)
            if isinstance(value, RowError):
                errors[row] = value
            else:
                rows.append(row)
                values.append(value)
                marked.append(marks)
        done = 0
        while done < len(values):
            texts = self.template.render(values[done:], _GROUP_CHARS)
            end = done + len(texts)
            yield from zip(rows[done:end], texts, marked[done:end], strict=True)
            done = end

    def _literal(self, value: Any, *, joined: bool) -> tuple[Any, Marks | None]:
        """Values of a row in which the tokenizer finds no control token, and what was replaced for that."""
        is_ids = self.template is None and isinstance(value, list) and value and not isinstance(value[0], dict)
        if not self.settings.literal or is_ids:
            return value, None
        try:
            return protect(self._encoder.controls, value, self._typed, joined=joined)
        except NotLiteral as error:
            return not_literal(error), None
        except RecursionError:
            code = ErrorCode.TEMPLATE_ERROR if self.template else ErrorCode.CHAT_ERROR
            return RowError(code, "RecursionError: a value is nested too deeply"), None

    def _draft(self, row: int, value: Any) -> _Draft | RowError:
        if isinstance(value, str):
            return self._from_text(row, value)
        if value is None:
            return RowError(ErrorCode.NULL_PROMPT, "the prompt is null")
        if not isinstance(value, list | np.ndarray):
            return RowError(ErrorCode.WRONG_TYPE, f"the prompt is {type(value).__name__}, not text")
        if len(value) == 0:
            ids = isinstance(value, np.ndarray) or self.column == "prompt_token_ids"
            return RowError(ErrorCode.INVALID_TOKEN_IDS if ids else ErrorCode.EMPTY_PROMPT, "the list is empty")
        if isinstance(value, np.ndarray) or set(map(type, value)) == {int}:
            return self._from_ids(row, value)
        return self._from_messages(row, value)

    def _from_text(self, row: int, text: str) -> _Draft | RowError:
        if not text or text.isspace():
            return RowError(
                ErrorCode.EMPTY_PROMPT, "the prompt is white space only" if text else "the prompt is empty"
            )
        if not _is_unicode(text):
            return RowError(ErrorCode.INVALID_UTF8, "the prompt has half a surrogate pair")
        if _size(text) > self.max_row_bytes:
            return row_too_large("the prompt", _size(text), self.max_row_bytes)
        if not self.chat:
            return _Draft(row, text)
        return self._from_messages(row, [{"role": "user", "content": text}])

    def _from_messages(self, row: int, value: list[Any]) -> _Draft | RowError:
        if self.column == "prompt_token_ids":
            return RowError(ErrorCode.INVALID_TOKEN_IDS, "not every token id is an integer")
        messages = messages_of(value, self.settings.system)
        if isinstance(messages, RowError):
            return messages
        if not self._has_chat_template or self.settings.chat is False:
            return RowError(ErrorCode.CHAT_ERROR, "the prompt is a list of messages, and no chat template is applied")
        return _Draft(row, chat=messages)

    def _from_ids(self, row: int, value: Any) -> _Draft | RowError:
        ends = (min(value), max(value)) if isinstance(value, list) else (value.min(), value.max())
        for number in ends:
            if not 0 <= number < self.settings.vocab_size:
                return self._not_in_vocabulary(number)
        return _Draft(row, tokens=np.asarray(value, np.int32))

    def _with_chats_rendered(self, drafts: list[_Draft], errors: dict[int, RowError]) -> list[_Draft]:
        chats = [draft.chat for draft in drafts if draft.chat is not None]
        if chats and self._chat_template is None:
            self._chat_template = ChatTemplate(self._tokenizer)
        texts = iter(self._chat_template.render(chats) if self._chat_template else ())
        done = []
        for draft in drafts:
            if draft.chat is None:
                done.append(draft)
                continue
            text = next(texts)
            if isinstance(text, str) and not _is_unicode(text):
                text = RowError(ErrorCode.INVALID_UTF8, "a message has half a surrogate pair")
            if isinstance(text, str) and _size(text) > self.max_row_bytes:
                text = row_too_large("the prompt", _size(text), self.max_row_bytes)
            if isinstance(text, RowError):
                errors[draft.row] = text
            else:
                done.append(draft._replace(text=text))
        return done

    def _prompts(self, drafts: list[_Draft], labels: Labels, errors: dict[int, RowError]) -> list[Prompt]:
        drafts = self._respelled(drafts, errors)
        tokens = self._tokens(drafts)
        prompts: dict[int, Prompt] = {}
        tails: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for draft in drafts:
            fitted = self._fit(tokens[draft.row])
            if isinstance(fitted, RowError):
                errors[draft.row] = fitted
                continue
            truncated = len(fitted) < len(tokens[draft.row])
            prompts[draft.row] = Prompt(draft.row, fitted, labels=-1, truncated=truncated)
            end = tail_of(draft.text or self._encoder.decode(fitted[-_TAIL_TOKENS:]))
            tails[draft.marks is not None][draft.row] = end
        found: dict[int, int | LabelError] = {}
        for literal, ends in tails.items():
            if not ends:
                continue
            found |= zip(ends, labels.resolve_all(list(ends.values()), literal=literal), strict=True)
        return _labelled(list(prompts.values()), [found[row] for row in prompts], errors)

    def _respelled(self, drafts: list[_Draft], errors: dict[int, RowError]) -> list[_Draft]:
        """The drafts, where the data has the text of a control token with text that can be encoded literally."""
        controls = self._encoder.controls
        done = []
        for draft in drafts:
            try:
                if draft.marks is not None and controls.literal_backend:
                    draft = draft._replace(text=draft.marks.undo(controls.respell(draft.text)))
                done.append(draft)
            except NotLiteral as error:
                errors[draft.row] = not_literal(error)
        return done

    def _tokens(self, drafts: list[_Draft]) -> dict[int, Int32Array]:
        """The token ids of every row, however many ways of encoding they take."""
        found = {draft.row: draft.tokens for draft in drafts if draft.tokens is not None}
        for special in (True, False):
            for literal in (False, True):
                chosen = [
                    draft
                    for draft in drafts
                    if draft.tokens is None
                    and (draft.chat is None) == special
                    and (draft.marks is not None) == literal
                ]
                ids = self._encoder.encode([draft.text for draft in chosen], special=special, literal=literal)
                found |= zip((draft.row for draft in chosen), ids, strict=True)
        return found

    def _fit(self, tokens: Int32Array) -> Int32Array | RowError:
        if len(tokens) == 0:
            return RowError(ErrorCode.EMPTY_PROMPT, "the tokenizer makes no token of the prompt")
        if self._may_exceed_vocabulary and int(tokens.max()) >= self.settings.vocab_size:
            return self._not_in_vocabulary(tokens.max())
        return fit(tokens, self.settings.max_length, self.settings.on_long, self._encoder.start_ids)

    def _not_in_vocabulary(self, token: int) -> RowError:
        return RowError(ErrorCode.INVALID_TOKEN_IDS, f"id {token} is not in 0..{self.settings.vocab_size - 1}")


def _labelled(
    prompts: Sequence[Prompt], found: Sequence[int | LabelError], errors: dict[int, RowError]
) -> list[Prompt]:
    """The prompts with their label sets; where a label is not one token, an error instead."""
    done = []
    for prompt, index in zip(prompts, found, strict=True):
        if isinstance(index, LabelError):
            errors[prompt.row] = RowError(ErrorCode.LABEL_NOT_ONE_TOKEN, str(index).replace("\n", "; "))
        else:
            prompt.labels = index
            done.append(prompt)
    return done


def _with_compression(prompts: list[Prompt], batch: RowBatch, errors: dict[int, RowError]) -> list[Prompt]:
    """The prompts with what their rows say of compression; where that makes no sense, an error instead."""
    keeps, wishes = batch.columns.get("keep"), batch.columns.get("specprefill")
    place = {row: at for at, row in enumerate(batch.rows.tolist())}
    done = []
    for prompt in prompts:
        at = place[prompt.row]
        keep = None if keeps is None else keeps[at]
        wish = None if wishes is None else wishes[at]
        if isinstance(keep, float) and math.isnan(keep):
            keep = None
        if keep is not None and (type(keep) not in (int, float) or not 0 < keep <= 1):
            errors[prompt.row] = RowError(
                ErrorCode.INVALID_KEEP, f"keep is {keep!r}: it must be a rate above 0 and up to 1"
            )
        elif wish is not None and type(wish) is not bool:
            errors[prompt.row] = RowError(
                ErrorCode.INVALID_KEEP, f"specprefill is {wish!r}: it must be true, false or null"
            )
        else:
            prompt.keep, prompt.specprefill = keep, wish
            done.append(prompt)
    return done


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _size(text: str) -> int:
    """Bytes of a text; half surrogate pairs count too."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _groups(drafts: Iterable[_Draft]) -> Iterator[list[_Draft]]:
    """Drafts that are tokenised together: however much a template writes, a bounded number of bytes at a time."""
    group: list[_Draft] = []
    size = 0
    for draft in drafts:
        group.append(draft)
        size += len(draft.text) if draft.chat is None else sum(len(str(m.get("content"))) for m in draft.chat)
        if size >= _GROUP_CHARS:
            yield group
            group, size = [], 0
    yield group


def _has_chat_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _wants_chat(settings: PromptSettings, tokenizer: Any) -> bool:
    """Whether text becomes a user message."""
    has_template = _has_chat_template(tokenizer)
    if settings.chat and not has_template:
        raise UsageError("--chat: the tokenizer has no chat template\nleave --chat out, or write one with --template")
    chat = has_template if settings.chat is None else settings.chat
    if settings.system is not None and not chat:
        raise UsageError("--system needs a chat: the tokenizer has no chat template, or --no-chat is given")
    return chat


def _require_chat(settings: PromptSettings, tokenizer: Any) -> None:
    if settings.chat is False:
        raise UsageError("--no-chat: the prompt column is 'messages', which only a chat template turns into text")
    if not _has_chat_template(tokenizer):
        raise UsageError(
            "the prompt column is 'messages', but the tokenizer has no chat template\n"
            "use a model that has one, or write the messages as text with --template"
        )


def _refuse_chat(settings: PromptSettings) -> None:
    for option, given in (("--chat", settings.chat), ("--system", settings.system is not None)):
        if given:
            raise UsageError(f"{option}: the prompt column is 'prompt_token_ids', and no chat is made of token ids")


def _prompt_column(settings: PromptSettings, available: Sequence[str]) -> str:
    """The column named, or if none was, the first usual one that the input has."""
    if settings.prompt_column != DEFAULT_COLUMN:
        return settings.prompt_column
    return next((name for name in _FALLBACK_COLUMNS if name in available), DEFAULT_COLUMN)

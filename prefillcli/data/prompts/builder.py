"""From row batches to prompts: template, chat, tokens, length."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from prefillcli.data.prompts.chat import ChatTemplate
from prefillcli.data.prompts.controls import NotLiteral, not_literal
from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import LabelError, Labels, tail_of
from prefillcli.data.prompts.lengths import default_row_bytes, fit, without_padding
from prefillcli.data.prompts.raw_prompts import RawPrompt, RawPromptReader, not_in_vocabulary, text_error
from prefillcli.data.prompts.row_options import COMPRESSION_COLUMNS, with_adapters, with_compression
from prefillcli.data.prompts.settings import (
    PromptSettings,
    has_chat_template,
    prompt_column,
    refuse_chat,
    require_chat,
    wants_chat,
)
from prefillcli.data.prompts.templates import RowTemplate
from prefillcli.data.rows import ErrorCode, Int32Array, Prompt, RowBatch, RowError

_TAIL_TOKENS = 16
GROUP_CHARS = 16 << 20
"""Characters of prompts that are tokenised together."""


class BuilderClosed(Exception):
    """The builder was closed, by another thread, before it had made its prompts."""


class PromptBuilder:
    """Makes prompts of rows.

    `available` are the column names of the input (`Source.available`). Raises UsageError if the settings
    contradict each other or the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: PromptSettings,
        available: Sequence[str] = (),
        *,
        group_chars: int = GROUP_CHARS,
    ) -> None:
        self.settings = settings
        self.chat = wants_chat(settings, tokenizer)
        """Whether text is wrapped by the chat template."""
        self.template = None if settings.template is None else RowTemplate(settings.template)
        self.column = prompt_column(settings, available)
        """The column with the prompt, where there is no template."""
        self.columns: tuple[str, ...] = self.template.columns if self.template else (self.column,)
        """The columns that `build` needs."""
        own = () if settings.adapter_column is None else (settings.adapter_column,)
        self.optional: tuple[str, ...] = (*(COMPRESSION_COLUMNS if settings.compression else ()), *own)
        """Columns that `build` uses where they are there."""
        if self.template is None and self.column == "messages":
            require_chat(settings, tokenizer)
        if self.template is None and self.column == "prompt_token_ids":
            refuse_chat(settings)
        self.render_seconds = 0.0
        self.tokenize_seconds = 0.0
        self._tokenizer = tokenizer
        self._chat_template: ChatTemplate | None = None
        self._encoder = Encoder(tokenizer)
        self._group_chars = group_chars
        self._closed = False
        self.max_row_bytes = settings.max_row_bytes or default_row_bytes(
            settings.max_length, self._encoder.longest_token(), settings.on_long
        )
        """Longer rows, and longer prompts made of them, are errors."""
        self._may_exceed_vocabulary = self._encoder.size > settings.vocab_size
        typed = (self.template and self.template.text, settings.system, getattr(tokenizer, "chat_template", None))
        self._reader = RawPromptReader(
            settings,
            template=self.template,
            columns=self.columns,
            chat=self.chat,
            has_chat_template=has_chat_template(tokenizer),
            controls=self._encoder.controls,
            typed=frozenset("".join(map(str, typed))),
            max_row_bytes=self.max_row_bytes,
            group_chars=group_chars,
        )

    def fingerprint(self) -> str:
        """Digest of everything here that changes a prompt, the text of the template included."""
        settings = self.settings
        parts = [self.column, self.template and self.template.text, self.chat, settings.system]
        text = json.dumps([*parts, settings.max_length, settings.on_long, self.max_row_bytes, settings.literal])
        return hashlib.sha256(text.encode()).hexdigest()

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """The prompts of a batch, ascending by row, and the errors of all its other rows.

        Raises BuilderClosed or RendererClosed once it is closed.
        """
        errors = dict(batch.errors)
        prompts: list[Prompt] = []
        started = time.perf_counter()
        for group in _groups(self._reader.read(batch, errors), self._group_chars):
            self.require_open()
            texts = self._with_chats_rendered(group, errors)
            rendered = time.perf_counter()
            self.render_seconds += rendered - started
            prompts += self._prompts(texts, labels, errors)
            started = time.perf_counter()
            self.tokenize_seconds += started - rendered
        if self.settings.compression:
            prompts = with_compression(prompts, batch, errors)
        if self.settings.adapter_column is not None:
            prompts = with_adapters(prompts, batch, errors, self.settings.adapter_column, self.settings.adapters)
        if self.settings.sections:
            self._remember(prompts, batch)
        return prompts, errors

    def another(self) -> PromptBuilder:
        """One that makes the same prompts, for another thread."""
        text = None if self.template is None else self.template.text  # its file may be another by now
        settings = replace(self.settings, template=text)
        return PromptBuilder(self._tokenizer, settings, (self.column,), group_chars=self._group_chars)

    def close(self) -> None:
        """Stop what is being rendered or tokenised, in whatever thread, for good."""
        self._closed = True
        for renderer in (self.template, self._chat_template):
            if renderer is not None:
                renderer.close()

    def require_open(self) -> None:
        """Raise BuilderClosed after `close`."""
        if self._closed:
            raise BuilderClosed

    def _remember(self, prompts: Sequence[Prompt], batch: RowBatch) -> None:
        """Note in each prompt the values of its row that it was made of."""
        place = {row: at for at, row in enumerate(batch.rows.tolist())}
        names = [name for name in (*self.columns, *self.optional) if name in batch.columns]
        for prompt in prompts:
            prompt.made_of = {name: batch.columns[name][place[prompt.row]] for name in names}

    def _with_chats_rendered(self, raw: list[RawPrompt], errors: dict[int, RowError]) -> list[RawPrompt]:
        chats = [each.chat for each in raw if each.chat is not None]
        if chats and self._chat_template is None:
            self._chat_template = ChatTemplate(self._tokenizer, answers=not self.settings.classifies)
        texts = iter(self._chat_template.render(chats) if self._chat_template else ())
        done = []
        for each in raw:
            if each.chat is None:
                done.append(each)
                continue
            text = next(texts)
            if isinstance(text, str):
                text = text_error(text, "a message", self.max_row_bytes) or text
            if isinstance(text, RowError):
                errors[each.row] = text
            else:
                done.append(each._replace(text=text))
        return done

    def _prompts(self, raw: list[RawPrompt], labels: Labels, errors: dict[int, RowError]) -> list[Prompt]:
        raw = self._respelled(raw, errors)
        tokens = self._tokens(raw)
        prompts: dict[int, Prompt] = {}
        tails: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for each in raw:
            if self.settings.padding is not None:
                tokens[each.row] = without_padding(tokens[each.row], self.settings.padding)
            fitted = self._fit(tokens[each.row])
            if isinstance(fitted, RowError):
                errors[each.row] = fitted
                continue
            truncated = len(fitted) < len(tokens[each.row])
            prompts[each.row] = Prompt(each.row, fitted, labels=-1, truncated=truncated)
            end = tail_of(each.text or self._encoder.decode(fitted[-_TAIL_TOKENS:]))
            tails[each.marks is not None][each.row] = end
        found: dict[int, int | LabelError] = {}
        for literal, ends in tails.items():
            if not ends:
                continue
            found |= zip(ends, labels.resolve_all(list(ends.values()), literal=literal), strict=True)
        return _labelled(list(prompts.values()), [found[row] for row in prompts], errors)

    def _respelled(self, raw: list[RawPrompt], errors: dict[int, RowError]) -> list[RawPrompt]:
        """The same, with text that can be encoded literally where the data has the text of a control token."""
        controls = self._encoder.controls
        done = []
        for each in raw:
            try:
                if each.marks is not None and controls.literal_backend:
                    each = each._replace(text=each.marks.undo(controls.respell(each.text)))
                done.append(each)
            except NotLiteral as error:
                errors[each.row] = not_literal(error)
        return done

    def _tokens(self, raw: list[RawPrompt]) -> dict[int, Int32Array]:
        """The token ids of every row, however many ways of encoding they take."""
        found = {each.row: each.tokens for each in raw if each.tokens is not None}
        for special in (True, False):
            for literal in (False, True):
                chosen = [
                    each
                    for each in raw
                    if each.tokens is None and (each.chat is None) == special and (each.marks is not None) == literal
                ]
                ids = self._encoder.encode([each.text for each in chosen], special=special, literal=literal)
                found |= zip((each.row for each in chosen), ids, strict=True)
        return found

    def _fit(self, tokens: Int32Array) -> Int32Array | RowError:
        if len(tokens) == 0:
            return RowError(ErrorCode.EMPTY_PROMPT, "the tokenizer makes no token of the prompt")
        if self._may_exceed_vocabulary and int(tokens.max()) >= self.settings.vocab_size:
            return not_in_vocabulary(int(tokens.max()), self.settings.vocab_size)
        return fit(tokens, self.settings.max_length, self.settings.on_long, self._encoder.start_ids)


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


def _groups(raw: Iterable[RawPrompt], most: int) -> Iterator[list[RawPrompt]]:
    """What is tokenised together: about `most` characters at a time, however much a template writes."""
    group: list[RawPrompt] = []
    size = 0
    for each in raw:
        group.append(each)
        size += len(each.text) if each.chat is None else sum(len(str(m.get("content"))) for m in each.chat)
        if size >= most:
            yield group
            group, size = [], 0
    yield group

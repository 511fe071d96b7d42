"""Rows become prompts: text by a template, chat messages or a column, and its tokens."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from prefillcli.errors import UsageError, brief, counted
from prefillcli.images.image import FIRST_FEATURE, ImageError, RowImage
from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.encoding import Encoder, Marks, NotLiteral, not_literal, protect
from prefillcli.prompts.fitting import default_row_bytes, fit, fit_pair, without_padding
from prefillcli.prompts.images import PLACE, PlacedTokens
from prefillcli.prompts.labels import Following, LabelError, Labels, tail_of
from prefillcli.prompts.settings import PromptSettings, check_choices, check_column, prompt_column, wants_chat
from prefillcli.prompts.shortening import RowTexts, Shortening
from prefillcli.prompts.templates import (
    ChatTemplate,
    LayoutTemplate,
    Message,
    RowTemplate,
    messages_of,
    named,
    without_escapes,
)
from prefillcli.prompts.thinking import Way
from prefillcli.rows.records import ErrorCode, Prompt, RowBatch, RowError, row_too_large
from prefillcli.rows.values import without_nulls
from prefillcli.runtime import log
from prefillcli.stats.arrays import Int32Array

INSTRUCTIONS = "\0"  # stands in a question for what is asked of the row


# How a JSON text of what a column of this name holds begins. In any other column, text of the data stays text.
_JSON_LISTS = {"messages": re.compile(r"\s*\[\s*\{\s*[\"']"), "prompt_token_ids": re.compile(r"\s*\[")}


_TAIL_TOKENS = 16
_MOST_CUTS = 4  # of a prompt whose new end other labels follow
GROUP_CHARS = 16 << 20  # characters of prompts that are tokenised together
_IMAGE_READERS = 8  # threads: disks and servers let each wait


class BuilderClosed(Exception):
    """Another thread closed the builder before it had made its prompts."""


class PromptBuilder:
    """Makes prompts of rows.

    `available` are the column names of the input (`Source.available`), `template` is that of the settings if it is
    compiled already. `instructions` say what is asked of each row, where the settings' question leaves a place. Chats
    are rendered by the process of the builder `chats_of`, if there is one with the same way to the answer. Raises
    UsageError if the settings contradict each other or the tokenizer.
    """

    def __init__(
        self,
        tokenizer: Any,
        settings: PromptSettings,
        available: Sequence[str] = (),
        *,
        template: RowTemplate | None = None,
        instructions: RowTemplate | None = None,
        group_chars: int = GROUP_CHARS,
        chats_of: PromptBuilder | None = None,
    ) -> None:
        if settings.pair_column is not None and not settings.encoder:
            raise UsageError(
                "--pair-column: the model is no encoder, and reads one text\nwrite both texts into it with --template"
            )
        self.settings = settings
        self._has_chat_template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = wants_chat(settings, self._has_chat_template)  # whether text is wrapped by the chat template
        self.template = template if settings.template is None or template else RowTemplate(settings.template)
        # The column with the prompt, where there is no template.
        self.column = prompt_column(settings.prompt_column, available)
        self._instructions = instructions
        asked = instructions.columns if instructions else ()
        # The columns that prompts are made of, and those of them that only say what is asked.
        own = self.template.columns if self.template else (self.column,)
        self.columns: tuple[str, ...] = tuple(dict.fromkeys((*own, *asked)))
        self._only_asked = frozenset(asked) - {*own}
        # Those, and the ones of pairs, labels and images: what `build` needs of a row.
        self._images = settings.images
        self.image_columns: tuple[str, ...] = () if self._images is None else self._images.columns
        further = (*filter(None, [settings.pair_column]), *settings.label_columns, *self.image_columns)
        self.needed: tuple[str, ...] = tuple(dict.fromkeys((*self.columns, *further)))
        # Columns that `build` uses where they exist.
        self.optional: tuple[str, ...] = tuple(name for each in settings.row_columns for name in each.names)
        if self.template is None:
            check_column(settings, self.column, self._has_chat_template)
        self.render_seconds = 0.0
        self.tokenize_seconds = 0.0
        self._tokenizer = tokenizer
        self._chat_template: ChatTemplate | None = None
        self._laid_out = None if settings.laid_out is None else LayoutTemplate(settings.laid_out.layout.template)
        self._chats_of = chats_of
        self._encoder = Encoder(tokenizer)
        self._group_chars = group_chars
        self._closed = False
        # Longer rows, and longer prompts made of them, are errors.
        self.max_row_bytes = settings.max_row_bytes or default_row_bytes(
            settings.max_length,
            self._encoder.longest_token(),
            "truncate-left" if self.image_columns else settings.on_long,  # a file of an image may be long
        )
        self._may_exceed_vocabulary = self._encoder.last_id() >= settings.vocab_size
        self.told: set[str] = set()  # what was said of prompts and answers; each is said once
        # The characters of templates and system messages, which are no data.
        typed = [self.template and self.template.text, settings.system, getattr(tokenizer, "chat_template", None)]
        typed += [settings.question, settings.question_end, instructions and instructions.text]
        typed += [settings.laid_out and (settings.laid_out.layout.template, settings.laid_out.values)]
        typed += [settings.choices.answer_prefix, settings.choices.options]
        self._typed = frozenset("".join(map(str, typed)))
        self._takes_ids = self.template is None and self.column == "prompt_token_ids"
        check_choices(settings, self._makes_chats)

    @property
    def _is_whole(self) -> bool:
        # Whether a model's own template makes whole prompts, control tokens at their ends included.
        return self._laid_out is not None

    @property
    def _makes_chats(self) -> bool:
        # Whether rows become chats; texts of other columns than `messages` only where `chat` says so.
        return self.chat or (self._has_chat_template and self.template is None and self.column == "messages")

    @property
    def way(self) -> Way | None:
        """Return what brings chats to the answer; None without chats. Raises UsageError as `ChatTemplate` does."""
        return self._chats().way if self._makes_chats else None

    def _chats(self) -> ChatTemplate:
        # The chat template, in a process that is started when it is needed.
        if self._chats_of is not None:
            return self._chats_of._chats()
        if self._chat_template is None:
            settings = self.settings
            self._chat_template = ChatTemplate(
                self._tokenizer, answers=not settings.classifies, choices=settings.choices
            )
        return self._chat_template

    def fingerprint(self) -> str:
        """Digest of everything here that changes a prompt, the text of the template included."""
        settings = self.settings
        template, chat, system, literal, pair, chats, question, end, instructions, *layout = self.words()
        parts = [self.column, template, chat, system, settings.max_length, settings.on_long, self.max_row_bytes]
        parts += [literal, pair, chats, question, end, settings.empty_text, instructions, *layout]
        if self._images is not None and self._images.columns:
            parts += self._images.columns
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def words(self, question: Any = None) -> list[Any]:
        """Return everything that stands around a row's own text in its prompt, for JSON; with a `question` of the row,
        as a prompt has it, that instead of the builder's own."""
        settings, laid_out = self.settings, self.settings.laid_out
        asked = (question or settings.question) if laid_out is None else None
        parts: list[Any] = [self.template and self.template.text, self.chat, settings.system, settings.literal]
        parts += [settings.pair_column, self._chat_identity(), asked, settings.question_end]
        parts += [self._instructions.text if self._instructions else None]
        if laid_out is not None:
            parts += [laid_out.layout.to_json(), question or laid_out.values]
        return parts

    def _chat_identity(self) -> list[Any]:
        # What makes chats other ones than the chat template by itself.
        choices, way = self.settings.choices, self.way or Way()
        own = [choices.thinking == "on", dict(choices.options), choices.answer_prefix]
        return [*own, dict(way.variables), dict(way.closings)]

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """The prompts of a batch, ascending by row, and the errors of all its other rows.

        Raises BuilderClosed or RendererClosed once it is closed.
        """
        errors = dict(batch.errors)
        batch = self.with_images(self._without_json(batch, errors), errors)
        excess: dict[int, int] = {}
        prompts = self._made(batch, labels, errors, excess)
        if excess:
            prompts += self._shortened(batch, labels, errors, excess)
            prompts.sort(key=lambda prompt: prompt.row)
        for each in self.settings.row_columns:
            prompts = each.take(prompts, batch, errors)
        if self.settings.sections:
            self._remember(prompts, batch)
        return prompts, errors

    def with_images(self, batch: RowBatch, errors: dict[int, RowError]) -> RowBatch:
        """The batch with the images of its rows, in the order in which they stand; rows without one that can be read
        are added to `errors`. Chats have places instead of their own."""
        images = self._images
        if images is None or batch.images is not None:
            return batch
        found: dict[int, tuple[RowImage, ...]] = {}
        columns = [batch.columns[name] for name in images.columns]
        chats = self._chats_in(batch)

        def read(at: int) -> tuple[Any, Sequence[RowImage]] | ImageError:
            chat = chats[at]
            try:
                self.require_open()
                own = images.of_columns([column[at] for column in columns])
                return images.in_chat(chat, own) if _is_chat(chat) else (chat, own)
            except ImageError as error:
                return error

        rows = enumerate(batch.rows.tolist())
        places = [at for at, row in rows if row not in errors and (columns or _is_chat(chats[at]))]
        with ThreadPoolExecutor(_IMAGE_READERS, "images of rows") as pool:
            for at, own in zip(places, pool.map(read, places), strict=True):
                row = int(batch.rows[at])
                if isinstance(own, ImageError):
                    errors[row] = RowError(ErrorCode.INVALID_IMAGE, str(own))
                    continue
                chats[at] = own[0]
                if own[1]:
                    found[row] = tuple(own[1])
        return replace(self._with_chats(batch, chats), images=found)

    def _chats_in(self, batch: RowBatch) -> list[Any]:
        # What may be the chat of each row.
        return [None] * len(batch.rows) if self.template is not None else [*batch.columns[self.column]]

    def _with_chats(self, batch: RowBatch, chats: list[Any]) -> RowBatch:
        # The batch with others, in the places of those that `_chats_in` has found.
        return batch if self.template is not None else replace(batch, columns={**batch.columns, self.column: chats})

    def _made(
        self, batch: RowBatch, labels: Labels, errors: dict[int, RowError], excess: dict[int, int]
    ) -> list[Prompt]:
        # The prompts of the rows that are not in `errors`. Rows that have none are added there, or to `excess`, with
        # the tokens by which they are too long, where their texts may be cut.
        prompts: list[Prompt] = []
        started = time.perf_counter()
        for group in _groups(self._read(batch, errors), self._group_chars):
            self.require_open()
            texts = self._with_chats_rendered(self._in_layout(group, errors), errors)
            rendered = time.perf_counter()
            self.render_seconds += rendered - started
            prompts += self._prompts(texts, labels, batch, errors, excess)
            started = time.perf_counter()
            self.tokenize_seconds += started - rendered
        return prompts

    def _shortened(
        self, batch: RowBatch, labels: Labels, errors: dict[int, RowError], excess: Mapping[int, int]
    ) -> Iterator[Prompt]:
        # The prompts of rows that are too long, made of texts that are cut.
        limit, place = self.settings.max_length, {row: at for at, row in enumerate(batch.rows.tolist())}
        values = [self._cuttable(batch, place[row]) for row in excess]
        texts = RowTexts.of_rows(self._encoder, values, self.settings.on_long)
        searches = {
            row: Shortening(own, tokens, limit) for own, (row, tokens) in zip(texts, excess.items(), strict=True)
        }
        failed: dict[int, RowError] = {}
        while waiting := {row: each for row, each in sorted(searches.items()) if each.amount is not None}:
            wrong: dict[int, RowError] = {}
            longer: dict[int, int] = {}
            for prompt in self._made(self._cut(batch, waiting), labels, wrong, longer):
                waiting[prompt.row].fits(prompt, limit - len(prompt.tokens) - prompt.labels.depth)
            for row, tokens in longer.items():
                waiting[row].exceeds(tokens)
            for row, error in wrong.items():
                waiting[row].fails()
                failed[row] = error._replace(detail=f"with its texts cut: {error.detail}")
        for row, search in searches.items():
            if search.prompt is not None:
                search.prompt.truncated = True
                yield search.prompt
            else:
                detail = f"without its texts it still has {search.excess} tokens more than the limit of {limit}"
                errors[row] = failed.get(row, RowError(ErrorCode.PROMPT_TOO_LONG, detail))

    def _cuttable(self, batch: RowBatch, place: int) -> dict[str, Any]:
        # The values of a row whose texts may be cut, by column.
        names = dict.fromkeys([*self.columns, *filter(None, [self.settings.pair_column])])
        unread = {*self._only_asked, *self.image_columns}
        return {name: batch.columns[name][place] for name in names if name not in unread}

    def _cut(self, batch: RowBatch, rows: Mapping[int, Shortening]) -> RowBatch:
        # These rows, ascending, with shorter texts.
        places = np.searchsorted(batch.rows, list(rows)).tolist()
        columns = {name: [values[at] for at in places] for name, values in batch.columns.items()}
        for at, each in enumerate(rows.values()):
            for name, value in self._shorter(each.values(), {name: own[at] for name, own in columns.items()}).items():
                columns[name][at] = value
        return replace(batch, rows=batch.rows[places], columns=columns, errors={})

    def _shorter(self, cut: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
        # A row's values by column, of which those that are `_cuttable` were cut.
        return cut

    def _cuts_texts(self, raw: RawPrompt) -> bool:
        # Whether a prompt that is too long is made again of shorter texts. One without a template is cut itself.
        made = self.template is not None or raw.chat is not None or bool(raw.images)
        made = made or bool(self.settings.question or self._laid_out)
        return made and self.settings.on_long.startswith("truncate")

    def another(self) -> PromptBuilder:
        """One that makes the same prompts, for another thread."""
        text = None if self.template is None else self.template.text  # its file may have been replaced by now
        settings = replace(self.settings, template=text)
        asked = self._instructions and RowTemplate(self._instructions.text, name="instructions")
        return prompt_builder(
            self._tokenizer, settings, (self.column,), instructions=asked, group_chars=self._group_chars
        )

    def of_part(self, part: int, labels: Labels) -> tuple[PromptBuilder, Labels]:
        """Return what makes the prompts of this number of rows with several prompts, and the labels after them."""
        return self, labels

    def close(self) -> None:
        """Stop rendering and tokenising for good, in whatever thread."""
        self._closed = True
        for renderer in (self.template, self._instructions, self._chat_template, self._laid_out):
            if renderer is not None:
                renderer.close()

    def require_open(self) -> None:
        """Raise BuilderClosed after `close`."""
        if self._closed:
            raise BuilderClosed

    def _remember(self, prompts: Sequence[Prompt], batch: RowBatch) -> None:
        # Note in each prompt the values of its row.
        place = {row: at for at, row in enumerate(batch.rows.tolist())}
        unread = {*self.image_columns} - {*self.columns}
        names = [name for name in (*self.needed, *self.optional) if name in batch.columns and name not in unread]
        for prompt in prompts:
            prompt.made_of = {name: batch.columns[name][place[prompt.row]] for name in names}

    def _read(self, batch: RowBatch, errors: dict[int, RowError]) -> Iterator[RawPrompt]:
        # The raw prompts of the rows that are not in `errors`; rows that have none are added there.
        images = batch.images or {}
        for row, value, marks in self._values(batch, errors):
            raw = value if isinstance(value, RowError) else self._raw(row, value, images.get(row, ()))
            if isinstance(raw, RowError):
                errors[row] = raw
            else:
                yield raw._replace(marks=marks)

    def _without_json(self, batch: RowBatch, errors: dict[int, RowError]) -> RowBatch:
        # The batch with lists instead of JSON texts in a column that holds lists by its name.
        looks = None if self.template else _JSON_LISTS.get(self.column)
        if looks is None or self.column not in batch.columns:
            return batch
        values = list(batch.columns[self.column])
        for at, value in enumerate(values):
            if isinstance(value, str) and looks.match(value):
                try:
                    values[at] = without_nulls(json.loads(value, parse_constant=lambda _: None))
                except (ValueError, RecursionError) as error:
                    why = f"the text begins like a JSON list, but is none: {brief(error)}"
                    errors.setdefault(int(batch.rows[at]), RowError(ErrorCode.INVALID_JSON, why))
        return replace(batch, columns={**batch.columns, self.column: values})

    def _values(
        self, batch: RowBatch, errors: dict[int, RowError]
    ) -> Iterator[tuple[int, str | RowError | Any, Marks | None]]:
        # The rows without an error, each with the text of the template or the value of the prompt's column, and with
        # the question behind it where that is rendered too.
        columns = [self._said_in(batch, name) for name in self.columns]
        places = [(at, row) for at, row in enumerate(batch.rows.tolist()) if row not in errors]
        if self.template is None and self._instructions is None:
            for at, row in places:
                value = without_escapes(columns[0][at])
                yield row, *self._literal(value, joined=self.chat or self.column == "messages")
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
        done, pictured = 0, {at for at, row in enumerate(rows) if (batch.images or {}).get(row)}
        while done < len(values):
            texts = self._rendered(values[done:], {at - done for at in pictured})
            end = done + len(texts)
            yield from zip(rows[done:end], texts, marked[done:end], strict=True)
            done = end

    def _said_in(self, batch: RowBatch, name: str) -> Sequence[Any]:
        # The values of a column in texts: those of images say nothing where they are all that a prompt is about.
        alone = self.template is None and name == self.column and name in self.image_columns
        return [""] * len(batch.rows) if alone else batch.columns[name]

    def _rendered(self, rows: Sequence[Mapping[str, Any]], pictured: Collection[int]) -> Sequence[Any]:
        # The texts of the first of these rows, or what their column holds, or why there are none. Those in `pictured`
        # have images.
        texts: Sequence[Any] = [row[self.column] for row in rows] if self.template is None else ()
        if self.template is not None:
            texts = self.template.render(rows, self._group_chars)
        if self._instructions is None:
            return texts
        asked = self._instructions.render(rows[: len(texts)])
        return [
            self._with_instructions(text or "" if at in pictured else text, own, at in pictured)
            for at, (text, own) in enumerate(zip(texts, asked, strict=True))
        ]

    def _with_instructions(self, text: Any, asked: str | RowError, pictured: bool) -> Any:
        if not isinstance(text, str) or not (text.strip() or pictured):
            return text  # of which an error says so
        if isinstance(asked, RowError):
            return asked
        text += self.settings.question.replace(INSTRUCTIONS, asked)
        return text.lstrip() if pictured else text

    def _literal(self, value: Any, *, joined: bool) -> tuple[Any, Marks | None]:
        # Values of a row in which the tokenizer finds no control token, and the replacements made for that.
        is_ids = self.template is None and isinstance(value, list) and value and not isinstance(value[0], dict)
        if not self.settings.literal or is_ids:
            return value, None
        if self._laid_out is not None and self.settings.laid_out is not None:
            value = self.settings.laid_out.layout.escaped(value)
        try:
            return protect(self._encoder.controls, value, self._typed, joined=joined)
        except NotLiteral as error:
            return not_literal(error), None
        except RecursionError:
            code = ErrorCode.TEMPLATE_ERROR if self.template else ErrorCode.CHAT_ERROR
            return RowError(code, "RecursionError: a value is nested too deeply"), None

    def _raw(self, row: int, value: Any, images: tuple[RowImage, ...]) -> RawPrompt | RowError:
        if (self.settings.question or self._is_whole) and not isinstance(value, str | None):
            return RowError(ErrorCode.WRONG_TYPE, f"the document is {type(value).__name__}, not text")
        if isinstance(value, str) and self._takes_ids:
            return RowError(ErrorCode.INVALID_TOKEN_IDS, "a text, not a list of token ids")
        if isinstance(value, str) or (value is None and self._asks_of(images)):
            return self._from_text(row, value or "", images)
        if value is None:
            return self.no_text(ErrorCode.NULL_PROMPT, "the prompt is null")
        if isinstance(value, dict):
            return RowError(ErrorCode.WRONG_TYPE, f"the prompt is an object ({named(value)}), not text or messages")
        if not isinstance(value, list | np.ndarray):
            return RowError(ErrorCode.WRONG_TYPE, f"the prompt is {type(value).__name__}, not text")
        if len(value) == 0:
            ids = isinstance(value, np.ndarray) or self._takes_ids
            if ids:
                return RowError(ErrorCode.INVALID_TOKEN_IDS, "the list is empty")
            return self.no_text(ErrorCode.EMPTY_PROMPT, "the list is empty")
        if isinstance(value, np.ndarray) or set(map(type, value)) == {int}:
            if images:
                return RowError(ErrorCode.WRONG_TYPE, "the prompt is token ids, among which no image has a place")
            return self._from_ids(row, value)
        return self._from_messages(row, value, images)

    def _asks_of(self, images: tuple[RowImage, ...]) -> bool:
        # Whether a row of these images needs no text, because what is asked stands behind it.
        return bool(images) and bool(self.settings.question)

    def no_text(self, code: ErrorCode, detail: str) -> RowError:
        """Return the reason why a row without text has no score: its `code` is only for rows that count as errors."""
        return RowError(ErrorCode.SKIPPED_EMPTY if self.settings.empty_text == "skip" else code, detail)

    def _from_text(self, row: int, text: str, images: tuple[RowImage, ...]) -> RawPrompt | RowError:
        if (not text or text.isspace()) and not self._asks_of(images):
            what = "white space only" if text else "empty"
            return self.no_text(ErrorCode.EMPTY_PROMPT, f"the prompt is {what}")
        wrong = text_error(text, "the prompt", self.max_row_bytes)
        if wrong is not None:
            return wrong
        said = "" if self._instructions else self.settings.question
        text = text + said if text.strip() or not images else said.lstrip()
        if not self.chat:
            places = "" if self._images is None else self._images.places.written * len(images)
            return RawPrompt(row, places + text + self.settings.question_end, images=images)
        parts = [*([PLACE] * len(images)), {"type": "text", "text": text}] if images else text
        return self._from_messages(row, [{"role": "user", "content": parts}], images)

    def _from_messages(self, row: int, value: list[Any], images: tuple[RowImage, ...]) -> RawPrompt | RowError:
        if self._takes_ids:
            return RowError(ErrorCode.INVALID_TOKEN_IDS, "not every token id is an integer")
        messages = messages_of(value, self.settings.system, places=bool(images))
        if isinstance(messages, RowError):
            return messages
        if not self._has_chat_template or self.settings.chat is False:
            return RowError(ErrorCode.CHAT_ERROR, "the prompt is a list of messages, and no chat template is applied")
        return RawPrompt(row, chat=messages, images=images)

    def _from_ids(self, row: int, value: Any) -> RawPrompt | RowError:
        ends = (min(value), max(value)) if isinstance(value, list) else (value.min(), value.max())
        for number in ends:
            if not 0 <= number < self.settings.vocab_size:
                return not_in_vocabulary(number, self.settings.vocab_size)
        return RawPrompt(row, tokens=np.asarray(value, np.int32))

    def _in_layout(self, raw: list[RawPrompt], errors: dict[int, RowError]) -> list[RawPrompt]:
        # The prompts of documents, in the layout of the model where it has one.
        if self._laid_out is None or self.settings.laid_out is None:
            return raw
        able = []
        for each in raw:
            try:
                self.settings.laid_out.layout.require_uncut(each.text)
                able.append(each)
            except NotLiteral as error:
                errors[each.row] = not_literal(error)
        texts = self._laid_out.render([{**self.settings.laid_out.values, "state": each.text} for each in able])
        errors.update((each.row, text) for each, text in zip(able, texts, strict=True) if isinstance(text, RowError))
        return [
            each._replace(text=text) for each, text in zip(able, texts, strict=True) if not isinstance(text, RowError)
        ]

    def _with_chats_rendered(self, raw: list[RawPrompt], errors: dict[int, RowError]) -> list[RawPrompt]:
        chats = [each.chat for each in raw if each.chat is not None]
        texts = iter(self._chats().texts(chats) if chats else ())
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

    def _prompts(
        self,
        raw: list[RawPrompt],
        labels: Labels,
        batch: RowBatch,
        errors: dict[int, RowError],
        excess: dict[int, int],
    ) -> list[Prompt]:
        raw = self._respelled(self._with_space(raw), errors)
        tokens = self._tokens(raw)
        placed = self._with_features(raw, tokens, errors)
        raw = [each for each in raw if each.row not in errors]
        fitted: dict[int, Int32Array] = {}
        ends: dict[bool, dict[int, str]] = {False: {}, True: {}}
        for each in raw:
            if self.settings.padding is not None:
                tokens[each.row] = without_padding(tokens[each.row], self.settings.padding)
            pictures = placed.get(each.row)
            of_images = 0 if pictures is None else pictures.of_images
            own = self._fit(tokens[each.row], cut=not self._cuts_texts(each), of_images=of_images)
            if isinstance(own, RowError):
                errors[each.row] = own
            else:
                fitted[each.row] = own
                ends[each.marks is not None][each.row] = self._end(each, tokens[each.row], own)
        found: dict[int, Following | LabelError] = {}
        for literal, texts in ends.items():
            found |= zip(texts, self._resolved(batch, labels, texts, literal=literal), strict=True)
        done = []
        for each in raw:
            if each.row not in fitted:
                continue
            made = self._followed(each, tokens[each.row], fitted[each.row], found[each.row], batch, labels)
            if isinstance(made, Prompt):
                if (pictures := placed.get(each.row)) is not None:
                    made.images = pictures.images
                    if pictures.positions is not None:
                        made.positions = pictures.positions[: len(made.tokens)]
                done.append(made)
            elif isinstance(made, RowError):
                errors[each.row] = made
            else:
                excess[each.row] = made
        return done

    def _too_long(self, tokens: int, of_images: int) -> RowError:
        # The error of a prompt with images, which have this many of its tokens.
        code = ErrorCode.SKIPPED_TOO_LONG if self.settings.on_long == "skip" else ErrorCode.PROMPT_TOO_LONG
        detail = f"{counted(tokens, 'token')}, {of_images} of them of images; the limit is {self.settings.max_length}"
        return RowError(code, detail)

    def _with_space(self, raw: list[RawPrompt]) -> list[RawPrompt]:
        # The texts with what stands around images. Stand-ins are still in the data: only templates have placeholders.
        if self._images is None:
            return raw
        spaced = self._images.places.spaced
        return [each._replace(text=spaced(each.text)) if each.images else each for each in raw]

    def _with_features(
        self, raw: list[RawPrompt], tokens: dict[int, Int32Array], errors: dict[int, RowError]
    ) -> dict[int, PlacedTokens]:
        # The images of rows that have some, in their `tokens`, which become others. Rows without a place for each are
        # added to `errors`. Where images come from columns, a row without one must have no place either.
        found: dict[int, PlacedTokens] = {}
        if self._images is None:
            return found
        for each in raw:
            if each.images or self._images.columns:
                placed = self._images.places.put(tokens[each.row], each.images)
                if isinstance(placed, RowError):
                    errors[each.row] = placed
                elif each.images:
                    found[each.row], tokens[each.row] = placed, placed.tokens
        return found

    def _resolved(
        self, batch: RowBatch, labels: Labels, ends: Mapping[int, str], *, literal: bool
    ) -> list[Following | LabelError]:
        # What follows the ends of these rows' prompts.
        if not ends:
            return []
        places = np.searchsorted(batch.rows, list(ends)) if labels.columns else ()
        values = [[batch.columns[name][place] for name in labels.columns] for place in places]
        return labels.resolve_all(list(ends.values()), literal=literal, values=values)

    def _end(self, raw: RawPrompt, whole: Int32Array, tokens: Int32Array) -> str:
        # The tail of the prompt that is read, which may be a part of the whole.
        lost = len(tokens) < len(whole) and (
            self.settings.on_long == "truncate-right" or len(tokens) < _TAIL_TOKENS
        )  # else the end stays
        if raw.text and not lost:
            return tail_of(raw.text)
        return tail_of(self._encoder.decode(tokens[-_TAIL_TOKENS:], literal=raw.marks is not None))

    def _followed(
        self,
        raw: RawPrompt,
        whole: Int32Array,
        tokens: Int32Array,
        following: Following | LabelError,
        batch: RowBatch,
        labels: Labels,
    ) -> Prompt | RowError | int:
        # The prompt with what follows it, or the number of tokens by which it is too long where its texts are cut.
        limit = self.settings.max_length
        for _ in range(_MOST_CUTS):
            try:
                following = self._fitting(tokens, following, labels)
                own, found = self._at_markers(tokens[: len(tokens) - len(following.moved)], following.labels)
            except LabelError as error:
                return RowError(error.code, str(error).replace("\n", "; "))
            moved, behind = len(following.moved), following.labels.depth
            if behind >= limit:
                detail = f"{behind} tokens of labels or a target after it, the limit is {limit}"
                return RowError(ErrorCode.PROMPT_TOO_LONG, detail)
            size = len(tokens) - moved + behind
            if size <= limit:
                self._tell(following)
                return Prompt(raw.row, own, labels=found, truncated=len(tokens) < len(whole))
            if self._cuts_texts(raw):
                return size - limit
            fitted = self._fit(whole, behind - moved)
            if isinstance(fitted, RowError):
                return fitted
            tokens, end = fitted, {raw.row: self._end(raw, whole, fitted)}
            (following,) = self._resolved(batch, labels, end, literal=raw.marks is not None)
        return RowError(ErrorCode.PROMPT_TOO_LONG, f"wherever it is cut, its labels make it longer than {limit}")

    def _at_markers(self, tokens: Int32Array, labels: LabelSet) -> tuple[Int32Array, LabelSet]:
        # The part of a prompt before the tokens among which the model's layout reads its labels, and these labels.
        laid_out = self.settings.laid_out
        return (tokens, labels) if laid_out is None else laid_out.layout.read_at_markers(tokens, labels)

    def _fitting(self, tokens: Int32Array, following: Following | LabelError, labels: Labels) -> Following:
        # What can follow a prompt of these tokens. Raises LabelError.
        if isinstance(following, LabelError):
            raise following
        moved = list(following.moved)
        if moved and (len(tokens) <= len(moved) or tokens[-len(moved) :].tolist() != moved):
            raise LabelError("the white space at the prompt's end is not tokenised as its text alone", labels.fault)
        if self._may_exceed_vocabulary:
            for name, own in zip(following.labels.texts or labels.read, following.labels.spellings, strict=False):
                most = max(int(each.max()) for each in own)
                if most >= self.settings.vocab_size:
                    (token,) = self._encoder.tokens([most])
                    why = _not_embedded(most, self.settings.vocab_size)
                    raise LabelError(f"{name!r} has the token {token!r}, which the model lacks: {why}", labels.fault)
        return following

    def _tell(self, following: Following) -> None:
        # Say once where answers begin before their own letters.
        if following.moved and "moved" not in self.told:
            self.told.add("moved")
            log.info("prompts end in white space, which is read as the beginning of each answer")
        if following.merged and "merged" not in self.told:
            self.told.add("merged")
            end = following.merged[-20:]
            log.warning(
                f"the tokenizer joins the end of a prompt, {end!r}, with the beginning of an answer: its probability "
                "means little then\nend the prompt after a word, and begin the answer with a space"
            )

    def _respelled(self, raw: list[RawPrompt], errors: dict[int, RowError]) -> list[RawPrompt]:
        # The same, with text that can be encoded literally where the data has the text of a control token.
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
        # The token ids of every row, by however many ways of encoding.
        found = {each.row: each.tokens for each in raw if each.tokens is not None}
        for special in (True, False):
            for literal in (False, True):
                chosen = [
                    each
                    for each in raw
                    if each.tokens is None
                    and (each.chat is None and not self._is_whole) == special
                    and (each.marks is not None) == literal
                ]
                ids = self._cut_up([each.text for each in chosen], special=special, literal=literal)
                found |= zip((each.row for each in chosen), ids, strict=True)
        return found

    def _cut_up(self, texts: Sequence[str], *, special: bool, literal: bool) -> list[Int32Array]:
        # The tokens of texts, of which a layout may cut some into parts.
        cut = "" if self.settings.laid_out is None else self.settings.laid_out.layout.cut
        if not cut:
            return self._encoder.encode(texts, special=special, literal=literal)
        parts = [text.split(cut) for text in texts]
        every = [part for own in parts for part in own]
        coded = iter(self._encoder.encode(every, special=False, literal=literal))
        return [np.concatenate([next(coded) for _ in own]) for own in parts]

    def _fit(
        self, tokens: Int32Array, behind: int = 0, *, cut: bool = True, of_images: int = 0
    ) -> Int32Array | RowError:
        # The tokens of a prompt that has this many more `behind` it; all of them unless it may be `cut`.
        if len(tokens) == 0:
            return RowError(ErrorCode.EMPTY_PROMPT, "the tokenizer makes no token of the prompt")
        if self._may_exceed_vocabulary:
            most = int(tokens[tokens < FIRST_FEATURE].max(initial=0))
            if most >= self.settings.vocab_size:
                return not_in_vocabulary(most, self.settings.vocab_size)
        limit = self.settings.max_length
        if of_images and len(tokens) > limit and (of_images >= limit or not self.settings.on_long.startswith("trunc")):
            return self._too_long(len(tokens), of_images)
        if not cut:
            return tokens
        return fit(tokens, self.settings.max_length - behind, self.settings.on_long, self._encoder.start_ids)


class EncoderBuilder(PromptBuilder):
    """Makes prompts of rows for an encoder: texts or pairs of texts, with all special tokens around them.

    Where the tokenizer tells the texts of a pair apart (token_type_ids), a token of the second kind has its id and the
    size of the vocabulary as its number in a prompt.
    """

    def __init__(self, tokenizer: Any, settings: PromptSettings, available: Sequence[str] = (), **given: Any) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise UsageError("the model is an encoder, and its tokenizer has no tokenizer.json\nconvert it")
        super().__init__(tokenizer, settings, available, **given)
        if self.chat or (self.template is None and self.column == "messages"):
            raise UsageError("the model is an encoder, which reads a text or a pair of texts, and no chat")
        if settings.pair_column is not None and self._takes_ids:
            raise UsageError(
                "--pair-column: the prompt column is 'prompt_token_ids', and no pair is made of token ids"
            )
        self._types = "token_type_ids" in tokenizer.model_input_names

    def _prompts(
        self,
        raw: list[RawPrompt],
        labels: Labels,
        batch: RowBatch,
        errors: dict[int, RowError],
        excess: dict[int, int],
    ) -> list[Prompt]:
        done = []
        cuts = {each.row for each in raw if self._cuts_texts(each)}
        for row, tokens, whole in self._encoded(raw, batch, errors):
            (following,) = labels.resolve_all([""])
            if isinstance(following, LabelError):
                raise following
            if row in cuts and whole > self.settings.max_length:
                excess[row] = whole - self.settings.max_length
            elif isinstance(tokens, RowError):
                errors[row] = tokens
            else:
                done.append(Prompt(row, tokens, labels=following.labels, truncated=len(tokens) < whole))
        return sorted(done, key=lambda prompt: prompt.row)

    def _encoded(
        self, raw: list[RawPrompt], batch: RowBatch, errors: dict[int, RowError]
    ) -> Iterator[tuple[int, Int32Array | RowError, int]]:
        # Each row with its tokens, and the number of tokens before it was cut.
        size, on_long, most = self.settings.vocab_size, self.settings.on_long, self.settings.max_length
        texts: dict[bool, dict[int, tuple[str, ...]]] = {False: {}, True: {}}
        for each in raw:
            if each.tokens is not None:
                yield each.row, fit(each.tokens, most, on_long, frozenset()), len(each.tokens)
                continue
            parts = self._parts(each, batch)
            if isinstance(parts, RowError):
                errors[each.row] = parts
                continue
            try:
                literal = any(marks is not None for _, marks in parts)
                texts[literal][each.row] = tuple(
                    self._spelt(text, marks) if literal else text for text, marks in parts
                )
            except NotLiteral as error:
                errors[each.row] = not_literal(error)
        for literal, own in texts.items():
            for row, coded in zip(own, self._encoder.encode_pairs(list(own.values()), literal=literal), strict=True):
                if int(coded.ids.max()) >= size:
                    errors[row] = not_in_vocabulary(int(coded.ids.max()), size)
                    continue
                tokens = coded.ids + size * coded.types if self._types else coded.ids
                kept = fit_pair(coded, most, on_long)
                yield row, kept if isinstance(kept, RowError) else tokens[kept], len(tokens)

    def _parts(self, raw: RawPrompt, batch: RowBatch) -> RowError | list[tuple[str, Marks | None]]:
        # The text or the pair of a row, each with the stand-ins in it.
        first = (raw.text, raw.marks)
        name = self.settings.pair_column
        if name is None:
            return [first]
        value = batch.columns[name][int(np.searchsorted(batch.rows, raw.row))]
        value, marks = self._literal(value, joined=False)
        if isinstance(value, RowError):
            return value
        if value is None:
            return self.no_text(ErrorCode.NULL_PROMPT, "the second text is null")
        if not isinstance(value, str):
            return RowError(ErrorCode.WRONG_TYPE, f"the second text is {type(value).__name__}, not text")
        if not value or value.isspace():
            return self.no_text(ErrorCode.EMPTY_PROMPT, "the second text is empty")
        return text_error(value, "the second text", self.max_row_bytes) or [first, (value, marks)]

    def _spelt(self, text: str, marks: Marks | None) -> str:
        # As the literal tokenizer reads it.
        controls = self._encoder.controls
        if controls.literal_backend:
            text = controls.respell(text)
        return text if marks is None else marks.undo(text)


def prompt_builder(
    tokenizer: Any,
    settings: PromptSettings,
    available: Sequence[str] = (),
    *,
    template: RowTemplate | None = None,
    instructions: RowTemplate | None = None,
    group_chars: int = GROUP_CHARS,
) -> PromptBuilder:
    """Return what makes prompts of rows for a model. The arguments, and what it raises, as of `PromptBuilder`."""
    kind = EncoderBuilder if settings.encoder else PromptBuilder
    return kind(tokenizer, settings, available, template=template, instructions=instructions, group_chars=group_chars)


def _groups(raw: Iterable[RawPrompt], most: int) -> Iterator[list[RawPrompt]]:
    # Texts that are tokenised together: about `most` characters at a time, however much a template writes.
    group: list[RawPrompt] = []
    size = 0
    for each in raw:
        group.append(each)
        size += len(each.text) if each.chat is None else sum(len(str(m.get("content"))) for m in each.chat)
        if size >= most:
            yield group
            group, size = [], 0
    yield group


class RawPrompt(NamedTuple):
    """The prompt of a row before it is tokenised: a text, a chat that becomes a text, or token ids."""

    row: int
    text: str = ""
    chat: list[Message] | None = None
    tokens: Int32Array | None = None
    # The stand-ins for characters of the text; None if the data has no text of a control token.
    marks: Marks | None = None
    images: tuple[RowImage, ...] = ()  # that stand in it, in their order


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def not_in_vocabulary(token: int, vocab_size: int) -> RowError:
    """The error of a row with a token id that the model does not have."""
    return RowError(ErrorCode.INVALID_TOKEN_IDS, _not_embedded(token, vocab_size))


def _not_embedded(token: int, vocab_size: int) -> str:
    return f"id {token} is not in 0..{vocab_size - 1}"


def text_error(text: str, what: str, max_bytes: int) -> RowError | None:
    """Return why a text, of which `what` is a part or the whole, cannot be a prompt; None if it can."""
    if text.isascii():
        size = len(text)
    else:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            return RowError(ErrorCode.INVALID_UTF8, f"{what} has half a surrogate pair")
    return row_too_large("the prompt", size, max_bytes) if size > max_bytes else None

"""Targets: the tokens of a row's text after its prompt, and the windows of whole documents."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from prefillcli.core.asking import Asking
from prefillcli.errors import UsageError
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.builder import PromptBuilder, not_in_vocabulary, text_error
from prefillcli.prompts.encoding import Encoder, NotLiteral, not_literal
from prefillcli.prompts.labels import (
    Behind,
    Following,
    LabelError,
    Labels,
    PromptEnd,
    literal_end,
    prompt_ends,
    tokens_behind,
)
from prefillcli.prompts.questions import Label, Likelihood
from prefillcli.prompts.settings import PromptSettings, prompt_column
from prefillcli.prompts.templates import RowTemplate
from prefillcli.rows.input.selection import DEFAULT_COLUMN, require_columns
from prefillcli.rows.output.columns import added
from prefillcli.rows.records import MAX_ROW_BYTES, ErrorCode, Prompt, RowBatch, RowError
from prefillcli.stats.arrays import Int32Array
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.models.open import Opened

_TOGETHER = 512  # texts that are tokenised at a time
_NO_PROMPT = (ErrorCode.NULL_PROMPT, ErrorCode.EMPTY_PROMPT, ErrorCode.SKIPPED_EMPTY)


def has_prompts(settings: JobSettings, available: Sequence[str]) -> bool:
    """Return whether rows with these columns have prompts in front of their targets."""
    if settings.prompts.template is not None or settings.prompts.prompt_column != DEFAULT_COLUMN:
        return True
    column = prompt_column(settings.prompts.prompt_column, available)
    return column in available and column != settings.likelihood.target_column


class TargetAsking(Asking):
    """The likelihood of a text of each row, after its prompt or as a whole document."""

    def __init__(self, settings: JobSettings, column: str) -> None:
        super().__init__(settings)
        self.column = column
        self.groups |= added({"token_logprobs": settings.likelihood.token_logprobs})

    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        require_columns([self.column], available, "the input")
        if not has_prompts(self.settings, available):
            return (self.column,)
        return template.columns if template else (prompt_column(self.settings.prompts.prompt_column, available),)

    def labels(self, opened: Opened) -> Labels:
        if opened.files.head is not None:
            raise UsageError(
                "--target-column: the model's classification head is read, which has no tokens\n"
                "read the next token with --head vocabulary"
            )
        return Targets(opened.tokenizer, self.column, literal=self.settings.prompts.literal)

    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        if template is not None:
            template.close()
        return TargetBuilder(
            opened.tokenizer,
            settings,
            available,
            stride=self.settings.likelihood.stride,
            prompts=has_prompts(self.settings, available),
        )


Item = TypeVar("Item")


def _groups(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    # Those whose texts are tokenised together.
    return (items[at : at + _TOGETHER] for at in range(0, len(items), _TOGETHER))


class TargetPart(NamedTuple):
    """A text to tokenise; `literal`: it is as `Controls.respell` writes it."""

    text: str
    literal: bool


class Targets(Labels):
    """The one label of each prompt: the text of its row's `column`. With `literal` no part of it becomes a control
    token."""

    measure = Measure.LIKELIHOOD
    fault = ErrorCode.INVALID_TARGET

    def __init__(self, tokenizer: Any, column: str, *, literal: bool) -> None:
        self.question = Likelihood(answers=(Label("target"),))
        self.columns = (column,)
        self._encoder = Encoder(tokenizer)
        self._literal = literal

    def resolve_all(
        self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
    ) -> list[Following | LabelError]:
        """Return, for every tail, the tokens of its row's text, by the rule of all answers (`tokens_behind`)."""
        found: list[Following | LabelError] = [LabelError("")] * len(tails)
        asked: list[tuple[int, tuple[str, bool], str]] = []
        for at, (tail, (value,)) in enumerate(zip(tails, values, strict=True)):
            wrong = self.error(value)
            if wrong is None:
                try:
                    texts = [value] if self._literal else []
                    asked.append((at, literal_end(self._encoder.controls, tail, texts, literal=literal), value))
                    continue
                except NotLiteral as error:
                    wrong = not_literal(error)
            found[at] = LabelError(wrong.detail, wrong.code)
        for group in _groups(asked):
            ends = prompt_ends(self._encoder, [end for _, end, _ in group])
            pairs = [(end, [target]) for end, (_, _, target) in zip(ends, group, strict=True)]
            for (at, _, target), end, (own,) in zip(group, ends, tokens_behind(self._encoder, pairs), strict=True):
                found[at] = _following(end, own, target)
        return found

    def needs_literal(self, target: str) -> bool:
        """Return whether the tokenizer might find a control token in a target of the data."""
        return self._literal and self._encoder.controls.may_be_in(target, joined=False)

    def encode(self, parts: Sequence[TargetPart]) -> list[Int32Array | RowError]:
        """Return the tokens of texts, without the special ones that begin every text."""
        found: list[Int32Array | RowError] = [RowError(ErrorCode.INVALID_TARGET, "")] * len(parts)
        for literal in (False, True):
            places = [at for at, part in enumerate(parts) if part.literal == literal]
            try:
                ids = self._encoder.encode([parts[at].text for at in places], special=False, literal=literal)
            except NotLiteral as error:
                for at in places:
                    found[at] = not_literal(error)
            else:
                for at, own in zip(places, ids, strict=True):
                    found[at] = own
        return found

    def error(self, value: Any) -> RowError | None:
        """Return why a value is not a target."""
        if not isinstance(value, str):
            what = "null" if value is None else f"{type(value).__name__}, not text"
            return RowError(ErrorCode.INVALID_TARGET, f"the target is {what}")
        if not value:
            return RowError(ErrorCode.INVALID_TARGET, "the target is empty")
        return text_error(value, "the target", MAX_ROW_BYTES)


def _following(end: PromptEnd, own: Behind, target: str) -> Following | LabelError:
    if not own.tokens:
        return LabelError("the target has no tokens of its own after the prompt", ErrorCode.INVALID_TARGET)
    tokens = np.array(own.tokens, np.int32)
    return Following(target_set(tokens, target), end.moved, end.text if own.merged else "")


def target_set(tokens: Int32Array, text: str) -> LabelSet:
    """Return the label set of a text with these tokens. Sets of targets are not stored: hardly two are equal.

    Words are counted as lm-evaluation-harness does it (`count_words`), empty ones at the text's ends included.
    """
    words = len(re.split(r"\s+", text)) if text else 0
    sequence = np.ascontiguousarray(tokens)
    return LabelSet(((sequence,),), by_token=True, text_bytes=len(text.encode()), text_words=words)


def rolling_windows(
    tokens: Int32Array, start: int, most: int, stride: int | None = None
) -> Iterator[tuple[Int32Array, Int32Array]]:
    """Yield the windows of a document: the tokens before those that are predicted, and these, disjoint.

    The rule of lm-evaluation-harness (`get_rolling_token_windows` and `make_disjoint_window`): a window computes at
    most `most` tokens. The first one begins with the token `start` and predicts all of its tokens. Later ones predict
    `stride` tokens each (`most` - context_len + 1 there), after as many earlier ones as there is room for.
    """
    first = tokens[:most]
    yield np.array([start], np.int32), first
    done = len(first)
    while done < len(tokens):
        end = min(done + (stride or most), len(tokens))
        yield tokens[end - most - 1 : done], tokens[done:end]
        done = end


class TargetBuilder(PromptBuilder):
    """Makes prompts of rows with targets. A row with an empty prompt, and each row without `prompts`, has a whole
    document, of which each window is a prompt."""

    def __init__(
        self, tokenizer: Any, settings: PromptSettings, available: Sequence[str], *, stride: int | None, prompts: bool
    ) -> None:
        if stride is not None and stride > settings.max_length:
            raise UsageError(f"--set stride={stride}: a window holds {settings.max_length} tokens\ngive fewer")
        super().__init__(tokenizer, settings, available)
        self._prompts_too = prompts
        self._stride = stride
        start = tokenizer.bos_token_id
        self._start: int | None = tokenizer.eos_token_id if start is None else start
        if not prompts:
            self.columns = self.needed = settings.label_columns
            self.column = ""

    def build(self, batch: RowBatch, labels: Labels) -> tuple[list[Prompt], dict[int, RowError]]:
        """Build as every builder does; the prompts of a row are in their order."""
        if self._prompts_too:
            prompts, errors = super().build(batch, labels)
        else:
            prompts, errors = [], dict(batch.errors)
        rows = batch.rows.tolist()
        whole = [
            (at, row)
            for at, row in enumerate(rows)
            if row not in batch.errors
            and (not self._prompts_too or (row in errors and errors[row].code in _NO_PROMPT))
        ]
        if whole and isinstance(labels, Targets):
            documents = self._documents(whole, batch, labels, errors)
            for each in self.settings.row_columns:
                documents = each.take(documents, batch, errors)
            prompts = sorted([*prompts, *documents], key=lambda prompt: (prompt.row, prompt.part))
        return prompts, errors

    def _documents(
        self, places: Sequence[tuple[int, int]], batch: RowBatch, labels: Targets, errors: dict[int, RowError]
    ) -> list[Prompt]:
        # The prompts of rows that bring none.
        found: list[Prompt] = []
        values = [(row, batch.columns[labels.columns[0]][at]) for at, row in places]
        for group in _groups(values):
            self.require_open()
            errors |= {row: wrong for row, value in group if (wrong := labels.error(value))}
            texts = [(row, value) for row, value in group if labels.error(value) is None]
            parts = [TargetPart(text, labels.needs_literal(text)) for _, text in texts]
            for (row, text), tokens in zip(texts, labels.encode(parts), strict=True):
                wrong = tokens if isinstance(tokens, RowError) else self._wrong(tokens)
                if wrong is not None:
                    errors[row] = wrong
                else:
                    errors.pop(row, None)
                    found += self._windows(row, tokens, text)
        return found

    def _wrong(self, tokens: Int32Array) -> RowError | None:
        if not len(tokens):
            return RowError(ErrorCode.INVALID_TARGET, "the tokenizer makes no token of the target")
        if int(tokens.max()) >= self.settings.vocab_size:
            detail = not_in_vocabulary(int(tokens.max()), self.settings.vocab_size).detail
            return RowError(ErrorCode.INVALID_TARGET, detail)
        if self._start is None:
            return RowError(
                ErrorCode.EMPTY_PROMPT, "the prompt is empty, and the tokenizer has no token that begins or ends texts"
            )
        return None

    def _windows(self, row: int, tokens: Any, text: str) -> Iterator[Prompt]:
        # The first window stands for the bytes and words of the whole document.
        windows = rolling_windows(tokens, int(self._start or 0), self.settings.max_length, self._stride)
        for part, (before, predicted) in enumerate(windows):
            yield Prompt(row, before, target_set(predicted, "" if part else text), part=part)

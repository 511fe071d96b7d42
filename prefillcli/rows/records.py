"""The records that flow through a job: batches of rows, prompts, windows of prompts, and scored rows.

The column `method` shows how a row's prompt was read, and whether it left before the last layer. A method is
`full`, that of a picker (`specprefill`, ...), or `fallback:` and a reason. A row that left early has `early-exit`
instead of `full`, and `+early-exit` after any other method: a picker's row stays one of that picker. So does `head`,
where a head of the user has answered.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from prefillcli.images.image import FEATURE, FIRST_FEATURE, PlacedImage, RowImage
from prefillcli.plan.behind import LabelSet
from prefillcli.stats.arrays import Float64Array, Int32Array, Int64Array

MAX_ROW_BYTES = 64 << 20  # bytes of the longest row that is ever read, unless `--max-row-bytes` sets another limit


class ErrorCode(StrEnum):
    """The reason why a row has no score: a stable code, its meaning, and whether it counts as an error."""

    meaning: str
    is_error: bool  # false if the user decided so: such a row counts in no error rate

    def __new__(cls, code: str, meaning: str, is_error: bool = True) -> ErrorCode:
        member = str.__new__(cls, code)
        member._value_, member.meaning, member.is_error = code, meaning, is_error
        return member

    NULL_PROMPT = "null_prompt", "the prompt is null (--empty-text error)"
    EMPTY_PROMPT = "empty_prompt", "the prompt is blank (--empty-text error), or has no tokens"
    SKIPPED_EMPTY = "skipped_empty", "the text is null or blank (--empty-text skip); not an error", False
    ROW_TOO_LARGE = "row_too_large", "the row, or the prompt made of it, has more bytes than --max-row-bytes"
    WRONG_TYPE = "wrong_type", "a value, or the whole line, has a type that cannot be used here"
    INVALID_UTF8 = "invalid_utf8", "a text is not valid UTF-8"
    INVALID_JSON = "invalid_json", "the line is not valid JSON"
    INVALID_CSV = "invalid_csv", "the CSV row has more or fewer fields than the header, or wrong quotes"
    MISSING_COLUMN = "missing_column", "the line lacks a column that the prompt needs"
    CONTROL_TEXT = "control_text", "the row has the text of a control token, and it cannot be encoded as plain text"
    TEMPLATE_ERROR = "template_error", "the --template could not be rendered from this row"
    CHAT_ERROR = "chat_error", "the chat template could not be applied to this row's messages"
    INVALID_TOKEN_IDS = "invalid_token_ids", "token ids are empty, negative or beyond the model's vocabulary"
    PROMPT_TOO_LONG = "prompt_too_long", "the prompt has more tokens than --max-length"
    SKIPPED_TOO_LONG = "skipped_too_long", "left out because it is too long (--on-long skip); not an error", False
    INVALID_KEEP = "invalid_keep", "keep is not a rate above 0 and up to 1, or specprefill not true, false or null"
    UNKNOWN_ADAPTER = "unknown_adapter", "the row names an adapter that --adapter does not give"
    EXCEEDS_MEMORY = "exceeds_memory", "the prompt does not fit the memory budget, or memory ran out on it alone"
    NULL_ID = "null_id", "the id is null or missing"
    DUPLICATE_ID = "duplicate_id", "an earlier row has the same id"
    INVALID_LABELS = "invalid_labels", "after this prompt, a label has no tokens, or unknown ones, or begins another"
    INVALID_REQUEST = "invalid_request", "the line asks for something that is not supported, or has a wrong value"
    INVALID_IMAGE = "invalid_image", "an image cannot be fetched or read, is cut off, or has too many pixels"
    INVALID_TARGET = "invalid_target", "the target is null, empty, not a text, or has no tokens, or unknown ones"
    WORKER_LOST = "worker_lost", "the worker process ended each time that it scored this row, the last time by itself"
    NONFINITE_SCORE = "nonfinite_score", "the model returned a score that is not a finite number"


# Codes of rows that were left out at the user's request.
SKIPPED_CODES = frozenset(code for code in ErrorCode if not code.is_error)


def is_error(code: str | None) -> bool:
    """Return whether a row with this value in its column `error` is an error row: neither scored nor left out at the
    user's request."""
    return code is not None and code not in SKIPPED_CODES


class RowError(NamedTuple):
    """The reason why a row has no score, with a detail for a reader."""

    code: ErrorCode
    detail: str

    def of_question(self, name: str) -> RowError:
        """Return the same of one of several questions; without a `name` it is unchanged."""
        return self._replace(detail=f"question {name}: {self.detail}") if name else self


class BadLine(NamedTuple):
    """A line that is not read as a whole: its error, and those of its `kept` values that distinguish it from
    others."""

    error: RowError
    kept: Mapping[str, Any] = MappingProxyType({})


def row_too_large(what: str, size: int, most: int) -> RowError:
    """Return the error of a row whose `what` has `size` bytes, more than `most`."""
    return RowError(ErrorCode.ROW_TOO_LARGE, f"{what} has {size:,} bytes; --max-row-bytes is {most:,}")


@dataclass(slots=True)
class RowBatch:
    """Consecutive rows of the input (with `--sample`: the chosen ones among them)."""

    first_row: int  # number of the first row, over the whole input
    rows: Int64Array  # row numbers, ascending [rows]
    # The needed columns as Python values `without_nulls`, one per row; a Parquet list of integers is an integer array.
    columns: dict[str, list[Any]]
    # Id and kept columns [rows]. From JSON Lines every one is JSON text (string, null for null), from CSV text.
    carried: pa.Table
    errors: dict[int, RowError]  # rows that could not be read, by row number
    nbytes: int  # bytes read for these rows
    # The images of rows that have some, by row number; None: they are not read yet.
    images: Mapping[int, tuple[RowImage, ...]] | None = None

    def only(self, positions: Int64Array) -> RowBatch:
        """Return the rows at these positions, ascending."""
        rows = self.rows[positions]
        chosen = positions.tolist()
        kept = set(rows.tolist())
        return RowBatch(
            first_row=self.first_row,
            rows=rows,
            columns={name: [values[at] for at in chosen] for name, values in self.columns.items()},
            carried=self.carried.take(pa.array(positions)),
            errors={row: error for row, error in self.errors.items() if row in kept},
            nbytes=self.nbytes * len(rows) // max(len(self.rows), 1),
            images=self.images,
        )


PromptKey = tuple[int, int]
"""The row and the number of a prompt."""


@dataclass(slots=True)
class Prompt:
    """A row ready for the engine."""

    row: int
    tokens: Int32Array  # token ids, int32 [tokens]
    labels: LabelSet  # the tokens of the labels that may follow this prompt
    truncated: bool = False
    keep: float | None = None  # the row's own keep rate
    specprefill: bool | None = None  # the row's own choice of whether it is compressed
    variant: str | None = None  # the variant of the model that reads it; None: the model itself
    # The row's values from which it was made, where sections of it may be left out.
    made_of: dict[str, Any] | None = None
    # The digest of everything that the row's results depend on, where a later job may take them over.
    digest: bytes | None = None
    part: int = 0  # its number among the prompts of its row
    question: str = ""  # of several questions, the name of the one that it asks
    empty: bool = False  # whether it asks about a text without content, whose answers are divided out
    conditional: bool = False  # whether that depends on the answers to others: it can fail without its row
    images: tuple[PlacedImage, ...] = ()  # whose features are among the tokens, in their order
    # The tokens' positions, int32 [tokens], where they are not 0, 1, 2, ...: an image's features all have the one at
    # which it begins.
    positions: Int32Array | None = None
    # In the first prompt of its row, why conditional ones could not be made, by their numbers.
    failed: dict[int, RowError] | None = None

    @property
    def key(self) -> PromptKey:
        """What distinguishes it from all others of the input."""
        return self.row, self.part

    @property
    def whole(self) -> Int32Array:
        """Its tokens, with those that come with its labels because these are read among them."""
        if not self.labels.pointers:
            return self.tokens
        return np.concatenate([self.tokens, self.labels.sequences[0][:-1]])

    @property
    def content(self) -> bytes:
        """What tells it from other prompts: its tokens, and its images, whatever numbers their features have."""
        if not self.images:
            return np.ascontiguousarray(self.tokens, "<i4").tobytes()
        tokens = np.where(self.tokens >= FIRST_FEATURE, FEATURE, self.tokens).astype("<i4").tobytes()
        return tokens + b"".join(b"%d %d " % (each.features, each.several) + each.image.key for each in self.images)


@dataclass(slots=True)
class Window:
    """Rows that are planned, scored and written together."""

    index: int
    rows: Int64Array  # all row numbers of the window, ascending: those of `prompts` and of `errors`
    prompts: list[Prompt]
    errors: dict[int, RowError]
    carried: pa.Table
    # In a shard of a job, the row numbers of the job's whole window; `rows` are some of them.
    whole_rows: Int64Array | None = None

    def place(self, row: int) -> int:
        """Return the place of a row in the window."""
        return int(np.searchsorted(self.rows, row))

    def only(self, prompts: Iterable[Prompt], columns: Collection[str] | None = None) -> Window:
        """Return the window with only the rows of these prompts, and with these of its carried columns; None: all."""
        own = sorted(prompts, key=lambda prompt: (prompt.row, prompt.part))
        rows = np.unique(np.array([prompt.row for prompt in own], np.int64))
        carried = self.carried
        if columns is not None:
            carried = carried.select([name for name in carried.column_names if name in columns])
        carried = carried.take(pa.array(np.searchsorted(self.rows, rows)))
        return Window(self.index, rows, own, {}, carried)


@dataclass(frozen=True, slots=True)
class Rationale:
    """The text that the model has written after a row's prompt and its answer.

    `text` is None where nothing was written. `source` names the prompt that it was written from: `full` for the whole
    one, else the row's method. `gap` is the smallest difference between the two best tokens.
    """

    text: str | None
    tokens: int
    finish_reason: str
    gap: float
    source: str


class SectionEffect(NamedTuple):
    """The contribution of a section of a prompt: the fall of the first label's probability without it."""

    section: str
    change: float


class ReadTokens(NamedTuple):
    """The log-probability of each token of a label set, one label after the other, float64 [tokens], and whether every
    token is the likeliest one: what greedy decoding would write."""

    logprobs: Float64Array
    greedy: bool


class NextTokens(NamedTuple):
    """The model's distribution after a prompt: the likeliest tokens, the likeliest first, int64 [tokens], their
    log-probabilities, float64 [tokens], and the probability that its next token is the first one of a label."""

    tokens: Int64Array
    logprobs: Float64Array
    begins: float


class TokenText(NamedTuple):
    """A token as an answer: its text, what it adds to one without control tokens, and whether it ends it."""

    text: str
    written: str
    ends: bool


@dataclass(slots=True)
class ScoredRow:
    """The answer of an engine for a row."""

    row: int
    # Log-probability of every label over the whole vocabulary, its variants summed, divided by its size if its set has
    # sizes [labels]; of a row that left early, among the labels alone.
    logprobs: Float64Array
    shared_tokens: int
    computed_tokens: int
    kept_tokens: int
    seconds: float
    method: str = "full"  # how the row was read: see the top of this module
    # For a row of the audit: the `logprobs` after the whole prompt and the last layer. In a job with exits each row
    # of the audit has them, whether or not it would leave.
    audit: Float64Array | None = None
    # The number of the last layer that the row went through, from 1; None if it was read to the end. For a row of the
    # audit: the layer that gave its `logprobs`.
    exit_layer: int | None = None
    # For a row with several prompts, the answers to each in their order; see `unasked`.
    # `logprobs` are those of the first then, or of the text whose pieces they read, and the costs are theirs together.
    parts: tuple[ScoredRow, ...] = ()
    by_token: ReadTokens | None = None  # of labels that want them
    # The likeliest tokens, whose log-probabilities are the `logprobs`, where these are asked for instead of labels.
    tokens: Int64Array | None = None
    next: NextTokens | None = None  # of a row of the first window
    rationale: Rationale | None = None  # of a row that is written about
    # For a row whose sections are weighed, the largest change first.
    evidence: tuple[SectionEffect, ...] | None = None
    error: RowError | None = None  # instead of an answer: why there is none, if it should be asked for

    @property
    def answers(self) -> tuple[ScoredRow, ...]:
        """The answers to each of its prompts, in their order."""
        return self.parts or (self,)


def joined_row(parts: Sequence[ScoredRow]) -> ScoredRow:
    """Return a row with several prompts, of the answers to each. Where all of them were read token by token, they are
    the pieces of one text, whose log-probability is their sum. It has left when all of them have."""
    first, by_token = parts[0], None
    logprobs, read = first.logprobs, [each.by_token for each in parts if each.by_token is not None]
    if len(read) == len(parts):  # one text in pieces
        logprobs = np.sum([each.logprobs for each in parts], axis=0)
        by_token = ReadTokens(np.concatenate([each.logprobs for each in read]), all(each.greedy for each in read))
    answered = [each for each in parts if len(each.logprobs)] or parts
    last = max(answered, key=lambda each: math.inf if each.exit_layer is None else each.exit_layer)
    return ScoredRow(
        row=first.row,
        logprobs=logprobs,
        shared_tokens=sum(each.shared_tokens for each in parts),
        computed_tokens=sum(each.computed_tokens for each in parts),
        kept_tokens=sum(each.kept_tokens for each in parts),
        seconds=sum(each.seconds for each in parts),
        method=last.method,
        exit_layer=last.exit_layer,
        parts=tuple(parts),
        by_token=by_token,
    )


def unasked(row: int, error: RowError | None = None) -> ScoredRow:
    """Return the stand-in for the answer to a prompt that was not asked, or could not be, for the reason in
    `error`."""
    return ScoredRow(row, np.empty(0), 0, 0, 0, 0.0, error=error)


FULL, EARLY_EXIT = "full", "early-exit"
# The method of rows that another model has decided before this one reads them, and the place of its reading among the
# layers, which are numbered from 0. Where several models read before this one, the others' places are further ahead.
FIRST, BEFORE = "first", -1
_LEFT = f"+{EARLY_EXIT}"


def early_exit_method(reading: str, layer: int) -> str:
    """Return the method of a row that left after this layer, numbered from 0, and whose prompt was read by `reading`;
    before the first layer it was read by another model."""
    if layer <= BEFORE:
        return FIRST
    return EARLY_EXIT if reading == FULL else reading + _LEFT


# The method of rows that a head of the user has answered.
HEAD = "head"
_BY_HEAD = f"+{HEAD}"


def head_method(reading: str) -> str:
    """Return the method of a row that a head has answered, and whose prompt was read by `reading`."""
    return HEAD if reading == FULL else reading + _BY_HEAD


def by_head(method: str) -> bool:
    """Return whether a head has answered a row of this method."""
    return method == HEAD or method.endswith(_BY_HEAD)


def reading_method(method: str) -> str:
    """Return how a row's prompt was read, whether or not the row left early, and whoever answered."""
    return FULL if method in (EARLY_EXIT, HEAD) else method.removesuffix(_LEFT).removesuffix(_BY_HEAD)


# The beginning of the method of a prompt that was read in full instead of compressed; a reason follows.
FALLBACK = "fallback:"


def is_fallback(method: str) -> bool:
    """Return whether a prompt of this method should have been compressed and was read in full."""
    return method.startswith(FALLBACK)


def left_early(method: str) -> bool:
    """Return whether a row of this method left before the last layer."""
    return method == EARLY_EXIT or method.endswith(_LEFT)

"""What flows through a job: batches of rows, prompts, windows of prompts, and scored rows.

The column `method` says of a row how its prompt was read, and whether it left before the last layer. A method is
`full`, that of a picker (`specprefill`, ...), or `fallback:` and a reason. A row that left early has `early-exit`
instead of `full`, and `+early-exit` behind any other method: a picker's row stays one of that picker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]

MAX_ROW_BYTES = 64 << 20  # bytes of the longest row that is ever read, unless `--max-row-bytes` says otherwise


class ErrorCode(StrEnum):
    """Why a row has no score: a stable code, its meaning, and whether it counts as an error."""

    meaning: str
    is_error: bool  # false for what the user decided: such a row is in no error rate

    def __new__(cls, code: str, meaning: str, is_error: bool = True) -> ErrorCode:
        member = str.__new__(cls, code)
        member._value_, member.meaning, member.is_error = code, meaning, is_error
        return member

    NULL_PROMPT = "null_prompt", "the prompt is null"
    EMPTY_PROMPT = "empty_prompt", "the prompt is empty or white space only"
    ROW_TOO_LARGE = (
        "row_too_large",
        "the row, or the prompt made of it, has more bytes than --max-row-bytes, or its Parquet row group has a page "
        "that is too large to open",
    )
    WRONG_TYPE = "wrong_type", "a value, or the whole line, has a type that cannot be used here"
    INVALID_UTF8 = "invalid_utf8", "a text is not valid UTF-8"
    INVALID_JSON = "invalid_json", "the line is not valid JSON"
    MISSING_COLUMN = "missing_column", "the line lacks a column that the prompt needs"
    CONTROL_TEXT = "control_text", "the row has the text of a control token, and it cannot be encoded as plain text"
    TEMPLATE_ERROR = "template_error", "the --template could not be rendered from this row"
    CHAT_ERROR = "chat_error", "the chat template could not be applied to this row's messages"
    INVALID_TOKEN_IDS = "invalid_token_ids", "prompt_token_ids is empty, negative or beyond the model's vocabulary"
    PROMPT_TOO_LONG = "prompt_too_long", "the prompt has more tokens than --max-length"
    SKIPPED_TOO_LONG = (
        "skipped_too_long",
        "left out because it is too long (--on-long skip); does not count as an error",
        False,
    )
    INVALID_KEEP = (
        "invalid_keep",
        "the row's keep is not a rate above 0 and up to 1, or its specprefill is not true, false or null",
    )
    UNKNOWN_ADAPTER = "unknown_adapter", "the row names an adapter that --adapter does not give"
    EXCEEDS_MEMORY = (
        "exceeds_memory",
        "the prompt does not fit the memory budget, or memory ran out on this prompt alone",
    )
    NULL_ID = "null_id", "the id is null or missing"
    DUPLICATE_ID = "duplicate_id", "an earlier row has the same id"
    LABEL_NOT_ONE_TOKEN = "label_not_one_token", "after this prompt, a label is not exactly one token"
    WORKER_LOST = "worker_lost", "the worker process ended each time that it scored this row, at last by itself"
    NONFINITE_SCORE = "nonfinite_score", "the model returned a score that is not a finite number"


# Codes of rows that were left out as the user asked.
SKIPPED_CODES = frozenset(code for code in ErrorCode if not code.is_error)


def is_error(code: str | None) -> bool:
    """Whether a row with this in its column `error` is an error row, neither scored nor left out as the user asked."""
    return code is not None and code not in SKIPPED_CODES


class RowError(NamedTuple):
    """Why a row has no score, with a detail for a reader."""

    code: ErrorCode
    detail: str


def row_too_large(what: str, size: int, most: int) -> RowError:
    """The error of a row of which `what` has `size` bytes, more than `most`."""
    return RowError(ErrorCode.ROW_TOO_LARGE, f"{what} has {size:,} bytes; --max-row-bytes is {most:,}")


@dataclass(slots=True)
class RowBatch:
    """Consecutive rows of the input (with `--sample`: the chosen ones among them)."""

    first_row: int  # number of the first row, over the whole input
    rows: Int64Array  # row numbers, ascending [rows]
    # The needed columns as Python values, one per row; a Parquet list of integers is an integer array.
    columns: dict[str, list[Any]]
    # Id and kept columns [rows]. From JSON Lines every one is JSON text (string, null for null).
    carried: pa.Table
    errors: dict[int, RowError]  # rows that could not be read, by row number
    nbytes: int  # size in bytes of what was read for these rows

    def only(self, positions: Int64Array) -> RowBatch:
        """The rows at these positions, ascending."""
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
        )


@dataclass(slots=True)
class Prompt:
    """A row ready for the engine."""

    row: int
    tokens: Int32Array  # token ids, int32 [tokens]
    labels: int  # index into `Labels.sets`: the label tokens that may follow this prompt
    truncated: bool = False
    keep: float | None = None  # the row's own keep rate
    specprefill: bool | None = None  # whether the row is to be compressed, where it says so
    adapter: str | None = None  # the adapter that the row names
    # The row's values that it was made of, where sections of it may be left out.
    made_of: dict[str, Any] | None = None
    # Of all of the row that its results follow from, where a later job may take them over.
    digest: bytes | None = None


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
        """Where a row of the window stands in it."""
        return int(np.searchsorted(self.rows, row))

    def only(self, prompts: Iterable[Prompt], columns: Collection[str] | None = None) -> Window:
        """The window with the rows of these prompts alone, and of its carried columns those named; None: all."""
        own = sorted(prompts, key=lambda prompt: prompt.row)
        rows = np.array([prompt.row for prompt in own], np.int64)
        carried = self.carried
        if columns is not None:
            carried = carried.select([name for name in carried.column_names if name in columns])
        carried = carried.take(pa.array(np.searchsorted(self.rows, rows)))
        return Window(self.index, rows, own, {}, carried)


@dataclass(frozen=True, slots=True)
class Rationale:
    """What the model has written behind a row's prompt and its answer.

    `text` is None where nothing was written. `source` says what the text was written from: `full` for the whole
    prompt, else the row's method. `gap` is the smallest difference between the two best tokens.
    """

    text: str | None
    tokens: int
    finish_reason: str
    gap: float
    source: str


class SectionEffect(NamedTuple):
    """What a section of a prompt contributes: by how much the probability of the first label falls without it."""

    section: str
    change: float


@dataclass(slots=True)
class ScoredRow:
    """What an engine answers for a row."""

    row: int
    # Log-probability of every label over the whole vocabulary, its variants summed [labels]; of a row that left
    # early, among the labels alone.
    logprobs: Float64Array
    shared_tokens: int
    computed_tokens: int
    kept_tokens: int
    seconds: float
    method: str = "full"  # how the row was read: the comment on methods below says which there are
    # For a row of the audit: the `logprobs` after the whole prompt and the last layer. In a job with exits each row
    # of the audit has them, whether or not it would leave.
    audit: Float64Array | None = None
    # The layers that the row went through, the first of which is 1; None if it was read to the end. Of a row of the
    # audit: where its `logprobs` are from.
    exit_layer: int | None = None
    rationale: Rationale | None = None  # of a row that is written about
    # Of a row whose sections are weighed, the largest change first.
    evidence: tuple[SectionEffect, ...] | None = None


FULL, EARLY_EXIT = "full", "early-exit"
_LEFT = f"+{EARLY_EXIT}"


def early_exit_method(reading: str) -> str:
    """The method of a row that left early, whose prompt was read by `reading`."""
    return EARLY_EXIT if reading == FULL else reading + _LEFT


def reading_method(method: str) -> str:
    """How a row's prompt was read, whether or not the row left early."""
    return FULL if method == EARLY_EXIT else method.removesuffix(_LEFT)


# What a method begins with where a prompt that was to be compressed was read in full; a reason follows.
FALLBACK = "fallback:"


def is_fallback(method: str) -> bool:
    """Whether a prompt of this method should have been compressed and was read in full."""
    return method.startswith(FALLBACK)


def left_early(method: str) -> bool:
    """Whether a row of this method left before the last layer."""
    return method == EARLY_EXIT or method.endswith(_LEFT)

"""What flows through a job: batches of rows, prompts, windows of prompts, and what the engine says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]

MAX_ROW_BYTES = 64 << 20
"""Bytes of the longest row that is ever read, unless `--max-row-bytes` says otherwise."""

ERROR_CODES: dict[str, str] = {
    "null_prompt": "the prompt is null",
    "empty_prompt": "the prompt is empty or white space only",
    "row_too_large": "the row, or the prompt made of it, has more bytes than --max-row-bytes",
    "wrong_type": "a value, or the whole line, has a type that cannot be used here",
    "invalid_utf8": "a text is not valid UTF-8",
    "invalid_json": "the line is not valid JSON",
    "missing_column": "the line lacks a column that the prompt needs",
    "control_text": "the row has the text of a control token, and it cannot be encoded as plain text",
    "template_error": "the --template could not be rendered from this row",
    "chat_error": "the chat template could not be applied to this row's messages",
    "invalid_token_ids": "prompt_token_ids is empty, negative or beyond the model's vocabulary",
    "prompt_too_long": "the prompt has more tokens than --max-length",
    "skipped_too_long": "left out because it is too long (--on-long skip); does not count as an error",
    "invalid_keep": "the row's keep is not a rate above 0 and up to 1, or its specprefill is not true, false or null",
    "exceeds_memory": "the prompt does not fit the memory budget",
    "null_id": "the id is null or missing",
    "duplicate_id": "an earlier row has the same id",
    "label_not_one_token": "after this prompt, a label is not exactly one token",
    "nonfinite_score": "the model returned a score that is not a finite number",
}
"""Every stable error code with its meaning."""

SKIPPED = "skipped_too_long"
"""The one code that is a decision of the user and no error in the error rate."""


class RowError(NamedTuple):
    """Why a row has no score: a code of `ERROR_CODES` and a detail for a reader."""

    code: str
    detail: str


def too_large(what: str, size: int, most: int) -> RowError:
    """The error of a row of which `what` has `size` bytes, more than `most`."""
    return RowError("row_too_large", f"{what} has {size:,} bytes; --max-row-bytes is {most:,}")


@dataclass(slots=True)
class RowBatch:
    """Consecutive rows of the input (with `--sample`: the chosen ones among them)."""

    first_row: int
    """Number of the first row, over the whole input."""
    rows: Int64Array
    """Row numbers, ascending [rows]."""
    columns: dict[str, list[Any]]
    """The needed columns as Python values, one per row; a Parquet list of integers is an integer array."""
    carried: pa.Table
    """Id and kept columns [rows]. From JSON Lines every one is JSON text (string, null for null)."""
    errors: dict[int, RowError]
    """Rows that could not be read, by row number."""
    nbytes: int
    """Size in bytes of what was read for these rows."""


@dataclass(slots=True)
class Prompt:
    """A row ready for the engine."""

    row: int
    tokens: Int32Array
    """Token ids, int32 [tokens]."""
    labels: int
    """Index into `Labels.sets`: the label tokens that may follow this prompt."""
    truncated: bool = False
    keep: float | None = None
    """The row's own keep rate."""
    specprefill: bool | None = None
    """Whether the row is to be compressed, where it says so."""


@dataclass(slots=True)
class Window:
    """Rows that are planned, scored and written together."""

    index: int
    rows: Int64Array
    """All row numbers of the window, ascending: those of `prompts` and of `errors`."""
    prompts: list[Prompt]
    errors: dict[int, RowError]
    carried: pa.Table


@dataclass(slots=True)
class ScoredRow:
    """What the engine says of a row."""

    row: int
    logprobs: Float64Array
    """Log-probability of every label over the whole vocabulary, its variants summed [labels]."""
    shared_tokens: int
    computed_tokens: int
    kept_tokens: int
    seconds: float
    method: str = "full"
    audit: Float64Array | None = None
    """For a compressed row of the audit: `logprobs` as the whole prompt gives them."""

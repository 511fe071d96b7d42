"""The records that flow through a job: batches of rows, prompts, windows of prompts, and scored rows.

Also how values of Arrow columns become Python values and JSON texts, and columns become batches.

The column `method` shows how a row's prompt was read, and whether it left before the last layer. A method is
`full`, that of a picker (`specprefill`, ...), or `fallback:` and a reason. A row that left early has `early-exit`
instead of `full`, and `+early-exit` after any other method: a picker's row stays one of that picker.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.errors import UsageError
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
    EMPTY_PROMPT = (
        "empty_prompt",
        "the prompt is empty or white space only (--empty-text error), or the tokenizer makes no token of it",
    )
    SKIPPED_EMPTY = (
        "skipped_empty",
        "the text is null, empty or white space only (--empty-text skip); does not count as an error",
        False,
    )
    ROW_TOO_LARGE = (
        "row_too_large",
        "the row, or the prompt made of it, has more bytes than --max-row-bytes",
    )
    WRONG_TYPE = "wrong_type", "a value, or the whole line, has a type that cannot be used here"
    INVALID_UTF8 = "invalid_utf8", "a text is not valid UTF-8"
    INVALID_JSON = "invalid_json", "the line is not valid JSON"
    INVALID_CSV = "invalid_csv", "the row of a CSV file has more or fewer fields than its header, or wrong quotes"
    MISSING_COLUMN = "missing_column", "the line lacks a column that the prompt needs"
    CONTROL_TEXT = "control_text", "the row has the text of a control token, and it cannot be encoded as plain text"
    TEMPLATE_ERROR = "template_error", "the --template could not be rendered from this row"
    CHAT_ERROR = "chat_error", "the chat template could not be applied to this row's messages"
    INVALID_TOKEN_IDS = "invalid_token_ids", "token ids are empty, negative or beyond the model's vocabulary"
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
    INVALID_LABELS = (
        "invalid_labels",
        "after this prompt, a label has no tokens of its own, or unknown ones, or begins another label",
    )
    INVALID_REQUEST = (
        "invalid_request",
        "the line of a batch file asks for something that is not supported here, or has a wrong value",
    )
    INVALID_TARGET = (
        "invalid_target",
        "the target is null, empty, no text, or has no tokens of its own, or unknown ones",
    )
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
    conditional: bool = False  # whether that depends on the answers to others: it can fail without its row
    # In the first prompt of its row, why conditional ones could not be made, by their numbers.
    failed: dict[int, RowError] | None = None

    @property
    def key(self) -> PromptKey:
        """What distinguishes it from all others of the input."""
        return self.row, self.part


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
    error: RowError | None = None  # in place of an answer: why there is none, if it should be asked for

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


def reading_method(method: str) -> str:
    """Return how a row's prompt was read, whether or not the row left early."""
    return FULL if method == EARLY_EXIT else method.removesuffix(_LEFT)


# The beginning of the method of a prompt that was read in full instead of compressed; a reason follows.
FALLBACK = "fallback:"


def is_fallback(method: str) -> bool:
    """Return whether a prompt of this method should have been compressed and was read in full."""
    return method.startswith(FALLBACK)


def left_early(method: str) -> bool:
    """Return whether a row of this method left before the last layer."""
    return method == EARLY_EXIT or method.endswith(_LEFT)


# From Arrow columns to Python values, with invalid UTF-8 kept to the rows that have it.


_ELEMENT_BYTES = 8  # an empty element of a list takes memory too


def python_values(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    """Return the values of a column [rows], and by position the faults of texts that are not valid UTF-8.

    Bytes count as text. A list of integers without nulls comes as an integer array. Equal entries of a
    dictionary share one Python object, so a long text repeated over rows is held once.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        return _from_dictionary(array)
    if is_text(kind):
        return _texts(array)
    if _is_integer_list(kind) and array.flatten().null_count == 0:
        return _integer_lists(array), {}
    try:
        return to_python(array), {}
    except UnicodeDecodeError:
        return _one_by_one(array, _scalar, " of a nested text")


def without_nulls(value: Any) -> Any:
    """Return a value whose objects lack the keys that have a null, at every depth.

    In Arrow every object of a column has the keys of all others, so a null shows no more than that the key is not
    there. Nulls in lists stay.
    """
    try:
        return _without_nulls(value)
    except RecursionError:  # whoever reads it will report that
        return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def to_python(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Convert like `to_pylist`, but times that Python cannot hold become text in ISO 8601, each by itself.

    Those are nanoseconds, years before 1 and after 9999, zones without a rule here, and durations of over a billion
    days. Raises UnicodeDecodeError for a text that is not valid UTF-8.
    """
    try:
        held = column
        if _counts_nanoseconds(column.type):  # with pandas installed, `to_pylist` would make its own times of them
            held = column.cast(_in_microseconds(column.type))
        values: list[Any] = held.to_pylist()
    except UnicodeDecodeError:
        raise
    except (*_NO_TIME, NotImplementedError):
        values = [_scalar(scalar) for scalar in column]
    return values


# Times that Python cannot hold: a nanosecond is lost, it is out of range, or its zone is unknown.
_NO_TIME = (ValueError, OverflowError, LookupError)


def _counts_nanoseconds(kind: pa.DataType) -> bool:
    inner = (
        [kind.value_type] if pa.types.is_dictionary(kind) else [kind.field(at).type for at in range(kind.num_fields)]
    )
    return getattr(kind, "unit", None) == "ns" or any(map(_counts_nanoseconds, inner))


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    # Raises NotImplementedError for a type that holds others.
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_time(kind):
        return pa.time64("us")
    raise NotImplementedError(kind)


def _scalar(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return _scalar(scalar.value)
    if isinstance(scalar, pa.ExtensionScalar):
        return _scalar(scalar.value)
    if pa.types.is_struct(kind):
        return {field.name: _scalar(scalar[at]) for at, field in enumerate(kind)}
    if pa.types.is_map(kind):
        return [(_scalar(entry[0]), _scalar(entry[1])) for entry in scalar.values]
    if pa.types.is_nested(kind):
        return [_scalar(value) for value in scalar.values]
    if pa.types.is_temporal(kind):
        return _time(scalar)
    return scalar.as_py()


def _time(scalar: pa.Scalar) -> Any:
    try:
        counts = getattr(scalar.type, "unit", None) == "ns"
        return (scalar.cast(_in_microseconds(scalar.type)) if counts else scalar).as_py()
    except _NO_TIME:
        return _time_text(scalar)


_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DAY = 86_400_000  # milliseconds


def _time_text(scalar: pa.Scalar) -> str:
    # A date, timestamp, time of day or duration in ISO 8601; timestamps with a zone in UTC.
    kind, value = scalar.type, scalar.value
    if pa.types.is_time(kind):
        return str(scalar.cast(pa.string()).as_py())
    if pa.types.is_duration(kind):
        digits = _DIGITS[kind.unit]
        seconds, rest = divmod(abs(value), 10**digits)
        return f"{'-' * (value < 0)}PT{seconds}" + f".{rest:0{digits}}" * (digits > 0) + "S"
    plain = scalar.cast(pa.timestamp(kind.unit)) if pa.types.is_timestamp(kind) else scalar
    text = str(plain.cast(pa.string()).as_py()).replace(" ", "T")
    if text.startswith("<"):  # Arrow writes no years of more than five digits
        days = value // _DAY if pa.types.is_date64(kind) else value
        text = str(np.datetime64(value, kind.unit) if pa.types.is_timestamp(kind) else np.datetime64(days, "D"))
    return f"{text}+00:00" if getattr(kind, "tz", None) else text


def text_of(json_text: str) -> str:
    """Return a value carried from JSON Lines as it stands in a column of text: a string as it is, all else as JSON."""
    return str(json.loads(json_text)) if json_text.startswith('"') else json_text


def row_bytes(array: pa.Array) -> Int64Array:
    """Return the size of every value in bytes [rows]; the values in a list or a struct take some bytes more than they
    hold."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return np.asarray(np.append(row_bytes(array.dictionary), 0)[_indices(array)], np.int64)
    if is_text(kind):
        return _filled(pc.binary_length(_plain_text(array)))
    if _is_integer_list(kind):
        width: int = kind.value_type.bit_width // 8
        return _filled(pc.list_value_length(array)) * width
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _list_bytes(array)
    if pa.types.is_struct(kind):
        return np.sum([row_bytes(field) for field in array.flatten()], axis=0, initial=0, dtype=np.int64) + np.zeros(
            len(array), np.int64
        )
    return np.full(len(array), -(-array.nbytes // max(len(array), 1)), np.int64)


def _list_bytes(array: pa.Array) -> Int64Array:
    offsets: Int64Array = array.offsets.to_numpy().astype(np.int64)
    first = int(offsets[0]) if len(offsets) else 0
    values = array.values.slice(first, int(offsets[-1]) - first) if len(offsets) else array.values
    ends = np.concatenate([[0], np.cumsum(row_bytes(values) + _ELEMENT_BYTES)])
    sizes: Int64Array = np.diff(ends[offsets - first])
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), sizes, 0)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which a carried column travels: dictionaries and views are laid out flat.

    So are views inside lists, structs and maps, of which Arrow cannot take rows.
    """
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if kind == pa.string_view():
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    # Dictionaries inside stay: Arrow takes their rows, but does not cast them.
    return field if pa.types.is_dictionary(field.type) else field.with_type(plain_type(field.type))


def plain_column(array: pa.Array, kind: pa.DataType) -> tuple[pa.Array, dict[int, str]]:
    """Return a carried column as `kind`, and by position the faults of texts that are not valid UTF-8.

    In those texts the bad bytes are replaced by U+FFFD; a nested value with a bad text becomes null.
    """
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if array.type != kind:
        array = array.cast(kind)
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        values, bad = python_values(array)
        if not is_text(array.type):
            return _with_nulls(array, np.isin(np.arange(len(array)), list(bad))), bad
        raw = array.cast(pa.large_binary())
        for position in bad:
            values[position] = raw[position].as_py().decode("utf-8", "replace")
        return pa.array(values, kind), bad
    return array, {}


def is_text(kind: pa.DataType) -> bool:
    """Return whether its values are texts or bytes of any length."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or kind in (pa.string_view(), pa.binary_view())
    )


def _is_integer_list(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return bool(is_list and pa.types.is_integer(kind.value_type))


def _plain_text(array: pa.Array) -> pa.Array:
    kind = array.type
    if kind == pa.string_view():
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()) if kind == pa.binary_view() else array


def _filled(lengths: pa.Array) -> Int64Array:
    return np.asarray(lengths.fill_null(0), np.int64)


def _indices(array: pa.DictionaryArray) -> Int64Array:
    # Positions in the dictionary; null is -1.
    return np.asarray(array.indices.cast(pa.int64()).fill_null(-1), np.int64)


def _from_dictionary(array: pa.DictionaryArray) -> tuple[list[Any], dict[int, str]]:
    used, positions = np.unique(_indices(array), return_inverse=True)
    nulls = int(len(used) > 0 and used[0] < 0)
    values, bad = python_values(_plain_text(array.dictionary).take(pa.array(used[nulls:])))
    values = [None] * nulls + values
    wrong = {}
    if bad:
        wrong = {row: bad[at - nulls] for row, at in enumerate(positions.tolist()) if at - nulls in bad}
    return [values[at] for at in positions.tolist()], wrong


def _texts(array: pa.Array) -> tuple[list[Any], dict[int, str]]:
    text = pa.large_string() if array.type in (pa.large_binary(), pa.binary_view()) else pa.string()
    try:
        is_bytes = pa.types.is_binary(array.type) or array.type in (pa.large_binary(), pa.binary_view())
        return (array.cast(text) if is_bytes else array).to_pylist(), {}
    except (UnicodeDecodeError, pa.ArrowInvalid):
        raw = array.cast(pa.large_binary()).to_pylist()
        return _one_by_one(raw, lambda text: None if text is None else text.decode(), "")


def _integer_lists(array: pa.Array) -> list[Any]:
    flat = array.flatten().to_numpy(zero_copy_only=False)
    ends = np.cumsum(_filled(pc.list_value_length(array)))
    lists: list[Any] = np.split(flat, ends[:-1]) if len(ends) else []
    for position in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else ():
        lists[position] = None
    return lists


def _one_by_one(raw: Iterable[Any], read: Callable[[Any], Any], where: str) -> tuple[list[Any], dict[int, str]]:
    values: list[Any] = []
    bad: dict[int, str] = {}
    for position, each in enumerate(raw):
        try:
            values.append(read(each))
        except UnicodeDecodeError as error:
            values.append(None)
            bad[position] = f"byte {error.start}{where}: {error.reason}"
    return values, bad


# The rows and columns of the input that a job reads, in batches.


BATCH_ROWS = 2048  # rows of a batch, at most
BATCH_BYTES = 8 << 20  # bytes of a batch, about


@dataclass(frozen=True, slots=True)
class Selection:
    """Row numbers below `limit`, and of those only `chosen`, if given."""

    limit: int | None = None
    chosen: Int64Array | None = None  # ascending row numbers

    @classmethod
    def draw(cls, sample: int, total: int, seed: int) -> Selection:
        """Draw `sample` of `total` rows, the same ones for the same seed; all of them if there are fewer."""
        if sample >= total:
            return cls()
        chosen = np.random.default_rng(seed).choice(total, sample, replace=False)
        return cls(chosen=np.sort(chosen).astype(np.int64))

    @property
    def end(self) -> int | None:
        """Row number from which nothing more is read; None if all rows are read."""
        if self.chosen is not None:
            return int(self.chosen[-1]) + 1 if len(self.chosen) else 0
        return self.limit

    def within(self, start: int, stop: int) -> Int64Array:
        """Return the selected row numbers in [start, stop), ascending."""
        if self.chosen is None:
            return np.arange(start, stop if self.limit is None else min(stop, self.limit), dtype=np.int64)
        low, high = np.searchsorted(self.chosen, (start, stop))
        return self.chosen[low:high]

    def before(self, row: int) -> int:
        """Return how many rows before `row` are selected."""
        if self.chosen is not None:
            return int(np.searchsorted(self.chosen, row))
        return row if self.limit is None else min(row, self.limit)

    def count(self, total: int) -> int:
        """Return how many of `total` rows are selected."""
        if self.chosen is not None:
            return len(self.chosen)
        return total if self.limit is None else min(total, self.limit)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rows that the user asked for: all, the first `limit`, or `sample` of these drawn at random."""

    limit: int | None = None
    sample: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ColumnChoice:
    """The columns that are read."""

    columns: tuple[str, ...]  # those that the prompt needs
    optional: tuple[str, ...]  # those that are read where they exist: on some lines, in some files
    carried: pa.Schema  # id and kept columns; from JSON Lines every one is a string that holds JSON
    # Those of JSON Lines in which a number that is not finite makes the row an invalid request; elsewhere it is null.
    requests: tuple[str, ...] = ()

    @property
    def columns_and_optional(self) -> tuple[str, ...]:
        return (*self.columns, *self.optional)


DEFAULT_COLUMN = "prompt"  # with the texts of rows


def require_columns(names: Sequence[str], available: Sequence[str], where: str, optional: Sequence[str] = ()) -> None:
    """Raise UsageError naming the first column that is missing, or of which there are two; some may be missing."""
    for name in names:
        if name not in available:
            listed = ", ".join(map(_listed, available[:20])) + (", ..." if len(available) > 20 else "")
            advice = "\nname the text's column with --prompt-column, or write a --template" * (name == DEFAULT_COLUMN)
            raise UsageError(f"no column {name!r} in {where}\navailable: {listed}{advice}")
    for name in (*names, *optional):
        if available.count(name) > 1:
            raise UsageError(f"two columns of {where} are named {name!r}\nrename or drop one of them")


def _listed(name: str) -> str:
    # A name among others: names in the data may have line breaks, or spaces around them, and be as long as a row.
    return name if name.isprintable() and name.strip() == name and 0 < len(name) <= 60 else repr(name[:60])


MAX_LEFT_BYTES = 1 << 16  # of an id or kept value, in a row that is too large


def row_batches(
    piece: pa.RecordBatch,
    start: int,
    columns: Sequence[str],
    carried: pa.Schema,
    selection: Selection,
    max_row_bytes: int,
    most_rows: int,
) -> Iterator[RowBatch]:
    """Yield the selected rows of `piece`, whose first row has the number `start`, in batches of about `BATCH_BYTES`.

    `columns` become Python values, those of the schema `carried` stay in Arrow. Rows of more than `max_row_bytes` are
    error rows.
    """
    rows = selection.within(start, start + piece.num_rows)
    if len(rows) == 0:
        return
    if len(rows) < piece.num_rows:
        piece = piece.take(pa.array(rows - start))
    piece, sizes, large = _without_large(piece, max_row_bytes)
    errors = {int(rows[at]): row_too_large("the row", size, max_row_bytes) for at, size in large.items()}
    ends = np.cumsum(sizes)
    at = 0
    while at < len(rows):
        before = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + BATCH_BYTES, "right")))
        stop = min(stop, at + most_rows, len(rows))
        batch = _row_batch(piece.slice(at, stop - at), rows[at:stop], columns, carried, int(ends[stop - 1]) - before)
        batch.errors |= {row: error for row, error in errors.items() if rows[at] <= row <= rows[stop - 1]}
        yield batch
        at = stop


def _without_large(piece: pa.RecordBatch, max_row_bytes: int) -> tuple[pa.RecordBatch, Int64Array, dict[int, int]]:
    # The rows, without the long values of rows that are too large; the sizes of all rows; those of the large ones.
    by_column = [row_bytes(column) for column in piece.columns]
    sizes = sum(by_column, np.zeros(piece.num_rows, np.int64))
    large = np.flatnonzero(sizes > max_row_bytes)
    if len(large) == 0:
        return piece, sizes, {}
    found = dict(zip(large.tolist(), sizes[large].tolist(), strict=True))
    arrays = []
    for column, lengths in zip(piece.columns, by_column, strict=True):
        left_out = np.zeros(piece.num_rows, bool)
        left_out[large] = lengths[large] > MAX_LEFT_BYTES
        arrays.append(_with_nulls(column, left_out))
        sizes -= np.where(left_out, lengths, 0)
    return pa.record_batch(arrays, piece.schema.names), sizes, found


def _with_nulls(column: pa.Array, left_out: npt.NDArray[np.bool_]) -> pa.Array:
    try:
        return column.take(pa.array(np.arange(len(column)), mask=left_out))
    except pa.ArrowNotImplementedError:  # texts of a view type inside lists and maps
        null = pa.nulls(1, column.type)
        return pa.concat_arrays([null if out else column.slice(at, 1) for at, out in enumerate(left_out)])


def _row_batch(
    piece: pa.RecordBatch, rows: Int64Array, columns: Sequence[str], carried: pa.Schema, nbytes: int
) -> RowBatch:
    errors: dict[int, RowError] = {}

    def note(name: str, bad: dict[int, str]) -> None:
        for position, what in bad.items():
            errors.setdefault(int(rows[position]), RowError(ErrorCode.INVALID_UTF8, f"column {name}, {what}"))

    values: dict[str, list[Any]] = {}
    for name in columns:
        found, bad = python_values(piece.column(name))
        values[name] = list(map(without_nulls, found))
        note(name, bad)
    kept = []
    for field in carried:
        column, bad = plain_column(piece.column(field.name), field.type)
        note(field.name, bad)
        kept.append(column)
    # A table without columns has no number of rows: it takes that from a column that is left out.
    table = pa.Table.from_arrays(kept, schema=carried) if kept else pa.table({"": pa.nulls(len(rows))}).select([])
    return RowBatch(int(rows[0]), rows, values, table, errors, nbytes)


# Values as JSON texts.


def as_json(column: pa.ChunkedArray) -> list[str]:
    """Return the values of a column as JSON texts, as an output in JSON Lines has them."""
    values = to_python(column)
    if pa.types.is_floating(column.type):
        return ["null" if v is None or not math.isfinite(v) else repr(v) for v in values]
    try:
        return [encode_json(value) for value in values]
    except ValueError:  # a NaN inside a nested value
        return [encode_json(_finite(value)) for value in values]


def plain_texts(column: pa.ChunkedArray) -> list[str | None]:
    """Return the values of a column as texts: a string as it is, all else as JSON, null as None."""
    if is_text(column.type) and not pa.types.is_binary(column.type) and column.type != pa.large_binary():
        return list(column.to_pylist())
    return [None if text == "null" else text_of(text) for text in as_json(column)]


def id_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """Return ids as a user writes them, the same whether they come typed or as JSON text."""
    return [text_of(text) for text in json_texts(column, json_text=json_text)]


def json_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """Return the values of a column as JSON texts in one form, whether they come typed or as JSON text."""
    if not json_text:
        return as_json(column)
    values = [json.loads(text or "null") for text in column.to_pylist()]
    return [encode_json(value) for value in values]


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def _json_form(value: Any) -> str:
    # Values without a form in JSON: dates as ISO 8601, bytes as base64, everything else as text.
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_json_form).encode


def brief_json(value: Any) -> str:
    """Return a value as JSON text for a message: its first 60 characters."""
    try:
        text = encode_json(value)
    except RecursionError:
        text = "(nested too deeply)"
    short = text if len(text) <= 60 else f"{text[:60]}..."
    return short.encode(errors="backslashreplace").decode()

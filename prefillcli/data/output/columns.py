"""The columns of an output: the id, those carried from the input, and those that scoring adds.

Of columns carried from JSON Lines, kinds of values decide on the type: b true or false, i integer, f other number,
s string, j anything else (arrays, objects, integers beyond 64 bits). A column of one kind gets its type; i and f
together are float64, unless they are ids; any other mix is text, with strings as they are and everything else as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefillcli.data.output.counts import ROW, Counts
from prefillcli.data.rows import ErrorCode, Float64Array, Int64Array, Prompt, RowError, ScoredRow, Window
from prefillcli.data.values import text_of
from prefillcli.errors import UsageError
from prefillcli.stats.probabilities import Measure, label_mass, label_scores

Group = Literal["audit", "calibrated", "exits", "adapters", "rationales", "evidence"]


@dataclass(frozen=True, slots=True)
class ColumnGroups:
    """Which groups of columns an output has beside those that every output has."""

    audit: bool = False  # the scores of an audit
    calibrated: bool = False  # calibrated probabilities
    exits: bool = False  # where rows left the model early
    adapters: bool = False  # which adapter read each row
    rationales: bool = False  # what was written behind rows
    evidence: bool = False  # what the sections of prompts contribute

    def has(self, group: Group | None) -> bool:
        """Whether columns of this group are there; those of no group always are."""
        found: bool = group is None or getattr(self, group)
        return found

    @property
    def names(self) -> list[Group]:
        """The groups that are there."""
        return [each.name for each in fields(self) if getattr(self, each.name)]  # type: ignore[misc]


ROW_COLUMN = "row"  # the column with the row number, in an output without ids

# Calibrated probabilities of label log-probabilities, both [rows, labels].
Probabilities = Callable[[Float64Array], Float64Array]
ObjectArray = npt.NDArray[np.object_]
_KINDS = {
    Measure.SHARES: "label log-probabilities",
    Measure.CHANCES: "label log-probabilities",
    Measure.VALUES: "label values",
}


@dataclass(frozen=True, slots=True)
class ResultRows:
    """Rows of a window that have a score or an error, ascending by row: what their columns are made of."""

    numbers: Int64Array  # row numbers [rows]
    prompts: list[Prompt | None]  # None where the row has no prompt [rows]
    errors: list[RowError | None]  # None where the row has a score [rows]
    scored: list[ScoredRow]  # what the engine says of the rows that have a score [scored]
    places: Int64Array  # where these are among all rows [scored]
    # Log-probability of every label over the whole vocabulary, or over all classes; of rows that left early, among
    # the labels alone. Of a head that gives values, the value of every label [scored, labels].
    logprobs: Float64Array
    # Score of every label: mostly its probability among the labels, after the temperature [scored, labels].
    scores: Float64Array
    # `scores` as the whole prompt and all layers give them, for rows of the audit [scored].
    audited: list[Float64Array | None]
    schema: OutputSchema
    # Calibrated probability of every label [scored, labels]; None where nothing is calibrated.
    calibrated: Float64Array | None = None

    @classmethod
    def of(
        cls,
        window: Window,
        results: Sequence[ScoredRow],
        errors: dict[int, RowError],
        schema: OutputSchema,
        temperature: float,
        probabilities: Probabilities | None = None,
    ) -> ResultRows:
        """Made of some rows of a window. A result that is not a finite number becomes an error."""
        results, measure = sorted(results, key=lambda scored: scored.row), schema.measure
        logprobs = np.array([scored.logprobs for scored in results], np.float64).reshape(-1, len(schema.labels))
        scores = label_scores(logprobs, temperature, measure)
        finite = np.isfinite(scores[:, 0])
        errors = errors | {
            scored.row: RowError(ErrorCode.NONFINITE_SCORE, f"{_KINDS[measure]} {scored.logprobs.tolist()}")
            for scored, good in zip(results, finite.tolist(), strict=True)
            if not good
        }
        results = [scored for scored, good in zip(results, finite.tolist(), strict=True) if good]
        numbers = np.array(sorted([scored.row for scored in results] + list(errors)), np.int64)
        prompts = {prompt.row: prompt for prompt in window.prompts}
        return cls(
            numbers=numbers,
            prompts=[prompts.get(row) for row in numbers.tolist()],
            errors=[errors.get(row) for row in numbers.tolist()],
            scored=results,
            places=np.searchsorted(numbers, np.array([scored.row for scored in results], np.int64)),
            logprobs=logprobs[finite],
            scores=scores[finite],
            audited=[
                None if each.audit is None else label_scores(each.audit, temperature, measure) for each in results
            ],
            schema=schema,
            calibrated=None if probabilities is None else probabilities(logprobs[finite]),
        )

    def arrays(self) -> list[pa.Array]:
        """The columns of `OutputSchema.results` for these rows."""
        arrays = []
        for column in self.schema.columns:
            values = column.values(self)
            if "<label>" in column.name:
                arrays += [pa.array(of_label, column.type) for of_label in np.asarray(values).T]
            else:
                arrays.append(pa.array(values, column.type))
        return arrays

    def values(self, names: Set[str]) -> dict[str, list[Any]]:
        """The values [rows] of those columns of `OutputSchema.conditional` that are named, by name; only these are
        computed."""
        found: dict[str, list[Any]] = {}
        for column in self.schema.columns:
            own = column.names(self.schema.labels)
            if not column.conditional or names.isdisjoint(own):
                continue
            values = np.asarray(column.values(self), object).reshape(len(self.numbers), len(own))
            found |= {name: values[:, at].tolist() for at, name in enumerate(own) if name in names}
        return found

    def of_scored(self, values: Sequence[Any] | npt.NDArray[Any]) -> ObjectArray:
        """A value for every row [rows, ...] where `values` [scored, ...] has one, else None."""
        inner = values.shape[1:] if isinstance(values, np.ndarray) else ()
        spread = np.full((len(self.numbers), *inner), None, object)
        spread[self.places] = values
        return spread


class Column(NamedTuple):
    """A column of every output."""

    name: str  # with `<label>` it stands for one column a label
    type: pa.DataType
    # A value for every row, None for null [rows]; with `<label>` [rows, labels].
    values: Callable[[ResultRows], Sequence[Any] | ObjectArray]
    counted: bool = False  # whether `Counts.add_rows` needs it
    group: Group | None = None  # only an output with this group has it; None: every output
    # Whether a `RowCondition` may use it: it is known when a row is scored, and the same in every run of the job.
    conditional: bool = True
    least_labels: int = 0  # only an output with so many labels has it
    # Only an output whose labels have one of these measures has it.
    measures: tuple[Measure, ...] = tuple(Measure)

    def names(self, labels: Sequence[str]) -> list[str]:
        """Of the column, or of one for each label."""
        if "<label>" not in self.name:
            return [self.name]
        return [self.name.replace("<label>", label) for label in labels]


def _best(rows: ResultRows, scores: Iterable[Float64Array | None]) -> list[str | None]:
    some = len(rows.schema.labels) > 1
    return [rows.schema.labels[int(each.argmax())] if some and each is not None else None for each in scores]


def _of_result(name: str) -> Callable[[ResultRows], ObjectArray]:
    return lambda rows: rows.of_scored([getattr(scored, name) for scored in rows.scored])


def _full_only(rows: ResultRows, values: npt.NDArray[Any]) -> ObjectArray:
    # What is over the whole vocabulary [scored, ...] for every row [rows, ...]; None where a row left early.
    spread = rows.of_scored(values)
    left = [each.exit_layer is not None for each in rows.scored]
    spread[rows.places[np.array(left, np.bool_)]] = None
    return spread


def _calibrated(rows: ResultRows) -> ObjectArray:
    # Calibrated probabilities of the labels [rows, labels].
    return rows.of_scored(np.empty((0, len(rows.schema.labels))) if rows.calibrated is None else rows.calibrated)


def _of_rationale(name: str) -> Callable[[ResultRows], ObjectArray]:
    # A field of `Rationale`; None where nothing was to be written.
    return lambda rows: rows.of_scored([each.rationale and getattr(each.rationale, name) for each in rows.scored])


def _gaps(rows: ResultRows) -> ObjectArray:
    # The smallest gaps; None where no token was chosen.
    gaps = [None if each.rationale is None else each.rationale.gap for each in rows.scored]
    return rows.of_scored([gap if gap is not None and math.isfinite(gap) else None for gap in gaps])


def _evidence(rows: ResultRows) -> ObjectArray:
    found = np.full(len(rows.numbers), None, object)
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        if each.evidence is not None:
            found[place] = [effect._asdict() for effect in each.evidence]
    return found


# What each section of a prompt contributes, the largest change first.
EVIDENCE = pa.list_(pa.struct([("section", pa.string()), ("change", pa.float64())]))
_WRITTEN: Any = {"group": "rationales", "conditional": False}

# In the order of the output, after the id and the columns that are carried from the input.
COLUMNS = (
    Column("score", pa.float64(), lambda rows: rows.of_scored(rows.scores[:, 0]), counted=True),
    Column("probability", pa.float64(), lambda rows: _calibrated(rows)[:, 0], group="calibrated"),
    Column(
        "logprob_<label>",
        pa.float64(),
        lambda rows: _full_only(rows, rows.logprobs),
        measures=(Measure.SHARES, Measure.CHANCES),
    ),
    Column("value_<label>", pa.float64(), lambda rows: rows.of_scored(rows.logprobs), measures=(Measure.VALUES,)),
    Column("probability_<label>", pa.float64(), _calibrated, group="calibrated", least_labels=3),
    Column(
        "score_<label>",
        pa.float64(),
        lambda rows: rows.of_scored(rows.scores),
        group="exits",
        least_labels=3,
    ),
    Column(
        "label_mass",
        pa.float64(),
        lambda rows: _full_only(rows, label_mass(rows.logprobs)),
        measures=(Measure.SHARES,),
    ),
    Column("prediction", pa.string(), lambda rows: rows.of_scored(_best(rows, rows.scores)), counted=True),
    Column("prompt_tokens", pa.int64(), lambda rows: [p and len(p.tokens) for p in rows.prompts], counted=True),
    Column("shared_tokens", pa.int64(), _of_result("shared_tokens"), conditional=False),
    Column("kept_tokens", pa.int64(), _of_result("kept_tokens")),
    Column("computed_tokens", pa.int64(), _of_result("computed_tokens"), counted=True, conditional=False),
    Column("seconds", pa.float64(), _of_result("seconds"), counted=True, conditional=False),
    Column("method", pa.string(), _of_result("method"), counted=True),
    Column(
        "adapter",
        pa.string(),
        lambda rows: [p and p.adapter for p in rows.prompts],
        group="adapters",
    ),
    Column("exit_layer", pa.int64(), _of_result("exit_layer"), group="exits"),
    Column("truncated", pa.bool_(), lambda rows: [p is not None and p.truncated for p in rows.prompts], counted=True),
    Column(
        "error",
        pa.string(),
        lambda rows: [error and error.code for error in rows.errors],
        counted=True,
        conditional=False,
    ),
    Column(
        "error_detail",
        pa.string(),
        lambda rows: [error and error.detail for error in rows.errors],
        counted=True,
        conditional=False,
    ),
    Column(
        "audit_score",
        pa.float64(),
        lambda rows: rows.of_scored([None if p is None else p[0] for p in rows.audited]),
        group="audit",
        conditional=False,
    ),
    Column(
        "audit_prediction",
        pa.string(),
        lambda rows: rows.of_scored(_best(rows, rows.audited)),
        group="audit",
        conditional=False,
    ),
    Column("rationale", pa.string(), _of_rationale("text"), **_WRITTEN),
    Column("rationale_tokens", pa.int64(), _of_rationale("tokens"), **_WRITTEN),
    Column("finish_reason", pa.string(), _of_rationale("finish_reason"), **_WRITTEN),
    Column("rationale_gap", pa.float64(), _gaps, **_WRITTEN),
    Column("rationale_source", pa.string(), _of_rationale("source"), **_WRITTEN),
    Column("evidence", EVIDENCE, _evidence, group="evidence", conditional=False),
)


COLUMN_TYPES = {column.name: column.type for column in COLUMNS}


_TYPES = {
    frozenset("b"): pa.bool_(),
    frozenset("i"): pa.int64(),
    frozenset("f"): pa.float64(),
    frozenset("if"): pa.float64(),
}


def kinds_of(texts: pa.ChunkedArray) -> str:
    """The kinds of values in a column of JSON texts, as letters."""
    return "".join(sorted({_kind(text) for text in texts.to_pylist() if text is not None}))


def type_for(kinds: Iterable[str], *, ids: bool = False) -> pa.DataType:
    """The type of a column that holds these kinds of values. Among `ids`, 1 and 1.0 differ, so they stay texts."""
    found = frozenset(kinds)
    return pa.string() if ids and len(found) > 1 else _TYPES.get(found, pa.string())


def typed_column(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """JSON texts as values of `kind`."""
    if kind != pa.string():
        return texts.cast(kind)
    values = [None if text is None else text_of(text) for text in texts.to_pylist()]
    return pa.chunked_array([pa.array(values, pa.string())])


def _kind(text: str) -> str:
    first = text[0]
    if first == '"':
        return "s"
    if first in "tf":
        return "b"
    if first in "[{":
        return "j"
    if "." in text or "e" in text or "E" in text:
        return "f"
    return "i" if len(text) < 19 or -(2**63) <= int(text) < 2**63 else "j"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSchema:
    """The columns of a job's output."""

    labels: tuple[str, ...]
    id_name: str | None = None  # the carried column with the ids; None where rows go by their number
    # Id and kept columns as the parts have them; from JSON Lines every one is JSON text.
    carried: pa.Schema = field(default_factory=lambda: pa.schema([]))
    json_carried: bool = False  # whether the carried columns are JSON text
    # Whether such text is written as it is; else its values get the type that holds them.
    json_text: bool = False
    truth: str | None = None  # the carried column with the right answers
    groups: ColumnGroups = ColumnGroups()  # which columns there are beside those of every output
    measure: Measure = Measure.SHARES  # what the numbers of the labels are

    def require_distinct(self) -> None:
        """Raise UsageError if a carried column has the name of another column of the output."""
        row = [ROW_COLUMN] if self.id_name is None else []
        taken = [*row, *self.results.names, ROW]
        for name in self.carried.names:
            if name in taken:
                option = {self.truth: "--truth", self.id_name: "--id-column"}.get(name, "--keep-columns")
                raise UsageError(f"{option} {name}: the output has a column {name} already\nrename it in the input")

    @property
    def json_columns(self) -> tuple[str, ...]:
        """The columns of the output that are JSON text."""
        return tuple(self.carried.names) if self.json_carried and self.json_text else ()

    def arrow(self, json_kinds: Mapping[str, Iterable[str]]) -> pa.Schema:
        """The Arrow schema of the output; `json_kinds` are the kinds of values in carried JSON text."""
        carried = list(self.carried)
        if self._typed:
            carried = [
                pa.field(each.name, type_for(json_kinds.get(each.name, ()), ids=each.name == self.id_name))
                for each in carried
            ]
        if self.id_name is None:
            carried.insert(0, pa.field(ROW_COLUMN, pa.int64()))
        else:
            carried.sort(key=lambda each: each.name != self.id_name)
        return pa.schema([*carried, *self.results])

    def table(self, rows: pa.Table, schema: pa.Schema) -> pa.Table:
        """Rows of parts as rows of the output, whose `arrow` schema is given."""
        columns = []
        for own in schema:
            column = rows[ROW if own.name == ROW_COLUMN and self.id_name is None else own.name]
            if self._typed and own.name in self.carried.names:
                column = typed_column(column, own.type)
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=schema)

    @property
    def columns(self) -> list[Column]:
        """The columns that scoring adds; of some there is one for each label."""
        return [
            column
            for column in COLUMNS
            if self.groups.has(column.group)
            and len(self.labels) >= column.least_labels
            and self.measure in column.measures
        ]

    @property
    def results(self) -> pa.Schema:
        """Names and types of the columns that scoring adds."""
        return pa.schema([(name, column.type) for column in self.columns for name in column.names(self.labels)])

    @property
    def conditional(self) -> pa.Schema:
        """Those of them that a `RowCondition` may use."""
        columns = [column for column in self.columns if column.conditional]
        return pa.schema([(name, column.type) for column in columns for name in column.names(self.labels)])

    @property
    def _typed(self) -> bool:
        return self.json_carried and not self.json_text

    def count(self, counts: Counts, rows: pa.Table) -> Counts:
        """Add rows of parts to `counts`."""
        counts.add_rows(rows, self.truth, id_name=self.id_name, json_carried=self.json_carried)
        return counts

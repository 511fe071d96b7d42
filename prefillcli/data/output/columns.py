"""The columns that scoring adds to an output: the name and type of each, and what it is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefillcli.data.rows import ErrorCode, Float64Array, Int64Array, Prompt, RowError, ScoredRow, Window
from prefillcli.stats.calibration import Calibration
from prefillcli.stats.probabilities import Measure, label_mass, label_scores

ROW_COLUMN = "row"
"""The column with the row number, in an output without ids."""

ObjectArray = npt.NDArray[np.object_]
_KINDS = {
    Measure.SHARES: "label log-probabilities",
    Measure.CHANCES: "label log-probabilities",
    Measure.VALUES: "label values",
}


@dataclass(frozen=True, slots=True)
class ResultRows:
    """Rows of a window that have a score or an error, ascending by row: what their columns are made of."""

    numbers: Int64Array
    """Row numbers [rows]."""
    prompts: list[Prompt | None]
    """None where the row has no prompt [rows]."""
    errors: list[RowError | None]
    """None where the row has a score [rows]."""
    scored: list[ScoredRow]
    """What the engine says of the rows that have a score [scored]."""
    places: Int64Array
    """Where these are among all rows [scored]."""
    logprobs: Float64Array
    """Log-probability of every label over the whole vocabulary, or over all classes; of rows that left early, among
    the labels alone. Of a head that gives values, the value of every label [scored, labels]."""
    scores: Float64Array
    """Score of every label: mostly its probability among the labels, after the temperature [scored, labels]."""
    audited: list[Float64Array | None]
    """`scores` as the whole prompt and all layers give them, for rows of the audit [scored]."""
    labels: tuple[str, ...]
    calibrated: Float64Array | None = None
    """Calibrated probability of every label [scored, labels]; None where nothing is calibrated."""
    measure: Measure = Measure.SHARES
    """What the numbers in `logprobs` are."""

    @classmethod
    def of(
        cls,
        window: Window,
        results: Sequence[ScoredRow],
        errors: dict[int, RowError],
        labels: Sequence[str],
        temperature: float,
        calibration: Calibration | None = None,
        measure: Measure = Measure.SHARES,
    ) -> ResultRows:
        """Made of some rows of a window. A result that is not a finite number becomes an error."""
        results = sorted(results, key=lambda scored: scored.row)
        logprobs = np.array([scored.logprobs for scored in results], np.float64).reshape(-1, len(labels))
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
            labels=tuple(labels),
            calibrated=None if calibration is None else calibration.probabilities(logprobs[finite]),
            measure=measure,
        )

    def of_scored(self, values: Sequence[Any] | npt.NDArray[Any]) -> ObjectArray:
        """A value for every row [rows, ...] where `values` [scored, ...] has one, else None."""
        inner = values.shape[1:] if isinstance(values, np.ndarray) else ()
        spread = np.full((len(self.numbers), *inner), None, object)
        spread[self.places] = values
        return spread


class Column(NamedTuple):
    """A column of every output."""

    name: str
    """With `<label>` it stands for one column a label."""
    type: pa.DataType
    values: Callable[[ResultRows], Sequence[Any] | ObjectArray]
    """A value for every row, None for null [rows]; with `<label>` [rows, labels]."""
    counted: bool = False
    """Whether `Counts.add_rows` needs it."""
    audit: bool = False
    """Whether only an output with an audit has it."""
    exits: bool = False
    """Whether only an output of a job with exits has it."""
    calibrated: bool = False
    """Whether only an output with calibrated probabilities has it."""
    adapters: bool = False
    """Whether only an output whose rows have adapters of their own has it."""
    least_labels: int = 0
    """Only an output with so many labels has it."""
    measures: tuple[Measure, ...] = tuple(Measure)
    """Only an output whose labels have one of these measures has it."""


def _best(rows: ResultRows, scores: Iterable[Float64Array | None]) -> list[str | None]:
    """The label with the largest score [scored]; None where there is only one."""
    some = len(rows.labels) > 1
    return [rows.labels[int(each.argmax())] if some and each is not None else None for each in scores]


def _of_result(name: str) -> Callable[[ResultRows], ObjectArray]:
    """A field of `ScoredRow` as it is."""
    return lambda rows: rows.of_scored([getattr(scored, name) for scored in rows.scored])


def _full_only(rows: ResultRows, values: npt.NDArray[Any]) -> ObjectArray:
    """What is over the whole vocabulary [scored, ...] for every row [rows, ...]; None where a row left early."""
    spread = rows.of_scored(values)
    left = [each.exit_layer is not None for each in rows.scored]
    spread[rows.places[np.array(left, np.bool_)]] = None
    return spread


def _calibrated(rows: ResultRows) -> ObjectArray:
    """Calibrated probabilities of the labels [rows, labels]."""
    return rows.of_scored(np.empty((0, len(rows.labels))) if rows.calibrated is None else rows.calibrated)


COLUMNS = (
    Column("score", pa.float64(), lambda rows: rows.of_scored(rows.scores[:, 0]), counted=True),
    Column("probability", pa.float64(), lambda rows: _calibrated(rows)[:, 0], calibrated=True),
    Column(
        "logprob_<label>",
        pa.float64(),
        lambda rows: _full_only(rows, rows.logprobs),
        measures=(Measure.SHARES, Measure.CHANCES),
    ),
    Column("value_<label>", pa.float64(), lambda rows: rows.of_scored(rows.logprobs), measures=(Measure.VALUES,)),
    Column("probability_<label>", pa.float64(), _calibrated, calibrated=True, least_labels=3),
    Column(
        "score_<label>",
        pa.float64(),
        lambda rows: rows.of_scored(rows.scores),
        exits=True,
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
    Column("shared_tokens", pa.int64(), _of_result("shared_tokens")),
    Column("kept_tokens", pa.int64(), _of_result("kept_tokens")),
    Column("computed_tokens", pa.int64(), _of_result("computed_tokens"), counted=True),
    Column("seconds", pa.float64(), _of_result("seconds"), counted=True),
    Column("method", pa.string(), _of_result("method"), counted=True),
    Column(
        "adapter",
        pa.string(),
        lambda rows: [p and p.adapter for p in rows.prompts],
        adapters=True,
    ),
    Column("exit_layer", pa.int64(), _of_result("exit_layer"), exits=True),
    Column("truncated", pa.bool_(), lambda rows: [p is not None and p.truncated for p in rows.prompts], counted=True),
    Column("error", pa.string(), lambda rows: [error and error.code for error in rows.errors], counted=True),
    Column("error_detail", pa.string(), lambda rows: [error and error.detail for error in rows.errors], counted=True),
    Column(
        "audit_score",
        pa.float64(),
        lambda rows: rows.of_scored([None if p is None else p[0] for p in rows.audited]),
        audit=True,
    ),
    Column(
        "audit_prediction",
        pa.string(),
        lambda rows: rows.of_scored(_best(rows, rows.audited)),
        audit=True,
    ),
)
"""In the order of the output, after the id and the columns that are carried from the input."""


COLUMN_TYPES = {column.name: column.type for column in COLUMNS}


def result_schema(
    labels: Sequence[str],
    audit: bool = False,
    calibrated: bool = False,
    exits: bool = False,
    measure: Measure = Measure.SHARES,
    adapters: bool = False,
) -> pa.Schema:
    """Names and types of the columns that scoring adds."""
    columns = _columns(len(labels), audit, calibrated, exits, measure, adapters)
    return pa.schema([(name, column.type) for column in columns for name in _names(column, labels)])


def result_arrays(
    rows: ResultRows, audit: bool = False, exits: bool = False, adapters: bool = False
) -> list[pa.Array]:
    """The columns of `result_schema` for these rows, with those of a calibration where they have one."""
    arrays = []
    for column in _columns(len(rows.labels), audit, rows.calibrated is not None, exits, rows.measure, adapters):
        values = column.values(rows)
        if "<label>" in column.name:
            arrays += [pa.array(of_label, column.type) for of_label in np.asarray(values).T]
        else:
            arrays.append(pa.array(values, column.type))
    return arrays


def _columns(
    labels: int, audit: bool, calibrated: bool, exits: bool, measure: Measure, adapters: bool
) -> list[Column]:
    return [
        column
        for column in COLUMNS
        if (audit or not column.audit)
        and (calibrated or not column.calibrated)
        and (exits or not column.exits)
        and (adapters or not column.adapters)
        and labels >= column.least_labels
        and measure in column.measures
    ]


def _names(column: Column, labels: Sequence[str]) -> list[str]:
    if "<label>" not in column.name:
        return [column.name]
    return [column.name.replace("<label>", label) for label in labels]

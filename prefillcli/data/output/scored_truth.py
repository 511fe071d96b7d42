"""What an output says of its rows beside the right answers, which it has in a kept column."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.output.columns import ROW_COLUMN
from prefillcli.data.output.file_formats import as_json
from prefillcli.data.output.target import Target
from prefillcli.data.rows import Float64Array, Int64Array
from prefillcli.data.values import text_of, to_python
from prefillcli.stats.probabilities import label_probabilities

LabelOf = Callable[[Any], int | None]
"""The number of the label that a right answer stands for; None if it is no label."""

_MOST_VALUES = 1000  # different ones that are counted
_UNKNOWN = -1


@dataclass(slots=True)
class TruthCounts:
    """Which values a column with right answers has."""

    values: dict[str, tuple[int | None, int]] = field(default_factory=dict)
    """By value as JSON: its label's number, and the rows. Of very many that are no label the first ones."""

    def add(self, value: str, label: int | None, rows: int) -> None:
        if label is not None or value in self.values or len(self.values) < _MOST_VALUES:
            self.values[value] = label, self.values.get(value, (label, 0))[1] + rows


@dataclass(frozen=True, slots=True)
class ScoredTruth:
    """The rows of an output that have a score and a known right answer."""

    scores: Float64Array
    """The probability of the first label, or with more than two labels of every label [rows] or [rows, labels]."""
    calibrated: Float64Array | None
    """The same after the calibration; None without one."""
    truth: Int64Array
    """The number of the right label [rows]."""
    places: Int64Array
    """Which rows of the output these are, counted from 0 [rows]."""
    without_truth: int
    """Rows that have a score, but no right answer that is a label."""
    errors: int
    """Rows without a score."""
    found: TruthCounts
    """Of all rows with a score."""

    @property
    def probabilities(self) -> Float64Array:
        """Of every label [rows, labels]."""
        return self.scores if self.scores.ndim == 2 else np.stack([self.scores, 1 - self.scores], axis=1)


def read_scored_truth(
    target: Target,
    truth: str,
    labels: Sequence[str],
    label_of: LabelOf,
    *,
    temperature: float,
    calibrated: bool,
    exits: bool = False,
) -> ScoredTruth:
    """Read the scores of an output and its column `truth`, in 24 bytes a row for two labels.

    `calibrated`: the output has calibrated probabilities too, which take 8 bytes more. `exits`: it is of a job with
    exits, where rows may lack log-probabilities. Raises what pyarrow raises, or ValueError, if the output is damaged.
    """
    several = len(labels) > 2
    # Those of rows that left early are not known, so an output of such rows has each label's score.
    by_label = [f"{'score' if exits else 'logprob'}_{label}" for label in labels] if several else []
    calibrations = [f"probability_{label}" for label in labels] if several else ["probability"]
    scores: list[Float64Array] = []
    probabilities: list[Float64Array] = []
    answers: list[Int64Array] = []
    places: list[Int64Array] = []
    counts, rows, errors, unknown = TruthCounts(), 0, 0, 0
    for table in target.tables(["score", truth, *by_label, *(calibrations if calibrated else [])]):
        scored = pc.is_valid(table["score"]).to_numpy()
        numbers = _labels_of(table[truth], scored, label_of, counts, json_text=target.file_format.json_text)
        known = scored & (numbers != _UNKNOWN)
        errors += len(table) - int(scored.sum())
        unknown += int(scored.sum() - known.sum())
        answers.append(numbers[known])
        places.append(np.flatnonzero(known) + rows)
        if several:
            columns = [_floats(table[name], known, 0.0 if exits else -np.inf) for name in by_label]
            values = np.stack(columns, axis=1)
            scores.append(values if exits else label_probabilities(values, temperature))
        else:
            scores.append(_floats(table["score"], known))
        if calibrated:
            found = np.stack([_floats(table[name], known) for name in calibrations], axis=1)
            probabilities.append(found if several else found[:, 0])
        rows += len(table)
    empty = np.empty((0, len(labels)) if several else 0)
    return ScoredTruth(
        scores=np.concatenate([empty, *scores]),
        calibrated=np.concatenate([empty, *probabilities]) if calibrated else None,
        truth=np.concatenate([np.empty(0, np.int64), *answers]),
        places=np.concatenate([np.empty(0, np.int64), *places]),
        without_truth=unknown,
        errors=errors,
        found=counts,
    )


def row_names(target: Target, places: Sequence[int], id_name: str | None) -> dict[int, int | str]:
    """The row number, or the id as text, of rows of an output by their places in it."""
    found: dict[int, int | str] = {}
    wanted, rows = np.array(sorted(set(places)), np.int64), 0
    for table in target.tables([id_name or ROW_COLUMN]):
        inside = wanted[(wanted >= rows) & (wanted < rows + len(table))]
        column = table[id_name or ROW_COLUMN].take(pa.array(inside - rows))
        values = id_texts(column, json_text=target.file_format.json_text) if id_name else column.to_pylist()
        found |= dict(zip(inside.tolist(), values, strict=True))
        rows += len(table)
        if len(wanted) == 0 or rows > wanted[-1]:
            break
    return found


def id_texts(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    """Ids as a user writes them, the same whether they come typed or as JSON text."""
    return [text_of(text) for text in _as_json(column, json_text=json_text)]


def _as_json(column: pa.ChunkedArray, *, json_text: bool) -> list[str]:
    if not json_text:
        return as_json(column)
    values = [json.loads(text or "null") for text in column.to_pylist()]
    return [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in values]


def _floats(column: pa.ChunkedArray, known: np.ndarray[Any, np.dtype[np.bool_]], null: float = 0.0) -> Float64Array:
    """The numbers of known rows; of labels they may come as JSON text. JSON has no infinity: it is null there."""
    values: Float64Array = column.cast(pa.float64()).fill_null(null).to_numpy()[known]
    return values


def _labels_of(
    column: pa.ChunkedArray,
    scored: np.ndarray[Any, np.dtype[np.bool_]],
    label_of: LabelOf,
    counts: TruthCounts,
    *,
    json_text: bool,
) -> Int64Array:
    """The number of each row's right label, _UNKNOWN without one [rows]; the values of scored rows are counted."""
    try:
        encoded = column.combine_chunks().dictionary_encode()
    except pa.ArrowNotImplementedError:  # lists and structs are no labels
        counts.add(f"a value of type {column.type}", None, int(scored.sum()) - column.null_count)
        return np.full(len(column), _UNKNOWN, np.int64)
    values = list(_values(encoded.dictionary, json_text=json_text))
    texts = _as_json(pa.chunked_array([encoded.dictionary]), json_text=json_text)
    numbers = [label_of(value) for value in values]
    at = encoded.indices.cast(pa.int64()).fill_null(len(values)).to_numpy(zero_copy_only=False)
    for place, rows in enumerate(np.bincount(at[scored], minlength=len(values))[: len(values)].tolist()):
        if rows and values[place] is not None:
            counts.add(texts[place], numbers[place], rows)
    table = np.array([*(_UNKNOWN if number is None else number for number in numbers), _UNKNOWN], np.int64)
    labels: Int64Array = table[at]
    return labels


def _values(dictionary: pa.Array, *, json_text: bool) -> Iterator[Any]:
    """Python's values; what is neither text nor a number nor true or false is None."""
    for value in to_python(dictionary):
        known = json.loads(value) if json_text and value is not None else value
        yield known if isinstance(known, str | int | float | bool) else None

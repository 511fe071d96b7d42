"""The evaluation of an output whose right answers are in one of its kept columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.data.output.columns import ROW_COLUMN
from prefillcli.data.output.target import Target
from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import Label, Labels, label_of
from prefillcli.data.rows import Float64Array, Int32Array, Int64Array, id_texts, json_texts, to_python
from prefillcli.data.windows import find_prompts
from prefillcli.errors import UsageError
from prefillcli.features.evaluation.report import CalibratedFigures, EvaluatedRow, RunEvaluation, TruthValue
from prefillcli.plan.trie import common_prefix
from prefillcli.stats.evaluation import (
    Evaluation,
    Measure,
    closest_call,
    evaluate,
    evaluate_labels,
    evaluate_values,
    label_probabilities,
    nearest,
    surest_wrong,
)

if TYPE_CHECKING:
    from prefillcli.core.feature import Opening, Window

MOST_ROWS = 20  # rows of each kind that are named
_MOST_VALUES = 20  # of the truth column, in the report
_NAMED_VALUES = 5  # in a message
_LONGEST_VALUE = 40  # characters
_MOST_TOKENS = 400  # of a row's text
_HALF = 0.5  # where the prediction of two labels changes


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How the scores of a job are evaluated."""

    truth: str  # the kept column with the right answers
    labels: tuple[Label, ...]
    temperature: float
    wanted_precision: float | None
    calibrated: bool  # whether the output has calibrated probabilities
    exits: bool = False  # whether its rows may have left early
    values: bool = False  # whether its scores are values, of which the first label's rank the rows

    @classmethod
    def of_json(cls, content: Any) -> EvaluationPlan | None:
        """The plan that `to_json` gave; None for anything else."""
        try:
            labels = tuple(Label(name, variants and tuple(variants)) for name, variants in content["labels"])
            return cls(**content | {"labels": labels})
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, settings: Any, labels: Labels) -> EvaluationPlan:
        """Raises UsageError for options that the labels do not allow."""
        values = labels.measure is Measure.VALUES
        if settings.wanted_precision is not None and len(labels.labels) > 2 and not values:
            raise UsageError(
                f"--wanted-precision is for two labels, and there are {len(labels.labels)}\n"
                "it would be ignored: leave it out"
            )
        return cls(
            settings.truth,
            labels.with_absence,
            settings.temperature,
            settings.wanted_precision,
            getattr(settings, "calibrates", False),
            getattr(settings, "exit", False),
            values,
        )

    @property
    def names(self) -> list[str]:
        """Of the labels."""
        return [label.name for label in self.labels]


def evaluate_output(output: str, plan: EvaluationPlan, id_name: str | None) -> RunEvaluation:
    """Evaluate a finished output, whose ids are in the column `id_name`.

    Raises UsageError if its truth column has values and none of them is a label.
    """
    target = Target.parse(output)
    pairs = read_scored_truth(
        target,
        plan.truth,
        plan.names[:2] if plan.values else plan.names,
        lambda answer: label_of(answer, plan.labels),
        temperature=plan.temperature,
        calibrated=plan.calibrated,
        exits=plan.exits,
    )
    if not len(pairs.truth) and pairs.found.values:
        raise _no_label(plan, {value: rows for value, (_, rows) in pairs.found.values.items()})
    figures = _figures(pairs, pairs.scores, plan)
    calibrated = None if pairs.calibrated is None else _figures(pairs, pairs.calibrated, plan)
    threshold = None if plan.values else _threshold(figures)
    wrong, near = ([], []) if plan.values else _named_rows(pairs, threshold)
    names = row_names(target, pairs.places[[*wrong, *near]].tolist(), id_name)
    return RunEvaluation(
        **dict(figures),
        truth=plan.truth,
        calibrated=None if calibrated is None else CalibratedFigures.of(calibrated),
        truth_values=_truth_values(pairs, plan),
        surest_wrong=[_evaluated_row(pairs, at, plan, names, id_name) for at in wrong],
        near_threshold=[_evaluated_row(pairs, at, plan, names, id_name) for at in near],
        threshold=threshold,
    )


def _named_rows(pairs: ScoredTruth, threshold: float | None) -> tuple[list[int], list[int]]:
    wrong = surest_wrong(pairs.probabilities, pairs.truth, MOST_ROWS)
    if threshold is None:
        return wrong, closest_call(pairs.probabilities, MOST_ROWS)
    return wrong, nearest(pairs.scores, threshold, MOST_ROWS)


def require_labels(window: Window, plan: EvaluationPlan, *, json_text: bool) -> None:
    """Raise UsageError if a job's first window has right answers, and none of them is a label.

    `json_text`: carried columns hold JSON, as those from JSON Lines do.
    """
    found: dict[str, int] = {}
    for value in to_python(window.carried[plan.truth]):
        known = json.loads(value) if json_text and value is not None else value
        if known is None:
            continue
        if isinstance(known, str | int | float | bool) and label_of(known, plan.labels) is not None:
            return
        text = json.dumps(known, ensure_ascii=False, default=str)
        found[text] = found.get(text, 0) + 1
    if found:
        raise _no_label(plan, found)


def with_texts(evaluation: RunEvaluation, opening: Opening) -> RunEvaluation:
    """The evaluation with the text of the rows that it names, for which the input is read again.

    A text is the end of what the model read, without the beginning that all of these rows share.
    """
    rows = [*evaluation.surest_wrong, *evaluation.near_threshold]
    named = {_name(row) for row in rows}
    builder = opening.new_builder()
    try:
        id_column = opening.settings.id_column
        prompts = find_prompts(opening.source, builder, opening.labels, named=named, id_column=id_column)
    finally:
        builder.close()
    decode = Encoder(opening.opened.tokenizer).decode
    tokens = [prompt.tokens for prompt in prompts.values()]
    shared = min((common_prefix(tokens[0], each) for each in tokens[1:]), default=0)
    texts = {name: _end_of(prompt.tokens, shared, decode) for name, prompt in prompts.items()}
    changed = {
        kind: [row.model_copy(update={"text": texts.get(_name(row))}) for row in getattr(evaluation, kind)]
        for kind in ("surest_wrong", "near_threshold")
    }
    return evaluation.model_copy(update=changed)


def _name(row: EvaluatedRow) -> int | str | None:
    return row.row if row.id is None else row.id


def _end_of(tokens: Int32Array, start: int, decode: Callable[[Any], str]) -> str:
    start = max(start, len(tokens) - _MOST_TOKENS)
    return ("…" if start else "") + decode(tokens[start:])


def _no_label(plan: EvaluationPlan, found: Mapping[str, int]) -> UsageError:
    most = sorted(found, key=lambda value: (-found[value], value))
    values = ", ".join(f"{_shortened(value)} ({found[value]:,} rows)" for value in most[:_NAMED_VALUES])
    more = f" and {len(most) - _NAMED_VALUES:,} more" if len(most) > _NAMED_VALUES else ""
    own = ", ".join(plan.names) + (", also true and false, 1 and 0" if len(plan.labels) == 2 else "")
    return UsageError(
        f"--truth {plan.truth}: none of its values is a label: {values}{more}\n"
        f"the labels are {own}: give the column those values, or leave unknown ones null"
    )


def _figures(pairs: ScoredTruth, scores: Float64Array, plan: EvaluationPlan) -> Evaluation:
    if scores.ndim == 2:
        return evaluate_labels(scores, pairs.truth, plan.names, without_truth=pairs.without_truth, errors=pairs.errors)
    return (evaluate_values if plan.values else evaluate)(
        scores,
        pairs.truth == 0,
        plan.names,
        wanted_precision=plan.wanted_precision,
        without_truth=pairs.without_truth,
        errors=pairs.errors,
    )


def _threshold(figures: Evaluation) -> float | None:
    # The threshold that is in use: the one of the wanted precision, else where the prediction changes.
    if len(figures.labels) > 2:
        return None
    wanted = figures.wanted_precision
    return wanted.reached.threshold if wanted is not None and wanted.reached is not None else _HALF


def _truth_values(pairs: ScoredTruth, plan: EvaluationPlan) -> list[TruthValue]:
    values = sorted(pairs.found.values.items(), key=lambda item: (item[1][0] is None, -item[1][1], item[0]))
    return [
        TruthValue(value=_shortened(value), label=None if number is None else plan.names[number], rows=rows)
        for value, (number, rows) in values[:_MOST_VALUES]
    ]


def _evaluated_row(
    pairs: ScoredTruth, at: int, plan: EvaluationPlan, names: Mapping[int, int | str], id_name: str | None
) -> EvaluatedRow:
    first = pairs.scores[at].tolist()
    own = first if isinstance(first, list) else [first, 1 - first]
    best, name = own.index(max(own)), names.get(int(pairs.places[at]))
    return EvaluatedRow(
        row=name if id_name is None and isinstance(name, int) else None,
        id=None if id_name is None else str(name),
        score=own[0],
        truth=plan.names[int(pairs.truth[at])],
        prediction=plan.names[best],
        probability=own[best],
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


# The number of the label that a right answer stands for; None if it is no label.
LabelOf = Callable[[Any], int | None]

_MOST_COUNTED = 1000  # different values that are no label
_UNKNOWN = -1


@dataclass(slots=True)
class TruthCounts:
    """Which values a column with right answers has."""

    # By value as JSON: its label's number, and the rows. Of very many that are no label the first ones.
    values: dict[str, tuple[int | None, int]] = field(default_factory=dict)

    def add(self, value: str, label: int | None, rows: int) -> None:
        if label is not None or value in self.values or len(self.values) < _MOST_COUNTED:
            self.values[value] = label, self.values.get(value, (label, 0))[1] + rows


@dataclass(frozen=True, slots=True)
class ScoredTruth:
    """The rows of an output that have a score and a known right answer."""

    # The probability of the first label, or with more than two labels of every label [rows] or [rows, labels].
    scores: Float64Array
    calibrated: Float64Array | None  # the same after the calibration; None without one
    truth: Int64Array  # the number of the right label [rows]
    places: Int64Array  # which rows of the output these are, counted from 0 [rows]
    without_truth: int  # rows that have a score, but no right answer that is a label
    errors: int  # rows without a score
    found: TruthCounts  # of all rows with a score

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


def _floats(column: pa.ChunkedArray, known: np.ndarray[Any, np.dtype[np.bool_]], null: float = 0.0) -> Float64Array:
    # The numbers of known rows; of labels they may come as JSON text. JSON has no infinity: it is null there.
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
    # The number of each row's right label, _UNKNOWN without one [rows]; the values of scored rows are counted.
    try:
        encoded = column.combine_chunks().dictionary_encode()
    except pa.ArrowNotImplementedError:  # lists and structs are no labels
        counts.add(f"a value of type {column.type}", None, int(scored.sum()) - column.null_count)
        return np.full(len(column), _UNKNOWN, np.int64)
    values = list(_values(encoded.dictionary, json_text=json_text))
    texts = json_texts(pa.chunked_array([encoded.dictionary]), json_text=json_text)
    numbers = [label_of(value) for value in values]
    at = encoded.indices.cast(pa.int64()).fill_null(len(values)).to_numpy(zero_copy_only=False)
    for place, rows in enumerate(np.bincount(at[scored], minlength=len(values))[: len(values)].tolist()):
        if rows and values[place] is not None:
            counts.add(texts[place], numbers[place], rows)
    table = np.array([*(_UNKNOWN if number is None else number for number in numbers), _UNKNOWN], np.int64)
    labels: Int64Array = table[at]
    return labels


def _values(dictionary: pa.Array, *, json_text: bool) -> Iterator[Any]:
    # Python's values; what is neither text nor a number nor true or false is None.
    for value in to_python(dictionary):
        known = json.loads(value) if json_text and value is not None else value
        yield known if isinstance(known, str | int | float | bool) else None

"""The evaluation of an output whose right answers are in one of its kept columns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from prefillcli.data.output.scored_truth import ScoredTruth, read_scored_truth, row_names
from prefillcli.data.output.target import Target
from prefillcli.data.prompts.encoding import Encoder
from prefillcli.data.prompts.labels import Label, Labels, label_of
from prefillcli.data.rows import Float64Array, Int32Array, Window
from prefillcli.data.search import find_prompts
from prefillcli.data.values import to_python
from prefillcli.errors import UsageError
from prefillcli.features.evaluation.report import CalibratedFigures, EvaluatedRow, RunEvaluation, TruthValue
from prefillcli.jobs.inputs import Opening
from prefillcli.options.commands import ScoreSettings
from prefillcli.plan.trie import common_prefix
from prefillcli.stats.evaluation import (
    Evaluation,
    closest_call,
    evaluate,
    evaluate_labels,
    evaluate_values,
    nearest,
    surest_wrong,
)
from prefillcli.stats.probabilities import Measure

MOST_ROWS = 20
"""Rows of each kind that are named."""
_MOST_VALUES = 20
_NAMED_VALUES = 5  # in a message
_LONGEST_VALUE = 40  # characters
_MOST_TOKENS = 400  # of a row's text
_HALF = 0.5  # where the prediction of two labels changes


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """How the scores of a job are evaluated."""

    truth: str
    """The kept column with the right answers."""
    labels: tuple[Label, ...]
    temperature: float
    wanted_precision: float | None
    calibrated: bool
    """Whether the output has calibrated probabilities."""
    exits: bool = False
    """Whether its rows may have left early."""
    values: bool = False
    """Whether its scores are values, of which the first label's rank the rows."""

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
    def of(cls, settings: ScoreSettings, labels: Labels) -> EvaluationPlan:
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
    """The rows with the surest wrong predictions, and the closest calls."""
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
    """The threshold that is in use: the one of the wanted precision, else where the prediction changes."""
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

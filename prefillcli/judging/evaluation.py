"""The evaluation of an output whose right answers are in one of its kept columns, and its part of a run's report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field, RootModel

from prefillcli.core.roles import Judge
from prefillcli.core.windows import find_prompts
from prefillcli.errors import UsageError
from prefillcli.judging.truth import (
    JudgedAnswers,
    Mistakes,
    TruthPlan,
    as_json_text,
    carried_values,
    is_blank,
    judged_answers,
)
from prefillcli.options.judging import EvaluationOptions
from prefillcli.plan.trie import common_prefix
from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.questions import Label
from prefillcli.report.finding import Finding
from prefillcli.report.section import (
    Box,
    Part,
    Plot,
    Section,
    TableRows,
    Tick,
    counted,
    percent_interval,
    percent_or_nothing,
    visible,
)
from prefillcli.rows.input.selection import BATCH_ROWS
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import ROW_COLUMN
from prefillcli.rows.output.destination import Destination
from prefillcli.rows.values import id_texts
from prefillcli.stats.arrays import Float64Array, Int32Array
from prefillcli.stats.evaluation import (
    Evaluation,
    NumberFigures,
    ReliabilityBin,
    ThresholdFigures,
    closest_call,
    evaluate,
    evaluate_choices,
    evaluate_labels,
    evaluate_ordered,
    evaluate_values,
    nearest,
    surest_wrong,
)
from prefillcli.stats.intervals import Estimate
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs, OpenRows
    from prefillcli.core.run import Run
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.output.schema import OutputSchema


# The evaluation of a run, as `run.json` holds it: the figures, the values of the truth column, and rows to look at.


class TruthValue(BaseModel):
    """A value of the truth column, and the label that it was taken for."""

    value: str  # as JSON; untrusted
    label: str | None  # None: for no label
    rows: int


class EvaluatedRow(BaseModel):
    """A row with a right answer. Id and text are untrusted."""

    row: int | None  # None where rows have ids
    id: str | None
    score: float
    truth: str  # a label, or the number of one of its choices
    prediction: str
    probability: float  # of the prediction
    text: str | None = None  # the end of the text that the model read, where it was asked for


class CalibratedFigures(BaseModel):
    """The figures that a calibration changes, of the calibrated probabilities."""

    accuracy: Estimate
    brier: Estimate
    log_loss: Estimate
    calibration_error: Estimate
    calibration_error_equal_mass: Estimate
    reliability: list[ReliabilityBin]

    @classmethod
    def of(cls, found: Evaluation) -> CalibratedFigures:
        """Return the figures of an evaluation of calibrated probabilities."""
        return cls(**{name: getattr(found, name) for name in cls.model_fields})


class RunEvaluation(Evaluation):
    """An evaluation, and rows that illustrate it."""

    truth: str  # the column
    calibrated: CalibratedFigures | None = None  # with --calibration or --calibrate-with; all else is of the scores
    truth_values: list[TruthValue] = Field(default_factory=list)  # the most frequent ones
    mistakes: Mistakes | None = None  # right answers that are no label
    surest_wrong: list[EvaluatedRow] = Field(default_factory=list)  # the most probable predictions that are wrong
    near_threshold: list[EvaluatedRow] = Field(default_factory=list)  # the closest calls
    threshold: float | None = None  # the threshold that those are near; None with more than two labels


class Evaluations(Finding, RootModel[dict[str, RunEvaluation]]):
    """The evaluations of a job, by question."""

    key: ClassVar[str] = "evaluations"
    place: ClassVar[int] = 13

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return a section for each question."""
        found = [_section_of(own, report.told_apart(name), report) for name, own in self.root.items()]
        if found:
            found[0].summary = {"evaluations": {name: summary_of(own) for name, own in self.root.items()}}
        return found


MOST_ROWS = 20  # rows of each kind that are named
_MOST_VALUES = 20  # of the truth column, in the report
_LONGEST_VALUE = 40  # characters
_MOST_TOKENS = 400  # of a row's text
_HALF = 0.5  # where the prediction of two labels changes


@dataclass(frozen=True, slots=True)
class EvaluationPlan(TruthPlan):
    """The way to evaluate the answers to a question."""

    between: ClassVar[bool] = True

    wanted_precision: float | None = None

    @classmethod
    def of_json(cls, content: Any) -> EvaluationPlan | None:
        """Return the plan that `to_json` gave; None for anything else."""
        try:
            labels = tuple(Label(own, spelt and tuple(spelt), *rest) for own, spelt, *rest in content["labels"])
            return cls(**content | {"labels": labels, "own": AnswerColumns.of_json(content["own"])})
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"own": self.own.to_json()}

    @classmethod
    def of(cls, options: EvaluationOptions, labels: Labels, own: AnswerColumns, truth: str) -> EvaluationPlan:
        """Return the plan for the answers in these columns. Raises UsageError for options that the labels do not
        allow."""
        values, chosen = own.measure is Measure.VALUES, own.measure is Measure.CHOICES
        if options.wanted_precision is not None and (chosen or (len(labels.labels) > 2 and not values)):
            what = "each row has its own choices" if chosen else f"there are {len(labels.labels)}"
            what += f" for question {own.name}" if own.name else ""
            raise UsageError(f"--wanted-precision is for two labels, and {what}\nit would be ignored: leave it out")
        return cls(
            own,
            truth,
            () if chosen else labels.with_absence,
            labels.columns[0] if chosen else None,
            options.wanted_precision,
        )


def evaluate_output(output: str, plan: EvaluationPlan, id_name: str | None) -> RunEvaluation:
    """Evaluate a finished output, whose ids are in the column `id_name`.

    Raises UsageError if its truth column has values and none of them is a label.
    """
    destination = Destination.parse(output)
    pairs = judged_answers(destination, plan)
    mistakes = pairs.mistakes
    if mistakes is not None and not len(pairs.truth) and not pairs.said.size:
        raise plan.no_answer(mistakes)
    plan.tell(mistakes)
    figures = _figures(pairs, pairs.scores, plan)
    calibrated = None if pairs.calibrated is None else _figures(pairs, pairs.calibrated, plan)
    threshold = None if plan.values else _threshold(figures)
    wrong, near = ([], []) if plan.values else _named_rows(pairs, threshold)
    names = row_names(destination, pairs.places[[*wrong, *near]].tolist(), id_name)
    if plan.numbers:
        figures = figures.model_copy(update={"ordered": evaluate_ordered(*pairs.said)})
    return RunEvaluation(
        **dict(figures),
        truth=plan.truth,
        calibrated=None if calibrated is None else CalibratedFigures.of(calibrated),
        truth_values=_truth_values(pairs, plan),
        mistakes=mistakes,
        surest_wrong=[_evaluated_row(pairs, at, plan, names, id_name) for at in wrong],
        near_threshold=[_evaluated_row(pairs, at, plan, names, id_name) for at in near],
        threshold=threshold,
    )


def _named_rows(pairs: JudgedAnswers, threshold: float | None) -> tuple[list[int], list[int]]:
    wrong = surest_wrong(pairs.probabilities, pairs.truth, MOST_ROWS)
    if threshold is None:
        return wrong, closest_call(pairs.probabilities, MOST_ROWS)
    return wrong, nearest(pairs.scores, threshold, MOST_ROWS)


_LOOKED_AT = 10_000  # rows


def require_labels(source: Source, plan: EvaluationPlan) -> None:
    """Raise UsageError if the first rows of a job have right answers, and none of them is a label."""
    found: dict[str, int] = {}
    json_text, seen = source.kind == "jsonl", 0  # columns from JSON Lines hold JSON
    for batch in source.batches(min(_LOOKED_AT, BATCH_ROWS)):
        choices = carried_values(batch.carried[plan.choices], json_text=json_text) if plan.choices else repeat(None)
        for known, own in zip(carried_values(batch.carried[plan.truth], json_text=json_text), choices, strict=False):
            if is_blank(known):
                continue
            if plan.knows(known, own):
                return
            text = as_json_text(known)
            found[text] = found.get(text, 0) + 1
        seen += len(batch.rows)
        if seen >= _LOOKED_AT:
            break
    if (mistakes := plan.mistakes(found)) is not None:
        raise plan.no_answer(mistakes)


def with_texts(evaluation: RunEvaluation, inputs: Inputs, part: int) -> RunEvaluation:
    """Return the evaluation with the text of the rows that it names: their prompts with this number. The input is read
    again for these.

    A text is the end of the row's prompt, without the beginning that all of these rows share.
    """
    rows = [*evaluation.surest_wrong, *evaluation.near_threshold]
    named = {_name(row) for row in rows}
    source, builder = inputs.again()
    try:
        id_column = inputs.settings.ids.id_column
        prompts = find_prompts(source, builder, inputs.labels, named=named, id_column=id_column, part=part)
    finally:
        builder.close()
    decode = Encoder(inputs.opened.tokenizer).decode
    tokens = [prompt.whole for prompt in prompts.values()]
    shared = min((common_prefix(tokens[0], each) for each in tokens[1:]), default=0)
    texts = {name: _end_of(prompt.whole, shared, decode) for name, prompt in prompts.items()}
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


def _figures(pairs: JudgedAnswers, scores: Float64Array, plan: EvaluationPlan) -> Evaluation:
    others: dict[str, Any] = {"without_truth": pairs.without_truth, "errors": pairs.errors}
    if plan.choices:
        divided = "label_scores" in plan.own.groups
        return evaluate_choices(scores, pairs.truth, pairs.logs, divided=divided, **others)
    if scores.ndim == 2:
        return evaluate_labels(scores, pairs.truth, plan.names, **others)
    return (evaluate_values if plan.values else evaluate)(
        scores,
        pairs.truth == 0,
        plan.names,
        wanted_precision=plan.wanted_precision,
        **others,
    )


def _threshold(figures: Evaluation) -> float | None:
    # The threshold in use: the one for the wanted precision, else the one where the prediction changes.
    if len(figures.labels) != 2:
        return None
    wanted = figures.wanted_precision
    return wanted.reached.threshold if wanted is not None and wanted.reached is not None else _HALF


def _truth_values(pairs: JudgedAnswers, plan: EvaluationPlan) -> list[TruthValue]:
    values = sorted(pairs.found.values.items(), key=lambda item: (item[1][0] is None, -item[1][1], item[0]))
    return [
        TruthValue(value=_shortened(value), label=None if number is None else plan.names[number], rows=rows)
        for value, (number, rows) in values[:_MOST_VALUES]
    ]


def _evaluated_row(
    pairs: JudgedAnswers, at: int, plan: EvaluationPlan, names: Mapping[int, int | str], id_name: str | None
) -> EvaluatedRow:
    first = pairs.scores[at].tolist()
    own = first if isinstance(first, list) else [first, 1 - first]
    best, name = own.index(max(own)), names.get(int(pairs.places[at]))
    return EvaluatedRow(
        row=name if id_name is None and isinstance(name, int) else None,
        id=None if id_name is None else str(name),
        score=own[0],
        truth=plan.name_of(int(pairs.truth[at])),
        prediction=plan.name_of(best),
        probability=own[best],
    )


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def row_names(destination: Destination, places: Sequence[int], id_name: str | None) -> dict[int, int | str]:
    """Return the row number, or the id as text, of rows of an output by their places in it."""
    found: dict[int, int | str] = {}
    wanted, rows = np.array(sorted(set(places)), np.int64), 0
    for table in destination.tables([id_name or ROW_COLUMN]):
        inside = wanted[(wanted >= rows) & (wanted < rows + len(table))]
        column = table[id_name or ROW_COLUMN].take(pa.array(inside - rows))  # a number is a text in JSON Lines
        values = (
            id_texts(column, json_text=destination.file_format.json_text)
            if id_name
            else column.cast(pa.int64()).to_pylist()
        )
        found |= dict(zip(inside.tolist(), values, strict=True))
        rows += len(table)
        if len(wanted) == 0 or rows > wanted[-1]:
            break
    return found


# The evaluation of a run in a few lines, for the terminal and the page.


def evaluation_lines(found: RunEvaluation) -> Iterator[tuple[str, str]]:
    """Yield the lines that an evaluation adds to the table of a run: name and text."""
    yield "evaluation", _row_text(found)
    if found.ordered is not None:
        for name, own in (("mean", found.ordered.mean), ("likeliest label", found.ordered.likeliest)):
            ranks, error = (_with_interval(each, found.confidence) for each in (own.spearman, own.mean_error))
            yield f"{name}, as a number", f"rank correlation {ranks}, mean error {error}"
    if not found.rows:
        return
    yield "accuracy", f"{_with_interval(found.accuracy, found.confidence, percent=True)}{_beside(found)}"
    if (choices := found.choices) is not None:
        yield "chance", f"{100 * (choices.chance or 0):.1f} %, of guesses among each row's choices"
        if choices.accuracy_whole is not None:
            whole = _with_interval(choices.accuracy_whole, found.confidence, percent=True)
            yield "accuracy, undivided", f"{whole}, by the log-probabilities of whole choices"
        yield "right choice", f"log-probability {_with_interval(choices.logprob, found.confidence)} on average"
    area = _with_interval(found.auc, found.confidence)
    if choices is None:
        area += ", below 0.5: worse than chance" if found.auc.value is not None and found.auc.value < 0.5 else ""
        yield "AUC", f"mean over the labels {area}" if len(found.labels) > 2 and found.auc.value is not None else area
    precision = "mean average precision" if len(found.labels) > 2 else "average precision"
    if found.average_precision.value is not None:
        yield precision, _with_interval(found.average_precision, found.confidence)
    yield "Brier score", _with_interval(found.brier, found.confidence)
    yield "log loss", _with_interval(found.log_loss, found.confidence)
    yield (
        "calibration",
        f"error {_with_interval(found.calibration_error, found.confidence)}, {found.bins} bins of equal width",
    )
    if (calibrated := found.calibrated) is not None:
        error = _with_interval(calibrated.calibration_error, found.confidence)
        others = f"Brier score {calibrated.brier.value:.3f}, accuracy {100 * (calibrated.accuracy.value or 0):.1f} %"
        yield "calibrated", f"error {error}, {others}"
    if found.best_f1 is not None:
        yield "best F1", f"{found.best_f1.f1:.3f} {_at(found.best_f1)}"
    if found.wanted_precision is not None:
        wanted = found.wanted_precision
        text = f"not reached: {wanted.reason}" if wanted.reached is None else _at(wanted.reached)
        yield f"precision {wanted.wanted:g}", text
    yield from _truth_texts(found)


def _beside(found: RunEvaluation) -> str:
    # The accuracy of always giving the commonest right answer.
    if found.commonest is None or found.accuracy.value is None:
        return ""
    answer, accuracy = found.commonest
    better = ", which is better" if accuracy > found.accuracy.value else ""
    return f"; always {visible(answer, line=True)}: {100 * accuracy:.1f} %{better}"


def _row_text(found: RunEvaluation) -> str:
    text = f"{counted(found.rows, 'row')} with a right answer"
    others = [(found.without_truth, "without one"), (found.errors, "without a score")]
    return ", ".join([text, *(f"{number:,} {what}" for number, what in others if number)])


def _truth_texts(found: RunEvaluation) -> Iterator[tuple[str, str]]:
    # The labels that values of the column were taken for, where these do not look alike, and the values of none.
    other = [each for each in found.truth_values if each.label is not None and each.value.strip('"') != each.label]
    if other:
        texts = [
            f"{visible(each.value, line=True)} is {visible(each.label or '', line=True)} ({each.rows:,})"
            for each in other[:4]
        ]
        yield "truth", ", ".join([*texts, *(["..."] if len(other) > len(texts) else [])])
    if found.mistakes is not None:
        none = "no label" if found.choices is None else "no choice"
        yield "right answers", f"{counted(found.mistakes.rows, 'row')} with {none}: {found.mistakes.text}"


def _at(figures: ThresholdFigures) -> str:
    return (
        f"at scores from {figures.threshold:.4g}: precision {100 * figures.precision:.1f} %, "
        f"recall {100 * figures.recall:.1f} %, "
        f"{counted(figures.rows, 'row')}"
    )


def _with_interval(estimate: Estimate, confidence: float, *, percent: bool = False) -> str:
    if estimate.value is None:
        return f"none: {visible(estimate.reason or '', line=True)}"
    value = f"{100 * estimate.value:.1f} %" if percent else f"{estimate.value:.3f}"
    if estimate.interval is None:
        return value
    between = " to " if estimate.interval[0] < 0 else "-"
    bounds = (
        percent_interval(estimate.interval) if percent else between.join(f"{end:.3f}" for end in estimate.interval)
    )
    return f"{value} ({100 * confidence:g} % interval {bounds})"


# Charts and tables of an evaluation, for the page of a run.


MOST_LABELS = 12  # labels whose confusion fits a page
_SHARES = [Tick(100 * at, f"{100 * at:g} %") for at in (0.0, 0.25, 0.5, 0.75, 1.0)]
_DIAGONAL = "0,100 100,0"


def _section_of(found: RunEvaluation, question: str, report: RunReport) -> Section:
    """Return the evaluation of the answers to a question in terminal and page, with its name if it has one."""
    labels = [
        [each.label, f"{each.rows:,}",
         *(percent_or_nothing(of.value) for of in (each.precision, each.recall)),
         *(_number(value) for value in (each.f1, each.auc.value, each.average_precision))]
        for each in found.by_label if each.rows
    ]  # fmt: skip
    header = ["label", "rows", "precision", "recall", "F1", "AUC", "average precision"]
    near = "The odds between the two likeliest labels are at most 3 to 1."
    if found.threshold is not None:
        near = f"The threshold is {found.threshold:.4g}; odds differ from its odds by a factor of 3 at most."
    return Section(
        title=f"Evaluation of {question}" if question else "Evaluation",
        lines=[(f"{question} {name}".lstrip(), text) for name, text in evaluation_lines(found)],
        charts=list(_charts(found)),
        parts=[
            Part(title="Labels as numbers", table=_ordered_table(found)),
            Part(title="Confusion", table=_confusion(found)),
            Part(title="Each label against the rest", table=[header, *labels] if labels else None),
            Part(title="Surest and wrong", table=_rows_table(found.surest_wrong, report)),
            Part(
                title="Near the threshold",
                above=near,
                table=_rows_table(found.near_threshold, report),
                text="" if found.near_threshold or found.brier.value is None else "No row is near.",
            ),
        ],
    )


def summary_of(found: RunEvaluation) -> dict[str, Any]:
    """Return the figures of the last line on stdout."""
    said: dict[str, Any] = {"rows": found.rows, "accuracy": found.accuracy.value, "auc": found.auc.value}
    said |= {} if found.commonest is None else {"commonest": found.commonest[1]}
    if found.ordered is not None:
        own = found.ordered.mean
        said |= {"rank_correlation": own.spearman.value, "mean_error": own.mean_error.value}
    return said


def _ordered_table(found: RunEvaluation) -> TableRows | None:
    if found.ordered is None:
        return None
    header = ["answer", "rank correlation", "correlation", "mean error", "root mean square error"]
    return [header] + [
        [name, *(_with_interval(each, found.confidence) for each in _numbers_of(own))]
        for name, own in (("mean", found.ordered.mean), ("likeliest label", found.ordered.likeliest))
    ]


def _numbers_of(figures: NumberFigures) -> list[Estimate]:
    return [figures.spearman, figures.pearson, figures.mean_error, figures.root_mean_square_error]


def _rows_table(rows: list[EvaluatedRow], report: RunReport) -> TableRows | None:
    if not rows:
        return None
    table = [["row", "score", "right answer", "prediction", "probability"]]
    for row in rows:
        probability = f"{100 * row.probability:.1f} %"
        table.append([report.name_cell(row.row, row.id), f"{row.score:.4f}", row.truth, row.prediction, probability])
        if row.text is not None:
            table.append([row.text])
    return table


def reliability_plot(bins: list[ReliabilityBin], happens: str) -> Plot | None:
    """Return bars as high as the share of rows in which the event `happens`, beside a diagonal; None without bins."""
    if not bins:
        return None
    boxes = [
        Box(
            x=100 * each.low,
            y=100 - max(100 * each.share, 0.8),
            width=max(100 * (each.high - each.low), 0.6) * 0.92,
            height=max(100 * each.share, 0.8),
            series=0,
            title=f"{each.low:.2f} to {each.high:.2f}: {counted(each.rows, 'row')}, "
            f"predicted {each.mean_probability:.1%}, "
            f"{happens} {each.share:.1%}",
        )
        for each in bins
    ]
    rows = f"{sum(each.rows for each in bins):,} rows"
    return Plot(
        x=_SHARES,
        y=_SHARES,
        series=[(happens, rows), ("calibrated", "")],
        boxes=boxes,
        lines=[_DIAGONAL],
        first_line=1,
    )


def curve_plot(x: list[float], y: list[float], series: list[tuple[str, str]], beside: str) -> Plot:
    """Return a curve of shares, with a line beside it as SVG's points."""
    points = " ".join(f"{100 * across:.2f},{100 - 100 * up:.2f}" for across, up in zip(x, y, strict=True))
    return Plot(x=_SHARES, y=_SHARES, series=series, lines=[points, beside])


def _charts(found: RunEvaluation) -> Iterator[Part]:
    several = len(found.labels) != 2
    what = "predictions are right" if several else f"{found.labels[0]} is right" if found.labels else ""
    axes = "Across: the probability by the scores. Up: how often it is so."
    yield Part(title="Reliability", plot=reliability_plot(found.reliability, what), note=axes)
    if found.calibrated is not None:
        plot = reliability_plot(found.calibrated.reliability, what)
        yield Part(title="Reliability, calibrated", plot=plot, note="The same of the calibrated probabilities.")
    if found.roc is None:
        return
    area = [("ROC", f"AUC {_number(found.auc.value)}"), ("chance", "")]
    plot = curve_plot(found.roc.false_positive_rate, found.roc.true_positive_rate, area, _DIAGONAL)
    first, second = found.labels[:2]
    note = f"Across: the share of {second} rows that are taken for {first}. Up: the share of {first} rows found."
    yield Part(title="ROC", plot=plot, note=note)
    if found.precision_recall is not None:
        curve, height = found.precision_recall, 100 - 100 * _positives(found) / found.rows
        area = [("precision", f"average {_number(found.average_precision.value)}"), ("chance", "")]
        plot = curve_plot(curve.recall, curve.precision, area, f"0,{height:.2f} 100,{height:.2f}")
        note = (
            f"Across: recall, the share of {first} rows that are found. Up: precision, the share of the rows found "
            "that are right."
        )
        yield Part(title="Precision and recall", plot=plot, note=note)


def _positives(found: RunEvaluation) -> float:
    # Rows whose right answer is the first label.
    if found.by_label or found.best_f1 is None:
        return found.by_label[0].rows if found.by_label else 0
    return found.best_f1.rows * found.best_f1.precision / found.best_f1.recall


def _confusion(found: RunEvaluation) -> TableRows | None:
    # None without rows, for values, and for more labels than fit.
    if not found.rows or not found.confusion or len(found.labels) > MOST_LABELS:
        return None
    header = ["right answer", *(f"predicted {label}" for label in found.labels), "rows"]
    rows = [
        [label, *(f"{count:,}" for count in counts), f"{sum(counts):,}"]
        for label, counts in zip(found.labels, found.confusion, strict=True)
    ]
    return [header, *rows]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


PLAN = "evaluation"  # the key in a shard's ledger of the plan of its evaluation, which `prefill merge` reads


class Evaluating(Judge):
    """The evaluation of a job against right answers in columns of the input."""

    def __init__(self, options: EvaluationOptions, truths: Mapping[str, str], choices: str | None) -> None:
        self._options = options
        self.carried = [*truths.values(), *([] if choices is None else [choices])]
        self._plans: dict[int, EvaluationPlan] = {}  # of each question with right answers, by its number

    def check(self, rows: OpenRows, labels: Labels, schema: OutputSchema) -> None:
        for number, own in enumerate(schema.questions):
            if own.truth is not None:
                self._plans[number] = EvaluationPlan.of(self._options, labels.asked[number], own, own.truth)
        for plan in self._plans.values():
            require_labels(rows.source, plan)

    def shard_plan(self) -> Mapping[str, Any]:
        """Return what `merged` needs to know about a shard's job."""
        return {PLAN: [plan.to_json() for plan in self._plans.values()]}

    def ended(self, run: Run) -> None:
        with run.clock.phase("evaluate"), run.stop.at_once():
            evaluations = {}
            for number, plan in self._plans.items():
                found = evaluate_output(run.sink.location, plan, run.settings.ids.id_column)
                found = with_texts(found, run.inputs, number) if self._options.show_text else found
                evaluations[plan.own.key] = found
            run.report.add(Evaluations(evaluations))

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        plans = filter(None, map(EvaluationPlan.of_json, manifest.settled.get(PLAN) or ()))
        found = {plan.own.key: evaluate_output(output, plan, manifest.job.id_name) for plan in plans}
        report.add(Evaluations(found) if found else None)

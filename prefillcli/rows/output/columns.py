"""The columns of an output: the id, those carried from the input, and those that scoring adds.

The kinds of its values decide the type of a column carried from JSON Lines: b true or false, i integer, f other
number, s string, j anything else (arrays, objects, integers beyond 64 bits). A column of one kind gets its type; i and
f together are float64, unless they are ids; any other mix is text, with strings as they are and everything else as
JSON.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from prefillcli.errors import UsageError
from prefillcli.plan.behind import LabelSet
from prefillcli.rows.output import ANSWER, batches
from prefillcli.rows.output.answers import CALIBRATED, PROBABILITIES, AnswerColumns
from prefillcli.rows.records import (
    SKIPPED_CODES,
    ErrorCode,
    Prompt,
    ReadTokens,
    RowError,
    ScoredRow,
    TokenText,
    Window,
)
from prefillcli.rows.values import text_of, to_python
from prefillcli.stats.acceptance import doubtful
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.confidence import choice_confidence, score_confidence
from prefillcli.stats.labels import Measure, label_mass, label_scores, mean_log_shares

ROW = "__row"  # the row number in a part
DIGEST = "__digest"  # in a part: the digest of a row that has a score (`Prompt.digest`)
TAKEN_OVER = "__taken_over"  # in a part: whether the row's results are those of an earlier output
SCORE_BINS = 50  # bins of equal width from 0 to 1
# Lower edges of the bins of prompt lengths in tokens: whole numbers, up to 16 an octave; the last bin is open.
LENGTH_EDGES = tuple(sorted({round(2 ** (step / 16)) for step in range(24 * 16 + 1)}))
TO_THE_END = "full"  # the name of rows that went through all layers, among those by exit layer
MOST = 20  # rows of each kind that are named
LEAST_SURE = 10  # rows that are named for each question
CLOSE_ODDS = 3.0  # odds between the two likeliest answers, up to which a call is a close one
_LONGEST = 200  # characters of an id or a detail


# The groups of columns that an output may have beside those of every output: the scores of an audit, calibrated
# probabilities, where rows left the model early, which adapter read each row, texts written after rows, the
# contributions of the sections of prompts, the log-probabilities of single tokens, the means of ordered labels,
# whether the order of two values decided, each label's score where log-probabilities do not determine it, the answers
# in doubt, and those of an OpenAI batch output, which has no others.
Group = Literal[
    "audit",
    "calibrated",
    "exits",
    "adapters",
    "rationales",
    "evidence",
    "token_logprobs",
    "ordered",
    "orders",
    "label_scores",
    "review",
    "openai",
]
Groups = frozenset[Group]


ROW_COLUMN = "row"  # the column with the row number, in an output without ids

# Calibrated probabilities of label log-probabilities, both [rows, labels].
Probabilities = Callable[[Float64Array], Float64Array]
ObjectArray = npt.NDArray[np.object_]
_KINDS = {
    Measure.SHARES: "label log-probabilities",
    Measure.CHANCES: "label log-probabilities",
    Measure.VALUES: "label values",
    Measure.CHOICES: "log-probabilities of choices",
    Measure.DECISIONS: "log-probabilities of a question's options",
    Measure.LIKELIHOOD: "log-probability",
    Measure.TOKENS: "log-probabilities of the likeliest tokens",
}


@dataclass(frozen=True, slots=True)
class ResultRows:
    """Rows of a window that have a score or an error, ascending by row: the data of their columns."""

    numbers: Int64Array  # row numbers [rows]
    prompts: list[Prompt | None]  # None where the row has no prompt; the first of several [rows]
    prompt_tokens: list[int | None]  # of all its prompts [rows]
    errors: list[RowError | None]  # None where the row has a score [rows]
    scored: list[ScoredRow]  # the engine's answers to the rows that have a score [scored]
    places: Int64Array  # where these are among all rows [scored]
    # Log-probability of every label over the whole vocabulary, or over all classes; of rows that left early, among the
    # labels alone. For a head that gives values, the value of every label [scored, labels]. Where rows have their own
    # labels, -inf fills the places after them.
    logprobs: Float64Array
    # Score of every label: mostly its probability among the labels, after the temperature [scored, labels].
    scores: Float64Array
    # `scores` as the whole prompt and all layers give them, for rows of the audit [scored].
    audited: list[Float64Array | None]
    schema: OutputSchema
    # `logprobs` as `--label-norm` divides them: calibrated probabilities follow from these [scored, labels].
    divided: Float64Array
    # Calibrated probability of every label [scored, labels]; None where nothing is calibrated.
    calibrated: Float64Array | None = None
    # The same rows with the answers to each of the schema's questions.
    questions: list[ResultRows] = field(default_factory=list)
    # Whether the orders of a question's two values give different predictions [scored].
    order_decided: npt.NDArray[np.bool_] | None = None
    # Where rows ask their own questions, the probabilities of the options of each [scored].
    decisions: list[list[Float64Array]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        window: Window,
        results: Sequence[ScoredRow],
        errors: dict[int, RowError],
        schema: OutputSchema,
        temperature: float,
        probabilities: Mapping[str, Probabilities] = {},
    ) -> ResultRows:
        """Make them of some rows of a window. A result that is not a finite number becomes an error, and so does one
        whose conditional question failed although it should be asked. `probabilities` are those of the questions of
        these names; without several, its name is empty."""
        results = sorted(results, key=lambda scored: scored.row)
        wrong = {
            each.row: RowError(
                ErrorCode.NONFINITE_SCORE, f"{_KINDS[own.measure]} {answer.logprobs.tolist()}"
            ).of_question(own.name)
            for each in results
            for own, answer in schema.answered(each)
            if len(answer.logprobs) and not np.isfinite(label_scores(answer.logprobs, temperature, own.measure)[0])
        }
        errors = errors | wrong
        results = [each for each in results if each.row not in wrong]
        numbers = np.array(sorted([each.row for each in results] + list(errors)), np.int64)
        prompts: dict[int, list[Prompt]] = {}
        for prompt in window.prompts:
            prompts.setdefault(prompt.row, []).append(prompt)

        def made(schema: OutputSchema, results: Sequence[ScoredRow], part: int) -> ResultRows:
            own = {prompt.row: prompt for prompt in window.prompts if prompt.part == part}
            most = max([len(schema.labels), 1, *(len(each.logprobs) for each in results)])
            logprobs = np.full((len(results), most), -np.inf)
            divided = logprobs.copy()
            for row, each in enumerate(results):
                count, prompt = len(each.logprobs), own.get(each.row)
                divided[row, :count] = each.logprobs
                logprobs[row, :count] = each.logprobs if prompt is None else prompt.labels.whole(each.logprobs)
            return cls(
                numbers=numbers,
                prompts=[own.get(row) for row in numbers.tolist()],
                prompt_tokens=[
                    sum(len(each.tokens) for each in prompts.get(row, ())) or None for row in numbers.tolist()
                ],
                errors=[errors.get(row) for row in numbers.tolist()],
                scored=list(results),
                places=np.searchsorted(numbers, np.array([each.row for each in results], np.int64)),
                logprobs=logprobs,
                scores=label_scores(divided, temperature, schema.measure),
                audited=[
                    None if each.audit is None else label_scores(each.audit, temperature, schema.measure)
                    for each in results
                ],
                schema=schema,
                divided=divided,
            )

        rows = made(schema, results, 0).calibrated_by(probabilities)
        if schema.measure is Measure.DECISIONS:
            decisions = [_decided(prompts[each.row], each.answers, temperature) for each in results]
            scores = np.array([[own[0][0]] for own in decisions]).reshape(-1, 1)
            rows = replace(rows, decisions=decisions, scores=scores)
        failed: dict[int, RowError] = {}
        for number, own in enumerate(schema.questions):
            chosen = set(numbers.tolist()) if own.when is None else own.when(rows)
            for each in (each for each in results if each.row in chosen):
                both = [each.answers[part] for part in (number, *own.others)]
                if (why := next((one.error for one in both if one.error is not None), None)) is not None:
                    failed.setdefault(each.row, why)
            answered = [
                each.answers
                for each in results
                if each.row in chosen - failed.keys() and len(each.answers[number].logprobs)
            ]
            found = made(own, [each[number] for each in answered], number)
            if own.others:
                found = found.over_orders([made(own, [each[at] for each in answered], at) for at in own.others])
            rows.questions.append(found.calibrated_by(probabilities))
        if failed:
            left = [each for each in results if each.row not in failed]
            return cls.of(window, left, errors | failed, schema, temperature, probabilities)
        return replace(rows, scores=rows.questions[0].scores) if rows.questions else rows

    def over_orders(self, others: Sequence[ResultRows]) -> ResultRows:
        """Return the means of these probabilities and those of the same question in other orders of its values or
        options."""
        every = [self, *others]
        audited: list[Float64Array | None] = []
        for at in range(len(self.scored)):
            full = [each.audited[at] for each in every]
            # A prompt that is not compressed has its scores already.
            own = [each.scores[at] if found is None else found for each, found in zip(every, full, strict=True)]
            audited.append(None if all(found is None for found in full) else np.mean(own, axis=0))
        said = np.stack([each.scores.argmax(axis=-1) for each in every])
        return replace(
            self,
            audited=audited,
            logprobs=np.logaddexp.reduce([each.logprobs for each in every]) - math.log(len(every)),
            divided=mean_log_shares([each.divided for each in every]),
            scores=np.mean([each.scores for each in every], axis=0),
            order_decided=(said != said[0]).any(axis=0),
        )

    def calibrated_by(self, probabilities: Mapping[str, Probabilities]) -> ResultRows:
        """Return them with the calibrated probabilities of their question, if it has some."""
        own = probabilities.get(self.schema.name)
        return self if own is None else replace(self, calibrated=own(self.divided))

    def arrays(self) -> list[pa.Array]:
        """Return the columns of `OutputSchema.results` for these rows."""
        arrays = []
        for column in self.schema.columns:
            values = column.values(self)
            columns = np.asarray(values).T if "<label>" in column.name else [values]
            arrays += [pa.array(each, column.type) for each in columns]
        return arrays

    def values(self, names: Set[str]) -> dict[str, list[Any]]:
        """Return the values [rows] of the named columns of `OutputSchema.conditional`, by name; only these are
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
        """Return `values` [scored, ...] spread over all rows [rows, ...], with None for rows without one."""
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
    # Whether a `RowCondition` may use it: its value is known when a row is scored, and the same in every run of the
    # job.
    conditional: bool = True
    least_labels: int = 0  # only an output with this many labels has it
    # Only an output whose labels have one of these measures has it.
    measures: tuple[Measure, ...] = tuple(Measure)
    # "label": the answer itself, which an output of labels and one of several questions have in different forms.
    # "answer": beside it, an output with several questions has one for each.
    part: Literal["row", "label", "answer"] = "row"

    def names(self, labels: Sequence[str]) -> list[str]:
        """Return the name of the column, or one name for each label."""
        return [self.name.replace("<label>", label) for label in labels] if "<label>" in self.name else [self.name]


_PREDICTIONS = ("prediction", "audit_prediction")
_TOLD = ("score", "prediction")  # what is counted of the answers to questions, under these names of every other output


def _of_question(column: Column, number: int, schema: OutputSchema) -> Column:
    # The column for the answers to one of several questions.
    return column._replace(
        name=f"{schema.name}.{column.name}" if column.name else schema.name,
        values=lambda rows: column.values(rows.questions[number]),
        counted=False,
    )


def _best(rows: ResultRows, scores: Iterable[Float64Array | None]) -> list[str | None]:
    labels = rows.schema.labels
    return [labels[int(each.argmax())] if len(labels) > 1 and each is not None else None for each in scores]


def _of_result(name: str) -> Callable[[ResultRows], ObjectArray]:
    return lambda rows: rows.of_scored([getattr(scored, name) for scored in rows.scored])


def _full_only(rows: ResultRows, values: npt.NDArray[Any]) -> ObjectArray:
    # Values over the whole vocabulary [scored, ...], for every row [rows, ...]; None where a row left early.
    spread = rows.of_scored(values)
    left = [each.exit_layer is not None for each in rows.scored]
    spread[rows.places[np.array(left, np.bool_)]] = None
    return spread


def _calibrated(rows: ResultRows) -> ObjectArray:
    # Calibrated probabilities of the labels [rows, labels].
    return rows.of_scored(np.empty((0, len(rows.schema.labels))) if rows.calibrated is None else rows.calibrated)


def _by_label(rows: ResultRows, values: Float64Array | None) -> ObjectArray:
    # The numbers of each row [scored, labels] by the names of the labels.
    own = () if values is None else values.tolist()
    return rows.of_scored([dict(zip(rows.schema.labels, each, strict=True)) for each in own])


def _of_rationale(name: str) -> Callable[[ResultRows], ObjectArray]:
    # A field of `Rationale`; None where nothing was to be written.
    return lambda rows: rows.of_scored([each.rationale and getattr(each.rationale, name) for each in rows.scored])


def _gaps(rows: ResultRows) -> ObjectArray:
    # The smallest gaps; None where no token was chosen.
    found = [each.rationale for each in rows.scored]
    return rows.of_scored([own.gap if own is not None and math.isfinite(own.gap) else None for own in found])


def _lists(rows: ResultRows, values: Float64Array) -> ObjectArray:
    # A list of each row's own numbers, of `values` [scored, labels].
    found = np.full(len(rows.numbers), None, object)
    for place, each, own in zip(rows.places.tolist(), rows.scored, values, strict=True):
        found[place] = own[: len(each.logprobs)]
    return found


def _likeliest(rows: ResultRows) -> ObjectArray:
    found, text_of = np.full(len(rows.numbers), None, object), rows.schema.token_text
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        if each.tokens is not None and text_of is not None:
            texts = [text_of(token) for token in each.tokens.tolist()]
            found[place] = {
                "written": texts[0].written,
                "ends": texts[0].ends,
                "tokens": [own.text for own in texts],
                "logprobs": each.logprobs,
            }
    return found


def _pair_scores(rows: ResultRows) -> ObjectArray:
    # The score of each prompt of a row.
    found, measure = np.full(len(rows.numbers), None, object), rows.schema.measure
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        found[place] = [float(label_scores(answer.logprobs, measure=measure)[0]) for answer in each.answers]
    return found


def _decided(prompts: Sequence[Prompt], answers: Sequence[ScoredRow], temperature: float) -> list[Float64Array]:
    # The probabilities of the options of each question of a row: their means over the orders in which they are listed.
    found: dict[str, list[Float64Array]] = {}
    for prompt, answer in zip(prompts, answers, strict=True):
        found.setdefault(prompt.question, []).append(label_scores(answer.logprobs, temperature))
    return [np.mean(each, axis=0) for each in found.values()]


def _indices(scores: Iterable[Float64Array | None]) -> list[int | None]:
    return [None if each is None else int(each.argmax()) for each in scores]


def _choice_texts(rows: ResultRows) -> ObjectArray:
    prompts = [rows.prompts[place] for place in rows.places.tolist()]
    chosen = zip(prompts, _indices(rows.scores), strict=True)
    return rows.of_scored([None if p is None or at is None else p.labels.texts[at] for p, at in chosen])


def _of_target(value: Callable[[ReadTokens], Any]) -> Callable[[ResultRows], ObjectArray]:
    # A value of the tokens that were read one by one.
    return lambda rows: rows.of_scored([each.by_token and value(each.by_token) for each in rows.scored])


def _token_logprobs(rows: ResultRows) -> ObjectArray:
    found = np.full(len(rows.numbers), None, object)
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        found[place] = each.by_token and each.by_token.logprobs
    return found


def _of_text(value: Callable[[LabelSet], int]) -> Callable[[ResultRows], list[int | None]]:
    # A number of the texts themselves.
    def found(rows: ResultRows) -> list[int | None]:
        pairs = zip(rows.prompts, rows.errors, strict=True)
        return [None if prompt is None or error is not None else value(prompt.labels) for prompt, error in pairs]

    return found


_target_bytes = _of_text(lambda target: target.text_bytes)


def _bits_per_byte(rows: ResultRows) -> ObjectArray:
    sizes = np.array(_target_bytes(rows), object)[rows.places].astype(np.float64)
    return rows.of_scored(-rows.logprobs[:, 0] / math.log(2) / sizes)


def _evidence(rows: ResultRows) -> ObjectArray:
    found = np.full(len(rows.numbers), None, object)
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        if each.evidence is not None:
            found[place] = [effect._asdict() for effect in each.evidence]
    return found


def _in_doubt(rows: ResultRows) -> ObjectArray:
    # The questions whose answer is below its floor; None for rows without answers.
    found = np.full(len(rows.numbers), None, object)
    for place in rows.places.tolist():
        found[place] = []
    for own in rows.questions or [rows]:
        doubt = doubtful(own.scores, own.schema.floors) if own.schema.floors else np.zeros(len(own.places), np.bool_)
        for place in own.places[doubt].tolist():
            found[place].append(own.schema.name or ANSWER)
    return found


# The contribution of each section of a prompt, the largest change first.
EVIDENCE = pa.list_(pa.struct([("section", pa.string()), ("change", pa.float64())]))
_TARGET: Any = {"counted": True, "measures": (Measure.LIKELIHOOD,)}
_CHOICES: Any = {"measures": (Measure.CHOICES,), "conditional": False}
_NUMBERED = (Measure.SHARES, Measure.CHANCES, Measure.VALUES)
_WRITTEN: Any = {"group": "rationales", "conditional": False, "part": "answer"}

# In the order of the output, after the id and the columns that are carried from the input.
COLUMNS = (
    Column("score", pa.float64(), lambda rows: rows.of_scored(rows.scores[:, 0]), counted=True, part="label"),
    Column("probability", pa.float64(), lambda rows: _calibrated(rows)[:, 0], group="calibrated", part="label"),
    Column(
        "logprob_<label>",
        pa.float64(),
        lambda rows: _full_only(rows, rows.logprobs),
        measures=(Measure.SHARES, Measure.CHANCES),
        part="label",
    ),
    Column(
        "value_<label>",
        pa.float64(),
        lambda rows: rows.of_scored(rows.logprobs),
        measures=(Measure.VALUES,),
        part="label",
    ),
    Column(
        "mean",
        pa.float64(),
        lambda rows: rows.of_scored(rows.scores @ np.array(rows.schema.values)),
        group="ordered",
        part="label",
    ),
    Column("probability_<label>", pa.float64(), _calibrated, group="calibrated", least_labels=3, part="label"),
    Column(
        "score_<label>",
        pa.float64(),
        lambda rows: rows.of_scored(rows.scores),
        group="label_scores",
        least_labels=3,
        part="label",
    ),
    Column("scores", pa.list_(pa.float64()), lambda rows: _lists(rows, rows.scores), **_CHOICES),
    Column("logprobs", pa.list_(pa.float64()), lambda rows: _lists(rows, rows.logprobs), **_CHOICES),
    Column("prediction", pa.int64(), lambda rows: rows.of_scored(_indices(rows.scores)), counted=True, **_CHOICES),
    Column("prediction_text", pa.string(), _choice_texts, **_CHOICES),
    Column("logprob", pa.float64(), lambda rows: rows.of_scored(rows.logprobs[:, 0]), **_TARGET),
    Column("target_tokens", pa.int64(), _of_target(lambda read: len(read.logprobs)), **_TARGET),
    Column("target_bytes", pa.int64(), _target_bytes, **_TARGET),
    Column("target_words", pa.int64(), _of_text(lambda target: target.text_words), **_TARGET),
    Column("greedy", pa.bool_(), _of_target(lambda read: read.greedy), **_TARGET),
    Column("bits_per_byte", pa.float64(), _bits_per_byte, measures=(Measure.LIKELIHOOD,)),
    Column(
        "token_logprobs",
        pa.list_(pa.float64()),
        _token_logprobs,
        measures=(Measure.LIKELIHOOD,),
        group="token_logprobs",
        conditional=False,
    ),
    Column("likeliest", batches.LIKELIEST, _likeliest, measures=(Measure.TOKENS,), conditional=False),
    Column(
        "pair_scores",
        pa.list_(pa.float64()),
        _pair_scores,
        group="openai",
        measures=_NUMBERED,
        conditional=False,
    ),
    Column(
        "decisions",
        pa.list_(pa.list_(pa.float64())),
        lambda rows: rows.of_scored(rows.decisions),
        measures=(Measure.DECISIONS,),
        conditional=False,
    ),
    Column(
        "label_mass",
        pa.float64(),
        lambda rows: _full_only(rows, label_mass(rows.logprobs)),
        measures=(Measure.SHARES,),
        part="answer",
    ),
    Column(
        "prediction",
        pa.string(),
        lambda rows: rows.of_scored(_best(rows, rows.scores)),
        counted=True,
        measures=_NUMBERED,
        part="label",
    ),
    Column(
        "order_decided",
        pa.bool_(),
        lambda rows: rows.of_scored([] if rows.order_decided is None else rows.order_decided),
        group="orders",
        part="answer",
    ),
    Column(
        "review",
        pa.list_(pa.string()),
        _in_doubt,
        group="review",
        measures=(Measure.SHARES,),
        conditional=False,
    ),
    Column("prompt_tokens", pa.int64(), lambda rows: rows.prompt_tokens, counted=True),
    Column("shared_tokens", pa.int64(), _of_result("shared_tokens"), conditional=False),
    Column("kept_tokens", pa.int64(), _of_result("kept_tokens")),
    Column("computed_tokens", pa.int64(), _of_result("computed_tokens"), counted=True, conditional=False),
    Column("seconds", pa.float64(), _of_result("seconds"), counted=True, conditional=False),
    Column("method", pa.string(), _of_result("method"), counted=True),
    Column(
        "adapter",
        pa.string(),
        lambda rows: [p and p.variant for p in rows.prompts],
        group="adapters",
    ),
    Column("exit_layer", pa.int64(), _of_result("exit_layer"), group="exits", part="answer"),
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
        part="answer",
    ),
    Column(
        "audit_prediction", pa.int64(), lambda rows: rows.of_scored(_indices(rows.audited)), group="audit", **_CHOICES
    ),
    Column(
        "audit_prediction",
        pa.string(),
        lambda rows: rows.of_scored(_best(rows, rows.audited)),
        group="audit",
        conditional=False,
        measures=_NUMBERED,
        part="answer",
    ),
    Column("rationale", pa.string(), _of_rationale("text"), **_WRITTEN),
    Column("rationale_tokens", pa.int64(), _of_rationale("tokens"), **_WRITTEN),
    Column("finish_reason", pa.string(), _of_rationale("finish_reason"), **_WRITTEN),
    Column("rationale_gap", pa.float64(), _gaps, **_WRITTEN),
    Column("rationale_source", pa.string(), _of_rationale("source"), **_WRITTEN),
    Column("evidence", EVIDENCE, _evidence, group="evidence", conditional=False, part="answer"),
)


def _typed_answer(own: OutputSchema) -> Iterator[Column]:
    # The columns with the answer to a question, by its type; `_of_question` names them.
    several = pa.struct([(name, pa.float64()) for name in own.labels])
    if own.type == "predicate":
        yield Column("", pa.float64(), lambda rows: rows.of_scored(rows.scores[:, 0]))
    else:
        if own.type == "score":
            numbers = np.array(own.values)
            yield Column("", pa.float64(), lambda rows: rows.of_scored(rows.scores @ numbers))
        else:
            plain = pa.bool_() if all(isinstance(each, bool) for each in own.options) else pa.string()
            said = own.options if plain == pa.bool_() else own.labels
            yield Column("", plain, lambda rows: rows.of_scored([said[at] for at in rows.scores.argmax(axis=-1)]))
        sure = score_confidence if own.type == "score" else choice_confidence
        yield Column(PROBABILITIES, several, lambda rows: _by_label(rows, rows.scores), conditional=False)
        yield Column("confidence", pa.float64(), lambda rows: rows.of_scored(sure(rows.scores)))
    if "calibrated" in own.groups and own.type == "predicate":
        yield Column(CALIBRATED, pa.float64(), lambda rows: _calibrated(rows)[:, 0])
    elif "calibrated" in own.groups:
        yield Column(CALIBRATED, several, lambda rows: _by_label(rows, rows.calibrated), conditional=False)


def _scale(own: OutputSchema) -> dict[str, str]:
    # The metadata of the column with an expected level: the number that each level stands for.
    numbers = {
        name: int(value) if value.is_integer() else value for name, value in zip(own.labels, own.values, strict=True)
    }
    return {"levels": json.dumps(numbers, ensure_ascii=False)}


COLUMN_TYPES = {column.name: column.type for column in COLUMNS}
_TYPES = {
    frozenset("b"): pa.bool_(),
    frozenset("i"): pa.int64(),
    frozenset("f"): pa.float64(),
    frozenset("if"): pa.float64(),
}


def kinds_of(texts: pa.ChunkedArray) -> str:
    """Return the kinds of values in a column of JSON texts, as letters."""
    return "".join(sorted({_kind(text) for text in texts.to_pylist() if text is not None}))


def type_for(kinds: Iterable[str], *, ids: bool = False) -> pa.DataType:
    """Return the type of a column that holds these kinds of values. Among `ids`, 1 and 1.0 differ, so they stay
    texts."""
    found = frozenset(kinds)
    return pa.string() if ids and len(found) > 1 else _TYPES.get(found, pa.string())


def typed_column(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return JSON texts as values of `kind`."""
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
    id_name: str | None = None  # the carried column with the ids; None where rows are identified by their number
    # Id and kept columns as the parts have them; from JSON Lines every one is JSON text.
    carried: pa.Schema = field(default_factory=lambda: pa.schema([]))
    json_carried: bool = False  # whether the carried columns are JSON text
    # Whether such text is written as it is; else its values get the type that holds them.
    json_text: bool = False
    truth: str | None = None  # the carried column with the right answers
    groups: Groups = frozenset()  # the groups of further columns, beside those of every output
    measure: Measure = Measure.SHARES  # the meaning of the labels' numbers
    values: tuple[float, ...] = ()  # the number that each label stands for, if they are ordered
    # In an output with several questions about each row, the columns of each, under its `name`; `labels` and `measure`
    # are those of the first then.
    questions: tuple[OutputSchema, ...] = ()
    name: str = ""
    type: str = ""  # of a question: predicate, choice or score
    options: tuple[str | bool, ...] = ()  # what each of its answers says
    served: str = ""  # the name of the model in the response to a request that names none
    # In an output about the likeliest tokens, the text of each by its id.
    token_text: Callable[[int], TokenText] | None = None
    # For a question, the numbers of the rows it is asked about, by the answers to earlier ones; None: all.
    when: Callable[[ResultRows], Set[int]] | None = None
    # For a question with the group `orders`, the numbers of its prompts in other orders, after those of all questions.
    others: tuple[int, ...] = ()
    # Whether the labels are classes of a head, so that their mass says nothing of the prompt.
    classes: bool = False
    # For the column `review`, the floor of each label; none where answers are not reviewed.
    floors: tuple[float | None, ...] = ()

    def with_floors(self, floors: Mapping[str, tuple[float | None, ...]]) -> OutputSchema:
        """Return it with the floors of the questions of these names."""
        questions = tuple(each.with_floors(floors) for each in self.questions)
        return replace(self, floors=floors.get(self.name or ANSWER, ()), questions=questions)

    @property
    def asked(self) -> tuple[OutputSchema, ...]:
        """The columns of the answer to each prompt of a row."""
        return (*self.questions, *(each for each in self.questions for _ in each.others)) or (self,)

    def answered(self, scored: ScoredRow) -> Iterable[tuple[OutputSchema, ScoredRow]]:
        """Return the answers of a row, each with its columns."""
        if "openai" in self.groups:  # as many as its line has pairs of texts, or questions
            return ((self, each) for each in scored.answers)
        return zip(self.asked, scored.answers if self.questions else (scored,), strict=True)

    def require_distinct(self, truths: Collection[str] = ()) -> None:
        """Raise UsageError if a carried column has the name of another column of the output. `truths` are those with
        right answers."""
        row = [ROW_COLUMN] if self.id_name is None else []
        told = (f"{prefix}{name}" for own in self.questions for prefix in ("", f"{own.name}.") for name in _TOLD)
        taken = [*row, *self.results.names, ROW, *told]
        for name in self.carried.names:
            if name in taken:
                options = dict.fromkeys((self.truth, *truths), "--truth") | {self.id_name: "--id-column"}
                option = options.get(name, "--keep-columns")
                raise UsageError(f"{option} {name}: the output has a column {name} already\nrename it in the input")

    @property
    def json_columns(self) -> tuple[str, ...]:
        """The columns of the output that are JSON text."""
        if "openai" in self.groups:
            return batches.JSON_COLUMNS
        return tuple(self.carried.names) if self.json_carried and self.json_text else ()

    def arrow(self, json_kinds: Mapping[str, Iterable[str]]) -> pa.Schema:
        """Return the Arrow schema of the output; `json_kinds` are the kinds of values in carried JSON text."""
        if "openai" in self.groups:
            return batches.LINE
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
        """Return rows of parts as rows of the output, whose `arrow` schema is given."""
        if "openai" in self.groups:
            return batches.lines_of(rows, ROW, self.id_name or ROW, self.served).cast(schema)
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
        found = [
            column
            for column in COLUMNS
            if (column.group is None or column.group in self.groups)
            and len(self.labels) >= column.least_labels
            and self.measure in column.measures
        ]
        if self.type:  # the answers to one of several questions
            own = [column for column in found if column.part == "answer"]
            return [*(each._replace(part="label") for each in _typed_answer(self)), *own]
        if not self.questions:
            return found
        answers = [
            _of_question(column, number, own) for number, own in enumerate(self.questions) for column in own.columns
        ]
        return [*answers, *(column for column in found if column.part == "row")]

    @property
    def answers(self) -> list[AnswerColumns]:
        """The columns with the answers to each of several questions, and what they say of each label."""
        return [AnswerColumns(own.name, own.type, own.labels, own.values) for own in self.questions]

    @property
    def results(self) -> pa.Schema:
        """Names and types of all columns that scoring adds."""
        scales = {own.name: own for own in self.questions if own.type == "score"}
        return pa.schema(
            pa.field(name, column.type, metadata=_scale(scales[name]) if name in scales else None)
            for column in self.columns
            for name in column.names(self.labels)
        )

    @property
    def conditional(self) -> pa.Schema:
        """Names and types of the columns that a `RowCondition` may use."""
        columns = [column for column in self.columns if column.conditional]
        return pa.schema([(name, column.type) for column in columns for name in column.names(self.labels)])

    @property
    def predictions(self) -> dict[str, Sequence[str]]:
        """The labels that each column with a prediction may have, by its name."""
        if self.questions:
            return {each.name: each.labels for each in self.questions if each.type == "choice"}
        known = self.measure is not Measure.CHOICES and len(self.labels) > 1
        return dict.fromkeys(_PREDICTIONS, self.labels) if known else {}

    @property
    def means(self) -> list[str]:
        """The columns with the means of ordered labels."""
        names = {"mean", *(own.name for own in self.questions if own.type == "score")}
        return [column.name for column in self.columns if column.name in names]

    @property
    def _typed(self) -> bool:
        return self.json_carried and not self.json_text

    @property
    def _has_shares(self) -> bool:
        several = len(self.labels) > 1 and "openai" not in self.groups
        return self.measure is Measure.SHARES and not self.questions and several

    def _label_shares(self, rows: pa.Table) -> Float64Array:
        # The probability of each label in a job of labels [rows, labels]; at a temperature of 1 where only
        # log-probabilities tell it.
        if len(self.labels) == 2:
            score = rows["score"].to_numpy()
            return np.stack([score, 1 - score], axis=1)
        told = "score" if "label_scores" in self.groups else "logprob"
        found = np.stack([rows[f"{told}_{label}"].to_numpy() for label in self.labels], axis=1)
        return found if told == "score" else label_scores(found)

    def count(self, counts: Counts, rows: pa.Table) -> Counts:
        """Add rows of parts to `counts`."""
        first = f"{self.questions[0].name}." if self.questions else ""
        shares = {ANSWER: self._label_shares(rows)} if self._has_shares else {}
        for own in self.answers:
            told = rows[own.column(own.source("score"))]
            shares[own.name] = own.shares(told.to_pylist())
            rows = rows.append_column(f"{own.name}.score", own.values_of("score", told))
            rows = rows.append_column(f"{own.name}.prediction", own.values_of("prediction", told))
        for name, told_shares in shares.items():
            asked = next((own for own in self.questions if own.name == name), self)
            mass = None if self.classes else f"{name}.label_mass" if self.questions else "label_mass"
            tally = AnswerTally.of_rows(rows, told_shares, asked.labels, mass, self.id_name, self.json_carried)
            counts.tallies.answers = _sum(counts.tallies.answers, {name: tally})
        if first:
            rows = rows.append_column("score", rows[f"{first}score"])
        json_carried, means = self.json_carried, self.means
        counts.add_rows(rows, self.truth, id_name=self.id_name, json_carried=json_carried, means=means, first=first)
        for each in self.questions:
            if "audit" in each.groups:
                counts.audits = _sum(counts.audits, {each.name: _audited(rows, f"{each.name}.")})
            if "exits" in each.groups:
                answered = rows.filter(pc.is_valid(rows[f"{each.name}.score"]))
                layers = _exit_layers(answered, f"{each.name}.")
                counts.tallies.exit_layers = _sum(counts.tallies.exit_layers, {each.name: layers})
            if {"exits", "audit"} <= each.groups:
                audited = _audited_exits(rows, f"{each.name}.")
                counts.audited_exits = _sum(counts.audited_exits, {each.name: audited})
            if "orders" in each.groups:
                decided = rows[f"{each.name}.order_decided"].drop_null()
                found = OrderRows(len(decided), pc.sum(decided).as_py() or 0)
                counts.tallies.orders = _sum(counts.tallies.orders, {each.name: found})
        return counts


# The number of scored rows, the reasons why others were not scored, and a picture of the output: histograms and single
# rows. A tally is small however many rows it counts, and two tallies add up to the tally of both. So every part has
# its own, and a resumed job adds up those that it finds.


class LayerRows(NamedTuple):
    """Rows that went through the same number of layers, and the tokens of their prompts."""

    rows: int
    prompt_tokens: int


class OrderRows(NamedTuple):
    """Rows that were asked a question with its two values in both orders, and those whose prediction the order
    decided."""

    rows: int
    decided: int


@dataclass
class RationaleTally:
    """The rows that are written about, and their tokens."""

    tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)  # rows by the reason why their text ends
    sources: dict[str, int] = field(default_factory=dict)  # rows by the source of their text

    @property
    def rows(self) -> int:
        return sum(self.finish_reasons.values())


class MeanTally(NamedTuple):
    """The rows that have a mean of ordered labels, and the sum of their means."""

    rows: int
    total: float


@dataclass
class LikelihoodTally:
    """The texts whose likelihood is asked for."""

    logprob: float = 0.0  # of all together
    tokens: int = 0
    bytes: int = 0
    words: int = 0
    greedy: int = 0  # texts that greedy decoding would write


@dataclass
class AnswerTally:
    """The answers to a question, or the labels of a job's rows."""

    answers: dict[str, int] = field(default_factory=dict)  # rows by their answer
    mass_rows: int = 0  # rows with a label mass
    mass: float = 0.0  # their label masses together
    close: int = 0  # rows whose two likeliest answers differ in odds by a factor of `CLOSE_ODDS` at most
    # The rows whose answer is the least probable, the least first: row, id, answer, probability.
    least_sure: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.least_sure = sorted(self.least_sure, key=lambda row: (row["probability"], row["row"] or 0))[:LEAST_SURE]

    @classmethod
    def of_rows(
        cls,
        rows: pa.Table,
        shares: Float64Array,
        labels: Sequence[str],
        mass: str | None,
        id_name: str | None,
        json_id: bool,
    ) -> AnswerTally:
        """Return the tally of rows with the probability of each label [rows, labels], NaN where there is no answer.
        `mass` is the column with their label mass, if they have one."""
        known = np.flatnonzero(~np.isnan(shares).any(axis=1))
        told = shares[known]
        best, sure = told.argmax(axis=1), told.max(axis=1, initial=0.0)
        order = np.argsort(sure, kind="stable")[:LEAST_SURE]
        few = rows.take(pa.array(known[order]))
        few = few.append_column("__answer", pa.array([labels[at] for at in best[order]], pa.string()))
        few = few.append_column("__probability", pa.array(sure[order], pa.float64()))
        masses = [] if mass is None else rows[mass].drop_null()
        second = np.partition(told, -2, axis=1)[:, -2] if len(known) else sure
        counts = np.bincount(best, minlength=len(labels)).tolist()
        return cls(
            {label: count for label, count in zip(labels, counts, strict=True) if count},
            len(masses),
            pc.sum(masses).as_py() if len(masses) else 0.0,
            int((sure <= CLOSE_ODDS * second).sum()),
            _named(few, id_name, json_id, {"answer": "__answer", "probability": "__probability"}),
        )


@dataclass
class Tallies:
    """Numbers and texts only, so that they survive JSON unchanged."""

    # By prediction, rows in each of the `SCORE_BINS`.
    scores: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # By kind (scored, truncated, error), rows in each bin that has any, under its lower edge.
    lengths: dict[str, dict[str, int]] = field(default_factory=dict)
    methods: dict[str, int] = field(default_factory=dict)  # scored rows by method
    # By question, answers by the layers they went through, or `TO_THE_END`; empty for an output without exits.
    exit_layers: dict[str, dict[str, LayerRows]] = field(default_factory=dict)
    # Scored rows by adapter, those without one under an empty name; empty for an output without such a column.
    adapters: dict[str, int] = field(default_factory=dict)
    # The texts that were written; empty for an output without rationales.
    rationales: RationaleTally = field(default_factory=RationaleTally)
    evidence: int = 0  # rows whose sections were weighed
    # The texts whose likelihood is asked for; empty for an output with labels.
    likelihood: LikelihoodTally = field(default_factory=LikelihoodTally)
    means: dict[str, MeanTally] = field(default_factory=dict)  # by column
    orders: dict[str, OrderRows] = field(default_factory=dict)  # by question that is asked in both orders
    # By question, the answers; a job of labels has them under the name `ANSWER`.
    answers: dict[str, AnswerTally] = field(default_factory=dict)
    mass_rows: int = 0  # scored rows with a label mass
    mass_sum: float = 0.0  # their label masses together
    # Slowest first: row, id, seconds, prompt_tokens, computed_tokens, method.
    slowest: list[dict[str, Any]] = field(default_factory=list)
    # Error rows in the order of the input, some of every code: row, id, code, detail.
    failed: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # However many tallies were added up, few rows are named.
        self.slowest = sorted(self.slowest, key=lambda row: (-row["seconds"], row["row"] or 0))[:MOST]
        self.failed = _of_every_code(self.failed)

    @property
    def chosen_rows(self) -> int:
        """Rows that were chosen to be written about or to have their sections weighed."""
        return max(self.rationales.rows, self.evidence)

    @property
    def mean_label_mass(self) -> float | None:
        """The mean over the scored rows that have a label mass; None without any."""
        return self.mass_sum / self.mass_rows if self.mass_rows else None

    @classmethod
    def of_rows(
        cls,
        rows: pa.Table,
        id_name: str | None = None,
        *,
        json_id: bool = False,
        means: Sequence[str] = (),
        first: str = "",
    ) -> Tallies:
        """Return the tallies of output rows. `id_name` is the column with their ids, `json_id` whether it holds JSON,
        and `means` are the columns with means of ordered labels. With `first` begin the columns of the question whose
        score a row has.

        Rows of an output have no row number where they have an id; it is None then.
        """
        names, scored = rows.column_names, rows.filter(pc.is_valid(rows["score"]))
        found = cls(
            scores=_score_bins(rows, f"{first}prediction"),
            lengths=_length_bins(rows),
            methods=_counted(rows["method"]),
            slowest=_slowest(rows, id_name, json_id),
            failed=_failed(rows, id_name, json_id),
        )
        for name in means:
            numbers = rows[name].drop_null()
            found.means[name] = MeanTally(len(numbers), pc.sum(numbers).as_py() or 0.0)
        if (mass := f"{first}label_mass") in names:
            masses = rows[mass].drop_null()
            found.mass_rows, found.mass_sum = len(masses), pc.sum(masses).as_py() or 0.0
        if "exit_layer" in names:
            found.exit_layers = {"": _exit_layers(scored, "")}
        if "adapter" in names:
            found.adapters = _counted(pc.fill_null(scored["adapter"], ""))
        if (reason := f"{first}finish_reason") in names:
            tokens = pc.sum(rows[f"{first}rationale_tokens"]).as_py() or 0
            reasons, sources = _counted(rows[reason]), _counted(rows[f"{first}rationale_source"])
            found.rationales = RationaleTally(tokens, reasons, sources)
        if "target_tokens" in names:
            summed = ("logprob", "target_tokens", "target_bytes", "target_words", "greedy")
            found.likelihood = LikelihoodTally(*(pc.sum(scored[name]).as_py() or 0 for name in summed))
        if (evidence := f"{first}evidence") in names:
            found.evidence = len(rows) - rows[evidence].null_count
        return found


def _sum(mine: Any, other: Any) -> Any:
    # The sum of both: records, dicts and tuples are added entry by entry; lists are joined.
    if is_dataclass(mine) and not isinstance(mine, type):
        added = {each.name: _sum(getattr(mine, each.name), getattr(other, each.name)) for each in fields(mine)}
        return replace(mine, **added)
    if isinstance(mine, dict):
        return mine | {name: _sum(mine[name], found) if name in mine else found for name, found in other.items()}
    if isinstance(mine, tuple):
        places = map(_sum, mine, other)
        return mine._make(places) if hasattr(mine, "_make") else tuple(places)
    return mine + other


def _counted(column: pa.ChunkedArray) -> dict[str, int]:
    return {entry["values"]: entry["counts"] for entry in pc.value_counts(column.drop_null()).to_pylist()}


def _exit_layers(scored: pa.Table, prefix: str) -> dict[str, LayerRows]:
    # The scored rows by the layer that they left after; with `prefix` begin the columns of the question.
    columns = scored.select([f"{prefix}exit_layer", "prompt_tokens"]).rename_columns(["layer", "prompt_tokens"])
    groups = columns.group_by("layer").aggregate([([], "count_all"), ("prompt_tokens", "sum")]).to_pylist()
    return {
        TO_THE_END if group["layer"] is None else str(group["layer"]): LayerRows(
            group["count_all"], group["prompt_tokens_sum"] or 0
        )
        for group in sorted(groups, key=lambda group: (group["layer"] is None, group["layer"]))
    }


def _score_bins(rows: pa.Table, prediction: str) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    if prediction not in rows.column_names or pa.types.is_integer(rows.schema.field(prediction).type):
        return found  # rows with their own choices, or without labels
    for name in _counted(rows[prediction]):
        if f"value_{name}" in rows.column_names:
            continue  # values need not lie between 0 and 1
        scores = rows["score"].filter(pc.equal(rows[prediction], name)).to_numpy()
        found[name] = tuple(np.histogram(scores, SCORE_BINS, (0, 1))[0].tolist())
    return found


def _length_bins(rows: pa.Table) -> dict[str, dict[str, int]]:
    scored, truncated = pc.is_valid(rows["score"]), pc.fill_null(rows["truncated"], False)
    kinds = {
        "scored": pc.and_not(scored, truncated),
        "truncated": pc.and_(scored, truncated),
        "error": pc.invert(scored),
    }
    found = {}
    for kind, chosen in kinds.items():
        lengths = rows["prompt_tokens"].filter(chosen).drop_null().to_numpy()
        if len(lengths):
            bins, counts = np.unique(np.searchsorted(LENGTH_EDGES, lengths, "right") - 1, return_counts=True)
            names = [str(LENGTH_EDGES[at]) for at in np.maximum(bins, 0).tolist()]
            found[kind] = dict(zip(names, counts.tolist(), strict=True))
    return found


def _slowest(rows: pa.Table, id_name: str | None, json_id: bool) -> list[dict[str, Any]]:
    seconds = np.nan_to_num(rows["seconds"].cast(pa.float64()).to_numpy(), nan=-1.0)
    order = np.argsort(-seconds, kind="stable")[:MOST]
    return _named(
        rows.take(pa.array(order[seconds[order] >= 0])),
        id_name,
        json_id,
        {name: name for name in ("seconds", "prompt_tokens", "computed_tokens", "method")},
    )


def _failed(rows: pa.Table, id_name: str | None, json_id: bool) -> list[dict[str, Any]]:
    found = rows["error"].combine_chunks()
    chosen: list[int] = []
    for code in _counted(rows["error"]):
        if code not in SKIPPED_CODES:
            chosen += pc.indices_nonzero(pc.fill_null(pc.equal(found, code), False))[:MOST].to_pylist()
    few = rows.take(pa.array(sorted(chosen), pa.int64()))
    return _of_every_code(_named(few, id_name, json_id, {"code": "error", "detail": "error_detail"}))


def _of_every_code(failed: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    # At most `MOST` of the rows, the first ones of each code.
    seen: Counter[str] = Counter()
    ranked = []
    for row in sorted(failed, key=lambda row: row["row"] or 0):
        ranked.append((seen[row["code"]], row))
        seen[row["code"]] += 1
    few = [row for _, row in sorted(ranked, key=lambda pair: pair[0])[:MOST]]
    return sorted(few, key=lambda row: row["row"] or 0)


def _named(few: pa.Table, id_name: str | None, json_id: bool, columns: dict[str, str]) -> list[dict[str, Any]]:
    # Rows with number, id, and values of `columns` (name here: name there); long texts are cut.
    number = ROW if ROW in few.column_names else "row" if id_name is None else None
    numbers = [None] * len(few) if number is None else few[number].to_pylist()
    ids = [None] * len(few) if id_name is None else shown_ids(few[id_name], json_id)
    values = [few[there].to_pylist() for there in columns.values()]
    found = []
    for row, own, *rest in zip(numbers, ids, *values, strict=True):
        pairs = zip(columns, (_short(each) if isinstance(each, str) else each for each in rest), strict=True)
        found.append({"row": row, "id": own if own is None else _short(own), **dict(pairs)})
    return found


def shown_ids(ids: pa.ChunkedArray, json_id: bool) -> list[str | None]:
    """Return ids as a report names rows, None for null; with `json_id` they are JSON text."""
    if json_id:  # anything but a string reads best as it is written
        return [None if own is None else text_of(own) for own in ids.to_pylist()]
    try:
        texts: list[str | None] = ids.cast(pa.string()).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # binary, nested
        texts = [None if own is None else str(own) for own in to_python(ids)]
    return texts


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


# The row's score, its score from the whole prompt, whether the prediction differs, and the right answer as in the
# input.
Audited = tuple[float, float, bool, str | int | float | bool | None]
_PLAIN = (str, int, float, bool)


def _audited(rows: pa.Table, prefix: str, truth: str | None = None, json_carried: bool = False) -> list[Audited]:
    # The rows of the audit; with `prefix` begin the columns of the question.
    audited = rows.filter(pc.is_valid(rows[f"{prefix}audit_score"]))
    answers = to_python(audited[truth]) if truth is not None else [None] * len(audited)
    flips = pc.not_equal(audited[f"{prefix}prediction"], audited[f"{prefix}audit_prediction"])
    columns = (audited[f"{prefix}score"], audited[f"{prefix}audit_score"], flips)
    found: list[Audited] = []
    for *numbers, answer in zip(*(each.to_pylist() for each in columns), answers, strict=True):
        known = json.loads(answer) if json_carried and answer is not None else answer
        found.append((*numbers, known if isinstance(known, _PLAIN) else None))
    return found


class AuditedExits(NamedTuple):
    """Audited rows whose whole prompts get the same label: their number, and how many left early and flipped by
    that."""

    rows: int
    left: int
    flips: int


def _audited_exits(rows: pa.Table, prefix: str) -> dict[str, AuditedExits]:
    # The rows of the audit by the label that they have in full; with `prefix` begin the columns of the question.
    audited = rows.filter(pc.is_valid(rows[f"{prefix}audit_score"]))
    left = pc.is_valid(audited[f"{prefix}exit_layer"]).to_pylist()
    labels = audited[f"{prefix}audit_prediction"].to_pylist()
    found: dict[str, AuditedExits] = {}
    for label, gone, (_, _, flipped, _) in zip(labels, left, _audited(rows, prefix), strict=True):
        found = _sum(found, {label: AuditedExits(1, int(gone), int(gone and flipped))})
    return found


@dataclass
class Counts:
    """Numbers of output rows: `total` = `scored` + `errors` + `skipped` + `empty`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0  # rows left out for their length, as the user asked; not errors
    empty: int = 0  # rows without text, which are no errors either
    errors_by_code: dict[str, int] = field(default_factory=dict)
    score_sum: float = 0.0
    # Rows of `scored` whose results are those of an earlier output, as far as that is known.
    taken_over: int = 0
    # Compressed rows that were read in full as well; in a job with exits, all rows of the audit.
    audited: list[Audited] = field(default_factory=list)
    # The same by question, of an output with several.
    audits: dict[str, list[Audited]] = field(default_factory=dict)
    # By question, rows of the audit by the label that they have in full; empty for an output without exits.
    audited_exits: dict[str, dict[str, AuditedExits]] = field(default_factory=dict)
    tallies: Tallies = field(default_factory=Tallies)

    @property
    def mean_score(self) -> float | None:
        """Mean over the scored rows."""
        return self.score_sum / self.scored if self.scored else None

    def add_rows(
        self,
        rows: pa.Table,
        truth: str | None = None,
        *,
        id_name: str | None = None,
        json_carried: bool = False,
        means: Sequence[str] = (),
        first: str = "",
    ) -> None:
        """Count output rows by their columns `error` and `score`, tally them, and collect those of the audit.

        `truth` and `id_name` are the carried columns with the right answer and the id, `json_carried` whether they
        hold JSON. `means` and `first` are as for `Tallies.of_rows`.
        """
        codes = _counted(rows["error"])
        scored, score_sum = len(rows) - rows["score"].null_count, pc.sum(rows["score"]).as_py() or 0.0
        found = Counts(len(rows), scored, score_sum=score_sum)
        found.skipped, found.empty = codes.pop(ErrorCode.SKIPPED_TOO_LONG, 0), codes.pop(ErrorCode.SKIPPED_EMPTY, 0)
        found.errors, found.errors_by_code = sum(codes.values()), codes
        found.tallies = Tallies.of_rows(rows, id_name, json_id=json_carried, means=means, first=first)
        if TAKEN_OVER in rows.column_names:
            found.taken_over = pc.sum(rows[TAKEN_OVER]).as_py() or 0
        if f"{first}audit_score" in rows.column_names:
            found.audited = _audited(rows, first, truth, json_carried)
        if {"exit_layer", "audit_score"} <= set(rows.column_names):
            found.audited_exits = {"": _audited_exits(rows, "")}
        self.add(found)

    def add(self, other: Counts) -> None:
        """Add the rows that `other` counted."""
        vars(self).update(vars(_sum(self, other)))

"""The columns that scoring adds to an output, and the results that their values come from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from prefillcli.plan.behind import LabelSet
from prefillcli.rows.output import batches
from prefillcli.rows.output.answers import CALIBRATED, PROBABILITIES, AnswerColumns
from prefillcli.rows.records import (
    ErrorCode,
    Prompt,
    ReadTokens,
    RowError,
    ScoredRow,
    Window,
    by_head,
)
from prefillcli.stats.acceptance import doubtful
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.confidence import choice_confidence, score_confidence
from prefillcli.stats.labels import Measure, label_mass, label_scores, mean_log_shares, normalised

if TYPE_CHECKING:
    from prefillcli.rows.output.schema import OutputSchema

ROW = "__row"  # the row number in a part
DIGEST = "__digest"  # in a part: the digest of a row that has a score (`Prompt.digest`)
TAKEN_OVER = "__taken_over"  # in a part: whether the row's results are those of an earlier output


# The groups of columns that an output may have beside those of every output: the scores of an audit, calibrated
# probabilities, where rows left the model early, which adapter read each row, texts written after rows, the
# contributions of the sections of prompts, the log-probabilities of single tokens, the means of ordered labels,
# whether the order of two values decided, each label's score where log-probabilities do not determine it, the answers
# in doubt, and the score of each of several prompts.
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
    "pair_scores",
]


def added(asked: Mapping[Group, object]) -> frozenset[Group]:
    """Return the groups of columns that are asked for: those with a value that is true."""
    return frozenset(name for name, given in asked.items() if given)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    numbers: Int64Array  # row numbers, ascending [rows]
    prompts: list[Prompt | None]  # None where the row has no prompt; the first of several [rows]
    scored: list[ScoredRow]  # the engine's answers to the rows that have a score [scored]
    places: Int64Array  # where these are among all rows [scored]

    def of_scored(self, values: Sequence[Any] | npt.NDArray[Any]) -> ObjectArray:
        """Return `values` [scored, ...] spread over all rows [rows, ...], with None for rows without one."""
        inner = values.shape[1:] if isinstance(values, np.ndarray) else ()
        spread = np.full((len(self.numbers), *inner), None, object)
        spread[self.places] = values
        return spread


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRows(_Rows):
    """The answers to a question in the rows of a window: the data of its columns. `scored` are those of the question
    alone."""

    own: AnswerColumns
    # Log-probability of every label over the whole vocabulary, or over all classes; of rows that left early, among the
    # labels alone. For a head that gives values, the value of every label [scored, labels]. Where rows have their own
    # labels, -inf fills the places after them.
    logprobs: Float64Array
    # Score of every label: mostly its probability among the labels, after the temperature [scored, labels].
    scores: Float64Array
    # `scores` as the whole prompt and all layers give them, for rows of the audit [scored].
    audited: list[Float64Array | None]
    # `logprobs` as `--label-norm` divides them: calibrated probabilities follow from these [scored, labels].
    divided: Float64Array
    # Calibrated probability of every label [scored, labels]; None where nothing is calibrated.
    calibrated: Float64Array | None = None
    # Whether the orders of a question's two values give different predictions [scored].
    order_decided: npt.NDArray[np.bool_] | None = None
    # Where rows ask their own questions, the probabilities of the options of each [scored].
    decisions: list[list[Float64Array]] = field(default_factory=list)

    def with_others(self, others: Sequence[AnswerRows]) -> AnswerRows:
        """Return the means of these probabilities and those of the same question in other orders of its values or
        options; of answers that are asked about one by one, their shares."""
        every, apart = [self, *others], self.own.apart
        joined = normalised if apart else np.asarray
        audited: list[Float64Array | None] = []
        for at in range(len(self.scored)):
            full = [each.audited[at] for each in every]
            # A prompt that is not compressed has its scores already.
            own = [each.scores[at] if found is None else found for each, found in zip(every, full, strict=True)]
            audited.append(None if all(found is None for found in full) else joined(np.mean(own, axis=0)))
        said = np.stack([each.scores.argmax(axis=-1) for each in every])
        return replace(
            self,
            audited=audited,
            logprobs=np.logaddexp.reduce([each.logprobs for each in every]) - math.log(len(every)),
            divided=mean_log_shares([each.divided for each in every], apart=apart),
            scores=joined(np.mean([each.scores for each in every], axis=0)),
            order_decided=None if apart else (said != said[0]).any(axis=0),
        )

    def calibrated_by(self, probabilities: Mapping[str, Probabilities]) -> AnswerRows:
        """Return them with the calibrated probabilities of their question, if it has some."""
        own = probabilities.get(self.own.name)
        return self if own is None else replace(self, calibrated=own(self.divided))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRows(_Rows):
    """Rows of a window that have a score or an error: the data of their columns."""

    schema: OutputSchema
    prompt_tokens: list[int | None]  # of all its prompts [rows]
    errors: list[RowError | None]  # None where the row has a score [rows]
    questions: list[AnswerRows] = field(default_factory=list)  # the same rows with the answers to each question

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
        these names."""
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

        def spread(results: Sequence[ScoredRow], part: int) -> dict[str, Any]:
            own = {prompt.row: prompt for prompt in window.prompts if prompt.part == part}
            return {
                "numbers": numbers,
                "prompts": [own.get(row) for row in numbers.tolist()],
                "scored": list(results),
                "places": np.searchsorted(numbers, np.array([each.row for each in results], np.int64)),
            }

        def made(own: AnswerColumns, results: Sequence[ScoredRow], part: int) -> AnswerRows:
            given = spread(results, part)
            most = max([len(own.labels), 1, *(len(each.logprobs) for each in results)])
            logprobs = np.full((len(results), most), -np.inf)
            divided, read = logprobs.copy(), dict[int, LabelSet]()
            for row, (each, place) in enumerate(zip(results, given["places"].tolist(), strict=True)):
                count, prompt = len(each.logprobs), given["prompts"][place]
                if own.measure is Measure.SHARES and prompt is not None and prompt.labels.weights:
                    read[row] = prompt.labels
                    continue
                divided[row, :count] = each.logprobs
                logprobs[row, :count] = each.logprobs if prompt is None else prompt.labels.whole(each.logprobs)
            scores, decisions = label_scores(divided, temperature, own.measure), []
            audited = [
                None if each.audit is None else label_scores(each.audit, temperature, own.measure) for each in results
            ]
            if read:
                width = len(own.labels)
                logprobs, divided, scores = (each[:, :width] for each in (logprobs, divided, scores))
            for row, labels in read.items():
                each = results[row]
                scores[row] = labels.shares(each.logprobs, temperature)
                logprobs[row], divided[row] = _followed(labels, each.logprobs)
                audited[row] = None if each.audit is None else labels.shares(each.audit, temperature)
            if own.measure is Measure.DECISIONS:
                decisions = [_decided(prompts[each.row], each.answers, temperature) for each in results]
                scores = np.array([[asked[0][0]] for asked in decisions]).reshape(-1, 1)
            return AnswerRows(
                **given,
                own=own,
                logprobs=logprobs,
                scores=scores,
                audited=audited,
                divided=divided,
                decisions=decisions,
            )

        rows = cls(
            **spread(results, 0),
            schema=schema,
            prompt_tokens=[sum(len(each.whole) for each in prompts.get(row, ())) or None for row in numbers.tolist()],
            errors=[errors.get(row) for row in numbers.tolist()],
        )
        failed: dict[int, RowError] = {}
        for number, own in enumerate(schema.questions):
            chosen = set(numbers.tolist()) if own.when is None else own.when(rows)
            answers = {each.row: schema.answers_of(each) for each in results if each.row in chosen}
            for row, each in answers.items():
                both = [each[part] for part in (number, *own.others)]
                if (why := next((one.error for one in both if one.error is not None), None)) is not None:
                    failed.setdefault(row, why)
            answered = [each for row, each in answers.items() if row not in failed and len(each[number].logprobs)]
            found = made(own, [each[number] for each in answered], number)
            if own.others:
                found = found.with_others([made(own, [each[at] for each in answered], at) for at in own.others])
            rows.questions.append(found.calibrated_by(probabilities))
        if failed:
            left = [each for each in results if each.row not in failed]
            return cls.of(window, left, errors | failed, schema, temperature, probabilities)
        return rows

    def arrays(self) -> list[pa.Array]:
        """Return the columns of `OutputSchema.results` for these rows."""
        arrays = []
        for column in self.schema.columns:
            values = column.values(self)
            columns = np.asarray(values).T if column.labels else [values]
            arrays += [pa.array(each, column.type) for each in columns]
        return arrays

    def values(self, names: Set[str]) -> dict[str, list[Any]]:
        """Return the values [rows] of the named columns of `OutputSchema.conditional`, by name; only these are
        computed."""
        found: dict[str, list[Any]] = {}
        for column in self.schema.columns:
            own = column.names
            if not column.conditional or names.isdisjoint(own):
                continue
            values = np.asarray(column.values(self), object).reshape(len(self.numbers), len(own))
            found |= {name: values[:, at].tolist() for at, name in enumerate(own) if name in names}
        return found


class Column(NamedTuple):
    """A column of every output."""

    name: str  # with `<label>` it stands for one column a label
    type: pa.DataType
    # A value for every row, None for null [rows]; with `<label>` [rows, labels]. Of a question, by its `AnswerRows`.
    values: Callable[[Any], Sequence[Any] | ObjectArray]
    counted: bool = False  # whether `Counts.add_rows` needs it
    group: Group | None = None  # only an output with this group has it; None: every output
    # Whether a `RowCondition` may use it: its value is known when a row is scored, and the same in every run of the
    # job.
    conditional: bool = True
    least_labels: int = 0  # only a question with this many labels has it
    # Only a question whose labels have one of these measures has it.
    measures: tuple[Measure, ...] = tuple(Measure)
    # "label": the answer itself, which questions with a name have in other forms. "answer": beside it, for each
    # question. "row": once for all.
    part: Literal["row", "label", "answer"] = "row"
    labels: tuple[str, ...] = ()  # where the name has `<label>`, those of the question

    @property
    def names(self) -> list[str]:
        """The name of the column, or one name for each label."""
        return [self.name.replace("<label>", label) for label in self.labels] if self.labels else [self.name]

    def of_question(self, number: int, own: AnswerColumns) -> Column:
        """Return the column for the answers to the question of this number."""
        return self._replace(
            name=own.column(self.name) if self.name else own.name,
            values=lambda rows: self.values(rows.questions[number]),
            labels=own.labels if "<label>" in self.name else (),
        )


def _best(rows: AnswerRows, scores: Iterable[Float64Array | None]) -> list[str | None]:
    labels = rows.own.labels
    return [labels[int(each.argmax())] if len(labels) > 1 and each is not None else None for each in scores]


def _of_result(name: str) -> Callable[[_Rows], ObjectArray]:
    return lambda rows: rows.of_scored([getattr(scored, name) for scored in rows.scored])


def _full_only(rows: AnswerRows, values: npt.NDArray[Any], *, heads: bool = False) -> ObjectArray:
    # Values over the whole vocabulary [scored, ...], for every row [rows, ...]; None where a row left early. Answers
    # of `heads` are all that there is, and may count as whole.
    spread = rows.of_scored(values)
    left = [each.exit_layer is not None and not (heads and by_head(each.method)) for each in rows.scored]
    spread[rows.places[np.array(left, np.bool_)]] = None
    return spread


def _calibrated(rows: AnswerRows) -> ObjectArray:
    # Calibrated probabilities of the labels [rows, labels].
    return rows.of_scored(np.empty((0, len(rows.own.labels))) if rows.calibrated is None else rows.calibrated)


def _by_label(rows: AnswerRows, values: Float64Array | None) -> ObjectArray:
    # The numbers of each row [scored, labels] by the names of the labels.
    own = () if values is None else values.tolist()
    return rows.of_scored([dict(zip(rows.own.labels, each, strict=True)) for each in own])


def _of_rationale(name: str) -> Callable[[AnswerRows], ObjectArray]:
    # A field of `Rationale`; None where nothing was to be written.
    return lambda rows: rows.of_scored([each.rationale and getattr(each.rationale, name) for each in rows.scored])


def _gaps(rows: AnswerRows) -> ObjectArray:
    # The smallest gaps; None where no token was chosen.
    found = [each.rationale for each in rows.scored]
    return rows.of_scored([own.gap if own is not None and math.isfinite(own.gap) else None for own in found])


def _lists(rows: AnswerRows, values: Float64Array) -> ObjectArray:
    # A list of each row's own numbers, of `values` [scored, labels].
    found = np.full(len(rows.numbers), None, object)
    for place, each, own in zip(rows.places.tolist(), rows.scored, values, strict=True):
        found[place] = own[: len(each.logprobs)]
    return found


def _likeliest(rows: AnswerRows) -> ObjectArray:
    found, text_of = np.full(len(rows.numbers), None, object), rows.own.token_text
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


def _pair_scores(rows: AnswerRows) -> ObjectArray:
    # The score of each prompt of a row.
    found, measure = np.full(len(rows.numbers), None, object), rows.own.measure
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        found[place] = [float(label_scores(answer.logprobs, measure=measure)[0]) for answer in each.answers]
    return found


def _decided(prompts: Sequence[Prompt], answers: Sequence[ScoredRow], temperature: float) -> list[Float64Array]:
    # The probabilities of the options of each question of a row: their means over the orders in which they are listed,
    # or their shares where each is asked about by itself. Those about texts without content are divided out.
    found: dict[str, list[Float64Array]] = {}
    empty: dict[str, list[Float64Array]] = {}
    shared = set()
    for prompt, answer in zip(prompts, answers, strict=True):
        own = empty if prompt.empty else found
        own.setdefault(prompt.question, []).append(prompt.labels.shares(answer.logprobs, temperature))
        shared |= {prompt.question} if prompt.labels.weights or prompt.empty else set()
    means = {name: np.mean(each, axis=0) for name, each in found.items()}
    for name, each in empty.items():
        means[name] = means[name] / np.maximum(np.mean(each, axis=0), np.finfo(float).tiny)
    return [normalised(each) if name in shared else each for name, each in means.items()]


def _followed(labels: LabelSet, divided: Float64Array) -> tuple[Float64Array, Float64Array]:
    # Log-probabilities of the options that follow from labels: over the whole vocabulary, with the labels' mass
    # together, and as they are.
    with np.errstate(divide="ignore"):
        shares = labels.shares(divided, 1.0)
        whole = np.log(normalised(shares)) + np.log(label_mass(labels.whole(divided)))
        return whole, np.log(shares)


def _indices(scores: Iterable[Float64Array | None]) -> list[int | None]:
    return [None if each is None else int(each.argmax()) for each in scores]


def _choice_texts(rows: AnswerRows) -> ObjectArray:
    prompts = [rows.prompts[place] for place in rows.places.tolist()]
    chosen = zip(prompts, _indices(rows.scores), strict=True)
    return rows.of_scored([None if p is None or at is None else p.labels.texts[at] for p, at in chosen])


def _of_target(value: Callable[[ReadTokens], Any]) -> Callable[[AnswerRows], ObjectArray]:
    # A value of the tokens that were read one by one.
    return lambda rows: rows.of_scored([each.by_token and value(each.by_token) for each in rows.scored])


def _token_logprobs(rows: AnswerRows) -> ObjectArray:
    found = np.full(len(rows.numbers), None, object)
    for place, each in zip(rows.places.tolist(), rows.scored, strict=True):
        found[place] = each.by_token and each.by_token.logprobs
    return found


def _of_text(value: Callable[[LabelSet], int]) -> Callable[[AnswerRows], ObjectArray]:
    # A number of the texts themselves.
    def found(rows: AnswerRows) -> ObjectArray:
        prompts = [rows.prompts[place] for place in rows.places.tolist()]
        return rows.of_scored([None if prompt is None else value(prompt.labels) for prompt in prompts])

    return found


_target_bytes = _of_text(lambda target: target.text_bytes)


def _bits_per_byte(rows: AnswerRows) -> ObjectArray:
    sizes = _target_bytes(rows)[rows.places].astype(np.float64)
    return rows.of_scored(-rows.logprobs[:, 0] / math.log(2) / sizes)


def _evidence(rows: AnswerRows) -> ObjectArray:
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
    for answers in rows.questions:
        floors = answers.own.floors
        doubt = doubtful(answers.scores, floors) if floors else np.zeros(len(answers.places), np.bool_)
        for place in answers.places[doubt].tolist():
            found[place].append(answers.own.key)
    return found


# The contribution of each section of a prompt, the largest change first.
EVIDENCE = pa.list_(pa.struct([("section", pa.string()), ("change", pa.float64())]))
_TARGET: Any = {"counted": True, "measures": (Measure.LIKELIHOOD,), "part": "label"}
_CHOICES: Any = {"measures": (Measure.CHOICES,), "conditional": False, "part": "label"}
_NUMBERED = (Measure.SHARES, Measure.CHANCES, Measure.VALUES)
_WRITTEN: Any = {"group": "rationales", "conditional": False, "part": "answer"}

# In the order of the output, after the id and the columns that are carried from the input.
COLUMNS = (
    Column("score", pa.float64(), lambda rows: rows.of_scored(rows.scores[:, 0]), counted=True, part="label"),
    Column("probability", pa.float64(), lambda rows: _calibrated(rows)[:, 0], group="calibrated", part="label"),
    Column(
        "logprob_<label>",
        pa.float64(),
        lambda rows: _full_only(rows, rows.logprobs, heads=True),
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
        lambda rows: rows.of_scored(rows.scores @ np.array(rows.own.values)),
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
    Column("bits_per_byte", pa.float64(), _bits_per_byte, measures=(Measure.LIKELIHOOD,), part="label"),
    Column(
        "token_logprobs",
        pa.list_(pa.float64()),
        _token_logprobs,
        measures=(Measure.LIKELIHOOD,),
        group="token_logprobs",
        conditional=False,
        part="label",
    ),
    Column("likeliest", batches.LIKELIEST, _likeliest, measures=(Measure.TOKENS,), conditional=False, part="label"),
    Column(
        "pair_scores",
        pa.list_(pa.float64()),
        _pair_scores,
        group="pair_scores",
        measures=_NUMBERED,
        conditional=False,
        part="label",
    ),
    Column(
        "decisions",
        pa.list_(pa.list_(pa.float64())),
        lambda rows: rows.of_scored(rows.decisions),
        measures=(Measure.DECISIONS,),
        conditional=False,
        part="label",
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
    Column("review", pa.list_(pa.string()), _in_doubt, group="review", conditional=False),
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


def answer_columns(own: AnswerColumns) -> list[Column]:
    """Return the columns of a question, in the order of `COLUMNS`; of one with a name the answer comes first, by its
    type."""
    found = [
        column
        for column in COLUMNS
        if column.part != "row"
        and (column.group is None or column.group in own.groups)
        and len(own.labels) >= column.least_labels
        and own.measure in column.measures
    ]
    return [*_typed_answer(own), *(each for each in found if each.part == "answer")] if own.name else found


def _typed_answer(own: AnswerColumns) -> Iterator[Column]:
    several = pa.struct([(name, pa.float64()) for name in own.labels])
    if own.type == "predicate":
        yield Column("", pa.float64(), lambda rows: rows.of_scored(rows.scores[:, 0]))
    else:
        if own.type == "score":
            numbers = np.array(own.values)
            yield Column("", pa.float64(), lambda rows: rows.of_scored(rows.scores @ numbers))
        else:
            plain = pa.bool_() if own.options and all(isinstance(each, bool) for each in own.options) else pa.string()
            said = own.options if plain == pa.bool_() else own.labels
            yield Column("", plain, lambda rows: rows.of_scored([said[at] for at in rows.scores.argmax(axis=-1)]))
        sure = score_confidence if own.type == "score" else choice_confidence
        yield Column(PROBABILITIES, several, lambda rows: _by_label(rows, rows.scores), conditional=False)
        yield Column("confidence", pa.float64(), lambda rows: rows.of_scored(sure(rows.scores)))
    if "calibrated" in own.groups and own.type == "predicate":
        yield Column(CALIBRATED, pa.float64(), lambda rows: _calibrated(rows)[:, 0])
    elif "calibrated" in own.groups:
        yield Column(CALIBRATED, several, lambda rows: _by_label(rows, rows.calibrated), conditional=False)


COLUMN_TYPES = {column.name: column.type for column in COLUMNS}

"""The estimate of a job: the rows that the model has read, a cheaper reading of all rows, and the report of both.

It is the share of rows with an answer in a finite file, by labelled rows and by guesses about all rows. The labelled
rows are drawn at random, without replacement. Guesses come from a cheaper reader; nothing is assumed of them. The
estimate is that of prediction-powered inference (PPI++: Angelopoulos, Duchi and Zrnic 2023, arXiv 2311.01453), which
for a finite population is the difference estimator of survey sampling (Cochran, Sampling Techniques, 1977, section 7):

    share = mean(y) + weight * (1 - n / N) * (mean of guesses of the other rows - mean of guesses of labelled rows)

with `y` of the n labelled rows of N. As the file is finite and every guess is known, its variance is that of the
labelled rows' residuals y - weight * guess alone, times (1 - n / N) / n. The weight, from 0 to 1, is the one with the
smallest variance (equation 6 of PPI++); 0 is the plain estimate. So the variance is never larger than the plain one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from prefillcli.core.roles import Judge
from prefillcli.engines.base import Readings
from prefillcli.errors import UsageError
from prefillcli.options.judging import EstimateOptions
from prefillcli.reading.exits.first import readings_of
from prefillcli.report.finding import Finding
from prefillcli.report.section import Part, Section, counted, minutes_and_seconds, percent, percent_interval, visible
from prefillcli.rows.records import Prompt
from prefillcli.runtime import log
from prefillcli.runtime.clock import step
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.intervals import Interval, exact_interval
from prefillcli.stats.labels import Measure, label_probabilities
from prefillcli.stats.ridge import ridge

if TYPE_CHECKING:
    from prefillcli.core.inputs import OpenRows
    from prefillcli.core.run import Reached, Run
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.prompts.labels import Labels
    from prefillcli.reading.exits.exits import Exits
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.schema import OutputSchema

CONFIDENCE: Final = 0.95
_Z: Final = 1.959963984540054  # the 97.5 % point of the normal distribution
# With fewer labelled rows with the answer, or without it, the plain interval is exact, and no guess is used: a
# variance of so few rows shows little.
_FEW: Final = 10
SETTLED = "estimate"  # in the ledger of a job
_LEAST = -1e3  # the least label log-probability: a fit takes no infinite ones
_SHOWN = 6  # labels on the line of the terminal


class Share(NamedTuple):
    """A share of all rows, its interval, and the weight of the guesses in it."""

    value: float
    interval: Interval
    weight: float = 0.0


def plain_share(hits: float, rows: float, population: float) -> Share:
    """Return the share by the labelled `rows` alone, `hits` of which have the answer, in a file of `population` rows.

    The interval is Wilson's (JASA 22, 1927), with the correction for a finite population: the variance of the share is
    smaller by (N - n) / (N - 1). With few hits or misses it is that of Clopper and Pearson.
    """
    value = hits / rows
    if rows >= population:
        return Share(value, (value, value))
    if min(hits, rows - hits) < _FEW:
        return Share(value, _known(exact_interval(hits, rows, CONFIDENCE), hits, rows, population))
    worth = rows * (population - 1) / (population - rows)  # rows of an infinite file that show as much
    shrink = 1 + _Z**2 / worth
    centre = (value + _Z**2 / (2 * worth)) / shrink
    half = _Z / shrink * math.sqrt(value * (1 - value) / worth + _Z**2 / (4 * worth**2))
    return Share(value, _known((centre - half, centre + half), hits, rows, population))


def guided_share(truth: Float64Array, guesses: Float64Array, others: float, population: float) -> Share:
    """Return the share by labelled rows and guesses.

    `truth` [rows] is 1 for a labelled row that has the answer, else 0. `guesses` [rows] must not have been fitted to
    their own rows; `others` is the mean guess of the rows that are not labelled. If the plain interval is not wider,
    the result is the plain share.
    """
    rows, hits = len(truth), float(truth.sum())
    plain = plain_share(hits, rows, population)
    spread = float(np.var(guesses)) if rows else 0.0
    if min(hits, rows - hits) < _FEW or rows >= population or not spread:
        return plain
    common = float(np.mean((truth - truth.mean()) * (guesses - guesses.mean())))
    weight = min(max(common / spread, 0.0), 1.0)
    left = 1 - rows / population
    value = plain.value + weight * left * (others - float(guesses.mean()))
    # Where guesses are nearly always right, a few hundred rows show none of the wrong ones, and the variance that they
    # show is far too small. Half of z^2 is added to the squares, as Wilson adds a quarter to those of one count: the
    # residuals err in both directions.
    squares = float(np.var(truth - weight * guesses)) * rows**2 / (rows - 2) + _Z**2 / 2
    half = _Z * math.sqrt(left * squares) / rows
    interval = _known((value - half, value + half), hits, rows, population)
    if interval[1] - interval[0] >= plain.interval[1] - plain.interval[0]:
        return plain
    return Share(min(max(value, interval[0]), interval[1]), interval, weight)


def corrected_share(chain: int, left: int, rows: int, audited: int, out: int, into: int) -> Share:
    """Return the share of an answer where cheaper readers have decided some rows, and an audit knows how these flip.

    `chain` of all `rows` have the answer in the output, `left` of all rows were decided early. Among these, the
    `audited` ones were also read in full: `out` of them have the answer in full but not in the output, and `into` in
    the output but not in full. The interval is exact: each of the two shares has one of Clopper and Pearson, with half
    of the error.
    """
    half = (1 + CONFIDENCE) / 2
    (out_low, out_high), (into_low, into_high) = (exact_interval(each, audited, half) for each in (out, into))
    value, step = chain / rows, left / rows
    low, high = (min(max(value + step * each, 0.0), 1.0) for each in (out_low - into_high, out_high - into_low))
    return Share(min(max(value + step * (out - into) / audited, low), high), (low, high), 1.0)


def _known(interval: Interval, hits: float, rows: float, population: float) -> Interval:
    # The interval without shares that the labelled rows rule out, as they are rows of the file.
    return max(interval[0], hits / population), min(interval[1], 1 - (rows - hits) / population)


# Guesses of the model's answers, from cheaper readings of the same rows.


FOLDS: Final = 5
_SEED: Final = 20_263
_SCALES: Final = tuple(2.0**power for power in np.arange(-3, 4.1, 0.5))


class _Fold(NamedTuple):
    # A fit to all labelled rows but those of a fold: label logits are points @ weights + bias, of which the softmax is
    # taken at this scale. `usual` are the shares of the answers among its rows.
    weights: Float64Array
    bias: Float64Array
    scale: float
    usual: Float64Array

    def guess(self, points: Float64Array) -> Float64Array:
        seen = np.isfinite(points).all(axis=1)
        found = np.tile(self.usual, (len(points), 1))
        if seen.any():
            found[seen] = label_probabilities((points[seen] @ self.weights + self.bias) * self.scale)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Guesser:
    """Guesses probabilities of answers by the readings of one reader.

    Each labelled row has a guess by a fit to the other folds' rows, so that the labelled rows show how wrong guesses
    are (Zrnic and Candes, Cross-prediction-powered inference, 2024, PNAS 121). Another row has the mean guess of all
    fits.
    """

    reader: int
    own: bool  # whether it reads the labels' logits, not the hidden state
    folds: tuple[_Fold, ...]
    held_out: Float64Array  # [labelled rows, labels]

    def guess(self, readings: Sequence[Readings]) -> Float64Array:
        """Return guesses [rows, labels] for rows that are not labelled, by the `readings` of each reader."""
        points = _points(readings[self.reader], self.own)
        return np.asarray(np.mean([fold.guess(points) for fold in self.folds], axis=0))


def fit_guesser(readings: Sequence[Readings], final: Float64Array) -> Guesser:
    """Fit the guesser with the smallest squared error (Brier's) on left-out rows, by the `readings` of labelled
    rows by each reader and their `final` label log-probabilities [rows, labels]."""
    made = [_fitted(number, own, each, final) for number, each in enumerate(readings) for own in (False, True)]
    truth = indicators(final)
    return min(made, key=lambda each: float(np.mean((each.held_out - truth) ** 2)))


def indicators(final: Float64Array) -> Float64Array:
    """Return 1 for the likeliest label of each row, else 0 [rows, labels]."""
    return np.asarray(np.arange(final.shape[1]) == final.argmax(axis=1)[:, None], np.float64)


def _fitted(reader: int, own: bool, readings: Readings, final: Float64Array) -> Guesser:
    points, truth = _points(readings, own), indicators(final)
    target = final - final.mean(axis=1, keepdims=True)
    seen = np.isfinite(points).all(axis=1)
    fold_of = np.random.default_rng(_SEED).permutation(len(final)) % FOLDS
    folds, held_out = [], np.zeros_like(truth)
    for number in range(FOLDS):
        rest = fold_of != number
        folds.append(_fold(points[rest & seen], target[rest & seen], truth[rest & seen], truth[rest].mean(axis=0)))
        held_out[~rest] = folds[-1].guess(points[~rest])
    return Guesser(reader, own, tuple(folds), held_out)


def _fold(points: Float64Array, target: Float64Array, truth: Float64Array, usual: Float64Array) -> _Fold:
    labels = target.shape[1]
    if len(points) < 2:
        logits = np.log(np.maximum(usual, 1e-9))
        return _Fold(np.zeros((points.shape[1], labels)), logits, 1.0, usual)
    found = ridge(points, target)
    errors = [float(np.mean((label_probabilities(found.held_out * scale) - truth) ** 2)) for scale in _SCALES]
    return _Fold(found.weights, found.bias, _SCALES[int(np.argmin(errors))], usual)


def _points(readings: Readings, own: bool) -> Float64Array:
    # The inputs of the fit [rows, inputs]; NaN where the reader could not read a row.
    values = np.asarray(readings.logits if own else readings.hidden, np.float64)
    if own:
        return np.asarray(values - values.mean(axis=1, keepdims=True))
    lengths = np.linalg.norm(values, axis=1, keepdims=True)
    return np.asarray(values / np.where(lengths > 0, lengths, 1))


class LabelShare(BaseModel):
    """The share of an answer in the input."""

    question: str = ""  # of several, the one that it answers
    label: str
    share: float
    interval: Interval
    plain_share: float  # by the rows that the model has read alone
    plain_interval: Interval
    weight: float  # of the guesses, from 0 to 1; at 0 the share is the plain one
    # The plain interval, had the seconds of the cheaper reading gone to more rows by the model.
    equal_cost_interval: Interval | None = None

    @property
    def name(self) -> str:
        """The label, behind the question's name if it has one."""
        return ".".join(filter(None, (self.question, self.label)))


class EstimateUse(Finding):
    """An estimate. Rows that cannot be scored are left out of the shares."""

    key: ClassVar[str] = "estimate"
    place: ClassVar[int] = 11

    rows: int  # of the input that can be scored; without a cheaper reading by the share among those that were read
    read_rows: int  # that the model has read in full
    audited_rows: int = 0  # those of them that exits would have decided, in a job with exits
    confidence: float = CONFIDENCE
    seconds: float | None = None  # of the model for its rows; None in a job with exits
    guessed_rows: int = 0  # read by the cheaper reader too, or alone
    guess_seconds: float = 0.0
    # What guesses are made of, those of some questions or all; None: there are none.
    guessed_by: Literal["hidden", "labels", "hidden, labels", "exits"] | None = None
    shares: list[LabelShare]

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the estimate in terminal, page, metrics and summary."""
        return [_section(self)]


def _asked(run: Run) -> Sequence[Labels]:
    # The labels of each question; further prompts of a row ask the same ones in other orders.
    return run.inputs.labels.asked[: len(run.inputs.schema.questions)]


def estimate(run: Run, exits: Exits | None, scorer: ModelScorer | None) -> None:
    """Make the estimate that `--estimate` asks for, of a job whose output is finished, and keep it in the ledger. The
    first models of the `exits` are those of the `scorer`; None: there are none."""
    drawn = run.inputs.source.selection().within(0, run.inputs.source.count())
    numbers, finals, seconds = _answers(run, drawn)
    if not len(numbers):
        log.warning("--estimate: no row was scored, so nothing is known of the others")
        return
    read = len(numbers)
    rows = max(round(run.inputs.source.count() * read / len(drawn)), read)
    guesses = _guesses(run, exits, scorer, numbers, finals, drawn) if len(drawn) < run.inputs.source.count() else None
    rows = rows if guesses is None else read + guesses.others
    more = read * guesses.seconds / seconds if guesses is not None and seconds else 0.0
    shares = []
    for part, (labels, final) in enumerate(zip(_asked(run), finals, strict=True)):
        truth = indicators(final)
        for at, name in enumerate(labels.names):
            hits = float(truth[:, at].sum())
            found = plain_share(hits, read, rows)
            if guesses is not None:
                found = guided_share(truth[:, at], guesses.by[part].held_out[:, at], guesses.mean[part][at], rows)
            shares.append(label_share(labels.question.name, name, hits, read, rows, found, more))
    kinds = set() if guesses is None else {"labels" if each.own else "hidden" for each in guesses.by}
    use = EstimateUse(
        rows=rows,
        read_rows=read,
        seconds=seconds,
        guessed_rows=0 if guesses is None else rows,
        guess_seconds=0.0 if guesses is None else guesses.seconds,
        guessed_by=cast("Any", ", ".join(sorted(kinds)) or None),
        shares=shares,
    )
    run.sink.settle(run.sink.settled | {SETTLED: use.model_dump(mode="json")})


def estimate_audited(run: Run) -> None:
    """Make the estimate of a job with exits, from its finished output."""
    names = ("prediction", "exit_layer", "audit_prediction")
    asked = [each for each in run.inputs.schema.questions if each.when is None and each.has_shares]
    columns = [name for each in asked for name in (*each.told, *map(each.column, names[0 if not each.name else 1 :]))]
    table = pa.concat_tables(run.sink.tables(list(dict.fromkeys([*columns, "error"]))))
    table = table.filter(pc.is_null(table["error"]))
    rows, shares, most = len(table), list[LabelShare](), np.zeros(3, np.int64)
    for each in asked:
        said, layers, full = (each.with_answer(table)[each.column(name)] for name in names)
        left, audited = np.asarray(pc.is_valid(layers)), np.asarray(pc.is_valid(full))
        both = left & audited
        if not both.any():
            continue
        most = np.maximum(most, [rows - (left & ~audited).sum(), both.sum(), left.sum()])
        answers = [np.array(column.to_pylist(), object) for column in (said, full)]
        for label in each.labels:
            here, there = (own == label for own in answers)
            out, into = (int((one & ~other)[both].sum()) for one, other in ((there, here), (here, there)))
            found = corrected_share(int(here.sum()), int(left.sum()), rows, int(both.sum()), out, into)
            shares.append(label_share(each.name, label, float(there.sum()), int(audited.sum()), rows, found, 0.0))
    if not shares:
        return
    read, audits, guessed = most.tolist()
    use = EstimateUse(
        rows=rows, read_rows=read, audited_rows=audits, guessed_rows=guessed, guessed_by="exits", shares=shares
    )
    run.sink.settle(run.sink.settled | {SETTLED: use.model_dump(mode="json")})


def label_share(question: str, label: str, hits: float, read: int, rows: int, found: Share, more: float) -> LabelShare:
    """Return the share of a question's label that `hits` of the `read` rows have, in a file of `rows` rows.

    Guesses cost as much as reading `more` rows.
    """
    plain = plain_share(hits, read, rows)
    scale = 1 + more / read  # both counts are rounded alike: hits are never more than rows
    equal = plain_share(hits * scale, read * scale, rows) if more else None
    return LabelShare(
        question=question,
        label=label,
        share=found.value,
        interval=found.interval,
        plain_share=plain.value,
        plain_interval=plain.interval,
        weight=found.weight,
        equal_cost_interval=None if equal is None else equal.interval,
    )


def _answers(run: Run, drawn: Int64Array) -> tuple[Int64Array, list[Float64Array], float]:
    # The numbers of the scored rows, the label log-probabilities [rows, labels] of each question, and the seconds that
    # they took. The output has the drawn rows in their order.
    asked = run.inputs.schema.questions
    table = pa.concat_tables(run.sink.tables([*(name for own in asked for name in own.logs), "seconds", "error"]))
    scored = np.array([code is None for code in table["error"].to_pylist()], np.bool_)
    finals = [own.logs_in(table)[scored] for own in asked]
    seconds = float(np.asarray(table["seconds"].to_pylist(), np.float64)[scored].sum())
    return drawn[scored], [np.maximum(final, _LEAST) for final in finals], seconds


@dataclass(slots=True)
class _Guesses:
    by: list[Guesser]  # of each question
    mean: list[Float64Array]  # over the rows that the model has not read [labels]
    others: int  # these rows
    seconds: float


def _guesses(
    run: Run,
    exits: Exits | None,
    scorer: ModelScorer | None,
    numbers: Int64Array,
    finals: Sequence[Float64Array],
    drawn: Int64Array,
) -> _Guesses | None:
    # The guesses about all rows; None where nothing is cheaper than the model. First the rows with these numbers are
    # read, to which the guessers are fitted, then all that were not drawn.
    seconds, labels = 0.0, run.inputs.labels

    def read(prompts: Sequence[Prompt]) -> list[list[Readings]]:
        # Of each question by each reader.
        nonlocal seconds
        begun = time.monotonic()
        found = () if exits is None or scorer is None else exits.glance(scorer, prompts, run.tick)
        seconds += time.monotonic() - begun
        places = [[at for at, prompt in enumerate(prompts) if prompt.part == part] for part in range(len(finals))]
        return [[readings_of([each[at] for at in own]) for each in found] for own in places]

    source, builder = run.inputs.again(whole=True)  # the job's own source has the drawn rows alone
    try:
        own = [prompt for batch in source.rows(numbers) for prompt in builder.build(batch, labels)[0]]
        if not (labelled := read(own))[0]:
            return None
        guessers = [fit_guesser(each, final) for each, final in zip(labelled, finals, strict=True)]
        if not run.settings.run.quiet:
            log.info(f"--estimate: {counted(source.count() - len(drawn), 'row')} more, by --first alone")
        step("reading the other rows")
        totals, others = [np.zeros(final.shape[1]) for final in finals], 0
        for batch in source.batches():
            rest = batch.only(np.flatnonzero(~np.isin(batch.rows, drawn)))
            prompts = builder.build(rest, labels)[0] if len(rest.rows) else []
            if prompts:
                for total, guesser, each in zip(totals, guessers, read(prompts), strict=True):
                    total += guesser.guess(each).sum(axis=0)
                others += sum(prompt.part == 0 for prompt in prompts)
    finally:
        builder.close()
    return _Guesses(guessers, [total / max(others, 1) for total in totals], others, seconds)


# The report of a run.


def _section(use: EstimateUse) -> Section:
    found = Section(title="Estimate", lines=[("estimate", _shares(use)), ("estimate, cost", _cost(use))])
    table = [["answer", "share", "95 % interval", "rows that were read alone", "weight of guesses"]]
    for each in use.shares:
        plain = f"{percent(each.plain_share)}, {percent_interval(each.plain_interval)}"
        table.append([each.name, percent(each.share), percent_interval(each.interval), plain, f"{each.weight:.2f}"])
    found.parts = [Part(table=table, note=NOTE)]
    found.tiles = [(visible(each.name, line=True), percent(each.share)) for each in use.shares[:1]]
    for name, text, values in (
        ("estimate_share", "Share of the answer in the input.", [each.share for each in use.shares]),
        ("estimate_low", "Lower end of the 95 % interval.", [each.interval[0] for each in use.shares]),
        ("estimate_high", "Upper end of the 95 % interval.", [each.interval[1] for each in use.shares]),
    ):
        found.metric(name, text, {each.name: value for each, value in zip(use.shares, values, strict=True)}, "label")
    found.summary = {"estimate": {each.name: [each.share, *each.interval] for each in use.shares}}
    return found


NOTE = (
    "Shares of the rows of the input that can be scored, by the model's own answers. They do not say that the model "
    "is right. Each interval holds with 95 % probability, not all together."
)


def _shares(use: EstimateUse) -> str:
    order = sorted(use.shares, key=lambda each: -each.share)
    texts = [
        f"{visible(each.name, line=True)} {percent(each.share)}, {percent_interval(each.interval)}"
        for each in order[:_SHOWN]
    ]
    return "; ".join([*texts, *(["..."] if len(order) > _SHOWN else [])])


def _cost(use: EstimateUse) -> str:
    text = f"the model read {use.read_rows:,} of {counted(use.rows, 'row')} in full"
    if use.seconds is None:
        return f"{text}, {use.audited_rows:,} of which exits would have decided"
    text += f", in {minutes_and_seconds(use.seconds)}"
    if use.guessed_by is None:
        return text
    text += f"; the cheaper reading took {minutes_and_seconds(use.guess_seconds)} for all"
    first = use.shares[0]
    plain = (
        f"; without it the interval of {visible(first.name, line=True)} is {percent_interval(first.plain_interval)}"
    )
    if first.equal_cost_interval is None:
        return text + plain
    return (
        f"{text}{plain}, and with as many seconds of the model instead {percent_interval(first.equal_cost_interval)}"
    )


class Estimating(Judge):
    """The estimate of a job, by the rows that it has read."""

    def __init__(self, options: EstimateOptions) -> None:
        self._asked = options.estimate is not None

    def check(self, rows: OpenRows, labels: Labels, schema: OutputSchema) -> None:
        if not self._asked:
            return
        if labels.measure is not Measure.SHARES or schema.lines is not None:
            raise UsageError(
                "--estimate: it is about answers that all rows may have, in this program's own columns\n"
                "leave it out, or ask with --labels or --questions"
            )
        if any(each.when is not None for each in schema.questions):
            raise UsageError("--estimate: whether a question with when is asked depends on others\nleave it out")

    def is_missing(self, run: Run) -> bool:
        """Return whether `--estimate` asks for an estimate that the job does not have yet."""
        return self._asked and SETTLED not in run.sink.settled

    def ended(self, run: Run) -> None:
        if not self._asked:
            with run.clock.phase("evaluate"), run.stop.at_once():
                estimate_audited(run)

    def reported(self, report: RunReport, reached: Reached) -> None:
        found = None if reached.sink is None else reached.sink.settled.get(SETTLED)
        report.add(None if found is None else EstimateUse.model_validate(found))

"""The statistics of exits: layers and thresholds that learning rows prove, and the test of them by later rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from prefillcli.core.request import Request
from prefillcli.engines.base import Answer, Readings
from prefillcli.models.open import Opened, Small, dtype_name
from prefillcli.models.shape import NoCostModel, keys_share, prefill_flops
from prefillcli.reading.exits.findings import ALL_ROWS, ClassFinding, ExitFinding, ExitFindings, FlipsOf, TradePoint
from prefillcli.reading.exits.policy import (
    KNOWS,
    ExitLayer,
    ExitPolicy,
    Probe,
    fit_best,
    lead_of,
    margin_error,
    relative,
)
from prefillcli.rows.records import BEFORE
from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array
from prefillcli.stats.flips import flip_bound, rows_for

if TYPE_CHECKING:
    from prefillcli.models.find import ModelFiles

FALSE_ALARMS = 0.05
_WIDTH = 2  # the rates at which drift is looked for are on average about this many times the allowed one


def drift_alarm(flips: int, rows: int, max_flips: float, false_alarms: float = FALSE_ALARMS) -> bool:
    """Return whether `flips` of the `rows` seen so far show a flip rate above `max_flips`.

    It may be called after every row of a job: if the rate is never above `max_flips`, the probability that it ever
    returns True is at most `false_alarms`. It depends on the counts alone. Raises as `drift_evidence`.
    """
    return drift_evidence(flips, rows, max_flips) >= -math.log(false_alarms)


def drifted_classes(
    counts: Sequence[tuple[int, int]], max_flips: float, false_alarms: float = FALSE_ALARMS
) -> tuple[int, ...]:
    """Return the numbers of the classes whose (flips, rows) so far raise the alarm.

    `false_alarms` is shared among the classes: it is the probability that any of them ever does in a job without
    drift.
    """
    own = false_alarms / max(len(counts), 1)
    return tuple(number for number, (flips, rows) in enumerate(counts) if drift_alarm(flips, rows, max_flips, own))


def drift_evidence(flips: int, rows: int, max_flips: float) -> float:
    """Return the logarithm of a test martingale against flip rates of at most `max_flips`.

    It is the mixture of the likelihood ratios of all higher rates to `max_flips`, weighted by a beta distribution that
    is cut off there (Robbins, Annals of Mathematical Statistics 41, 1970). Each ratio, and so their mixture, is a
    supermartingale for every allowed rate, and starts at 1. So by Ville's inequality (1939) the probability that it
    ever reaches 1 / a is at most a. It also holds where the rate changes from row to row, as long as it stays below
    `max_flips`. Raises ValueError unless 0 <= flips <= rows and 0 < max_flips < 1.
    """
    from scipy.special import betaln

    if not 0 <= flips <= rows:
        raise ValueError(f"{flips} flips of {rows} rows")
    if not 0 < max_flips < 1:
        raise ValueError(f"a flip rate is between 0 and 1, not {max_flips}")
    first, second = 1.0, max((1 - max_flips) / (_WIDTH * max_flips), 1.0)
    after = (first + flips, second + rows - flips)
    mixed = float(betaln(*after) - betaln(first, second)) + _log_above(*after, max_flips)
    fixed = flips * math.log(max_flips) + (rows - flips) * math.log1p(-max_flips)
    return mixed - _log_above(first, second, max_flips) - fixed


def chance_of(flips: int, rows: int, rate: float) -> float:
    """Return the probability that as many of the `rows` flip, or more, at a flip `rate`: an exact binomial test."""
    from scipy.special import betainc

    # the upper tail of a binomial distribution is an incomplete beta function: P(X >= k) = I_rate(k, n - k + 1)
    return 1.0 if flips == 0 else float(betainc(flips, rows - flips + 1, rate))


def detectable_rate(rows: int, rate: float, false_alarms: float, power: float) -> float:
    """Return the smallest flip rate that this many rows distinguish from `rate` with the probability `power`.

    They do so if `chance_of` their flips is below `false_alarms`.
    """
    from scipy.special import betaincinv

    flips = next((flips for flips in range(rows + 1) if chance_of(flips, rows, rate) < false_alarms), None)
    return 1.0 if flips is None else float(betaincinv(flips, rows - flips + 1, power))


def _log_above(first: float, second: float, rate: float) -> float:
    # The logarithm of the probability that a beta distribution gives to rates above `rate`.
    from scipy.special import betaincc

    above = float(betaincc(first, second, rate))
    return math.log(above) if above > 0 else -math.inf


# Rows of a job that were read in full, for its exits.


@dataclass(frozen=True, eq=False, slots=True)
class LearningRows:
    """Rows of a job that were read in full.

    `readings` are taken after each observed layer, numbered from 0. `final` are the label log-probabilities of the
    full read, float64 [rows, labels]. `weights` [rows] are the tokens that each row pays for alone, one or more.
    """

    readings: Mapping[int, Readings]
    final: Float64Array
    weights: Float64Array

    def __len__(self) -> int:
        return len(self.final)

    @property
    def truth(self) -> Int64Array:
        """The label that the full read gives, int64 [rows]."""
        return np.asarray(self.final.argmax(axis=1), np.int64)

    @property
    def labels(self) -> int:
        return int(self.final.shape[1])

    def read_after(self, layer: int) -> BoolArray:
        """Return a mask of the rows with a reading there [rows]; a first model may not be able to read all."""
        return np.asarray(np.isfinite(self.readings[layer].hidden).all(axis=1), np.bool_)

    @property
    def before(self) -> dict[int, BoolArray]:
        """The rows that each of the first models can read, masks [rows], by layer."""
        return {layer: self.read_after(layer) for layer in self.readings if layer <= BEFORE}

    def chosen(self, rows: Int64Array | BoolArray) -> LearningRows:
        """Return some of the rows."""
        readings = {
            layer: Readings(each.hidden[rows], each.logits[rows], each.before[rows])
            for layer, each in self.readings.items()
        }
        return LearningRows(readings, self.final[rows], self.weights[rows])

    def sound(self) -> BoolArray:
        """Return a mask of the rows with finite values only [rows].

        Those that a first model cannot read are sound: they must be judged too, as they may leave inside the model.
        """
        sound: BoolArray = np.ones(len(self), dtype=np.bool_)
        inside = [readings for layer, readings in self.readings.items() if layer > BEFORE]
        shown = [each for readings in inside for each in (readings.hidden, readings.logits, readings.before)]
        for values in (self.final, *shown):
            sound &= np.isfinite(values).all(axis=1)
        return sound


def halves(rows: LearningRows, seed: int, flips_of: FlipsOf = "each") -> tuple[LearningRows, LearningRows]:
    """Return two halves with half of each class, drawn with `seed`: a row's half depends on its class and luck alone.

    If a class has an odd number of rows, the second half has one more. Where the flips of all rows are bounded
    together, all rows are one class: the judged ones must be a plain random sample, whose shares of the labels are
    left to luck.
    """
    draws = np.random.default_rng(seed)
    fit: list[Int64Array] = []
    classes = class_numbers(rows.truth, flips_of)
    for number in np.unique(classes):
        own = draws.permutation(np.flatnonzero(classes == number))
        fit.append(own[: len(own) // 2])
    first = np.sort(np.concatenate(fit)) if fit else np.zeros(0, np.int64)
    return rows.chosen(first), rows.chosen(np.setdiff1d(np.arange(len(rows)), first))


def class_numbers(truth: Int64Array, flips_of: FlipsOf) -> Int64Array:
    """Return the class [rows] that each row is judged with: that of its label, or one for all rows."""
    return truth if flips_of == "each" else np.zeros_like(truth)


MOST_LAYERS = 12  # the most layers that are read of each row
_SPARE = 1.25  # rows that are read, as a multiple of those needed if all answers are equally frequent


def observed_layers(layers: int) -> tuple[int, ...]:
    """Return the layers that may become exits, numbered from 0: no more than `MOST_LAYERS`."""
    candidates = range(layers // 4, layers - 1)
    step = -(-len(candidates) // MOST_LAYERS) if candidates else 1
    return tuple(reversed(range(layers - 2, candidates.start - 1, -step)))


def learning_rows(
    requests: Sequence[Request], answers: Sequence[Answer], layers: Sequence[int], labels: int
) -> LearningRows:
    """Return the rows of requests that were answered in full, with readings after `layers`; each answer has
    `labels`."""

    def joined(number: int) -> Readings:
        shown = [answer.readings[number] for answer in answers]
        return Readings(
            np.concatenate([each.hidden for each in shown]),
            np.concatenate([each.logits for each in shown]),
            np.concatenate([each.before for each in shown]),
        )

    return LearningRows(
        readings={layer: joined(number) for number, layer in enumerate(layers) if answers},
        final=np.array([answer.logprobs for answer in answers], np.float64).reshape(-1, labels),
        weights=np.array([len(request.tokens) for request in requests], np.float64),
    )


def rows_to_learn(max_flips: float, classes: int) -> int:
    """Return the number of rows that prove the bound for each class in spite of a flip, if all classes are equally
    frequent."""
    return round(2 * _SPARE * rows_for(max_flips, flips=1) * classes)


def rows_for_rarest(counts: Int64Array, max_flips: float, most: int) -> int:
    """Return the number of rows that prove the bound for the rarest answer in spite of a flip, by the counts of each
    answer so far. At most `most`; no more than so far if even these would not prove it without a flip.
    """
    rows, rarest = int(counts.sum()), int(counts.min())
    if not rarest or 2 * rows_for(max_flips) * rows > most * rarest:
        return rows
    return max(rows, min(most, round(2 * _SPARE * rows_for(max_flips, flips=1) * rows / rarest)))


# Costs and savings of exits, in layers of a token.


@dataclass(frozen=True, slots=True)
class ExitCosts:
    """Shares of one layer's work for one token.

    `keys` is the work to store only its K,V, as the last layer does for all tokens but the last. `repeated` is the
    work that a peek does twice for tokens that stay: q, k and v. `regroup` is the work to lay out a token that stays
    anew. `reading` is for a row, not for a token: its last token goes through the layer, norm, head and probe alone.
    """

    keys: float = 0.04
    repeated: float = 0.115
    regroup: float = 0.05
    reading: float = 3.0
    # The reading of a token by each of the first models to its end, and to layers inside it, in layers of the model.
    first: Mapping[int, float] = field(default_factory=dict)
    # Of layers inside a first model, that of its end.
    ends: Mapping[int, int] = field(default_factory=dict)


def exit_costs(config: Any) -> ExitCosts:
    """Return the costs of exits for a model with this configuration.

    A profile has measured them, but exits must be the same with and without one.
    """
    try:
        share = keys_share(config)
    except NoCostModel:
        return ExitCosts()
    return ExitCosts(keys=share, repeated=share)


def reading_cost(small: Small, opened: Opened, lengths: Sequence[tuple[int, int]], width: int | None = None) -> float:
    """Return what a first model's readings of prompts cost, over reading them in full, where they have these
    `lengths`, at least one: in the first model's tokens and in the model's.

    It decides which rows are read in full, so it is made of counted operations, and of the speed of the device's
    products, of the usual or this `width`, where the first model multiplies other numbers. With the clock, a busy
    machine would decide.
    """
    own, full = zip(*lengths, strict=True)
    try:
        if small.files.encoder:
            raise NoCostModel("operations of encoders are not counted")
        share = _operations(small.files, own) / _operations(opened.files, full)
    except NoCostModel:
        share = _numbers(small.files, opened) * sum(own) / (_numbers(opened.files, opened) * sum(full))
    form, than = small.narrow or dtype_name(small.files), dtype_name(opened.files)
    if form == than:
        return share
    from prefillcli.models.dtype import times_as_long

    return share * times_as_long(form, than, opened.device, width)


def _operations(files: ModelFiles, lengths: Sequence[int]) -> float:
    return sum(count * prefill_flops(files.config, length).total for length, count in Counter(lengths).items())


def _numbers(files: ModelFiles, opened: Opened) -> float:
    # The operations of the weights in the layers: each is multiplied once for a token, unless it is an expert's.
    from prefillcli.models.weights import layer_bytes

    found = layer_bytes(files, opened.device)
    return sum(size for number, size in found.items() if number is not None) / files.dtype.itemsize


_MOST_GAIN = 1000.0


class Work(NamedTuple):
    """The cost of rows, the exits that they take, and the exits that peek.

    `share` is the work over that of rows that are all read in full. `left` [rows] has the number of the exit that each
    row takes, -1 where it goes on to the end. `peeks` and `leaving`, the share of all rows, have an entry for each
    exit. `layers` is the mean number of layers that a token goes through.
    """

    share: float
    left: npt.NDArray[np.int64]
    peeks: tuple[bool, ...]
    leaving: tuple[float, ...]
    layers: float

    @property
    def gain(self) -> float:
        """The work of rows in full over it. Words cost nothing, and more than `_MOST_GAIN` is not told."""
        return 1 / max(self.share, 1 / _MOST_GAIN)


def work_of(
    decided: npt.NDArray[np.bool_],
    exit_layers: Sequence[int],
    weights: Float64Array,
    layers: int,
    costs: ExitCosts,
    before: Mapping[int, BoolArray] | None = None,
) -> Work:
    """Return the work for rows of which `decided` [exits, rows] may leave after `exit_layers`, numbered from 0.

    Each row pays for `weights` [rows] tokens alone, through this number of `layers`. `before` are the rows that first
    models can read, masks [rows] by layer (None: all). An exit peeks where that is cheaper: rows that leave skip the
    layer except for its K,V; rows that stay compute a part of it twice.
    """
    full = layers - 1 + costs.keys
    inside = np.ones(decided.shape[1], dtype=np.bool_)
    left = np.full(decided.shape[1], -1, dtype=np.int64)
    paid = np.zeros(decided.shape[1])
    gone = np.full(decided.shape[1], full)
    peeks: list[bool] = []
    reached: dict[int, float] = {}  # by the end of a first model, the cost of a token that is paid already
    for number, layer in enumerate(exit_layers):
        going = inside & decided[number]
        staying = inside & ~decided[number]
        if layer <= BEFORE:  # a row that it can read is read, and a decided one is not begun
            read = inside if before is None else inside & before[layer]
            cost, end = costs.first.get(layer, 0.0), costs.ends.get(layer, layer)
            paid[read] += (cost - reached.get(end, 0.0)) * weights[read]
            reached[end] = cost
            if end != layer:
                paid[read] += costs.reading
                paid[read & staying] += costs.regroup * weights[read & staying]
            gone[going] = 0
            left[going] = number
            peeks.append(False)
            inside = staying
            continue
        paid[inside] += costs.reading
        paid[staying] += costs.regroup * weights[staying]
        spared, twice = (1 - costs.keys) * weights[going].sum(), costs.repeated * weights[staying].sum()
        peeks.append(bool(spared > twice))
        gone[going] = layer + (costs.keys if peeks[-1] else 1)
        if peeks[-1]:
            paid[staying] += costs.repeated * weights[staying]
        left[going] = number
        inside = staying
    total = float(weights.sum())
    walked = float((gone * weights).sum()) / total
    leaving = tuple(float(np.mean(left == number)) for number in range(len(exit_layers)))
    return Work((walked + float(paid.sum()) / total) / full, left, tuple(peeks), leaving, walked)


# The lowest valid thresholds: learn-then-test with exact bounds for each class of rows.
#
# A *caution* stands for all thresholds at once: the threshold of a label at an exit layer is the caution times the
# spread of the errors of the probe there. So a lower caution lets more rows leave at every layer.
#
# A class consists of the rows that get one label when they are read in full. Its flip rate at a caution is the share
# of its rows that some exit layer sends away with another label. The cautions are tested by fixed-sequence testing
# (Angelopoulos et al., Learn then Test, 2021, arXiv 2110.01052, section 4.2): from the safest one down, each by an
# exact bound of the flip rate, until one fails. The order is fixed before the judged rows are looked at. So the
# probability that the last caution that passes has a higher flip rate than allowed is at most 1 - confidence, however
# many cautions are tried: to err, the first caution that is too low must pass, and that is one test.
#
# Each class has its own sequence, with its own rows. A label leaves at the largest of the cautions of the *other*
# classes: these are the rows that its exits can flip. That is valid for each class, because its flips only become
# fewer
# - as the caution of any label rises: fewer rows are sent away at any layer;
# - as exit layers are dropped;
# - as rows leave earlier with the right label. They count as flips here, if a later layer would have sent them away
#   with a wrong one, and then cannot flip.
# For the same reasons the test of a class does not depend on the cautions of the others.
#
# With flips_of=all all rows are one class, with one sequence of tests, and every label leaves at its caution.
#
# The bound is binomial (Clopper and Pearson, Biometrika 26, 1934), or, where the rows are a large part of a job,
# hypergeometric, because they are drawn from its rows without replacement. That takes the number of a class's rows in
# the job. An upper bound of it, from the same rows, is enough: a flip rate that is refused for that many rows is
# refused for fewer too. That bound fails with a probability of `_SIZE_RISK`, by which the tests are more confident
# (Berger and Boos, Journal of the American Statistical Association 89, 1994). Which bound is taken depends on numbers
# of rows alone, not on their labels or flips.


# In the order in which they are tested: each is 2 % lower than the one before.
CAUTIONS: Final = tuple(float(caution) for caution in np.geomspace(64, 0.02, 405))


class Caution(NamedTuple):
    """The last caution that passed for a class, infinity if none did, with the flips and rows there.

    `bound` is the upper bound of the flip rate there; `passed` is the number of cautions that passed.
    """

    caution: float
    flips: int
    rows: int
    bound: float
    passed: int


def endangered(cautions: Float64Array, wrong: npt.NDArray[np.bool_]) -> Float64Array:
    """Return the caution [rows] at and below which some exit sends a row away with a wrong label; -infinity where none
    ever does.

    `cautions` [exits, rows] are those at and below which the rows leave.
    """
    if not len(cautions):
        return np.full(cautions.shape[1], -math.inf)
    return np.asarray(np.where(wrong, cautions, -math.inf).max(axis=0), np.float64)


def least_caution(danger: Float64Array, max_flips: float, confidence: float, of: float | None = None) -> Caution:
    """Test all cautions with the rows of a class, which are `endangered` at and below the cautions `danger` [rows].

    They are drawn from at most as many as `of`; None: from infinitely many.
    """
    rows, most = len(danger), most_flips(len(danger), max_flips, confidence, of)
    flips = rows - np.searchsorted(np.sort(danger), CAUTIONS, side="left")  # at each caution; never fewer at the next
    passed = int(np.searchsorted(flips, most, side="right"))
    if not passed:
        return Caution(math.inf, 0, rows, flip_bound(0, rows, confidence, of), 0)
    last = int(flips[passed - 1])
    return Caution(CAUTIONS[passed - 1], last, rows, flip_bound(last, rows, confidence, of), passed)


@lru_cache(maxsize=1024)
def most_flips(rows: int, max_flips: float, confidence: float, of: float | None = None) -> int:
    """Return the most flips of the rows that still prove a flip rate of at most `max_flips`; -1 if not even 0 do."""
    flips = -1
    while flips + 1 < rows and flip_bound(flips + 1, rows, confidence, of) <= max_flips:
        flips += 1
    return flips


def cautions_of_labels(by_class: Sequence[Caution], labels: int) -> tuple[float, ...]:
    """Return the caution at which each label leaves: the largest of the other classes', or that of the only class."""
    if len(by_class) == 1:
        return (by_class[0].caution,) * labels
    return tuple(
        max(each.caution for other, each in enumerate(by_class) if other != label) for label in range(len(by_class))
    )


def judge_classes(
    cautions: Float64Array,
    wrong: npt.NDArray[np.bool_],
    numbers: npt.NDArray[np.int64],
    max_flips: float,
    confidence: float,
    sizes: Sequence[float | None],
) -> tuple[Caution, ...]:
    """Return the lowest caution of each class. `cautions` and `wrong` are [exits, rows], `numbers` [rows] is the class
    of each row, and `sizes` [classes] are the most rows that each class is drawn from, None where that is unknown."""
    danger = endangered(cautions, wrong)
    return tuple(
        least_caution(danger[numbers == each], max_flips, confidence, size) for each, size in enumerate(sizes)
    )


_SIZE_RISK: Final = 0.001  # the probability that a class has more rows than is assumed
_LARGE_PART: Final = 0.1  # of the job's rows: with fewer, knowing the number of a class gains less than its risk costs


def class_sizes(truth: Int64Array, fitted: Int64Array, classes: int, of: int | None) -> tuple[float | None, ...]:
    """Return the most rows that the judged ones of each class are drawn from, in a job with `of` rows.

    `truth` [rows] are the classes of the rows that were read in full, `fitted` those of the half that does not judge.
    None: unknown, or not worth knowing.
    """
    if of is None or (classes > 1 and len(truth) < _LARGE_PART * of):
        return (None,) * classes
    if classes == 1:
        return (float(of - len(fitted)),)
    return tuple(
        flip_bound(int((truth == each).sum()), len(truth), 1 - _SIZE_RISK, of) * of - int((fitted == each).sum())
        for each in range(classes)
    )


def short_of_rows(
    label: str | None, rows: int, total: int, max_flips: float, confidence: float, of: float | None = None
) -> str | None:
    """Return the message about a class with too few judged rows to prove anything; None if there are enough.

    `rows` of the `total` judged ones are of the class, and as many again only serve the fit. The `label` is None where
    all rows are one class.
    """
    needed = rows_for(max_flips, confidence=confidence, of=of)
    if rows >= needed:
        return None
    said = f"the full read answers {rows:,} of {total:,} judged rows with {label!r}"
    if label is None:
        said = f"{rows:,} rows were judged"
    most = f"it takes {needed:,} without a flip to prove at most {max_flips:.2%}"
    if not rows:
        return f"{said}, and {most}"
    return f"{said}, and {most}: about {2 * math.ceil(total * needed / rows):,} learning rows in all"


# The choice of exit layers: two-level scheduling (SpecEE, section 5) for rows that are all known in advance.


MOST_EXITS: Final = 6
WORTH: Final = 0.003  # share of the full read's work that one more exit must save


class Candidate(NamedTuple):
    """A layer that may become an exit: its probe, and its quality on rows that were left out of the fit.

    `errors` are those of `fit_best`, `correlation` is that of predicted and final margins. It `knows` something if its
    error is small enough compared with that of the mean answer. `spread` is the root mean square of the errors of
    predicted leads. `label` [rows] is the predicted label of each row, and `reach` [rows] the lead in units of the
    spread: a row leaves at this caution and below.
    """

    layer: int
    probe: Probe
    errors: dict[str, float]
    correlation: float
    knows: bool
    spread: float
    label: Int64Array
    reach: Float64Array


def candidate_of(fit: LearningRows, layer: int, seed: int) -> Candidate:
    """Return the best probe for a layer. `fit` has the rows to fit it to; those without a reading there stay."""
    read = fit.read_after(layer)
    if not read.all():
        found = candidate_of(fit.chosen(read), layer, seed)
        label, reach = np.zeros(len(fit), np.int64), np.full(len(fit), -math.inf)
        label[read], reach[read] = found.label, found.reach
        return found._replace(label=label, reach=reach)
    (probe, held_out), errors = fit_best(fit.readings[layer], fit.final, seed)
    final, lead = relative(fit.final), lead_of(held_out)
    two = np.take_along_axis(final, np.argsort(held_out, axis=1)[:, -2:], axis=1)
    spread = max(float(np.sqrt(np.mean((lead.ahead - two[:, 1] + two[:, 0]) ** 2))), 1e-9)
    knows = errors[probe.kind] <= KNOWS * margin_error(final - final.mean(axis=0))
    correlation = _correlation(held_out, final)
    return Candidate(layer, probe, errors, correlation, knows, spread, lead.label, lead.ahead / spread)


def work_at(
    exits: Sequence[Candidate], cautions: Sequence[float], fit: LearningRows, layers: int, costs: ExitCosts
) -> Work:
    """Return the cost of the rows that exits were fitted to, each by a prediction that left it out, at `cautions`
    [labels]."""
    at = np.asarray(cautions)
    decided = np.stack([each.reach >= at[each.label] for each in exits])
    return work_of(decided, [each.layer for each in exits], fit.weights, layers, costs, fit.before)


def choose_layers(
    found: Sequence[Candidate],
    fit: LearningRows,
    task: _Task,
) -> list[Candidate]:
    """Choose the exits that save most after their own cost, in the order of the layers; none if nothing saves enough.

    The cautions are those that left-out rows of the fitting half allow, by the test that will judge the other half. A
    layer whose probe knows nothing is not an exit: it could let a few rows leave by the toss of a coin without too
    many flips. Greedy: it adds the best layer until none saves enough more.
    """
    chosen: list[Candidate] = []
    least = 1.0
    while len(chosen) < MOST_EXITS:
        taken = {each.layer for each in chosen}
        able = [each for each in found if each.knows and each.layer not in taken]
        tries = [sorted([*chosen, each], key=lambda own: own.layer) for each in able]
        shares = [work_at(exits, _allowed(exits, fit, task), fit, task.layers, task.costs).share for exits in tries]
        if not shares or min(shares) > least - WORTH:
            break
        least = min(shares)
        chosen = tries[shares.index(least)]
    return chosen


def without_useless(
    chosen: Sequence[Candidate], cautions: Sequence[float], fit: LearningRows, layers: int, costs: ExitCosts
) -> list[Candidate]:
    """Return the exits without those that cost more than they save at these cautions: fewer exits never flip more
    rows."""
    kept = list(chosen)
    least = work_at(kept, cautions, fit, layers, costs).share
    while kept:
        tries = [[other for other in kept if other is not each] for each in kept]
        shares = [work_at(exits, cautions, fit, layers, costs).share if exits else 1.0 for exits in tries]
        if min(shares) > least:
            break
        least = min(shares)
        kept = tries[shares.index(least)]
    return kept


def _allowed(exits: Sequence[Candidate], fit: LearningRows, task: _Task) -> tuple[float, ...]:
    reach, wrong = np.stack([each.reach for each in exits]), np.stack([each.label != fit.truth for each in exits])
    return cautions_of_labels(task.judged(reach, wrong, fit), fit.labels)


def _correlation(predicted: Float64Array, final: Float64Array) -> float:
    # The correlation of margins between the two labels that are likeliest over all rows; 0 where a margin does not
    # vary.
    two = np.argsort(final.mean(axis=0))[-2:]
    margins = [each[:, two[1]] - each[:, two[0]] for each in (predicted, final)]
    if min(float(np.std(each)) for each in margins) == 0:
        return 0.0
    return float(np.corrcoef(margins[0], margins[1])[0, 1])


# Share of the full read's work that exits must save in each half of the rows, by the cost model.
LEAST_SAVED: Final = 0.01
_FEWEST = 20  # rows that probes are fitted to
_CURVE: Final = tuple(float(caution) for caution in np.geomspace(8, 0.25, 21))


@dataclass(frozen=True, eq=False, slots=True)
class ExitProof:
    """The exits of a job, None if there are none, and the findings."""

    policy: ExitPolicy | None
    findings: ExitFindings

    @property
    def reason(self) -> str | None:
        """The reason why there are no exits."""
        return self.findings.reason


class _Task(NamedTuple):
    """The terms of a proof."""

    names: tuple[str, ...]
    layers: int
    max_flips: float
    confidence: float
    costs: ExitCosts
    flips_of: FlipsOf
    sizes: tuple[float | None, ...] = ()  # of the classes, as of `class_sizes`

    @property
    def risk(self) -> float:
        """The additional confidence of each test over the proof's, because the size of a class is uncertain."""
        return _SIZE_RISK if len(self.sizes) > 1 and self.sizes[0] is not None else 0.0

    @property
    def classes(self) -> tuple[str, ...]:
        return self.names if self.flips_of == "each" else (ALL_ROWS,)

    def judged(self, cautions: Float64Array, wrong: npt.NDArray[np.bool_], rows: LearningRows) -> tuple[Caution, ...]:
        # The lowest caution of each class; `cautions` and `wrong` are [exits, rows].
        numbers = class_numbers(rows.truth, self.flips_of)
        return judge_classes(cautions, wrong, numbers, self.max_flips, self.confidence + self.risk, self.sizes)


def prove_exits(
    rows: LearningRows,
    *,
    layers: int,
    max_flips: float,
    labels: Sequence[str] = (),
    confidence: float = 0.95,
    seed: int = 0,
    costs: ExitCosts = ExitCosts(),
    flips_of: FlipsOf = "each",
    of: int | None = None,
) -> ExitProof:
    """Fit probes and choose exit layers on one half of the rows, and prove the lowest thresholds on the other.

    The model has this number of `layers`. For each class, the rows that the full read answers with one of the
    `labels`, the probability that more than `max_flips` (a share) of the class leave with another label is at most 1 -
    `confidence` (the comment on cautions explains why). With `flips_of` all rows together it is one class. The halves
    are drawn with `seed`, each with half of every class. Readings of the last layer are ignored. The rows are drawn
    from `of` rows, if their number did not depend on their labels; the bound is then of the flips among those rows
    that did not fit. Raises ValueError unless 0 < max_flips < 1 and 0 < confidence < 1.
    """
    rows_for(max_flips, confidence=confidence)
    task = _Task(
        tuple(labels) or tuple(f"label {number}" for number in range(rows.labels)),
        layers,
        max_flips,
        confidence,
        costs,
        flips_of,
    )
    sound = rows.sound()
    fit, judge = halves(rows if sound.all() else rows.chosen(sound), seed, flips_of)
    every, fitted = (class_numbers(truth, flips_of) for truth in (rows.truth[sound], fit.truth))
    task = task._replace(sizes=class_sizes(every, fitted, len(task.classes), of))
    candidates = tuple(sorted(layer for layer in rows.readings if layer < layers - 1))
    findings = ExitFindings(
        max_flips=max_flips,
        confidence=confidence,
        seed=seed,
        fitted=len(fit),
        judged=len(judge),
        dropped=int((~sound).sum()),
        candidates=candidates,
        classes=_classes(task, fit, judge, ()),
    )
    short = _short(task, judge)
    if not candidates:
        return _none(findings, "no layer before the last was observed")
    # A class that proves nothing keeps rows with the other labels from leaving, but not those with its own.
    if len(fit) < _FEWEST or len(short) > (1 if flips_of == "each" else 0):
        return _none(findings, short[0] if short else f"{len(fit):,} rows are too few to fit probes to")
    able = [layer for layer in candidates if fit.read_after(layer).sum() >= _FEWEST]
    if not able:
        return _none(findings, "--first can read too few of the rows")
    found = [candidate_of(fit, layer, seed) for layer in able]
    chosen = choose_layers(found, fit, task)
    if not chosen:
        best = max(found, key=lambda each: each.correlation)
        return _none(findings, short[0] if short else _nothing_saved(best, task))
    return _proven(findings, task, chosen, fit, judge, short)


def _proven(
    findings: ExitFindings,
    task: _Task,
    chosen: list[Candidate],
    fit: LearningRows,
    judge: LearningRows,
    short: list[str],
) -> ExitProof:
    # The proof with the cautions that the judging half proves for the chosen exits.
    said, reach = _seen(chosen, judge)
    tested = task.judged(reach, said != judge.truth, judge)
    cautions = cautions_of_labels(tested, judge.labels)
    findings = findings.model_copy(
        update={"classes": _classes(task, fit, judge, tested), "curve": _curve(task, chosen, judge)}
    )
    kept = without_useless(chosen, cautions, fit, task.layers, task.costs)
    expected = work_at(kept, cautions, fit, task.layers, task.costs) if kept else None
    work = _work(kept, cautions, judge, task) if kept else None
    if expected is None or work is None or max(expected.share, work.share) > 1 - LEAST_SAVED:
        return _none(findings, short[0] if short else _not_proven(task, tested))
    exits = tuple(
        ExitLayer(each.layer, each.probe, tuple(caution * each.spread for caution in cautions), peek)
        for each, peek in zip(kept, expected.peeks, strict=True)
    )
    update = {
        "exits": tuple(
            ExitFinding(
                layer=own.layer,
                probe=own.probe.kind,
                correlation=each.correlation,
                errors=each.errors,
                thresholds=tuple(value if math.isfinite(value) else None for value in own.thresholds),
                peek=own.peek,
                leaving=leaving,
                saves=_work_without(each, kept, cautions, judge, task) - work.share,
            )
            for each, own, leaving in zip(kept, exits, work.leaving, strict=True)
        ),
        "layers": work.layers,
        "gain": work.gain,
    }
    return ExitProof(ExitPolicy(exits), findings.model_copy(update=update))


def _none(findings: ExitFindings, reason: str) -> ExitProof:
    return ExitProof(None, findings.model_copy(update={"reason": reason}))


def _short(task: _Task, judge: LearningRows) -> list[str]:
    if task.flips_of == "all":
        said = [short_of_rows(None, len(judge), len(judge), task.max_flips, task.confidence, task.sizes[0])]
    else:
        counts = np.bincount(judge.truth, minlength=judge.labels).tolist()
        said = [
            short_of_rows(name, count, len(judge), task.max_flips, task.confidence + task.risk, size)
            for name, count, size in zip(task.names, counts, task.sizes, strict=True)
        ]
    return [each for each in said if each is not None]


def _nothing_saved(best: Candidate, task: _Task) -> str:
    return (
        f"no exit would save work at {task.max_flips:.2%} flips: the best probe, {place_of(best.layer + 1)}, is "
        f"off by {best.spread:.2g} in a margin (correlation {best.correlation:.2f})"
    )


def place_of(layer: int) -> str:
    """Return where rows leave, in words: after this layer, numbered from 1; rows at 0 and less are decided before."""
    return f"after layer {layer}" if layer > 0 else "before layer 1"


def _not_proven(task: _Task, tested: Sequence[Caution]) -> str:
    said = ", ".join(
        f"{name!r} {each.flips:,} of {each.rows:,}" for name, each in zip(task.classes, tested, strict=True)
    )
    return (
        f"the judged rows prove at most {task.max_flips:.2%} flips only where too few rows leave to save work "
        f"(flips there: {said})"
    )


def _seen(exits: Sequence[Candidate], rows: LearningRows) -> tuple[Int64Array, Float64Array]:
    # Predicted labels, and the cautions at and below which rows leave, both [exits, rows].
    leads = [lead_of(each.probe.logits(rows.readings[each.layer])) for each in exits]
    reach = [lead.ahead / each.spread for lead, each in zip(leads, exits, strict=True)]
    said = np.stack([lead.label for lead in leads])
    return said, np.nan_to_num(np.stack(reach), nan=-math.inf, posinf=math.inf)  # without a reading, a row stays


def _work(exits: Sequence[Candidate], cautions: Sequence[float], judge: LearningRows, task: _Task) -> Work:
    # The cost of the judged rows at these cautions [labels]. Only the cautions were chosen on these rows.
    said, reach = _seen(exits, judge)
    decided = reach >= np.asarray(cautions)[said]
    return work_of(decided, [each.layer for each in exits], judge.weights, task.layers, task.costs, judge.before)


def _work_without(
    exit: Candidate, exits: Sequence[Candidate], cautions: Sequence[float], judge: LearningRows, task: _Task
) -> float:
    # The share of the work in full that is left without one of the exits.
    others = [each for each in exits if each is not exit]
    return _work(others, cautions, judge, task).share if others else 1.0


def _classes(
    task: _Task, fit: LearningRows, judge: LearningRows, tested: Sequence[Caution]
) -> tuple[ClassFinding, ...]:
    fitted, judged = (class_numbers(half.truth, task.flips_of) for half in (fit, judge))
    cautions = tested or [Caution(math.inf, 0, 0, 1.0, 0)] * len(task.classes)  # nothing is proven before the tests
    return tuple(
        ClassFinding(
            label=name,
            fitted=int((fitted == number).sum()),
            judged=int((judged == number).sum()),
            flips=caution.flips,
            bound=caution.bound,
            caution=caution.caution if math.isfinite(caution.caution) else None,
            cautions_passed=caution.passed,
            rows_needed=rows_for(task.max_flips, confidence=task.confidence + task.risk, of=size),
        )
        for number, (name, caution, size) in enumerate(zip(task.classes, cautions, task.sizes, strict=True))
    )


def _curve(task: _Task, exits: Sequence[Candidate], judge: LearningRows) -> tuple[TradePoint, ...]:
    # The effect of all exits on the judged rows, caution by caution.
    (said, reach), truth, found = _seen(exits, judge), judge.truth, []
    for caution in _CURVE:
        work = work_of(
            reach >= caution, [each.layer for each in exits], judge.weights, task.layers, task.costs, judge.before
        )
        flipped = (work.left >= 0) & (said[work.left, np.arange(len(truth))] != truth)
        of_class = [flipped[truth == number] for number in range(judge.labels)]
        found.append(
            TradePoint(
                caution=caution,
                leaving=float(np.mean(work.left >= 0)),
                gain=work.gain,
                flip_rate=float(np.mean(flipped)),
                flip_rates=tuple(float(np.mean(each)) if len(each) else None for each in of_class),
            )
        )
    return tuple(found)


# The check of exits that an earlier job has proven: a test on some hundred fresh rows.


_POWER = 0.8


@dataclass(frozen=True, slots=True)
class ClassRecheck:
    """The fresh rows that the full read answers with `label`.

    `chance` is the probability of as many flips or more at the allowed flip rate. A flip rate of `detectable` is found
    in four of five checks with this many rows; None without rows.
    """

    label: str
    rows: int
    flips: int
    chance: float
    detectable: float | None


@dataclass(frozen=True, slots=True)
class ExitRecheck:
    """The check of the proof by fresh rows, and the deviations that they could have found.

    `reason` names the contradiction; None: there is none. `leaving` is the share of the rows that leave.
    """

    ok: bool
    reason: str | None
    leaving: float
    classes: tuple[ClassRecheck, ...]
    text: str  # a sentence on the deviations that the check can and cannot find


def recheck_exits(
    policy: ExitPolicy,
    rows: LearningRows,
    max_flips: float,
    labels: Sequence[str] = (),
    flips_of: FlipsOf = "each",
) -> ExitRecheck:
    """Apply a policy to fresh rows that were read in full, with readings of its layers.

    Some hundred rows cannot prove again that at most `max_flips` flip. So this tests the contrary: an exact binomial
    test in each class whether there are more flips than that rate explains. The probability that it refuses exits that
    hold in all classes is at most 5 %; the classes share it. Raises KeyError if a layer of the policy was not
    observed.
    """
    names = tuple(labels) or tuple(f"label {number}" for number in range(rows.labels))
    names = names if flips_of == "each" else (ALL_ROWS,)
    numbers = class_numbers(rows.truth, flips_of)
    left, flipped = _outcome(policy, rows)
    alarm = FALSE_ALARMS / len(names)
    found = []
    for number, name in enumerate(names):
        own = numbers == number
        count, flips = int(own.sum()), int(flipped[own].sum())
        detectable = detectable_rate(count, max_flips, alarm, _POWER) if count else None
        found.append(ClassRecheck(name, count, flips, chance_of(flips, count, max_flips), detectable))
    bad = [each for each in found if each.chance < alarm]
    said = ", ".join(
        f"{each.flips:,} of {each.rows:,} rows of {each.label!r} flip (chance {each.chance:.1g})" for each in bad
    )
    reason = f"{said}: more than a flip rate of {max_flips:.2%} explains" if bad else None
    can = ", ".join(
        f"{each.detectable:.1%} among {each.rows:,} rows of {each.label!r}" for each in found if each.detectable
    )
    none = ", ".join(repr(each.label) for each in found if not each.rows)
    text = f"four of five such checks would find a flip rate of {can}" if can else "there are no rows to check"
    text += f"; nothing is known of {none}" if none and can else ""
    return ExitRecheck(not bad, reason, float(np.mean(left)) if len(left) else 0.0, tuple(found), text)


def _outcome(policy: ExitPolicy, rows: LearningRows) -> tuple[BoolArray, BoolArray]:
    # The rows that leave, and those of them whose label differs from the full read's.
    left = np.zeros(len(rows), dtype=np.bool_)
    flipped = np.zeros(len(rows), dtype=np.bool_)
    for layer in policy.layers:
        found = policy.decide(layer, rows.readings[layer])
        going = found.decided & ~left
        flipped |= going & (lead_of(found.logprobs).label != rows.truth)
        left |= going
    return left, flipped

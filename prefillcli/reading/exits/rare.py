"""A rare answer: the first model decides rows with recall and precision of the first label proven, not flips.

Each row has a score, which is the higher, the more likely the model answers with the first label. Below the *low* cut
the first model answers no, from the *high* cut on it answers yes, and the model itself reads the rest. Possible cuts
are the edges between bins of the scores.

Rows are drawn without replacement, where they matter: a row of a bin with `left` rows that were not read is drawn with
the probability `odds[bin] / left[bin]`. Let z be a row's share in what is to be proven, known once it is read:

- recall R at an edge: 1 - R for a row that the model answers with the first label, less 1 if it is below the edge.
  The sum over all rows is at least 0 if and only if at least the share R of these rows is not below.
- precision P at an edge: for a row above it 1 - P if the model answers with the first label, else -P; 0 for others.

The sum of z over the rows read so far, plus z of the row that is drawn over its probability, is on average the sum
over all rows. So if that is below 0, a bet on it being positive loses on average: the capital of a player who stakes a
share chosen before each draw is a supermartingale, and the probability that it ever reaches 1 / a is at most a
(Shekhar, Xu, Lipton, Liang and Ramdas, arXiv 2305.06884; Waudby-Smith and Ramdas, arXiv 2010.09686; Ville, 1939). That
holds however the odds, the stakes and the number of draws are chosen, as long as it is by earlier rows.

The edges of a side are tested in a fixed order, the one with the fewest decided rows first, and an edge counts only if
all before it are proven: whatever their number, the probability of a wrong one is at most 1 - confidence.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from prefillcli.core.request import Tick
from prefillcli.reading.exits.findings import ExitFindings
from prefillcli.reading.exits.first import FirstReading, Reader, readings_of
from prefillcli.reading.exits.full_rows import FullRows
from prefillcli.reading.exits.learning import SEED, Lesson
from prefillcli.reading.exits.policy import (
    AffineProbe,
    ExitLayer,
    ExitPolicy,
    ExitProfile,
    LearntExits,
    Probe,
    fit_best,
    identity_of,
    job_of_exits,
)
from prefillcli.reading.exits.report import ExitUse, QuestionExits, RareUse, UsedExit, state_of
from prefillcli.rows.output import ANSWER
from prefillcli.rows.records import BEFORE, Prompt
from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array

_BINS: Final = 64  # of at least this many rows each; 32 further edges lie closer together the higher the scores
_TOP: Final = 60  # rows of the highest bin
_TOGETHER: Final = 300  # rows that are decided together for precision
_STAKES: Final = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)  # shares of what may be lost at most
_SPREAD: Final = 0.5  # share of the draws that every row gets alike, in case scores mislead
_FAINT: Final = 0.05  # rows with the answer that are added to bins in which none was seen
_BATCH: Final = 100  # rows drawn at first before the odds are set anew; later a third of those drawn


class Cuts(NamedTuple):
    """The decided rows: those with scores below `low`, and those with scores of `high` and above."""

    low: float
    high: float


class Search:
    """Finds cuts for rows with these `scores` [rows].

    `known` [known rows] are rows that were read before, and `answers` [known rows] whether they have the answer. Their
    scores may be other predictions than those of the rest: they are not decided. NaN: a row is never decided.
    `read` returns whether rows have the answer.
    """

    def __init__(
        self,
        scores: Float64Array,
        known: Int64Array,
        answers: BoolArray,
        read: Callable[[Int64Array], BoolArray],
        *,
        recall: float | None = None,
        precision: float | None = None,
        confidence: float = 0.95,
        seed: int = 0,
    ) -> None:
        self._draws, self._read = np.random.default_rng(seed), read
        order = np.sort(scores[np.isfinite(scores)])
        even, fine = np.linspace(0, 1, _BINS + 1)[1:-1], np.geomspace(min(1, _TOP / max(len(order), 1)), 0.5, 32)
        places = (np.concatenate([even, 1 - fine]) * len(order)).astype(int)
        self._edges = np.unique(order[places[(places > 0) & (places < len(order))]])
        self._bins = len(self._edges) + 1
        # Rows that are never decided are in the highest bin. For precision they count as if they were decided: with
        # the answer they are right in the output, and without it they make the test the harder.
        self._bin = np.where(np.isfinite(scores), np.searchsorted(self._edges, scores, side="right"), self._bins - 1)
        open_rows = np.ones(len(scores), np.bool_)
        open_rows[known] = False
        self._rows = [
            self._draws.permutation(np.flatnonzero(open_rows & (self._bin == each))) for each in range(self._bins)
        ]
        self.left = np.array([len(rows) for rows in self._rows], np.float64)
        self.seen = np.bincount(self._bin[known], minlength=self._bins).astype(np.float64)
        self.found = np.bincount(self._bin[known], weights=answers, minlength=self._bins).astype(np.float64)
        kinds: list[tuple[Literal["recall", "precision"], float | None]] = [
            ("recall", recall),
            ("precision", precision),
        ]
        self._sides = [
            _Side(kind, target, self._bins, self.seen, self.found, -math.log(1 - confidence), self.left)
            for kind, target in kinds
            if target is not None
        ]
        self.drawn: list[int] = []

    def cuts(self) -> Cuts:
        """Draw rows until a further draw is expected to cost more than it spares."""
        while (count := self._draws_that_pay()) > 0:
            self._draw(min(max(count, 10), max(_BATCH, len(self.drawn) // 3)))
        low, high = -math.inf, math.inf
        for side in self._sides:
            edge = side.proven
            if edge is not None and side.kind == "recall":
                low = float(self._edges[edge - 1])
            elif edge is not None:
                high = float(self._edges[edge - 1])
        return Cuts(min(low, high), high)

    @property
    def _rates(self) -> Float64Array:
        # The estimated share of rows with the answer in each bin: never lower in a higher one.
        from scipy.optimize import isotonic_regression

        weights = np.maximum(self.seen, 1e-6)
        blocks = isotonic_regression(self.found / weights, weights=weights).blocks
        sums = [np.add.reduceat(each, blocks[:-1]) for each in (self.found + 0, self.seen + 0)]
        rates = (sums[0] + _FAINT) / (sums[1] + 2 * _FAINT)
        return np.clip(np.repeat(rates, np.diff(blocks)), 1e-6, 1 - 1e-3)

    @property
    def _odds(self) -> Float64Array:
        # Half alike for all rows, half where rows are most informative.
        telling = [self.left * side.telling(self._rates) for side in self._sides]
        shares = [each / each.sum() for each in telling if each.sum() > 0] or [self.left / self.left.sum()]
        return np.asarray(_SPREAD * self.left / self.left.sum() + (1 - _SPREAD) * np.mean(shares, axis=0), np.float64)

    def _draws_that_pay(self) -> int:
        # The number of draws after which most rows are expected to be spared; 0 if no more should be drawn.
        if not self.left.sum():
            return 0
        odds, rates = self._odds, self._rates
        tables = []
        for side in self._sides:
            needed = side.draws_needed(odds, self.left, rates)
            tables.append((needed, side.decided @ self.left, side.decided @ odds))
        tries = np.unique(np.concatenate([[0.0], *[needed[np.isfinite(needed)] for needed, _, _ in tables]]))
        spared = [
            sum(np.max(rows - count * share, where=needed <= count, initial=0) for needed, rows, share in tables)
            for count in tries
        ]
        return math.ceil(float(tries[int(np.argmax(spared))]))

    def _draw(self, count: int) -> None:
        odds, left, picked = self._odds, self.left.copy(), []
        for _ in range(min(count, int(left.sum()))):
            odds = np.where(left > 0, odds, 0)
            odds /= odds.sum()
            each = int(self._draws.choice(self._bins, p=odds))
            chances = np.where(left > 0, odds / np.maximum(left, 1), 0)
            left[each] -= 1
            picked.append((each, int(self._rows[each][int(left[each])]), chances))
        for (each, _, chances), answer in zip(
            picked, self._read(np.array([row for _, row, _ in picked])), strict=True
        ):
            for side in self._sides:
                side.bet(each, bool(answer), chances)
            self.seen[each] += 1
            self.found[each] += answer
        self.left = left
        self.drawn += [row for _, row, _ in picked]


class _Side:
    """The proofs of one side, for all edges at once: arrays are [edges], or [edges, bins]."""

    def __init__(
        self,
        kind: Literal["recall", "precision"],
        target: float,
        bins: int,
        seen: Float64Array,
        found: Float64Array,
        goal: float,
        left: Float64Array,
    ) -> None:
        self.kind, self._target, self._goal = kind, target, goal
        numbers = np.arange(bins)[None]
        # An edge has the number of the bin above it. In the order of the tests.
        above = np.cumsum(left[::-1])[::-1]
        few = int((above >= min(_TOGETHER, above[0] / 4)).sum())  # above the last edges are too few rows
        self._edges = np.arange(1, bins) if kind == "recall" else np.arange(few - 1, 0, -1)
        if kind == "recall":
            self.decided = numbers < self._edges[:, None]
            self._yes = 1 - target - self.decided
            self._no = np.zeros_like(self._yes)
        else:
            self.decided = numbers >= self._edges[:, None]
            self._yes, self._no = (1 - target) * self.decided, -target * self.decided
        self._worst = -np.minimum(np.minimum(self._yes, self._no), 0)
        self._sum = self._yes @ found + self._no @ (seen - found)
        self._log = np.zeros(len(self._edges))  # of the capital
        self._best = np.zeros(len(self._edges))
        self._stake = np.full(len(self._edges), _STAKES[0])

    @property
    def proven(self) -> int | None:
        """The last edge that is proven with all before it; None: not even the first is."""
        passed = int(np.logical_and.accumulate(self._best >= self._goal).sum())
        return int(self._edges[passed - 1]) if passed else None

    def telling(self, rates: Float64Array) -> Float64Array:
        """Return how informative a row of each bin is, by these `rates` of the answer [bins]: the spread of its
        possible values."""
        if self.kind == "recall":
            return np.asarray(np.sqrt(rates * (1 - rates)), np.float64)
        spread = np.sqrt(rates * (1 - self._target) ** 2 + (1 - rates) * self._target**2)
        return np.asarray(np.where(rates > self._target / 2, spread, 0), np.float64)

    def _most_lost(self, chances: Float64Array) -> Float64Array:
        # The most that a draw can lose for a stake of 1. If that is not above 0, nothing can be lost: the edge is
        # proven.
        losses = np.divide(self._worst, chances, out=np.zeros(self._worst.shape), where=chances > 0)
        return np.asarray(losses.max(axis=1, initial=0) - self._sum, np.float64)

    def bet(self, bin_: int, answer: bool, chances: Float64Array) -> None:
        """Bet on a drawn row of this bin, where a row of each bin had these `chances` [bins]."""
        lost = self._most_lost(chances)
        z = (self._yes if answer else self._no)[:, bin_]
        sure = lost <= 0
        stakes = np.divide(self._stake, lost, out=np.zeros(len(lost)), where=~sure)
        self._log += np.log1p(stakes * (self._sum + z / chances[bin_]))
        self._log[sure] = math.inf
        self._best = np.maximum(self._best, self._log)
        self._sum += z

    def draws_needed(self, odds: Float64Array, left: Float64Array, rates: Float64Array) -> Float64Array:
        """Return the number of draws expected to prove each edge and all before it, by these `rates` of the answer
        [bins].

        It chooses the stakes of the next draws by the same estimates: those by which the capital grows most.
        """
        able = left > 0
        chances = np.divide(odds, left, out=np.zeros(len(left)), where=able)
        lost = np.maximum(self._most_lost(chances), 1e-9)[:, None]
        gains = [(self._sum[:, None] + z[:, able] / chances[able]) / lost for z in (self._yes, self._no)]
        growth: Any = np.stack(
            [
                np.log1p(stake * gains[0]) @ (odds * rates)[able]
                + np.log1p(stake * gains[1]) @ (odds * (1 - rates))[able]
                for stake in _STAKES
            ]
        )
        self._stake, growth = np.array(_STAKES)[growth.argmax(axis=0)], growth.max(axis=0)
        missing = np.maximum(self._goal - self._log, 0)
        needed = np.divide(missing, growth, out=np.full(len(growth), math.inf), where=growth > 1e-9)
        return np.asarray(np.maximum.accumulate(np.where(self._best >= self._goal, 0, needed)), np.float64)


# Finding the rows that the first model decides, in a job.


SCORES: Final = "first.f32"  # in the work folder
_FEWEST: Final = 20  # rows that a probe is fitted to
_LEAST: Final = 1e-3  # lead of a decided row
_FEW, _MANY = 300, 2000  # rows that it is fitted to by default: a twentieth of the job's, but at least and at most


class Remembered:
    """The first model's decisions, made before the first window, as readings: one number per row, NaN if undecided.

    It is the lead of the first label, by which the row leaves. `numbers` [rows] are ascending.
    """

    block = 1 << 31
    inner: tuple[int, ...] = ()

    def __init__(self, numbers: Int64Array, leads: Any, tokens: int, seconds: float) -> None:
        self._numbers, self._leads = numbers, leads
        self.tokens, self.seconds = tokens, seconds

    def read(
        self, prompts: Sequence[Prompt], tick: Tick, policies: Mapping[int, ExitPolicy] | None = None
    ) -> list[FirstReading | None]:
        """Return the reading of each prompt; None for one that was not decided."""
        leads = self._leads[np.searchsorted(self._numbers, [prompt.row for prompt in prompts])]
        return [
            None if np.isnan(lead) else FirstReading(np.zeros(1, np.float32), np.array([lead / 2, -lead / 2]), 0, 0.0)
            for lead in leads.astype(np.float64)
        ]


def rows_to_fit(rows: int) -> int:
    """Return the number of random rows that a probe is fitted to, in a job with `rows` rows."""
    return min(max(rows // 20, _FEW), _MANY)


@dataclass(frozen=True, slots=True)
class RareLearning:
    """Finds the rows that the first model decides, as an exit before the first layer. It is a `Learning`."""

    rows: FullRows
    read_as: Sequence[Any] = ()

    def readers(self) -> Mapping[int, tuple[str, Reader]]:
        name, reader = self.rows.first[BEFORE]
        leads = np.frombuffer(self.rows.run.sink.work.read_bytes(SCORES), "<f4")
        return {BEFORE: (name, Remembered(self.rows.numbers(), leads, reader.tokens, reader.seconds))}

    def keeps(self, use: ExitUse) -> bool:
        try:
            data = self.rows.run.sink.work.read_bytes(SCORES)
        except FileNotFoundError:
            data = b""
        return use.rare is not None and use.rare.digest == hashlib.sha256(data).hexdigest()

    def learn(self) -> Lesson:
        inputs, settings, numbers = self.rows.run.inputs, self.rows.run.settings, self.rows.numbers()
        names = inputs.labels.names
        depth: int = inputs.opened.files.config.get_text_config().num_hidden_layers
        drawn = numbers[np.random.default_rng(SEED).permutation(len(numbers))[: self._count]]
        read = self.rows.read(drawn, (), f"for {settings.exits.exit_option}")
        rows, first = read.of_part(0, len(names)), read.first_use(inputs.opened, self.rows.first)
        known = np.searchsorted(numbers, [request.prompt.row for request in read.requests])
        leads, probe = np.full(len(numbers), math.nan), None
        if read.answers and (able := rows.read_after(BEFORE)).sum() >= _FEWEST:
            chosen = rows.chosen(able)
            (probe, held_out), _ = fit_best(chosen.readings[BEFORE], chosen.final, SEED)
            leads = self._leads(probe, numbers)
            leads[known[able]] = (
                held_out[:, 0] - held_out[:, 1]
            )  # as the probe would predict rows that it has not seen
        apart = replace(self.rows, first={})

        def ask(places: Int64Array) -> BoolArray:
            more = apart.read(numbers[places], (), "as the first model's scores ask for them")
            read.add(more)
            answers = {
                request.prompt.row: answer.logprobs.argmax() == 0
                for request, answer in zip(more.requests, more.answers, strict=True)
            }
            return np.array([answers.get(row, False) for row in numbers[places].tolist()], np.bool_)

        search = Search(
            leads,
            known,
            rows.truth == 0,
            ask,
            recall=settings.exits.recall,
            precision=settings.exits.precision,
            seed=SEED,
        )
        cuts = search.cuts()
        leads[known], leads[search.drawn] = math.nan, math.nan
        decided = _decided(leads, cuts)
        data = decided.astype("<f4").tobytes()
        self.rows.run.sink.work.put_bytes(SCORES, data)
        rare = RareUse(
            label=names[0],
            recall=settings.exits.recall,
            precision=settings.exits.precision,
            below=cuts.low if math.isfinite(cuts.low) else None,
            above=cuts.high if math.isfinite(cuts.high) else None,
            sampled=len(search.drawn),
            refused=int((decided < 0).sum()),
            accepted=int((decided >= 0).sum()),
            digest=hashlib.sha256(data).hexdigest(),
        )
        share = (rare.refused + rare.accepted) / max(len(numbers), 1)
        reason = None if share else "too few rows would be spared by what the rows that were read prove"
        scored = self.rows.counted(read)
        findings = ExitFindings(
            max_flips=settings.flips.max_flips,
            confidence=0.95,
            seed=SEED,
            fitted=len(known),
            judged=rare.sampled,
            reason=reason,
        )
        as_read = AffineProbe(np.eye(2, dtype=np.float32), np.zeros(2, np.float32))
        policy = ExitPolicy((ExitLayer(BEFORE, as_read, (0.0, 0.0), peek=False),))
        learnt = LearntExits(**identity_of(inputs.labels), exits=policy.to_json(), findings=findings)
        profile = ExitProfile(
            **job_of_exits(inputs, self.rows.run.report.fingerprint, self.read_as) | {"questions": [learnt]}
        )
        used = UsedExit(
            layer=BEFORE + 1, probe="" if probe is None else probe.kind, peek=False, thresholds={}, expected=share
        )
        own = QuestionExits(
            status="learnt" if reason is None else "none",
            reason=reason,
            layers=[used] if reason is None else [],
        )
        use = ExitUse(
            **state_of({ANSWER: own}),
            max_flips=None,
            model_layers=depth,
            rows_in_full=len(read.answers),
            learnt_rows=len(scored),
            first=first,
            rare=rare,
            questions={learnt.question or ANSWER: own},
        )
        return Lesson(profile, scored, use)

    @property
    def _count(self) -> int:
        rows = len(self.rows.numbers())
        return int(min(self.rows.run.settings.exits.exit_rows or rows_to_fit(rows), rows // 2))

    def _leads(self, probe: Probe, numbers: Int64Array) -> Float64Array:
        # The lead of the first label over the other, for all rows of the job, as the first model predicts it.
        leads, reader = np.full(len(numbers), math.nan), self.rows.first[BEFORE][1]
        for prompts in self.rows.prompts(numbers):
            able = [prompt for prompt in prompts if len(prompt.tokens) <= self.rows.engine.limits.max_tokens]
            for at in range(0, len(able), reader.block):
                asked = able[at : at + reader.block]
                found = zip(asked, reader.read(asked, self.rows.run.tick), strict=True)
                own = [(prompt.row, each) for prompt, each in found if each is not None]
                if own:
                    logits = probe.logits(readings_of([each for _, each in own]))
                    leads[np.searchsorted(numbers, [row for row, _ in own])] = logits[:, 0] - logits[:, 1]
        return leads


def _decided(leads: Float64Array, cuts: Cuts) -> Float64Array:
    # The leads with which rows leave [rows]; NaN: undecided. Cuts may be on the other side of 0 than their decisions.
    with np.errstate(invalid="ignore"):
        refused, accepted = leads < cuts.low, leads >= cuts.high
    return np.where(refused, np.minimum(leads, -_LEAST), np.where(accepted, np.maximum(leads, _LEAST), math.nan))

"""A job's windows, compressed; with `--keep auto` the rate is chosen on the first one that has rows to compress."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prefillcli.core.request import Request, Tick, answer, draw
from prefillcli.data.rows import Prompt, Window
from prefillcli.engines.base import LabelTokens, PlanEngine
from prefillcli.errors import PrefillError, ResourceError, brief, out_of_resource
from prefillcli.features.compress.base import (
    ENOUGH_ROWS,
    FALLBACKS,
    NOT_FINITE,
    ImportanceEstimate,
    compressed_rows,
    faulty_rows,
)
from prefillcli.features.compress.compressor import Compressor, why_in_full, why_no_rate
from prefillcli.runtime import log
from prefillcli.stats.evaluation import flip_bound, rows_for

if TYPE_CHECKING:
    from prefillcli.jobs.scorer import Scorer

# `--keep auto`: the smallest keep rate that a sample of the rows allows.
#
# The rates are tested from the safest, the largest, down to the first that fails: fixed-sequence testing
# (Angelopoulos et al., Learn then Test, 2021, arXiv 2110.01052, section 4.2). So the probability that the chosen
# rate flips more answers than allowed is at most 5 %, although up to five rates are tested on the same rows at 5 %
# each: to err, the first rate in this order that is too small must pass, and that is one test.


RATES = (0.7, 0.5, 0.3, 0.2, 0.1)
"""The keep rates that are tested, in this order, until one fails."""
ALLOWED_FLIPS = 1  # the sample is so large that a rate with one flip passes


@dataclass(frozen=True, slots=True)
class Trial:
    """A keep rate, tried on the sample. `bound`: with 95 % confidence the flip rate is lower (one-sided, exact)."""

    keep: float
    rows: int
    flips: int
    bound: float


@dataclass(frozen=True, slots=True)
class KeepChoice:
    """The chosen rate, 1 if the first one tested failed, and the trials."""

    keep: float
    trials: tuple[Trial, ...]
    rows_needed: int
    """The fewest rows that can prove a rate: without any flip."""


def sample_rows(max_flips: float) -> int:
    """How many rows the sample has, to prove a flip rate of at most `max_flips`."""
    return rows_for(max_flips, ALLOWED_FLIPS)


def choose_keep(
    compressor: Compressor,
    engine: PlanEngine,
    prompts: Sequence[Prompt],
    estimates: Sequence[ImportanceEstimate],
    chosen: Sequence[int],
    labels: Sequence[LabelTokens],
    max_flips: float,
    tick: Tick = lambda tokens: None,
) -> KeepChoice:
    """Try keep rates on the `chosen` ones of the `prompts`, compressed together with all the others.

    A row flips if its likeliest label is not that of the prompt in full. A rate passes if its flips are so few that
    they prove a flip rate of at most `max_flips`. The last rate that passes before the first that fails is chosen;
    one that compresses too few of these rows to fail or pass is left out.
    """
    needed = rows_for(max_flips)
    trials: list[Trial] = []
    passed = 1.0
    if len(chosen) < needed:
        return KeepChoice(1.0, (), needed)
    full = answer(engine, [Request(prompts[number]) for number in chosen], labels, tick).argmax(axis=1)
    for keep in RATES:
        requests = compressor.select(prompts, compressor.keeps(prompts, keep), estimates)
        tried = [number for number in chosen if requests[number].compressed]
        own = dict(zip(chosen, full.tolist(), strict=True))
        found = answer(engine, [requests[number] for number in tried], labels, tick).argmax(axis=1) if tried else []
        flips = sum(int(label != own[number]) for label, number in zip(found, tried, strict=True))
        trials.append(Trial(keep, len(tried), flips, flip_bound(flips, len(tried))))
        if len(tried) < needed:
            continue  # too few rows are worth compressing so little: this shows nothing
        if trials[-1].bound > max_flips:
            break
        passed = keep
    return KeepChoice(passed, tuple(trials), needed)


ALMOST_ALL = 0.95
"""A job that is to read fewer tokens of a window than this share, and does not, is told why."""


@dataclass(frozen=True, slots=True)
class AutoKeep:
    """`--keep auto`: the share of answers that it may flip, and the number of rows on which it tries rates.

    With 0 `rows` it takes as many as it needs to prove a rate.
    """

    max_flips: float
    rows: int = 0


class WindowCompressor:
    """Decides how the model reads the prompts of each window of a `scorer`.

    Of `--keep auto` it chooses the rate, which is in the plan of the scorer from then on. `methods` are the rows that
    were scored before, by method.
    """

    def __init__(self, scorer: Scorer, compressor: Compressor, *, methods: Mapping[str, int]) -> None:
        settings: Any = scorer.settings
        self.compressor = compressor
        self._scorer = scorer
        self._auto: AutoKeep | None = None
        if settings.keep == "auto" and "keep" not in scorer.plan:
            self._auto = AutoKeep(settings.max_flips, settings.audit)
        self._methods = Counter(methods)
        self._warned = False

    def __call__(self, window: Window, done: Collection[int], tick: Tick) -> list[Request]:
        """`tick` is called with the tokens of each step; it may raise.

        Raises PrefillError if the draft fails on everything; rows that are `done` were counted before.
        """
        compressor, prompts = self.compressor, window.prompts
        wanted = compressor.keeps(prompts, min(RATES) if self._auto else None)
        estimates = compressor.estimate(prompts, wanted, tick)
        self._check(estimates)
        if self._auto and (choice := self._choose(window, wanted, estimates, self._auto, tick)) is not None:
            self._scorer.plan = {**self._scorer.plan, "keep": choice.keep, "keep_auto": asdict(choice)}
        keeps = compressor.keeps(prompts)
        requests = compressor.select(prompts, keeps, estimates)
        if requests and compressor.keep < 1 and not self._warned:
            self._warned = self._warn_of_little(requests, keeps)
        self._methods.update(request.method for request in requests if request.prompt.row not in done)
        return requests

    def _warn_of_little(self, requests: Sequence[Request], keeps: Sequence[float | None]) -> bool:
        """Whether the model reads nearly all tokens of a window in spite of its keep rate; then say why on stderr."""
        read, whole = (
            sum(each) for each in zip(*((r.most_kept, len(r.prompt.tokens)) for r in requests), strict=True)
        )
        if read <= ALMOST_ALL * whole:
            return False
        compressor, prompts = self.compressor, [each.prompt for each in requests]
        number = max(range(len(requests)), key=lambda at: requests[at].most_kept)
        full = sum(not each.compressed for each in requests)
        if keeps[number] is None:
            why = why_no_rate(prompts, keeps, number, compressor.keep, compressor.settings, compressor.worth)
        else:
            why = why_in_full(requests[number]) or "its first and last tokens, which are always kept, are most of it"
        log.warning(
            f"--keep {self.compressor.keep:g} leaves {read / whole:.0%} of the tokens of "
            f"{len(requests):,} rows, {full:,} of them are read in full; row "
            f"{prompts[number].row}, for one: {why}"
        )
        return True

    def _check(self, estimates: Sequence[ImportanceEstimate]) -> None:
        """Raise PrefillError if the draft has failed on all rows so far: `ENOUGH_ROWS`, or those it is tried on.

        The rows of earlier windows are written. Without this the model would read the whole job in full.
        """
        before = self._methods
        if compressed_rows(before) or any(found.importance is not None for found in estimates):
            return
        failed = sum(found.reason is not None and FALLBACKS[found.reason].fault for found in estimates)
        if failed and (self._auto or failed + faulty_rows(before) >= ENOUGH_ROWS):
            error = self.compressor.picker.failure
            why = FALLBACKS[NOT_FINITE].meaning if error is None else f"{type(error).__name__}: {brief(error)}"
            kind = ResourceError if error is not None and out_of_resource(error) else PrefillError
            raise kind(
                f"the draft has failed on all rows so far, {failed + faulty_rows(before):,}: {why}\n"
                "take another --draft, or leave it out to read all rows in full"
            )

    def _choose(
        self,
        window: Window,
        wanted: Sequence[float | None],
        estimates: Sequence[ImportanceEstimate],
        auto: AutoKeep,
        tick: Tick,
    ) -> KeepChoice | None:
        """Choose the job's keep rate, if the window has rows to compress."""
        most, prompts = self._scorer.pool.limits.max_tokens, window.prompts
        able = [
            number
            for number, keep in enumerate(wanted)
            if keep is not None and prompts[number].keep is None and len(prompts[number].tokens) <= most
        ]
        if not able:
            return None
        chosen = draw(able, auto.rows or sample_rows(auto.max_flips), window.index)
        choice = choose_keep(
            self.compressor,
            self._scorer.pool,
            prompts,
            estimates,
            chosen,
            self._scorer.labels.sets,
            auto.max_flips,
            tick,
        )
        self.compressor.keep, self._auto = choice.keep, None
        if choice.keep == 1:
            log.warning(f"--keep auto: {_why_all(choice, len(chosen), auto.max_flips)}")
        return choice


def _why_all(choice: KeepChoice, rows: int, max_flips: float) -> str:
    """Why `--keep auto` keeps all tokens."""
    most = f"{max_flips:.2%}"
    if not choice.trials:
        return (
            f"{rows:,} rows to try it on cannot prove that at most {most} flip, {choice.rows_needed:,} could; all "
            "rows are read in full"
        )
    first = choice.trials[0]
    return (
        f"keeping {first.keep:g} does not prove that at most {most} flip ({first.flips:,} of {first.rows:,} rows "
        "did), so smaller rates were not tried; all rows are read in full"
    )

"""Fits of a few measurements on a machine that other programs use too."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from prefillcli.errors import PrefillError, ResourceError
from prefillcli.forecast.profile import OF_TRANSFORMERS, Confirmation, MemoryPoint, ModeResult, Trace
from prefillcli.models.find import ModelFiles
from prefillcli.models.shape import NoCostModel, prefill_flops
from prefillcli.profile.children import (
    ChildEnded,
    ChildFailed,
    Law,
    Subject,
    confirm,
    in_child,
    measure,
    mode_law,
    trace,
)
from prefillcli.report.rendering import byte_size

FloatArray = npt.NDArray[np.float64]


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(base, slope) of a line through (x, y): the median of all pairs' slopes, which one stray point does not move.

    Theil-Sen. Raises ValueError for fewer than two different x.
    """
    from scipy.stats import theilslopes  # takes a while to import

    x, y = zip(*points, strict=True)
    if len(set(x)) < 2:
        raise ValueError("a line needs two points")
    found = theilslopes(y, x, method="joint")
    return float(found.intercept), float(found.slope)


def fit_linear(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> FloatArray:
    """Least squares: float64 [columns] with the smallest squared error of `rows @ result`."""
    found, *_ = np.linalg.lstsq(np.asarray(rows, dtype=float), np.asarray(seconds, dtype=float), rcond=None)
    return np.asarray(found, dtype=float)


def fit_costs(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> FloatArray:
    """Costs >= 0 of each column: float64 [columns] with the smallest squared *relative* error of `rows @ result`.

    `seconds` are above 0. Columns of very different size are scaled first.
    """
    weighted = np.asarray(rows, dtype=float) / np.asarray(seconds, dtype=float)[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1.0
    found, _ = nnls(weighted / scale, np.ones(len(seconds)))
    return np.asarray(found / scale, dtype=float)


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's r; 0 where one of them does not vary."""
    try:
        return statistics.correlation(x, y)
    except statistics.StatisticsError:
        return 0.0


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    """|predicted / measured - 1| of each."""
    return [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]


def mean_relative_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return statistics.fmean(relative_errors(predicted, measured))


TRIES = 3
MARGIN = 0.02  # of the length that the line allows: not predicted, as the line is not exact
_RUNS = 5
_FITTED = 3  # longest runs, to which the line is fitted: in shorter ones the peak may lie elsewhere
_LONGEST_SHARE = 0.5  # of the length that the law allows: the longest of the short runs
_PROBE_SHARE = 0.2  # of the seconds for a fit: what one short run may take
_SPARE_SHARE = 0.04  # of the budget: if a confirming run leaves more, a longer one is tried
_LEAST_SHRINK = 0.02  # of the budget
_OVERTIME = 4.0  # a confirming run is stopped after so many times its estimate
_LOADING_SECONDS = 600.0

#: Prints on stderr what comes next.
Announce = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Search:
    """What the search for longest prompts works with. `budget` in bytes above the loaded model."""

    subject: Subject
    files: ModelFiles
    budget: int
    fit_seconds: float
    confirm_seconds: float
    announce: Announce
    run: Callable[..., Generator[Any, None, None]] = in_child
    """Runs a task in a process of its own; gives what it sends."""

    def work(self, tokens: int) -> float:
        """What a prompt has to compute, in any unit: FLOPs, or where they cannot be counted tokens squared."""
        try:
            return prefill_flops(self.files.config, tokens).total
        except NoCostModel:
            return float(tokens) ** 2


def profile_mode(mode: str, search: Search) -> ModeResult:
    """Fit, predict and confirm one mode. Failures become notes; no PrefillError is raised.

    Raises ChildFailed for an error in the layer walk: only transformers may fail on an architecture.
    """
    chunk = search.subject.chunk_tokens
    law = mode_law(mode, search.files.config, search.files.dtype, chunk)
    result = ModeResult(mode=mode, law_base=law.base, law_token=law.token, law_terms=dict(law.terms))
    lengths = probe_lengths(law, search.budget, search.files.max_length, chunk)
    if len(lengths) < 2:
        result.notes.append("the budget does not even hold short prompts in this mode")
        return result
    try:
        _run(result, lengths, search)
    except ChildFailed as error:
        if mode not in OF_TRANSFORMERS:
            raise
        result.notes.append(f"transformers fails on this model in this mode: {error}")
    return result


def _run(result: ModeResult, lengths: Sequence[int], search: Search) -> None:
    """The short runs, the line through them, the confirming run."""
    try:
        for point in _short_runs(result.mode, lengths, search):
            result.points.append(point)
    except PrefillError as error:
        result.notes.append(f"the short runs ended early: {error}")
    if len(result.points) < 2:
        return
    _predict(result, search)
    if search.confirm_seconds and result.predicted_tokens:
        _confirm(result, search)


def probe_lengths(law: Law, budget: int, longest: int, chunk: int) -> list[int]:
    """Ascending lengths of short runs: up to half of what the law allows, from two chunks on.

    They are one token short of whole chunks: then there are chunks of two sizes, as in most prompts, for which
    libraries may need more buffers than for one size. Empty if the budget does not hold two different lengths.
    """
    top = min(int(law.longest(budget) * _LONGEST_SHARE), longest)
    low = min(2 * chunk, top // 4) if top < 4 * chunk else max(2 * chunk, top // 16)
    if low < 1:
        return []
    steps = [low * (top / low) ** (i / (_RUNS - 1)) for i in range(_RUNS)]
    unit = chunk if low >= 2 * chunk else 1
    return sorted({int(step) // unit * unit - (unit > 1) for step in steps})


def _short_runs(mode: str, lengths: Sequence[int], search: Search) -> Iterator[MemoryPoint]:
    """Runs of the `lengths`, ascending, or only of the first three if more would take long. Raises PrefillError.

    Each has its own process, like the confirming run: what libraries keep after one run would change the next.
    """
    patience = search.fit_seconds * _PROBE_SHARE
    last: MemoryPoint | None = None
    for number, tokens in enumerate(lengths):
        if number >= _FITTED and last is not None and _seconds(tokens, last, search) > patience:
            return
        search.announce(f"{mode}: memory of a prompt of {tokens:,} tokens")
        with closing(search.run(measure, search.subject, mode, tokens)) as found:
            last = next(iter(found))
        yield last


def _predict(result: ModeResult, search: Search) -> None:
    """Fit all runs so far, also those that confirm a length, and predict how long a prompt may be."""
    confirmed = [(c.tokens, c.peak_bytes) for c in result.confirmations if c.peak_bytes is not None]
    measured = sorted([*((p.tokens, p.peak_bytes) for p in result.points), *confirmed])
    base, token = fit_line(measured[-_FITTED:])
    result.fit_base, result.fit_token, result.fit_over_law = base, token, token / result.law_token
    if token <= 0:
        result.notes.append("memory does not grow with the prompt, so nothing can be predicted from short runs")
        return
    by_memory, longest = int((search.budget - base) / token * (1 - MARGIN)), search.files.max_length
    result.predicted_tokens = max(0, min(by_memory, longest))
    result.limited_by = "memory" if by_memory < longest else "model"


def _confirm(result: ModeResult, search: Search) -> None:
    """Run at the predicted length; then a shorter one if that does not fit, a longer one if much memory is left."""
    if result.predicted_tokens is None or result.fit_token is None or result.limited_by is None:
        raise ValueError("nothing is predicted")
    affordable = _affordable(result.points[-1], search)
    result.capped = affordable < result.predicted_tokens
    tokens = min(result.predicted_tokens, affordable)
    too_long = search.files.max_length + 1  # shortest length known not to fit
    for _ in range(TRIES):
        search.announce(f"{result.mode}: confirming {tokens:,} tokens within {byte_size(search.budget)}")
        found = confirming_run(result.mode, tokens, search, _seconds(tokens, result.points[-1], search))
        result.confirmations.append(found)
        if found.fits:
            result.max_tokens = max(result.max_tokens or 0, tokens)
            spare = search.budget - (found.peak_bytes or search.budget)
            if result.capped or tokens >= affordable or spare < _SPARE_SHARE * search.budget:
                break
            more = int(spare / result.fit_token * 0.9)
            tokens = min(tokens + more, (tokens + too_long) // 2, search.files.max_length, affordable)
        else:
            too_long = min(too_long, tokens)
            lacking = max(found.excess_bytes or 0, int(_LEAST_SHRINK * search.budget))
            tokens = min(int(tokens - lacking / result.fit_token), too_long - 1)
        if tokens < 1 or tokens <= (result.max_tokens or 0):
            break
    if result.capped and result.max_tokens is not None:
        _predict(result, search)  # the longest run says most of those to come
        longer = _seconds(result.predicted_tokens, result.points[-1], search)
        result.notes.append(
            f"confirmed at {result.max_tokens:,} tokens only, which is not the maximum: the predicted length would "
            f"take about {longer:,.0f} seconds, and --confirm-seconds is {search.confirm_seconds:g}"
        )
    if result.max_tokens is None:
        result.notes.append("no confirming run stayed within the budget")
    elif not result.confirmations[0].fits:
        result.notes.append(
            f"the predicted length did not fit; {result.max_tokens:,} tokens did, after "
            f"{len(result.confirmations)} tries"
        )


def confirming_run(mode: str, tokens: int, search: Search, seconds: float) -> Confirmation:
    """One run in a process that may use the budget and not one byte more."""
    timeout = _LOADING_SECONDS + _OVERTIME * seconds
    try:
        with closing(search.run(confirm, search.subject, mode, tokens, search.budget, timeout=timeout)) as found:
            confirmation: Confirmation = next(iter(found))
            return confirmation
    except (ChildEnded, ResourceError) as error:  # a library that is refused memory can end the process
        return Confirmation(tokens=tokens, fits=False, reason=str(error))


def trace_mode(mode: str, tokens: int, search: Search) -> Trace:
    """Memory over time of one run. Raises PrefillError."""
    search.announce(f"{mode}: memory over time at {tokens:,} tokens")
    with closing(search.run(trace, search.subject, mode, tokens)) as found:
        points: list[Any] = next(iter(found))
    return Trace(mode=mode, tokens=tokens, points=thinned(points))


def thinned(points: Sequence[Any], most: int = 600) -> list[Any]:
    """At most `most` points: of each stretch the one with the highest memory, as peaks are what matters."""
    size = -(-len(points) // most) or 1
    return [
        max(points[start : start + size], key=lambda point: point.used_bytes) for start in range(0, len(points), size)
    ]


def _seconds(tokens: int, point: MemoryPoint, search: Search) -> float:
    """How long a run will take, by what a shorter one has taken."""
    return point.seconds * search.work(tokens) / search.work(point.tokens)


def _affordable(point: MemoryPoint, search: Search) -> int:
    """The longest prompt that `--confirm-seconds` allow."""
    low, high = point.tokens, search.files.max_length
    if _seconds(high, point, search) <= search.confirm_seconds:
        return high
    while low < high - 1:
        middle = (low + high) // 2
        if _seconds(middle, point, search) <= search.confirm_seconds:
            low = middle
        else:
            high = middle
    return low

"""The measurements of `prefill profile`: completion times, and the longest prompt of each mode, each in its own
process."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls

from prefillcli.data.proof import hash_model
from prefillcli.errors import PrefillError, ResourceError, shown
from prefillcli.forecast.profile import (
    OF_TRANSFORMERS,
    CompletionModel,
    CompletionPoint,
    Confirmation,
    MemoryPoint,
    ModeResult,
    Profile,
    Trace,
    features,
    this_machine,
)
from prefillcli.models.find import ModelFiles, with_weights
from prefillcli.models.law import FREE_SHARE, choose_chunk, memory_law
from prefillcli.models.shape import NoCostModel, prefill_flops
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.fusion import fused
from prefillcli.prefill.model_ends import embedding_device
from prefillcli.prefill.walk import LayerWalk, remainder
from prefillcli.profile.children import (
    ChildEnded,
    ChildFailed,
    Law,
    Send,
    Subject,
    attention_windows,
    confirm,
    in_child,
    load_subject,
    measure,
    mode_law,
    prompts_with_histories,
    random_prompt,
    random_tokens,
    trace,
)
from prefillcli.report.section import byte_size
from prefillcli.runtime.memory import available_memory, keep_blocks, parse_size

#: Prints the next step on stderr.
Announce = Callable[[str], None]

TRACED = ("full", "hybrid")
_BUSY = 1.5  # of the load average over the threads that compute
ATTEMPTS = 3  # attempts at a good fit, each with more rounds
CACHED = (0, 2, 4, 8)  # units of tokens whose K,V are held from the pack before
COMPUTED = (1, 2, 4, 6)  # units of tokens to compute after them
ROUNDS = 3
_ROUND_UNITS = len(CACHED) * sum(COMPUTED) + sum(CACHED) + 16
_LEAST_UNIT = 32
_LONGEST_UNITS = max(CACHED) + max(COMPUTED)


@dataclass(frozen=True, slots=True)
class Timing:
    """The least seconds of a pack over the rounds, and its composition."""

    features: tuple[float, float, float, float]
    seconds: float
    slowest: float  # seconds of its slowest round
    rounds: int
    input_tokens: int = 0  # of its one prompt; 0 for a pack of several
    cached_tokens: int = 0
    heldout: bool = False


@dataclass(frozen=True, slots=True)
class Budgeted:
    """The budget that a loaded model leaves, in bytes above it, and the chunk that follows from it.

    The costs of early exit are in layers of a token, None for a model of one layer: see `Profile`.
    """

    budget: int
    chunk_tokens: int
    regroup_layers: float | None
    keys_layers: float | None


def time_packs(send: Send, subject: Subject, memory: int | None, target: float) -> None:
    """In a child: sends the Budgeted, then lists of Timings as `measure_packs` yields them.

    `memory` is the budget in bytes; None: the part of the free memory that `prefill score` would take. `target` is
    roughly the number of seconds that this may take.
    """
    model, files = load_subject(subject)
    device = embedding_device(model)
    budget = memory or int(available_memory(device) * FREE_SHARE)
    law = memory_law(files.config, files.dtype)
    chunk = subject.chunk_tokens or choose_chunk(law, budget, device)
    vocabulary, windows = int(files.config.vocab_size), attention_windows(files.config)
    if device.type == "cpu":
        keep_blocks(budget)
    walk = LayerWalk(model, chunk_tokens=chunk)
    run = partial(_timed, walk, device)
    room = budget - law.constant(chunk, device)
    most = min(files.max_length, int(room / (law.token + law.key_value * law.layers)))
    unit = choose_unit(partial(_first_seconds, run, vocabulary), most, target)
    (several,) = extra_packs(unit, vocabulary)[-1]
    send(Budgeted(budget, chunk, *(measure_leaving(walk, several, partial(_now, device)) or (None, None))))
    for timings in measure_packs(run, unit, vocabulary, windows):
        send(timings)
    walk.close()


def _timed(walk: Any, device: Any, pack: Pack) -> float:
    # Seconds of one pack through the walk.
    begun = time.perf_counter()
    for _ in walk.read_logits(pack):
        pass
    return _now(device) - begun


def _now(device: Any) -> float:
    # The time in seconds, once the device has finished its work.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def measure_packs(
    run: Callable[[Pack], float], unit: int, vocabulary: int, windows: Sequence[tuple[int | None, int]]
) -> Iterator[list[Timing]]:
    """Yield the packs' timings after some rounds, then after more, up to `ATTEMPTS` times.

    `run` gives the seconds of a pack. In every round all packs run one after the other, so that a disturbance hits all
    of them. For each pack the fastest round counts: other programs can only make it slower.
    """
    groups = [grid_packs(cached * unit, unit, vocabulary) for cached in CACHED]
    extra = extra_packs(unit, vocabulary)
    packs = [(number, pack) for number, group in enumerate([*groups, *extra]) for pack in group]
    seconds: list[list[float]] = [[] for _ in packs]
    for _ in range(ATTEMPTS):
        for _ in range(ROUNDS):
            for own, (_, pack) in zip(seconds, packs, strict=True):
                own.append(run(pack))
        timings = []
        for own, (number, pack) in zip(seconds, packs, strict=True):
            single = number < len(groups)
            timings.append(
                Timing(
                    features(pack, windows),
                    min(own),
                    max(own),
                    len(own),
                    input_tokens=pack.held_tokens + len(pack.tokens) if single else 0,
                    cached_tokens=pack.held_tokens if single else 0,
                    heldout=_left_out(number, pack, unit) if single else number == packs[-1][0],
                )
            )
        yield timings


def _left_out(number: int, pack: Pack, unit: int) -> bool:
    # Whether a pack of the grid only checks the fit: those in its middle, after a cached prefix.
    inner = 0 < number < len(CACHED) - 1 and len(pack.tokens) in [units * unit for units in COMPUTED[1:-1]]
    return inner and pack.held_tokens > 0


def first_good_fit(
    measured: Iterable[list[Timing]], windows: list[tuple[int | None, int]], announce: Announce
) -> tuple[CompletionModel | None, str | None]:
    """The first fit that is good enough to predict with; or None, and the reason why there is none."""
    why = None
    for attempt, timings in enumerate(measured, start=1):
        fit = fit_completion(timings, windows)
        why = fit.weakness()
        if why is None:
            return fit, None
        if attempt < ATTEMPTS:
            announce(f"completion times: no fit yet, so all packs are timed again ({why})")
        why = f"{why}; after {fit.rounds} rounds, of which the slowest took {fit.disturbance:.1f} times the fastest"
    return None, why


def time_model(
    subject: Subject, config: Any, memory: int | None, target: float, announce: Announce
) -> tuple[Budgeted, CompletionModel | None, str | None]:
    """The budget that a loaded model leaves, and the model of completion times or the reason why there is none.
    Arguments as for `time_packs`."""
    with closing(in_child(time_packs, subject, memory, target)) as found:
        return next(found), *first_good_fit(found, attention_windows(config), announce)


def measured_profile(settings: Any, files: ModelFiles, device: torch.device, announce: Announce) -> Profile:
    """All measurements of a model with the settings of `prefill profile`. Raises PrefillError."""
    files = with_weights(files)  # dequantised here, or each measuring process would do so
    subject = Subject(
        path=files.path if files.saved else files.origin,
        dtype=str(files.dtype).removeprefix("torch."),
        device=str(device),
        trust_remote_code=settings.trust_remote_code,
        threads=torch.get_num_threads(),
        chunk_tokens=settings.chunk_tokens or 0,
        head=settings.head,
    )

    announce("completion times: packs of several lengths, with and without cached tokens")
    memory = parse_size(settings.memory) if settings.memory else None
    fit_seconds = settings.fit_seconds or 0.0
    budgeted, completion, no_completion = time_model(subject, files.config, memory, fit_seconds, announce)
    notes = _busy_with(subject.threads)
    subject = replace(subject, chunk_tokens=budgeted.chunk_tokens)
    profile = Profile(
        model=hash_model(files.origin),
        model_name=settings.model or str(files.origin),
        family=files.family,
        dtype=subject.dtype,
        device=subject.device,
        machine=this_machine(subject.device),
        budget_bytes=budgeted.budget,
        chunk_tokens=budgeted.chunk_tokens,
        max_model_tokens=files.max_length,
        completion=completion,
        no_completion=no_completion,
        regroup_layers=budgeted.regroup_layers,
        keys_layers=budgeted.keys_layers,
        settings=shown(settings.model_dump(mode="json")),
        notes=notes,
    )
    search = Search(subject, files, budgeted.budget, fit_seconds, settings.confirm_seconds or 0.0, announce)
    profile.modes = [profile_mode(name, search) for name in dict.fromkeys(settings.mode)]
    if settings.full:
        profile.traces = list(traces(profile.modes, search))
    return profile


def _busy_with(threads: int) -> list[str]:
    # A note if other programs used much of the machine while packs were timed.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= _BUSY * threads:
        return []
    return [
        f"the load average was {load:.0f} when packs were timed on {threads} threads: other programs ran too, and "
        "without them the machine is faster"
    ]


def choose_unit(first_seconds: Callable[[int], float], most: int, target: float) -> int:
    """Tokens of a unit, chosen so that all rounds take about `target` seconds and the longest prompt has at most
    `most` tokens.

    `first_seconds(tokens)` times a prompt.
    """
    tokens = 4 * _LEAST_UNIT
    while True:
        taken = first_seconds(tokens)
        unit = target / ROUNDS / _ROUND_UNITS / (taken / tokens)
        if taken > 0.02 * target or 4 * tokens > min(most, 4 * unit):
            break
        tokens *= 4
    return max(min(int(unit), most // _LONGEST_UNITS), 4)


def _first_seconds(run: Callable[[Pack], float], vocabulary: int, tokens: int) -> float:
    (pack,) = make_plan([random_prompt(tokens, vocabulary)], Limits(tokens, tokens)).packs
    return min(run(pack), run(pack))


def grid_packs(cached: int, unit: int, vocabulary: int) -> list[Pack]:
    """One pack for each of `COMPUTED`, after `cached` held tokens; first the pack that computes these."""
    rng = np.random.default_rng(cached)
    prefix = random_tokens(rng, cached, vocabulary)
    prompts = [np.concatenate([prefix, random_tokens(rng, units * unit, vocabulary)]) for units in COMPUTED]
    if cached:
        prompts.insert(0, prefix)
    apart = Limits(1, 1 << 30, held_tokens=1 << 30)  # no two prompts fit one pack, and every path may be held
    return make_plan(prompts, apart).packs


def extra_packs(unit: int, vocabulary: int) -> list[list[Pack]]:
    """Packs of several prompts: many short ones, trees of shared prefixes; the last is only for checking the fit."""
    rng = np.random.default_rng(1)
    short = max(4, unit // 16)
    whole = Limits(1 << 30, 1 << 30)
    tree = prompts_with_histories(1, 8, unit, short, vocabulary, seed=1)
    mixed = prompts_with_histories(2, 6, 2 * unit, 2 * short, vocabulary, seed=2)
    return [
        make_plan([random_tokens(rng, short, vocabulary) for _ in range(32)], whole).packs,
        make_plan([random_tokens(rng, 4 * short, vocabulary) for _ in range(8)], whole).packs,
        make_plan(tree, whole).packs,
        make_plan(mixed, whole).packs,
    ]


def fit_completion(timings: Sequence[Timing], windows: list[tuple[int | None, int]]) -> CompletionModel:
    """Fit both models on the packs that are not held out, and check them on those that are."""
    grid = [each for each in timings if each.input_tokens]
    known, new = [e for e in grid if not e.heldout], [e for e in grid if e.heldout]
    base, per_input, per_cached = fit_linear(
        [(1.0, e.input_tokens, e.cached_tokens) for e in known], [e.seconds for e in known]
    )
    proxy_base, per_missed = fit_linear(
        [(1.0, e.input_tokens - e.cached_tokens) for e in known], [e.seconds for e in known]
    )
    learnt = [each for each in timings if not each.heldout]
    costs = fit_costs([e.features for e in learnt], [e.seconds for e in learnt])

    def linear(each: Timing) -> float:
        return float(base + per_input * each.input_tokens + per_cached * each.cached_tokens)

    def of_plan(each: Timing) -> float:
        return float(np.dot(costs, each.features))

    seconds = [each.seconds for each in grid]
    checked, new_seconds = [each for each in timings if each.heldout], [each.seconds for each in new]
    errors = _relative_errors([of_plan(e) for e in checked], [e.seconds for e in checked])
    return CompletionModel(
        base=base,
        per_input=per_input,
        per_cached=per_cached,
        pearson=pearson([linear(each) for each in grid], seconds),
        pearson_proxy=pearson([each.input_tokens - each.cached_tokens for each in grid], seconds),
        heldout_error=mean_relative_error([linear(e) for e in new], new_seconds) if new else None,
        heldout_error_proxy=mean_relative_error(
            [proxy_base + per_missed * (e.input_tokens - e.cached_tokens) for e in new], new_seconds
        )
        if new
        else None,
        heldout_error_plan=statistics.fmean(errors) if errors else None,
        heldout_worst_plan=max(errors, default=None),
        rounds=min(each.rounds for each in timings),
        disturbance=statistics.median(each.slowest / each.seconds for each in timings),
        per_pack=costs[0],
        per_token=costs[1],
        per_read=costs[2],
        per_pair=costs[3],
        windows=windows,
        points=[
            CompletionPoint(
                input_tokens=each.input_tokens,
                cached_tokens=each.cached_tokens,
                seconds=each.seconds,
                predicted=linear(each),
                heldout=each.heldout,
            )
            for each in grid
        ],
    )


# The costs of early exit: laying out anew the rows that go on, and computing only a layer's K,V.


LEAVING_ROUNDS = 3


@torch.inference_mode()
def measure_leaving(
    walk: LayerWalk, pack: Pack, clock: Callable[[], float], rounds: int = LEAVING_ROUNDS
) -> tuple[float, float] | None:
    """Time a layer in the middle of the model over `pack`, which holds nothing. Returns the cost of laying out a token
    anew between two layers, and of computing only its K,V, both in layers of a token.

    For each step the fastest round counts: other programs can only make it slower. A model of one layer has no middle:
    None. `clock` gives seconds; it waits for a device that computes asynchronously.
    """
    index = len(walk.layers) // 2
    if index == len(walk.layers) - 1:
        return None
    state = walk.begin(pack)
    whole = remainder(pack, range(len(pack.reads)), [])
    before = state.hidden.clone()
    most = max(chunk.end - chunk.start for chunk in state.chunks)
    with ForestAttention(len(pack.tokens)) as attention, walk.layers.use(index) as layer, fused(layer, most):

        def layer_alone() -> None:
            walk.start_layer(state, index, layer, attention)
            walk.through_layer(state, index, layer, attention, lambda tokens: None)

        def keys_alone() -> None:
            walk.start_layer(state, index, layer, attention)
            walk.store_keys(state, index, layer, attention, lambda tokens: None)

        def regrouped() -> None:  # the layer's call determines which keys a query sees
            walk.regroup(state, whole, attention)
            layer_alone()

        layer_alone()
        steps = (layer_alone, keys_alone, regrouped)
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(rounds):
            for step, own in zip(steps, seconds, strict=True):
                state.hidden.copy_(before)
                begun = clock()
                step()
                own.append(clock() - begun)
    alone, keys, both = (min(own) for own in seconds)
    return max(0.0, both / alone - 1), keys / alone


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
    # Divided by its seconds, each row should give 1, and its residual is the relative error.
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


def _relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> list[float]:
    # |predicted / measured - 1| of each.
    return [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]


def mean_relative_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return statistics.fmean(_relative_errors(predicted, measured))


TRIES = 3
MARGIN = 0.02  # of the length that the line allows: a margin, because the line is not exact
_RUNS = 5
_FITTED = 3  # the longest runs, to which the line is fitted: in shorter ones the peak may lie elsewhere
_LONGEST_SHARE = 0.5  # of the length that the law allows: the longest of the short runs
_PROBE_SHARE = 0.2  # of the seconds for a fit: the limit of one short run
_SPARE_SHARE = 0.04  # of the budget: if a confirming run leaves more, a longer one is tried
_LEAST_SHRINK = 0.02  # of the budget
_OVERTIME = 4.0  # a confirming run is stopped after this multiple of its estimate
_LOADING_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Search:
    """The inputs of the search for longest prompts. `budget` is in bytes above the loaded model."""

    subject: Subject
    files: ModelFiles
    budget: int
    fit_seconds: float
    confirm_seconds: float
    announce: Announce
    # Runs a task in a process of its own; gives the objects that it sends.
    run: Callable[..., Generator[Any, None, None]] = in_child

    def work(self, tokens: int) -> float:
        """The work of a prompt, in any unit: FLOPs, or tokens squared if FLOPs cannot be counted."""
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
    # The short runs, the line through them, the confirming run.
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
    """Ascending lengths of short runs: from two chunks to half the length that the law allows.

    They are one token short of whole chunks. So there are chunks of two sizes, as in most prompts, for which libraries
    may need more buffers than for one size. Empty if the budget does not hold two different lengths.
    """
    top = min(int(law.longest(budget) * _LONGEST_SHARE), longest)
    low = min(2 * chunk, top // 4) if top < 4 * chunk else max(2 * chunk, top // 16)
    if low < 1:
        return []
    steps = [low * (top / low) ** (i / (_RUNS - 1)) for i in range(_RUNS)]
    unit = chunk if low >= 2 * chunk else 1
    return sorted({int(step) // unit * unit - (unit > 1) for step in steps})


def _short_runs(mode: str, lengths: Sequence[int], search: Search) -> Iterator[MemoryPoint]:
    # Runs of the `lengths`, ascending, or only of the first three if more would take long. Raises PrefillError.
    #
    # Each has its own process, like the confirming run: memory that libraries keep after one run would change the
    # next.
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
    # Fit all runs so far, including those that confirm a length, and predict how long a prompt may be.
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
    # Run at the predicted length; then a shorter one if that does not fit, a longer one if much memory is left.
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
        _predict(result, search)  # the longest run is the best guide to those to come
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
    """One run in a process that may use no byte more than the budget."""
    timeout = _LOADING_SECONDS + _OVERTIME * seconds
    try:
        with closing(search.run(confirm, search.subject, mode, tokens, search.budget, timeout=timeout)) as found:
            confirmation: Confirmation = next(iter(found))
            return confirmation
    except (ChildEnded, ResourceError) as error:  # a library that is denied memory may end the process
        return Confirmation(tokens=tokens, fits=False, reason=str(error))


def traces(modes: Sequence[ModeResult], search: Search) -> Iterator[Trace]:
    """Memory over time of two modes at a length that the short runs of both have reached."""
    reached = {each.mode: each.points[-1].tokens for each in modes if each.mode in TRACED and each.points}
    for mode in reached:
        tokens = min(reached.values())
        search.announce(f"{mode}: memory over time at {tokens:,} tokens")
        try:
            with closing(search.run(trace, search.subject, mode, tokens)) as found:
                yield Trace(mode=mode, tokens=tokens, points=thinned(next(iter(found))))
        except PrefillError as error:
            search.announce(f"{mode}: no memory over time: {error}")


def thinned(points: Sequence[Any], most: int = 600) -> list[Any]:
    """At most `most` points: from each stretch the one with the highest memory, because peaks matter."""
    size = -(-len(points) // most) or 1
    return [
        max(points[start : start + size], key=lambda point: point.used_bytes) for start in range(0, len(points), size)
    ]


def _seconds(tokens: int, point: MemoryPoint, search: Search) -> float:
    # The predicted time of a run, from that of a shorter one.
    return point.seconds * search.work(tokens) / search.work(point.tokens)


def _affordable(point: MemoryPoint, search: Search) -> int:
    # The longest prompt that `--confirm-seconds` allows.
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

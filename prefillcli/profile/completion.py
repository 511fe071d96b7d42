"""Job completion time: seconds over (input tokens, cached tokens), and what any plan takes.

PrefillOnly (section 6.3) fits a line to the first, and takes input - cached tokens as its proxy. A plan is more than
one prompt: the second model has a cost for each pack, token, prompt and (query, key) pair.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from prefillcli.forecast.profile import CompletionModel, CompletionPoint, features
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.fusion import fused
from prefillcli.prefill.layer_calls import embedding_device
from prefillcli.prefill.walk import LayerWalk
from prefillcli.prefill.walk_state import remainder
from prefillcli.profile.children import (
    Send,
    Subject,
    attention_windows,
    load_subject,
    prompts_with_histories,
    random_prompt,
    random_tokens,
)
from prefillcli.profile.lengths import fit_costs, fit_linear, mean_relative_error, pearson, relative_errors

ATTEMPTS = 3  # to get a good fit, each with more rounds
CACHED = (0, 2, 4, 8)  # units of tokens whose K,V are held from the pack before
COMPUTED = (1, 2, 4, 6)  # units of tokens to compute behind them
ROUNDS = 3
_ROUND_UNITS = len(CACHED) * sum(COMPUTED) + sum(CACHED) + 16
_LEAST_UNIT = 32
_LONGEST_UNITS = max(CACHED) + max(COMPUTED)


@dataclass(frozen=True, slots=True)
class Timing:
    """The least seconds of a pack over the rounds, and what it is made of."""

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

    What early exit takes is in layers of a token, None for a model of one layer: see `Profile`.
    """

    budget: int
    chunk_tokens: int
    regroup_layers: float | None
    keys_layers: float | None


def time_packs(send: Send, subject: Subject, memory: int | None, target: float) -> None:
    """In a child: sends the Budgeted, then lists of Timings as `measure_packs` yields them.

    `memory` is the budget in bytes, None for what `prefill score` would take of the memory that is free.
    `target` is roughly how many seconds it may take.
    """
    from prefillcli.models.law import FREE_SHARE, choose_chunk, memory_law
    from prefillcli.prefill.walk import LayerWalk
    from prefillcli.runtime.memory import available_memory

    model, files = load_subject(subject)
    device = embedding_device(model)
    budget = memory or int(available_memory(device) * FREE_SHARE)
    law = memory_law(files.config, files.dtype)
    chunk = subject.chunk_tokens or choose_chunk(law, budget, device)
    vocabulary, windows = int(files.config.vocab_size), attention_windows(files.config)
    walk = LayerWalk(model, chunk_tokens=chunk)
    run = partial(_timed, walk, device)
    room = budget - law.constant(chunk, device)
    most = min(files.max_length, int(room / (law.token + law.key_value * law.layers)))
    unit = choose_unit(partial(_first_seconds, run, vocabulary), most, target)
    (several,) = extra_packs(unit, vocabulary)[-1]
    costs = measure_leaving(walk, several, partial(_now, device))
    send(Budgeted(budget, chunk, costs and costs.regroup, costs and costs.keys))
    for timings in measure_packs(run, unit, vocabulary, windows):
        send(timings)
    walk.close()


def _timed(walk: Any, device: Any, pack: Pack) -> float:
    """Seconds of one pack through the walk."""
    begun = time.perf_counter()
    for _ in walk.read_logits(pack):
        pass
    return _now(device) - begun


def _now(device: Any) -> float:
    """Seconds, once the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


def measure_packs(
    run: Callable[[Pack], float], unit: int, vocabulary: int, windows: Sequence[tuple[int | None, int]]
) -> Iterator[list[Timing]]:
    """Yield the packs' timings after some rounds, then after more, up to `ATTEMPTS` times.

    `run` gives the seconds of a pack. In every round all packs run one after the other, so that a disturbance hits
    all of them. Of each pack the fastest round counts: other programs can only make it slower.
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
    """Whether a pack of the grid is only for checking the fit: those in its middle, behind a cached prefix."""
    inner = 0 < number < len(CACHED) - 1 and len(pack.tokens) in [units * unit for units in COMPUTED[1:-1]]
    return inner and pack.held_tokens > 0


def first_good_fit(
    measured: Iterable[list[Timing]], windows: list[tuple[int | None, int]], announce: Callable[[str], None]
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


def choose_unit(first_seconds: Callable[[int], float], most: int, target: float) -> int:
    """Tokens of a unit, so that all rounds take about `target` seconds and the longest prompt `most` tokens at most.

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
    """One pack for each of `COMPUTED`, behind `cached` held tokens; before them the pack that computes those."""
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
    """Fit both models on what is not held out, and check them on what is."""
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
    errors = relative_errors([of_plan(e) for e in checked], [e.seconds for e in checked])
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


# The costs of early exit: laying out anew the rows that go on, and computing a layer's K,V alone.


LEAVING_ROUNDS = 3


class LeavingCosts(NamedTuple):
    """In layers of a token, for each token of a pack."""

    regroup: float  # laying it out anew between two layers
    keys: float  # computing K,V alone


@torch.inference_mode()
def measure_leaving(
    walk: LayerWalk, pack: Pack, clock: Callable[[], float], rounds: int = LEAVING_ROUNDS
) -> LeavingCosts | None:
    """Time a layer in the middle of the model over `pack`, which holds nothing.

    Of each step the fastest round counts: other programs can only make it slower. A model of one layer has no middle:
    None. `clock` gives seconds; where a device computes by itself, it waits for it.
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

        def regrouped() -> None:  # which keys a query sees is found out when the layer is called
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
    return LeavingCosts(max(0.0, both / alone - 1), keys / alone)

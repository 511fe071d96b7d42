"""Times and memory of methods, measured so that they can be compared on a shared machine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from prefillcli.bench.contenders import (
    SHARE,
    Alone,
    Contender,
    Equipment,
    Hybrid,
    MethodRun,
    Plain,
    start_vllm,
)
from prefillcli.bench.material import Material
from prefillcli.bench.report import REFERENCE, Answers, MethodResult, Predicted, Range, WorkloadResult
from prefillcli.core.feature import features
from prefillcli.data.rows import FALLBACK, Float64Array, is_fallback
from prefillcli.errors import PrefillError
from prefillcli.jobs.load import load_walk
from prefillcli.jobs.opening import Opening
from prefillcli.runtime.memory import with_peak as with_peak
from prefillcli.stats.evaluation import auc, audit_of, exact_interval, label_probabilities

T = TypeVar("T")


def interleaved(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: bool = True,
    within: float = math.inf,
    on_run: Callable[[int, str, float], None] = lambda turn, name, seconds: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each method, run in turn for `rounds` rounds after one warm-up of each.

    A disturbance of the machine then hits all methods: compare within a round. After the first round, no round begins
    that, judging by the longest so far, would end more than `within` seconds after the first began. `on_run` is called
    after each run with the round (0: the warm-up), the name and the seconds. `clock` measures the methods; with
    `time.process_time` the load of other programs does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    first, longest = time.perf_counter(), 0.0
    for turn in range(0 if warm_up else 1, rounds + 1):
        round_begun = time.perf_counter()
        if turn > 1 and round_begun - first + longest > within:
            break
        for name, method in methods.items():
            begun = clock()
            method()
            taken = clock() - begun
            if turn:
                seconds[name].append(taken)
            on_run(turn, name, taken)
        longest = max(longest, time.perf_counter() - round_begun)
    return seconds


_STEADY = 1.5  # longest round of a method over its shortest: above this, the machine was busy
_MEASURABLE = 0.5  # seconds; shorter rounds always differ

#: Called before each run of a method over all rows, with a description.
Begin = Callable[[str], None]


def load_equipment(opening: Opening, names: Collection[str]) -> Equipment:
    """Load the models for methods with these names. The caller closes `loaded`. Raises as `load_models`."""
    share = SHARE if "vllm" in names else 1.0
    return Equipment(load_walk(opening.opened, opening.settings, share=share), opening.labels)


def contenders(names: Sequence[str], equipment: Equipment, material: Material) -> list[Contender]:
    """The methods by name, the reference among them."""
    found: list[Contender] = []
    if "hf" in names:
        found.append(Plain("hf", equipment))
    if "full" in names:
        found.append(Alone("full", equipment))
    found.append(Hybrid(REFERENCE, equipment))
    for feature in features():
        found += feature.contenders(names, equipment, material)
    if "vllm" in names:
        found.append(start_vllm(equipment, material.longest, material.notes))
    return found


@contextmanager
def left_out_without_memory(name: str, reference: str, notes: list[str]) -> Iterator[None]:
    """A method that runs out of memory within this context is left out, with a note; the reference must not."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        if name == reference:
            raise
        notes.append(f"{name} is left out: it runs out of memory on these prompts")


def timed_rounds(
    runs: Mapping[str, Callable[[], object]], rounds: int, within: float, notes: list[str]
) -> dict[str, list[float]]:
    """Seconds of each method in each round, from `interleaved`; empty without rounds. Notes name missing methods."""
    if not rounds:
        notes.append("times are those of one run each, the first")
        return {}
    seconds = interleaved(runs, rounds, warm_up=False, within=within)
    done = min(map(len, seconds.values()))
    if done < rounds:
        notes.append(f"{done} of {rounds} timed rounds: more would take long here; --rounds {rounds} makes all")
    return seconds


@dataclass(slots=True)
class _Entry:
    """A contender with the results of its first run."""

    contender: Contender
    run: MethodRun
    peak: int | None
    seconds: float


def compare(
    material: Material,
    methods: Sequence[Contender],
    equipment: Equipment,
    *,
    rounds: int,
    temperature: float,
    begin: Begin = lambda step: None,
    within: float = math.inf,
) -> WorkloadResult:
    """Run every method once for its answers and memory, then `rounds` times in turn for its time; 0: the first run's
    time counts.

    `within` is as in `interleaved`. A method that runs out of the device's memory is left out with a note. Raises
    PrefillError if the reference gives scores that are not numbers.
    """
    entries = _first_runs(material, methods, equipment, begin)

    def timed(method: Contender) -> MethodRun:
        begin(f"{material.name}: {method.name}, for its time")
        return method.run(material.prompts)

    runs = {entry.contender.name: partial(timed, entry.contender) for entry in entries}
    seconds = timed_rounds(runs, rounds, within, material.notes)
    seconds = seconds or {entry.contender.name: [entry.seconds] for entry in entries}
    reference = next(entry for entry in entries if entry.contender.name == REFERENCE)
    full = label_probabilities(reference.run.logprobs, temperature)
    if not np.isfinite(full).all():
        raise PrefillError(f"{material.name}: the model gives scores that are not numbers; try --dtype float32")
    cost = reference.contender.cost(reference.run)
    result = WorkloadResult(
        workload=material.name,
        made=material.made,
        rows=len(material.prompts),
        truth_rows=sum(truth is not None for truth in material.truths),
        prompt_tokens=sum(len(prompt.tokens) for prompt in material.prompts),
        unique_tokens=equipment.plan(reference.run.questions).unique_tokens,
        rounds=len(seconds[REFERENCE]) if rounds else 0,
        notes=material.notes,
    )
    for entry in entries:
        own = None if entry is reference else full
        answers = _answers(entry, own, material.truths, temperature, result.notes)
        result.methods.append(_measured(entry, seconds, cost.flops, result, answers))
        result.methods[-1].exits = entry.contender.exits(entry.run, reference.run.logprobs)
        result.methods[-1].drift = entry.contender.drift(entry.run)
        if entry is reference and answers.accuracy_interval is not None:
            result.reference_able = answers.accuracy_interval[0] > 0.5
    unsteady = max((max(own) / min(own) for own in seconds.values() if min(own) > _MEASURABLE), default=1.0)
    if unsteady > _STEADY:
        result.notes.append(
            f"the machine was busy: a method took up to {unsteady:.1f} times as long in one round as in another, so "
            "the speeds mean little"
        )
    if cost.unknown is not None:
        result.notes.append(f"no speedup is predicted from operations: {cost.unknown}")
    return result


def _first_runs(material: Material, methods: Sequence[Contender], equipment: Equipment, begin: Begin) -> list[_Entry]:
    # Each method's answers and memory. A picker's findings serve all its keep rates.
    entries: list[_Entry] = []
    peaks: dict[str, int] = {}  # of each picker, at the first of its rates
    for method in methods:
        begin(f"{material.name}: {method.name}, for its answers")
        with left_out_without_memory(method.name, REFERENCE, material.notes):
            kind = method.name.partition("@")[0]
            if kind not in {entry.contender.name.partition("@")[0] for entry in entries}:
                method.run(material.prompts[:1])  # so that one-time set-up does not count
            begun = time.perf_counter()
            run, peak = with_peak(partial(method.first_run, material.prompts), equipment.device)
            taken = time.perf_counter() - begun + run.reused_seconds
            if method.elsewhere:
                peak = None
            if peak is not None:
                peak = max(peak, peaks.setdefault(kind, peak))
            entries.append(_Entry(method, run, peak, taken))
    return entries


def _measured(
    entry: _Entry,
    seconds: dict[str, list[float]],
    reference_flops: float | None,
    workload: WorkloadResult,
    answers: Answers,
) -> MethodResult:
    name, run = entry.contender.name, entry.run
    own, cost = seconds[name], entry.contender.cost(run)
    speedup = Range.of([first / second for first, second in zip(seconds[REFERENCE], own, strict=True)])
    own_seconds = Range.of(own)
    promised = None if cost.flops is None or reference_flops is None else reference_flops / cost.flops
    if cost.unknown is not None and reference_flops is not None:
        workload.notes.append(f"{name}: no speedup is predicted from operations: {cost.unknown}")
    ratio, table5 = entry.contender.predictions(run) or (None, None)
    fallbacks = Counter(each.method.removeprefix(FALLBACK) for each in run.questions if is_fallback(each.method))
    return MethodResult(
        method=name,
        keep=entry.contender.keep,
        seconds=own_seconds,
        rows_per_second=workload.rows / own_seconds.median,
        tokens_per_second=workload.prompt_tokens / own_seconds.median,
        target_tokens=cost.target_tokens,
        draft_tokens=run.draft_tokens,
        kept=sum(len(each.tokens) for each in run.questions) / workload.prompt_tokens,
        flops=cost.flops,
        peak_bytes=entry.peak,
        speedup=speedup,
        predicted=Predicted(flops=promised, ratio=ratio, table5=table5),
        measured_over_predicted=None if promised is None else speedup.median / promised,
        fallbacks=dict(fallbacks),
        answers=answers,
    )


def _answers(
    entry: _Entry, full: Float64Array | None, truths: Sequence[bool | None], temperature: float, notes: list[str]
) -> Answers:
    # Compared with the reference's shares `full` [rows, labels] (None: this is the reference) and the truth.
    shares = label_probabilities(entry.run.logprobs, temperature)
    if not np.isfinite(shares).all():
        notes.append(f"{entry.contender.name}: scores that are not numbers are not compared")
        return Answers()
    found = Answers()
    scores, best = shares[:, 0].tolist(), shares.argmax(axis=1)
    if full is not None:
        pairs = list(zip(scores, full[:, 0].tolist(), truths, strict=True))
        found.audit = audit_of(pairs, (best != full.argmax(axis=1)).tolist())
    known = [
        (score, label == 0, truth)
        for score, label, truth in zip(scores, best, truths, strict=True)
        if truth is not None
    ]
    if known:
        right = sum(bool(says) == truth for _, says, truth in known)
        found.accuracy = right / len(known)
        found.accuracy_interval = exact_interval(right, len(known))
        found.auc = auc([score for score, _, _ in known], [truth for _, _, truth in known])
    return found

"""The ways to write texts against each other on one workload."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from prefillcli.bench.measure import with_peak
from prefillcli.bench.measured_range import Range
from prefillcli.bench.text_methods import TextMethod, TextRun, TextTask
from prefillcli.bench.text_report import TEXT_REFERENCE, Guesses, TextMethodResult, TextResult
from prefillcli.decode.continuations import Continuation

NEAR_TIE = 1e-4


@dataclass(slots=True)
class _Entrant:
    """A method with what its first run gave, and the seconds of each round: in all, and of decoding alone."""

    method: TextMethod
    run: TextRun
    peak: int | None
    seconds: list[float]
    decoding: list[float]


def compare_texts(
    name: str,
    task: TextTask,
    methods: Sequence[TextMethod],
    *,
    device: torch.device,
    rounds: int,
    begin: Callable[[str], None] = lambda step: None,
    within: float = math.inf,
) -> TextResult:
    """Run every method once for its texts and memory, then `rounds` times in turn for its time; 0: the first run's.

    After the first round none begins that would end more than `within` seconds after the first began. A method that
    runs out of the device's memory is left out with a note. One of the methods is the reference.
    """
    notes: list[str] = []
    entries = _first_runs(name, task, methods, device, begin, notes)
    done = _timed_rounds(name, task, entries, rounds, begin, within)
    if done < rounds:
        notes.append(f"{done} of {rounds} timed rounds: more would take long here; --rounds {rounds} makes all")
    if not rounds:
        notes.append("times are those of one run each, the first")
    reference = next(entry for entry in entries if entry.method.name == TEXT_REFERENCE)
    return TextResult(
        workload=name,
        rows=len(task.prompts),
        prompt_tokens=sum(map(len, task.prompts)),
        text_tokens=reference.run.report.tokens,
        rounds=done,
        notes=notes,
        methods=[_measured(entry, reference) for entry in entries],
    )


def _first_runs(
    name: str,
    task: TextTask,
    methods: Sequence[TextMethod],
    device: torch.device,
    begin: Callable[[str], None],
    notes: list[str],
) -> list[_Entrant]:
    entries = []
    for method in methods:
        begin(f"{name}: {method.name}, for its texts")
        begun = time.perf_counter()
        try:
            run, peak = with_peak(lambda method=method: method.run(task), device)  # type: ignore[misc]
        except (torch.OutOfMemoryError, MemoryError):
            if method.name == TEXT_REFERENCE:
                raise
            notes.append(f"{method.name} is left out: it runs out of memory on these prompts")
            continue
        seconds = time.perf_counter() - begun
        entries.append(_Entrant(method, run, None if method.elsewhere else peak, [seconds], [run.report.seconds]))
    return entries


def _timed_rounds(
    name: str, task: TextTask, entries: Sequence[_Entrant], rounds: int, begin: Callable[[str], None], within: float
) -> int:
    """Times of the methods, in turn. Returns how many rounds there were."""
    first, longest = time.perf_counter(), 0.0
    for turn in range(rounds):
        begun = time.perf_counter()
        if turn and begun - first + longest > within:
            return turn
        for entry in entries:
            begin(f"{name}: {entry.method.name}, for its time")
            started = time.perf_counter()
            run = entry.method.run(task)
            if not turn:
                entry.seconds, entry.decoding = [], []
            entry.seconds.append(time.perf_counter() - started)
            entry.decoding.append(run.report.seconds)
        longest = max(longest, time.perf_counter() - begun)
    return rounds


def _measured(entry: _Entrant, reference: _Entrant) -> TextMethodResult:
    report, same, near = entry.run.report, *_agreement(entry.run.texts, reference.run.texts)
    decoding = Range.of(entry.decoding)
    return TextMethodResult(
        method=entry.method.name,
        seconds=Range.of(entry.seconds),
        decode_seconds=decoding,
        speedup=_ratio(reference.seconds, entry.seconds),
        decode_speedup=_ratio(reference.decoding, entry.decoding),
        tokens_per_second=report.tokens / max(decoding.median, 1e-9),
        passes_per_token=report.row_passes / report.tokens if report.tokens else None,
        guesses={
            name: Guesses(proposed=counts.proposed, accepted=counts.accepted)
            for name, counts in report.drafters.items()
        },
        peak_bytes=entry.peak,
        same_texts=same,
        near_ties=near,
    )


def _ratio(reference: Sequence[float], own: Sequence[float]) -> Range:
    return Range.of([first / max(second, 1e-9) for first, second in zip(reference, own, strict=True)])


def _agreement(texts: Mapping[int, Continuation], reference: Mapping[int, Continuation]) -> tuple[int, int]:
    """How many texts are the reference's, and how many others differ where it has once come near another token."""
    same = [prompt for prompt, text in texts.items() if text.tokens == reference[prompt].tokens]
    others = reference.keys() - set(same)
    return len(same), sum(reference[prompt].gap < NEAR_TIE for prompt in others)

"""The ways to write texts against each other on one workload."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from prefillcli.bench.contenders import Equipment
from prefillcli.bench.contest import interleaved, with_peak
from prefillcli.bench.material import Material
from prefillcli.bench.report import TEXT_METHODS, TEXT_REFERENCE, Guesses, Range, TextMethodResult, TextResult
from prefillcli.bench.text_methods import GeneratedTexts, LockStepTexts, TextMethod, TextRun, TextTask
from prefillcli.bench.vllm_method import VllmTextMethod, start_vllm
from prefillcli.data.prompts.templates import Beginnings, rationale_texts
from prefillcli.data.rows import Float64Array
from prefillcli.decode.continuations import DRAFTERS, Beginning, Continuation, Writing
from prefillcli.decode.drafters import DraftModel
from prefillcli.errors import PrefillError
from prefillcli.jobs.load import Models
from prefillcli.models.law import memory_law
from prefillcli.models.open import stop_tokens
from prefillcli.options.groups import DEFAULT_TEMPLATE
from prefillcli.plan.pack import Limits
from prefillcli.prefill.forest import UnsupportedModelError

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
    # Times of the methods, in turn. Returns how many rounds there were.
    if not rounds:
        return 0

    def timed(entry: _Entrant) -> None:
        begin(f"{name}: {entry.method.name}, for its time")
        entry.decoding.append(entry.method.run(task).report.seconds)

    for entry in entries:
        entry.decoding = []
    runs = {entry.method.name: partial(timed, entry) for entry in entries}
    seconds = interleaved(runs, rounds, warm_up=False, within=within)
    for entry in entries:
        entry.seconds = seconds[entry.method.name]
    return len(entries[0].seconds)


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
    # How many texts are the reference's, and how many others differ where it has once come near another token.
    same = [prompt for prompt, text in texts.items() if text.tokens == reference[prompt].tokens]
    others = reference.keys() - set(same)
    return len(same), sum(reference[prompt].gap < NEAR_TIE for prompt in others)


# The task that options and prompts make, and the ways to write by their names.


MOST_WORDS = 16  # tokens between a prompt and its text, at most
# Prompt tokens of a padded batch: a mask of as many times the longest prompt must fit beside them.
PADDED_TOKENS = 32_768
# The ways of transformers, and how many prompt tokens they generate behind together.
TOGETHER = {"generate": 1, "generate-padded": PADDED_TOKENS}


def text_task(equipment: Equipment, material: Material, tokens: int) -> TextTask:
    """To write up to so many tokens behind each prompt, after the label that it gets.

    Prompts whose K,V of all layers do not fit are left out of the material, with a note.
    """
    limits = _limits(equipment, tokens)
    material.leave_out_longer_than(min(limits.max_tokens, equipment.opened.files.max_length - tokens - MOST_WORDS))
    labels, prompts = equipment.labels, material.prompts
    words = Beginnings(equipment.tokenizer, labels, rationale_texts(DEFAULT_TEMPLATE, labels.names))

    def beginning(number: int, logprobs: Float64Array) -> Beginning:
        prompt = prompts[number]
        return Beginning(prompt.tokens, words.tokens(prompt.labels, int(logprobs.argmax())), str(prompt.row))

    return TextTask(
        prompts=[prompt.tokens for prompt in prompts],
        labels=lambda number: labels.sets[prompts[number].labels],
        beginning=beginning,
        writing=Writing(tokens, stop_tokens(equipment.opened.files)),
        limits=limits,
        longest=equipment.opened.files.max_length,
    )


def _limits(equipment: Equipment, tokens: int) -> Limits:
    # Packs whose K,V of all layers fit in the budget twice: once kept, once to be written behind.
    files, budget = equipment.opened.files, equipment.limits
    law = memory_law(files.config, files.dtype)
    most = int(budget.max_tokens * law.token / (law.token + 2 * law.all_key_values)) - tokens
    if most < 1:
        raise PrefillError("K,V of all layers do not fit for any prompt with a text\nraise --memory")
    return Limits(tokens=min(budget.tokens, most), max_tokens=most, whole_nodes=budget.whole_nodes)


def text_methods(
    names: Sequence[str], equipment: Equipment, material: Material, tokens: int, loaded: Models[Any]
) -> list[TextMethod]:
    """The ways to write by name, the reference among them; without names all but vLLM. Close them in any case."""
    writer = _writer(equipment, material, loaded)
    asked = names or [name for name in TEXT_METHODS if name != "vllm"]
    found: list[TextMethod] = [LockStepTexts(TEXT_REFERENCE, "off", equipment.walking)]
    for name in asked:
        if name in DRAFTERS:
            if DRAFTERS[name].needs_draft and writer is None:
                continue
            found.append(LockStepTexts(name, name, equipment.walking, writer))
        elif name in TOGETHER:
            found.append(GeneratedTexts(name, equipment.model, equipment.walking, TOGETHER[name]))
        elif name == "vllm":
            found.append(VllmTextMethod(start_vllm(equipment, material, tokens + MOST_WORDS)))
    return found


def _writer(equipment: Equipment, material: Material, loaded: Models[Any]) -> DraftModel | None:
    # The draft as what guesses tokens; None if it has others than the model, or cannot: a note says why.
    small = equipment.opened.draft
    if small is None or equipment.opened.draft_tokenizer is not None:
        return None
    try:
        return DraftModel(loaded.draft_walk(equipment.settings.chunk_tokens), small.max_length)
    except UnsupportedModelError as error:
        material.notes.append(f"the draft cannot guess tokens: {error}")
        return None

"""`prefill bench --rationale`: the ways to write texts that it compares, and its report on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from prefillcli.bench.report import Range, facts_text, speedup_bars
from prefillcli.data.prompts.templates import Beginnings
from prefillcli.data.rows import Float64Array, Int32Array
from prefillcli.decode.continuations import DRAFTERS, Beginning, Continuation, Writing
from prefillcli.errors import PrefillError, UsageError, require_known
from prefillcli.options.groups import DEFAULT_TEMPLATE
from prefillcli.plan.pack import Limits
from prefillcli.report.section import Part, Section, TableRows, mebibytes, three_digits

if TYPE_CHECKING:
    import torch

    from prefillcli.core.feature import Answer, Equipment, Material
    from prefillcli.features.rationale.contenders import TextMethod, TextRun
    from prefillcli.plan.behind import LabelSet
    from prefillcli.runtime.clock import StepLog

TEXT_REFERENCE = "plain"  # the way of writing with which the others are compared

# The ways to write texts, each with a line for readers of the tables.
TEXT_METHODS = {
    TEXT_REFERENCE: "lock-step decoding behind the scored packs, without guesses; the others are compared with it",
    **{kind.name: f"with guesses: {kind.guesses}" for kind in DRAFTERS.values()},
    "generate": "scores of the layer walk, then transformers' generate, which reads each prompt again",
    "generate-padded": "the same in padded batches, longest prompts first",
    "vllm": "vLLM in a process of its own, with a copy of the model; its prefix cache begins empty",
}


class Guesses(BaseModel):
    """The guesses of a drafter: `accepted` of the `proposed` tokens were right."""

    proposed: int
    accepted: int


class TextMethodResult(BaseModel):
    """A way of writing, on some prompts."""

    method: str
    seconds: Range  # scores and texts
    decode_seconds: Range  # the part of these from the prompts in memory to the texts
    speedup: Range  # seconds of the reference over the method's, within a round
    decode_speedup: Range  # the same of decoding alone
    tokens_per_second: float  # written, by decoding alone
    passes_per_token: float | None  # of the model over a row
    guesses: dict[str, Guesses] = Field(default_factory=dict)  # by drafter
    peak_bytes: int | None = None  # above the memory in use before, which includes weights
    same_texts: int  # as the reference's
    near_ties: int  # other texts, if the reference's two best tokens were within 1e-4 at some point

    @property
    def times(self) -> tuple[Range, Range, Range, Range]:
        """Seconds and speedup, in total and of decoding."""
        return self.seconds, self.speedup, self.decode_seconds, self.decode_speedup


class TextResult(BaseModel):
    """All ways of writing on a workload."""

    workload: str
    rows: int
    prompt_tokens: int
    text_tokens: int  # that the reference has written
    rounds: int
    notes: list[str] = Field(default_factory=list)
    methods: list[TextMethodResult] = Field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """For the last line on stdout."""
        return {
            each.method: {
                "seconds": round(each.seconds.median, 4),
                "decode_seconds": round(each.decode_seconds.median, 4),
                "speedup": round(each.speedup.median, 3),
                "decode_speedup": round(each.decode_speedup.median, 3),
            }
            for each in self.methods
        }

    def _headline(self) -> str:
        return (
            f"{self.workload}: {self.text_tokens:,} tokens behind {self.rows:,} prompts "
            f"({self.prompt_tokens / self.rows:,.0f} tokens each)"
        )

    def in_short(self, machine: Mapping[str, str | int], *, whole: bool) -> Section:
        """The ways of writing on a workload, for the terminal."""
        explained = [(each.method, TEXT_METHODS[each.method]) for each in self.methods if each.method in TEXT_METHODS]
        return Section(
            title=self._headline(),
            parts=[
                Part(above=facts_text(machine), table=quick_text_table(self)),
                Part(lines=explained, note=TEXT_LEGEND),
            ],
            alarms=self.notes,
        )

    def section(self) -> Section:
        """The ways of writing on a workload, for the page."""
        speedups: list[tuple[str, float, float | None, str]] = [
            (
                each.method,
                each.speedup.median,
                each.decode_speedup.median,
                f"{each.speedup.median:.2f}x, decoding alone {each.decode_speedup.median:.2f}x",
            )
            for each in self.methods
            if each.method != TEXT_REFERENCE
        ]
        return Section(
            title=self._headline(),
            alarms=self.notes,
            parts=[
                Part(
                    title=f"Speedup over {TEXT_REFERENCE}",
                    keys=[("measured", "scores and texts"), ("promised", "decoding alone")],
                    bars=speedup_bars(speedups),
                    note=f"The upright line is {TEXT_REFERENCE} itself.",
                ),
                Part(table=text_table(self), note=TEXT_LEGEND),
            ],
        )


def text_table(result: TextResult) -> TableRows:
    """Header and one row for each way of writing."""
    return [
        ["method", "seconds", "speedup", "writing", "speedup", "tokens/s", "passes", "right", "same", "peak MiB"],
        *([each.method, *map(str, each.times), *_counts(each, named=True)] for each in result.methods),
    ]


def quick_text_table(result: TextResult) -> TableRows:
    """The same with medians alone: as much as fits a terminal."""
    return [
        ["method", "all, s", "x", "text, s", "x", "tok/s", "passes", "right", "same", "MiB"],
        *(
            [each.method, *(three_digits(value.median) for value in each.times), *_counts(each, named=False)]
            for each in result.methods
        ),
    ]


def _counts(method: TextMethodResult, *, named: bool) -> list[str]:
    right = {name: each.accepted / each.proposed for name, each in method.guesses.items() if each.proposed}
    return [
        three_digits(method.tokens_per_second),
        "" if method.passes_per_token is None else f"{method.passes_per_token:.2f}",
        " ".join(f"{name} {share:.0%}" if named else f"{share:.0%}" for name, share in right.items()),
        f"{method.same_texts:,}" + (f" + {method.near_ties:,}" if method.near_ties else ""),
        "" if method.peak_bytes is None else mebibytes(method.peak_bytes),
    ]


TEXT_LEGEND = (
    "seconds of scores and texts, and of the texts alone; speedups over plain; passes: of the model, for a token of a "
    "text; right: guesses that were accepted; same: texts as plain's (+ others where the two best tokens were once "
    "within 1e-4)"
)


# The texts to write: up to so many tokens behind each prompt.


MOST_WORDS = 16  # the most tokens between a prompt and its text


@dataclass(frozen=True, slots=True)
class TextTask:
    """Prompts that are scored and written on, in packs of these `limits`, whose K,V of all layers fit.

    `beginning` gives the beginning of a text, by the number of its prompt and its label log-probabilities, float64
    [labels]. A prompt, its text and the tokens between them take at most `longest` tokens.
    """

    prompts: Sequence[Int32Array]
    labels: Callable[[int], LabelSet]
    beginning: Callable[[int, Float64Array], Beginning]
    writing: Writing
    limits: Limits
    longest: int
    again: bool = False

    def with_drafter(self, name: str) -> TextTask:
        """The task for the drafter of this name."""
        speculation = replace(self.writing.speculation, drafter=name)
        return replace(self, writing=replace(self.writing, speculation=speculation))

    # As `Continuations` of all prompts, for engines:

    def wanted(self, answers: Sequence[Answer]) -> Mapping[int, Beginning]:
        return {answer.prompt: self.beginning(answer.prompt, answer.logprobs) for answer in answers}

    def of(self, prompts: Collection[int]) -> TextTask:
        return self


def text_task(equipment: Equipment, material: Material, tokens: int) -> TextTask:
    """The task of writing up to this many tokens behind each prompt, after its predicted label.

    Prompts whose K,V of all layers do not fit are left out of the material, with a note.
    """
    from prefillcli.models.open import stop_tokens

    limits = _limits(equipment, tokens)
    material.leave_out_longer_than(min(limits.max_tokens, equipment.opened.files.max_length - tokens - MOST_WORDS))
    labels, prompts = equipment.labels, material.prompts
    words = Beginnings(equipment.tokenizer, labels, DEFAULT_TEMPLATE)

    def beginning(number: int, logprobs: Float64Array) -> Beginning:
        prompt = prompts[number]
        return Beginning(prompt.tokens, words.tokens(prompt.labels, int(logprobs.argmax())), str(prompt.row))

    return TextTask(
        prompts=[prompt.tokens for prompt in prompts],
        labels=lambda number: prompts[number].labels,
        beginning=beginning,
        writing=Writing(tokens, stop_tokens(equipment.opened.files)),
        limits=limits,
        longest=equipment.opened.files.max_length,
    )


def _limits(equipment: Equipment, tokens: int) -> Limits:
    # Packs whose K,V of all layers fit in the budget twice: once kept, once to be written behind.
    from prefillcli.models.law import memory_law

    files, budget = equipment.opened.files, equipment.limits
    law = memory_law(files.config, files.dtype)
    most = int(budget.max_tokens * law.token / (law.token + 2 * law.all_key_values)) - tokens
    if most < 1:
        raise PrefillError("K,V of all layers do not fit for any prompt with a text\nraise --memory")
    return Limits(tokens=min(budget.tokens, most), max_tokens=most, whole_nodes=budget.whole_nodes)


# The contest of the ways on one workload.


NEAR_TIE = 1e-4


@dataclass(slots=True)
class _Entrant:
    """A method with the result of its first run, and the seconds of each round: in total, and of decoding alone."""

    method: TextMethod
    run: TextRun
    peak: int | None
    seconds: list[float]
    decoding: list[float]


def compare(
    material: Material,
    task: TextTask,
    methods: Sequence[TextMethod],
    *,
    device: torch.device,
    rounds: int,
    begin: Callable[[str], None] = lambda step: None,
    within: float = math.inf,
) -> TextResult:
    """Run every method once for its texts and memory, then `rounds` times in turn for its time; 0: the first run's.

    After the first round no round begins if it would end more than `within` seconds after the first began. A method
    that runs out of the device's memory is left out with a note. One of the methods is the reference.
    """
    from prefillcli.bench.contest import left_out_without_memory, timed_rounds, with_peak  # takes torch along

    name, notes = material.name, material.notes
    entries: list[_Entrant] = []
    for method in methods:
        begin(f"{name}: {method.name}, for its texts")
        with left_out_without_memory(method.name, TEXT_REFERENCE, notes):
            begun = time.perf_counter()
            run, peak = with_peak(partial(method.run, task), device)
            seconds = time.perf_counter() - begun
            entries.append(_Entrant(method, run, None if method.elsewhere else peak, [seconds], [run.report.seconds]))

    def timed(entry: _Entrant) -> None:
        begin(f"{name}: {entry.method.name}, for its time")
        entry.decoding.append(entry.method.run(task).report.seconds)

    runs = {entry.method.name: partial(timed, entry) for entry in entries}
    if rounds:
        for entry in entries:
            entry.decoding = []
    found = timed_rounds(runs, rounds, within, notes)
    for entry in entries:
        entry.seconds = found.get(entry.method.name, entry.seconds)
    reference = next(entry for entry in entries if entry.method.name == TEXT_REFERENCE)
    return TextResult(
        workload=name,
        rows=len(task.prompts),
        prompt_tokens=sum(map(len, task.prompts)),
        text_tokens=reference.run.report.tokens,
        rounds=len(reference.seconds) if rounds else 0,
        notes=notes,
        methods=[_measured(entry, reference) for entry in entries],
    )


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
    # The number of texts that equal the reference's, and of others where the reference once came near another token.
    same = [prompt for prompt, text in texts.items() if text.tokens == reference[prompt].tokens]
    others = reference.keys() - set(same)
    return len(same), sum(reference[prompt].gap < NEAR_TIE for prompt in others)


class WritingContest:
    """Ways to write texts behind the same prompts, in place of ways to score them."""

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def names(self) -> Sequence[str]:
        """The ways that were named; none for all but vLLM. Raises UsageError."""
        settings = self._settings
        require_known("--method", settings.method, TEXT_METHODS)
        for name in settings.method:
            if name in DRAFTERS and DRAFTERS[name].needs_draft and not settings.uses_draft:
                raise UsageError(f"--method {name} needs --draft: a small model with the same tokenizer")
        names: Sequence[str] = settings.method
        return names

    def run(
        self, material: Material, names: Sequence[str], equipment: Equipment, steps: StepLog, within: float
    ) -> TextResult:
        """Compare these ways. No timed round begins if it would end more than so many seconds after the first
        began."""
        from prefillcli.features.rationale.contenders import text_methods  # takes torch along

        settings = self._settings
        task = text_task(equipment, material, settings.rationale)
        steps.begin(f"{material.name}: {'starting vLLM' if 'vllm' in names else 'getting ready'}")
        with text_methods(names, equipment, material, settings.rationale) as methods:
            steps.announce(
                f"{material.name}: {len(task.prompts):,} prompts by {', '.join(each.name for each in methods)}: "
                f"once for the texts, then {settings.rounds} timed rounds"
            )
            return compare(
                material,
                task,
                methods,
                device=equipment.device,
                rounds=settings.rounds,
                begin=steps.begin,
                within=within,
            )

    def next(self) -> str:
        """Advice on the next command to run."""
        rationale = f"--rationale {self._settings.rationale}"
        return f"prefill score with {rationale} writes behind all rows, --rationale-when behind some"

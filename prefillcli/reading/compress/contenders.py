"""The methods of `prefill bench` that drop tokens: each with the tokens that a picker keeps, at several rates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from prefillcli.bench.contenders import Contender, Cost, Equipment, MethodRun
from prefillcli.bench.report import LayerDrift, StateDrift
from prefillcli.core.question import Question, method_of
from prefillcli.data.prompts.encoding import Spans, spans_of
from prefillcli.errors import UsageError
from prefillcli.models.shape import NoCostModel, Shape, answer_flops, ratio_speedup, table5, walk_flops
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.reading.compress.compress import Compress
from prefillcli.reading.compress.compressor import Compressor, make_compressor
from prefillcli.reading.compress.draft import SelfDraft, final_states
from prefillcli.reading.compress.load import SpecPrefill, own_layers, translator_of
from prefillcli.reading.compress.selection import Bm25, ImportanceEstimate, Picker, RandomChunks
from prefillcli.reading.compress.settings import PICKERS, compression_of

if TYPE_CHECKING:
    from prefillcli.core.feature import LayerWalk, Material, Prompt


# State drift: the distance of recurrent layers' final states from those of the whole prompt.
#
# A recurrent layer advances only at the tokens that it reads, so its state after a compressed prompt differs from that
# after the whole prompt ("SpecPrefill on Unified Memory" leaves open by how much).


Int32Array = npt.NDArray[np.int32]
DRIFT_ROWS = 8  # the first compressed prompts of each method; each is walked once more whole and once more compressed


def state_drift(
    walking: Callable[[], AbstractContextManager[LayerWalk]], limits: Limits, questions: Sequence[Question]
) -> StateDrift | None:
    """The drift over the first `DRIFT_ROWS` compressed questions; None without any, or without recurrent layers.

    `walking` gives a walk of the target. Each question is walked whole and compressed, by itself.
    """
    rows = [each for each in questions if each.compressed][:DRIFT_ROWS]
    found: dict[int, list[float]] = {}
    with walking() as walk:
        for question in rows:
            whole = final_states(walk, Question(question.prompt), limits)
            for number, states in final_states(walk, question, limits).items():
                found.setdefault(number, []).append(distance(states, whole[number]))
    if not found:
        return None
    every = [each for layer in found.values() for each in layer]
    return StateDrift(
        rows=len(rows),
        median=statistics.median(every),
        largest=max(every),
        layers=[
            LayerDrift(layer=number + 1, median=statistics.median(own), largest=max(own))
            for number, own in found.items()
        ],
    )


def distance(states: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """L2 distance of one layer's states from those of the whole prompt, over the norm of the latter."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(states, whole, strict=True))
    size = sum(float(each.double().square().sum()) for each in whole)
    return float((apart / size) ** 0.5) if size else 0.0


class SmallModel:
    """The draft that was loaded beside the model, and its operations."""

    def __init__(self, equipment: Equipment) -> None:
        opened, plan = equipment.opened, equipment.loaded.plan
        self.config: Any = None if opened.draft is None else opened.draft.config
        self._compression = compression_of(equipment.settings)
        self._translator = translator_of(opened)
        self._limits = Limits(**plan["draft"]["limits"]) if "draft" in plan else None

    def in_its_tokens(self, prompts: Sequence[Int32Array]) -> list[Int32Array]:
        """The prompts that the draft can read, in its own tokens."""
        if self._translator is None:
            return list(prompts)
        return [each.tokens for each in self._translator.translate(prompts) if not isinstance(each, str)]

    def flops(self, prompts: Sequence[Int32Array]) -> float:
        """The operations of the draft over these prompts, as it plans them, without those of the votes."""
        if not prompts or self._limits is None:
            return 0.0
        plan = make_plan(self.in_its_tokens(prompts), self._limits)
        found = walk_flops(self.config, plan)
        if self._compression.decoded:
            found += answer_flops(self.config, plan, ahead=self._compression.decoded)
        return found


def compressor_in(
    equipment: Equipment, name: str, *, spans: Callable[[Prompt], Spans | None] = lambda prompt: None
) -> Compressor:
    """A compressor with the picker of this name.

    `spans` gives a prompt's text and the places of its tokens there, or None where the text does not give the tokens.
    Raises UsageError where the model should pick tokens itself and none of its layers can.
    """
    compression, opened = compression_of(equipment.settings), equipment.opened
    own = own_layers(compression, opened) if PICKERS[name].needs == "self" else None
    picker: Picker
    if own is not None:
        picker = SelfDraft(own - 1)
    elif name == "specprefill":
        picker = SpecPrefill(equipment.loaded.beside[Compress], translator_of(opened))
    elif name == "bm25":
        picker = Bm25(spans)
    else:
        picker = RandomChunks(compression.select_chunk, equipment.settings.seed)
    return make_compressor(picker, compression, opened, 1.0, own=own)


def contenders(names: Collection[str], equipment: Equipment, material: Material) -> list[Contender]:
    """The methods by name, once for each rate. Those that cannot be compared are left out, with a note."""
    kinds = [kind for kind in PICKERS.values() if kind.name in names]
    spans: Mapping[int, Spans] = {}
    if "bm25" in names and find_spec("bm25s") is None:  # named ones are refused before
        material.notes.append("bm25 is left out: the package bm25s is not installed")
        kinds = [kind for kind in kinds if kind.name != "bm25"]
    if any(kind.needs == "text" for kind in kinds):
        all_spans = spans_of(equipment.tokenizer, material.prompts)
        if all_spans is None:
            why = "it needs prompts whose text gives their tokens again"
            material.notes += [f"{kind.name} is left out: {why}" for kind in kinds if kind.needs == "text"]
            kinds = [kind for kind in kinds if kind.needs != "text"]
        spans = all_spans or {}
    kinds = [kind for kind in kinds if kind.needs != "self" or _can_choose(kind.name, equipment, material)]
    compressors = [compressor_in(equipment, kind.name, spans=lambda prompt: spans.get(prompt.row)) for kind in kinds]
    picked = [PickedOnce() for _ in compressors]
    found: list[Contender] = []
    for keep in dict.fromkeys(equipment.settings.keep):
        found += [compressed_by(equipment, each, keep, own) for each, own in zip(compressors, picked, strict=True)]
    return found


def _can_choose(name: str, equipment: Equipment, material: Material) -> bool:
    # Whether the model has a layer that can choose tokens. Raises UsageError if a named method needs one and there is
    # none.
    try:
        own_layers(compression_of(equipment.settings), equipment.opened)
    except UsageError as error:
        if name in equipment.settings.method or equipment.settings.drafts_itself:
            raise
        material.notes.append(f"{name} is left out: {error}".partition("\n")[0])
        return False
    return True


@dataclass(slots=True)
class PickedOnce:
    """The estimates of a picker, for several keep rates. `tokens` is the number that the draft computed."""

    wanted: list[bool] = field(default_factory=list)  # which prompts have a keep rate
    estimates: list[ImportanceEstimate] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


class Compressed(Contender):
    """The layer walk over the tokens that a picker keeps. `compressor` works as that of `prefill score`.

    Contenders with the same `picked` share the estimates of their first runs.
    """

    def __init__(
        self, equipment: Equipment, compressor: Compressor, keep: float, picked: PickedOnce | None = None
    ) -> None:
        super().__init__(compressor.picker.method, equipment, keep)
        self._compressor = compressor
        self._small = SmallModel(equipment)
        self._picked = picked or PickedOnce()

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        keeps = self._compressor.keeps(prompts, self.keep)
        return self._read(prompts, keeps, self._pick(prompts, keeps))

    def first_run(self, prompts: Sequence[Prompt]) -> MethodRun:
        keeps, picked = self._compressor.keeps(prompts, self.keep), self._picked
        wanted = [keep is not None for keep in keeps]
        reused = picked.wanted == wanted
        if not reused:
            found = self._pick(prompts, keeps)
            picked.wanted, picked.estimates = wanted, found.estimates
            picked.tokens, picked.seconds = found.tokens, found.seconds
        run = self._read(prompts, keeps, picked)
        run.reused_seconds = picked.seconds if reused else 0.0
        return run

    def _pick(self, prompts: Sequence[Prompt], keeps: Sequence[float | None]) -> PickedOnce:
        picker, begun = self._compressor.picker, time.perf_counter()
        before = picker.tokens
        estimates = self._compressor.estimate(prompts, keeps, lambda tokens: None)
        return PickedOnce([], estimates, picker.tokens - before, time.perf_counter() - begun)

    def _read(self, prompts: Sequence[Prompt], keeps: Sequence[float | None], picked: PickedOnce) -> MethodRun:
        questions = self._compressor.select(prompts, keeps, picked.estimates)
        drafted = [
            prompt.tokens
            for prompt, estimate in zip(prompts, picked.estimates, strict=True)
            if picked.tokens and estimate.importance is not None
        ]
        return MethodRun(self._equipment.walk([questions]), questions, drafted, picked.tokens)

    def cost(self, run: MethodRun) -> Cost:
        cost = super().cost(run)
        if cost.flops is None:
            return cost
        try:
            return replace(cost, flops=cost.flops + self._small.flops(run.drafted))
        except NoCostModel as error:
            return replace(cost, flops=None, unknown=str(error))

    def drift(self, run: MethodRun) -> StateDrift | None:
        return state_drift(self._equipment.walking, self._equipment.limits, run.questions)

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        equipment, keep = self._equipment, self.keep or 1.0
        lengths = [len(question.prompt.tokens) for question in run.questions]
        kept = [len(question.tokens) for question in run.questions]
        drafts = run.draft_tokens > 0
        try:
            ratio = 1 / keep
            if drafts:
                ratio = ratio_speedup(equipment.config, self._small.config, round(np.mean(lengths)), keep)
            whole = sum(table5(equipment.config, length).total for length in lengths)
            part = sum(table5(equipment.config, length).total for length in kept)
            if drafts:
                read = self._small.in_its_tokens(run.drafted)
                part += sum(table5(self._small.config, len(tokens)).total for tokens in read)
            return ratio, whole / part
        except NoCostModel:  # `cost` says why
            return None


def compressed_by(equipment: Equipment, compressor: Compressor, keep: float, picked: PickedOnce) -> Compressed:
    """The contender of a compressor's picker."""
    kind = SelfDrafted if isinstance(compressor.picker, SelfDraft) else Compressed
    return kind(equipment, compressor, keep, picked)


class SelfDrafted(Compressed):
    """One pass: the model's own `layers` first layers read whole prompts, and the tokens that they keep go on."""

    @property
    def layers(self) -> int:
        return cast(SelfDraft, self._compressor.picker).layer + 1

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        # As in `Contender`, but with the first layers' share of all operations in place of a draft's.
        config, keep = self._equipment.config, self.keep or 1.0
        try:
            whole = sum(table5(config, len(question.prompt.tokens)).total for question in run.questions)
            part = sum(table5(config, len(question.tokens)).total for question in run.questions)
            depth = self.layers / Shape(config).layers
        except NoCostModel:  # `cost` says why
            return None
        return 1 / (depth + (1 - depth) * keep), whole / (depth * whole + (1 - depth) * part)

    def _read(self, prompts: Sequence[Prompt], keeps: Sequence[float | None], picked: PickedOnce) -> MethodRun:
        questions = self._compressor.select(prompts, keeps, picked.estimates)
        answers = self._equipment.answers(questions)
        read = [
            replace(question, thinning=None, method=method_of(question, answer))
            if answer.thinned is None or len(answer.thinned.kept) == len(question.tokens)
            else Question(question.prompt, answer.thinned.kept.astype(np.int64), question.method)
            for question, answer in zip(questions, answers, strict=True)
        ]
        return MethodRun(np.stack([each.logprobs for each in answers]), read, thinned=questions)

    def cost(self, run: MethodRun) -> Cost:
        whole, part = self._equipment.plan(run.thinned), self._equipment.plan(run.questions)
        config, tokens = self._equipment.config, whole.computed_tokens
        try:
            flops = walk_flops(config, whole, only=self.layers)
            flops += walk_flops(config, part, skipped=self.layers) + answer_flops(config, part)
            return Cost(tokens, flops)
        except NoCostModel as error:
            return Cost(tokens, None, str(error))

    def drift(self, run: MethodRun) -> StateDrift | None:
        return None  # its first layers read whole prompts

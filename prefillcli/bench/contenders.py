"""The methods of `prefill bench`: each answers the same prompts, and tells afterwards what it computed."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.bench.report import ExitResult, LayerDrift, StateDrift
from prefillcli.compress.base import ImportanceEstimate
from prefillcli.compress.compressor import Compressor
from prefillcli.compress.load import make_compressor, translator_of
from prefillcli.compress.pickers import PickerResources
from prefillcli.compress.row_pickers import GemFilter
from prefillcli.compress.self_draft import SelfDraft
from prefillcli.compress.settings import Compression
from prefillcli.core.request import Request, answer, answer_requests, method_of, plan_requests
from prefillcli.data.prompts.encoding import Spans
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import Float64Array, Prompt
from prefillcli.engines.base import PLAIN, Answer, Treatment
from prefillcli.engines.hf import last_logits
from prefillcli.engines.readout import activation_of, label_numbers
from prefillcli.engines.torch import TorchEngine
from prefillcli.jobs.load import Models, compression_of
from prefillcli.models.open import Opened
from prefillcli.models.shape import (
    NoCostModel,
    Shape,
    answer_flops,
    prefill_flops,
    ratio_speedup,
    table5,
    walk_flops,
)
from prefillcli.options.commands import BenchSettings
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION, ForestAttention
from prefillcli.prefill.own_cache import LayerPast
from prefillcli.prefill.walk import LayerWalk

# State drift: how far the final states of recurrent layers are from those of the whole prompt.
#
# A recurrent layer advances only at the tokens that it reads, so after a compressed prompt its state is another one
# than after the whole prompt ("SpecPrefill on Unified Memory" leaves open by how much).


DRIFT_ROWS = 8  # of each method: the first that it has compressed; both ways of reading them are walked once more


def state_drift(
    walking: Callable[[], AbstractContextManager[LayerWalk]], limits: Limits, requests: Sequence[Request]
) -> StateDrift | None:
    """The drift over the first `DRIFT_ROWS` compressed requests; None without any, or without recurrent layers.

    `walking` gives a walk of the target. Each request is walked whole and compressed, by itself.
    """
    rows = [each for each in requests if each.compressed][:DRIFT_ROWS]
    found: dict[int, list[float]] = {}
    with walking() as walk:
        for request in rows:
            whole = final_states(walk, Request(request.prompt), limits)
            for number, states in final_states(walk, request, limits).items():
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


@torch.inference_mode()
def final_states(walk: LayerWalk, request: Request, limits: Limits) -> dict[int, list[Tensor]]:
    """The states that a prompt leaves in each recurrent layer, by the layer's number from 0."""
    (pack,) = make_plan([request.tokens], limits, positions=[request.positions]).packs
    ((end, _),) = pack.reads
    found: dict[int, list[Tensor]] = {}
    with ForestAttention(len(pack.tokens)) as attention:
        state = walk.begin(pack, keep_ends=True)
        for number, _ in walk.through_layers(state, attention, lambda tokens: None):
            if state.recurrence:
                carried = [tensor for each in state.recurrence.end_of(end) for tensor in _carried(each)]
                found |= {number: carried} if carried else {}
    return found


def _carried(end: LinearAttentionLayer | LayerPast) -> list[Tensor]:
    """The recurrent states among what a layer keeps; K,V are none."""
    entries = end.entries.values() if isinstance(end, LayerPast) else [end]
    return [tensor for each in entries if isinstance(each, LinearAttentionLayer) for tensor in state_tensors(each)]


def state_tensors(state: LinearAttentionLayer) -> list[Tensor]:
    """What a module has carried from its first token on: recurrent states, or those of a convolution alone."""
    carried = [each for each in state.recurrent_states.values() if each is not None]
    return carried or [each for each in state.conv_states.values() if each is not None]


def distance(states: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """L2 distance of one layer's states from those of the whole prompt, over the norm of the latter."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(states, whole, strict=True))
    size = sum(float(each.double().square().sum()) for each in whole)
    return float((apart / size) ** 0.5) if size else 0.0


@dataclass(slots=True)
class MethodRun:
    """What a method gives for some prompts.

    `logprobs` are label log-probabilities, float64 [prompts, labels]; `requests` say what the target read, `drafted`
    what the draft read.
    """

    logprobs: Float64Array
    requests: list[Request]
    drafted: list[TokenArray] = field(default_factory=list)
    draft_tokens: int = 0  # computed by the draft
    reused_seconds: float = 0.0  # of the estimates, where another run made them
    thinned: list[Request] = field(default_factory=list)  # as they were, where the target dropped tokens itself
    computed_tokens: int = 0  # by a method that plans by itself
    exit_layers: list[int | None] = field(default_factory=list)  # after which prompts left, numbered from 0
    skipped: float = 0.0  # layers of a token that exits spared


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run computed. `flops` are those of both models, or None: `unknown` then says why they are not counted."""

    target_tokens: int
    flops: float | None
    unknown: str | None = None


class Equipment:
    """The loaded models, and how `prefill score` would walk them. `limits` are those of the target's packs."""

    def __init__(self, opened: Opened, loaded: Models[TorchEngine], settings: BenchSettings, labels: Labels) -> None:
        self.limits = loaded.engine.limits
        self.device = opened.device
        self.tokenizer = opened.tokenizer
        self.config: Any = opened.files.config
        self.draft_config: Any = None if opened.draft is None else opened.draft.config
        self.compression: Compression = compression_of(settings)
        self.opened = opened
        self.settings = settings
        self.labels = labels
        self.model = loaded.engine.walk.model
        self._activation = activation_of(opened.files)
        self._draft = loaded.draft
        self._translator = translator_of(opened)
        self._draft_limits = Limits(**loaded.plan["draft"]["limits"]) if "draft" in loaded.plan else None
        self._chunk_tokens: int = loaded.plan["chunk_tokens"]
        self._offload = settings.prefix_kv == "offload"
        self._schedule = settings.schedule
        loaded.engine.close()  # each run sets the model up as it needs it

    def compressor(
        self, picker: str, *, seed: int = 0, spans: Callable[[Prompt], Spans | None] | None = None
    ) -> Compressor:
        """The compressor of a job, with the picker of this name; `seed` and `spans` as in `PickerResources`.

        Raises ValueError where the picker needs a draft or spans, and there are none.
        """
        resources = PickerResources(
            settings=self.compression,
            seed=seed,
            draft=self._draft,
            walking=self.walking,
            limits=self.limits,
            spans=spans,
        )
        return make_compressor(picker, resources, self.opened, keep=1.0)

    def plain(self, prompts: Sequence[Prompt]) -> Float64Array:
        """Label log-probabilities [prompts, labels] by transformers' own forward, prompt by prompt."""
        self.model.set_attn_implementation("sdpa")
        logits = (last_logits(self.model, prompt.tokens) for prompt in prompts)
        sets = [self.labels.sets[prompt.labels] for prompt in prompts]
        rows = zip(logits, sets, strict=True)
        return np.concatenate([label_numbers(row[None], [0], [own], self._activation) for row, own in rows])

    def walk(self, groups: Sequence[Sequence[Request]]) -> Float64Array:
        """Label log-probabilities [requests, labels] by the layer walk; requests share within their group."""
        with self._walking() as engine:
            return np.concatenate(
                [answer(engine, requests, self.labels.sets, schedule=self._schedule) for requests in groups]
            )

    def answers(self, requests: Sequence[Request], treatment: Treatment = PLAIN) -> list[Answer]:
        """The layer walk's answers to requests that are planned together, with what happens between layers."""
        with self._walking() as engine:
            return answer_requests(engine, requests, self.labels.sets, schedule=self._schedule, treatment=treatment)

    @contextmanager
    def walking(self) -> Iterator[LayerWalk]:
        """The model as the layer walk uses it."""
        self.model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(self.model, chunk_tokens=self._chunk_tokens)
        try:
            yield walk
        finally:
            walk.close()

    @contextmanager
    def _walking(self) -> Iterator[TorchEngine]:
        self.model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(self.model, chunk_tokens=self._chunk_tokens, offload_held=self._offload)
        engine = TorchEngine(walk, limits=self.limits, activation=self._activation)
        try:
            yield engine
        finally:
            engine.close()

    def drift(self, requests: Sequence[Request]) -> StateDrift | None:
        """How far compressed requests leave recurrent layers from where whole prompts leave them."""
        return state_drift(self.walking, self.limits, requests)

    def plan(self, requests: Sequence[Request]) -> Plan:
        return plan_requests(requests, self.limits, self._schedule)

    def in_draft_tokens(self, prompts: Sequence[TokenArray]) -> list[TokenArray]:
        """Prompts that the draft has read, as it read them."""
        if self._translator is None:
            return list(prompts)
        return [each.tokens for each in self._translator.translate(prompts) if not isinstance(each, str)]

    def draft_flops(self, prompts: Sequence[TokenArray]) -> float:
        """The operations of the draft over these prompts, as it plans them, without those of the votes."""
        if not prompts or self._draft_limits is None:
            return 0.0
        plan = make_plan(self.in_draft_tokens(prompts), self._draft_limits)
        found = walk_flops(self.draft_config, plan)
        if self.compression.decoded:
            found += answer_flops(self.draft_config, plan, ahead=self.compression.decoded)
        return found


class Contender(ABC):
    """A method under its name. `keep` is the rate of the tokens that it keeps; None if it drops none."""

    def __init__(self, name: str, equipment: Equipment, keep: float | None = None) -> None:
        self.name = name if keep is None else f"{name}@{keep:g}"
        self.keep = keep
        self._equipment = equipment
        self._started = ExitStack()

    @property
    def elsewhere(self) -> bool:
        """It computes in other processes, so the memory of this one says nothing of it."""
        return False

    @abstractmethod
    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        """Answer the prompts. This is what is timed."""

    def close(self) -> None:
        """End what it has started."""
        self._started.close()

    def first_run(self, prompts: Sequence[Prompt]) -> MethodRun:
        """Answer the prompts; what another method has found out about them already may be used again."""
        return self.run(prompts)

    def cost(self, run: MethodRun) -> Cost:
        """What a run computed, by the plans that it must have made."""
        equipment = self._equipment
        plans = [equipment.plan(requests) for requests in self._groups(run.requests)]
        tokens = sum(plan.computed_tokens for plan in plans)
        try:
            flops = sum(walk_flops(equipment.config, plan) + answer_flops(equipment.config, plan) for plan in plans)
            return Cost(tokens, flops + equipment.draft_flops(run.drafted))
        except NoCostModel as error:
            return Cost(tokens, None, str(error))

    def exits(self, run: MethodRun, full: Float64Array) -> ExitResult | None:
        """Where prompts left, beside the label log-probabilities `full` [prompts, labels]; None if they cannot."""
        return None

    def drift(self, run: MethodRun) -> StateDrift | None:
        """How far recurrent layers end from where whole prompts leave them; None without any, or if all is kept."""
        return None

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        """Predicted speedups: 1 / (r + keep) at the mean length, and table 5 over all prompts and their kept tokens.

        None for a method that keeps all tokens, and for an architecture without a cost model.
        """
        return None

    def _groups(self, requests: list[Request]) -> list[list[Request]]:
        """The requests in groups that are planned together."""
        return [requests]


class Plain(Contender):
    """Plain transformers: one forward per prompt, SDPA, no cache, logits of the last token."""

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        return MethodRun(self._equipment.plain(prompts), [Request(prompt) for prompt in prompts])

    def cost(self, run: MethodRun) -> Cost:
        lengths = [len(request.tokens) for request in run.requests]
        try:
            return Cost(sum(lengths), sum(prefill_flops(self._equipment.config, length).total for length in lengths))
        except NoCostModel as error:
            return Cost(sum(lengths), None, str(error))


class Alone(Contender):
    """The layer walk over each prompt by itself."""

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        requests = [Request(prompt) for prompt in prompts]
        return MethodRun(self._equipment.walk(self._groups(requests)), requests)

    def _groups(self, requests: list[Request]) -> list[list[Request]]:
        return [[request] for request in requests]


class Hybrid(Contender):
    """The layer walk over the forest of all prompts: what `prefill score` does."""

    def run(self, prompts: Sequence[Prompt]) -> MethodRun:
        requests = [Request(prompt) for prompt in prompts]
        return MethodRun(self._equipment.walk([requests]), requests)


@dataclass(slots=True)
class PickedOnce:
    """What a picker found in prompts, for several keep rates. `tokens` are those that the draft computed."""

    wanted: list[bool] = field(default_factory=list)  # which prompts have a keep rate
    estimates: list[ImportanceEstimate] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


class Compressed(Contender):
    """The layer walk over what a picker keeps. `compressor` compresses as that of `prefill score` does.

    Contenders with the same `picked` share the estimates of their first runs.
    """

    def __init__(
        self, equipment: Equipment, compressor: Compressor, keep: float, picked: PickedOnce | None = None
    ) -> None:
        super().__init__(compressor.picker.method, equipment, keep)
        self._compressor = compressor
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
        requests = self._compressor.select(prompts, keeps, picked.estimates)
        drafted = [
            prompt.tokens
            for prompt, estimate in zip(prompts, picked.estimates, strict=True)
            if picked.tokens and estimate.importance is not None
        ]
        return MethodRun(self._equipment.walk([requests]), requests, drafted, picked.tokens)

    def drift(self, run: MethodRun) -> StateDrift | None:
        return self._equipment.drift(run.requests)

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        equipment, keep = self._equipment, self.keep or 1.0
        lengths = [len(request.prompt.tokens) for request in run.requests]
        kept = [len(request.tokens) for request in run.requests]
        drafts = run.draft_tokens > 0
        try:
            ratio = 1 / keep
            if drafts:
                ratio = ratio_speedup(equipment.config, equipment.draft_config, round(np.mean(lengths)), keep)
            whole = sum(table5(equipment.config, length).total for length in lengths)
            part = sum(table5(equipment.config, length).total for length in kept)
            if drafts:
                read = equipment.in_draft_tokens(run.drafted)
                part += sum(table5(equipment.draft_config, len(tokens)).total for tokens in read)
            return ratio, whole / part
        except NoCostModel:  # `cost` says why
            return None


# The methods by which the model's own first layers pick tokens: in one pass, or before a second one.


def compressed_by(equipment: Equipment, compressor: Compressor, keep: float, picked: PickedOnce) -> Compressed:
    """The contender of a compressor's picker."""
    kind = {SelfDraft: SelfDrafted, GemFilter: Filtered}.get(type(compressor.picker), Compressed)
    return kind(equipment, compressor, keep, picked)


class _OwnLayers(Compressed):
    """The model's own `layers` first layers read whole prompts."""

    @property
    def layers(self) -> int:
        return cast("SelfDraft | GemFilter", self._compressor.picker).layer + 1

    def predictions(self, run: MethodRun) -> tuple[float, float] | None:
        """As of `Contender`, with the first layers' share of all in place of a draft's operations."""
        config, keep = self._equipment.config, self.keep or 1.0
        try:
            whole = sum(table5(config, len(request.prompt.tokens)).total for request in run.requests)
            part = sum(table5(config, len(request.tokens)).total for request in run.requests)
            depth = self.layers / Shape(config).layers
        except NoCostModel:  # `cost` says why
            return None
        again = self._again(depth)
        return 1 / (depth + again * keep), whole / (depth * whole + again * part)

    def _again(self, depth: float) -> float:
        """Share of the layers that read what is kept."""
        raise NotImplementedError


class SelfDrafted(_OwnLayers):
    """One pass: what the first layers keep goes on to the others."""

    def _read(self, prompts: Sequence[Prompt], keeps: Sequence[float | None], picked: PickedOnce) -> MethodRun:
        requests = self._compressor.select(prompts, keeps, picked.estimates)
        answers = self._equipment.answers(requests)
        read = [
            replace(request, thinning=None, method=method_of(request, answer))
            if answer.thinned is None or len(answer.thinned.kept) == len(request.tokens)
            else Request(request.prompt, answer.thinned.kept.astype(np.int64), request.method)
            for request, answer in zip(requests, answers, strict=True)
        ]
        return MethodRun(np.stack([each.logprobs for each in answers]), read, thinned=requests)

    def cost(self, run: MethodRun) -> Cost:
        equipment, layers = self._equipment, self.layers
        whole, part = equipment.plan(run.thinned), equipment.plan(run.requests)
        try:
            flops = walk_flops(equipment.config, whole, only=layers)
            flops += walk_flops(equipment.config, part, skipped=layers) + answer_flops(equipment.config, part)
            return Cost(whole.computed_tokens, flops)
        except NoCostModel as error:
            return Cost(whole.computed_tokens, None, str(error))

    def drift(self, run: MethodRun) -> StateDrift | None:
        return None  # its first layers read whole prompts

    def _again(self, depth: float) -> float:
        return 1 - depth


class Filtered(_OwnLayers):
    """Two passes: the first layers read whole prompts, then all layers what they keep."""

    def cost(self, run: MethodRun) -> Cost:
        equipment = self._equipment
        part, whole = equipment.plan(run.requests), make_plan(run.drafted, equipment.limits)
        try:
            flops = walk_flops(equipment.config, whole, only=self.layers)
            flops += walk_flops(equipment.config, part) + answer_flops(equipment.config, part)
            return Cost(part.computed_tokens, flops)
        except NoCostModel as error:
            return Cost(part.computed_tokens, None, str(error))

    def _again(self, depth: float) -> float:
        return 1.0

"""The layer walk as an engine, and how it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from prefillcli.decode.behind import RowRoom, write_behind
from prefillcli.decode.continuations import DecodingReport
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.decode.speculation.draft_model import DraftModel
from prefillcli.decode.speculation.job_drafters import JobDrafters
from prefillcli.engines.base import (
    PLAIN,
    Answer,
    Continuations,
    EarlyAnswer,
    EarlyExits,
    EngineChoice,
    LabelTokens,
    Loaded,
    LoadRequest,
    PackByPack,
    Readings,
    ReducedPacks,
    ThinnedPrompt,
    Treatment,
    WeightsReport,
)
from prefillcli.engines.memory_plan import REDUCED, budget_of, hidden_on_host, keep_plan, plan_packs
from prefillcli.engines.readout import activation_of, label_logits, label_numbers, output_numbers
from prefillcli.engines.recovery import MemoryRecovery
from prefillcli.errors import UsageError
from prefillcli.models import open as models
from prefillcli.models.adapter_merging import ExchangedAdapters, merge_adapters
from prefillcli.models.adapters import open_adapters
from prefillcli.models.heads import Activation
from prefillcli.models.load import load_model, load_streamed
from prefillcli.models.open import Opened
from prefillcli.models.quantised import plan_quantisation
from prefillcli.models.rehearsal import check_uses
from prefillcli.models.shape import NoCostModel, keys_share
from prefillcli.models.streamed_layers import StreamedLayers, measure_speed
from prefillcli.models.weights import WeightsPlan, plan_weights
from prefillcli.plan.account import Account, LayersDone, account
from prefillcli.plan.blocks import STATE_STEP
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.prefill.attention_paths import ruled_out
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.fusion import Preparation, check_compiler, compiled, fused
from prefillcli.prefill.layer_calls import decoder_layers
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.own_cache import NO_DECODING, has_forest_attention
from prefillcli.prefill.recurrent import recurrent_modules
from prefillcli.prefill.walk import LayerWalk, Tick
from prefillcli.prefill.walk_state import REGROUP_LAYERS, Thinned, ThinningRule
from prefillcli.runtime import log
from prefillcli.runtime.memory import available_memory, device_capacity

# The exits of one pack: its prompts are read between layers, and those that are decided leave.


class PromptExits:
    """The `ExitRule` of a pack's prompts. `exits` says what is read of them, and who leaves."""

    def __init__(
        self,
        walk: LayerWalk,
        pack: Pack,
        labels: Callable[[int], LabelTokens],
        exits: EarlyExits,
        regroup_cost: float,
    ) -> None:
        self.layers = exits.observed if exits.policy is None else exits.policy.layers
        self.regroup_cost = regroup_cost
        self.going: Sequence[int] = range(len(pack.reads))
        """Numbers of the reads that go on."""
        self.early: dict[int, EarlyAnswer] = {}
        """What decided prompts have left with, or would have, by prompt."""
        self.readings: dict[int, list[Readings]] = {prompt: [] for prompt in pack.prompts}
        """What observed layers show of each prompt."""
        self.first_asked: tuple[int, float] | None = None
        """The first layer that was read, and when."""
        self._walk = walk
        self._pack = pack
        self._labels = labels
        self._exits = exits

    @classmethod
    def of(
        cls, walk: LayerWalk, pack: Pack, labels: Callable[[int], LabelTokens], treatment: Treatment
    ) -> PromptExits | None:
        """Those of a pack; None where nothing of it is read early."""
        if treatment.exits is None or not pack.reads:
            return None
        cost = REGROUP_LAYERS if treatment.regroup_cost is None else treatment.regroup_cost
        return cls(walk, pack, labels, treatment.exits, cost)

    def peeks(self, layer: int) -> bool:
        """Whether only the prompts' last tokens go through the layer before it is decided who leaves."""
        return self._exits.policy is not None and self._exits.policy.peeks(layer)

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        prompts = [
            (row, prompt)
            for row, read in enumerate(reads)
            for prompt in self._pack.reads[read][1]
            if prompt not in self.early
        ]
        if not prompts:
            return reads  # all of them are decided, and go on for the audit
        readings = self._read([row for row, _ in prompts], [prompt for _, prompt in prompts], before, after)
        self.first_asked = self.first_asked or (layer, time.monotonic())
        if self._exits.policy is None:
            for number, (_, prompt) in enumerate(prompts):
                self.readings[prompt].append(readings.row(number))
            return reads
        decided, logprobs = self._exits.policy.decide(layer, readings)
        for (_, prompt), leaves, own in zip(prompts, decided.tolist(), logprobs, strict=True):
            if leaves:
                self.early[prompt] = EarlyAnswer(layer, own)
        self.going = [read for read in reads if not all(map(self.has_left, self._pack.reads[read][1]))]
        return self.going

    def has_left(self, prompt: int) -> bool:
        """Whether a prompt has left, and goes no further."""
        return prompt in self.early and prompt not in self._exits.in_full

    def _read(self, rows: list[int], prompts: list[int], before: Tensor, after: Tensor) -> Readings:
        """What some prompts, whose last tokens are these rows of both tensors, show."""
        hidden = after[torch.as_tensor(rows, device=after.device)].float().cpu().numpy()
        own = [self._labels(prompt) for prompt in prompts]
        logits = np.empty((2, len(prompts), len(own[0])))
        for tokens in dict.fromkeys(own):
            at = [number for number, each in enumerate(own) if each == tokens]
            picked = torch.as_tensor([rows[number] for number in at], device=after.device)
            for side, states in enumerate((after, before)):
                logits[side, at] = self._label_logits(states[picked], tokens)
        return Readings(hidden, logits[0], logits[1])

    def _label_logits(self, hidden: Tensor, labels: LabelTokens) -> npt.NDArray[np.float64]:
        """Label logits by the model's own norm and head, variants summed in probability, float64 [rows, labels]."""
        return label_logits(self._walk.label_logits(hidden, output_numbers(labels)), labels)


# Texts behind the prompts of a pack whose K,V survive its scoring.


class PackTexts:
    """What is kept of a pack while it is walked, and written on once it is scored."""

    def __init__(self, walk: LayerWalk, pack: Pack, continuations: Continuations) -> None:
        self.kept = KeptPack(pack, len(walk.layers), on_host=walk.device.type == "cuda")
        self._walk = walk
        self._pack = pack
        self._continuations = continuations

    @classmethod
    def of(cls, walk: LayerWalk, pack: Pack, treatment: Treatment, limits: Limits) -> Self | None:
        """None where nothing is written behind this pack, or its K,V of all layers do not fit."""
        continuations = treatment.continuations
        if continuations is None or not pack.reads or not limits.can_keep(pack):
            return None
        return cls(walk, pack, continuations)

    def write(
        self,
        answers: Sequence[Answer],
        seconds: float,
        *,
        longest: int,
        room: RowRoom,
        drafters: JobDrafters,
        tick: Tick,
        report: DecodingReport,
    ) -> list[Answer]:
        """The answers of the pack, which took `seconds`, those of wanted prompts with their texts, for which the
        `drafters` guess. The other arguments as in `write_behind`."""
        wanted = self._continuations.wanted(answers)
        if self._continuations.again:
            report.again_prompts += len(wanted)
            report.prompt_tokens += len(self._pack.tokens)
            report.prompt_seconds += seconds
        else:
            report.kept_prompts += len(wanted)
        reads = {prompt: read for read, (_, prompts) in enumerate(self._pack.reads) for prompt in prompts}
        writing = self._continuations.writing
        texts = write_behind(
            self._walk,
            self.kept,
            [(reads[prompt], beginning) for prompt, beginning in wanted.items()],
            writing,
            longest=longest,
            room=room,
            make_drafter=partial(drafters.of, writing=writing, report=report),
            tick=tick,
            report=report,
        )
        found = dict(zip(wanted, texts, strict=True))
        return [replace(each, continuation=found.get(each.prompt)) for each in answers]


# What goes on of the prompts of one pack.


class PackThinning:
    """A thinning rule at work on one pack. `found` has what goes on of each prompt, once the rule was asked."""

    def __init__(self, rule: ThinningRule) -> None:
        self.found: dict[int, ThinnedPrompt] = {}
        self._rule = rule

    @classmethod
    def of_treatment(cls, treatment: Treatment) -> PackThinning | None:
        """That of a pack; None where nothing is left behind."""
        return None if treatment.thinning is None else cls(treatment.thinning)

    def of_answers(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with what went on of their prompts."""
        return [replace(each, thinned=self.found.get(each.prompt)) for each in answers]

    @property
    def layer(self) -> int:
        return self._rule.layer

    def of(self, prompts: Collection[int]) -> ThinningRule:
        return self._rule.of(prompts)

    def watched(self, pack: Pack, tree: Tree) -> Sequence[int]:
        return self._rule.watched(pack, tree)

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> Sequence[Thinned]:
        thinned = self._rule(pack, tree, layer)
        for (_, prompts), own in zip(pack.reads, thinned, strict=True):
            kept = ThinnedPrompt(tree.depths[own.tokens].astype(np.int32), own.reason)
            self.found |= dict.fromkeys(prompts, kept)
        return thinned


USUAL_KEYS_SHARE = 0.115  # of Llama-3.1-8B


def open_models(choice: EngineChoice) -> Opened:
    """As `Loader`; the model must be one that can be walked layer by layer."""
    opened = models.open_models(choice)
    models.check_walkable(opened.files, "take another model, or --engine hf")
    models.check_loadable(opened.files, opened.device)
    opened = open_adapters(opened, choice, choice.trust_remote_code)
    return replace(opened, max_length=opened.files.max_length_apart)


def load(request: LoadRequest) -> Loaded[TorchEngine]:
    """As `Loader`. Packs are sized by what is free when the weights are there, unless `--memory` says it."""
    opened, choice = request.opened, request.choice
    # The draft is there by now.
    weights = plan_weights(opened, request.placement, draft=False, share=request.share)
    on_host = hidden_on_host(request.placement, opened.device, streamed=weights.streamed)
    model, source = _load_weights(request, weights)
    quantisation = plan_quantisation(opened.files.origin, opened.files.quantised, opened.device)
    adapters = merge_adapters(model, opened)
    drafts = "--draft self" if opened.drafts_itself else None
    own_cache = check_uses(model, drafts=drafts, compresses=opened.compresses).own_cache
    if own_cache:
        _check_own_cache(request)
    free = None
    if not choice.memory:
        free = int(available_memory(opened.device) * request.share) - (0 if source is None else source.memory_bytes)
    budget = budget_of(choice, free)
    speed = None if source is None else measure_speed(source)
    plan = dict(request.before)
    if not request.planned:
        packs = plan_packs(
            opened,
            choice,
            budget,
            request.measured,
            least_tokens=0 if speed is None else speed.hiding_tokens,
            hidden_on_host=on_host,
            own_cache=own_cache,
            text_tokens=request.text_tokens,
            texts_of=request.texts_of,
            share=request.share,
        )
        plan = keep_plan(plan, packs)
    engine = TorchEngine(
        model,
        limits=Limits(**plan["limits"]),
        chunk_tokens=plan["chunk_tokens"],
        offload_held=choice.prefix_kv == "offload",
        hidden_on_host=on_host,
        layers=source,
        weights=WeightsReport(
            mode="resident" if source is None else "stream",
            bytes=weights.bytes,
            memory_bytes=weights.bytes if source is None else source.resident_bytes + source.memory_bytes,
            weights_over_memory=weights.bytes / device_capacity(opened.device),
            own_cache=own_cache,
            quantisation=None if quantisation is None else quantisation.describe(opened.files.dtype),
            avoided_paths=tuple(ruled_out(opened.device)),
        ),
        activation=activation_of(opened.files),
        adapters=adapters,
        prepare=_preparation(request, model),
        deterministic=request.placement.deterministic,
        reduced=plan.get(REDUCED),
        longest=opened.files.max_length,
    )
    return Loaded(engine, plan, budget, 0.0 if speed is None else speed.read_seconds)


def _check_own_cache(request: LoadRequest) -> None:
    """Raise UsageError for what a model that is walked with its own cache cannot do; else say that it is."""
    family = request.opened.files.family
    if request.text_tokens:
        raise UsageError(f"--rationale: {NO_DECODING}")
    if request.placement.deterministic:
        raise UsageError(
            f"--deterministic: a {family} model is walked with its own attention and cache, whose sums depend on how "
            "its prompts are cut\ntake another model, or leave it out"
        )
    if request.share == 1.0:  # not by each of several workers
        log.info(f"a {family} model is walked with its own cache, prompt by prompt")


def _load_weights(request: LoadRequest, plan: WeightsPlan) -> tuple[PreTrainedModel, StreamedLayers | None]:
    """The model, and where its layers come from if they are streamed."""
    files, device, trust = request.opened.files, request.opened.device, request.choice.trust_remote_code
    if request.placement.deterministic:
        _refuse_packed(request.opened)
    if plan.streamed:
        return load_streamed(files, device, memory=plan.memory, share=request.share, trust_remote_code=trust)
    return load_model(files, device, trust_remote_code=trust), None


def _refuse_packed(opened: Opened) -> None:
    """Raise UsageError for weights whose products are computed by kernels of their own."""
    quantisation = plan_quantisation(opened.files.origin, opened.files.quantised, opened.device)
    if quantisation is not None and quantisation.kept == "packed":
        raise UsageError(
            f"--deterministic: {quantisation.format.name} weights stay packed here, and the kernels that multiply "
            "them are not known to give a row the same bits beside others\n"
            "take the model as it was before it was quantised, or leave --deterministic out"
        )


class TorchEngine(PackByPack):
    """Walks packs through a transformers model on one device."""

    whole_packs = True
    waits = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        limits: Limits,
        chunk_tokens: int,
        offload_held: bool = False,
        hidden_on_host: bool = False,
        layers: StreamedLayers | None = None,
        weights: WeightsReport | None = None,
        activation: Activation = "softmax",
        adapters: ExchangedAdapters | None = None,
        prepare: Preparation = fused,
        deterministic: bool = False,
        reduced: Mapping[str, Any] | None = None,
        longest: int = 1 << 30,
    ) -> None:
        whole, step = limits.whole_nodes or _keeps_ends(model), STATE_STEP if deterministic else 0
        self.limits = replace(limits, whole_nodes=whole, state_step=step if whole else 0)
        self.model = model
        self._adapters = adapters
        self._layers = layers
        self._weights = weights
        self._activation = activation
        self._waited_before = 0.0 if layers is None else layers.seconds_waited  # to measure its speed
        self._walk = LayerWalk(
            model,
            chunk_tokens=chunk_tokens,
            offload_held=offload_held,
            hidden_on_host=hidden_on_host,
            layers=layers,
            prepare=prepare,
            deterministic=deterministic,
        )
        self._recovery = MemoryRecovery(self._walk, reduced)
        self._limit_packs()
        self._keys_share = _keys_share(model.config.get_text_config())
        self._longest = longest
        self._decoding = DecodingReport()
        self._drafters = JobDrafters()
        self._text_room = RowRoom(limits.written_tokens or None, limits.row_tokens)
        self._block_seconds = 0.0  # of packs without answers since the last one with some

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelTokens],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        def answer(part: Pack, ticks: Callable[[float], None]) -> list[Answer]:
            begun = time.monotonic()
            try:
                return self._answer(part, labels, ticks, treatment if part is pack else treatment.of(part.prompts))
            except Exception:  # memory has run out, and it is tried again
                self._block_seconds += time.monotonic() - begun
                raise

        def unanswered(prompt: int, reason: str) -> Answer:
            return Answer(prompt, np.full(len(labels(prompt)), np.nan), 0, 0, 0.0, failure=reason)

        found = self._recovery.answer(pack, tick, answer, unanswered, partial(self._keep_less, treatment))
        self._limit_packs()
        yield found

    def _answer(
        self, pack: Pack, labels: Callable[[int], LabelTokens], tick: Callable[[float], None], treatment: Treatment
    ) -> list[Answer]:
        """The answers of a pack that fits."""
        begun = time.monotonic()
        if self._adapters is not None:
            self._adapters.use(pack.adapter)
        if self._layers is not None:
            self._layers.expect(len(pack.tokens), len(pack.reads))
        exits, done = PromptExits.of(self._walk, pack, labels, treatment), LayersDone.none(pack)
        thinning = PackThinning.of_treatment(treatment)
        texts = PackTexts.of(self._walk, pack, treatment, self.limits)
        logprobs: dict[int, npt.NDArray[np.float64]] = {}
        at = 0
        for logits in self._walk.read_logits(pack, tick, exits, done, thinning, None if texts is None else texts.kept):
            going = range(len(pack.reads)) if exits is None else exits.going
            reads = [pack.reads[read] for read in going[at : at + len(logits)]]
            at += len(logits)
            prompts = [(row, prompt) for row, (_, numbers) in enumerate(reads) for prompt in numbers]
            with self._walk.numbers:
                found = label_numbers(
                    logits, [row for row, _ in prompts], [labels(prompt) for _, prompt in prompts], self._activation
                )
            logprobs.update(zip((prompt for _, prompt in prompts), found, strict=True))
        seconds = time.monotonic() - begun + self._block_seconds
        self._block_seconds = 0.0 if pack.reads else seconds
        slower = self._without_exits(exits, begun) / seconds if exits is not None else 1.0
        answers = [_answer(part, logprobs, seconds * part.share, slower, exits) for part in account(pack, done)]
        if texts is not None:
            answers = texts.write(
                answers,
                seconds,
                longest=self._longest,
                room=self._text_room,
                drafters=self._drafters,
                tick=tick,
                report=self._decoding,
            )
        return answers if thinning is None else thinning.of_answers(answers)

    def _without_exits(self, exits: PromptExits, begun: float) -> float:
        """Seconds that a pack would have taken if none had left, by the layers before the first exit."""
        now = time.monotonic()
        if exits.first_asked is None:
            return now - begun
        layer, asked = exits.first_asked
        share, layers = self._keys_share, len(self._walk.layers)
        return (asked - begun) / (layer + (share if exits.peeks(layer) else 1.0)) * (layers - 1 + share)

    def holds(self, key: Key) -> bool:
        return self._walk.holds(key)

    def reduced(self) -> ReducedPacks | None:
        return self._recovery.reduced()

    def decoded(self) -> DecodingReport | None:
        return self._decoding if self._decoding.texts else None

    def guess_with(self, draft: DraftModel) -> None:
        self._drafters.draft = draft

    def _keep_less(self, treatment: Treatment, pack: Pack) -> bool:
        """If this pack was kept, it is not any more, and later ones are if they are half as large."""
        if treatment.continuations is None or not pack.reads or not self.limits.can_keep(pack):
            return False
        size = self.limits.kept_size(pack.held_tokens + len(pack.tokens), len(pack.reads))
        self.limits = replace(self.limits, kept_tokens=int(size) // 2)
        return True

    def _limit_packs(self) -> None:
        """Later windows are planned with packs as small as those that fit."""
        most = self._recovery.pack_tokens
        if most is not None and most < self.limits.tokens:
            self.limits = replace(self.limits, tokens=most)

    def weights_report(self) -> WeightsReport | None:
        if self._weights is None or self._layers is None:
            return self._weights
        waited = self._layers.seconds_waited - self._waited_before
        return replace(self._weights, bytes_read=self._layers.bytes_read, seconds_waited=waited)

    def close(self) -> None:
        self._walk.close()
        if self._layers is not None:
            self._layers.close()


def _answer(
    part: Account,
    logprobs: Mapping[int, npt.NDArray[np.float64]],
    seconds: float,
    slower: float,
    exits: PromptExits | None,
) -> Answer:
    """The answer of a prompt that was `seconds` long computed, without exits `slower` times as long."""
    prompt = part.prompt
    answer = Answer(
        prompt=prompt,
        logprobs=logprobs[prompt] if exits is None or not exits.has_left(prompt) else exits.early[prompt].logprobs,
        shared_tokens=part.shared_tokens,
        computed_tokens=part.computed_tokens,
        seconds=seconds,
        full_seconds=seconds * slower,
    )
    if exits is None:
        return answer
    left, early = exits.has_left(prompt), exits.early.get(prompt)
    return replace(
        answer,
        exit_layer=early.layer if early is not None and left else None,
        early=None if left else early,
        skipped=part.skipped,
        readings=tuple(exits.readings[prompt]),
    )


def _preparation(request: LoadRequest, model: PreTrainedModel) -> Preparation:
    """Through what layers are called. Raises UsageError where they cannot be compiled on this machine."""
    if not request.placement.compile:
        return fused
    if _keeps_ends(model):
        log.warning(
            f"--compile: layers of a {request.opened.files.family} model keep states or a cache of "
            "their own, and are called as they are"
        )
        return fused
    check_compiler(request.opened.device)
    return compiled


def _keeps_ends(model: PreTrainedModel) -> bool:
    """Whether something is kept of a node that only what follows all of its tokens can read."""
    return not has_forest_attention(model) or any(recurrent_modules(layer) for layer in decoder_layers(model).layers)


def _keys_share(config: Any) -> float:
    """What computing only K,V costs of a layer; about what it is usually, for an architecture without a cost model."""
    try:
        return keys_share(config)
    except NoCostModel:
        return USUAL_KEYS_SHARE

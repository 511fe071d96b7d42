"""The layer walk as an engine, and how it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel

from prefillcli.decode.continuations import DecodingReport
from prefillcli.decode.row_groups import RowRoom
from prefillcli.decode.speculation.draft_model import DraftModel
from prefillcli.decode.speculation.job_drafters import JobDrafters
from prefillcli.engines.base import (
    PLAIN,
    Answer,
    EngineChoice,
    LabelTokens,
    Loaded,
    LoadRequest,
    PackByPack,
    ReducedPacks,
    Treatment,
    WeightsReport,
)
from prefillcli.engines.exit_reading import PromptExits
from prefillcli.engines.memory_plan import REDUCED, budget_of, hidden_on_host, keep_plan, plan_packs
from prefillcli.engines.pack_texts import PackTexts
from prefillcli.engines.readout import activation_of, label_numbers
from prefillcli.engines.recovery import MemoryRecovery
from prefillcli.engines.thinned_prompts import PackThinning
from prefillcli.errors import UsageError
from prefillcli.models import open as models
from prefillcli.models.adapter_merging import ExchangedAdapters, merge_adapters
from prefillcli.models.adapters import open_adapters
from prefillcli.models.flops import keys_share
from prefillcli.models.heads import Activation
from prefillcli.models.load import load_model, load_streamed
from prefillcli.models.open import Opened
from prefillcli.models.quantised import plan_quantisation
from prefillcli.models.rehearsal import check_uses
from prefillcli.models.shape import NoCostModel
from prefillcli.models.stream_speed import measure_speed
from prefillcli.models.streamed_layers import StreamedLayers
from prefillcli.models.weights import WeightsPlan, plan_weights
from prefillcli.plan.account import Account, account
from prefillcli.plan.exit_work import LayersDone
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.plan.state_steps import STATE_STEP
from prefillcli.prefill.attention_paths import ruled_out
from prefillcli.prefill.compilation import check_compiler, compiled
from prefillcli.prefill.fusion import Preparation, fused
from prefillcli.prefill.layer_place import decoder_layers
from prefillcli.prefill.own_cache import NO_DECODING, has_forest_attention
from prefillcli.prefill.recurrent import recurrent_modules
from prefillcli.prefill.walk import LayerWalk
from prefillcli.runtime import log
from prefillcli.runtime.memory import available_memory, device_capacity

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

"""Going on when a device's memory runs out: with smaller chunks and packs, at last without a prompt."""

from __future__ import annotations

import gc
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
from prefillcli.decode.draft_model import DraftModel
from prefillcli.decode.drafters import JobDrafters
from prefillcli.decode.kept_pack import KeptPack
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
from prefillcli.errors import ResourceError, UsageError, brief, out_of_memory
from prefillcli.models import open as models
from prefillcli.models.adapters import ExchangedAdapters, merge_adapters, open_adapters
from prefillcli.models.heads import Activation
from prefillcli.models.law import MIN_CHUNK_TOKENS
from prefillcli.models.load import load_model, load_streamed
from prefillcli.models.open import Opened
from prefillcli.models.rehearsal import check_uses
from prefillcli.models.shape import NoCostModel, keys_share
from prefillcli.models.streamed_layers import StreamedLayers, measure_speed
from prefillcli.models.weights import WeightsPlan, plan_quantisation, plan_weights
from prefillcli.plan.account import Account, LayersDone, account
from prefillcli.plan.pack import (
    NO_INDEX,
    Key,
    Limits,
    Pack,
    alone,
    isolated_reads,
    refills_of,
    split_pack,
    with_own_prefix,
    without_idle,
)
from prefillcli.prefill.attention import ruled_out
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.fusion import check_compiler, compiled
from prefillcli.prefill.layer_calls import decoder_layers
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.own_cache import NO_DECODING, has_forest_attention
from prefillcli.prefill.recurrent import recurrent_modules
from prefillcli.prefill.walk import FASTEST, Arithmetic, LayerWalk, Tick
from prefillcli.prefill.walk_state import REGROUP_LAYERS, Thinned, ThinningRule
from prefillcli.runtime import log
from prefillcli.runtime.memory import available_memory, device_capacity, trim_heap

AnswerPack = Callable[[Pack, Callable[[float], None]], list[Answer]]
Unanswered = Callable[[int, str], Answer]
"""The answer of a prompt that cannot be answered, for this reason."""
KeepLess = Callable[[Pack], bool]
"""Keeps less than at the last try of a pack; says whether anything was kept of it."""


class MemoryRecovery:
    """Answers packs through a walk. One that does not fit is tried again, smaller, and so is all that follows.

    A prompt that does not even fit by itself, in the smallest chunks, is left without an answer. Packs after one that
    was taken apart for that are as large as those before. `before` is what an earlier attempt at the job had to do
    with. K,V that a walk has let go of before it failed are computed again, from the packs that they came from.
    """

    def __init__(self, walk: LayerWalk, before: Mapping[str, Any] | None = None) -> None:
        self._walk = walk
        self._sources: dict[Key, Pack] = {}  # what computes each node that may be held
        self._unheld: set[Key] = set()  # nodes that do not fit
        self._pack_tokens: int | None = None
        self._failures = 0
        self._halve_chunk = True  # next
        if before:
            self._pack_tokens, self._failures = before["pack_tokens"], before["failures"]
            walk.chunk_tokens = min(walk.chunk_tokens, before["chunk_tokens"])

    @property
    def pack_tokens(self) -> int | None:
        """Packs of more tokens are split; None before any was too large."""
        return self._pack_tokens

    def reduced(self) -> ReducedPacks | None:
        """What it does with since memory has run out; None if it has not."""
        if not self._failures:
            return None
        return ReducedPacks(self._failures, self._walk.chunk_tokens, self._pack_tokens)

    def answer(
        self,
        pack: Pack,
        tick: Callable[[float], None],
        answer: AnswerPack,
        unanswered: Unanswered,
        keep_less: KeepLess = lambda pack: False,
    ) -> list[Answer]:
        """The answers of a pack by `answer`, and `unanswered` for prompts that do not fit. What is kept for texts
        becomes less before chunks and packs do. Raises ResourceError where not even a short prompt fits."""
        self._remember(pack)
        stays = pack.keep | {node.key for node in pack.held}
        sizes = self._walk.chunk_tokens, self._pack_tokens
        todo = self._smaller(self._fitting([pack]))
        ticks = _Ticks(len(pack.tokens), tick)
        ticks.begin(todo)
        answers: list[Answer] = []
        uncounted = 0  # tokens of packs without answers
        apart = False
        while todo:
            try:
                found = answer(todo[0], ticks)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                reason = brief(error)  # the frames that it holds are gone below
            else:
                done = todo.pop(0)
                if not done.reads and done.block != pack.block:
                    uncounted += len(done.tokens)
                elif found:
                    found[0] = replace(found[0], computed_tokens=found[0].computed_tokens + uncounted)
                    uncounted = 0
                answers += found
                continue
            self._let_go(reason)
            if not self._reduce(todo[0], keep_less):
                apart = True
                first = todo.pop(0)
                if len(first.reads) > 1:
                    todo = [*isolated_reads(first), *todo]
                else:
                    self._require_room(first, answer, stays, reason)
                    answers += self._give_up(first, reason, unanswered)
                    todo = self._fitting(todo)
            todo = [replace(without_idle(each), keep=each.keep | stays) for each in self._smaller(todo)]
            todo = [*self._lost(todo, stays, reason), *todo]
            ticks.begin(todo)
        ticks.end()
        if apart:  # smaller chunks were of no help
            self._walk.chunk_tokens, self._pack_tokens = sizes
        return answers

    def _smaller(self, packs: Sequence[Pack]) -> list[Pack]:
        most = self._pack_tokens
        return list(packs) if most is None else [part for pack in packs for part in split_pack(pack, most)]

    def _let_go(self, reason: str) -> None:
        """Give back what nobody uses; say once that memory has run out."""
        gc.collect()
        device = self._walk.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "cpu":
            trim_heap()
        if not self._failures:
            log.warning(
                f"memory ran out on {device}; going on with smaller chunks, and smaller packs where "
                f"that is not enough\nrun.json has their sizes; a lower --memory avoids the work that was lost"
            )
        self._failures += 1

    def _reduce(self, pack: Pack, keep_less: KeepLess) -> bool:
        """Halve what may help; whether there was anything."""
        chunk = self._walk.chunk_tokens
        half = max(len(pack.tokens) // 2, 1)
        splits = len(split_pack(pack, half)) > 1
        if keep_less(pack):
            pass
        elif chunk > MIN_CHUNK_TOKENS and (self._halve_chunk or not splits):
            self._walk.chunk_tokens = max(chunk // 2, MIN_CHUNK_TOKENS)
            self._halve_chunk = False
        elif splits:
            self._pack_tokens = half
            self._halve_chunk = True
        else:
            return False
        return True

    def _require_room(self, pack: Pack, answer: AnswerPack, stays: frozenset[Key], reason: str) -> None:
        """Raise ResourceError where not even a short prompt fits: it is not that this one is too large."""
        device, chunk = self._walk.device, self._walk.chunk_tokens
        if not pack.reads:  # prompts can be read without it
            return
        try:
            if pack.held_tokens + len(pack.tokens) <= MIN_CHUNK_TOKENS:
                raise MemoryError(reason)
            answer(_beginning(pack, stays), lambda tokens: None)
        except Exception as error:
            if not out_of_memory(error):
                raise
        else:
            return
        raise ResourceError(
            f"{device}: memory ran out on a pack of {len(pack.tokens):,} tokens that cannot be made smaller, with "
            f"chunks of {chunk:,} tokens: {reason}\n"
            "end other programs on the device, or give a lower --memory"
        )

    def _give_up(self, pack: Pack, reason: str, unanswered: Unanswered) -> list[Answer]:
        """What is said of the prompts of a pack that does not fit. If it has none, nothing holds its node any more."""
        if not pack.reads:
            self._unheld.add(_key(pack))
        why = f"memory ran out on this prompt alone, with {len(pack.tokens):,} tokens to compute: {reason}"
        return [unanswered(prompt, why) for prompt in pack.prompts]

    def _fitting(self, packs: Sequence[Pack]) -> list[Pack]:
        """The packs, without nodes that cannot be held: prompts behind them are read by themselves, from the root."""
        fitting: list[Pack] = []
        for pack in packs:
            if self._unheld.isdisjoint(node.key for node in pack.held):
                fitting.append(pack)
            elif pack.reads:
                if missing := {node.key for node in pack.held} - self._sources.keys():
                    raise ResourceError(f"{self._walk.device}: memory ran out, and {len(missing)} prefixes are gone")
                parts = isolated_reads(pack)
                fitting += self._fitting([part for part in parts if not part.reads])
                fitting += [with_own_prefix(part, self._unheld, self._sources) for part in parts if part.reads]
            else:
                self._unheld.add(_key(pack))  # it comes behind one that does not fit
        return fitting

    def _remember(self, pack: Pack) -> None:
        """How to compute what later packs hold of this one; what they do not hold is forgotten."""
        stays = pack.keep | {node.key for node in pack.held}
        self._sources = {key: source for key, source in self._sources.items() if key in stays}
        self._unheld &= stays
        if pack.block is not None:
            self._sources[pack.block] = pack
        else:
            self._sources |= {key: alone(key, {pack.index: pack}) for key in pack.kept_nodes.values()}

    def _lost(self, todo: Sequence[Pack], stays: frozenset[Key], reason: str) -> list[Pack]:
        """The packs that compute what `todo` holds and is not there any more, nor made by one of them."""
        there = {each.block for each in todo}

        def source(key: Key) -> Pack | None:
            if key in there or self._walk.holds(key):
                return None
            if key not in self._sources:
                raise ResourceError(f"{self._walk.device}: memory ran out: {reason}")
            return self._sources[key]

        lost = []
        for each in todo:
            for refill in refills_of(each, source):
                lost.append(replace(refill, keep=stays))
                there.add(refill.block)
        return lost


def _key(pack: Pack) -> Key:
    """What the node of a pack without reads is held by."""
    if pack.block is None:
        raise ValueError("a pack that neither answers nor is held")
    return pack.block


def _beginning(pack: Pack, stays: frozenset[Key]) -> Pack:
    """A prompt of the pack's first tokens, which nobody asks about."""
    tokens = pack.tokens[:MIN_CHUNK_TOKENS]
    return Pack(
        index=NO_INDEX,
        tokens=tokens,
        positions=np.arange(len(tokens), dtype=np.int32),
        offsets=[0, len(tokens)],
        starts=[0],
        parents=[-1],
        attach=[()],
        reads=[],
        keep=stays,
        adapter=pack.adapter,
    )


class _Ticks:
    """Ticks of several tries at a pack, which add up to its tokens."""

    def __init__(self, tokens: int, tick: Callable[[float], None]) -> None:
        self._left = float(tokens)
        self._tick = tick
        self._scale = 1.0

    def begin(self, todo: Sequence[Pack]) -> None:
        """These packs are what is left."""
        self._scale = max(self._left, 0.0) / max(sum(len(pack.tokens) for pack in todo), 1)

    def __call__(self, tokens: float) -> None:
        self._left -= tokens * self._scale
        self._tick(tokens * self._scale)

    def end(self) -> None:
        """Nothing is left: some prompts were not answered."""
        if self._left > 1e-6:
            self(self._left / self._scale if self._scale else 0.0)


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
    arithmetic = request.arithmetic or FASTEST
    quantisation = plan_quantisation(opened.files.origin, opened.files.quantised, opened.device)
    if arithmetic.no_packed_weights and quantisation is not None and quantisation.kept == "packed":
        raise UsageError(arithmetic.no_packed_weights.format(format=quantisation.format.name))
    on_host = hidden_on_host(request.placement, opened.device, streamed=weights.streamed)
    model, source = _load_weights(request, weights)
    adapters = merge_adapters(model, opened)
    drafts = "--draft self" if opened.drafts_itself else None
    own_cache = check_uses(model, drafts=drafts, compresses=opened.compresses).own_cache
    if own_cache:
        _check_own_cache(request, arithmetic)
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
        arithmetic=_arithmetic(request, arithmetic, model),
        reduced=plan.get(REDUCED),
        longest=opened.files.max_length,
    )
    return Loaded(engine, plan, budget, 0.0 if speed is None else speed.read_seconds)


def _check_own_cache(request: LoadRequest, arithmetic: Arithmetic) -> None:
    """Raise UsageError for what a model that is walked with its own cache cannot do; else say that it is."""
    family = request.opened.files.family
    if request.text_tokens:
        raise UsageError(f"--rationale: {NO_DECODING}")
    if arithmetic.no_own_cache:
        raise UsageError(arithmetic.no_own_cache)
    if request.share == 1.0:  # not by each of several workers
        log.info(f"a {family} model is walked with its own cache, prompt by prompt")


def _load_weights(request: LoadRequest, plan: WeightsPlan) -> tuple[PreTrainedModel, StreamedLayers | None]:
    """The model, and where its layers come from if they are streamed."""
    files, device, trust = request.opened.files, request.opened.device, request.choice.trust_remote_code
    if plan.streamed:
        return load_streamed(files, device, memory=plan.memory, share=request.share, trust_remote_code=trust)
    return load_model(files, device, trust_remote_code=trust), None


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
        arithmetic: Arithmetic = FASTEST,
        reduced: Mapping[str, Any] | None = None,
        longest: int = 1 << 30,
    ) -> None:
        whole = limits.whole_nodes or _keeps_ends(model)
        self.limits = replace(limits, whole_nodes=whole, state_step=arithmetic.state_step if whole else 0)
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
            arithmetic=arithmetic,
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
            with self._walk.arithmetic.mode:
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


def _arithmetic(request: LoadRequest, asked: Arithmetic, model: PreTrainedModel) -> Arithmetic:
    """How the walk computes. Raises UsageError where layers cannot be compiled on this machine."""
    if not request.placement.compile:
        return asked
    if _keeps_ends(model):
        log.warning(
            f"--compile: layers of a {request.opened.files.family} model keep states or a cache of "
            "their own, and are called as they are"
        )
        return asked
    check_compiler(request.opened.device)
    return replace(asked, prepare=compiled)


def _keeps_ends(model: PreTrainedModel) -> bool:
    """Whether something is kept of a node that only what follows all of its tokens can read."""
    return not has_forest_attention(model) or any(recurrent_modules(layer) for layer in decoder_layers(model).layers)


def _keys_share(config: Any) -> float:
    """What computing only K,V costs of a layer; about what it is usually, for an architecture without a cost model."""
    try:
        return keys_share(config)
    except NoCostModel:
        return USUAL_KEYS_SHARE

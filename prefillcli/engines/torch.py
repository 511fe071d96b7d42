"""The layer walk as an engine: packs in, label log-probabilities out."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefillcli.engines.base import (
    PLAIN,
    Answer,
    EarlyAnswer,
    EarlyExits,
    Engine,
    LeavingRule,
    Readings,
    ReducedPacks,
    ThinnedPrompt,
    Treatment,
    WeightsReport,
)
from prefillcli.engines.images import PackImages
from prefillcli.engines.recovery import MemoryRecovery
from prefillcli.models.heads import (
    Activation,
    label_logits,
    label_numbers,
    likeliest_tokens,
    next_tokens,
    output_numbers,
    pointer_numbers,
)
from prefillcli.models.open import UseVariant
from prefillcli.models.shape import NoCostModel, keys_share
from prefillcli.plan.behind import LabelSet, Places, with_labels
from prefillcli.plan.pack import Account, Key, LayersDone, Limits, Pack, account
from prefillcli.plan.plan import LONG
from prefillcli.rows.records import NextTokens, ReadTokens
from prefillcli.walk.continuations import Beginning, DecodingReport
from prefillcli.walk.decoding import KeptPack, RowRoom, write_behind
from prefillcli.walk.draft_model import DraftModel
from prefillcli.walk.drafters import drafter_of
from prefillcli.walk.forest import WatchedLayer
from prefillcli.walk.layout import Tree
from prefillcli.walk.walk import REGROUP_LAYERS, LayerWalk, Thinned, ThinningRule, Tick

USUAL_KEYS_SHARE = 0.115  # of Llama-3.1-8B


class TorchEngine(Engine):
    """Walks packs through a transformers model on one device."""

    whole_packs = True
    waits = False

    def __init__(
        self,
        walk: LayerWalk,
        *,
        limits: Limits,
        activation: Activation = "softmax",
        use_variant: UseVariant | None = None,
        weights: WeightsReport | None = None,
        reduced: Mapping[str, Any] | None = None,
        longest: int = 1 << 30,
        images: PackImages | None = None,
    ) -> None:
        whole = limits.whole_nodes or walk.keeps_ends
        self.limits = replace(
            limits,
            whole_nodes=whole,
            state_step=walk.arithmetic.state_step if whole else 0,
            whole_images=images is not None and images.whole,
        )
        self.walk = walk
        self._activation, self._use_variant, self._weights = activation, use_variant, weights
        self._waited_before = walk.layers.seconds_waited  # to measure its speed
        self._recovery = MemoryRecovery(walk, reduced)
        self._limit_packs()
        self._keys_share = _keys_share(walk.model.config.get_text_config())
        self._texts = JobTexts(limits, longest)
        self._images = images
        if images is not None:
            walk.features = images.of_pack
        self._block_seconds = 0.0  # of packs without answers since the last one with some

    def answer(
        self,
        pack: Pack,
        labels: Callable[[int], LabelSet],
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

    def expect(self, packs: Sequence[Pack]) -> None:
        if self._images is not None:
            self._images.expect(packs)

    def _answer(
        self, pack: Pack, labels: Callable[[int], LabelSet], tick: Callable[[float], None], treatment: Treatment
    ) -> list[Answer]:
        begun = time.monotonic()
        if self._use_variant is not None:
            self._use_variant(pack.variant)
        shorter = self._shorter(pack, labels, tick, treatment)
        asked, (pack, places) = len(pack.tokens), with_labels(pack, labels)
        self.walk.layers.expect(len(pack.tokens), len(pack.reads))
        done, exits = LayersDone.none(pack), self._exits(pack, labels, treatment)
        thinning = None if treatment.thinning is None else PackThinning(treatment.thinning)
        kept = self._texts.keep(self.walk, pack, treatment, self.limits)
        kind = PointerReading if self._activation == "pointer" else PackReading
        reading = kind(pack, places, labels, self._activation, treatment.next_tokens)

        def of_asked(tokens: float) -> None:
            tick(tokens * asked / len(pack.tokens))  # the tokens after prompts are progress on these

        for logits in self.walk.read_logits(pack, of_asked, exits, done, thinning, kept):
            with self.walk.arithmetic.mode:
                reading.take(logits, range(len(pack.reads)) if exits is None else exits.going)
        reading.end(shorter)
        seconds = time.monotonic() - begun + self._block_seconds
        self._block_seconds = 0.0 if pack.reads else seconds
        slower = self._without_exits(exits, begun) / seconds if exits is not None else 1.0
        parts = account(pack, done, lambda prompt: labels(prompt).tokens)
        answers = [_answer(part, reading, seconds * part.share, slower, exits, shorter) for part in parts]
        if kept is not None:
            answers = self._texts.write(self.walk, kept, pack, treatment, answers, seconds, tick)
        if thinning is not None:
            answers = [replace(each, thinned=thinning.found.get(each.prompt)) for each in answers]
        return answers

    def _exits(self, pack: Pack, labels: Callable[[int], LabelSet], treatment: Treatment) -> PromptExits | None:
        # What lets prompts of a pack leave: the treatment, and heads that answer after a layer.
        found = {prompt: labels(prompt).head for _, prompts in pack.reads for prompt in prompts}
        heads = {prompt: head for prompt, head in found.items() if head is not None}
        if not pack.reads or (treatment.exits is None and not heads):
            return None
        given = treatment.exits or EarlyExits()
        return PromptExits(self.walk, pack, labels, replace(given, rules={**given.rules, **heads}) if heads else given)

    def _shorter(
        self, pack: Pack, labels: Callable[[int], LabelSet], tick: Callable[[float], None], treatment: Treatment
    ) -> dict[int, ShorterReading]:
        # The readings of prompts that are longer than `Limits.switch` only with their longer labels.
        found = {}
        stays = pack.keep | {node.key for node in pack.held}
        for prompt, alone in pack.shorter.items():
            own = labels(prompt).within(self.limits.switch - 1 - int(alone.positions[-1]))
            plain = replace(treatment.of([prompt]), exits=None, continuations=None)
            part = replace(alone, keep=stays)
            (answer,) = self._answer(part, partial(_given, own), lambda tokens: tick(0.0), plain)
            found[prompt] = ShorterReading(own.depth, answer)
        return found

    def _without_exits(self, exits: PromptExits, begun: float) -> float:
        # Seconds that a pack would have taken if no prompt had left, by the layers before the first exit.
        now = time.monotonic()
        if exits.first_asked is None:
            return now - begun
        layer, asked = exits.first_asked
        share, layers = self._keys_share, len(self.walk.layers)
        return (asked - begun) / (layer + (share if exits.peeks(layer) else 1.0)) * (layers - 1 + share)

    def holds(self, key: Key) -> bool:
        return self.walk.holds(key)

    def reduced(self) -> ReducedPacks | None:
        return self._recovery.reduced()

    def decoded(self) -> DecodingReport | None:
        return self._texts.report if self._texts.report.texts else None

    def guess_with(self, draft: DraftModel) -> None:
        self._texts.draft = draft

    def _keep_less(self, treatment: Treatment, pack: Pack) -> bool:
        # If this pack was kept, it no longer is. Later packs are kept if they are half as large.
        if treatment.continuations is None or not pack.reads or not self.limits.can_keep(pack):
            return False
        size = self.limits.kept_size(pack.held_tokens + len(pack.tokens), len(pack.reads))
        self.limits = replace(self.limits, kept_tokens=int(size) // 2)
        return True

    def _limit_packs(self) -> None:
        # Later windows are planned with packs as small as those that fit.
        most = self._recovery.pack_tokens
        if most is not None and most < self.limits.tokens:
            self.limits = replace(self.limits, tokens=most)

    def weights_report(self) -> WeightsReport | None:
        if self._weights is None:
            return None
        layers = self.walk.layers
        waited = layers.seconds_waited - self._waited_before
        return replace(self._weights, bytes_read=layers.bytes_read, seconds_waited=waited)

    def close(self) -> None:
        if self._images is not None:
            self._images.close()
        self.walk.close()
        self.walk.layers.close()


class ShorterReading(NamedTuple):
    """The answer to those labels of a prompt that have at most `depth` tokens before their last one, token by
    token."""

    depth: int
    answer: Answer


def _given(labels: LabelSet, prompt: int) -> LabelSet:
    return labels


def _answer(
    part: Account,
    reading: PackReading,
    seconds: float,
    slower: float,
    exits: PromptExits | None,
    shorter: Mapping[int, ShorterReading],
) -> Answer:
    # The answer of a prompt whose computation took `seconds`, and would have taken `slower` times as long without
    # exits.
    prompt = part.prompt
    twice = shorter[prompt].answer.computed_tokens if prompt in shorter else 0
    early = None if exits is None else exits.early.get(prompt)
    left = early if exits is not None and exits.has_left(prompt) else None
    return Answer(
        prompt=prompt,
        logprobs=reading.logprobs[prompt] if left is None else left.logprobs,
        shared_tokens=part.shared_tokens,
        computed_tokens=part.computed_tokens + twice,
        seconds=seconds,
        exit_layer=None if left is None else left.layer,
        early=early if left is None else None,
        skipped=0.0 if exits is None else part.skipped,
        full_seconds=seconds * slower,
        readings=() if exits is None else tuple(exits.readings[prompt]),
        by_token=reading.by_token.get(prompt),
        tokens=reading.tokens.get(prompt),
        next=reading.next.get(prompt),
    )


def _keys_share(config: Any) -> float:
    # The cost of computing only K,V, as a share of a layer; a usual share for an architecture without a cost model.
    try:
        return keys_share(config)
    except NoCostModel:
        return USUAL_KEYS_SHARE


class PackReading:
    """The numbers of a pack's labels, from pieces of its logits.

    `logprobs` has them by prompt once the pieces with its tokens are there, those of longer labels after `end`. `next`
    has this many `next_tokens` of each prompt.
    """

    def __init__(
        self,
        pack: Pack,
        places: Mapping[int, Places],
        labels: Callable[[int], LabelSet],
        activation: Activation,
        next_tokens: int = 0,
    ) -> None:
        self.logprobs: dict[int, npt.NDArray[np.float64]] = {}
        self.by_token: dict[int, ReadTokens] = {}
        self.tokens: dict[int, npt.NDArray[np.int64]] = {}  # the likeliest ones
        self.next: dict[int, NextTokens] = {}
        self._next_tokens = next_tokens
        self._pack, self._places, self._labels, self._activation = pack, places, labels, activation
        self._at = 0  # rows of logits so far
        self._starts: npt.NDArray[np.int64] = np.empty(0, np.int64)  # the first row of each read that goes on
        self._reads: Sequence[int] = ()
        # Of all tokens of longer labels, by their rows: the row, the token, its place among those of all prompts.
        self._rows = self._tokens = self._order = np.empty(0, np.int64)
        self._values: npt.NDArray[np.float64] = np.empty(0)
        self._best: npt.NDArray[np.bool_] = np.empty(0, bool)
        self._prompts: list[int] = []

    def take(self, logits: Tensor, going: Sequence[int]) -> None:
        """The next rows of float32 logits [rows, vocabulary]. `going` are the reads that have not left."""
        if not self._at:
            self._lay_out(going)
        first, self._at = self._at, self._at + len(logits)
        low, high = np.searchsorted(self._starts, (first, self._at)).tolist()
        ends = [
            (int(self._starts[at]) - first, prompt)
            for at in range(low, high)
            for prompt in self._pack.reads[self._reads[at]][1]
        ]
        if ends and self._next_tokens:
            begun = [self._labels(prompt).first for _, prompt in ends]
            told = next_tokens(logits, [row for row, _ in ends], begun, self._next_tokens)
            self.next |= dict(zip((prompt for _, prompt in ends), told, strict=True))
        prompts = [
            (row, prompt, single) for row, prompt in ends if (single := self._labels(prompt).single) is not None
        ]
        if count := next((self._labels(prompt).likeliest for _, prompt, _ in prompts), 0):  # all ask for as many
            found = likeliest_tokens(logits, [row for row, _, _ in prompts], count)
            for (_, prompt, _), tokens, numbers in zip(prompts, *found, strict=True):
                self.tokens[prompt], self.logprobs[prompt] = tokens, numbers
        elif prompts:
            rows, numbers, sets = (list(each) for each in zip(*prompts, strict=True))
            for prompt, own in zip(numbers, label_numbers(logits, rows, sets, self._activation), strict=True):
                self.logprobs[prompt] = self._labels(prompt).divided(own)
        low, high = np.searchsorted(self._rows, (first, self._at)).tolist()
        if low < high:
            at = torch.as_tensor(self._rows[low:high] - first, device=logits.device)
            tokens = torch.as_tensor(self._tokens[low:high], device=logits.device)
            top, likeliest = logits.max(dim=-1)
            # The log-sum-exp less its largest term, which float32 holds more exactly than the whole.
            rest = torch.exp(logits - top[:, None]).sum(dim=-1).cpu().double().log()
            values = logits[at, tokens].cpu().double() - top[at].cpu().double()
            order = self._order[low:high]
            self._values[order] = (values - rest[at.cpu()]).numpy()
            self._best[order] = (likeliest[at] == tokens).cpu().numpy()

    def end(self, shorter: Mapping[int, ShorterReading]) -> None:
        """All pieces are taken. The numbers of `shorter` labels take the place of those that were read here."""
        at = 0
        for prompt in self._prompts:
            labels, count = self._labels(prompt), len(self._places[prompt].rows)
            values, best = self._values[at : at + count], self._best[at : at + count]
            at += count
            if prompt in shorter and (tokens := shorter[prompt].answer.by_token) is not None:
                lengths = [len(each) for each in labels.sequences]
                of_these = np.repeat([length <= shorter[prompt].depth + 1 for length in lengths], lengths)
                values[of_these], best[of_these] = tokens.logprobs, tokens.greedy
            self.logprobs[prompt] = labels.divided(labels.logprobs(values))
            if labels.by_token:
                self.by_token[prompt] = ReadTokens(values, bool(best.all()))

    def _lay_out(self, going: Sequence[int]) -> None:
        pack, offsets = self._pack, self._pack.offsets
        lengths = [1 + sum(offsets[node + 1] - offsets[node] for node in pack.behind_read(read)) for read in going]
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)[:-1]
        self._reads = going
        found = [
            (prompt, start + self._places[prompt].rows, self._places[prompt].tokens)
            for read, start in zip(going, self._starts, strict=True)
            for prompt in pack.reads[read][1]
            if prompt in self._places
        ]
        if found:
            self._prompts = [prompt for prompt, _, _ in found]
            rows = np.concatenate([rows for _, rows, _ in found])
            self._order = np.argsort(rows, kind="stable")
            self._rows = rows[self._order]
            self._tokens = np.concatenate([tokens for _, _, tokens in found])[self._order].astype(np.int64)
            self._values, self._best = np.empty(len(rows)), np.empty(len(rows), bool)


class PointerReading(PackReading):
    """The numbers of labels that are places in prompts, from pieces of the outputs of a pointer head."""

    def take(self, logits: Tensor, going: Sequence[int]) -> None:
        if not self._at:
            self._lay_out(going)
            self._values = np.empty((len(self._rows), logits.shape[-1]))
        first, self._at = self._at, self._at + len(logits)
        low, high = np.searchsorted(self._rows, (first, self._at)).tolist()
        at = torch.as_tensor(self._rows[low:high] - first, device=logits.device)
        self._values[self._order[low:high]] = logits[at].cpu().numpy()

    def end(self, shorter: Mapping[int, ShorterReading]) -> None:
        ends = np.cumsum([len(self._places[prompt].rows) for prompt in self._prompts])[:-1]
        for prompt, outputs in zip(self._prompts, np.split(self._values, ends), strict=True):
            self.logprobs[prompt] = self._labels(prompt).divided(pointer_numbers(outputs))


# The treatment of a pack's prompts: some leave early, some lose tokens, after some a text is written.


class PromptExits:
    """The `ExitRule` of a pack's prompts. `exits` chooses their readings, and the prompts that leave."""

    def __init__(
        self,
        walk: LayerWalk,
        pack: Pack,
        labels: Callable[[int], LabelSet],
        exits: EarlyExits,
    ) -> None:
        rules = dict.fromkeys(exits.rules.values())
        self.layers = tuple(sorted({layer for rule in rules for layer in rule.layers})) if rules else exits.observed
        self.regroup_cost = REGROUP_LAYERS
        self.going: Sequence[int] = range(len(pack.reads))  # numbers of the reads that go on
        self.early: dict[int, EarlyAnswer] = {}  # of decided prompts, also of those that go on, by prompt
        # The readings of the observed layers for each prompt.
        self.readings: dict[int, list[Readings]] = {prompt: [] for prompt in pack.prompts}
        self.first_asked: tuple[int, float] | None = None  # the first layer that was read, and when
        self._walk = walk
        self._pack = pack
        self._labels = labels
        self._exits = exits

    def peeks(self, layer: int) -> bool:
        """Return whether only the prompts' last tokens go through the layer before the decision."""
        asked = [rule for rule in dict.fromkeys(self._exits.rules.values()) if layer in rule.layers]
        return bool(asked) and all(rule.peeks(layer) for rule in asked)

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        rules = self._exits.rules
        # Prompts that are decided alike, with as many labels, by their rule.
        asked: dict[tuple[LeavingRule | None, int], list[tuple[int, int]]] = {}
        for row, read in enumerate(reads):
            for prompt in self._pack.reads[read][1]:
                rule = rules.get(prompt)
                if prompt not in self.early and (not rules or (rule is not None and layer in rule.layers)):
                    asked.setdefault((rule, len(self._labels(prompt).spellings)), []).append((row, prompt))
        if not asked:
            return reads  # those that are decided go on for the audit, or with others
        self.first_asked = self.first_asked or (layer, time.monotonic())
        for (rule, _), prompts in asked.items():
            own = [prompt for _, prompt in prompts]
            logits = rule is None or rule.reads_logits
            readings = self._read([row for row, _ in prompts], own, before, after, logits=logits)
            if rule is None:
                for number, (_, prompt) in enumerate(prompts):
                    self.readings[prompt].append(readings.row(number))
                continue
            decided, logprobs = rule.decide(layer, readings)
            if self._exits.shown:
                for number, (_, prompt) in enumerate(prompts):
                    self.readings[prompt].append(readings.row(number))
            for (_, prompt), leaves, own in zip(prompts, decided.tolist(), logprobs, strict=True):
                if leaves:
                    self.early[prompt] = EarlyAnswer(layer, own)
        if rules:
            self.going = [read for read in reads if not all(map(self.has_left, self._pack.reads[read][1]))]
            return self.going
        return reads

    def has_left(self, prompt: int) -> bool:
        """Return whether a prompt has left, and goes no further."""
        return prompt in self.early and prompt not in self._exits.in_full

    def _read(self, rows: list[int], prompts: list[int], before: Tensor, after: Tensor, *, logits: bool) -> Readings:
        # The readings of some prompts, whose last tokens are these rows of both tensors.
        hidden = after[torch.as_tensor(rows, device=after.device)].float().cpu().numpy()
        sets = [self._labels(prompt) for prompt in prompts]
        found = np.full((2, len(prompts), len(sets[0].spellings)), np.nan)
        own = [each.first for each in sets] if logits else []
        for tokens in dict.fromkeys(own):
            at = [number for number, each in enumerate(own) if each == tokens]
            picked = torch.as_tensor([rows[number] for number in at], device=after.device)
            for side, states in enumerate((after, before)):
                read = label_logits(self._walk.label_logits(states[picked], output_numbers(tokens)), tokens)
                found[side, at] = [sets[number].ruled(each) for number, each in zip(at, read, strict=True)]
        return Readings(hidden, found[0], found[1])


class JobTexts:
    """Writes texts after the prompts of packs whose K,V survive their scoring.

    The `draft` model guesses tokens, where there is one. No text is longer than `longest` tokens with its prompt.
    """

    def __init__(self, limits: Limits, longest: int) -> None:
        self.report = DecodingReport()
        self.draft: DraftModel | None = None
        self._switch = limits.switch
        self._room = RowRoom(limits.written_tokens or None, limits.row_tokens, longest=longest, switch=limits.switch)

    def keep(self, walk: LayerWalk, pack: Pack, treatment: Treatment, limits: Limits) -> KeptPack | None:
        """The keeper of a pack's K,V; None where nothing is written after it, or they do not fit."""
        if treatment.continuations is None or not pack.reads or not limits.can_keep(pack):
            return None
        return KeptPack(pack, on_host=walk.device.type == "cuda")

    def write(
        self,
        walk: LayerWalk,
        kept: KeptPack,
        pack: Pack,
        treatment: Treatment,
        answers: Sequence[Answer],
        seconds: float,
        tick: Tick,
    ) -> list[Answer]:
        """The answers of a pack that took `seconds`, those of wanted prompts with their texts."""
        continuations, report = treatment.continuations, self.report
        if continuations is None:
            return list(answers)
        reads = {prompt: read for read, (_, prompts) in enumerate(pack.reads) for prompt in prompts}
        wanted = {
            prompt: beginning
            for prompt, beginning in continuations.wanted(answers).items()
            if self._read_for(pack, reads[prompt], beginning)
        }
        if continuations.again:
            report.again_prompts += len(wanted)
            report.prompt_tokens += len(pack.tokens)
            report.prompt_seconds += seconds
        else:
            report.kept_prompts += len(wanted)
        texts = write_behind(
            walk,
            kept,
            [(reads[prompt], beginning) for prompt, beginning in wanted.items()],
            continuations.writing,
            room=self._room,
            make_drafter=partial(drafter_of, writing=continuations.writing, report=report, draft_model=self.draft),
            tick=tick,
            report=report,
        )
        found = dict(zip(wanted, texts, strict=True))
        return [replace(each, continuation=found.get(each.prompt)) for each in answers]

    def _read_for(self, pack: Pack, read: int, beginning: Beginning) -> bool:
        # Whether the positions of a prompt are those that it has before its text. A prompt can be longer than
        # `Limits.switch` with its labels and not with its text, or the other way round; then it is read again.
        long = int(pack.positions[pack.offsets[pack.reads[read][0] + 1] - 1]) >= LONG
        return not self._switch or long == (beginning.end > self._switch)


class PackThinning:
    """A thinning rule at work on one pack. `found` has the part of each prompt that goes on, once the rule was
    asked."""

    def __init__(self, rule: ThinningRule) -> None:
        self.found: dict[int, ThinnedPrompt] = {}
        self._rule = rule

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

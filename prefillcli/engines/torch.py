"""The layer walk as an engine: packs in, label log-probabilities out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from prefillcli.engines.base import PLAIN, Answer, Engine, LabelTokens, ReducedPacks, Treatment, WeightsReport
from prefillcli.engines.readout import label_numbers
from prefillcli.engines.recovery import MemoryRecovery
from prefillcli.engines.treatment import JobTexts, PackThinning, PromptExits
from prefillcli.models.heads import Activation
from prefillcli.models.shape import NoCostModel, keys_share
from prefillcli.plan.pack import Account, Key, LayersDone, Limits, Pack, account
from prefillcli.prefill.walk import LayerWalk

if TYPE_CHECKING:
    from prefillcli.decode.continuations import DecodingReport
    from prefillcli.decode.draft_model import DraftModel
    from prefillcli.models.open import UseVariant

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
    ) -> None:
        whole = limits.whole_nodes or walk.keeps_ends
        self.limits = replace(limits, whole_nodes=whole, state_step=walk.arithmetic.state_step if whole else 0)
        self.walk = walk
        self._activation, self._use_variant, self._weights = activation, use_variant, weights
        self._waited_before = walk.layers.seconds_waited  # to measure its speed
        self._recovery = MemoryRecovery(walk, reduced)
        self._limit_packs()
        self._keys_share = _keys_share(walk.model.config.get_text_config())
        self._texts = JobTexts(limits, longest)
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
        if self._use_variant is not None:
            self._use_variant(pack.variant)
        self.walk.layers.expect(len(pack.tokens), len(pack.reads))
        exits, done = PromptExits.of(self.walk, pack, labels, treatment), LayersDone.none(pack)
        thinning = None if treatment.thinning is None else PackThinning(treatment.thinning)
        kept = self._texts.keep(self.walk, pack, treatment, self.limits)
        logprobs: dict[int, npt.NDArray[np.float64]] = {}
        at = 0
        for logits in self.walk.read_logits(pack, tick, exits, done, thinning, kept):
            going = range(len(pack.reads)) if exits is None else exits.going
            reads = [pack.reads[read] for read in going[at : at + len(logits)]]
            at += len(logits)
            prompts = [(row, prompt) for row, (_, numbers) in enumerate(reads) for prompt in numbers]
            with self.walk.arithmetic.mode:
                found = label_numbers(
                    logits, [row for row, _ in prompts], [labels(prompt) for _, prompt in prompts], self._activation
                )
            logprobs.update(zip((prompt for _, prompt in prompts), found, strict=True))
        seconds = time.monotonic() - begun + self._block_seconds
        self._block_seconds = 0.0 if pack.reads else seconds
        slower = self._without_exits(exits, begun) / seconds if exits is not None else 1.0
        answers = [_answer(part, logprobs, seconds * part.share, slower, exits) for part in account(pack, done)]
        if kept is not None:
            answers = self._texts.write(self.walk, kept, pack, treatment, answers, seconds, tick)
        if thinning is not None:
            answers = [replace(each, thinned=thinning.found.get(each.prompt)) for each in answers]
        return answers

    def _without_exits(self, exits: PromptExits, begun: float) -> float:
        """Seconds that a pack would have taken if none had left, by the layers before the first exit."""
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
        self._texts.drafters.draft = draft

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
        if self._weights is None:
            return None
        layers = self.walk.layers
        waited = layers.seconds_waited - self._waited_before
        return replace(self._weights, bytes_read=layers.bytes_read, seconds_waited=waited)

    def close(self) -> None:
        self.walk.close()
        self.walk.layers.close()


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


def _keys_share(config: Any) -> float:
    """What computing only K,V costs of a layer; about what it is usually, for an architecture without a cost model."""
    try:
        return keys_share(config)
    except NoCostModel:
        return USUAL_KEYS_SHARE

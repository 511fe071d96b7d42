"""The methods of `prefill bench`: each answers the same prompts, and says afterwards what it has computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from prefillcli.bench.baselines import IntArray, bm25_sentences, first_and_last, random_chunks
from prefillcli.bench.texts import Spans
from prefillcli.compress.answers import answer, plan_requests
from prefillcli.compress.compressor import Compressor
from prefillcli.compress.load import worth_of
from prefillcli.compress.rates import keep_rates
from prefillcli.compress.request import SPECPREFILL, Request
from prefillcli.compress.selection import tails
from prefillcli.compress.settings import Compression
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import Prompt
from prefillcli.engines.hf import last_logits
from prefillcli.engines.torch import TorchEngine, label_logprobs
from prefillcli.jobs.load import Models, compression_of
from prefillcli.models.families import sliding_window
from prefillcli.models.open import Opened
from prefillcli.options.bench import BenchSettings
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION
from prefillcli.stats.flops import (
    NoCostModel,
    answer_flops,
    prefill_flops,
    ratio_speedup,
    table5,
    walk_flops,
)

FloatArray = npt.NDArray[np.float64]


@dataclass(slots=True)
class Outcome:
    """What a run gives: label log-probabilities [prompts, labels], how the target read, what the draft read."""

    logprobs: FloatArray
    requests: list[Request]
    drafted: list[TokenArray] = field(default_factory=list)
    draft_tokens: int = 0  # computed by the draft


@dataclass(frozen=True, slots=True)
class Cost:
    """What a run computed. `flops` are those of both models; None where `unknown` says why they cannot be counted."""

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
        last = max(self.compression.keep_last, sliding_window(self.config) or 0)
        self._ends = replace(self.compression, keep_last=last)
        self._worth = worth_of(self.compression, opened)
        self.labels = labels
        self._model = loaded.engine.model
        self._compressor = loaded.compressor
        self._draft_limits = Limits(**loaded.plan["draft"]["limits"]) if "draft" in loaded.plan else None
        self._chunk_tokens: int = loaded.plan["chunk_tokens"]
        self._offload = settings.prefix_kv == "offload"
        self._schedule = settings.schedule
        loaded.engine.close()  # each run sets the model up as it needs it

    @property
    def compressor(self) -> Compressor:
        """Raises ValueError where there is no draft."""
        if self._compressor is None:
            raise ValueError("no draft was loaded")
        return self._compressor

    def plain(self, prompts: Sequence[Prompt]) -> FloatArray:
        """Label log-probabilities [prompts, labels] by transformers' own forward, prompt by prompt."""
        self._model.set_attn_implementation("sdpa")
        logits = (last_logits(self._model, prompt.tokens) for prompt in prompts)
        sets = [self.labels.sets[prompt.labels] for prompt in prompts]
        return np.concatenate([label_logprobs(row[None], [0], [own]) for row, own in zip(logits, sets, strict=True)])

    def walk(self, groups: Sequence[Sequence[Request]]) -> FloatArray:
        """Label log-probabilities [requests, labels] by the layer walk; requests share within their group."""
        with self._walking() as engine:
            return np.concatenate(
                [answer(engine, requests, self.labels.sets, schedule=self._schedule) for requests in groups]
            )

    @contextmanager
    def _walking(self) -> Iterator[TorchEngine]:
        self._model.set_attn_implementation(ATTENTION)
        engine = TorchEngine(
            self._model, limits=self.limits, chunk_tokens=self._chunk_tokens, offload_held=self._offload
        )
        try:
            yield engine
        finally:
            engine.close()

    def rates(self, prompts: Sequence[Prompt], keep: float) -> list[float | None]:
        """The keep rate of each prompt, None where it is read in full, as SpecPrefill decides it."""
        return keep_rates(prompts, keep, self._ends, self._worth)

    def tails(self, prompts: Sequence[Prompt], rates: Sequence[float | None]) -> list[int]:
        """How many of each prompt's last tokens SpecPrefill always keeps."""
        return tails([prompt.tokens for prompt in prompts], rates, self._ends)

    def plan(self, requests: Sequence[Request]) -> Plan:
        return plan_requests(requests, self.limits, self._schedule)

    def draft_flops(self, prompts: Sequence[TokenArray]) -> float:
        """Of the draft over these prompts, as it plans them. The votes' own products are left out."""
        if not prompts or self._draft_limits is None:
            return 0.0
        plan = make_plan(prompts, self._draft_limits)
        found = walk_flops(self.draft_config, plan)
        if self.compression.decoded:
            found += answer_flops(self.draft_config, plan, ahead=self.compression.decoded)
        return found


class Contender(ABC):
    """A method under its name; `keep` is the share of the tokens that it is to keep, if it drops any."""

    def __init__(self, name: str, equipment: Equipment, keep: float | None = None) -> None:
        self.name = name if keep is None else f"{name}@{keep:g}"
        self.keep = keep
        self._equipment = equipment

    @abstractmethod
    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        """Answer the prompts. This is what is timed."""

    def cost(self, outcome: Outcome) -> Cost:
        """What a run computed, from the plans that it must have made."""
        equipment = self._equipment
        plans = [equipment.plan(requests) for requests in self._groups(outcome.requests)]
        tokens = sum(plan.computed_tokens for plan in plans)
        try:
            flops = sum(walk_flops(equipment.config, plan) + answer_flops(equipment.config, plan) for plan in plans)
            return Cost(tokens, flops + equipment.draft_flops(outcome.drafted))
        except NoCostModel as error:
            return Cost(tokens, None, str(error))

    def predictions(self, outcome: Outcome) -> tuple[float, float] | None:
        """Of the speedup: 1 / (r + keep) at the mean length, and table 5 over the prompts and what was kept of them.

        None for a method that keeps all tokens, and for an architecture without cost model.
        """
        return None

    def _groups(self, requests: list[Request]) -> list[list[Request]]:
        """Requests that are planned together."""
        return [requests]


class Plain(Contender):
    """transformers as it is: one forward a prompt, SDPA, no cache, logits of the last token."""

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        return Outcome(self._equipment.plain(prompts), [Request(prompt) for prompt in prompts])

    def cost(self, outcome: Outcome) -> Cost:
        lengths = [len(request.tokens) for request in outcome.requests]
        try:
            return Cost(sum(lengths), sum(prefill_flops(self._equipment.config, length).total for length in lengths))
        except NoCostModel as error:
            return Cost(sum(lengths), None, str(error))


class Alone(Contender):
    """The layer walk, each prompt by itself."""

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        requests = [Request(prompt) for prompt in prompts]
        return Outcome(self._equipment.walk(self._groups(requests)), requests)

    def _groups(self, requests: list[Request]) -> list[list[Request]]:
        return [[request] for request in requests]


class Hybrid(Contender):
    """The layer walk over the forest of all prompts: what `prefill score` does."""

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        requests = [Request(prompt) for prompt in prompts]
        return Outcome(self._equipment.walk([requests]), requests)


class _Compressing(Contender):
    def predictions(self, outcome: Outcome) -> tuple[float, float] | None:
        equipment, keep = self._equipment, self.keep or 1.0
        lengths = [len(request.prompt.tokens) for request in outcome.requests]
        kept = [len(request.tokens) for request in outcome.requests]
        drafts = outcome.draft_tokens > 0
        try:
            ratio = 1 / keep
            if drafts:
                ratio = ratio_speedup(equipment.config, equipment.draft_config, round(np.mean(lengths)), keep)
            whole = sum(table5(equipment.config, length).total for length in lengths)
            part = sum(table5(equipment.config, length).total for length in kept)
            if drafts:
                part += sum(table5(equipment.draft_config, len(tokens)).total for tokens in outcome.drafted)
            return ratio, whole / part
        except NoCostModel:  # `cost` says why
            return None


class SpecPrefill(_Compressing):
    """The draft, the selection, and the layer walk over what is kept."""

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        compressor = self._equipment.compressor
        compressor.keep = self.keep or 1.0
        before = compressor.draft.tokens
        keeps = compressor.keeps(prompts)
        estimates = compressor.estimate(prompts, keeps, lambda tokens: None)
        requests = compressor.select(prompts, keeps, estimates)
        drafted = [
            prompt.tokens
            for prompt, estimate in zip(prompts, estimates, strict=True)
            if estimate.importance is not None
        ]
        return Outcome(self._equipment.walk([requests]), requests, drafted, compressor.draft.tokens - before)


Choose = Callable[[Prompt, float, int], IntArray]


class Baseline(_Compressing):
    """`choose` says without a draft which tokens of a prompt are kept at a rate, for each prompt by itself.

    It is told how many of the last tokens are kept in any case: as many as SpecPrefill keeps.
    """

    def __init__(self, name: str, equipment: Equipment, keep: float, choose: Choose) -> None:
        super().__init__(name, equipment, keep)
        self._choose = choose

    def run(self, prompts: Sequence[Prompt]) -> Outcome:
        rates = self._equipment.rates(prompts, self.keep or 1.0)
        ends = self._equipment.tails(prompts, rates)
        requests = [self._read(*each) for each in zip(prompts, rates, ends, strict=True)]
        return Outcome(self._equipment.walk([requests]), requests)

    def _read(self, prompt: Prompt, rate: float | None, last: int) -> Request:
        if rate is not None:
            kept = self._choose(prompt, rate, last)
            if len(kept) < len(prompt.tokens):
                return Request(prompt, kept, SPECPREFILL)
        return Request(prompt)


def choosers(equipment: Equipment, spans: Mapping[int, Spans] | None, seed: int) -> dict[str, Choose]:
    """The baselines' ways to choose, by name; all keep the ends that SpecPrefill keeps. bm25 needs the spans."""
    first, chunk = equipment.compression.keep_first, equipment.compression.select_chunk

    def at_random(prompt: Prompt, keep: float, last: int) -> IntArray:
        rng = np.random.default_rng([seed, prompt.row])
        return random_chunks(len(prompt.tokens), keep, chunk=chunk, first=first, last=last, rng=rng)

    def at_ends(prompt: Prompt, keep: float, last: int) -> IntArray:
        return first_and_last(len(prompt.tokens), keep, first=first, last=last)

    found: dict[str, Choose] = {"random": at_random, "ends": at_ends}
    if spans is not None:

        def by_words(prompt: Prompt, keep: float, last: int) -> IntArray:
            text, offsets = spans[prompt.row]
            return bm25_sentences(text, offsets.tolist(), keep, first=first, last=last)

        found["bm25"] = by_words
    return found

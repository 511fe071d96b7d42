"""The methods of `prefill bench`: each answers the same prompts, and tells afterwards what it computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prefillcli.bench.report import ExitResult, StateDrift
from prefillcli.core.request import Request, answer, answer_requests, plan_requests
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.rows import Float64Array, Prompt
from prefillcli.engines.base import PLAIN, Answer, Treatment
from prefillcli.engines.hf import last_logits
from prefillcli.engines.torch import TorchEngine
from prefillcli.jobs.load import Models
from prefillcli.models.heads import label_numbers
from prefillcli.models.open import Opened
from prefillcli.models.shape import (
    NoCostModel,
    answer_flops,
    prefill_flops,
    walk_flops,
)
from prefillcli.options.commands import BenchSettings
from prefillcli.plan.plan import Plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.walk import LayerWalk


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
        self.opened = opened
        self.settings = settings
        self.labels = labels
        self.model = loaded.engine.walk.model
        self._activation = opened.files.activation
        self.loaded = loaded
        self._chunk_tokens: int = loaded.plan["chunk_tokens"]
        self._offload = settings.prefix_kv == "offload"
        self._schedule = settings.schedule
        loaded.engine.close()  # each run sets the model up as it needs it

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

    def plan(self, requests: Sequence[Request]) -> Plan:
        return plan_requests(requests, self.limits, self._schedule)


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
            return Cost(tokens, flops)
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
        # The requests in groups that are planned together.
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

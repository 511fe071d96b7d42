"""What a job would take under each schedule, with each way to keep K,V between packs, and at each keep rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.compress.answers import plan_requests, planned_adapters, planned_positions
from prefillcli.compress.compressor import keep_rates
from prefillcli.compress.load import own_layers, plan_draft, translator_of, worth_of
from prefillcli.compress.selection import Request, select_all
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import ErrorCode, Prompt
from prefillcli.engines.memory_plan import TEXTS, budget_of, plan_packs
from prefillcli.errors import ResourceError
from prefillcli.forecast.profile import Profile
from prefillcli.models.open import Opened
from prefillcli.options.groups import ScheduledOptions
from prefillcli.plan.blocks import CarriedBlock
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plans
from prefillcli.plan.schedules import SCHEDULES
from prefillcli.report.survey import KeepCost, PackLimits, PlanCost, TextCost

if TYPE_CHECKING:  # takes torch along
    from prefillcli.models.law import TextsOf

PREFIX_KV = ("auto", "discard", "offload")  # keep is the same as auto
KEEP_RATES = (1.0, 0.5, 0.3, 0.2, 0.1)


class Alternatives:
    """Adds up over windows what plans take. The job's own plan is among them, cut as the job cuts it.

    `free` bytes are what the loaded weights will leave, where `--memory` does not say what may be used; `profile`
    sizes packs and predicts their time. `block_tokens` as in `make_plan`; `text_tokens` and `texts_of`
    as in `plan_packs`. Raises ResourceError where not even a small prompt fits.
    """

    def __init__(
        self,
        settings: ScheduledOptions,
        opened: Opened,
        compression: Compression,
        *,
        free: int | None,
        profile: Profile | None,
        block_tokens: int = 0,
        text_tokens: int = 0,
        texts_of: TextsOf = "all",
    ) -> None:
        self.given_tokens = 0
        """Tokens of the job's own plan that a window before has computed."""
        self.errors: Counter[str] = Counter()
        """Rows that only planning finds to be errors, by code."""
        budget = budget_of(settings, free)
        plan = plan_packs(opened, settings, budget, profile, text_tokens=text_tokens, texts_of=texts_of)
        self.texts = TextCost(**plan[TEXTS]) if TEXTS in plan else None
        self._own = Limits(**plan["limits"])
        most, chunk = self._own.max_tokens, plan["chunk_tokens"]
        self.limits = PackLimits(pack_tokens=self._own.tokens, max_tokens=most, chunk_tokens=chunk)
        self._schedule, self._profile = settings.schedule, profile
        self._block_tokens = 0 if opened.compresses else block_tokens
        self._limits: dict[str, Limits] = {settings.prefix_kv: self._own}
        for other in PREFIX_KV:
            if other not in self._limits and not (other == "auto" and settings.prefix_kv == "keep"):
                try:
                    changed = settings.model_copy(update={"prefix_kv": other})
                    self._limits[other] = _limits_of(opened, changed, budget, profile, text_tokens, texts_of)
                except ResourceError:
                    continue  # the host memory that is free for offloading is not known on this system
        self.plans = [
            PlanCost(
                schedule=schedule, prefix_kv=kept, chosen=(schedule, kept) == (self._schedule, settings.prefix_kv)
            )
            for schedule in SCHEDULES
            for kept in self._limits
        ]
        self._large = replace(self._own, tokens=_limits_of(opened, settings, budget, profile).tokens, kept_packs=False)
        self._carried: list[tuple[CarriedBlock, ...]] = [() for _ in self.plans]  # into the next window
        self._keep = settings.keep if isinstance(settings.keep, float) else 1.0
        self._compression: Compression | None = None
        self._drafted: list[int | None] = []  # of the window that is planned
        self.keeps: list[KeepCost] = []
        self._own_layers = own_layers(compression, opened) if opened.drafts_itself else 0
        if opened.compresses:
            from prefillcli.models.shape import Shape

            shape = Shape(opened.files.config)
            self._depth = self._own_layers / shape.layers
            self._worth = worth_of(compression, opened, own=opened.drafts_itself)
            self._compression = compression.for_target(shape.sliding_window)
            self._draft_reach = opened.max_length
            self._translator = translator_of(opened)
            if opened.draft is not None:
                draft = plan_draft(opened, compression, budget, settings.chunk_tokens, {})
                self._draft_reach = _draft_reach(opened, compression, Limits(**draft["limits"]))
            rates = sorted({*KEEP_RATES, self._keep}, reverse=True)
            self.keeps = [KeepCost(keep=rate, chosen=rate == settings.keep) for rate in rates]

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Plan the prompts of a window."""
        self._drafted = self._draft_lengths(prompts)
        requests = self._requests(prompts, self._keep)
        fitting = self._fitting(requests)
        if len(fitting) < len(requests):
            self.errors[ErrorCode.EXCEEDS_MEMORY] += len(requests) - len(fitting)
        own: Plan | None = None
        cases = [(cost.schedule, self._limits[cost.prefix_kv]) for cost in self.plans]
        plans = self._plans(fitting, cases, tuple(self._carried))
        share = self._share_of_layers(fitting)
        for number, (cost, plan) in enumerate(zip(self.plans, plans, strict=True)):
            self._charge(cost, plan, share)
            self._carried[number] = plan.carried
            own = plan if cost.chosen else own
        if self.texts is not None:
            cases = [(self._schedule, self._own.for_texts()), (self._schedule, self._large)]
            small, large = (each.computed_tokens for each in self._plans(fitting, cases))
            self.texts.small_tokens += small
            self.texts.large_tokens += large
        if own is not None:
            self.given_tokens += sum(len(pack.tokens) for pack in own.given)
        for keep in self.keeps:
            self._add_keep(keep, prompts, own if keep.keep == self._keep else None)

    def _draft_lengths(self, prompts: Sequence[Prompt]) -> list[int | None]:
        """How many tokens each prompt has for the draft; None for one that it cannot read."""
        tokens = [prompt.tokens for prompt in prompts]
        if self._compression is None or self._translator is None:
            return [len(each) for each in tokens]
        return self._translator.lengths(tokens)

    def price(self, per_hour: float) -> None:
        """Set the prices of what was predicted."""
        costs: list[PlanCost | KeepCost] = [*self.plans, *self.keeps]
        for cost in costs:
            if cost.seconds is not None:
                cost.price = cost.seconds / 3600 * per_hour

    def _add_keep(self, cost: KeepCost, prompts: Sequence[Prompt], plan: Plan | None) -> None:
        fitting = self._fitting(self._requests(prompts, cost.keep))
        cost.compressed_rows += sum(request.compressed for request in fitting)
        cost.kept_tokens += sum(request.most_kept for request in fitting)
        plan = plan or next(self._plans(fitting, [(self._schedule, self._own)]))
        self._charge(cost, plan, self._share_of_layers(fitting))

    def _requests(self, prompts: Sequence[Prompt], keep: float) -> list[Request]:
        """How the target would read the prompts if the draft found the first chunks of each the most important."""
        if self._compression is None:
            return [Request(prompt) for prompt in prompts]
        rates = keep_rates(prompts, keep, self._compression, self._worth)
        if self._own_layers:
            from prefillcli.compress.self_draft import SelfDraft  # takes torch along

            chosen = SelfDraft(self._own_layers - 1).select(prompts, [], rates, self._compression)
            return [Request(prompt, thinning=own) for prompt, own in zip(prompts, chosen, strict=True)]
        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        equal = np.zeros(longest, dtype=np.float32)  # of equally important chunks the first are kept
        importances = [
            equal[: len(prompt.tokens)] if rate is not None and own is not None and own <= self._draft_reach else None
            for prompt, rate, own in zip(prompts, rates, self._drafted, strict=True)
        ]
        kept = select_all([prompt.tokens for prompt in prompts], importances, rates, self._compression)
        return [
            Request(prompt) if own is None or len(own) == len(prompt.tokens) else Request(prompt, own)
            for prompt, own in zip(prompts, kept, strict=True)
        ]

    def _fitting(self, requests: Sequence[Request]) -> list[Request]:
        return [request for request in requests if len(request.tokens) <= self._own.max_tokens]

    def _plans(
        self,
        requests: Sequence[Request],
        cases: Sequence[tuple[str, Limits]],
        carried: Iterable[Sequence[CarriedBlock]] = repeat(()),
    ) -> Iterator[Plan]:
        if self._own_layers:
            yield from (plan_requests(requests, limits, schedule) for schedule, limits in cases)
            return
        yield from make_plans(
            [each.tokens for each in requests],
            cases,
            planned_positions(requests, cases[0][1]),
            adapters=planned_adapters(requests),
            carried=carried,
            block_tokens=self._block_tokens,
        )

    def _share_of_layers(self, requests: Sequence[Request]) -> float:
        """Of the layers of all tokens of these requests, the share that is computed."""
        whole = sum(len(request.tokens) for request in requests)
        if not self._own_layers or not whole:
            return 1.0
        return self._depth + (1 - self._depth) * sum(request.most_kept for request in requests) / whole

    def _charge(self, cost: PlanCost | KeepCost, plan: Plan, share: float) -> None:
        if isinstance(cost, PlanCost):
            cost.packs += len(plan.packs)
        cost.computed_tokens += plan.computed_tokens
        if self._profile is not None:
            cost.seconds = (cost.seconds or 0.0) + share * self._profile.seconds(plan)


def _limits_of(
    opened: Opened,
    settings: ScheduledOptions,
    budget: int,
    profile: Profile | None,
    text_tokens: int = 0,
    texts_of: TextsOf = "all",
) -> Limits:
    """What fits one pack with these settings, by default if nothing is written."""
    found = plan_packs(opened, settings, budget, profile, text_tokens=text_tokens, texts_of=texts_of)
    return Limits(**found["limits"])


def _draft_reach(opened: Opened, compression: Compression, limits: Limits) -> int:
    """Tokens of the longest prompt that the draft can read."""
    if opened.draft is None:
        return 0
    decoded = compression.decoded
    reach = min(opened.draft.max_length - decoded, limits.max_tokens)
    return reach if limits.read_tokens is None else min(reach, limits.read_tokens)

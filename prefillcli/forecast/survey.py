"""What an input looks like, and what scoring it will take, without weights."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefillcli.core.feature import features_of
from prefillcli.core.request import Request, plan_requests, planned_positions, planned_variants
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import SKIPPED_CODES, ErrorCode, Int32Array, Prompt, Window
from prefillcli.data.windows import Prefetcher
from prefillcli.engines.memory_plan import TEXTS, budget_of, plan_packs
from prefillcli.errors import ResourceError
from prefillcli.forecast.profile import Profile
from prefillcli.models.open import Opened
from prefillcli.options.groups import ScheduledOptions
from prefillcli.plan import SCHEDULES
from prefillcli.plan.blocks import BLOCK_TOKENS, CarriedBlock
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plans
from prefillcli.plan.trie import build_forest, shared_nodes, token_order
from prefillcli.report.survey import (
    Bin,
    Duplicates,
    KeepCost,
    Lengths,
    PackLimits,
    PlanCost,
    SharedLevel,
    SharedPrefix,
    Sharing,
    Survey,
    SurveyRows,
    SurveySeconds,
    TextCost,
)
from prefillcli.runtime.clock import Clock

if TYPE_CHECKING:
    from prefillcli.models.law import TextsOf

# The statistics of an input: lengths of its prompts, and prefixes that they share.


LEVELS = (2, 10, 100)  # rows that share a prefix
PERCENTILES = (10, 50, 90, 95, 99)
LARGEST = 10
_REMEMBERED = 2000  # prefixes that may still turn out to be among the largest


class InputStatistics:
    """Adds up over windows what the rows hold, in about eight bytes a row."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()  # number of prompts by their tokens
        self._rows = self._truncated = 0
        self._codes: Counter[str] = Counter()
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._windows = 0
        self._unique = 0
        self._shared = dict.fromkeys(LEVELS, 0)
        self._largest: dict[bytes, SharedPrefix] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(length * rows for length, rows in self.lengths.items())

    def add(self, window: Window) -> None:
        """Count a window."""
        self._windows += 1
        self._rows += len(window.rows)
        self._codes.update(error.code for error in window.errors.values())
        self._truncated += sum(prompt.truncated for prompt in window.prompts)
        tokens = [prompt.tokens for prompt in window.prompts]
        self.lengths.update(map(len, tokens))
        digests = (int.from_bytes(_digest(each), "little") for each in tokens)
        self._digests.append(np.fromiter(digests, np.uint64, len(tokens)))
        self._share(window.prompts, tokens)

    def _share(self, prompts: Sequence[Prompt], tokens: Sequence[Int32Array]) -> None:
        nodes = shared_nodes(build_forest(tokens, token_order(tokens)))
        self._unique += sum(node.length for node, _ in nodes)
        for level in LEVELS:
            self._shared[level] += sum(node.length * rows for node, rows in nodes if rows >= level)
        candidates = [(node.length * (rows - 1), at) for at, (node, rows) in enumerate(nodes) if rows > 1]
        for saved, at in heapq.nlargest(_REMEMBERED // 10, candidates):
            node, rows = nodes[at]
            key = _digest(tokens[node.prompt][: node.end])
            known = self._largest.get(key)
            if known is None:
                first = prompts[node.prompt].row
                self._largest[key] = SharedPrefix(rows=rows, tokens=node.end, saved=saved, first_row=first)
            else:
                known.rows, known.saved = known.rows + rows, known.saved + saved
        if len(self._largest) > _REMEMBERED:
            ranked = sorted(self._largest.items(), key=lambda item: -item[1].saved)
            self._largest = dict(ranked[: _REMEMBERED // 2])

    def rows(self, more_errors: Counter[str]) -> SurveyRows:
        """Rows by what happens to them, with errors that were found elsewhere."""
        codes = self._codes + more_errors
        skipped = sum(codes.pop(code, 0) for code in SKIPPED_CODES)
        errors = codes.total()
        return SurveyRows(
            total=self._rows,
            prompts=self._rows - errors - skipped,
            errors=errors,
            skipped=skipped,
            errors_by_code=dict(sorted(codes.items())),
            too_long=self._truncated + skipped + codes[ErrorCode.PROMPT_TOO_LONG],
            truncated=self._truncated,
        )

    def duplicates(self) -> Duplicates:
        """Rows that have their prompt in common, over all windows."""
        digests = np.concatenate(self._digests) if self._digests else np.empty(0, dtype=np.uint64)
        counts = np.unique(digests, return_counts=True)[1]
        repeated = counts[counts > 1]
        return Duplicates(rows=int(repeated.sum()), prompts=len(repeated))

    def sharing(self, given: int = 0) -> Sharing:
        """What prompts have in common with others of their window; `given` tokens were computed by windows before."""
        levels = [
            SharedLevel(rows=level, tokens=shared, share=shared / self.tokens)
            for level, shared in self._shared.items()
            if shared
        ]
        largest = sorted(self._largest.values(), key=lambda prefix: -prefix.saved)[:LARGEST]
        return Sharing(windows=self._windows, unique_tokens=self._unique - given, levels=levels, largest=largest)


def lengths_of(counts: Counter[int]) -> Lengths:
    """The lengths of prompts, given how many prompts have each length. There is at least one."""
    lengths = sorted(counts)
    ends = np.cumsum([counts[length] for length in lengths])
    rows = int(ends[-1])
    nearest = {share: int(np.searchsorted(ends, math.ceil(share / 100 * rows))) for share in PERCENTILES}
    return Lengths(
        least=lengths[0],
        mean=sum(length * number for length, number in counts.items()) / rows,
        most=lengths[-1],
        percentiles={str(share): lengths[at] for share, at in nearest.items()},
        histogram=histogram_of(counts),
    )


def histogram_of(counts: Counter[int]) -> list[Bin]:
    """Bins whose edges grow by a factor of 2, or by a root of it where lengths differ little."""
    least, most = min(counts), max(counts)
    steps = next((n for n in (1, 2, 4) if n * math.log2((most + 1) / least) >= 6), 8)  # to a factor of 2
    at = math.floor(steps * math.log2(least))
    edges = [round(2 ** (at / steps))]
    while edges[-1] <= most:
        at += 1
        edge = round(2 ** (at / steps))
        if edge > edges[-1]:
            edges.append(edge)
    first = max(bisect.bisect_right(edges, least) - 1, 0)
    edges = [min(edges[first], least), *edges[first + 1 :]]
    bins = [Bin(low=low, high=high, rows=0) for low, high in itertools.pairwise(edges)]
    for length, rows in counts.items():
        bins[bisect.bisect_right(edges, length) - 1].rows += rows
    return bins


def _digest(tokens: Int32Array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=8).digest()


# The cost of a job under each schedule, with each way to keep K,V between packs, and at each keep rate.


PREFIX_KV = ("auto", "discard", "offload")  # keep is the same as auto


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
        *,
        free: int | None,
        profile: Profile | None,
        block_tokens: int = BLOCK_TOKENS,
        text_tokens: int = 0,
        texts_of: TextsOf = "all",
    ) -> None:
        self.given_tokens = 0  # tokens of the job's own plan that a window before has computed
        self.errors: Counter[str] = Counter()  # rows that only planning finds to be errors, by code
        budget = budget_of(settings, free)
        plan = plan_packs(opened, settings, budget, profile, text_tokens=text_tokens, texts_of=texts_of)
        self.texts = TextCost(**plan[TEXTS]) if TEXTS in plan else None
        self._own = Limits(**plan["limits"])
        most, chunk = self._own.max_tokens, plan["chunk_tokens"]
        self.limits = PackLimits(pack_tokens=self._own.tokens, max_tokens=most, chunk_tokens=chunk)
        self._schedule, self._profile = settings.schedule, profile
        foreseen = (each.foresee(opened, budget) for each in features_of(settings))
        self._foresight = next(filter(None, foreseen), None)
        self._price_per_hour: float | None = getattr(settings, "price_per_hour", None)
        self._block_tokens = block_tokens if self._foresight is None else 0
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
        self.keeps: list[KeepCost] = []
        if self._foresight is not None:
            rates, chosen = self._foresight.rates, self._foresight.chosen
            self.keeps = [KeepCost(keep=rate, chosen=rate == chosen) for rate in rates]
        self._keep = 1.0 if self._foresight is None or self._foresight.chosen is None else self._foresight.chosen

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Plan the prompts of a window."""
        requests = self._requests(prompts, self._keep)
        fitting = self._fitting(requests)
        if len(fitting) < len(requests):
            self.errors[ErrorCode.EXCEEDS_MEMORY] += len(requests) - len(fitting)
        own: Plan | None = None
        cases = [(cost.schedule, self._limits[cost.prefix_kv]) for cost in self.plans]
        plans = self._plans(fitting, cases, tuple(self._carried))
        share = self._layers(fitting)
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

    def _add_keep(self, cost: KeepCost, prompts: Sequence[Prompt], plan: Plan | None) -> None:
        fitting = self._fitting(self._requests(prompts, cost.keep))
        cost.compressed_rows += sum(request.compressed for request in fitting)
        cost.kept_tokens += sum(request.most_kept for request in fitting)
        plan = plan or next(self._plans(fitting, [(self._schedule, self._own)]))
        self._charge(cost, plan, self._layers(fitting))

    def _requests(self, prompts: Sequence[Prompt], keep: float) -> list[Request]:
        if self._foresight is None:
            return [Request(prompt) for prompt in prompts]
        return self._foresight.requests(prompts, keep)

    def _fitting(self, requests: Sequence[Request]) -> list[Request]:
        return [request for request in requests if len(request.tokens) <= self._own.max_tokens]

    def _plans(
        self,
        requests: Sequence[Request],
        cases: Sequence[tuple[str, Limits]],
        carried: Iterable[Sequence[CarriedBlock]] = repeat(()),
    ) -> Iterator[Plan]:
        if any(request.thinning is not None for request in requests):
            yield from (plan_requests(requests, limits, schedule) for schedule, limits in cases)
            return
        yield from make_plans(
            [each.tokens for each in requests],
            cases,
            planned_positions(requests, cases[0][1]),
            variants=planned_variants(requests),
            carried=carried,
            block_tokens=self._block_tokens,
        )

    def _layers(self, requests: Sequence[Request]) -> float:
        return 1.0 if self._foresight is None else self._foresight.layers(requests)

    def _charge(self, cost: PlanCost | KeepCost, plan: Plan, share: float) -> None:
        if isinstance(cost, PlanCost):
            cost.packs += len(plan.packs)
        cost.computed_tokens += plan.computed_tokens
        if self._profile is not None:
            cost.seconds = (cost.seconds or 0.0) + share * self._profile.seconds(plan)
            if self._price_per_hour is not None:
                cost.price = cost.seconds / 3600 * self._price_per_hour


def _limits_of(
    opened: Opened,
    settings: ScheduledOptions,
    budget: int,
    profile: Profile | None,
    text_tokens: int = 0,
    texts_of: TextsOf = "all",
) -> Limits:
    # What fits one pack with these settings, by default if nothing is written.
    found = plan_packs(opened, settings, budget, profile, text_tokens=text_tokens, texts_of=texts_of)
    return Limits(**found["limits"])


def survey(
    source: Source,
    builder: PromptBuilder,
    labels: Labels,
    coming: Iterator[Window],
    plans: Alternatives,
    tick: Callable[[int, int], None],
) -> Survey:
    """Read the windows that are `coming`, and plan them by `plans`.

    The windows are of the rows of `source`, whose prompts the `builder` makes; it is closed. `tick` is called with the
    rows and prompt tokens of each window, and may raise. Raises what the job raises before it loads weights.
    """
    found, clock = InputStatistics(), Clock()
    with Prefetcher(coming, cancel=builder.close) as ahead:
        for number, window in enumerate(ahead):
            if number == 0:
                labels.check(window)
            with clock.phase("plan"):
                found.add(window)
                plans.add(window.prompts)
            tick(len(window.rows), sum(len(prompt.tokens) for prompt in window.prompts))
    return Survey(
        rows=found.rows(plans.errors),
        prompt_tokens=found.tokens,
        lengths=lengths_of(found.lengths) if found.lengths else None,
        duplicates=found.duplicates(),
        sharing=found.sharing(given=plans.given_tokens),
        limits=plans.limits,
        plans=plans.plans,
        keeps=plans.keeps,
        texts=plans.texts,
        seconds=SurveySeconds(
            read=source.seconds,
            render=builder.render_seconds,
            tokenize=builder.tokenize_seconds,
            plan=clock.seconds["plan"],
        ),
    )

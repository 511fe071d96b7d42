"""The workers of a job as one engine and one draft, for what the driver does itself: planning and compressing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from prefillcli.compress.fallbacks import FAILED
from prefillcli.engines.base import PLAIN, Answer, LabelTokens, Treatment
from prefillcli.errors import ResourceError
from prefillcli.jobs.runners.crew import Crew
from prefillcli.jobs.runners.dispatcher import Dispatcher, Item, Outcome
from prefillcli.jobs.runners.tasks import AnswerTask, Estimated, EstimateTask, Ready, WorkerReport, WorkerSpec
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.refills import FreePack, free_packs, groups_of
from prefillcli.runtime import log
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:  # takes torch along
    from prefillcli.compress.base import ImportanceEstimate, Tick
    from prefillcli.compress.overlap import Overlap
    from prefillcli.plan.trie import TokenArray

Cost = Callable[[Plan], float]
"""What a plan is predicted to take, in any unit."""
_POLL_SECONDS = 0.5  # between two looks for a signal
_REPORT_SECONDS = 5.0


class Pool:
    """Workers that have begun, and the items they do. Close it in any case.

    It is a `PlanEngine`, and what `SpecPrefill` needs of a draft.
    """

    whole_packs: bool
    limits: Limits

    def __init__(
        self, crew: Crew, spec: WorkerSpec, spec_of: Callable[[WorkerSpec, int], WorkerSpec], *, cost: Cost, stop: Stop
    ) -> None:
        self.size = crew.size
        self.tokens = 0
        """Tokens that drafts have computed so far."""
        self.failure: BaseException | None = None
        """What a draft failed with last."""
        self._crew = crew
        self._cost = cost
        self._stop = stop
        self._batch = 0
        self._packs = 0
        self._spec = spec
        self.dispatcher = Dispatcher(crew, lambda number: spec_of(self._spec, number))

    def begin(self, *, plans: bool, pack_tokens: int | None) -> None:
        """Begin the workers, and wait until one is ready.

        Where the engine `plans` packs, the first worker does so for all, before the others begin. With `pack_tokens`
        packs have no more than that, or twice the longest prompt: with many small packs, all workers end together.
        Packs for streamed weights stay as they are planned.
        """
        first = 1 if plans else self.size
        with self._stop.at_once():
            self.dispatcher.start(range(first))
        started: list[Ready] = []
        while not started:
            started = self.pump()
        ready = started[0]
        self.plan, self.whole_packs = ready.plan, ready.whole_packs
        self.limits = self._most = ready.limits
        self._pack_tokens = None if ready.streams else pack_tokens
        self._spec = replace(self._spec, plan=ready.plan, planned=True)
        with self._stop.at_once():
            self.dispatcher.start(range(first, self.size))

    def fit(self, longest: int) -> None:
        """Limit the packs that are planned next, of prompts with at most `longest` tokens."""
        if self._pack_tokens is not None:
            self.limits = replace(self._most, tokens=min(self._most.tokens, max(self._pack_tokens, 2 * longest)))

    def pump(self, seconds: float = _POLL_SECONDS) -> list[Ready]:
        """Wait for what happens next, and let it have its effects. Raises Interrupted after a signal."""
        with self._stop.at_once():
            outcomes, started = self.dispatcher.wait(seconds)
        for outcome in outcomes:
            if outcome.lost is not None and not self._stop.asked:
                again = "its rows are scored one by one" if outcome.given_up else "its rows are scored again"
                log.warning(f"{outcome.lost}; {again}")
            outcome.item.took(outcome)
        self._stop.check()
        return started

    def item(
        self,
        task: AnswerTask | EstimateTask,
        plan: Plan,
        took: Callable[[Outcome], None],
        begun: Callable[[], None] = lambda: None,
    ) -> Item:
        """A task for which this plan is computed."""
        return Item(task, self._cost(plan), took, begun)

    def add(self, groups: Iterable[Sequence[Item]]) -> None:
        """Give the workers groups of items, behind those that they were given before."""
        self._batch += 1
        self.dispatcher.add(groups, self._batch)

    def reports(self) -> list[WorkerReport]:
        """What every worker has done, as far as they say it soon."""
        self.dispatcher.ask_for_reports()
        end = time.monotonic() + _REPORT_SECONDS
        with suppress(Exception):  # the rows are safe by now
            while not self.dispatcher.idle and time.monotonic() < end:
                self.dispatcher.wait(0.1)
        return [report for _, report in sorted(self.dispatcher.reports.items())]

    def close(self) -> None:
        self._crew.close()

    def numbered(self, packs: Sequence[Pack]) -> list[Pack]:
        """The packs of a plan, with numbers that no other plan's packs have: workers hold K,V by them."""
        first, self._packs = self._packs, self._packs + len(packs)
        return [pack.shifted(first) for pack in packs]

    # As an engine.

    def answer_all(
        self,
        packs: Sequence[Pack],
        labels: Callable[[int], LabelTokens],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """As `PlanEngine`. Raises ResourceError where workers are lost on a pack over and over."""
        ready: list[list[Answer]] = []

        def took(outcome: Outcome) -> None:
            if outcome.given_up:
                raise _given_up(outcome)
            if outcome.result is not None:
                ready.append(outcome.result.answers)
            tick(outcome.tokens)

        free = list(free_packs(self.numbered(packs)))
        items = {each.pack.index: answer_task(each, labels, treatment) for each in free}
        self.add(
            [self.item(items[each.pack.index], Plan([each.pack], 0), took) for each in group]
            for group in groups_of(free)
        )
        for _ in free:
            while not ready:
                self.pump()
            yield ready.pop()

    # As a draft.

    def estimate(
        self, prompts: Sequence[TokenArray], tick: Tick, overlaps: Sequence[Overlap] | None = None
    ) -> list[ImportanceEstimate]:
        """As `Draft.estimate`: each of the draft's packs is a task."""
        from prefillcli.compress.base import ImportanceEstimate

        limits = Limits(**self.plan["draft"]["limits"])
        most = limits.max_tokens if limits.read_tokens is None else min(limits.max_tokens, limits.read_tokens)
        able = [number for number, tokens in enumerate(prompts) if len(tokens) <= most]
        plan = make_plan([prompts[number] for number in able], limits)
        parts = [([able[prompt] for prompt in pack.prompts], Plan([pack], 0)) for pack in plan.packs]
        if too_long := sorted(set(range(len(prompts))) - set(able)):
            parts.append((too_long, Plan([], 0)))  # the draft says why
        estimates: dict[int, ImportanceEstimate] = {}

        def took(own: list[int], outcome: Outcome) -> None:
            if isinstance(outcome.result, Estimated):
                estimates.update(zip(own, outcome.result.estimates, strict=True))
                self.tokens += outcome.result.draft_tokens
                self.failure = outcome.result.failure or self.failure
            elif outcome.given_up:
                self.failure = _given_up(outcome)
                estimates.update((number, ImportanceEstimate(reason=FAILED)) for number in own)
            tick(0.0)

        def task_of(own: list[int]) -> EstimateTask:
            return EstimateTask([prompts[n] for n in own], None if overlaps is None else [overlaps[n] for n in own])

        tasks = [(own, part, task_of(own)) for own, part in parts]
        self.add([self.item(task, part, partial(took, own))] for own, part, task in tasks)
        while len(estimates) < len(prompts):
            self.pump()
        return [estimates[number] for number in range(len(prompts))]


def answer_task(work: FreePack, labels: Callable[[int], LabelTokens], treatment: Treatment = PLAIN) -> AnswerTask:
    """The task of a pack, with the label tokens that its prompts have, and how these are treated."""
    own = {prompt: labels(prompt) for prompt in work.pack.prompts}
    sets = tuple(dict.fromkeys(own.values()))
    return AnswerTask(work, sets, {prompt: sets.index(each) for prompt, each in own.items()}, treatment.of(own))


def _given_up(outcome: Outcome) -> ResourceError:
    return ResourceError(f"{outcome.lost}, and so were others on the same rows\nthe rows so far are kept")

"""The workers of a job as the driver sees them, wherever they are."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.core.request import plan_requests
from prefillcli.engines.base import PLAIN, Answer, PoolUse, Treatment, WeightsReport, WorkerReport
from prefillcli.engines.memory_plan import Measured
from prefillcli.errors import PrefillError, ResourceError, brief, out_of_resource, run_again
from prefillcli.options.settings import JobSettings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import FreePack, Key, Limits, Pack, free_packs, groups_of
from prefillcli.plan.plan import Plan
from prefillcli.runtime import log
from prefillcli.runtime.clock import Phase
from prefillcli.runtime.log import log_of
from prefillcli.runtime.signals import Stop
from prefillcli.walk.continuations import DecodingReport, sum_of

if TYPE_CHECKING:
    from prefillcli.scoring.loop import Asked


# Messages between the driver of a job and its workers. All of them can be pickled.


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The settings with which a worker is started.

    `settings` are those of the job, with folders for the names of models. `share` is this worker's part of the free
    memory of its machine. `settled` is that of an earlier attempt, or of this one if it is `planned`: another worker
    has settled it. `digests` are those of the folders' contents, where the worker may be on another machine. The
    driver has chosen the models' `dtypes`, and how many layers of the model are read.
    """

    number: int
    settings: JobSettings
    share: float = 1.0
    settled: Mapping[str, Any] = field(default_factory=dict)
    planned: bool = False
    measured: Measured | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    dtypes: Sequence[str] = ()
    read_layers: int | None = None

    def log(self) -> AbstractContextManager[None]:
        """Send messages of the worker, inside the block, to the log of the job's run."""
        own = self.settings
        return log_of(own.log.run_id or "", json_lines=own.log.log_format == "json", worker=self.number)


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has loaded its models. `limits`, `whole_packs` and `settled` are those of its engine.

    Where it `streams` weights, small packs would wait for them.
    """

    limits: Limits
    whole_packs: bool
    settled: dict[str, Any]
    streams: bool = False


@dataclass(frozen=True, slots=True)
class AnswerTask:
    """A pack to answer. `labels` are the label sets of its prompts, `sets` the number of each prompt's set.
    `treatment` is what else is done to the prompts while they are read.
    """

    work: FreePack
    labels: tuple[LabelSet, ...]
    sets: Mapping[int, int]
    treatment: Treatment = PLAIN


@dataclass(frozen=True, slots=True)
class Answered:
    """The answers of a pack, and the number of tokens that were computed again for K,V that the worker did not
    have."""

    answers: list[Answer]
    refilled_tokens: int


@dataclass(frozen=True, slots=True)
class BesideTask:
    """A task for what a worker has loaded beside the model under this name: see `ScoringPool.ask_beside`."""

    name: str
    asked: Any


@dataclass(frozen=True, slots=True)
class ReportTask:
    """A request for a worker's report."""


@dataclass(frozen=True, slots=True)
class Reported:
    """The work of a worker so far, including that on its texts."""

    worker: WorkerReport
    decoded: DecodingReport | None


Task = AnswerTask | BesideTask | ReportTask
Result = Any
"""`Answered`, `Reported`, or the result of a task beside the model."""


@dataclass(frozen=True, slots=True)
class Started:
    """A worker is ready."""

    worker: int
    ready: Ready


@dataclass(frozen=True, slots=True)
class Advanced:
    """A worker has computed this many more tokens of its first task."""

    worker: int
    tokens: float


@dataclass(frozen=True, slots=True)
class Done:
    """A worker has done its first task."""

    worker: int
    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker could not start, or do its first task, for a reason that would stop any other worker too."""

    worker: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker has ended, and its tasks with it. `why` follows the words \"worker 2\"."""

    worker: int
    why: str


Event = Started | Advanced | Done | Failed | Lost


class Crew(Protocol):
    """Workers by number. Each does the tasks that it is sent in their order. Close it in any case."""

    size: int
    """The most workers."""
    digests_needed: bool
    """The workers may be on other machines, so they check the contents of their models' folders."""

    def start(self, spec: WorkerSpec) -> None:
        """Start the worker of this number, or start it again after it was lost."""

    def send(self, worker: int, task: Task) -> None:
        """Give a started worker one more task. If it is lost meanwhile, `wait` reports that."""

    def wait(self, timeout: float) -> list[Event]:
        """Return the events since the last call, in order. Waits for one, at most this many seconds."""

    def close(self) -> None:
        """End all workers, at once."""


class WorkerError(Exception):
    """A worker failed for another reason than lack of memory: an error in the program. Its traceback is attached as a
    note."""


def portable(error: BaseException) -> Exception:
    """Return a worker's error as one that its driver can raise."""
    if isinstance(error, PrefillError):
        return error
    text = f"{type(error).__name__}: {brief(error)}"
    if out_of_resource(error):
        return ResourceError(text)
    failure = WorkerError(text)
    failure.add_note(f"in the worker:\n{''.join(traceback.format_exception(error))}")
    return failure


# Work is shared out in whole groups of packs, the largest first. A worker with nothing left takes over from others.


MOST_LOSSES = 3
"""The most workers that may be lost on a task: it runs again twice."""
MOST_STARTS = 3
"""The most times in a row that a worker may be lost before it is ready."""
MOST_LOST = 20
"""The most workers that may be lost in a row without any finished task."""


@dataclass(eq=False, slots=True)
class Item:
    """A task on its way. `cost` is its predicted cost, in any unit.

    `took` is called with its outcomes, `begun` when a worker begins it.
    """

    task: Task
    cost: float
    took: Callable[[Outcome], None] = lambda outcome: None
    begun: Callable[[], None] = lambda: None
    losses: int = 0

    @property
    def tokens(self) -> int:
        """Tokens to compute for it, if the K,V that it needs are at hand."""
        return len(self.task.work.pack.tokens) if isinstance(self.task, AnswerTask) else 0

    def lacks(self, held: frozenset[Key]) -> tuple[int, int]:
        """Return how many tokens a worker with these K,V computes again for it; negative: tokens that it need not
        compute."""
        refills = self.task.work.refills if isinstance(self.task, AnswerTask) else ()
        missing = sum(len(refill.tokens) for refill in refills if refill.block not in held)
        return missing, missing - sum(len(refill.tokens) for refill in refills)

    def leaves(self, held: frozenset[Key]) -> frozenset[Key]:
        """Return the K,V that such a worker has when it is done."""
        if not isinstance(self.task, AnswerTask):
            return held
        pack = self.task.work.pack
        at_hand = held.union((node.key for node in pack.held), pack.kept_nodes.values())
        return at_hand & pack.keep


@dataclass(eq=False, slots=True)
class ItemGroup:
    """Items that use each other's K,V, in order: one worker does them, unless another has nothing else to do."""

    items: deque[Item]
    batch: int
    """Groups of earlier batches start first."""
    owner: int | None = None

    @property
    def cost(self) -> float:
        return sum(item.cost for item in self.items)


@dataclass(slots=True)
class _Seat:
    """The dispatcher's knowledge of a worker."""

    ready: bool = False
    starts: int = 1
    sent: deque[Item] = field(default_factory=deque)
    held: frozenset[Key] = frozenset()
    """The K,V that the worker will have when its tasks are done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """News of an item: a `result`, `tokens` more of it computed, or the loss of its worker, and why.

    `tokens` is negative where computed ones were lost with a worker. With `given_up` the item will not run again.
    """

    item: Item
    result: Any = None
    tokens: float = 0.0
    lost: str | None = None
    given_up: bool = False


class Dispatcher:
    """Gives tasks to the workers of a crew, and again to others where a worker is lost.

    `spec` makes the specification of a worker each time that it starts.
    """

    def __init__(self, crew: Crew, spec: Callable[[int], WorkerSpec]) -> None:
        self._crew = crew
        self._spec = spec
        self._seats: dict[int, _Seat] = {}
        self._groups: list[ItemGroup] = []
        self._advanced: dict[int, float] = {}  # by worker: tokens of its first item
        self._lost_in_a_row = 0
        self.reports: dict[int, Reported] = {}
        self.lost = 0
        """Workers that were lost so far."""

    def start(self, numbers: Iterable[int]) -> None:
        """Start workers."""
        for number in numbers:
            self._seats[number] = _Seat()
            self._crew.start(self._spec(number))

    @property
    def waiting(self) -> int:
        """The number of items that no worker has yet."""
        return sum(len(group.items) for group in self._groups)

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return not self._groups and not any(seat.sent for seat in self._seats.values())

    def add(self, groups: Iterable[Sequence[Item]], batch: int) -> None:
        """Add groups of items; those of a group should be done by one worker, in this order."""
        self._groups += [ItemGroup(deque(items), batch) for items in groups if items]
        self._dispatch()

    def wait(self, timeout: float) -> tuple[list[Outcome], list[Ready]]:
        """Return news of items, and the workers that have become ready. Waits at most `timeout` seconds.

        Raises the error of a worker that failed, and ResourceError where workers are lost over and over.
        """
        outcomes: list[Outcome] = []
        started: list[Ready] = []
        for event in self._crew.wait(timeout):
            if isinstance(event, Started):
                seat = self._seats[event.worker]
                seat.ready, seat.starts = True, 1
                started.append(event.ready)
            else:
                outcomes += self._take(event)
        self._dispatch()
        return outcomes, started

    def ask_for_reports(self) -> None:
        """Ask every worker for a report; `reports` has them as they come."""
        for number, seat in self._seats.items():
            if seat.ready:
                self._send(number, Item(ReportTask(), 0.0))

    def _take(self, event: Event) -> list[Outcome]:
        match event:
            case Advanced(worker, tokens):
                if not self._seats[worker].sent:
                    return []
                self._advanced[worker] = self._advanced.get(worker, 0.0) + tokens
                return [Outcome(self._seats[worker].sent[0], tokens=tokens)]
            case Done(worker, result):
                item = self._seats[worker].sent.popleft()
                rest = item.tokens - self._advanced.pop(worker, 0.0)
                self._begin_next(worker)
                if isinstance(result, Reported):
                    self.reports[worker] = result
                    return []
                self._lost_in_a_row = 0
                return [Outcome(item, result=result, tokens=rest)]
            case Failed(_, error):
                raise error
            case Lost(worker, why):
                return self._replace(worker, why)
        return []

    def _replace(self, worker: int, why: str) -> list[Outcome]:
        """Start a lost worker again. Its first item runs again, or is given up; the others wait."""
        seat = self._seats[worker]
        items = [item for item in seat.sent if not isinstance(item.task, ReportTask)]
        outcomes = []
        if items:
            first = items[0]
            first.losses += 1
            given_up = first.losses >= MOST_LOSSES
            undone = -self._advanced.pop(worker, 0.0)
            outcomes.append(Outcome(first, tokens=undone, lost=f"worker {worker} {why}", given_up=given_up))
            items = items[1:] if given_up else items
            if items:
                self._groups.append(ItemGroup(deque(items), -1))
        for group in self._groups:
            group.owner = None if group.owner == worker else group.owner
        self.lost += 1
        self._lost_in_a_row += 1
        starts = 1 if seat.ready else seat.starts + 1
        if starts > MOST_STARTS or self._lost_in_a_row > MOST_LOST:
            raise ResourceError(
                f"worker {worker} {why}, and others before it\nwhen the reason is known, {run_again()}"
            )
        self._seats[worker] = _Seat(starts=starts)
        self._crew.start(self._spec(worker))
        return outcomes

    def _dispatch(self) -> None:
        """Send waiting items to workers that can begin them, and to those that will soon need one."""
        for number, seat in self._seats.items():
            if seat.ready and not seat.sent and (item := self._next(number)) is not None:
                self._send(number, item)
        share = sum(group.cost for group in self._groups) / len(self._seats)
        for number, seat in self._seats.items():
            if len(seat.sent) == 1 and seat.sent[0].cost < share / 2 and (item := self._next(number)) is not None:
                self._send(number, item)
        self._groups = [group for group in self._groups if group.items]

    def _send(self, worker: int, item: Item) -> None:
        seat = self._seats[worker]
        seat.held = item.leaves(seat.held)
        seat.sent.append(item)
        self._crew.send(worker, item.task)
        if len(seat.sent) == 1:
            self._begin_next(worker)

    def _begin_next(self, worker: int) -> None:
        sent = self._seats[worker].sent
        if sent:
            sent[0].begun()

    def _next(self, worker: int) -> Item | None:
        """Return the next item for a worker: of its own group, of a free one, or of one that it takes over."""
        held = self._seats[worker].held
        groups = [group for group in self._groups if group.items]
        own = next((group for group in groups if group.owner == worker), None)
        if own is None and (free := [group for group in groups if group.owner is None]):
            oldest = min(group.batch for group in free)
            free = [group for group in free if group.batch == oldest]
            own = min(free, key=lambda group: (*group.items[0].lacks(held), -group.cost))
        if own is None:
            own = self._take_over(worker, [group for group in groups if group.owner is not None])
        if own is None:
            return None
        own.owner = worker
        return own.items.popleft()

    def _take_over(self, worker: int, groups: Sequence[ItemGroup]) -> ItemGroup | None:
        """Return the second half of the rest of the largest group, if that is worth computing its prefix again."""
        largest = max(groups, key=lambda group: group.cost, default=None)
        if largest is None:
            return None
        half: deque[Item] = deque()
        rest, cost = largest.cost, 0.0
        while largest.items and (not half or cost + largest.items[-1].cost <= rest / 2):
            half.appendleft(largest.items.pop())
            cost += half[0].cost
        if half[0].lacks(self._seats[worker].held)[0] > sum(item.tokens for item in half):
            largest.items.extend(half)
            return None
        group = ItemGroup(half, largest.batch, worker)
        self._groups.append(group)
        return group


Cost = Callable[[Plan], float]
"""The predicted cost of a plan, in any unit."""
AHEAD = 2
"""The fewest packs that wait for each worker, while there are more windows."""
_POLL_SECONDS = 0.5  # seconds between two checks for a signal
_REPORT_SECONDS = 5.0


class Pool:
    """Started workers, and the items they do. Close it in any case.

    It is a `PlanEngine`.
    """

    whole_packs: bool
    limits: Limits

    def __init__(
        self, crew: Crew, spec: WorkerSpec, spec_of: Callable[[WorkerSpec, int], WorkerSpec], *, cost: Cost, stop: Stop
    ) -> None:
        self.size = crew.size
        self.ahead = AHEAD * crew.size
        self._crew = crew
        self._cost = cost
        self._stop = stop
        self._batch = 0
        self._packs = 0
        self._spec = spec
        self.dispatcher = Dispatcher(crew, lambda number: spec_of(self._spec, number))

    def begin(self, *, plans: bool, pack_tokens: int | None) -> None:
        """Start the workers, and wait until one is ready.

        If the engine `plans` packs, the first worker plans for all, before the others start. With `pack_tokens` packs
        have no more tokens than that, or twice the longest prompt: with many small packs, all workers end together.
        Packs for streamed weights stay as they are planned.
        """
        first = 1 if plans else self.size
        with self._stop.at_once():
            self.dispatcher.start(range(first))
        started: list[Ready] = []
        while not started:
            started = self.pump()
        ready = started[0]
        self.settled, self.whole_packs = ready.settled, ready.whole_packs
        self.limits = self._most = ready.limits
        self._pack_tokens = None if ready.streams else pack_tokens
        self._spec = replace(self._spec, settled=ready.settled, planned=True)
        with self._stop.at_once():
            self.dispatcher.start(range(first, self.size))

    def fit(self, longest: int) -> None:
        """Limit the packs that are planned next, of prompts with at most `longest` tokens."""
        if self._pack_tokens is not None:
            self.limits = replace(self._most, tokens=min(self._most.tokens, max(self._pack_tokens, 2 * longest)))

    def pump(
        self,
        seconds: float = _POLL_SECONDS,
        phase: Callable[[Phase], AbstractContextManager[None]] = lambda name: nullcontext(),
    ) -> list[Ready]:
        """Wait for news of items, and pass them on. Raises Interrupted after a signal."""
        with phase("model"), self._stop.at_once():
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
        task: AnswerTask | BesideTask,
        plan: Plan,
        took: Callable[[Outcome], None],
        begun: Callable[[], None] = lambda: None,
    ) -> Item:
        """Return a task for which this plan is computed."""
        return Item(task, self._cost(plan), took, begun)

    @property
    def waiting(self) -> int:
        """The number of items that no worker has yet."""
        return self.dispatcher.waiting

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""
        return self.dispatcher.idle

    def ask(self, asked: Asked) -> None:
        """Ask as `ScoringPool` does, with packs that stand alone, so that any worker can do them."""
        plan, done = asked.work.plan, set(asked.work.done_prompts)
        free = [
            each
            for each in free_packs(self.numbered([*plan.given, *plan.packs]))
            if not done.issuperset(each.pack.prompts)
        ]
        asked.planned([each.pack for each in free])
        self.add([self._question(asked, each) for each in group] for group in groups_of(free))

    def _question(self, asked: Asked, each: FreePack, losses: int = 0) -> Item:
        pack, requests = each.pack, asked.work.requests

        def took(outcome: Outcome) -> None:
            if outcome.tokens:
                asked.advanced(pack, outcome.tokens)
            if outcome.result is not None:
                answered: Answered = outcome.result
                asked.answered(pack, answered.answers, answered.refilled_tokens - pack.charged_tokens)
                asked.ended(pack)
            elif outcome.given_up and len(pack.prompts) == 1:
                asked.given_up(pack, f"{outcome.lost} whenever this row was scored, the last time by itself")
            elif outcome.given_up:
                self._ask_one_by_one(asked, pack)

        task = answer_task(each, lambda prompt: requests[prompt].prompt.labels, asked.work.treatment(pack))
        computed = Plan([pack], 0).with_labels(lambda prompt: requests[prompt].prompt.labels)
        return Item(task, self._cost(computed), took, partial(asked.begun, pack), losses)

    def _ask_one_by_one(self, asked: Asked, pack: Pack) -> None:
        """Ask for each row of a pack alone: then a row that kills workers does not harm the others."""
        asked.split(pack, len(pack.prompts))
        for prompt in pack.prompts:
            (alone,) = self.numbered(plan_requests([asked.work.requests[prompt]], self.limits).packs)
            free = FreePack(alone.renumbered([prompt]))
            self.add([[self._question(asked, free, MOST_LOSSES - 1)]])

    def add(self, groups: Iterable[Sequence[Item]]) -> None:
        """Give the workers groups of items, after those that they already have."""
        self._batch += 1
        self.dispatcher.add(groups, self._batch)

    def ask_for_reports(self) -> None:
        """Ask every worker for a report, for `used`; those that do not answer soon are left out."""
        self.dispatcher.ask_for_reports()
        end = time.monotonic() + _REPORT_SECONDS
        with suppress(Exception):  # the rows are safe by now
            while not self.dispatcher.idle and time.monotonic() < end:
                self.dispatcher.wait(0.1)

    def used(self) -> PoolUse:
        """Return the work of all workers that have reported."""
        reports = [each for _, each in sorted(self.dispatcher.reports.items())]
        workers = [each.worker for each in reports]
        return PoolUse(
            WeightsReport.of_workers([each.weights for each in workers if each.weights is not None]),
            decoded=sum_of([each.decoded for each in reports if each.decoded is not None]),
            workers=workers,
        )

    def close(self) -> None:
        self._crew.close()

    def numbered(self, packs: Sequence[Pack]) -> list[Pack]:
        """Return the packs of a plan, with numbers that no other plan's packs have: workers hold K,V by them."""
        first, self._packs = self._packs, self._packs + len(packs)
        return [pack.shifted(first) for pack in packs]

    # As an engine.

    def answer_all(
        self,
        packs: Sequence[Pack],
        labels: Callable[[int], LabelSet],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """See `PlanEngine`. Raises ResourceError where workers are lost on a pack over and over."""
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

    @property
    def remote(self) -> Pool:
        """These workers."""
        return self

    def ask_beside(
        self,
        name: str,
        tasks: Sequence[tuple[Any, Plan]],
        took: Callable[[int, Any, Exception | None], None],
    ) -> None:
        """Ask as `Remote` does; return when all tasks are done."""
        left = len(tasks)

        def heard(number: int, outcome: Outcome) -> None:
            nonlocal left
            done = outcome.result is not None or outcome.given_up
            left -= done
            took(number, outcome.result, _given_up(outcome) if outcome.given_up else None)

        self.add(
            [self.item(BesideTask(name, asked), plan, partial(heard, number))]
            for number, (asked, plan) in enumerate(tasks)
        )
        while left:
            self.pump()


def answer_task(work: FreePack, labels: Callable[[int], LabelSet], treatment: Treatment = PLAIN) -> AnswerTask:
    """Return the task of a pack, with the labels of its prompts, and how these are treated."""
    own = {prompt: labels(prompt) for prompt in work.pack.prompts}
    sets = tuple(dict.fromkeys(own.values()))
    return AnswerTask(work, sets, {prompt: sets.index(each) for prompt, each in own.items()}, treatment.of(own))


def _given_up(outcome: Outcome) -> ResourceError:
    return ResourceError(f"{outcome.lost}, and so were others on the same rows\nthe rows so far are kept")


if TYPE_CHECKING:
    pass

"""Which worker does what: whole groups of packs, the largest first; who has nothing left takes over from others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefillcli.errors import ResourceError
from prefillcli.jobs.runners.crew import Advanced, Crew, Done, Event, Failed, Lost, Started
from prefillcli.jobs.runners.tasks import AnswerTask, Ready, ReportTask, Task, WorkerReport, WorkerSpec
from prefillcli.plan.pack import Key

MOST_LOSSES = 3
"""Workers that may be lost on a task: it runs again twice."""
MOST_STARTS = 3
"""Times in a row that a worker may be lost before it is ready."""
MOST_LOST = 20
"""Workers that may be lost in a row without any task being done."""


@dataclass(eq=False, slots=True)
class Item:
    """A task on its way. `cost` is what it is predicted to take, in any unit.

    `took` hears what becomes of it, `begun` that a worker begins to do it.
    """

    task: Task
    cost: float
    took: Callable[[Outcome], None] = lambda outcome: None
    begun: Callable[[], None] = lambda: None
    losses: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that are computed for it, if its K,V are at hand."""
        return len(self.task.work.pack.tokens) if isinstance(self.task, AnswerTask) else 0

    def lacks(self, held: frozenset[Key]) -> tuple[int, int]:
        """Tokens that a worker with these K,V computes again for it, and, negative, those that it need not."""
        refills = self.task.work.refills if isinstance(self.task, AnswerTask) else ()
        missing = sum(len(refill.tokens) for refill in refills if refill.block not in held)
        return missing, missing - sum(len(refill.tokens) for refill in refills)

    def leaves(self, held: frozenset[Key]) -> frozenset[Key]:
        """The K,V that such a worker has when it is done."""
        if not isinstance(self.task, AnswerTask):
            return held
        pack = self.task.work.pack
        at_hand = held.union((node.key for node in pack.held), pack.kept_nodes.values())
        return at_hand & pack.keep


@dataclass(eq=False, slots=True)
class ItemGroup:
    """Items that hold K,V of one another, in order: one worker does them, unless another has nothing else to do."""

    items: deque[Item]
    batch: int
    """Groups of earlier batches are begun first."""
    owner: int | None = None

    @property
    def cost(self) -> float:
        return sum(item.cost for item in self.items)


@dataclass(slots=True)
class _Seat:
    """A worker, as far as it is known."""

    ready: bool = False
    starts: int = 1
    sent: deque[Item] = field(default_factory=deque)
    held: frozenset[Key] = frozenset()
    """The K,V that it has when it has done what it was sent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an item: a `result`, `tokens` more of it computed, or a loss, and why.

    `tokens` are negative for what was lost with a worker. With `given_up` it will not run again.
    """

    item: Item
    result: Any = None
    tokens: float = 0.0
    lost: str | None = None
    given_up: bool = False


class Dispatcher:
    """Gives tasks to the workers of a crew, and again to others where a worker is lost.

    `spec` makes what a worker is begun with; it is called again when one is begun again.
    """

    def __init__(self, crew: Crew, spec: Callable[[int], WorkerSpec]) -> None:
        self._crew = crew
        self._spec = spec
        self._seats: dict[int, _Seat] = {}
        self._groups: list[ItemGroup] = []
        self._advanced: dict[int, float] = {}  # by worker: tokens of its first item
        self._lost_in_a_row = 0
        self.reports: dict[int, WorkerReport] = {}
        self.lost = 0
        """Workers that were lost so far."""

    def start(self, numbers: Iterable[int]) -> None:
        """Begin workers."""
        for number in numbers:
            self._seats[number] = _Seat()
            self._crew.start(self._spec(number))

    @property
    def waiting(self) -> int:
        """Items that no worker has yet."""
        return sum(len(group.items) for group in self._groups)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._groups and not any(seat.sent for seat in self._seats.values())

    def add(self, groups: Iterable[Sequence[Item]], batch: int) -> None:
        """Groups of items; those of a group should be done by one worker, in this order."""
        self._groups += [ItemGroup(deque(items), batch) for items in groups if items]
        self._dispatch()

    def wait(self, timeout: float) -> tuple[list[Outcome], list[Ready]]:
        """What has become of items, and which workers are ready since; waits at most so many seconds.

        Raises what a worker has failed with, and ResourceError where workers are lost over and over.
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
        """Ask every worker what it has done; `reports` has the answers as they come."""
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
                if isinstance(result, WorkerReport):
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
        """Begin a lost worker again. What it was doing runs again, or is given up; the rest of its items waits."""
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
                f"worker {worker} {why}, and others before it\n"
                "the rows so far are kept: when the reason is known, --resume goes on with them"
            )
        self._seats[worker] = _Seat(starts=starts)
        self._crew.start(self._spec(worker))
        return outcomes

    def _dispatch(self) -> None:
        """Send what waits to workers that can begin it; those that soon need more get it before they ask."""
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
        """What a worker does next: of its own group, of one that nobody has, or of one that it takes over."""
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
        """The second half of what is left of the largest group, where that is worth computing its prefix again."""
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

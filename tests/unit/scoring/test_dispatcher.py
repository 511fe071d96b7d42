"""Which worker does what, on a simulated clock."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prefillcli.errors import ResourceError
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import FreePack, Limits, free_packs, groups_of
from prefillcli.plan.plan import make_plan
from prefillcli.scoring.runners.pool import MOST_LOSSES, AnswerTask, Dispatcher, Item, Outcome, WorkerSpec, answer_task
from tests.unit.scoring.simulated_crew import WORKLOADS, SimulatedCrew, share_out


def spec(number: int) -> WorkerSpec:
    return WorkerSpec(number, load_settings(ScoreSettings, {"inputs": ["rows.parquet"]}, environment={}))


def labels(_prompt: int) -> LabelSet:
    return LabelSet.of([[1], [2]])


class Work:
    """A plan's packs as groups of items; remembers what became of them."""

    def __init__(self, prompts: list[list[int]], limits: Limits) -> None:
        plan = make_plan([np.asarray(prompt, np.int32) for prompt in prompts], limits)
        self.outcomes: list[Outcome] = []
        self.groups = [[self.item(each) for each in group] for group in groups_of(free_packs(plan.packs))]

    def item(self, each: FreePack) -> Item:
        return Item(answer_task(each, labels), float(len(each.pack.tokens)), self.outcomes.append)

    @property
    def items(self) -> list[Item]:
        return [item for group in self.groups for item in group]


def run(crew: SimulatedCrew, groups: list[list[Item]]) -> Dispatcher:
    dispatcher = Dispatcher(crew, spec)
    dispatcher.start(range(crew.size))
    dispatcher.add(groups, 0)
    while not dispatcher.idle:
        outcomes, _ = dispatcher.wait(1.0)
        for outcome in outcomes:
            outcome.item.took(outcome)
    return dispatcher


def packs_of(crew: SimulatedCrew, worker: int) -> list[int]:
    return [task.work.pack.index for number, task in crew.done if number == worker and isinstance(task, AnswerTask)]


def test_a_group_goes_whole_to_one_worker() -> None:
    users = [[user] * 40 + [100 + post] * 20 for user in range(4) for post in range(12)]
    work = Work(users, Limits(100, 1 << 20, held_tokens=1 << 20))
    groups = [[item.task.work.pack.index for item in group] for group in work.groups if isinstance(group, list)]
    assert len(groups) >= 2
    crew = SimulatedCrew(1)
    run(crew, work.groups)
    assert sorted(packs_of(crew, 0)) == sorted(index for group in groups for index in group)
    assert crew.refilled == 0, "one worker has every prefix at hand"


def test_the_largest_groups_begin_first_and_the_workers_end_together() -> None:
    lengths = [900, 100, 100, 100, 100, 100, 100, 100, 100, 100]
    work = Work([[number] * length for number, length in enumerate(lengths)], Limits(50, 1 << 20))
    crew = SimulatedCrew(2)
    run(crew, work.groups)
    assert crew.now == 900
    assert crew.busy == [900, 900]


def test_an_idle_worker_takes_over_where_the_prefix_is_short() -> None:
    rows = [[7] * 10 + [100 + number] * 90 for number in range(45)]  # all rows begin alike: one group
    work = Work(rows, Limits(300, 1 << 20, held_tokens=1 << 20))
    assert len(work.groups) == 1
    crew = SimulatedCrew(3)
    run(crew, work.groups)
    least = (45 * 90 + 10) / 3
    assert crew.now <= 1.15 * least
    assert 0 < crew.refilled <= 10 * 12


def test_a_long_prefix_is_not_computed_twice_for_a_short_rest() -> None:
    rows = [[7] * 1000 + [100 + number] * 20 for number in range(4)]
    work = Work(rows, Limits(1040, 1 << 20, held_tokens=1 << 20))
    crew = SimulatedCrew(2)
    run(crew, work.groups)
    assert crew.refilled == 0


@pytest.mark.nightly
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_job_of_several_windows_is_shared_out_evenly(workload: str) -> None:
    """On the simulated clock, so the numbers are the same on every machine."""
    found = share_out(40_000, 8, 8_192, workload)
    assert found.ratio < 1.1
    assert found.windows <= 3


def test_a_slow_worker_keeps_nobody_waiting() -> None:
    work = Work([[number] * 100 for number in range(60)], Limits(100, 1 << 20))
    crew = SimulatedCrew(3, speed={0: 0.1})
    run(crew, work.groups)
    assert crew.now <= 1.5 * 60 * 100 / 2.1


def test_what_a_lost_worker_had_runs_again() -> None:
    work = Work([[number] * 100 for number in range(6)], Limits(100, 1 << 20))
    died = []

    def dies(worker: int, task: AnswerTask) -> bool:
        if worker == 1 and not died:
            died.append(task)
            return True
        return False

    crew = SimulatedCrew(2, dies=dies)
    dispatcher = run(crew, work.groups)
    assert dispatcher.lost == 1
    assert sorted(packs_of(crew, 0) + packs_of(crew, 1)) == list(range(6))
    (lost,) = [outcome for outcome in work.outcomes if outcome.lost]
    assert lost.item.task is died[0]
    assert "worker 1 was ended by signal 9" in str(lost.lost)
    assert not lost.given_up


def test_what_every_worker_is_lost_on_is_given_up_and_the_rest_is_done() -> None:
    work = Work([[number] * 100 for number in range(6)], Limits(100, 1 << 20))
    poison = work.items[2].task
    crew = SimulatedCrew(2, dies=lambda worker, task: task is poison)
    dispatcher = run(crew, work.groups)
    assert dispatcher.lost == MOST_LOSSES
    assert [outcome.item.task for outcome in work.outcomes if outcome.given_up] == [poison]
    assert len(crew.done) == 5


def test_workers_that_are_lost_over_and_over_end_the_run() -> None:
    work = Work([[number] * 100 for number in range(60)], Limits(100, 1 << 20))
    with pytest.raises(ResourceError, match="when the reason is known, run again"):
        run(SimulatedCrew(2, dies=lambda worker, task: True), work.groups)


@example(prompts=[[0], [0] * 6], tokens=5, workers=2, deaths={0})
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=30),
    tokens=st.integers(5, 40),
    workers=st.integers(1, 5),
    deaths=st.sets(st.integers(0, 60), max_size=8),
)
def test_every_pack_is_answered_once_whatever_is_lost(
    prompts: list[list[int]], tokens: int, workers: int, deaths: set[int]
) -> None:
    work = Work(prompts, Limits(tokens, 1 << 20, held_tokens=30))
    begun = iter(range(1 << 20))
    crew = SimulatedCrew(workers, dies=lambda worker, task: next(begun) in deaths)
    run(crew, work.groups)
    done = [outcome.item for outcome in work.outcomes if outcome.result is not None]
    given_up = [outcome.item for outcome in work.outcomes if outcome.given_up]
    assert sorted(map(id, done + given_up)) == sorted(map(id, work.items))
    for item in work.items:
        own = sum(outcome.tokens for outcome in work.outcomes if outcome.item is item)
        assert own == (item.tokens if item in done else 0)


def test_a_pack_that_stands_alone_holds_only_what_its_prompts_begin_with() -> None:
    rows = [[1] * 30 + [2] * 30 + [100 + number] * 10 for number in range(6)]
    rows += [[1] * 30 + [200 + number] * 10 for number in range(6)]
    plan = make_plan([np.asarray(row, np.int32) for row in rows], Limits(60, 1 << 20, held_tokens=1 << 20))
    found: list[FreePack] = list(free_packs(plan.packs))
    assert [each.pack.index for each in found] == [pack.index for pack in plan.packs if pack.reads]
    for each in found:
        used = {number for above in each.pack.attach for number in above}
        assert used == set(range(len(each.pack.held)))
        assert [refill.block for refill in each.refills] == [node.key for node in each.pack.held]
        for refill in each.refills:
            path = [*refill.held, *(node for node in each.pack.held if node.key == refill.block)]
            assert [node.start for node in path] == list(np.cumsum([0, *(node.length for node in path)]))[:-1]

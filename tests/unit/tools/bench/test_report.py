"""What the tables of `prefill bench` claim, and what they do not."""

from __future__ import annotations

import pytest

from prefillcli.stats.flips import audit_of
from prefillcli.tools.bench.contest import interleaved
from prefillcli.tools.bench.report import (
    Answers,
    MethodResult,
    Range,
    WorkloadResult,
    quick_table,
    verdicts,
    workload_remarks,
)


def method(
    name: str, seconds: tuple[float, float, float] = (2, 2, 2), flips: int | None = None, kept: float = 0.2
) -> MethodResult:
    """Of 40 rows; the smallest, the median and the largest of its rounds."""
    audit = None if flips is None else audit_of([(0.5, 0.5, None)] * 40, [row < flips for row in range(40)])
    low, median, high = seconds
    return MethodResult(
        method=name, seconds=Range(median=median, low=low, high=high), rows_per_second=40, tokens_per_second=4000,
        target_tokens=4000, draft_tokens=0, kept=kept, keep=0.2 if "@" in name else None,
        speedup=Range(median=2.2 / median, low=2 / high, high=2.5 / low),
        answers=Answers(audit=audit),
    )  # fmt: skip


def workload(*methods: MethodResult, rounds: int = 3) -> WorkloadResult:
    return WorkloadResult(
        workload="needle", rows=40, truth_rows=40, prompt_tokens=4000, unique_tokens=4000, rounds=rounds,
        methods=[method("hybrid", (2, 2.2, 2.5)), *methods],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 1.1, 1.9), "m: faster than hybrid, 2 times hybrid's speed over 3 rounds"),
        ((2.6, 4.4, 5.0), "m: slower than hybrid, 0.5 times hybrid's speed over 3 rounds"),
        ((1.0, 1.1, 2.1), "m: no difference in speed shown, its rounds and those of hybrid overlap"),
        ((2.4, 4.4, 5.0), "m: no difference in speed shown, its rounds and those of hybrid overlap"),
    ],
)
def test_a_difference_in_speed_is_claimed_where_no_rounds_overlap(
    seconds: tuple[float, float, float], said: str
) -> None:
    assert verdicts(workload(method("m", seconds))) == [said]


def test_one_round_shows_no_spread() -> None:
    found = workload(method("m", (1.1, 1.1, 1.1)), rounds=1)
    assert verdicts(found) == ["m: 2 times hybrid's speed in the one timed round, no more"]
    assert quick_table(found)[2][2] == "2"


@pytest.mark.parametrize(("flips", "chance", "better"), [(0, 16, True), (4, 8, False), (26, 20, False)])
def test_flips_beside_random_chunks_are_told_apart_by_their_intervals(flips: int, chance: int, better: bool) -> None:
    found = workload(method("specprefill@0.2", flips=flips), method("random@0.2", flips=chance))
    (told,) = [each for each in verdicts(found) if "flips" in each]
    assert ("not shown to be better than random chunks" not in told) is better
    found.reference_able = False  # flips of a model that guesses say nothing
    assert not [each for each in verdicts(found) if "flips" in each]


def test_what_drops_nothing_is_told_and_not_compared() -> None:
    names = ("specprefill@0.2", "random@0.2")
    found = workload(*(method(name, flips=0, kept=1.0) for name in names))
    assert workload_remarks(found)[0].startswith("specprefill@0.2, random@0.2: nothing was dropped")
    assert not [each for each in verdicts(found) if "flips" in each]


def test_no_round_begins_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def run() -> None:
        nonlocal now
        now += 5

    monkeypatch.setattr("prefillcli.tools.bench.contest.time.perf_counter", lambda: now)
    told: list[str] = []
    for within, rounds in ((0.0, 1), (19.0, 1), (20.0, 2), (1e9, 3)):
        found = interleaved(
            {"a": run, "b": run}, 3, warm_up=False, within=within, on_run=lambda turn, name, taken: told.append(name)
        )
        assert {name: len(each) for name, each in found.items()} == {"a": rounds, "b": rounds}

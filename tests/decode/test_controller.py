"""`auto` on simulated machines: never more than 5 % slower than plain decoding, and fast where guesses pay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefillcli.decode.contracts import Drafter
from prefillcli.decode.speculation.registry import DrafterKind
from tests.decode.simulation import Guesser, Machine, decoded, kind

MACHINES = {
    "computes": {"per_token": 1.0},
    "waits for weights": {"fixed": 0.1, "per_token": 0.02, "least": 1.0},
    "a pass has a price": {"fixed": 1.0, "per_row": 0.2, "per_token": 0.1},
    "a row has a price": {"fixed": 0.3, "per_row": 1.0, "per_token": 0.3},
}
Drafters = Callable[[list[list[int]]], dict[DrafterKind, Callable[[], Drafter]]]


def unit(how: dict[str, float], rows: int) -> float:
    """Seconds of a plain pass."""
    machine = Machine(**how)
    machine.spend(rows, rows)
    return machine.now


CASES = given(
    machine=st.sampled_from(sorted(MACHINES)),
    rows=st.sampled_from([1, 2, 5, 16]),
    tokens=st.sampled_from([16, 64, 150]),
    groups=st.integers(1, 3),
    ragged=st.booleans(),
    right=st.sampled_from([0.0, 0.3, 0.7, 0.95]),
    of=st.sampled_from(["all", "some rows", "the end", "the beginning"]),
    model=st.none() | st.tuples(st.floats(0.02, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 4.0)),
    guesses=st.sampled_from([1, 6, 16]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=25, derandomize=True)
@CASES
def test_auto_is_never_much_slower_than_plain_decoding(**case: Any) -> None:
    check_times(**case)


@pytest.mark.nightly
@settings(max_examples=600, derandomize=True)
@CASES
@example(
    machine="computes",
    rows=1,
    tokens=150,
    groups=1,
    ragged=True,
    right=0.95,
    of="all",
    model=None,
    guesses=6,
    seed=212,
)  # whose text ends in the middle of a guess
def test_auto_is_not_slower_in_hundreds_of_cases(**case: Any) -> None:
    check_times(**case)


def check_times(
    machine: str,
    rows: int,
    tokens: int,
    groups: int,
    ragged: bool,
    right: float,
    of: str,
    model: tuple[float, float, float] | None,
    guesses: int,
    seed: int,
) -> None:
    """Texts take at most 5 % longer with `auto` than without."""
    how = MACHINES[machine]
    one = unit(how, rows)
    lengths = [[tokens - (7 * (row + seed) % (tokens // 2) if ragged else 0) for row in range(rows)]] * groups

    def chance(row: int, place: int) -> float:
        good = {"all": True, "some rows": row % 2, "the end": 2 * place > tokens, "the beginning": 2 * place < tokens}
        return right if good[of] else 0.0

    def drafters(texts: list[list[int]]) -> dict[DrafterKind, Callable[[], Drafter]]:
        made: dict[DrafterKind, Callable[[], Drafter]] = {
            kind("lookup", free=True): lambda: Guesser(clock, texts, chance, per_token=0.001 * one)
        }
        if model:
            cost, accepted, begins = model
            made[kind("draft", free=False)] = lambda: Guesser(
                clock, texts, lambda row, place: accepted, per_token=cost * one, begins=begins * one
            )
        return made

    plain, _ = decoded(Machine(**how), lengths, None)
    clock = Machine(**how)
    clock.draw.bit_generator.state = type(clock.draw.bit_generator)(seed).state
    seconds, _ = decoded(clock, lengths, drafters, guesses=guesses)
    assert seconds <= 1.05 * plain


def guessing(machine: Machine, right: float, **costs: float) -> Callable[[list[list[int]]], Guesser]:
    return lambda texts: Guesser(machine, texts, lambda row, place: right, **costs)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_good_drafter_is_used_where_a_pass_costs_the_same_with_guesses(rows: int) -> None:
    how = MACHINES["waits for weights"]
    plain, _ = decoded(Machine(**how), [[128] * rows] * 2, None)
    machine = Machine(**how)
    make = guessing(machine, 0.95)
    seconds, report = decoded(
        machine, [[128] * rows] * 2, lambda texts: {kind("lookup", free=True): lambda: make(texts)}
    )
    assert seconds < 0.5 * plain
    assert report.drafters["lookup"].accepted > 0.75 * report.drafters["lookup"].proposed


def test_a_good_model_is_used_although_it_costs_something() -> None:
    how = MACHINES["waits for weights"]
    plain, _ = decoded(Machine(**how), [[128] * 4] * 4, None)
    machine = Machine(**how)
    make = guessing(machine, 0.9, per_token=0.05, begins=2.0)
    seconds, _ = decoded(machine, [[128] * 4] * 4, lambda texts: {kind("draft", free=False): lambda: make(texts)})
    assert seconds < 0.7 * plain


def test_of_two_drafters_the_better_one_is_used() -> None:
    machine = Machine(**MACHINES["a pass has a price"])
    good, bad = guessing(machine, 0.9), guessing(machine, 0.3)
    _, report = decoded(
        machine,
        [[100] * 8] * 3,
        lambda texts: {
            kind("lookup", free=True): lambda: bad(texts),
            kind("suffix", free=True): lambda: good(texts),
        },
    )
    counts = report.drafters
    assert counts["suffix"].proposed > 500
    assert "lookup" not in counts or counts["suffix"].proposed > 5 * counts["lookup"].proposed


def test_where_guesses_cost_what_tokens_cost_few_are_made() -> None:
    machine = Machine(**MACHINES["computes"])
    make = guessing(machine, 0.8)
    _, report = decoded(machine, [[100] * 8] * 3, lambda texts: {kind("lookup", free=True): lambda: make(texts)})
    assert report.drafters["lookup"].proposed < 0.1 * report.tokens


def test_a_drafter_that_begins_to_be_right_is_found() -> None:
    how = MACHINES["waits for weights"]
    machine = Machine(**how)

    def drafters(texts: list[list[int]]) -> dict[DrafterKind, Callable[[], Drafter]]:
        return {
            kind("lookup", free=True): lambda: Guesser(machine, texts, lambda row, place: 0.95 if place > 200 else 0.0)
        }

    plain, _ = decoded(Machine(**how), [[600] * 4], None)
    seconds, _ = decoded(machine, [[600] * 4], drafters)
    assert seconds < 0.75 * plain

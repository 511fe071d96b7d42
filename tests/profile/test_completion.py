"""Completion times: the packs that are timed, and what is fitted to them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from prefillcli.forecast.profile import CompletionModel, features
from prefillcli.plan.pack import Pack
from prefillcli.profile.measuring import (
    ATTEMPTS,
    CACHED,
    COMPUTED,
    ROUNDS,
    Timing,
    choose_unit,
    extra_packs,
    first_good_fit,
    fit_completion,
    grid_packs,
    measure_packs,
)

WINDOWS = [(None, 3)]


@pytest.mark.parametrize("cached", CACHED)
def test_every_computed_part_is_a_pack_behind_the_held_prefix(cached: int) -> None:
    unit = 50
    packs = grid_packs(cached * unit, unit, 5000)
    if cached:
        assert (packs[0].held_tokens, len(packs[0].tokens)) == (0, cached * unit)
        packs = packs[1:]
    assert {pack.held_tokens for pack in packs} == {cached * unit}
    assert sorted(len(pack.tokens) for pack in packs) == [units * unit for units in COMPUTED]
    assert all(len(pack.prompts) == 1 for pack in packs)


def test_extra_packs_hold_many_prompts() -> None:
    packs = [pack for group in extra_packs(64, 5000) for pack in group]
    assert [len(pack.prompts) for pack in packs] == [32, 8, 8, 12]


def made_timings(noise: float = 0.0) -> list[Timing]:
    rng = np.random.default_rng(0)
    packs = [(pack, True) for c in CACHED for pack in grid_packs(c * 100, 100, 5000)]
    packs += [(pack, False) for group in extra_packs(100, 5000) for pack in group]
    timings = []
    for number, (pack, single) in enumerate(packs):
        parts = features(pack, WINDOWS)
        seconds = float(np.dot(parts, (0.004, 2e-4, 1e-4, 1e-8))) * (1 + noise * rng.standard_normal())
        tokens = (pack.held_tokens + len(pack.tokens), pack.held_tokens) if single else (0, 0)
        timings.append(Timing(parts, seconds, 2 * seconds, 3, *tokens, heldout=number % 5 == 3))
    return timings


def test_known_costs_are_found() -> None:
    model = fit_completion(made_timings(), WINDOWS)
    assert (model.per_pack, model.per_token, model.per_read, model.per_pair) == pytest.approx(
        (0.004, 2e-4, 1e-4, 1e-8), rel=0.05
    )
    assert model.heldout_error_plan == pytest.approx(0, abs=1e-3)
    assert model.pearson > 0.99
    assert model.pearson >= model.pearson_proxy - 1e-9
    assert model.per_input > 0 > model.per_cached
    assert any(point.heldout for point in model.points)


def test_noise_does_not_spoil_the_prediction() -> None:
    model = fit_completion(made_timings(noise=0.05), WINDOWS)
    assert model.heldout_error_plan < 0.15
    assert model.heldout_error < 0.3


def test_the_unit_follows_from_the_speed_and_from_what_fits() -> None:
    slow, fast = (choose_unit(lambda n, s=speed: n / s, 1 << 30, 60.0) for speed in (500, 50_000))
    assert 90 * slow < fast < 110 * slow
    assert choose_unit(lambda n: n / 50_000, 1400, 60.0) == 100
    assert choose_unit(lambda n: n / 50_000, -5, 60.0) == 4


class Clock:
    """Stands in for a machine: a pack takes what it must, times what other programs do in this round."""

    def __init__(self, disturbance: Callable[[int], float]) -> None:
        self._disturbance = disturbance
        self.runs = 0

    def __call__(self, pack: Pack) -> float:
        self.runs += 1
        return float(np.dot(features(pack, WINDOWS), (0.004, 2e-4, 1e-4, 1e-8))) * self._disturbance(self.runs)


def settled(clock: Clock) -> tuple[CompletionModel | None, str | None, list[str]]:
    told: list[str] = []
    return *first_good_fit(measure_packs(clock, 100, 5000, WINDOWS), WINDOWS, told.append), told


PACKS = sum(len(COMPUTED) + (cached > 0) for cached in CACHED) + 4


def test_a_quiet_machine_is_timed_once() -> None:
    clock = Clock(lambda run: 1.0)
    fit, why, told = settled(clock)
    assert fit is not None
    assert (clock.runs, fit.rounds, why, told) == (ROUNDS * PACKS, ROUNDS, None, [])
    assert fit.heldout_worst_plan == pytest.approx(0, abs=1e-3)
    assert fit.disturbance == pytest.approx(1)


def test_rounds_that_others_disturbed_do_not_count() -> None:
    rng = np.random.default_rng(0)
    clock = Clock(lambda run: float(np.exp(abs(rng.normal(0, 2)))) if run % (2 * PACKS) < PACKS else 1.0)
    fit, _, told = settled(clock)  # every other round is quiet
    assert fit is not None
    assert told == []
    assert (fit.per_pack, fit.per_token) == pytest.approx((0.004, 2e-4), rel=0.1)
    assert fit.disturbance > 2


def test_a_busy_machine_is_timed_again() -> None:
    rng = np.random.default_rng(0)
    clock = Clock(lambda run: float(np.exp(abs(rng.normal(0, 2)))) if run <= ROUNDS * PACKS else 1.0)
    fit, why, told = settled(clock)
    assert fit is not None
    assert (fit.rounds, why) == (2 * ROUNDS, None)
    assert len(told) == 1
    assert "timed again" in told[0]


def test_a_machine_that_stays_busy_gives_no_fit() -> None:
    rng = np.random.default_rng(0)
    clock = Clock(lambda run: float(np.exp(rng.normal(0, 3))))
    fit, why, told = settled(clock)
    assert fit is None
    assert clock.runs == ATTEMPTS * ROUNDS * PACKS
    assert f"after {ATTEMPTS * ROUNDS} rounds" in str(why)
    assert "error is" in str(why)
    assert len(told) == ATTEMPTS - 1

"""Completion times: the packs that are timed, and what is fitted to them."""

from __future__ import annotations

import numpy as np
import pytest

from prefillcli.profile.completion import (
    CACHED,
    COMPUTED,
    Timing,
    choose_unit,
    extra_packs,
    fit_completion,
    grid_packs,
)
from prefillcli.profile.store import features

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
        timings.append(Timing(parts, seconds, *tokens, heldout=number % 5 == 3))
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

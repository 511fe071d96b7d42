"""The search for the longest prompt."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.limits import enforced
from benchmarks.models import random_llama
from prefillcli.errors import ResourceError
from prefillcli.forecast.profile import ModeResult, Profile
from prefillcli.models.find import read_model_files
from prefillcli.options.commands import ProfileSettings
from prefillcli.runtime.memory import with_peak
from prefillcli.tools.profile import measuring
from prefillcli.tools.profile.measuring import (
    MARGIN,
    confirming_run,
    in_child,
    load,
    make_malloc_exact,
    mode_law,
    prefill,
    profile_mode,
    random_prompt,
)
from tests.unit.tools.profile.making import made_curve, made_profile

MIB = 1 << 20
LAW = (5.0 * MIB, 40_000.0)
PREDICTED = int((100 * MIB * (1 - MARGIN) - 5 * MIB) / 40_000)


@pytest.fixture
def confirmed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Stands in for the processes: `truth(tokens)` are the bytes of a run. The lengths that were run are listed."""

    def stand_in(truth: Callable[[int], float]) -> list[int]:
        runs: list[int] = []

        def run(task: object, settings: object, mode: str, tokens: int, *, timeout: float) -> tuple[int, float]:
            runs.append(tokens)
            return int(truth(tokens)), 1.0

        monkeypatch.setattr(measuring, "in_child", run)
        return runs

    return stand_in


def found(mode: str = "full", law: tuple[float, float] = LAW, seconds: float = 1e9, **changes: Any) -> ModeResult:
    settings = ProfileSettings(chunk_tokens=256, confirm_seconds=seconds)
    return profile_mode(mode, law, made_profile(**changes), settings, lambda text: None)


def test_what_the_law_predicts_is_confirmed_at_once(confirmed: Any) -> None:
    runs = confirmed(lambda n: 5 * MIB + 40_000 * n)
    result = found()
    assert result.predicted_tokens == result.max_tokens == PREDICTED
    assert (result.limited_by, runs, result.notes) == ("memory", [PREDICTED], [])


@pytest.mark.parametrize("token", [44_000, 30_000])
def test_a_law_that_is_off_is_put_right_by_runs(token: int, confirmed: Any) -> None:
    runs = confirmed(lambda n: 8 * MIB + token * n)
    result = found()
    assert result.predicted_tokens == PREDICTED
    assert 1 < len(runs) <= 3
    assert result.max_tokens == pytest.approx(92 * MIB / token, rel=0.05)
    assert result.max_tokens <= 92 * MIB / token


def test_a_long_confirming_run_is_capped(confirmed: Any) -> None:
    runs = confirmed(lambda n: 5 * MIB + 40_000 * n)
    result = found(seconds=1.0, completion=made_curve(0.0, 1e-3, 0.0))
    assert result.capped
    assert (result.max_tokens, runs, result.predicted_tokens) == (1000, [1000], PREDICTED)


def test_no_confirming_run_is_made_where_none_is_wanted(confirmed: Any) -> None:
    runs = confirmed(lambda n: 5 * MIB + 40_000 * n)
    result = found(seconds=0.0)
    assert (result.max_tokens, runs, result.predicted_tokens) == (None, [], PREDICTED)


def test_the_models_own_limit_is_named(confirmed: Any) -> None:
    confirmed(lambda n: 5 * MIB + 100 * n)
    result = found("hybrid", (5.0 * MIB, 100.0))
    assert (result.predicted_tokens, result.max_tokens, result.limited_by) == (1 << 17, 1 << 17, "model")


def test_a_budget_for_nothing_is_a_note() -> None:
    result = found(budget_bytes=1 * MIB)
    assert result.predicted_tokens == 0
    assert "does not even hold" in result.notes[0]


def test_a_process_that_dies_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*_: object, timeout: float) -> None:
        raise ResourceError("the process was ended")

    monkeypatch.setattr(measuring, "in_child", dead)
    result = found()
    assert result.max_tokens is None
    assert "no confirming run stayed" in result.notes[0]
    assert all("ended" in str(each.reason) for each in result.confirmations)


def test_an_error_in_the_walk_is_no_prompt_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, timeout: float) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(measuring, "in_child", failing)
    with pytest.raises(TypeError, match="no such argument"):
        found("hybrid")
    # transformers' own forward may fail on an architecture
    result = found("full")
    assert result.confirmations == []
    assert result.notes == ["transformers fails on this model in this mode: no such argument"]


# With real processes.

BUDGETS = {"full": 96 * MIB, "hybrid": 32 * MIB}


def profiled(mode: str, folder: Path) -> tuple[ModeResult, Profile, ProfileSettings]:
    """The result of a mode within its budget, in chunks that are small beside the prompts."""
    random_llama("25M", torch.float32).save_pretrained(folder)
    settings = ProfileSettings(
        model=str(folder), dtype="float32", device="cpu", threads=1, chunk_tokens=64, confirm_seconds=1e9
    )
    profile = made_profile(budget_bytes=BUDGETS[mode])
    law = mode_law(mode, read_model_files(folder).config, torch.float32, 64)
    return profile_mode(mode, law, profile, settings, lambda text: None), profile, settings


def bisect(settings: ProfileSettings, mode: str, budget: int, tokens: int) -> int:
    """The longest length near `tokens` whose peak is within the budget, to 1.5 %. First a slightly shorter prompt runs
    where the system allows no byte more than that."""
    make_malloc_exact()
    model, files, device = load(settings)

    def run(length: int) -> torch.Tensor:
        return prefill(model, mode, 64, random_prompt(length, files.config.vocab_size))

    run(129)
    with enforced("cpu", budget):
        run(int(0.97 * tokens))
    low, high = int(0.8 * tokens), int(1.2 * tokens)
    while high - low > 0.015 * high:
        middle = (low + high) // 2
        _, peak = with_peak(partial(run, middle), device)
        low, high = (middle, high) if peak is not None and peak <= budget else (low, middle)
    return low


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["full", "hybrid"])
def test_the_length_that_is_confirmed_is_near_the_longest_found_by_bisection(mode: str, tmp_path: Path) -> None:
    result, profile, settings = profiled(mode, tmp_path)
    assert result.max_tokens is not None
    longest = in_child(bisect, settings, mode, profile.budget_bytes, result.max_tokens)
    assert result.predicted_tokens == pytest.approx(longest, rel=0.05), result
    assert result.max_tokens == pytest.approx(longest, rel=0.05), result


@pytest.mark.nightly
def test_full_fails_in_the_budget_of_hybrid_at_a_quarter_of_the_length(tmp_path: Path) -> None:
    hybrid, profile, settings = profiled("hybrid", tmp_path)
    assert hybrid.max_tokens is not None
    assert not confirming_run("full", hybrid.max_tokens // 4, profile, settings).fits

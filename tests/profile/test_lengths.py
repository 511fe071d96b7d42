"""The search for the longest prompt."""

from __future__ import annotations

from contextlib import closing
from functools import cache

import pytest
import torch

from benchmarks.models import random_llama
from prefillcli.errors import out_of_memory
from prefillcli.forecast.profile import Confirmation, MemoryPoint, ModeResult, TracePoint
from prefillcli.models.find import read_model_files
from prefillcli.profile.children import (
    ChildEnded,
    ChildFailed,
    Law,
    Subject,
    confirm,
    enforced,
    in_child,
    measure,
    mode_law,
    prepare_prefill,
)
from prefillcli.profile.measuring import MARGIN, Search, confirming_run, probe_lengths, profile_mode, thinned

MIB = 1 << 20
CHOSEN = 1 - MARGIN


def test_short_runs_reach_half_of_what_the_law_allows() -> None:
    law = Law(10 * MIB, {"all": 4096})
    found = probe_lengths(law, 1034 * MIB, 1 << 20, 1024)
    assert found == sorted(set(found))
    assert len(found) == 5
    assert found[0] == 8191
    assert 126 * 1024 <= found[-1] <= 128 * 1024
    assert all(tokens % 1024 == 1023 for tokens in found)  # chunks of two sizes


def test_short_runs_keep_to_the_models_own_limit() -> None:
    found = probe_lengths(Law(0, {"all": 4096}), 1 << 40, 2048, 1024)
    assert found[-1] == 2048
    assert len(found) >= 3


def test_a_budget_that_holds_nothing_has_no_short_runs() -> None:
    assert probe_lengths(Law(10 * MIB, {"all": 4096}), 9 * MIB, 2048, 1024) == []


def test_traces_keep_their_peaks() -> None:
    points = [TracePoint(seconds=n, used_bytes=n % 100) for n in range(5000)]
    kept = thinned(points)
    assert len(kept) <= 600
    assert max(p.used_bytes for p in kept) == 99
    assert [p.seconds for p in kept] == sorted(p.seconds for p in kept)


class Made:
    """Stands in for child processes: `truth(tokens)` bytes for a run, of a speed in tokens a second."""

    def __init__(self, truth, *, short=None, rate: float = 1e5) -> None:
        self.confirmed: list[int] = []
        short = short or truth

        def run(task, subject, mode, *arguments, timeout=None):
            if task is measure:
                (tokens,) = arguments
                yield MemoryPoint(tokens=tokens, peak_bytes=int(short(tokens)), seconds=tokens / rate)
                return
            tokens, budget = arguments
            self.confirmed.append(tokens)
            need = int(truth(tokens))
            if need > budget:
                yield Confirmation(tokens=tokens, fits=False, excess_bytes=need - budget, reason="refused")
            else:
                yield Confirmation(tokens=tokens, fits=True, peak_bytes=need, seconds=tokens / rate)

        self.run = run


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    path = tmp_path_factory.mktemp("model")
    random_llama("25M", torch.float32).save_pretrained(path)
    subject = Subject(path, "float32", "cpu", False, 1, 256)
    return Search(subject, read_model_files(path), 100 * MIB, 1e9, 1e9, lambda text: None)


def replaced(search: Search, **changes) -> Search:
    return Search(**{name: getattr(search, name) for name in Search.__slots__} | changes)


def test_an_affine_mode_is_predicted_and_confirmed_at_once(search: Search) -> None:
    made = Made(lambda n: 5 * MIB + 40_000 * n)
    found = profile_mode("full", replaced(search, run=made.run))
    assert found.predicted_tokens == found.max_tokens == int(CHOSEN * 95 * MIB / 40_000)
    assert found.limited_by == "memory"
    assert made.confirmed == [found.predicted_tokens]
    assert found.fit_over_law == pytest.approx(40_000 / found.law_token)
    assert not found.notes


def test_a_prediction_that_does_not_fit_is_shrunk_and_told(search: Search) -> None:
    made = Made(lambda n: 12 * MIB + 40_000 * n, short=lambda n: 5 * MIB + 40_000 * n)
    found = profile_mode("full", replaced(search, run=made.run))
    assert 1 < len(made.confirmed) <= 3
    assert found.max_tokens == pytest.approx(88 * MIB / 40_000, rel=0.03)
    assert found.max_tokens <= 88 * MIB / 40_000
    assert "did not fit" in found.notes[0]


def test_a_prediction_far_too_low_is_raised(search: Search) -> None:
    made = Made(lambda n: 5 * MIB + 30_000 * n, short=lambda n: 5 * MIB + 40_000 * n)
    found = profile_mode("full", replaced(search, run=made.run))
    assert found.max_tokens == pytest.approx(95 * MIB / 30_000, rel=0.04)


def test_lengths_whose_peak_is_at_another_place_do_not_bend_the_line(search: Search) -> None:
    made = Made(lambda n: max(20 * MIB + 10_000 * n, 5 * MIB + 40_000 * n))
    assert profile_mode("full", replaced(search, run=made.run)).predicted_tokens == int(CHOSEN * 95 * MIB / 40_000)


def test_a_long_confirming_run_is_capped_and_told(search: Search) -> None:
    made = Made(lambda n: 5 * MIB + 4_000 * n, rate=1000)
    found = profile_mode("hybrid", replaced(search, run=made.run, confirm_seconds=20.0))
    assert found.capped
    assert made.confirmed == [found.max_tokens]
    assert found.max_tokens < found.predicted_tokens == int(CHOSEN * 95 * MIB / 4_000)
    assert "which is not the maximum" in found.notes[0]


def test_no_confirming_run_is_made_where_none_is_wanted(search: Search) -> None:
    made = Made(lambda n: 5 * MIB + 40_000 * n)
    found = profile_mode("full", replaced(search, run=made.run, confirm_seconds=0.0))
    assert (found.max_tokens, made.confirmed) == (None, [])
    assert found.predicted_tokens == int(CHOSEN * 95 * MIB / 40_000)


def test_the_models_own_limit_is_named(search: Search) -> None:
    made = Made(lambda n: 5 * MIB + 100 * n)
    found = profile_mode("hybrid", replaced(search, run=made.run))
    assert (found.predicted_tokens, found.max_tokens, found.limited_by) == (1 << 17, 1 << 17, "model")


def test_a_budget_for_nothing_is_a_note(search: Search) -> None:
    found = profile_mode("hybrid", replaced(search, budget=1 * MIB))
    assert found.predicted_tokens is None
    assert "does not even hold" in found.notes[0]


def test_a_child_that_dies_is_a_note(search: Search) -> None:
    def run(task, subject, mode, tokens, *arguments, timeout=None):
        if task is measure and tokens < probed[-1]:
            yield MemoryPoint(tokens=tokens, peak_bytes=tokens * 40_000, seconds=0.1)
        raise ChildEnded("the process was ended by signal 9 (SIGKILL)")

    law = mode_law("full", search.files.config, search.files.dtype, search.subject.chunk_tokens)
    probed = probe_lengths(law, search.budget, search.files.max_length, search.subject.chunk_tokens)
    found = profile_mode("full", replaced(search, run=run))
    assert found.max_tokens is None
    assert "ended early" in found.notes[0]
    assert "no confirming run stayed" in found.notes[-1]
    assert all("SIGKILL" in str(each.reason) for each in found.confirmations)


# With real processes.

BUDGETS = {"full": 96 * MIB, "hybrid": 32 * MIB}


@pytest.fixture(scope="module")
def profiled(search: Search):
    """The result of a mode within its budget, in chunks that are small beside the prompts."""
    subject = Subject(search.subject.path, "float32", "cpu", False, 1, 64)

    @cache
    def profile(mode: str) -> tuple[ModeResult, Search]:
        small = replaced(search, subject=subject, budget=BUDGETS[mode])
        return profile_mode(mode, small), small

    return profile


def bisect(send, subject: Subject, mode: str, budget: int, low: int, high: int) -> None:
    """Sends the longest length between `low` and `high` that runs within the budget, to 1.5 % of `high`."""
    prefill, prompt = prepare_prefill(subject, mode)
    with enforced(subject.device, budget):
        while high - low > 0.015 * high:
            middle = (low + high) // 2
            try:
                prefill(prompt(middle))
                low = middle
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                high = middle
    send(low)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["full", "hybrid"])
def test_the_prediction_is_near_the_longest_found_by_bisection(profiled, mode: str) -> None:
    found, search = profiled(mode)
    predicted = found.predicted_tokens
    low, high = int(0.9 * predicted), int(1.1 * predicted)
    with closing(in_child(bisect, search.subject, mode, search.budget, low, high)) as result:
        longest = next(result)
    assert predicted == pytest.approx(longest, rel=0.05), found
    # an allocator's measured peak differs a little from run to run, so the prediction itself may just not fit
    last = found.confirmations[-1]
    assert (last.tokens, last.fits) == (found.max_tokens, True), found
    assert found.max_tokens == pytest.approx(longest, rel=0.05), found


@pytest.mark.nightly
def test_full_fails_in_the_budget_of_hybrid_at_a_quarter_of_the_length(profiled) -> None:
    hybrid, search = profiled("hybrid")
    confirmed = hybrid.confirmations[-1]
    assert confirmed.tokens == hybrid.max_tokens
    assert confirmed.peak_bytes <= search.budget
    refused = confirming_run("full", hybrid.max_tokens // 4, search, 60.0)
    assert not refused.fits
    assert "memory" in refused.reason


def test_an_error_in_the_walk_is_no_prompt_that_does_not_fit(search: Search) -> None:
    def failing(task, subject, mode, *arguments, timeout=None):
        if task is confirm:
            raise ChildFailed("TypeError: no such argument")
        yield MemoryPoint(tokens=arguments[0], peak_bytes=5 * MIB + 40_000 * arguments[0], seconds=1.0)

    with pytest.raises(ChildFailed, match="no such argument"):
        profile_mode("hybrid", replaced(search, run=failing))
    # transformers' own forward may fail on an architecture
    found = profile_mode("full", replaced(search, run=failing))
    assert found.confirmations == []
    assert found.notes == ["transformers fails on this model in this mode: TypeError: no such argument"]

"""The curve of seconds: the packs that are timed, what is made of them, what it predicts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.workloads import prompts_with_histories
from prefillcli.forecast.profile import MOST_ERROR, features
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.tools.profile.measuring import ATTEMPTS, ROUNDS, curve_lengths, measure_curve, random_prompt
from tests.unit.tools.profile.making import made_profile

WINDOWS: list[tuple[int | None, int]] = [(None, 3)]
COSTS = (2e-4, 1e-4, 1e-8)  # of a token, a prompt's end, a pair
LENGTHS = [16 * 2**n for n in range(9)]


class Machine:
    """A pack takes what it must, and a constant, times what other programs do in this run."""

    def __init__(self, disturbance: Callable[[int], float] = lambda run: 1.0) -> None:
        self._disturbance = disturbance
        self.runs = 0

    def __call__(self, pack: Pack) -> float:
        self.runs += 1
        return (0.004 + float(np.dot(COSTS, features(pack, WINDOWS)))) * self._disturbance(self.runs)


PACKS = len(LENGTHS) + 5
JOBS = {
    "short rows": [random_prompt(24, 5000, seed) for seed in range(300)],
    "long rows": [random_prompt(3000, 5000, seed) for seed in range(4)],
    "beyond what was timed": [random_prompt(12_000, 5000)],
    "histories": prompts_with_histories(5, 20, 900, 30, 5000),
}


@pytest.mark.parametrize("job", JOBS)
def test_seconds_of_jobs_of_any_shape_are_predicted(job: str) -> None:
    machine = Machine()
    curve = measure_curve(machine, LENGTHS, 5000, WINDOWS)
    assert machine.runs == ROUNDS * PACKS
    assert (curve.rounds, curve.error) == (ROUNDS, pytest.approx(0, abs=0.02))
    plan = make_plan(JOBS[job], Limits(4096, 1 << 30, held_tokens=4096))
    assert curve.seconds(plan) == pytest.approx(sum(map(Machine(), plan.packs)), rel=0.1)


def test_noise_and_rounds_that_others_disturbed_hardly_matter() -> None:
    rng = np.random.default_rng(0)
    noise = Machine(
        lambda run: float(np.exp(abs(rng.normal(0, 2)))) if run % (2 * PACKS) < PACKS else rng.normal(1, 0.03)
    )
    curve = measure_curve(noise, LENGTHS, 5000, WINDOWS)
    plan = make_plan(JOBS["histories"], Limits(4096, 1 << 30))
    assert curve.seconds(plan) == pytest.approx(sum(map(Machine(), plan.packs)), rel=0.25)


def test_a_machine_that_stays_busy_is_timed_again_and_gives_no_good_curve() -> None:
    rng = np.random.default_rng(0)
    busy = Machine(lambda run: float(np.exp(rng.normal(0, 3))))
    curve = measure_curve(busy, LENGTHS, 5000, WINDOWS)
    assert busy.runs == ATTEMPTS * ROUNDS * PACKS
    assert curve.error > MOST_ERROR


def test_a_curve_never_falls() -> None:
    rng = np.random.default_rng(1)
    curve = measure_curve(Machine(lambda run: float(rng.uniform(1, 3))), LENGTHS, 5000, WINDOWS)
    seconds = [curve.request_seconds(tokens) for tokens in range(1, 20_000, 37)]
    assert seconds == sorted(seconds)


def test_lengths_follow_from_the_speed_and_from_what_fits() -> None:
    assert curve_lengths(lambda tokens: tokens / 1000, 1 << 20, 60.0)[-1] == 2048
    assert curve_lengths(lambda tokens: tokens / 1000, 300, 60.0) == [16, 32, 64, 128, 256]
    assert curve_lengths(lambda tokens: 10.0 * tokens, 1 << 20, 60.0) == [16, 32, 64, 128], "at least a few"


def seen(pack: Pack, window: int | None) -> int:
    """Keys that a pack's tokens see in one layer, counted one by one."""
    count = 0
    for node in range(len(pack.parents)):
        for depth in range(pack.starts[node], pack.starts[node] + pack.offsets[node + 1] - pack.offsets[node]):
            count += min(depth + 1, window) if window else depth + 1
    return count


@pytest.mark.parametrize("window", [None, 3, 17, 1000])
def test_features_of_packs_are_counts(window: int | None) -> None:
    prompts = prompts_with_histories(1, 3, 20, 9, 99)
    for pack in make_plan(prompts, Limits(30, 1000, held_tokens=1000)).packs:
        assert features(pack, [(window, 5)]) == (len(pack.tokens), len(pack.reads), 5 * seen(pack, window))


@pytest.mark.parametrize("cached", [0, 10, 64, 199])
def test_seconds_of_a_request_are_those_of_its_pack(cached: int) -> None:
    curve, prompt = made_profile().completion, random_prompt(200, 5000)
    apart = Limits(1, 1 << 30, held_tokens=1 << 30)
    pack = make_plan([prompt[:cached], prompt] if cached else [prompt], apart).packs[-1]
    assert pack.held_tokens == cached
    assert curve.request_seconds(200, cached) == pytest.approx(curve.pack_seconds(pack))


def test_tokens_within_a_time_are_the_most_that_it_allows() -> None:
    profile = made_profile()
    for seconds in (1e-9, 0.01, 1.0, 1e6):
        tokens = profile.tokens_within(seconds, most=50_000)
        assert 1 <= tokens <= 50_000
        assert profile.completion.request_seconds(tokens) <= seconds or tokens == 1
        if tokens < 50_000:
            assert profile.completion.request_seconds(tokens + 1) > seconds

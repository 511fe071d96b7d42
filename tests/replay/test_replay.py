"""What a replay of the papers' workloads reports."""

from __future__ import annotations

import numpy as np
import pytest

from prefillcli.forecast.replay_results import Replay
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.replay.replay import RATES, replay
from prefillcli.replay.workloads import WORKLOADS
from tests.replay.test_server import completion

SPEED = 10_000.0  # tokens a second
LIMITS = Limits(65_536, 1 << 30, held_tokens=1 << 30)


def made(name: str, cache_tokens: int = 40_000, scale: float = 1.0) -> Replay:
    model = completion(per_token=1 / SPEED)
    return replay(WORKLOADS[name](scale), model, limits=LIMITS, cache_tokens=cache_tokens, fairness=(0.05, 0.0, 0.5))


@pytest.fixture(scope="module")
def mixed() -> Replay:
    return made("post-recommendation-mixed")


def test_policies_stand_side_by_side(mixed: Replay) -> None:
    fifo, srjf, calibrated, plan = mixed.at_once
    assert [each.policy for each in mixed.at_once] == ["fifo", "srjf", "srjf-calibrated", "prefix-tree"]
    assert plan.computed_tokens == mixed.unique_tokens <= calibrated.computed_tokens <= srjf.computed_tokens
    assert srjf.computed_tokens < fifo.computed_tokens < mixed.tokens
    for each in mixed.at_once:
        assert each.seconds == pytest.approx(each.computed_tokens / SPEED)
        assert each.throughput == pytest.approx(1000 / each.seconds)
        assert each.cached_share == pytest.approx(1 - each.computed_tokens / mixed.tokens)
        assert each.mean_latency < each.p99_latency <= each.seconds
    assert plan.hit_requests == calibrated.hit_requests == 980


def test_rates_go_from_an_idle_to_a_flooded_server(mixed: Replay) -> None:
    rates = [[point.rate for point in curve.points] for curve in mixed.curves]
    assert rates[0] == rates[1] == rates[2]
    assert len(rates[0]) == RATES
    assert rates[0][0] == pytest.approx(mixed.uncached_rate / 2) == pytest.approx(1000 / mixed.tokens * SPEED / 2)
    assert rates[0][-1] == pytest.approx(4 * mixed.result("srjf-calibrated").throughput)
    fifo, _, calibrated = mixed.curves
    assert all(b.mean_latency <= a.mean_latency for a, b in zip(fifo.points, calibrated.points, strict=True))
    assert fifo.points[0].mean_latency < fifo.points[-1].mean_latency / 20


def test_lambda_trades_the_mean_for_the_worst_case() -> None:
    found = made("credit-verification")
    usual, none, much = found.distributions
    assert none.mean_latency < usual.mean_latency < much.mean_latency
    assert none.p99_latency > usual.p99_latency > much.p99_latency
    assert [each.tokens_per_second for each in (usual, none, much)] == pytest.approx([500, 0, 5000])
    for each in found.distributions:
        assert each.latencies == sorted(each.latencies)
        assert each.latencies[99] == each.p99_latency


def test_nothing_is_shared_between_users_of_credit_verification() -> None:
    found = made("credit-verification")
    assert {each.computed_tokens for each in found.at_once} == {found.tokens}
    assert {each.hit_requests for each in found.at_once} == {0}


def test_a_replay_is_the_same_every_time(mixed: Replay) -> None:
    assert made("post-recommendation-mixed") == mixed


@pytest.mark.parametrize("cached", [0, 10, 63, 64, 65, 199])
def test_seconds_of_a_request_are_those_of_its_pack(cached: int) -> None:
    model = completion(per_pack=3.0, per_token=0.5, per_read=0.25, per_pair=0.001)
    prompt = np.arange(200, dtype=np.int32)
    apart = Limits(1, 1 << 30, held_tokens=1 << 30)
    pack = make_plan([prompt[:cached], prompt] if cached else [prompt], apart).packs[-1]
    assert pack.held_tokens == cached
    assert model.request_seconds(200, cached) == pytest.approx(model.pack_seconds(pack))

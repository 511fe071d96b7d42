"""The simulated server against brute force, formulas, and the example of PrefillOnly's figure 5."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefillcli.forecast.completion_model import CompletionModel
from prefillcli.plan.pack import Limits
from prefillcli.replay.cache import PrefixCache
from prefillcli.replay.server import POLICIES, run_plan, serve
from prefillcli.replay.workloads import (
    Workload,
    credit_verification,
    post_recommendation,
    post_recommendation_mixed,
)

ALL = 1 << 40


def missed(input_tokens: int, cached_tokens: int) -> float:
    """A second for each token that is computed."""
    return float(input_tokens - cached_tokens)


def of_tokens(prompts: list[list[int]], together: int = 1) -> Workload:
    """A workload of token sequences: every token is a node of the trie."""
    numbers: dict[tuple[int, ...], int] = {}
    paths = [[numbers.setdefault(tuple(p[: end + 1]), len(numbers)) for end in range(len(p))] for p in prompts]
    depth = max(map(len, prompts))
    filled = [path + [len(numbers)] * (depth - len(path)) for path in paths]
    return Workload("made", np.array([1] * len(numbers) + [0]), np.array(filled), together)


some_prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=12)
some_gaps = st.lists(st.floats(0, 8), min_size=12, max_size=12)


class TokenByToken:
    """A prefix cache as a list of prefixes, one for each token, the next to be dropped first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.held = capacity, []

    def hit(self, prompt: list[int]) -> int:
        length = 0
        while length < len(prompt) and tuple(prompt[: length + 1]) in self.held:
            length += 1
        return length

    def add(self, prompt: list[int]) -> None:
        own = [tuple(prompt[:end]) for end in range(len(prompt), 0, -1)]
        self.held = [each for each in self.held if each not in own] + own
        self.held = self.held[max(len(self.held) - self.capacity, 0) :]


def brute_force(prompts, policy, arrivals, capacity, fairness):
    """Order and cached tokens, moment by moment."""
    cache, now, order, cached = TokenByToken(capacity), 0.0, [], {}
    seen: dict[int, int] = {}

    def look() -> None:
        for number, moment in enumerate(arrivals):
            if moment <= now and number not in seen:
                seen[number] = cache.hit(prompts[number])

    while len(order) < len(prompts):
        look()
        waiting = sorted(set(seen) - set(order))
        if not waiting:
            now = min(moment for number, moment in enumerate(arrivals) if number not in seen)
            continue

        scores = {
            "fifo": lambda number: number,
            "srjf": lambda number: len(prompts[number]) - seen[number],
            "srjf-calibrated": lambda number: (
                len(prompts[number]) - cache.hit(prompts[number]) - fairness * (now - arrivals[number])  # noqa: B023
            ),
        }
        request = min(waiting, key=lambda number: (scores[policy](number), number))
        order.append(request)
        cached[request] = min(cache.hit(prompts[request]), len(prompts[request]) - 1)
        now += missed(len(prompts[request]), cached[request])
        look()
        cache.add(prompts[request])
    return order, [cached[number] for number in range(len(prompts))]


@given(some_prompts, some_gaps, st.sampled_from(POLICIES), st.integers(0, 20), st.sampled_from([0.0, 0.5, 3.0]))
def test_it_is_what_brute_force_finds(prompts, gaps, policy, capacity, fairness) -> None:
    arrivals = np.cumsum(np.round(gaps[: len(prompts)]))  # whole seconds: both sides of a tie are exact
    ran = serve(of_tokens(prompts), policy, arrivals, cache_tokens=capacity, seconds=missed, fairness=fairness)
    order, cached = brute_force(prompts, policy, arrivals.tolist(), capacity, fairness)
    assert ran.order == order
    assert ran.cached.tolist() == cached


@given(some_prompts, st.integers(0, 20))
def test_the_cache_holds_what_a_list_of_tokens_holds(prompts, capacity) -> None:
    workload, naive = of_tokens(prompts), TokenByToken(capacity)
    cache = PrefixCache(workload.lengths, capacity)
    for path, prompt in zip(workload.paths, prompts, strict=True):
        cache.add(path)
        naive.add(prompt)
        assert cache.cached(workload.paths).tolist() == [naive.hit(each) for each in prompts]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'sjf' is not a policy"):
        serve(of_tokens([[1]]), "sjf", np.zeros(1), cache_tokens=1, seconds=missed)


@given(some_prompts, some_gaps, st.sampled_from(POLICIES), st.integers(0, 20))
def test_every_request_is_served_once_and_nobody_waits_for_nothing(prompts, gaps, policy, capacity) -> None:
    arrivals = np.cumsum(gaps[: len(prompts)])
    workload = of_tokens(prompts)
    ran = serve(workload, policy, arrivals, cache_tokens=capacity, seconds=missed, fairness=0.1)
    assert sorted(ran.order) == list(range(len(prompts)))
    assert ran.ends - ran.begins == pytest.approx(workload.tokens - ran.cached)
    assert (ran.begins >= arrivals).all()
    before = 0.0
    for request in ran.order:
        idle = ran.begins[request] - before
        assert idle >= 0
        if idle > 0:  # then nobody was there before
            assert ran.begins[request] == arrivals[request]
            assert not ((arrivals < ran.begins[request]) & (ran.begins >= ran.begins[request])).any()
        before = ran.ends[request]


def test_the_example_of_figure_5() -> None:
    # A < C < B < D; A and D share a prefix, and so do C and B; the cache holds what one request left
    lengths = np.array([600, 700, 400, 320, 310, 430, 0])  # prefix of A and D, of B and C; the rest of A, B, C, D
    workload = Workload("figure 5", lengths, np.array([[0, 2], [1, 3], [1, 4], [0, 5]]))
    assert workload.tokens.tolist() == [1000, 1020, 1010, 1030]
    found = {}
    for policy in POLICIES:
        ran = serve(workload, policy, np.zeros(4), cache_tokens=1000, seconds=missed)
        found[policy] = "".join("ABCD"[request] for request in ran.order), int((ran.cached > 0).sum())
    assert found == {"fifo": ("ABCD", 1), "srjf": ("ACBD", 1), "srjf-calibrated": ("ADCB", 2)}


def test_what_runs_when_a_request_arrives_is_not_cached_yet() -> None:
    # while A runs, B (A's prefix and one token more) and the shorter C arrive: calibration alone sees what A leaves
    workload = Workload("made", np.array([10, 1, 8, 0]), np.array([[0, 3], [0, 1], [2, 3]]))
    arrivals = np.array([0.0, 5.0, 6.0])
    once, again = (
        serve(workload, policy, arrivals, cache_tokens=100, seconds=missed) for policy in ("srjf", "srjf-calibrated")
    )
    assert (once.order, again.order) == ([0, 2, 1], [0, 1, 2])


def poisson(requests: int, rate: float) -> np.ndarray:
    return np.random.default_rng(1).exponential(1 / rate, requests).cumsum()


def unshared(requests: int, tokens: int = 1) -> Workload:
    return Workload("unshared", np.array([tokens] * requests + [0]), np.arange(requests)[:, None])


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_the_wait_for_requests_of_one_size_is_that_of_an_m_d_1_queue(load: float) -> None:
    arrivals = poisson(40_000, load)
    ran = serve(unshared(len(arrivals)), "fifo", arrivals, cache_tokens=0, seconds=lambda tokens, cached: 1.0)
    assert (ran.begins - arrivals).mean() == pytest.approx(load / (2 * (1 - load)), rel=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_littles_law(policy: str) -> None:
    """The mean number of requests in the system is the arrival rate times the mean latency."""
    workload = post_recommendation_mixed(0.1)
    arrivals = workload.arrivals(1 / 500)
    ran = serve(workload, policy, arrivals, cache_tokens=5000, seconds=missed)
    moments = np.linspace(0, ran.ends.max(), 100_000)
    there = np.searchsorted(np.sort(arrivals), moments) - np.searchsorted(np.sort(ran.ends), moments)
    rate = len(arrivals) / ran.ends.max()
    assert there.mean() == pytest.approx(rate * (ran.ends - arrivals).mean(), rel=0.01)


def test_a_very_large_lambda_is_first_come_first_served() -> None:
    workload = post_recommendation_mixed(0.1)
    arrivals = workload.arrivals(1 / 200)
    options = {"cache_tokens": 3000, "seconds": missed}
    fair = serve(workload, "srjf-calibrated", arrivals, fairness=1e9, **options)
    assert fair.order == serve(workload, "fifo", arrivals, **options).order == list(range(1000))


@pytest.mark.parametrize("cache_tokens", [20_000, 50_000, 150_000])
@pytest.mark.parametrize("rate", [2.0, 20.0, math.inf])
@pytest.mark.parametrize("make", [post_recommendation, post_recommendation_mixed])
def test_calibration_computes_no_more_tokens_where_requests_wait(make, rate: float, cache_tokens: int) -> None:
    workload = make()
    arrivals = workload.arrivals(rate / 10_000)  # `missed` is the time of a server that computes a token a second
    once, again = (
        serve(workload, policy, arrivals, cache_tokens=cache_tokens, seconds=missed)
        for policy in ("srjf", "srjf-calibrated")
    )
    assert again.cached.sum() >= once.cached.sum()


def completion(**costs: float) -> CompletionModel:
    fields = {"per_pack": 0.0, "per_token": 0.0, "per_read": 0.0, "per_pair": 0.0} | costs
    return CompletionModel(
        base=0, per_input=0, per_cached=0, pearson=1, pearson_proxy=1, windows=[(None, 3), (64, 2)], **fields
    )


def test_the_offline_plan_computes_every_node_once_where_one_pack_holds_all() -> None:
    workload = post_recommendation(0.01)
    ran = run_plan(workload, Limits(ALL, ALL), completion(per_token=1.0))
    assert ran.computed_tokens == workload.unique_tokens
    assert ran.ends.tolist() == [workload.unique_tokens] * 1000
    assert ran.hits == 980


@given(some_prompts, st.integers(6, 30))
def test_the_offline_plan_computes_every_node_once_where_paths_are_held(prompts, pack) -> None:
    workload = of_tokens(prompts)
    ran = run_plan(workload, Limits(pack, ALL, held_tokens=ALL), completion(per_token=1.0))
    assert workload.unique_tokens == len({tuple(p[: end + 1]) for p in prompts for end in range(len(p))})
    assert ran.computed_tokens == workload.unique_tokens == ran.ends.max()
    assert (ran.ends > 0).all()


def test_the_offline_plan_computes_paths_again_where_nothing_is_held() -> None:
    workload = post_recommendation(0.01)
    again = run_plan(workload, Limits(100, 1000), completion(per_token=1.0))
    assert workload.unique_tokens < again.computed_tokens <= workload.tokens.sum()


def test_the_papers_workloads_have_its_sizes() -> None:
    posts, credit = post_recommendation(), credit_verification()
    assert (len(posts.paths), len(credit.paths)) == (1000, 60)
    assert posts.tokens.sum() == pytest.approx(14e6, rel=0.05)
    assert credit.tokens.sum() == pytest.approx(3e6, rel=0.05)
    assert 11_000 <= posts.lengths[:20].min() <= posts.lengths[:20].max() <= 17_000
    assert 40_000 <= credit.tokens.min() <= credit.tokens.max() <= 60_000
    mixed = post_recommendation_mixed()
    assert sorted(mixed.paths.tolist()) == posts.paths.tolist() != mixed.paths.tolist()


def test_arrivals_have_the_rate_and_come_together() -> None:
    posts, credit = post_recommendation(), unshared(20_000)
    assert np.unique(posts.arrivals(3.0)).size == 20
    assert np.diff(credit.arrivals(4.0)).mean() == pytest.approx(0.25, rel=0.02)
    last = [posts.arrivals(3.0, seed)[-1] for seed in range(400)]
    assert np.mean(last) == pytest.approx(1000 / 3, rel=0.05)
    assert not posts.arrivals(math.inf).any()
    assert posts.arrivals(2.0) == pytest.approx(posts.arrivals(1.0) / 2)

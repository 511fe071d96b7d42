"""A workload under each policy, at each rate and with each lambda: figures 6, 7 and 11 of PrefillOnly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.forecast.replay_results import OFFLINE, Curve, CurvePoint, Distribution, PolicyResult, Replay
from prefillcli.plan.pack import Limits
from prefillcli.replay.server import POLICIES, Served, run_plan, serve
from prefillcli.replay.workloads import FloatArray, Workload

if TYPE_CHECKING:
    from prefillcli.forecast.completion_model import CompletionModel

RATES = 8


def replay(
    workload: Workload, completion: CompletionModel, *, limits: Limits, cache_tokens: int, fairness: Sequence[float]
) -> Replay:
    """Serve `workload` with a cache of `cache_tokens`; `limits` are what fits a pack of the offline plan.

    `fairness` are lambdas in shares of the tokens that the machine computes in a second; the first one is that of
    srjf-calibrated where one is needed. Rates go from half of what the server gets through without a cache up to four
    times what it does under srjf-calibrated when all requests are there at once (the paper's x).
    """
    tokens, seconds = workload.tokens, lru_cache(maxsize=None)(completion.request_seconds)
    uncached = sum(seconds(length, 0) for length in tokens.tolist())
    speed = int(tokens.sum()) / uncached

    def served(policy: str, rate: float, share: float = fairness[0]) -> Served:
        arrivals = workload.arrivals(rate)
        return serve(workload, policy, arrivals, cache_tokens=cache_tokens, seconds=seconds, fairness=share * speed)

    found = Replay(
        workload=workload.name,
        requests=len(tokens),
        together=workload.together,
        tokens=int(tokens.sum()),
        unique_tokens=workload.unique_tokens,
        longest=int(tokens.max()),
        cache_tokens=cache_tokens,
        fairness=fairness[0],
        uncached_rate=len(tokens) / uncached,
        distribution_rate=0.0,
    )
    for policy in POLICIES:
        ran = served(policy, math.inf)
        computed = int((tokens - ran.cached).sum())
        found.at_once.append(_result(found, policy, ran.ends, computed, int(np.count_nonzero(ran.cached))))
    plan = run_plan(workload, limits, completion)
    found.at_once.append(_result(found, OFFLINE, plan.ends, plan.computed_tokens, plan.hits))

    best = found.result("srjf-calibrated").throughput
    rates = np.geomspace(found.uncached_rate / 2, 4 * best, RATES).tolist()
    found.curves = [
        Curve(policy=policy, points=[_point(rate, served(policy, rate)) for rate in rates]) for policy in POLICIES
    ]
    found.distribution_rate = best
    for share in fairness:
        latency = _latency(served("srjf-calibrated", best, share))
        found.distributions.append(
            Distribution(
                fairness=share,
                tokens_per_second=share * speed,
                mean_latency=float(latency.mean()),
                p99_latency=float(np.percentile(latency, 99)),
                latencies=np.percentile(latency, range(101)).tolist(),
            )
        )
    return found


def _latency(ran: Served) -> FloatArray:
    latency: FloatArray = ran.ends - ran.arrivals
    return latency


def _result(of: Replay, policy: str, latency: FloatArray, computed: int, hits: int) -> PolicyResult:
    last = float(latency.max())
    return PolicyResult(
        policy=policy,
        computed_tokens=computed,
        cached_share=1 - computed / of.tokens,
        hit_requests=hits,
        seconds=last,
        mean_latency=float(latency.mean()),
        p99_latency=float(np.percentile(latency, 99)),
        throughput=of.requests / last,
    )


def _point(rate: float, ran: Served) -> CurvePoint:
    latency = _latency(ran)
    return CurvePoint(rate=rate, mean_latency=float(latency.mean()), p99_latency=float(np.percentile(latency, 99)))

"""What a replay found, for `profile.json`."""

from __future__ import annotations

from pydantic import BaseModel, Field

OFFLINE = "prefix-tree"


class PolicyResult(BaseModel):
    """All requests, which are there from the beginning, under one policy."""

    policy: str
    computed_tokens: int
    cached_share: float  # of the requests' tokens, not computed
    hit_requests: int  # with cached tokens
    seconds: float  # to the end of the last request
    mean_latency: float  # seconds from arrival to the end
    p99_latency: float
    throughput: float  # requests a second


class CurvePoint(BaseModel):
    """Latency at one arrival rate."""

    rate: float  # requests a second
    mean_latency: float
    p99_latency: float


class Curve(BaseModel):
    """Latency over the arrival rate."""

    policy: str
    points: list[CurvePoint]


class Distribution(BaseModel):
    """Latency under srjf-calibrated with one lambda."""

    fairness: float  # lambda / tokens that the machine computes in a second
    tokens_per_second: float  # lambda
    mean_latency: float
    p99_latency: float
    latencies: list[float]  # that 0, 1, ... 100 % of the requests do not exceed


class Replay(BaseModel):
    """One workload on a simulated server."""

    workload: str
    requests: int
    together: int  # requests that arrive as one
    tokens: int  # of all requests
    unique_tokens: int
    longest: int  # tokens
    cache_tokens: int
    fairness: float  # of srjf-calibrated, as in Distribution
    uncached_rate: float  # requests a second without a cache
    distribution_rate: float  # requests a second at which distributions were taken
    at_once: list[PolicyResult] = Field(default_factory=list)
    curves: list[Curve] = Field(default_factory=list)
    distributions: list[Distribution] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)

    def result(self, policy: str) -> PolicyResult:
        """With all requests at once."""
        return next(each for each in self.at_once if each.policy == policy)

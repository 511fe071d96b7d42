"""`python -m benchmarks.replay`: PrefillOnly's workloads on a simulated server, beside the offline plan.

The server computes one request at a time, as PrefillOnly does (section 6.1), with the times that `prefill profile` has
measured on this machine. All requests at once show how much each policy computes; arrival rates and lambdas give the
points of figures 6, 7 and 11. The simulation is the same every time. Tables go to stderr, all numbers as one line of
JSON to stdout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log
from prefillcli.forecast.profile import DEFAULT_PROFILE, Curve, Profile
from prefillcli.models.law import memory_law, pack_limits
from prefillcli.models.open import open_model
from prefillcli.options.commands import ProfileSettings
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Queue, cut_packs
from prefillcli.plan.trie import TrieNode
from prefillcli.report.section import three_digits

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

POSTS = 50
POST_TOKENS = 150
POLICIES = ("fifo", "srjf", "srjf-calibrated")
OFFLINE = "prefix-tree"
RATES = 8


NumberArray = npt.NDArray[np.integer[Any]] | npt.NDArray[np.floating[Any]]


def shortest_job(
    input_tokens: NumberArray,
    cached_tokens: NumberArray,
    waited: NumberArray | float = 0.0,
    *,
    fairness: float = 0.0,
) -> int:
    """The number of the prompt to compute next: algorithm 1. Arrays have an entry for each waiting prompt, in order.

    `cached_tokens` are as of now for shortest remaining job first with continuous calibration, and as of each prompt's
    arrival without. A prompt's completion time is the tokens that are not cached. Having waited for a time takes
    `fairness` (the paper's lambda) times as much off it. Of equal prompts the first is taken.
    """
    return int(np.argmin(input_tokens - cached_tokens - fairness * waited))


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in the order they arrive, as paths in a trie.

    `lengths` [nodes] are the tokens of the trie's nodes; the last node is empty. `paths` [requests, depth] are the
    nodes of each request, root first, filled up with the empty node. `together` requests at a time arrive as one.
    """

    lengths: IntArray
    paths: IntArray
    together: int = 1

    @property
    def tokens(self) -> IntArray:
        """Input tokens [requests]."""
        tokens: IntArray = self.lengths[self.paths].sum(axis=1)
        return tokens

    @property
    def unique_tokens(self) -> int:
        """Tokens of the trie: the least that must be computed."""
        return int(self.lengths[np.unique(self.paths)].sum())

    def arrivals(self, rate: float, seed: int = 0) -> FloatArray:
        """Seconds at which the requests arrive [requests]: a Poisson process of `rate` requests a second.

        An infinite rate is all at once. Other rates stretch the same process.
        """
        count = len(self.paths) // self.together
        moments = np.random.default_rng((seed, 1)).exponential(self.together, count).cumsum()
        return np.repeat(moments, self.together) / rate


def post_recommendation(scale: float = 1.0, seed: int = 0) -> Workload:
    """20 users with a history each, who arrive with a request for each of 50 posts (table 1)."""
    histories = _histories(20, scale, seed)
    posts = np.full(len(histories) * POSTS, max(round(POST_TOKENS * scale), 1))
    users = np.repeat(np.arange(len(histories)), POSTS)
    paths = np.stack([users, len(histories) + np.arange(len(posts))], axis=1)
    return Workload(np.concatenate([histories, posts, [0]]), paths, together=POSTS)


def post_recommendation_mixed(scale: float = 1.0, seed: int = 0) -> Workload:
    """The same requests one by one, those of all users in random order."""
    apart = post_recommendation(scale, seed)
    order = np.random.default_rng(seed).permutation(len(apart.paths))
    return replace(apart, paths=apart.paths[order], together=1)


def credit_verification(scale: float = 1.0, seed: int = 0) -> Workload:
    """60 users with one long request each; nothing is shared (table 1)."""
    lengths = np.random.default_rng(seed).integers(40_000, 60_000, 60, endpoint=True)
    lengths = np.maximum((lengths * scale).round().astype(np.int64), 1)
    return Workload(np.append(lengths, 0), np.arange(len(lengths))[:, None])


def _histories(users: int, scale: float, seed: int) -> IntArray:
    """Normally distributed lengths, mean 14,000 and deviation 3,000 tokens; those within one deviation."""
    drawn = np.random.default_rng(seed).normal(14_000, 3_000, 10 * users)
    inside = drawn[np.abs(drawn - 14_000) <= 3_000][:users]
    return np.maximum((inside * scale).round().astype(np.int64), 1)


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "post-recommendation": post_recommendation,
    "post-recommendation-mixed": post_recommendation_mixed,
    "credit-verification": credit_verification,
}


class PrefixCache:
    """Holds the K,V of up to `capacity` tokens; beyond that the least recently used are dropped.

    A whole path is used at once, and its last tokens are dropped first. So prefixes outlive their suffixes, and a path
    longer than the cache keeps its first tokens (suffix discarding, PrefillOnly 5.1).
    """

    def __init__(self, lengths: IntArray, capacity: int) -> None:
        self._lengths = lengths
        self._room = capacity  # tokens; below 0 while too many are held
        self._held = np.zeros_like(lengths)  # first tokens of each node
        self._used: dict[int, None] = {}  # nodes that are held, least recently used first

    def cached(self, paths: IntArray) -> IntArray:
        """Tokens held of `paths` [..., depth], root first."""
        held: IntArray = self._held[paths].sum(axis=-1)
        return held

    def add(self, path: IntArray) -> None:
        """A path was computed."""
        for node in path[::-1].tolist():
            self._room -= int(self._lengths[node] - self._held[node])
            self._held[node] = self._lengths[node]
            self._used.pop(node, None)
            self._used[node] = None
        while self._room < 0:
            oldest = next(iter(self._used))
            dropped = min(int(self._held[oldest]), -self._room)
            self._held[oldest] -= dropped
            self._room += dropped
            if not self._held[oldest]:
                del self._used[oldest]


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """When each request was computed, by a server or in packs; arrays are [requests], in order of arrival."""

    latency: FloatArray  # seconds from arrival to the end
    computed_tokens: int
    hits: int  # requests whose first tokens did not have to be computed


def serve(
    workload: Workload,
    policy: str,
    arrivals: FloatArray,
    *,
    cache_tokens: int,
    seconds: Callable[[int, int], float],
    fairness: float = 0.0,
) -> Served:
    """Compute the requests as they arrive, in the order of one of `POLICIES`.

    `seconds(input tokens, cached tokens)` is what a request takes. It enters the cache at its end; its last token is
    computed in any case. `fairness` is the lambda of algorithm 1, in tokens for each second of waiting.
    """
    tokens, cache = workload.tokens, PrefixCache(workload.lengths, cache_tokens)
    at_arrival, cached = np.zeros_like(tokens), np.zeros_like(tokens)
    ends = np.zeros(len(tokens))
    waiting: list[int] = []
    arrived, now = 0, 0.0

    def admit() -> int:
        new = int(np.searchsorted(arrivals, now, side="right"))
        at_arrival[arrived:new] = cache.cached(workload.paths[arrived:new])
        waiting.extend(range(arrived, new))
        return new

    for _ in range(len(tokens)):
        if not waiting:
            now = max(now, float(arrivals[arrived]))
            arrived = admit()
        if policy == "fifo":
            picked = 0
        elif policy == "srjf":
            picked = shortest_job(tokens[waiting], at_arrival[waiting])
        else:
            found = cache.cached(workload.paths[waiting])
            picked = shortest_job(tokens[waiting], found, now - arrivals[waiting], fairness=fairness)
        request = waiting.pop(picked)
        path = workload.paths[request]
        cached[request] = min(int(cache.cached(path)), int(tokens[request]) - 1)
        now += seconds(int(tokens[request]), int(cached[request]))
        ends[request] = now
        arrived = admit()
        cache.add(path)
    return Served(ends - arrivals, int((tokens - cached).sum()), int(np.count_nonzero(cached)))


def run_plan(workload: Workload, limits: Limits, completion: Curve) -> Served:
    """Compute all requests as `prefill score` would: packs of the trie in depth-first order."""
    tokens = np.zeros(int(workload.tokens.max()), dtype=np.int32)  # which tokens they are does not matter
    prompts = [tokens[:length] for length in workload.tokens]
    packs = cut_packs(Queue(_forest(workload), OFFLINE), prompts, limits, [None] * len(prompts))
    ends = np.zeros(len(prompts))
    for pack, now in zip(packs, accumulate(map(completion.pack_seconds, packs)), strict=True):
        ends[pack.prompts] = now
    computed = sum(len(pack.tokens) for pack in packs)
    return Served(ends, computed, len(prompts) - sum(pack.starts.count(0) for pack in packs))


def _forest(workload: Workload) -> list[TrieNode]:
    nodes: dict[int, TrieNode] = {}
    roots: list[TrieNode] = []
    for request, path in enumerate(workload.paths.tolist()):
        above: TrieNode | None = None
        for number in path:
            length = int(workload.lengths[number])
            if length and number not in nodes:
                start = above.end if above is not None else 0
                nodes[number] = TrieNode(request, start, start + length, above)
                (above.children if above is not None else roots).append(nodes[number])
            above = nodes.get(number, above)
        if above is not None:
            above.ending.append(request)
    return roots


@dataclass(slots=True)
class Replay:
    """One workload on a simulated server. Each result says what it is of, and the mean and P99 latency in seconds."""

    workload: str
    requests: int
    together: int  # requests that arrive as one
    tokens: int  # of all requests
    unique_tokens: int
    longest: int  # tokens
    cache_tokens: int
    uncached_rate: float  # requests a second without a cache
    at_once: list[dict[str, Any]] = field(default_factory=list)  # by policy, all requests there from the beginning
    rates: list[dict[str, Any]] = field(default_factory=list)  # by policy and requests a second (figures 6 and 7)
    lambdas: list[dict[str, Any]] = field(default_factory=list)  # by lambda, at the rate x of the paper (figure 11)


def replay(
    name: str,
    completion: Curve,
    *,
    scale: float,
    limits: Limits,
    cache_tokens: int,
    fairness: Sequence[float],
) -> Replay:
    """Serve a workload with a cache of `cache_tokens`; `limits` are what fits a pack of the offline plan.

    `fairness` are lambdas in shares of the tokens that the machine computes in a second; the first one is that of
    srjf-calibrated where one is needed. Rates go from half of what the server gets through without a cache up to four
    times what it does under srjf-calibrated when all requests are there at once (the paper's x).
    """
    workload = WORKLOADS[name](scale)
    tokens, seconds = workload.tokens, lru_cache(maxsize=None)(completion.request_seconds)
    longest = int(tokens.max())
    limits = replace(limits, max_tokens=max(limits.max_tokens, longest))
    uncached = sum(seconds(length, 0) for length in tokens.tolist())
    speed = int(tokens.sum()) / uncached

    def served(policy: str, rate: float, share: float = fairness[0]) -> Served:
        arrivals = workload.arrivals(rate)
        return serve(workload, policy, arrivals, cache_tokens=cache_tokens, seconds=seconds, fairness=share * speed)

    found = Replay(
        workload=name,
        requests=len(tokens),
        together=workload.together,
        tokens=int(tokens.sum()),
        unique_tokens=workload.unique_tokens,
        longest=longest,
        cache_tokens=cache_tokens,
        uncached_rate=len(tokens) / uncached,
    )
    runs = {policy: served(policy, math.inf) for policy in POLICIES} | {
        OFFLINE: run_plan(workload, limits, completion)
    }
    found.at_once = [
        {
            "policy": policy,
            "computed_tokens": ran.computed_tokens,
            "hits": ran.hits,
            "seconds": float(ran.latency.max()),
            "requests_per_second": found.requests / float(ran.latency.max()),
            **_latencies(ran),
        }
        for policy, ran in runs.items()
    ]
    best = found.requests / float(runs["srjf-calibrated"].latency.max())
    rates = np.geomspace(found.uncached_rate / 2, 4 * best, RATES).tolist()
    found.rates = [
        {"policy": policy, "rate": rate, **_latencies(served(policy, rate))} for policy in POLICIES for rate in rates
    ]
    for share in fairness:
        ran = served("srjf-calibrated", best, share)
        percentiles = np.percentile(ran.latency, range(101)).tolist()
        found.lambdas.append(
            {"share": share, "tokens_per_second": share * speed, **_latencies(ran), "percentiles": percentiles}
        )
    return found


def _latencies(ran: Served) -> dict[str, float]:
    return {"mean": float(ran.latency.mean()), "p99": float(np.percentile(ran.latency, 99))}


def show(found: Replay, console: Console) -> None:
    """The tables of a replay."""
    arriving = f"{found.together} at a time" if found.together > 1 else "one by one"
    console.print(
        f"\n{found.workload}: {found.requests:,} requests, {arriving}, of up to {found.longest:,} tokens; "
        f"{found.tokens:,} tokens, {found.unique_tokens:,} unique; a prefix cache of {found.cache_tokens:,}"
    )
    for title, columns, rows in (
        (
            "All at once",
            ("policy", "computed_tokens", "hits", "seconds", "mean", "p99", "requests_per_second"),
            found.at_once,
        ),
        ("By arrival rate", ("policy", "rate", "mean", "p99"), found.rates),
        ("srjf-calibrated by lambda", ("share", "tokens_per_second", "mean", "p99"), found.lambdas),
    ):
        table = Table(*columns, title=title)
        for row in rows:
            cells = (row[column] for column in columns)
            table.add_row(*(f"{each:,}" if isinstance(each, int) else _text(each) for each in cells))
        console.print(table)


def _text(cell: str | float) -> str:
    return cell if isinstance(cell, str) else three_digits(cell)


def main(
    profile: Annotated[str, typer.Option(help="What prefill profile has written.")] = DEFAULT_PROFILE,
    workload: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}; repeatable.")] = None,
    scale: Annotated[float, typer.Option(help="Multiplies the lengths of requests; 1 is the paper's.")] = 1.0,
    cache_tokens: Annotated[
        int | None, typer.Option(help="Tokens in the prefix cache. By default K,V of all layers that fit the budget.")
    ] = None,
    fairness: Annotated[
        list[float] | None,
        typer.Option(
            help="Lambda as a share of the tokens that the machine computes in a second; repeatable. The first is "
            "compared with other policies. (default: 0.05, 0, 0.5)"
        ),
    ] = None,
) -> None:
    """Replay the workloads with the times of a profile."""
    measured = Profile.load(profile)
    if measured.no_completion is not None:
        raise typer.BadParameter(f"{profile}: no completion times; prefill profile measures them")
    settings = ProfileSettings(
        model=measured.settings.get("model"), dtype=measured.dtype, device=measured.device, quiet=True
    )
    files, device = open_model(settings)
    law = memory_law(files.config, files.dtype)
    limits = pack_limits(law, budget=measured.budget_bytes, device=device, chunk_tokens=measured.chunk_tokens)
    if cache_tokens is None:
        cache_tokens = measured.budget_bytes // (law.key_value * law.layers)
    console, results = Console(stderr=True, width=100), []
    for name in workload or list(WORKLOADS):
        found = replay(
            name,
            measured.completion,
            scale=scale,
            limits=limits,
            cache_tokens=cache_tokens,
            fairness=fairness or (0.05, 0.0, 0.5),
        )
        show(found, console)
        if found.longest > (fits := min(limits.max_tokens, files.max_length)):
            log(f"note: a prompt can have {fits:,} tokens here, so longer requests can only be calculated")
        results.append(asdict(found))
    print(json.dumps(results))


if __name__ == "__main__":
    typer.run(main)

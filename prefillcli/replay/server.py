"""A server that computes one request at a time, as PrefillOnly does (section 6.1), and the offline plan beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from prefillcli.forecast.replay_results import OFFLINE
from prefillcli.plan.cutter import cut_packs
from prefillcli.plan.pack import Limits
from prefillcli.plan.queue import Queue, shortest_job
from prefillcli.plan.trie import TrieNode
from prefillcli.replay.cache import PrefixCache
from prefillcli.replay.workloads import FloatArray, IntArray, Workload

if TYPE_CHECKING:
    from prefillcli.forecast.completion_model import CompletionModel

POLICIES = ("fifo", "srjf", "srjf-calibrated")


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """When each request was computed; arrays are [requests], in order of arrival."""

    order: list[int]  # in which they were computed
    arrivals: FloatArray  # seconds
    begins: FloatArray
    ends: FloatArray
    cached: IntArray  # tokens found in the cache


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
    computed in any case. `fairness` is the lambda of algorithm 1, in tokens for each second of waiting. Raises
    ValueError for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"{policy!r} is not a policy: there are {', '.join(POLICIES)}")
    tokens, cache = workload.tokens, PrefixCache(workload.lengths, cache_tokens)
    requests = len(tokens)
    at_arrival, cached = np.zeros_like(tokens), np.zeros_like(tokens)
    begins, ends = np.zeros(requests), np.zeros(requests)
    waiting: list[int] = []
    order: list[int] = []
    arrived, now = 0, 0.0

    def admit() -> int:
        new = int(np.searchsorted(arrivals, now, side="right"))
        at_arrival[arrived:new] = cache.cached(workload.paths[arrived:new])
        waiting.extend(range(arrived, new))
        return new

    while len(order) < requests:
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
        order.append(request)
        begins[request] = now
        now += seconds(int(tokens[request]), int(cached[request]))
        ends[request] = now
        arrived = admit()
        cache.add(path)
    return Served(order, arrivals, begins, ends, cached)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """When requests that were all known before were computed."""

    ends: FloatArray  # seconds [requests]: when the pack of each was done
    computed_tokens: int
    hits: int  # requests whose first tokens did not have to be computed


def run_plan(workload: Workload, limits: Limits, completion: CompletionModel) -> Batch:
    """Compute all requests as `prefill score` would: packs of the trie in depth-first order."""
    tokens = np.zeros(int(workload.tokens.max()), dtype=np.int32)  # which tokens they are does not matter
    prompts = [tokens[:length] for length in workload.tokens]
    packs = cut_packs(Queue(_forest(workload), OFFLINE), prompts, limits, [None] * len(prompts))
    ends = np.zeros(len(prompts))
    for pack, now in zip(packs, accumulate(map(completion.pack_seconds, packs)), strict=True):
        ends[pack.prompts] = now
    computed = sum(len(pack.tokens) for pack in packs)
    return Batch(ends, computed, len(prompts) - sum(pack.starts.count(0) for pack in packs))


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

"""The requests of PrefillOnly's two workloads (table 1), by their lengths and what they share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

POSTS = 50
POST_TOKENS = 150


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests in the order they arrive, as paths in a trie.

    `lengths` [nodes] are the tokens of the trie's nodes; the last node is empty. `paths` [requests, depth] are the
    nodes of each request, root first, filled up with the empty node. `together` requests at a time arrive as one.
    """

    name: str
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
    """20 users with a history each, who arrive with a request for each of 50 posts."""
    histories = _histories(20, scale, seed)
    posts = np.full(len(histories) * POSTS, max(round(POST_TOKENS * scale), 1))
    users = np.repeat(np.arange(len(histories)), POSTS)
    paths = np.stack([users, len(histories) + np.arange(len(posts))], axis=1)
    return Workload("post-recommendation", np.concatenate([histories, posts, [0]]), paths, together=POSTS)


def post_recommendation_mixed(scale: float = 1.0, seed: int = 0) -> Workload:
    """The same requests one by one, those of all users in random order."""
    apart = post_recommendation(scale, seed)
    order = np.random.default_rng(seed).permutation(len(apart.paths))
    return replace(apart, name="post-recommendation-mixed", paths=apart.paths[order], together=1)


def credit_verification(scale: float = 1.0, seed: int = 0) -> Workload:
    """60 users with one long request each; nothing is shared."""
    lengths = np.random.default_rng(seed).integers(40_000, 60_000, 60, endpoint=True)
    lengths = np.maximum((lengths * scale).round().astype(np.int64), 1)
    return Workload("credit-verification", np.append(lengths, 0), np.arange(len(lengths))[:, None])


def _histories(users: int, scale: float, seed: int) -> IntArray:
    """Normally distributed lengths, mean 14,000 and deviation 3,000 tokens; those within one deviation."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(14_000, 3_000, 10 * users)
    inside = drawn[np.abs(drawn - 14_000) <= 3_000][:users]
    return np.maximum((inside * scale).round().astype(np.int64), 1)


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "post-recommendation": post_recommendation,
    "post-recommendation-mixed": post_recommendation_mixed,
    "credit-verification": credit_verification,
}

"""Token sequences with the shapes of real jobs."""

from __future__ import annotations

import numpy as np

from prefillcli.plan.trie import TokenArray


def single(tokens: int, vocabulary: int, seed: int = 0) -> list[TokenArray]:
    """One long prompt."""
    return [_tokens(np.random.default_rng(seed), tokens, vocabulary)]


def post_recommendation(
    users: int, posts: int, history: int, post: int, vocabulary: int, seed: int = 0
) -> list[TokenArray]:
    """`users` histories of `history` tokens, each before `posts` candidates of `post` tokens (as in PrefillOnly)."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(users):
        shared = _tokens(rng, history, vocabulary)
        prompts += [np.concatenate([shared, _tokens(rng, post, vocabulary)]) for _ in range(posts)]
    return prompts


def short(rows: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[TokenArray]:
    """Rows that share nothing, of `shortest` to `longest` tokens, all lengths alike often."""
    rng = np.random.default_rng(seed)
    return [_tokens(rng, int(rng.integers(shortest, longest + 1)), vocabulary) for _ in range(rows)]


def _tokens(rng: np.random.Generator, count: int, vocabulary: int) -> TokenArray:
    return rng.integers(3, vocabulary, count).astype(np.int32)

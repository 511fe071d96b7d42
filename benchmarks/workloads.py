"""Token sequences with the shapes of real jobs, and random ones."""

from __future__ import annotations

import numpy as np

from prefillcli.plan.trie import TokenArray
from prefillcli.tools.profile.measuring import random_prompt as random_prompt

_FIRST_ID = 3  # below it tokenizers often have control tokens


def random_tokens(rng: np.random.Generator, count: int, vocabulary: int) -> TokenArray:
    """int32 [count], drawn from a vocabulary of so many tokens."""
    return rng.integers(_FIRST_ID, vocabulary, count).astype(np.int32)


def prompts_with_histories(
    users: int, posts: int, history: int, post: int, vocabulary: int, seed: int = 0
) -> list[TokenArray]:
    """`users` histories of `history` tokens, each followed by `posts` candidates of `post` tokens (as in
    PrefillOnly)."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(users):
        shared = random_tokens(rng, history, vocabulary)
        prompts += [np.concatenate([shared, random_tokens(rng, post, vocabulary)]) for _ in range(posts)]
    return prompts


def short_rows(rows: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[TokenArray]:
    """Rows that share nothing, of `shortest` to `longest` tokens, all lengths equally often."""
    rng = np.random.default_rng(seed)
    return [random_tokens(rng, int(rng.integers(shortest, longest + 1)), vocabulary) for _ in range(rows)]

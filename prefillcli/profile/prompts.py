"""Random prompts: what a prompt says changes neither the time nor the memory that it takes."""

from __future__ import annotations

import numpy as np

from prefillcli.plan.trie import TokenArray

_FIRST_ID = 3  # below it tokenizers often have control tokens


def random_tokens(rng: np.random.Generator, count: int, vocabulary: int) -> TokenArray:
    """int32 [count], drawn from a vocabulary of so many tokens."""
    return rng.integers(_FIRST_ID, vocabulary, count).astype(np.int32)


def random_prompt(tokens: int, vocabulary: int, seed: int = 0) -> TokenArray:
    """One prompt, int32 [tokens]."""
    return random_tokens(np.random.default_rng(seed), tokens, vocabulary)


def prompts_with_histories(
    users: int, posts: int, history: int, post: int, vocabulary: int, seed: int = 0
) -> list[TokenArray]:
    """`users` histories of `history` tokens, each before `posts` candidates of `post` tokens (as in PrefillOnly)."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(users):
        shared = random_tokens(rng, history, vocabulary)
        prompts += [np.concatenate([shared, random_tokens(rng, post, vocabulary)]) for _ in range(posts)]
    return prompts

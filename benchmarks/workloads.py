"""Token sequences with the shapes of real jobs, beside those of `prefillcli.profile.children`."""

from __future__ import annotations

import numpy as np

from prefillcli.plan.trie import TokenArray
from prefillcli.profile.children import random_tokens


def short_rows(rows: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[TokenArray]:
    """Rows that share nothing, of `shortest` to `longest` tokens, all lengths equally often."""
    rng = np.random.default_rng(seed)
    return [random_tokens(rng, int(rng.integers(shortest, longest + 1)), vocabulary) for _ in range(rows)]

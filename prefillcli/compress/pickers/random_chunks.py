"""Chunks at random: what a draft must beat."""

from __future__ import annotations

import numpy as np

from prefillcli.compress.base import Float32Array
from prefillcli.compress.pickers.row_picker import RowPicker
from prefillcli.compress.selection import chunk_count
from prefillcli.data.rows import Prompt


class RandomChunks(RowPicker):
    """Chunks of `chunk` tokens at random; the last one is cut to the budget. A row draws the same ones every time."""

    method = "random"

    def __init__(self, chunk: int, seed: int) -> None:
        self._chunk = chunk
        self._seed = seed

    def rank(self, prompt: Prompt) -> Float32Array:
        rng = np.random.default_rng([self._seed, prompt.row])
        return random_importance(len(prompt.tokens), self._chunk, rng)


def random_importance(tokens: int, chunk: int, rng: np.random.Generator) -> Float32Array:
    """Minus the place of each token's chunk in a random order, float32 [tokens]."""
    order = rng.permutation(chunk_count(tokens, chunk))
    places = np.argsort(order)[np.arange(tokens) // chunk]
    return -places.astype(np.float32)

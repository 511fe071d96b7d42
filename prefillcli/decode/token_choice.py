"""Which token follows: the likeliest one, or one that is drawn by noise of the text's key and the token's place.

The token with the largest of `logits / temperature + noise`, with independent Gumbel noise, is a draw from the softmax
of `logits / temperature` (the Gumbel-max trick). Here the noise follows from the seed, the key and the place alone, so
the token is a function of the logits: it does not depend on the rows beside it, on an order, or on what was guessed
before. Two models that read the same text with the same noise mostly choose the same token, which makes one a good
drafter of the other (coupled drafting: arXiv 2408.07978).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Float32Array = npt.NDArray[np.float32]

_NUMBERS_AT_ONCE = 1 << 23
"""Numbers that one step of choosing may copy: 32 MiB of float32."""
_NUMBERS_REMEMBERED = 1 << 24
"""Numbers of noise that are remembered, for the levels of speculation that choose a token for the same place."""


class Choices(NamedTuple):
    """Chosen tokens, and by how much each was larger than the second best of the numbers that were compared."""

    tokens: list[int]
    gaps: list[float]


class Chooser:
    """Chooses tokens. At a `temperature` of 0 the likeliest, the first of equals; else it draws with the `seed`."""

    def __init__(self, temperature: float = 0.0, seed: int = 0) -> None:
        self.temperature = temperature
        self.seed = seed
        self._noise: OrderedDict[tuple[str, int], Float32Array] = OrderedDict()
        self._remembered = 0

    def choose(self, logits: Tensor, keys: Sequence[str], places: Sequence[int]) -> Choices:
        """The token after each row of float32 `logits` [tokens, vocabulary].

        `keys` are those of the texts, `places` those of the chosen tokens in them, from 0: one of each for a row.
        """
        tokens: list[int] = []
        gaps: list[float] = []
        step = max(1, _NUMBERS_AT_ONCE // logits.shape[-1])
        for start in range(0, len(logits), step):
            numbers = logits[start : start + step]
            if self.temperature > 0:
                noise = [
                    self.noise(keys[at], places[at], logits.shape[-1]) for at in range(start, start + len(numbers))
                ]
                numbers = numbers / self.temperature
                numbers += torch.from_numpy(np.stack(noise)).to(numbers.device)
            tokens += numbers.argmax(dim=-1).tolist()
            best = numbers.topk(min(2, numbers.shape[-1]), dim=-1).values
            gaps += (best[:, 0] - best[:, 1]).tolist() if best.shape[-1] == 2 else [float("inf")] * len(best)
        return Choices(tokens, gaps)

    def noise(self, key: str, place: int, vocabulary: int) -> Float32Array:
        """Gumbel noise of a place in a text, float32 [vocabulary]. A larger vocabulary's begins with a smaller one's.

        It is drawn in float64: one in 2^23 draws in float32 is 0, which makes infinite noise, and any token the best.
        """
        known = self._noise.get((key, place))
        if known is not None and len(known) >= vocabulary:
            return known[:vocabulary]
        digest = blake2b(b"%d %d " % (self.seed, place) + key.encode(), digest_size=16).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
        drawn = -np.log(generator.standard_exponential(vocabulary)).astype(np.float32)
        self._remember((key, place), drawn)
        return drawn

    def _remember(self, of: tuple[str, int], drawn: Float32Array) -> None:
        self._remembered += len(drawn) - len(self._noise.pop(of, ()))
        self._noise[of] = drawn
        while self._remembered > _NUMBERS_REMEMBERED:
            self._remembered -= len(self._noise.popitem(last=False)[1])

"""How the target reads a prompt: in full, or some of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefillcli.compress.selection import budget, chunk_count
from prefillcli.compress.settings import Compression
from prefillcli.data.rows import FULL, Int32Array, Int64Array, Prompt


@dataclass(frozen=True, slots=True)
class Thinning:
    """How the target drops tokens of a prompt while it reads it.

    After `layer`, by its number, it goes on with the share `keep` of them, and always the `last` ones.
    """

    layer: int
    keep: float
    last: int
    settings: Compression


@dataclass(frozen=True, slots=True)
class Request:
    """How the target reads a prompt.

    `kept` are the indices of the tokens it reads, ascending, which are their positions too; None: all of them. With a
    `thinning` it reads all at first. `method` is what the output says: `full`, the name of a picker, or `fallback:`
    with a reason of `FALLBACKS`.
    """

    prompt: Prompt
    kept: Int64Array | None = None
    method: str = FULL
    pick_seconds: float = 0.0
    """The prompt's share of the time that picking took."""
    thinning: Thinning | None = None

    @property
    def tokens(self) -> Int32Array:
        """The token ids that the target reads, int32 [kept]."""
        return self.prompt.tokens if self.kept is None else self.prompt.tokens[self.kept]

    @property
    def positions(self) -> Int32Array | None:
        """Their positions in the prompt, int32 [kept]; None where all are read."""
        return None if self.kept is None else self.kept.astype(np.int32)

    @property
    def compressed(self) -> bool:
        """Whether some of the prompt's tokens are left out."""
        return self.kept is not None or self.thinning is not None

    @property
    def most_kept(self) -> int:
        """How many tokens the last layers read, at most: what is chosen may be among those that are kept anyway."""
        own, tokens = self.thinning, len(self.tokens)
        if own is None:
            return tokens
        chunk = own.settings.select_chunk
        chosen = budget(own.keep, chunk_count(tokens, chunk)) * chunk
        return min(tokens, chosen + own.settings.keep_first + own.last)

"""Local attention: what a query sees at most.

Depths are counted, not positions: where tokens were left out of a prompt, a window still covers as many tokens, as in
transformers and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

Depth = TypeVar("Depth", int, npt.NDArray[np.int64], Tensor)


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """A sliding window, the last `size` tokens with the query's own; or the part of `size` tokens that it is in.

    The second is `aligned`: a path is cut into parts of `size` tokens, and no query sees beyond its part's beginning
    (chunked local attention).
    """

    size: int
    aligned: bool = False

    def oldest(self, depth: Depth) -> Depth:
        """The depth of the first key that a query at `depth` sees; of a sliding window it may be negative."""
        return depth - depth % self.size if self.aligned else depth - self.size + 1


def oldest_key(window: KeyWindow | None, depth: int) -> int:
    """The depth of the first key that a query sees, with or without a window."""
    return window.oldest(depth) if window else 0


def query_blocks(window: KeyWindow | None, start: int, end: int, depth: int, most: int) -> Iterator[tuple[int, int]]:
    """Tokens `start:end` of one node, the first at `depth`, in blocks of at most `most`.

    Those of a block are in one part of an aligned window.
    """
    at = start
    while at < end:
        after = min(at + most, end)
        if window and window.aligned:
            own = depth + at - start
            after = min(after, at + window.oldest(own) + window.size - own)
        yield at, after
        at = after


def layer_window(module: Any, sliding_window: int | None) -> KeyWindow | None:
    """The window of an attention module that passes this sliding window, or None.

    Transformers cuts paths into parts by the mask alone, which is not made here. So the configuration is asked.
    """
    if sliding_window is not None:
        return KeyWindow(sliding_window)
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    if "chunked_attention" not in kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return KeyWindow(module.config.attention_chunk_size, aligned=True)

"""Prompts that a model reads with other position encodings than shorter ones.

With some rotary encodings (longrope) all of a prompt's positions are encoded in another way once it passes a length.
Such a prompt's tokens are marked in their positions. So they share a prefix with one another, but not with those of
shorter prompts, and whatever is cut out of a pack can be told apart.
"""

from __future__ import annotations

import numpy as np

from prefillcli.plan.trie import TokenArray

LONG = 1 << 30
"""Is added to the positions of such prompts."""


def marked_positions(positions: TokenArray | None, tokens: int, switch: int) -> TokenArray | None:
    """The positions of a prompt of so many tokens (None: 0, 1, 2, ...), marked if it is longer than `switch`.

    A prompt that has lost tokens is as long as its last position says. With `switch` 0 no length is too long.
    """
    last = tokens - 1 if positions is None else int(positions[-1])
    if not switch or last < switch:
        return positions
    own = np.arange(tokens, dtype=np.int32) if positions is None else positions.astype(np.int32)
    return own + np.int32(LONG)

"""How much memory a prompt takes in each mode, as a formula of the text configuration.

The memory law of the layer walk is `prefillcli.models.law`'s; this adds the temporaries of a layer for each token
(figure 4 of PrefillOnly), and the modes that keep or chunk other things.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from prefillcli.models.law import memory_law
from prefillcli.models.shape import Shape

_IDS = 8  # token id, int64; the position is in the law


@dataclass(frozen=True, slots=True)
class Law:
    """Bytes of one prompt in one mode: `base + token * tokens`. `terms` say what the bytes for each token are for."""

    base: float
    terms: Mapping[str, float]

    @property
    def token(self) -> float:
        """Bytes for each token."""
        return sum(self.terms.values())

    def bytes(self, tokens: int) -> float:
        return self.base + self.token * tokens

    def longest(self, budget: float) -> int:
        """Tokens of the longest prompt in `budget` bytes; 0 if none fits."""
        return max(0, int((budget - self.base) / self.token))


def mode_law(mode: str, config: Any, dtype: torch.dtype, chunk_tokens: int) -> Law:
    """The law of one of `prefillcli.profile.modes.MODES`.

    The walk has a row of the residual stream, one layer's K,V and the position encoding for each token. transformers'
    own forward has all layers' K,V, and besides the layer's input the embedding that its caller still holds. A mode
    that is not chunked has a layer's temporaries for each token, a chunked one for each token of a chunk. Chunked
    prefill in transformers also repeats the K,V that a chunk sees for all query heads, and makes a mask over them,
    bool and then in the dtype.
    """
    law = memory_law(config, dtype)
    layer = layer_bytes(config, dtype)
    walk = {"residual": law.residual, "K,V of one layer": law.key_value, "positions": law.rotary + _IDS}
    chunk = float(layer * chunk_tokens)
    if mode == "drop":
        return Law(_logits(config), walk | {"a layer's temporaries": layer})
    if mode == "hybrid":
        return Law(_logits(config) + chunk, walk)
    if mode == "hybrid-copy":
        return Law(_logits(config) + chunk, walk | {"residual": 2 * law.residual})
    all_layers = law.key_value * law.layers
    if mode == "full":
        return Law(
            _logits(config),
            {
                "embedding and residual": 2 * law.residual,
                "K,V of all layers": all_layers,
                "positions": law.rotary + _IDS,
                "a layer's temporaries": layer,
            },
        )
    if mode == "chunked":
        shape = Shape(config)
        groups = shape.heads / shape.kv_heads
        repeated = law.key_value * groups if groups > 1 else 0
        return Law(
            _logits(config) + chunk + chunk_tokens * 2 * law.residual,
            {
                "K,V of all layers": all_layers,
                "repeated K,V of one layer": repeated,
                "mask": chunk_tokens * (1 + dtype.itemsize),
            },
        )
    raise ValueError(f"no mode {mode!r}")


def layer_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of a layer's temporaries for one token at its peak, without its input.

    Either in the MLP: residual, normed input, and three rows of the inner width (gate after activation, up, their
    product). Or in attention: normed input, q, k, v, three more rows in the width of q while it is rotated or
    attention's output is there. Or in a norm, which computes in float32: input, square and product.
    """
    shape, size = Shape(config), dtype.itemsize
    hidden, queries, keys = shape.hidden, shape.head_width * shape.heads, shape.head_width * shape.kv_heads
    mlp = size * (2 * hidden + 3 * shape.inner)
    attention = size * (hidden + 4 * queries + 2 * keys)
    norm = size * hidden + 4 * 3 * hidden
    return int(max(mlp, attention, norm))


def _logits(config: Any) -> float:
    """One prompt's logits in the dtype and in float32."""
    return float(8 * config.vocab_size)


def attention_windows(config: Any) -> list[tuple[int | None, int]]:
    """Sliding windows (None: none) of the layers that attend for every token, and how many there are of each.

    The walk leaves the last layer as soon as its K,V are stored.
    """
    counted = Counter(Shape(config).windows[:-1])
    return sorted(counted.items(), key=lambda each: each[0] or 0)

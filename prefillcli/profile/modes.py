"""The ways to prefill one prompt, whose memory use is compared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefillcli.forecast.profile import OF_TRANSFORMERS
from prefillcli.models.law import memory_law
from prefillcli.models.shape import Shape
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.layer_calls import embedding_device
from prefillcli.prefill.layout import split_evenly
from prefillcli.prefill.model_ends import last_row
from prefillcli.prefill.walk import LayerWalk


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt through the model in one mode; gives its last logits, float32 [vocabulary]."""

    model: PreTrainedModel
    mode: str
    chunk_tokens: int

    def __call__(self, prompt: TokenArray) -> Tensor:
        return self._forward(prompt) if self.mode in OF_TRANSFORMERS else self._walk(prompt)

    @torch.inference_mode()
    def _forward(self, prompt: TokenArray) -> Tensor:
        self.model.set_attn_implementation("sdpa")
        chunk = len(prompt) if self.mode == "full" else self.chunk_tokens
        ids = torch.as_tensor(prompt, dtype=torch.long)[None].to(embedding_device(self.model))
        cache = DynamicCache()
        logits: Tensor | None = None
        for start, end in split_evenly(len(prompt), chunk):
            logits = self.model(
                input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits
        if logits is None:
            raise ValueError("a prompt has at least one token")
        return last_row(logits)

    def _walk(self, prompt: TokenArray) -> Tensor:
        self.model.set_attn_implementation(ATTENTION)
        walk = LayerWalk(self.model, chunk_tokens=self.chunk_tokens)
        try:
            (pack,) = make_plan([prompt], Limits(len(prompt), len(prompt))).packs
            return torch.cat(list(walk.read_logits(pack)))[0]
        finally:
            walk.close()


# How much memory a prompt takes in each mode, as a formula of the text configuration.
#
# The memory law of the layer walk is `prefillcli.models.law`'s; this adds the temporaries of a layer for each token
# (figure 4 of PrefillOnly), and the modes that keep or chunk other things.


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
    """The law of one of `prefillcli.forecast.profile.MODES`.

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
    if mode == "hybrid":
        return Law(_logits(config) + chunk, walk)
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

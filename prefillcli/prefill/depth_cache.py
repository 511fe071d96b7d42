"""What a layer gets for a cache where it asks one how many tokens are before its own.

In a forest each token has a number of its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from prefillcli.prefill.layout import IntArray


def asks_for_depths(config: Any) -> bool:
    """Whether layers of this text configuration ask: llama4's do, where queries grow with their depth."""
    return bool(getattr(config, "attn_temperature_tuning", False))


class DepthCache:
    """Holds nothing, and says how many tokens are before each of some tokens at `depths`, less those of the call."""

    def __init__(self, depths: IntArray, device: torch.device) -> None:
        self._before = torch.as_tensor(depths - np.arange(len(depths)), device=device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """int64 [tokens], which gives depths when the tokens' numbers in the call are added."""
        return self._before

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *others: Any) -> tuple[Tensor, Tensor]:
        """The keys and values as they are."""
        return keys, values

"""Rotary tables of prompts that passed the length where a model's position encodings change.

Transformers looks at the largest position of a call, and encodes all positions of the call by it. A chunk holds tokens
of several prompts, and a long prompt spreads over chunks. So the positions of long prompts are marked
(`plan.long_positions`), and a model's rotary module is called for marked ones with one more position behind them, at
which the encodings change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from prefillcli.plan.long_positions import LONG

Tables = tuple[Tensor, ...]


class LengthTables:
    """Until `close`, a model's rotary modules of this kind give marked positions the tables of long prompts."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
        for module in self._modules:
            module.forward = _by_length(module.forward, _switch(module))

    def __bool__(self) -> bool:
        """Whether there are such modules."""
        return bool(self._modules)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            del module.forward


def _switch(module: Any) -> int:
    """The longest prompt that is not long."""
    return int(module.config.rope_parameters["original_max_position_embeddings"])


def _by_length(forward: Callable[..., Tables], switch: int) -> Callable[..., Tables]:
    """A rotary module's forward over `position_ids` [1, tokens], for marked and unmarked ones alike."""

    def tables(x: Tensor, position_ids: Tensor, **others: Any) -> Tables:
        marked = position_ids >= LONG
        if not marked.any():
            return forward(x, position_ids, **others)
        own = torch.where(marked, position_ids - LONG, position_ids)
        behind = torch.full_like(own[:, :1], switch)
        long = tuple(each[:, :-1] for each in forward(x, torch.cat([own, behind], dim=1), **others))
        if marked.all():
            return long
        short = forward(x, torch.where(marked, 0, own), **others)
        return tuple(torch.where(marked[..., None], a, b) for a, b in zip(long, short, strict=True))

    return tables

"""A pack on its way through a model's layers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor, nn

from prefillcli.plan.exit_work import LayersDone
from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.layer_calls import LayerCall
from prefillcli.prefill.layout import Chunk, IntArray, Tree
from prefillcli.prefill.own_cache import OwnCacheLayer
from prefillcli.prefill.recurrent import LayerRecurrence


@dataclass(slots=True)
class WalkState:
    """A pack on its way through the layers.

    Reads that have left are not in it any more; what only they needed goes on until the rest is laid out anew.
    """

    whole: Pack  # as it was before the first layer
    pack: Pack  # what is left of it
    reads: Sequence[int]  # number of each of its reads in the whole pack, ascending
    nodes: Sequence[int]  # of each of its nodes
    done: LayersDone  # of the whole pack's nodes
    tree: Tree
    tokens: Tensor
    chunks: list[Chunk]
    calls: list[list[LayerCall]]  # of each chunk, of each layer
    hidden: Tensor  # the residual stream, [1, tokens, hidden]
    keep_ends: bool = False  # the states behind the reads are asked for
    recurrence: LayerRecurrence | OwnCacheLayer = field(init=False)  # of the layer that is computed

    @property
    def held_nodes(self) -> list[int]:
        """The nodes of what is left that later packs hold."""
        return [bisect_left(self.nodes, node) for node in self.whole.kept_nodes]

    @property
    def asked_nodes(self) -> list[int]:
        """The nodes of what is left whose last states are asked for."""
        return self.held_nodes + ([node for node, _ in self.pack.reads] if self.keep_ends else [])

    @property
    def last_tokens(self) -> IntArray:
        """The token that each read ends with."""
        return np.asarray([self.pack.offsets[node + 1] - 1 for node, _ in self.pack.reads], dtype=np.int64)


class Keeper(Protocol):
    """Keeps what layers leave behind, for what follows a walk."""

    def take(self, index: int, state: WalkState, attention: ForestAttention) -> None:
        """Take over what layer `index` leaves, which all chunks have passed and last tokens were read of."""


# Where the walk takes its layers from.


class LayerSource(Protocol):
    """A model's decoder layers. The walk uses one at a time, in ascending order, once for each pass over the model."""

    def __len__(self) -> int: ...

    def use(self, index: int) -> AbstractContextManager[nn.Module]:
        """Layer `index` with its weights on the walk's device. They are not needed any more once the context ends."""

    def end_pass(self) -> None:
        """No further layer is used in this pass; the next pass begins with the first. Also while one is in use."""


class ResidentLayers:
    """Layers whose weights are all on the device already."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def use(self, index: int) -> Iterator[nn.Module]:
        yield self._layers[index]

    def end_pass(self) -> None: ...

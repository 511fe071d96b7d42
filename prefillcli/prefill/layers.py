"""Where the walk takes its layers from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import nn


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

"""Features of images, which stand in a pack for the embeddings of tokens.

A feature has a number of its own among the tokens of a pack (`images.image`). Before the first layer its row takes the
place of an embedding. Some models add further rows after their first layers, give features positions in several axes,
or let the features of an image see one another both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from prefillcli.images.image import FIRST_FEATURE, ImageTraits, PlacedImage
from prefillcli.stats.arrays import Int32Array, Int64Array

# The features of images, [1 + added layers, features, hidden] of each: first the rows for the embeddings.
Encode = Callable[[Sequence[PlacedImage]], Sequence[Tensor]]


class PackFeatures:
    """The features of a pack's images.

    `offsets` gives an image's positions as in `ImageLayout`. Images are encoded when the first chunk with their
    features comes, those of a chunk together.
    """

    def __init__(
        self,
        traits: ImageTraits,
        images: Sequence[PlacedImage],
        offsets: Callable[[PlacedImage], Int32Array | None],
        encode: Encode,
    ) -> None:
        self.traits = traits
        self._images = sorted(images, key=lambda image: image.first)
        self._firsts = np.array([image.first for image in self._images], dtype=np.int64)
        self._offsets = [offsets(image) if traits.axes > 1 else None for image in self._images]
        self._encode = encode
        self._coded: dict[int, Tensor] = {}  # by an image's place, those of the last chunk
        self._added: dict[int, Tensor] = {}  # by an image's place, the rows that later layers add

    def ids(self, tokens: Tensor) -> Tensor:
        """Token ids int64 [tokens] for the model's forward, with the stand-in where features stand."""
        return torch.where(tokens >= FIRST_FEATURE, self.traits.stand_in, tokens)

    def positions(self, tokens: Tensor, positions: Int64Array) -> Int64Array:
        """The positions [axes, tokens] of tokens; one axis: [tokens]."""
        if self.traits.axes == 1:
            return positions
        found = np.repeat(positions[None], self.traits.axes, axis=0)
        at, images, rows = self._places(tokens)
        for image in np.unique(images).tolist():
            own, offsets = images == image, self._offsets[image]
            if offsets is not None:
                found[:, at[own]] += offsets[:, rows[own]]
        return found

    def embedded(self, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """Where features stand among these tokens int64 [tokens], and their rows [features, hidden]; None: nowhere."""
        at, images, rows = self._places(tokens)
        if not len(at):
            return None
        wanted = np.unique(images).tolist()
        new = [image for image in wanted if image not in self._coded]
        self._coded = {image: self._coded[image] for image in wanted if image in self._coded}
        for image, found in zip(new, self._encode([self._images[image] for image in new]), strict=True):
            self._coded[image] = found[0]
            if self.traits.added_layers:
                self._added[image] = found[1:]
        return torch.as_tensor(at), self._picked({image: self._coded[image] for image in wanted}, images, rows)

    def added(self, layer: int, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
        """As `embedded`, the rows that are added to a layer's output; None: nothing is."""
        if layer >= self.traits.added_layers:
            return None
        at, images, rows = self._places(tokens)
        if not len(at):
            return None
        own = {image: self._added[image][layer] for image in np.unique(images).tolist()}
        return torch.as_tensor(at), self._picked(own, images, rows)

    def runs(self, tokens: Tensor) -> list[tuple[int, int]]:
        """The runs (start, end) of tokens that see one another both ways."""
        return runs_of_features(tokens.numpy()) if self.traits.both_ways else []

    def _places(self, tokens: Tensor) -> tuple[Int64Array, Int64Array, Int64Array]:
        # Where features stand, and of each its image and its row there.
        numbers = tokens.numpy()
        at = np.flatnonzero(numbers >= FIRST_FEATURE)
        images = np.searchsorted(self._firsts, numbers[at], side="right") - 1
        return at, images, numbers[at] - self._firsts[images]

    @staticmethod
    def _picked(coded: dict[int, Tensor], images: Int64Array, rows: Int64Array) -> Tensor:
        # These rows of images, in order: mostly whole images one after the other.
        found = []
        edges = [0, *(np.flatnonzero(np.diff(images) != 0) + 1).tolist(), len(images)]
        for start, end in pairwise(edges):
            own = coded[int(images[start])]
            found.append(own[torch.as_tensor(rows[start:end], device=own.device)])
        return torch.cat(found)


def runs_of_features(tokens: Int64Array) -> list[tuple[int, int]]:
    """The runs (start, end) of features that follow one another among these tokens and in their numbers."""
    at = np.flatnonzero(tokens >= FIRST_FEATURE)
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(tokens[at]) != 1)) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(at, breaks) if len(run)]


def uncut(parts: Sequence[tuple[int, int]], runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts (start, end) of a pack with their edges moved to where no run begins, or if need be ends: none cuts a
    run."""
    last = parts[-1][1] if parts else 0
    edges = [0]
    for _, end in parts[:-1]:
        start, after = next(((a, b) for a, b in runs if a < end < b), (end, end))
        edge = start if start > edges[-1] else after
        if edges[-1] < edge < last:
            edges.append(edge)
    return list(pairwise([*edges, last])) if parts else []

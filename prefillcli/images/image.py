"""The nouns of images: one as a row brings it, and its place in a prompt.

A model sees an image as features, one for each of some tokens. In a prompt each feature has a number of its own beyond
every vocabulary, so that the forest of prompts shares equal images and tells others apart, like text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

FIRST_FEATURE = 1 << 24  # no vocabulary is larger
LAST_FEATURE = (1 << 31) - 1
FEATURE = -1  # stands for a feature in the tokens of an `ImageLayout`


class ImageError(Exception):
    """A value is no image that can be read. The message says why, for the error of its row."""


@dataclass(frozen=True, slots=True)
class RowImage:
    """An image as a row brings it: a whole file of a supported format, checked to its end.

    `key` is the digest of `data`; `width` and `height` are in pixels, as the image is seen upright.
    """

    data: bytes = field(repr=False, compare=False)
    key: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class ImageTraits:
    """How a model's forward reads images, by its configuration.

    `feature` is the token id at which transformers puts a feature; `stand_in` that which stands in `input_ids` for a
    feature when the model is run with features in place of embeddings. `axes`: how many axes a position has, 1 where
    positions are counted. `both_ways`: the features of one image attend to each other in both directions, and with
    `in_windows` only in layers that attend within a window. After the first `added_layers` layers further features are
    added to the hidden states at an image.
    """

    feature: int
    stand_in: int
    axes: int
    both_ways: bool
    added_layers: int
    in_windows: bool = False


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """The tokens of an image in a prompt, which follow from its size and the model's processor.

    `tokens` int32 [tokens] are token ids, and `FEATURE` where a feature stands. Where positions have several axes,
    `offsets` int32 [axes, features] are those of the features, counted from the position at which the image begins,
    and the token after the image is `advance` positions after that. None: its tokens are counted like text.
    `operations` are those that the vision tower takes for its features, about.
    """

    tokens: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32] | None = None
    advance: int = 0
    operations: float = 0.0

    @property
    def features(self) -> int:
        """The number of features."""
        return int((self.tokens == FEATURE).sum())


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in prompts: its features have the numbers from `first` on.

    `several`: it is one of several images of its row, which some models read in another resolution. `tokens` and
    `operations` are those of its layout, for forecasts.
    """

    first: int
    features: int
    image: RowImage
    several: bool = False
    tokens: int = field(default=0, compare=False)
    operations: float = field(default=0.0, compare=False)

"""The images of packs, as features that the walk reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from prefillcli.images.image import PlacedImage
from prefillcli.models.images import ModelImages
from prefillcli.models.vision import VisionTower
from prefillcli.plan.pack import Pack
from prefillcli.stats.arrays import Int32Array
from prefillcli.walk.features import PackFeatures

BATCH_SHARE = 1 / 8  # of the budget, at most, for a batch of images in the vision tower
KEPT_SHARE = 1 / 16  # of the budget, at most, for features that later packs may need again


class PackImages:
    """Makes the features of packs' images, `images` of a model on `device`.

    The tower is loaded when the first image comes, unless it is wanted in any case. Of a budget of memory in bytes,
    `reserved` is the part that is no pack's.
    """

    def __init__(self, images: ModelImages, device: torch.device) -> None:
        self._images, self._device = images, device
        self._tower: VisionTower | None = None
        self._kept: OrderedDict[tuple[bytes, bool], Tensor] = OrderedDict()
        self._kept_bytes = 0
        self._most_kept = 0
        self._batch_bytes = 0
        if images.asked:
            self._tower = images.load_tower(device, self._batch_bytes)

    def within(self, budget: int) -> int:
        """Take a part of a budget in bytes, and return the rest."""
        self._batch_bytes, self._most_kept = int(budget * BATCH_SHARE), int(budget * KEPT_SHARE)
        if self._tower is not None:
            self._tower.batch_bytes = self._batch_bytes
        return budget - self._batch_bytes - self._most_kept if self._images.asked else budget

    def of_pack(self, pack: Pack) -> PackFeatures:
        """The features of a pack's images. Raises UsageError for a model that reads none."""
        return PackFeatures(self._loaded().traits, pack.images, self._offsets, self._features)

    def _loaded(self) -> VisionTower:
        if self._tower is None:
            self._tower = self._images.load_tower(self._device, self._batch_bytes)
        return self._tower

    def _offsets(self, placed: PlacedImage) -> Int32Array | None:
        image = placed.image
        return self._images.processing.layout(image.width, image.height, placed.several).offsets

    def _features(self, images: Sequence[PlacedImage]) -> list[Tensor]:
        # Those that were made for earlier packs are kept while there is room.
        keys = [(image.image.key, image.several) for image in images]
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in self._kept}
        made = dict(zip(new, self._loaded().features(list(new.values())), strict=True)) if new else {}
        found = [made[key] if key in made else self._kept[key] for key in keys]
        for key, each in zip(keys, found, strict=True):
            if key not in self._kept:
                self._kept[key] = each
                self._kept_bytes += each.nbytes
            self._kept.move_to_end(key)
        while self._kept_bytes > self._most_kept:
            _, gone = self._kept.popitem(last=False)
            self._kept_bytes -= gone.nbytes
        return found

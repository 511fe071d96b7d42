"""The images of packs, as features that the walk reads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from threading import Lock, RLock

import torch
from torch import Tensor

from prefillcli.images.image import PlacedImage
from prefillcli.models.dtype import one_thread
from prefillcli.models.images import ModelImages
from prefillcli.models.vision import Inputs, VisionTower
from prefillcli.plan.pack import Pack
from prefillcli.stats.arrays import Int32Array
from prefillcli.walk.features import PackFeatures

BATCH_SHARE = 1 / 8  # of the budget, at most, for a batch of images in the vision tower
KEPT_SHARE = 1 / 16  # of the budget, at most, for features that later packs may need again
# Parts of this size that are no pack's: kept features, inputs made ahead, and what the allocator keeps for the threads
# that read images.
KEPT_PARTS = 3


Name = tuple[bytes, bool]  # of an image, by what its features depend on


def _name(image: PlacedImage) -> Name:
    return image.image.key, image.several


class Ahead:
    """Makes inputs of images in a thread, in the order in which they are expected, and keeps about `most` bytes.

    No thread waits: the next inputs are begun when there is room for them.
    """

    most = 0

    def __init__(self, make: Callable[[PlacedImage], Inputs]) -> None:
        self._make = make
        self._pool: ThreadPoolExecutor | None = None
        self._expected: dict[Name, PlacedImage] = {}  # not begun yet, in their order
        self._made: dict[Name, Future[Inputs]] = {}  # begun or there, and not taken
        self._bytes = 0  # of those that are there
        self._busy = False
        self._lock = RLock()

    def expect(self, images: Mapping[Name, PlacedImage]) -> None:
        """Make the inputs of these images. Those of others, made before, are dropped."""
        with self._lock:
            self._expected = {}
            gone = [self._made.pop(name) for name in self._made.keys() - images.keys()]
        for future in gone:
            with suppress(Exception):  # which its row will meet by itself
                self._forget(future.result())
        with self._lock:
            self._expected = {name: image for name, image in images.items() if name not in self._made}
            self._begin_next()

    def take(self, image: PlacedImage) -> Inputs:
        """The inputs of an image, which are made now unless they are there or on their way."""
        with self._lock:
            self._expected.pop(_name(image), None)
            future = self._made.pop(_name(image), None)
        if future is None:
            return self._make(image)
        found = future.result()
        self._forget(found)
        return found

    def close(self) -> None:
        """Make nothing any more."""
        self.expect({})
        if self._pool is not None:
            self._pool.shutdown()

    def _begin_next(self) -> None:
        # One after the other, while there is room.
        with self._lock:
            if not self._expected or self._busy or self._bytes >= self.most:
                return
            name = next(iter(self._expected))
            self._pool = self._pool or ThreadPoolExecutor(1, "images")
            self._made[name] = self._pool.submit(self._make_counted, self._expected.pop(name))
            self._busy = True

    def _make_counted(self, image: PlacedImage) -> Inputs:
        found: Inputs = {}
        try:
            found = self._make(image)
            return found
        finally:
            with self._lock:
                self._busy = False
                self._bytes += _bytes_of(found)
                self._begin_next()

    def _forget(self, inputs: Inputs) -> None:
        with self._lock:
            self._bytes -= _bytes_of(inputs)
            self._begin_next()


def _bytes_of(inputs: Inputs) -> int:
    return sum(each.nbytes for each in inputs.values())


class PackImages:
    """Makes the features of packs' images, `images` of a model on `device`.

    The tower is loaded when the first image comes, unless a job asks for it in any case. With `alone` it reads one
    image at a time, so that an image's features do not depend on others.
    """

    def __init__(self, images: ModelImages, device: torch.device, *, alone: bool = False) -> None:
        self._images, self._device, self._alone = images, device, alone
        self._tower: VisionTower | None = None
        self._loading = Lock()
        self._ahead = Ahead(self._inputs)
        self._kept: OrderedDict[Name, Tensor] = OrderedDict()
        self._kept_bytes = 0
        self._most_kept = 0
        self._batch_bytes = 0
        if images.asked:
            self._tower = images.load_tower(device, self._batch_bytes)

    def within(self, budget: int) -> int:
        """Take a part of a budget in bytes, and return the rest."""
        self._batch_bytes, self._most_kept = int(budget * BATCH_SHARE), int(budget * KEPT_SHARE)
        self._ahead.most = self._most_kept
        if self._tower is not None:
            self._tower.batch_bytes = 0 if self._alone else self._batch_bytes
        taken = self._batch_bytes + KEPT_PARTS * self._most_kept
        return budget - taken if self._images.asked else budget

    @property
    def whole(self) -> bool:
        """Whether an image's features are computed together, because they see one another."""
        return self._images.both_ways

    def expect(self, packs: Sequence[Pack]) -> None:
        """These packs come next: the inputs of their images are made by a thread, as far as there is room."""
        coming = {_name(image): image for pack in packs for image in pack.images}
        self._ahead.expect({name: image for name, image in coming.items() if name not in self._kept})

    def close(self) -> None:
        """Nothing is expected any more."""
        self._ahead.close()

    def of_pack(self, pack: Pack) -> PackFeatures:
        """The features of a pack's images. Raises UsageError for a model that reads none."""
        return PackFeatures(self._loaded().traits, pack.images, self._offsets, self._features)

    def _loaded(self) -> VisionTower:
        with self._loading:  # by the walk, or by the thread that makes inputs
            if self._tower is None:
                self._tower = self._images.load_tower(self._device, 0 if self._alone else self._batch_bytes)
            return self._tower

    def _offsets(self, placed: PlacedImage) -> Int32Array | None:
        image = placed.image
        return self._images.processing.layout(image.width, image.height, placed.several).offsets

    def _inputs(self, image: PlacedImage) -> Inputs:
        return self._loaded().inputs(image)

    def _made(self, images: Sequence[PlacedImage]) -> list[Tensor]:
        # Products have other bits on other numbers of threads.
        with one_thread(self._device) if self._alone else nullcontext():
            return self._loaded().features(images, self._ahead.take)

    def _features(self, images: Sequence[PlacedImage]) -> list[Tensor]:
        # Those that were made for earlier packs are kept while there is room.
        keys = list(map(_name, images))
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in self._kept}
        made = dict(zip(new, self._made(list(new.values())), strict=True)) if new else {}
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

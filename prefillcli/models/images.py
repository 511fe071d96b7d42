"""The part of a model that reads images, opened when the first image comes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from prefillcli.errors import UsageError
from prefillcli.models.find import ModelFiles
from prefillcli.models.multimodal import read_config
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    import torch

    from prefillcli.models.image_processing import ImageProcessing
    from prefillcli.models.vision import VisionTower

_opening = threading.RLock()


@dataclass(frozen=True, slots=True)
class ModelImages:
    """What reads images in the model of a folder: its processor, and its vision tower.

    The processor makes images of more than `max_pixels` smaller, and of less than `min_pixels` larger; None: as its
    files say. `asked`: a job names a column of images, so the tower is needed in any case.
    """

    files: ModelFiles
    max_pixels: int | None = None
    min_pixels: int | None = None
    asked: bool = False

    @property
    def processing(self) -> ImageProcessing:
        """The model's processor; threads share it. Raises UsageError for a model that reads no images."""
        self._check()
        with _opening:
            return _processing(self.files.path, self.max_pixels, self.min_pixels)

    def load_tower(self, device: torch.device, batch_bytes: int) -> VisionTower:
        """Load the vision tower, whose batches take at most `batch_bytes`. Raises UsageError."""
        from prefillcli.models.vision import VisionTower

        return VisionTower.load(
            self.files.path,
            read_config(self.files.path),
            self.processing,
            dtype=self.files.dtype,
            device=device,
            batch_bytes=batch_bytes,
        )

    def _check(self) -> None:
        origin = self.files.origin
        if self.files.gguf is not None:
            raise UsageError(f"{origin}: a GGUF file is read without images\ntake the model as safetensors")
        if self.files.part_of is None:
            raise UsageError(f"{origin}: a {self.files.family} model reads text alone, and no images")
        require_extra("images", "images")


@cache
def _processing(folder: Path, max_pixels: int | None, min_pixels: int | None) -> ImageProcessing:
    from prefillcli.models.image_processing import ImageProcessing

    return ImageProcessing.open(folder, read_config(folder), max_pixels=max_pixels, min_pixels=min_pixels)

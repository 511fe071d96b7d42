"""The part of a model that reads images, opened when the first image comes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from prefillcli.errors import UsageError
from prefillcli.models.files import read_json
from prefillcli.models.find import ModelFiles
from prefillcli.models.multimodal import read_config
from prefillcli.rows.proof import PROCESSOR_FILES
from prefillcli.runtime.extras import require_extra
from prefillcli.walk.forest import UnsupportedModelError

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

    @property
    def sees(self) -> bool:
        """Whether its files may hold what reads images."""
        return self.files.gguf is None and self.files.part_of is not None

    @property
    def chat_template(self) -> str | None:
        """The chat template that stands beside the processor, and not among the tokenizer's files; None: there is
        none."""
        file = self.files.path / "chat_template.json"
        found = read_json(file) if self.sees and file.is_file() else None
        return found.get("chat_template") if isinstance(found, dict) else None

    @property
    def both_ways(self) -> bool:
        """Whether the features of an image see one another both ways; not for a model that reads no images."""
        from prefillcli.models.image_processing import image_traits

        if not self.sees:
            return False
        try:
            return image_traits(read_config(self.files.path)).both_ways
        except UnsupportedModelError:
            return False

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
        if not any((self.files.path / name).is_file() for name in PROCESSOR_FILES):
            raise UsageError(
                f"{origin}: neither {' nor '.join(PROCESSOR_FILES)}, without which its images cannot be prepared"
            )
        require_extra("images", "images")


@cache
def _processing(folder: Path, max_pixels: int | None, min_pixels: int | None) -> ImageProcessing:
    from prefillcli.models.image_processing import ImageProcessing

    return ImageProcessing.open(folder, read_config(folder), max_pixels=max_pixels, min_pixels=min_pixels)

"""The vision tower of a checkpoint: images in, features out. Its text model is not read."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from prefillcli.images.decoding import open_image
from prefillcli.images.image import PlacedImage
from prefillcli.models.completeness import quiet_transformers
from prefillcli.models.image_processing import ImageProcessing, TowerShape, image_class, image_traits
from prefillcli.models.multimodal import name_of_head, prefix_of_decoder
from prefillcli.walk.forest import UnsupportedModelError

Inputs = dict[str, Tensor]

#: Bytes of activations that a batch of images may take.
BATCH_BYTES = 1 << 30


class VisionTower:
    """The part of a model that makes features of images, with the model's own `get_image_features`.

    `traits` says how the text model takes them.
    """

    def __init__(self, model: Any, processing: ImageProcessing, batch_bytes: int = BATCH_BYTES) -> None:
        self.traits = image_traits(model.config)
        self._model = model
        self._processing = processing
        self.batch_bytes = batch_bytes
        # Pixtral attends over all patches of a batch, with a mask between its images: they are cheaper one by one.
        self._joined = model.config.vision_config.model_type == "pixtral"
        self._taken = frozenset(inspect.signature(type(model).get_image_features).parameters)

    @classmethod
    def load(
        cls,
        folder: Path,
        config: PreTrainedConfig,
        processing: ImageProcessing,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> VisionTower:
        """Load the weights beside the text model of a checkpoint, and no others. `attention` is how the tower attends,
        None: as transformers chooses.

        Raises UnsupportedModelError for models that are not read with images, for quantised checkpoints and for
        files that lack weights of the tower.
        """
        if getattr(config, "quantization_config", None) is not None:
            raise UnsupportedModelError(
                f"{folder}: of a quantised {config.model_type}, the vision tower cannot be loaded by itself"
            )
        kind = _without_text(image_class(config))
        whole = copy.deepcopy(config)
        whole.tie_word_embeddings = False  # neither embedding nor head is there
        if getattr(whole, "audio_config", None) is not None:
            whole.audio_config = None
        with quiet_transformers():
            model, info = kind.from_pretrained(
                folder, config=whole, dtype=dtype, attn_implementation=attention, output_loading_info=True
            )
        lacking = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
        if lacking:
            raise UnsupportedModelError(
                f"{folder}: {len(lacking)} weights of the vision tower are missing: {lacking[0]}"
            )
        return cls(model.eval().requires_grad_(False).to(device), processing, batch_bytes)

    @property
    def weight_bytes(self) -> int:
        """The bytes of its weights."""
        return sum(each.nbytes for each in (*self._model.parameters(), *self._model.buffers()))

    def features(
        self, images: Sequence[PlacedImage], inputs: Callable[[PlacedImage], Inputs] | None = None
    ) -> list[Tensor]:
        """Return what the text model reads of each image: [1 + added layers, features, hidden] in the tower's dtype.

        The first is put in place of embeddings, the others are added after the first layers. `inputs` gives an image's
        inputs, where these were made before. Raises ImageError for an image that the processor refuses, and ValueError
        where an image does not have the features of its layout.
        """
        found: list[Tensor | None] = [None] * len(images)
        for batch in self._batches(images, inputs or self.inputs):
            numbers = [number for number, _ in batch]
            joined = {name: torch.cat([inputs[name] for _, inputs in batch]) for name in batch[0][1]}
            made = self._encode(joined, [images[number].features for number in numbers])
            for number, each in zip(numbers, made, strict=True):
                found[number] = each
        return [each for each in found if each is not None]

    def _batches(
        self, images: Sequence[PlacedImage], made: Callable[[PlacedImage], Inputs]
    ) -> Iterator[list[tuple[int, Inputs]]]:
        # Images whose inputs have the same shapes, with their numbers. No more inputs are kept than a batch takes.
        waiting: dict[Any, list[tuple[int, Inputs]]] = {}
        kept = 0
        for number, image in enumerate(images):
            inputs = made(image)
            shape = tuple((name, tuple(each.shape[1:])) for name, each in inputs.items())
            own = self._bytes(inputs)
            if kept and (kept + own > self.batch_bytes or self._joined):
                yield from waiting.values()
                waiting, kept = {}, 0
            waiting.setdefault(shape, []).append((number, inputs))
            kept += own
        yield from waiting.values()

    def inputs(self, image: PlacedImage) -> Inputs:
        """Return an image's inputs. Another thread may make them."""
        made = self._processing.inputs(open_image(image.image.data), image.several)
        return {name: each for name, each in made.items() if name in self._taken}

    def _bytes(self, inputs: dict[str, Tensor]) -> int:
        # Generous: as if every layer kept its hidden states, as some families' towers do.
        pixels, own = inputs["pixel_values"], TowerShape.of(self._model.config.vision_config)
        patches = pixels.numel() / own.numbers
        numbers = patches * (own.hidden * (12 + own.layers) + 3 * own.inner) + 2 * pixels.numel()
        mask = patches * patches if self._joined else 0
        return int((numbers + mask) * self._model.dtype.itemsize) + 2 * pixels.nbytes

    def _encode(self, inputs: dict[str, Tensor], counts: list[int]) -> list[Tensor]:
        if sum(counts) == 1:  # Mistral 3 takes a single feature for no list of features
            twice = {name: torch.cat([each, each]) for name, each in inputs.items()}
            return self._encode(twice, [1, 1])[:1]
        device, dtype = self._model.device, self._model.dtype
        given = {name: each.to(device, dtype if each.is_floating_point() else None) for name, each in inputs.items()}
        with torch.inference_mode():
            made = self._model.get_image_features(**given, return_dict=True)
            layers = [
                _flat(made.pooler_output, counts),
                *(_flat(each, counts) for each in getattr(made, "deepstack_features", None) or ()),
            ]
        if len(layers) != 1 + (added := self.traits.added_layers):
            raise ValueError(
                f"{self._model.config.model_type} adds features after {len(layers) - 1} layers, not {added}"
            )
        # Each is a copy: who keeps one does not keep its batch.
        return [each.clone() for each in torch.split(torch.stack(layers).to(dtype), counts, dim=1)]


def _flat(features: Any, counts: list[int]) -> Tensor:
    # [features, hidden] of all images one after another, whose counts must be those of their layouts.
    if not isinstance(features, Tensor):
        own = [each.numel() // each.shape[-1] for each in features]
        if len(own) == len(counts) and own != counts:
            raise ValueError(f"images have {own} features where their prompts have places for {counts}")
        features = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    flat: Tensor = features.reshape(-1, features.shape[-1])
    if len(flat) != sum(counts):
        raise ValueError(f"images have {len(flat)} features where their prompts have places for {sum(counts)}")
    return flat


def _without_text(kind: type[PreTrainedModel]) -> Any:
    # The class without decoder and head, which then are no weights that transformers looks for in the files. It keeps
    # its name, by which transformers finds how old names of weights are changed.
    def build(self: Any, config: Any, *args: Any, **given: Any) -> None:
        kind.__init__(self, config, *args, **given)
        gone = [prefix_of_decoder(self).removesuffix("."), name_of_head(self)]
        for name in filter(None, gone):
            owner, _, own = name.rpartition(".")
            setattr(self.get_submodule(owner), own, nn.Identity())
        self.all_tied_weights_keys = {}

    changes = {
        "__init__": build,
        "__module__": kind.__module__,
        "_tied_weights_keys": None,
        "_keys_to_ignore_on_load_unexpected": [".*"],
    }
    return type(kind.__name__, (kind,), changes)

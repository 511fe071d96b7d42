"""Images as a model's own processor prepares them: their tokens in a prompt, and the inputs of its vision tower."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from prefillcli.errors import brief, out_of_resource
from prefillcli.images.image import FEATURE, ImageError, ImageLayout, ImageTraits
from prefillcli.walk.forest import UnsupportedModelError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Model types whose images are no run of tokens in a causal prompt, with the reason.
REFUSED = {
    "mllama": "it reads images in layers of their own (cross-attention), not as tokens of the prompt",
    "idefics": "it reads images in layers of their own (cross-attention), not as tokens of the prompt",
    "paligemma": "it reads a prompt in both directions",
}
#: Model types whose logits with images are compared with transformers' whole forward, in tests/unit/models.
READ = frozenset(
    {
        "gemma3",
        "gemma4",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "lfm2_vl",
        "llava",
        "llava_next",
        "llava_onevision",
        "mistral3",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "smolvlm",
    }
)
_MOST_UNLIKE = 200  # times one side of an image may be longer than the other, where it is stretched by the shorter one
_LONGEST_SQUARE = 10_000  # pixels of a side, where an image is filled up to a square
_KEPT = 4096  # layouts of sizes that are kept
_OF_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


def image_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class that reads images and text of a configuration.

    Raises UnsupportedModelError where there is none, or where its images are no tokens of a prompt.
    """
    family = config.model_type
    if reason := REFUSED.get(family):
        raise UnsupportedModelError(f"{family} is not read with images: {reason}")
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family, "")
    kind: type[PreTrainedModel] | None = getattr(transformers, name, None)
    if kind is None:
        raise UnsupportedModelError(
            f"{family} models read no images: take one that does, like a Qwen3-VL or a Gemma 3"
        )
    if family not in READ:
        raise UnsupportedModelError(f"images of {family} models are not read yet: these are {', '.join(sorted(READ))}")
    return kind


def image_traits(config: PreTrainedConfig) -> ImageTraits:
    """Return how the model of this configuration reads images. Raises like `image_class`."""
    kind = image_class(config)
    text: Any = config.get_text_config(decoder=True)
    # What a layer of Gemma 4 takes of each token besides the hidden states is of the padding token at a feature.
    padded = getattr(text, "hidden_size_per_layer_input", 0) and text.pad_token_id is not None
    in_windows = getattr(text, "use_bidirectional_attention", None) == "vision"
    return ImageTraits(
        feature=config.image_token_id,
        stand_in=text.pad_token_id if padded else config.image_token_id,
        axes=3 if hasattr(_base_class(kind), "get_rope_index") else 1,
        both_ways=in_windows or config.model_type == "gemma3",
        added_layers=len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ()),
        in_windows=in_windows,
    )


def _base_class(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    # The class of the model without its head, which has the family's own `get_rope_index`.
    module = sys.modules[kind.__module__]
    base = getattr(module, kind.__name__.replace("ForConditionalGeneration", "Model"), kind)
    return base


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of a vision tower: the `side` of a patch in pixels, the `numbers` of one, width, layers, the width inside
    their MLP and its matrices, and the share of the layers in which all patches of an image see each other."""

    side: int
    numbers: int
    hidden: int
    layers: int
    inner: int
    matrices: int
    seeing_all: float

    @classmethod
    def of(cls, config: Any) -> TowerShape:
        """Return the sizes in the configuration of a vision tower, whose families have names of their own for them."""
        side = int(np.atleast_1d(config.patch_size)[0])
        frames = int(np.atleast_1d(getattr(config, "temporal_patch_size", 1))[0])
        hidden = getattr(config, "embed_dim", None) or config.hidden_size
        layers = getattr(config, "depth", None) or config.num_hidden_layers
        windows = getattr(config, "window_size", None)
        return cls(
            side=side,
            numbers=3 * frames * side * side,
            hidden=hidden,
            layers=layers,
            inner=int(getattr(config, "intermediate_size", None) or hidden * getattr(config, "mlp_ratio", 4)),
            matrices=3 if getattr(config, "hidden_act", "") == "silu" else 2,
            seeing_all=len(getattr(config, "fullatt_block_indexes", ())) / layers if windows else 1.0,
        )

    def operations(self, pixels: Tensor) -> float:
        """Return the operations for an image's pixel values: products with weights, and attention of each of its parts
        that the tower reads by themselves. The projection to the text model's width is left out."""
        patches = pixels.numel() / self.numbers
        # [..., channels, height, width] of each part, or [patches, numbers] of one, or of several.
        alone = pixels.shape[-1] * pixels.shape[-2] / self.side**2 if pixels.dim() > 3 else pixels.shape[-2]
        weights = self.hidden * (4 * self.hidden + self.matrices * self.inner)
        attending = 4 * self.hidden * alone * self.seeing_all
        return float(patches * (2 * self.hidden * self.numbers + self.layers * (2 * weights + attending)))


class ImageProcessing:
    """A model's own processor of images.

    `placeholder` is the token id that a rendered chat has where an image stands, one for each image; `written` is its
    text, and `around` is text that must be written before and after it, so that it is tokenised with its neighbours.
    `traits` says how the text model takes the features.
    """

    def __init__(self, processor: Any, config: PreTrainedConfig, settings: dict[str, Any]) -> None:
        self.traits = image_traits(config)
        self._config = config
        self._processor = processor
        self._settings = settings
        self._layouts: OrderedDict[tuple[int, int, bool], ImageLayout] = OrderedDict()
        self.written: str = processor.image_token
        self.placeholder: int = processor.tokenizer.convert_tokens_to_ids(self.written)
        if len(processor.tokenizer(self.written, add_special_tokens=False)["input_ids"]) != 1:
            raise UnsupportedModelError(f"{config.model_type}: the tokenizer has no token {self.written!r} for images")
        self._lock = threading.Lock()
        self._positions = _bare_model(config) if self.traits.axes > 1 else None
        probe = self._processed(_blank(64, 64), several=False)
        self._by_number = "batch_num_images" in probe
        self.around = self._text_around(probe)

    @classmethod
    def open(
        cls,
        folder: Path,
        config: PreTrainedConfig,
        *,
        max_pixels: int | None = None,
        min_pixels: int | None = None,
    ) -> ImageProcessing:
        """Open the processor of a model's folder; bounds on an image's pixels are set in place of its own.

        Raises UnsupportedModelError for models that are not read with images, for processors that need another
        package, and for bounds that a processor does not have.
        """
        image_class(config)
        processor = open_processor(folder, config)
        settings = _bounds(processor.image_processor, config.model_type, max_pixels, min_pixels)
        return cls(processor, config, settings)

    def layout(self, width: int, height: int, several: bool = False) -> ImageLayout:
        """Return the tokens of an image of this size in pixels. `several`: it is one of several images of its row.

        Raises ImageError for a size that the processor refuses.
        """
        key = (width, height, several and self._by_number)
        with self._lock:
            found = self._layouts.pop(key, None)
        if found is None:
            found = self._lay_out(*key)
        with self._lock:
            self._layouts[key] = found  # the last used is the last in order
            if len(self._layouts) > _KEPT:
                self._layouts.popitem(last=False)
        return found

    def inputs(self, image: Image, several: bool = False) -> dict[str, Tensor]:
        """Return the inputs of the vision tower for one image, as the processor makes them.

        Raises ImageError for a size that the processor refuses.
        """
        made = self._processed(image, several and self._by_number)
        return {name: each for name, each in made.items() if name not in _OF_TEXT and isinstance(each, Tensor)}

    def _lay_out(self, width: int, height: int, several: bool) -> ImageLayout:
        # Only the shapes count: the nearest pixel is the cheapest to find.
        made = self._processed(_blank(width, height), several, do_rescale=False, do_normalize=False, resample=0)
        ids = made["input_ids"][0].numpy()
        before, after = (self._count(text) for text in self.around)
        ids = ids[before : len(ids) - after]
        tokens = np.where(ids == self.traits.feature, FEATURE, ids).astype(np.int32)
        tokens.setflags(write=False)
        operations = TowerShape.of(self._config.vision_config).operations(made["pixel_values"])
        if self._positions is None:
            return ImageLayout(tokens, operations=operations)
        if (tokens != FEATURE).any():
            raise UnsupportedModelError(
                f"{self._config.model_type}: positions of images with text between features are not known"
            )
        grids = {name: made[name] for name in made if name.endswith("grid_thw")}
        positions, _ = self._positions.get_rope_index(  # one token of text after the image says where text goes on
            input_ids=torch.cat([made["input_ids"], torch.zeros(1, 1, dtype=torch.long)], dim=1),
            mm_token_type_ids=torch.cat([made["mm_token_type_ids"], torch.zeros(1, 1, dtype=torch.long)], dim=1),
            **grids,
        )
        begins = int(positions[0, 0, 0])
        offsets = (positions[:, 0, :-1] - begins).numpy().astype(np.int32)
        offsets.setflags(write=False)
        return ImageLayout(tokens, offsets, int(positions[0, 0, -1]) - begins, operations)

    def _processed(self, image: Image, several: bool, **less: Any) -> dict[str, Any]:
        # What the processor makes of one image; of two, where it is one of several.
        count = 2 if several else 1
        self._require_bearable(image, several)
        try:
            made = dict(
                self._processor(
                    images=[[image] * count],
                    text=[self.written * count],
                    text_kwargs={"add_special_tokens": False},
                    images_kwargs={"return_tensors": "pt", **self._settings, **less},
                )
            )
        except (ValueError, ZeroDivisionError, SystemError) as error:
            said = " ".join(str(error).split()).rstrip(".")
            if said.startswith("Size must contain"):
                said = "one of its sides is too short beside the other"
            raise ImageError(f"an image of {image.width}x{image.height} pixels cannot be processed: {said}") from None
        made |= {name: torch.as_tensor(each) for name, each in made.items() if name in _OF_TEXT}
        if several:
            own = made["input_ids"].shape[1] // 2
            made = {
                name: each[:, :own] if name in _OF_TEXT else each if name == "batch_num_images" else each[:1]
                for name, each in made.items()
            }
        return made

    def _require_bearable(self, image: Image, several: bool) -> None:
        # Some processors make an image larger before they make it smaller: a narrow one would take all memory.
        shorter, longer = sorted(image.size)
        size = getattr(self._processor.image_processor, "size", None) or {}
        by_shorter = size.get("shortest_edge") and not size.get("longest_edge")
        if (by_shorter and longer > _MOST_UNLIKE * shorter) or (several and longer > _LONGEST_SQUARE):
            raise ImageError(f"an image of {image.width}x{image.height} pixels is too long for the model's processor")

    def _text_around(self, made: dict[str, Any]) -> tuple[str, str]:
        # The text before the first control token of an image, and that after the last: with its neighbours in the
        # prompt it may become other tokens than alone.
        tokenizer = self._processor.tokenizer
        ids = made["input_ids"][0].tolist()
        control = {*tokenizer.added_tokens_decoder, self.traits.feature}
        places = [at for at, token in enumerate(ids) if token in control]
        if not places:
            raise UnsupportedModelError(f"{self._config.model_type}: an image has no token of its own in a prompt")
        return tokenizer.decode(ids[: places[0]]), tokenizer.decode(ids[places[-1] + 1 :])

    def _count(self, text: str) -> int:
        return len(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0


def _blank(width: int, height: int) -> Image:
    from PIL import Image

    return Image.new("RGB", (width, height))


def _bare_model(config: PreTrainedConfig) -> Any:
    # The family's `get_rope_index` reads the configuration and no module: none is built.
    kind = _base_class(image_class(config))
    model: Any = object.__new__(kind)
    nn.Module.__init__(model)
    model.config = config
    return model


def open_processor(folder: Path, config: PreTrainedConfig) -> Any:
    """Open transformers' own processor of a folder, without its parts for videos and sound.

    Raises UnsupportedModelError where it prepares images with torchvision.
    """
    # AutoProcessor opens a processor's parts for videos and sound too, for which it needs torchvision. They are not
    # used here: they are left out.
    family = config.model_type
    try:
        kind = processor_class(family)
        attributes = kind.get_attributes()
        images = AutoImageProcessor.from_pretrained(folder, backend="pil", config=config)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        settings, _ = kind.get_processor_dict(folder)
        with _without_number_words(kind):
            parts = {"image_processor": images, "tokenizer": tokenizer}
            return _lenient(kind).from_args_and_dict([parts.get(each) for each in attributes], settings)
    except (OSError, ImportError, ValueError) as error:
        if out_of_resource(error):
            raise
        if "torchvision" not in str(error) and "torchvision" not in str(error.__cause__):
            raise UnsupportedModelError(f"{folder}: its image processor cannot be opened: {brief(error)}") from None
        raise UnsupportedModelError(
            f"the images of {family} are prepared with torchvision, which is not installed: pip install torchvision"
        ) from None


def processor_class(family: str) -> Any:
    """Return transformers' class of a model type's processor, also where it wants torchvision without using it.

    Raises UnsupportedModelError where there is none, and ImportError where it does use torchvision.
    """
    # Some processors' modules import from the module of images for torchvision what that for Pillow has too.
    name = PROCESSOR_MAPPING_NAMES.get(family)
    if name is None:
        raise UnsupportedModelError(f"{family} is not read with images: transformers has no processor for it")
    with contextlib.suppress(ImportError):
        kind = getattr(transformers, name)
        if not getattr(kind, "is_dummy", False):
            return kind
    for owner in (owner for owner, own in PROCESSOR_MAPPING_NAMES.items() if own == name):
        place = f"transformers.models.{owner}"
        for_torchvision = f"{place}.image_processing_{owner}"
        with contextlib.suppress(ImportError):
            for_pillow = importlib.import_module(f"{place}.image_processing_pil_{owner}")
            sys.modules[for_torchvision] = for_pillow
            try:
                return getattr(importlib.import_module(f"{place}.processing_{owner}"), name)
            finally:
                del sys.modules[for_torchvision]
    raise ImportError(f"{name} needs torchvision")


def _lenient(kind: Any) -> Any:
    def check(self: Any, argument_name: str, argument: Any) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, argument_name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check, "__module__": kind.__module__})


@contextlib.contextmanager
def _without_number_words(kind: Any) -> Iterator[None]:
    # SmolVLM's processor wants a package that writes numbers as words, for videos alone.
    module: Any = importlib.import_module(kind.__module__)
    missing = getattr(module, "num2words", str) is None
    if missing:
        module.num2words = str
    try:
        yield
    finally:
        if missing:
            module.num2words = None


def _bounds(images: Any, family: str, most: int | None, least: int | None) -> dict[str, Any]:
    # The processor's own bounds on pixels, with those that are given in their place.
    if most is None and least is None:
        return {}
    known = images.size if hasattr(sys.modules[type(images).__module__], "smart_resize") else None
    if known is None:  # of other processors `size` is in edges
        raise UnsupportedModelError(f"--set max_pixels and min_pixels: {family}'s processor has no such settings")
    size = {"shortest_edge": least or known["shortest_edge"], "longest_edge": most or known["longest_edge"]}
    if size["shortest_edge"] > size["longest_edge"]:
        raise UnsupportedModelError(
            f"--set min_pixels={size['shortest_edge']} and max_pixels={size['longest_edge']}: no image has these"
        )
    return {"size": size}

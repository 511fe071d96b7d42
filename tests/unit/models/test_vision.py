"""Images as layouts and features, against each family's own processor and whole forward in transformers."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from prefillcli.images.image import FEATURE, FIRST_FEATURE, ImageError, PlacedImage, RowImage
from prefillcli.models.image_processing import ImageProcessing
from prefillcli.models.multimodal import load_text_part, read_config
from prefillcli.models.vision import VisionTower
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from tests.unit.models.image_families import (
    EACH_FAMILY,
    NEEDS_TORCHVISION,
    eager_logits,
    load_whole,
    make_family,
    open_processor,
)

CPU = torch.device("cpu")
SIZES = [(40, 30), (64, 64), (20, 90), (100, 24), (5, 7)]
WITHOUT_TORCHVISION = find_spec("torchvision") is None
NAMES = [
    *EACH_FAMILY,
    *(
        pytest.param(name, marks=pytest.mark.skipif(WITHOUT_TORCHVISION, reason="needs torchvision"))
        for name in NEEDS_TORCHVISION
    ),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}

    class Lazily(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = make_family(name, tmp_path_factory.mktemp(name))
            return self[name]

    return Lazily(made)


def picture(width: int, height: int, seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def placed(images: Sequence[Image.Image], processing: ImageProcessing) -> list[PlacedImage]:
    several = len(images) > 1
    made, first = [], FIRST_FEATURE
    for image in images:
        file = io.BytesIO()
        image.save(file, "png")
        layout = processing.layout(*image.size, several)
        row = RowImage(file.getvalue(), b"", *image.size)
        made.append(PlacedImage(first, layout.features, row, several))
        first += layout.features
    return made


def opened(folder: Path) -> tuple[ImageProcessing, VisionTower]:
    config = read_config(folder)
    processing = ImageProcessing.open(folder, config)
    return processing, VisionTower.load(folder, config, processing, dtype=torch.float32, device=CPU, attention="eager")


def expanded(text: str, images: Sequence[Image.Image], processing: ImageProcessing, tokenizer: Any) -> Any:
    """Tokens with features as `FEATURE`, and positions [axes, tokens]."""
    before, after = processing.around
    axes = processing.traits.axes
    text = text.replace(processing.written, before + processing.written + after)
    ids: list[int] = []
    positions: list[Any] = []
    at, queue = 0, list(images)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token != processing.placeholder:
            ids.append(token)
            positions.append(np.full((axes, 1), at))
            at += 1
            continue
        layout = processing.layout(*queue.pop(0).size, len(images) > 1)
        ids.extend(layout.tokens)
        if layout.offsets is None:
            positions.append(np.arange(at, at + len(layout.tokens))[None].repeat(axes, 0))
            at += len(layout.tokens)
        else:
            positions.append(layout.offsets + at)
            at += layout.advance
    return np.array(ids), np.concatenate(positions, axis=1)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_text_with_features_in_place_of_embeddings_gives_the_whole_forward(
    name: str, count: int, folders: dict[str, Path]
) -> None:
    folder = folders[name]
    processing, tower = opened(folder)
    text_model, _ = load_text_part(folder, torch.float32, "eager")
    for start in range(len(SIZES) if count == 1 else 2):
        if (name, count, SIZES[start]) == ("mistral3", 1, (5, 7)):
            continue  # transformers fails at the one feature of this image
        images = [picture(*SIZES[(start + number) % len(SIZES)], seed=number) for number in range(count)]
        parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": "\nWhat is it? "}]
        parts.insert(1, {"type": "text", "text": "one,"})
        messages = [{"role": "user", "content": parts}]
        ids, logits = eager_logits(folder, messages, images)
        tokenizer = open_processor(folder).tokenizer
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens, positions = expanded(text, images, processing, tokenizer)
        feature = read_config(folder).image_token_id
        np.testing.assert_array_equal(np.where(tokens == FEATURE, feature, tokens), ids)
        features = torch.cat(tower.features(placed(images, processing)), dim=1)
        ours = forward_with_features(text_model, tokens, positions, features, processing)
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 500), (190, 1), (1, 2000), (2000, 1)])
@pytest.mark.parametrize("name", ["smolvlm", "llava", "qwen2_vl", "gemma4", "mistral3"])
def test_an_image_of_any_size_has_its_layout_or_a_reason_why_not(
    name: str, size: tuple[int, int], folders: dict[str, Path]
) -> None:
    processing, tower = opened(folders[name])
    image = picture(*size, seed=1)
    narrow = name in ("llava", "qwen2_vl") and max(size) > 200 * min(size)
    if narrow or (name == "mistral3" and max(size) > 100 * min(size)):
        for read in (lambda: processing.layout(*size), lambda: processing.inputs(image)):
            with pytest.raises(ImageError, match=f"image of {size[0]}x{size[1]} pixels"):
                read()
        return
    layout = processing.layout(*size)
    (found,) = tower.features(placed([image], processing))
    assert found.shape[1] == layout.features > 0
    processor = open_processor(folders[name])
    ids = processor(text=[processing.written], images=[[image]], add_special_tokens=False)["input_ids"][0]
    feature = processing.traits.feature
    assert layout.features == list(ids).count(feature)


@pytest.mark.parametrize("name", ["smolvlm", "llava_onevision", "qwen3_vl", "mistral3"])
def test_features_are_the_same_in_any_batch(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    config, processing = read_config(folder), ImageProcessing.open(folder, read_config(folder))
    images = [placed([picture(*size, seed=n)], processing)[0] for n, size in enumerate([*SIZES, *SIZES])]
    together, alone = (
        VisionTower.load(folder, config, processing, dtype=torch.float32, device=CPU, batch_bytes=most).features(
            images
        )
        for most in (1 << 30, 0)
    )
    assert len({each.shape for each in together}) > 1
    for ours, own in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_a_tower_has_the_weights_beside_the_text_model_and_no_others(name: str, folders: dict[str, Path]) -> None:
    whole = load_whole(folders[name])
    _, tower = opened(folders[name])
    decoder: Any = whole.get_decoder()
    text = {id(each) for part in (decoder, whole.get_output_embeddings()) for each in part.parameters()}
    wanted = sum(each.nbytes for each in whole.parameters() if id(each) not in text)
    buffers = sum(each.nbytes for each in tower._model.buffers())
    assert tower.weight_bytes - buffers == wanted


def test_a_tower_without_weights_in_the_files_is_refused(tmp_path: Path) -> None:
    folder = make_family("qwen2_vl", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({name: each for name, each in tensors.items() if "merger" not in name}, folder / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"6 weights of the vision tower are missing: .*merger"):
        opened(folder)


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_bounds_on_pixels_are_those_of_the_processor(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    bounded = ImageProcessing.open(folder, read_config(folder), max_pixels=48 * 48, min_pixels=40 * 40)
    processor = open_processor(folder)
    processor.image_processor.size = {"shortest_edge": 40 * 40, "longest_edge": 48 * 48}
    default = ImageProcessing.open(folder, read_config(folder))
    for size in SIZES:
        image = picture(*size, seed=3)
        made = processor.image_processor(images=[image], return_tensors="pt")
        inputs = bounded.inputs(image)
        torch.testing.assert_close(inputs["pixel_values"], made["pixel_values"], rtol=0, atol=0)
        assert bounded.layout(*size).features == int(made["image_grid_thw"].prod()) // 4
    assert bounded.layout(100, 100).features < default.layout(100, 100).features


def test_what_is_not_read_with_images_is_refused_by_name(folders: dict[str, Path]) -> None:
    for name in ("smolvlm", "gemma3"):
        with pytest.raises(UnsupportedModelError, match=f"max_pixels .*{name}.s processor"):
            ImageProcessing.open(folders[name], read_config(folders[name]), max_pixels=100)
    with pytest.raises(UnsupportedModelError, match="max_pixels=100: no image has these"):
        ImageProcessing.open(folders["qwen2_vl"], read_config(folders["qwen2_vl"]), max_pixels=100)
    for config, reason in (
        (transformers.MllamaConfig(), "mllama .*cross-attention"),
        (transformers.IdeficsConfig(), "idefics .*cross-attention"),
        (transformers.PaliGemmaConfig(), "paligemma .*both directions"),
        (transformers.LlamaConfig(), "llama models read no images"),
        (transformers.AyaVisionConfig(), "images of aya_vision models are not read yet"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            ImageProcessing.open(Path("nowhere"), config)


@pytest.mark.skipif(not WITHOUT_TORCHVISION, reason="torchvision is here")
def test_a_processor_that_needs_torchvision_is_refused_with_the_cure(tmp_path: Path) -> None:
    folder = make_family("lfm2_vl", tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"lfm2_vl are prepared with torchvision.*pip install torchvision"):
        ImageProcessing.open(folder, read_config(folder))


def forward_with_features(
    model: Any, tokens: Any, positions: Any, features: Tensor, processing: ImageProcessing
) -> Tensor:
    """The text model's forward with `input_ids`, features put in by hooks alone."""
    traits = processing.traits
    places = torch.from_numpy(tokens == FEATURE)
    ids = torch.from_numpy(np.where(tokens == FEATURE, traits.stand_in, tokens))[None]

    def put(_: Any, __: Any, made: Tensor) -> Tensor:
        made = made.clone()
        made[0, places] = features[0]
        return made

    hooks = [model.get_input_embeddings().register_forward_hook(put)]
    layers = decoder_layers(model).layers
    for number in range(traits.added_layers):

        def add(_: Any, __: Any, made: Any, number: int = number) -> Any:
            hidden = (made[0] if isinstance(made, tuple) else made).clone()
            hidden[0, places] += features[1 + number]
            return (hidden, *made[1:]) if isinstance(made, tuple) else hidden

        hooks.append(layers[number].register_forward_hook(add))
    given: dict[str, Any] = {}
    if traits.axes > 1:
        given["position_ids"] = torch.from_numpy(positions)[:, None]
    if traits.both_ways:
        given["attention_mask"] = masks(model.config.get_text_config(), tokens)
    try:
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, **given).logits[0]
            return logits
    finally:
        for hook in hooks:
            hook.remove()


def masks(config: Any, tokens: Any) -> dict[str, Tensor]:
    """What each kind of layer lets a token see, where features that follow one another see each other."""
    count = len(tokens)
    at = np.arange(count)
    starts = (tokens == FEATURE) & np.concatenate([[True], tokens[:-1] != FEATURE])
    run = np.where(tokens == FEATURE, starts.cumsum(), 0)
    causal = at[None] <= at[:, None]
    seen = causal | ((run[None] == run[:, None]) & (run[None] > 0))
    window = at[None] > at[:, None] - config.sliding_window
    whole = seen if config.model_type == "gemma3_text" else causal
    allowed = {"full_attention": whole, "sliding_attention": seen & window}
    return {
        kind: torch.where(torch.from_numpy(each), 0.0, torch.finfo(torch.float32).min)[None, None]
        for kind, each in allowed.items()
    }

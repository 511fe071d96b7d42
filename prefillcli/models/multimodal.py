"""The text model of a checkpoint that also reads images or sound: only its weights are read.

Where a family has its own text class, that class is loaded. Otherwise the whole class is, without its towers: without
an image, its forward does not call them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging as transformers_logging

from prefillcli.models.files import lacks_vocabulary, read_header, weight_files
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers

#: Flags in config.json that change what a forward returns, with the value that is used.
FORWARD = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}


@dataclass(frozen=True, slots=True)
class TextPart:
    """The part of a multimodal model that is built, with its configuration."""

    kind: type[PreTrainedModel]
    config: Any


def text_part(whole: Any) -> TextPart | None:
    """Return the part that scores text in a multimodal model with this configuration; None for models of text alone,
    and where transformers has no class that gives the next token."""
    text = whole.get_text_config()
    own_code = not type(whole).__module__.startswith("transformers.")
    if text is whole or own_code:
        return None
    for family in (text.model_type, whole.model_type):
        kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family, ""), None)
        if kind is not None and kind.config_class is type(text):
            text = copy.deepcopy(text)
            text.tie_word_embeddings = getattr(whole, "tie_word_embeddings", text.tie_word_embeddings)
            return TextPart(kind, text)
    kind = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(whole.model_type, ""), None)
    return None if kind is None else TextPart(kind, whole)


@contextmanager
def no_advice() -> Iterator[None]:
    """Silence what transformers logs and does not raise."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a model's configuration, without flags of its training that would change what a forward returns."""
    with no_advice():  # on parts of it that it does not use
        whole = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    headless = lacks_vocabulary(folder)  # it gets another head, and until then that of its embedding
    for config in (whole, whole.get_text_config()):
        for name, value in FORWARD.items() if isinstance(config, PreTrainedConfig) else ():
            setattr(config, name, value)
        if headless:
            config.tie_word_embeddings = True
    return whole


@dataclass(frozen=True, slots=True)
class TextOutline:
    """The text model of a checkpoint, without numbers.

    `empty` is the model on the meta device, without the towers that its class has; `towers` are the shapes of their
    tensors by name. `names` has, by the names of tensors in the files, those by which transformers loads them.
    """

    config: Any
    empty: PreTrainedModel
    towers: Mapping[str, torch.Size]
    names: Mapping[str, str]


def outline_text_part(folder: Path, whole: Any, dtype: torch.dtype) -> TextOutline:
    """Return the outline of the text model of a checkpoint with the configuration `whole`. Raises
    UnsupportedModelError."""
    part = text_part(whole)
    if part is None:
        raise UnsupportedModelError(f"{folder}: {whole.model_type} has no text model that scores")
    if getattr(part.config.get_text_config(), "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"{folder}: some layers of a {whole.model_type} only read images, and the others are not read layer by "
            "layer\ntake --weights resident"
        )
    with torch.device("meta"):
        empty = part.kind._from_config(part.config, dtype=dtype)
    towers = drop_towers(empty) if part.config is whole else {}
    names = {stored: name for name, (_, stored) in _names_in_files(folder, empty, empty.state_dict()).items()}
    return TextOutline(part.config, empty, towers, names)


def drop_towers(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Take the towers out of a model; return the shapes of their tensors by name."""
    towers, tensors = _towers(model), model.state_dict()
    for name in towers:
        owner, _, own = name.removesuffix(".").rpartition(".")
        setattr(model.get_submodule(owner), own, nn.Identity())
    return {name: each.shape for name, each in tensors.items() if name.startswith(tuple(towers))} if towers else {}


def load_text_part(folder: Path, dtype: torch.dtype, attention: str | None) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the text model of a checkpoint on the CPU; return it with transformers' report on loading it.

    Raises UnsupportedModelError for quantised weights and for files whose names are not those of the text model.
    """
    whole = read_config(folder)
    if getattr(whole, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{folder}: of a quantised {whole.model_type}, the text model cannot be loaded by itself"
        )
    part = text_part(whole)
    if part is None:
        raise UnsupportedModelError(f"{folder}: {whole.model_type} has no text model that scores")
    with torch.device("meta"):
        empty = part.kind._from_config(part.config, dtype=dtype)
    prefix = prefix_of_decoder(empty)
    towers = _towers(empty) if part.config is whole else []
    # Layers that only read images: the text model's forward skips them without an image.
    idle = frozenset(getattr(part.config.get_text_config(), "cross_attention_layers", None) or ())
    unread = (*towers, *(f"{decoder_layers(empty).prefix}{number}." for number in idle))
    wanted = {name: tensor for name, tensor in empty.state_dict().items() if not name.startswith(unread)}
    places = _names_in_files(folder, empty, wanted)
    given = _read({name: place for name, place in places.items() if not name.startswith(unread)})
    # One number stands for each other tensor: it takes no memory, and transformers finds nothing missing.
    given |= {
        name: torch.zeros((), dtype=dtype).expand(tensor.shape)
        for name, tensor in empty.state_dict().items()
        if name not in wanted
    }
    model, info = part.kind.from_pretrained(
        None,
        config=part.config,
        state_dict=given,
        dtype=dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    # Tensors beside the decoder's own parts belong to a tower, or to a head that is not read.
    inside = {name.removeprefix(prefix).partition(".")[0] for name in wanted if name.startswith(prefix)}
    unknown = info["unexpected_keys"]
    info["unexpected_keys"] = {name for name in unknown if name.startswith(tuple(f"{prefix}{own}." for own in inside))}
    if towers:
        drop_towers(model)
    if idle:
        place = decoder_layers(model)
        place.replace([layer for number, layer in enumerate(place.layers) if number not in idle])
        decoder: Any = place.owner
        decoder.cross_attention_layers = []
        model.config.num_hidden_layers = len(place.layers)
    return model, info


def _towers(model: PreTrainedModel) -> list[str]:
    # The names of the modules beside the decoder and the head, each with a dot at its end.
    head = name_of_head(model)
    kept = [prefix_of_decoder(model).removesuffix("."), *([head] if head else [])]
    found = []
    inside = [""]
    while inside:
        at = inside.pop()
        for own, child in model.get_submodule(at).named_children():
            name = f"{at}.{own}".removeprefix(".")
            if name in kept:
                continue
            if any(each.startswith(f"{name}.") for each in kept):
                inside.append(name)
            elif any(True for _ in child.parameters()):
                found.append(f"{name}.")
    return found


def _names_in_files(folder: Path, model: PreTrainedModel, wanted: dict[str, Tensor]) -> dict[str, tuple[Path, str]]:
    # By the model's names, the files and the names there of the decoder's tensors and those of the head. Checkpoints
    # have a decoder's tensors under one prefix, whose name varies with the version of transformers. The prefix under
    # which most names and shapes match is taken.
    prefix = prefix_of_decoder(model)
    inner = {name.removeprefix(prefix): tuple(each.shape) for name, each in wanted.items() if name.startswith(prefix)}
    stored = {
        name: (path, tuple(tensor["shape"]))
        for path in weight_files(folder)
        for name, tensor in read_header(path).items()
    }
    found: Counter[str] = Counter()
    for name, (_, shape) in stored.items():
        for start in [0, *(at + 1 for at, letter in enumerate(name) if letter == ".")]:
            if inner.get(name[start:]) == shape:
                found[name[:start]] += 1
    if not found:
        raise UnsupportedModelError(f"{folder}: no tensors of {type(model).__name__} are in the files")
    theirs = max(found, key=lambda each: (found[each], -len(each)))
    places = {
        prefix + name.removeprefix(theirs): (path, name)
        for name, (path, _) in stored.items()
        if name.startswith(theirs) and (theirs or name in inner)
    }
    if head := name_of_head(model):
        for own in (name for name in wanted if name.startswith(f"{head}.")):
            last = head.rpartition(".")[2] + own.removeprefix(head)
            for name, (path, shape) in stored.items():
                if shape == tuple(wanted[own].shape) and f".{name}".endswith(f".{last}"):
                    places[own] = (path, name)
    return places


def prefix_of_decoder(model: PreTrainedModel) -> str:
    """Return what the names of all of a model's text decoder begin with, with its dot."""
    place = decoder_layers(model)
    return place.prefix.removesuffix(f"{place.name}.")


def name_of_head(model: PreTrainedModel) -> str | None:
    """Return the name of the module that makes logits; None: there is none."""
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _read(places: dict[str, tuple[Path, str]]) -> dict[str, Tensor]:
    given = {}
    for path in sorted({path for path, _ in places.values()}):
        with safe_open(path, framework="pt") as file:
            for name, (own, stored) in places.items():
                if own == path:
                    given[name] = file.get_tensor(stored)
    return given

"""Whether a GGUF file is whole, and whether transformers makes the model of it that the file describes.

transformers takes over the settings of a file that it knows, and drops the others. A model that is read without one of
them gives wrong scores and no error, so it is refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from prefillcli.errors import UsageError
from prefillcli.models.gguf_header import GgufHeader, GgufTensor, tensor_bytes
from prefillcli.models.safetensors import layer_number
from prefillcli.models.tensor_ranges import check_ranges

_WHOLE = {
    "block_count": (1, 4096),
    "context_length": (1, 1 << 40),
    "embedding_length": (1, 1 << 20),
    "feed_forward_length": (1, 1 << 24),
    "attention.head_count": (1, 1 << 16),
    "attention.head_count_kv": (0, 1 << 16),
    "attention.key_length": (1, 1 << 16),
    "rope.dimension_count": (0, 1 << 16),
    "expert_count": (0, 1 << 16),
    "vocab_size": (1, 1 << 24),
}
"""Least and most of the whole numbers of a family; some are lists with one for each layer."""

_ROTARY_FACTORS = "rope_freqs.weight"  # what rotary frequencies are divided by, in Llama 3.1 and later
_AS_SAFETENSORS = "take the model as safetensors"


def check_parts(parts: Sequence[GgufHeader]) -> None:
    """Refuse files that are cut short, of several models, or hold numbers that cannot be read. Raises UsageError."""
    first = parts[0]
    if not first.architecture:
        raise UsageError(f"{first.path}: no general.architecture, so it does not say what model it is")
    for name, (low, high) in _WHOLE.items():
        value = first.setting(name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and (type(each) is not int or not low <= each <= high):
                raise UsageError(
                    f"{first.path}: {first.architecture}.{name} is {each!r}; "
                    f"it must be a whole number from {low:,} to {high:,}"
                )
    _check_split(parts)
    _check_layers(parts)
    for part in parts:
        for tensor in part.tensors:
            _check_kind(part, tensor)
        ranges = ((each.offset, each.offset + tensor_bytes(each), each.name) for each in part.tensors)
        try:
            check_ranges(ranges, part.size - part.data_start, alignment=part.alignment)
        except ValueError as error:
            raise UsageError(f"{part.path}: damaged: {error}\ncopy or download it again") from None


def _check_split(parts: Sequence[GgufHeader]) -> None:
    for number, part in enumerate(parts):
        count = part.fields.get("split.count", 0)
        if count not in (0, len(parts)) or (len(parts) > 1 and part.fields.get("split.no") != number):
            raise UsageError(
                f"{part.path}: is part {part.fields.get('split.no', 0) + 1} of {count or 1} of a model, "
                f"but its name does not say so\ngive the parts the names that they had, like "
                f"{part.path.stem}-00001-of-{count or 1:05}.gguf"
            )
    names = [tensor.name for part in parts for tensor in part.tensors]
    wanted = parts[0].fields.get("split.tensors.count", len(names)) if len(parts) > 1 else len(names)
    if wanted != len(names) or len(set(names)) != len(names):
        raise UsageError(f"{parts[0].path}: its parts are not of one model: {len(names)} tensors, not {wanted}")


def _check_layers(parts: Sequence[GgufHeader]) -> None:
    """Refuse files whose tensors are of fewer or more layers than their settings say."""
    first = parts[0]
    told = first.setting("block_count")
    names = [each.name for part in parts for each in part.tensors if each.name.startswith("blk.")]
    layers = 1 + max((number for name in names if (number := layer_number(name)) is not None), default=-1)
    if told is not None and layers and told != layers:
        raise UsageError(
            f"{first.path}: damaged: {first.architecture}.block_count is {told}; its tensors are of {layers} layers"
        )


def _check_kind(part: GgufHeader, tensor: GgufTensor) -> None:
    import gguf

    known = {kind.value: kind.name for kind in gguf.GGMLQuantizationType}
    if tensor.kind not in known:
        raise UsageError(
            f"{part.path}: {tensor.name} has quantisation {tensor.kind}, which the package gguf does not know\n"
            "update it (pip install -U gguf), or take a file with another quantisation"
        )
    kind = gguf.GGMLQuantizationType(tensor.kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
    except NotImplementedError:
        raise UsageError(
            f"{part.path}: {tensor.name} has quantisation {kind.name}, which cannot be read\n"
            "take a file with another quantisation, Q4_K_M or Q8_0 for example"
        ) from None
    if tensor.shape[-1] % numbers:
        raise UsageError(
            f"{part.path}: damaged: {tensor.name} has rows of {tensor.shape[-1]:,} numbers in {kind.name}"
        )


def complete_config(parts: Sequence[GgufHeader], config: Any) -> None:
    """Add to transformers' configuration of a model what it can be told and was not read.

    Raises UsageError for what it cannot be told.
    """
    header = parts[0]
    if config.model_type == "phi3" and header.setting("attention.sliding_window"):
        config.sliding_window = header.setting("attention.sliding_window")
    _add_rotary_factors(parts, config)
    rope = _rope(config)
    scaling = header.setting("rope.scaling.type")
    if scaling not in (None, "none", rope.get("rope_type")):
        raise UsageError(
            f"{header.path}: its positions are scaled ({scaling}), which transformers does not read from GGUF\n"
            f"{_AS_SAFETENSORS}"
        )
    if all(header.setting(name) is None for name in _EPSILONS):
        raise UsageError(f"{header.path}: damaged: no {header.architecture}.{_EPSILONS[0]}, and no layer_norm_epsilon")
    for name, read in _SETTINGS.items():
        told, taken = header.setting(name), read(config)
        if isinstance(told, int | float) and not math.isclose(told, taken or 0, rel_tol=1e-4):
            raise UsageError(
                f"{header.path}: {header.architecture}.{name} is {told:g}, which transformers does not read from "
                f"GGUF: it takes {taken or 0:g}\n{_AS_SAFETENSORS}"
            )


def check_tensors(parts: Sequence[GgufHeader], config: Any, wanted: int, known: Collection[str]) -> None:
    """Refuse files with more or fewer numbers than the `wanted` ones of transformers' model, or with tensors whose
    names are not among those that it has: `known` ones, with `.weight` at their end or without. Raises UsageError."""
    tensors = [each for part in parts for each in part.tensors if each.name != _ROTARY_FACTORS]
    names = (each.name for each in tensors)
    strange = [name for name in names if name not in known and name.removesuffix(".weight") not in known]
    if strange:
        raise UsageError(
            f"{parts[0].path}: {len(strange)} of its tensors have no place in the {config.model_type} that "
            f"transformers makes of its settings, {strange[0]} among them\n{_AS_SAFETENSORS}"
        )
    held = sum(each.numbers for each in tensors)
    if held != wanted:
        raise UsageError(
            f"{parts[0].path}: its tensors hold {held:,} numbers; the {config.model_type} that transformers makes of "
            f"it has {wanted:,}\n{_AS_SAFETENSORS}"
        )


def _add_rotary_factors(parts: Sequence[GgufHeader], config: Any) -> None:
    """Take over the rotary factors of Llama 3.1 and later, which llama.cpp saves as a tensor."""
    found = [(part, tensor) for part in parts for tensor in part.tensors if tensor.name == _ROTARY_FACTORS]
    if not found:
        return
    part, tensor = found[0]
    factors = np.fromfile(part.path, "<f4", tensor.numbers, offset=part.data_start + tensor.offset)
    rope = _rope(config)
    scaled = {
        "rope_type": "llama3",
        "rope_theta": rope.get("rope_theta"),
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if tensor.kind == 0 and np.allclose(factors, 1):
        return
    known = tensor.kind == 0 and rope.get("rope_type") == "default"
    if not known or not np.allclose(factors, _llama3(scaled, 2 * len(factors)), rtol=1e-3):
        raise UsageError(
            f"{part.path}: {_ROTARY_FACTORS} scales its positions in a way that transformers does not read from GGUF\n"
            f"{_AS_SAFETENSORS}"
        )
    config.rope_parameters = scaled


def _llama3(rope: Mapping[str, Any], width: int) -> Any:
    """The factors of `rope_type: llama3` for heads of this width, float64 [width / 2]."""
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    turns = rope["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _rope(config: Any) -> Mapping[str, Any]:
    """The rotary encoding of all layers, or of those that attend to all tokens."""
    rope = getattr(config, "rope_parameters", None) or {}
    inner: Mapping[str, Any] = rope.get("full_attention", rope)
    return inner


def _first(*names: str) -> Callable[[Any], Any]:
    return lambda config: next((getattr(config, name) for name in names if getattr(config, name, None)), None)


def _rotary_width(config: Any) -> float:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = _rope(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    return float(int(width * share))


_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")  # each family has one
_EPSILON = _first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
_EXPERTS = _first("num_experts", "num_local_experts", "n_routed_experts")
_SETTINGS: dict[str, Callable[[Any], Any]] = {
    "attention.sliding_window": _first("sliding_window"),
    **dict.fromkeys(_EPSILONS, _EPSILON),
    "attn_logit_softcapping": _first("attn_logit_softcapping"),
    "final_logit_softcapping": _first("final_logit_softcapping"),
    "rope.freq_base": lambda config: _rope(config).get("rope_theta"),
    "rope.dimension_count": _rotary_width,
    "expert_count": _EXPERTS,
    "expert_used_count": _first("num_experts_per_tok"),
    "logit_scale": _first("logit_scale"),
    "embedding_scale": _first("embedding_multiplier"),
    "residual_scale": _first("residual_multiplier"),
    "attention.scale": _first("attention_multiplier"),
}
"""Settings of a file that change what the model computes, and where transformers' configuration has them."""

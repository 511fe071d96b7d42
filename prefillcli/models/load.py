"""A model's weights, loaded with transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from prefillcli.errors import ResourceError, UsageError, brief
from prefillcli.models.families import VERIFIED
from prefillcli.models.find import ModelFiles
from prefillcli.models.placement import Placement, layers_prefix, place_weights
from prefillcli.models.rehearsal import rehearse
from prefillcli.models.streamed_layers import ROLLING_SLOTS, StreamedLayers, slot_bytes
from prefillcli.prefill.forest import ATTENTION, UnsupportedModelError, register


def load_model(files: ModelFiles, device: torch.device, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the weights onto `device`, ready to be walked.

    Raises UnsupportedModelError if the walk of a family that is not verified differs from its own eager forward.
    """
    register()
    model = load_weights(files, device, attention=ATTENTION, trust_remote_code=trust_remote_code)
    if not isinstance(getattr(model.get_decoder(), "layers", None), nn.ModuleList):
        raise UnsupportedModelError(f"{files.family} keeps its decoder layers where the walk does not find them")
    if files.family not in VERIFIED:
        rehearse(model, files.config)
    return model


def load_weights(
    files: ModelFiles, device: torch.device, *, attention: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on `device` as transformers makes it, from safetensors only; `attention` as it is called there (None:
    what transformers takes by itself). Raises UsageError."""
    with _quiet_transformers():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                files.path,
                dtype=files.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            if "ignore_mismatched_sizes" in str(error):
                raise UsageError(f"{files.path}: the shapes of the weights are not those of config.json") from None
            raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    _refuse_missing(files, info)
    model = model.to(device).eval()
    model.requires_grad_(False)
    return model


def load_streamed(
    files: ModelFiles, device: torch.device, *, memory: int, share: float = 1.0, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, StreamedLayers]:
    """The model on `device` without the weights of its decoder layers, and the source that reads these from the files.

    At most `memory` bytes of weights will be on the device, this process's `share` of what all may take. Raises
    ResourceError, with what it takes, where that is too little; UnsupportedModelError for a family that is not
    verified, and for files that cannot be read layer by layer.
    """
    register()
    if files.family not in VERIFIED:
        raise UnsupportedModelError(
            f"{files.family} is not among the verified families, so its own forward must be compared with the walk's, "
            f"which needs all weights in memory\ntake --weights resident; verified are {', '.join(sorted(VERIFIED))}"
        )
    with _quiet_transformers():
        model, placement = _load_around_layers(files, trust_remote_code)
    decoder = model.get_decoder()
    layers = decoder.layers
    decoder.layers = nn.ModuleList()  # without weights they cannot be moved
    model = model.to(device).eval()
    model.requires_grad_(False)
    decoder.layers = layers.eval()
    for layer, parts in zip(layers, placement.layers, strict=True):
        _keep_buffers(layer, set(parts.tensors), device)
    around = sum(tensor.nbytes for tensor in {id(p): p for p in model.parameters() if not p.is_meta}.values())
    sizes = [slot_bytes(parts, device) for parts in placement.layers]
    least = around + min(ROLLING_SLOTS, len(sizes)) * max(sizes)
    if memory < least:
        given = f"{memory / 2**20:,.1f} MiB{' for each worker' if share < 1 else ''}"
        raise ResourceError(
            f"--weights-memory: {given} is too little for {files.path}: embedding and head take "
            f"{around / 2**20:,.1f} MiB and a layer {max(sizes) / 2**20:,.1f} MiB\n"
            f"give {math.ceil(least / share / 2**20)}MiB or more, which is room for two layers"
        )
    per_token = getattr(files.config, "num_experts_per_tok", None) or 0
    return model, StreamedLayers(
        list(layers),
        placement.layers,
        device,
        room=memory - around,
        resident_bytes=around,
        experts_per_token=per_token,
    )


def _load_around_layers(files: ModelFiles, trust_remote_code: bool) -> tuple[PreTrainedModel, Placement]:
    """The model on the CPU as transformers loads it, but for the tensors of decoder layers, which are on the meta
    device; and where those are. Raises UsageError."""
    whole = AutoConfig.from_pretrained(files.path, trust_remote_code=trust_remote_code)
    if getattr(whole, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{files.path}: quantised weights cannot be read layer by layer")
    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(whole, dtype=files.dtype, trust_remote_code=trust_remote_code)
        if not isinstance(getattr(empty.get_decoder(), "layers", None), nn.ModuleList):
            raise UnsupportedModelError(f"{files.family} keeps its decoder layers where the walk does not find them")
        placement = place_weights(files.path, empty)
        given: dict[str, Tensor] = {}
        for stored in placement.others:
            with safe_open(stored.path, framework="pt") as file:
                given[stored.name] = file.get_tensor(stored.name)
        prefix = layers_prefix(empty)
        # One number stands for each tensor of a layer: it takes no memory, and transformers finds nothing missing.
        given |= {
            name: torch.zeros((), dtype=files.dtype).expand(tensor.shape)
            for name, tensor in empty.state_dict().items()
            if name.startswith(prefix)
        }
        model, info = type(empty).from_pretrained(
            None,
            config=whole,
            state_dict=given,
            dtype=files.dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    _refuse_missing(files, info)
    for layer, parts in zip(model.get_decoder().layers, placement.layers, strict=True):
        for name in parts.tensors:
            parts.tensors[name] = _empty_out(layer, name)
    return model, placement


def _empty_out(layer: nn.Module, name: str) -> tuple[torch.Size, torch.dtype]:
    """Put a tensor of a layer on the meta device; gives its shape and dtype."""
    inside, _, own = name.rpartition(".")
    module = layer.get_submodule(inside)
    tensor: Tensor = getattr(module, own)
    empty = torch.empty_like(tensor, device="meta")
    if own in module._parameters:
        module._parameters[own] = nn.Parameter(empty, requires_grad=False)
    else:
        module._buffers[own] = empty
    return tensor.shape, tensor.dtype


def _keep_buffers(layer: nn.Module, streamed: set[str], device: torch.device) -> None:
    """Move buffers of a layer that are in no file to the device."""
    for prefix, module in layer.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and f"{prefix}.{name}".removeprefix(".") not in streamed:
                module._buffers[name] = buffer.to(device)


def _refuse_missing(files: ModelFiles, info: dict[str, Any]) -> None:
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise UsageError(f"{files.path}: the weights lack {len(missing)} tensors, {missing[0]} among them")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars or advice from transformers while it loads; errors are raised."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()

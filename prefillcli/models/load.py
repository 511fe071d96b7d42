"""A model's weights, loaded with transformers."""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import limit_cast_advice, limit_kernel_advice, quiet_transformers, require_complete
from prefillcli.models.find import ModelFiles, with_weights
from prefillcli.models.gguf import load_gguf
from prefillcli.models.heads import auto_class
from prefillcli.models.multimodal import load_text_part
from prefillcli.models.rehearsal import prove_model, settle_paths
from prefillcli.models.streamed_layers import ROLLING_SLOTS, Placement, StreamedLayers, place_weights, slot_bytes
from prefillcli.models.weights import Quantisation, plan_quantisation
from prefillcli.prefill.forest import ATTENTION, UnsupportedModelError, register
from prefillcli.prefill.model_ends import decoder_layers

ROUNDED_TOLERANCE = 0.15  # of the largest logit, where a last bit may decide about a step of an activation


def load_model(files: ModelFiles, device: torch.device, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """Load the weights onto `device`, ready to be walked.

    A family that is not verified is rehearsed, and on a device that the tests do not know any family: it has the
    forest attention then, or one of transformers where it is walked with its own cache. Raises UnsupportedModelError
    if its walk differs from its own eager forward both ways.
    """
    register()
    limit_kernel_advice(device.type)
    settle_paths(device, files.dtype)
    try:
        model = load_weights(files, device, attention=ATTENTION, trust_remote_code=trust_remote_code)
    except KeyError:  # some families have a table of attention classes, and no other attention
        try:
            model = load_weights(files, device, attention="eager", trust_remote_code=trust_remote_code)
        except KeyError as error:
            raise UsageError(f"{files.path}: cannot load the weights: no {brief(error)}") from None
    prove_model(model, files, tolerance=_rehearsal_tolerance(files, device))
    return model


def _rehearsal_tolerance(files: ModelFiles, device: torch.device) -> float | None:
    """What a quantised model's logits may differ by in a rehearsal, of the largest one; None where as usual."""
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    return ROUNDED_TOLERANCE if quantisation is not None and quantisation.rounds_activations else None


def load_weights(
    files: ModelFiles, device: torch.device, *, attention: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model on `device` as transformers makes it, from safetensors or GGUF only; `attention` as it is called there
    (None: what transformers takes by itself). Raises UsageError."""
    files = with_weights(files)
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    with quiet_transformers():
        if files.gguf is not None and not files.saved:
            model, info = load_gguf(files.gguf, files.path, files.dtype, attention)
            return _placed(files, model, info, device)
        try:
            if files.part_of is not None:
                return _placed(files, *load_text_part(files.path, files.dtype, attention), device)
            model, info = auto_class(files.head).from_pretrained(
                files.path,
                dtype=files.dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **_quantised_loading(files, quantisation, device, trust_remote_code),
            )
        except KeyError:
            raise
        except Exception as error:  # what transformers makes of wrong files: any type there is
            if out_of_resource(error) or isinstance(error, PrefillError):
                raise
            if "ignore_mismatched_sizes" in str(error):
                raise UsageError(f"{files.path}: the shapes of the weights are not those of config.json") from None
            raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    if quantisation is not None and quantisation.kept == "unpacked" and files.dtype == torch.float32:
        nn.Module.float(model)  # transformers unpacks some experts to bfloat16, whatever the dtype is
    return _placed(files, model, info, device)


def _quantised_loading(
    files: ModelFiles, quantisation: Quantisation | None, device: torch.device, trust_remote_code: bool
) -> dict[str, Any]:
    """What transformers is told besides, for the device and for a quantised checkpoint."""
    if quantisation is None:
        return {"device_map": {"": device}} if loads_onto(device) else {}
    limit_cast_advice()
    config = AutoConfig.from_pretrained(files.path, trust_remote_code=trust_remote_code)
    config.quantization_config = {**config.quantization_config, **quantisation.changes}
    # Packed weights must not be moved, and transformers would take a CUDA device where there is one.
    return {"config": config} | ({"device_map": {"": device}} if quantisation.kept == "packed" else {})


def loads_onto(device: torch.device) -> bool:
    """Whether each tensor goes to the device as it is read, not through a whole model in host memory."""
    return device.type == "cuda" and find_spec("accelerate") is not None


def _placed(files: ModelFiles, model: Any, info: dict[str, Any], device: torch.device) -> PreTrainedModel:
    require_complete(files.origin, model, info, files.path, quantised=files.quantised is not None)
    on_device = getattr(model, "hf_device_map", None) is not None
    placed: PreTrainedModel = (model if on_device else model.to(device)).eval()
    placed.requires_grad_(False)
    return placed


def load_streamed(
    files: ModelFiles, device: torch.device, *, memory: int, share: float = 1.0, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, StreamedLayers]:
    """The model on `device` without the weights of its decoder layers, and the source that reads these from the files.

    At most `memory` bytes of weights will be on the device, this process's `share` of what all may take. A family that
    is not verified is rehearsed, which reads all weights several times. Raises ResourceError, with what it takes,
    where the memory is too little; UnsupportedModelError for a model whose walk differs from its own forward, and for
    files that cannot be read layer by layer.
    """
    register()
    limit_kernel_advice(device.type)
    settle_paths(device, files.dtype)
    if files.part_of is not None:
        raise UnsupportedModelError(
            f"{files.origin}: the text model of a {files.part_of} cannot be read layer by layer\n"
            "take --weights resident"
        )
    with quiet_transformers():
        files = with_weights(files)
        if not files.saved:
            raise ResourceError(
                f"{files.origin}: weights are streamed from the cache, which has no room for them\n"
                "make room, set XDG_CACHE_HOME to a larger disk, or take --weights resident"
            )
        try:
            model, placement = _load_around_layers(files, ATTENTION, trust_remote_code)
        except KeyError:
            model, placement = _load_around_layers(files, "eager", trust_remote_code)
    model, layers = _moved(model, placement, device)
    around = sum(tensor.nbytes for tensor in {id(p): p for p in model.parameters() if not p.is_meta}.values())
    sizes = [slot_bytes(parts, device) for parts in placement.layers]
    least = around + min(ROLLING_SLOTS, len(sizes)) * max(sizes)
    if memory < least:
        given = f"{memory / 2**20:,.1f} MiB{' for each worker' if share < 1 else ''}"
        raise ResourceError(
            f"--weights-memory: {given} is too little for {files.origin}: embedding and head take "
            f"{around / 2**20:,.1f} MiB and a layer {max(sizes) / 2**20:,.1f} MiB\n"
            f"give {math.ceil(least / share / 2**20)}MiB or more, which is room for two layers"
        )
    per_token = getattr(files.config, "num_experts_per_tok", None) or 0
    source = StreamedLayers(
        list(layers),
        placement.layers,
        device,
        room=memory - around,
        resident_bytes=around,
        experts_per_token=per_token,
    )
    try:
        prove_model(model, files, source)
    except BaseException:
        source.close()
        raise
    return model, source


def _moved(
    model: PreTrainedModel, placement: Placement, device: torch.device
) -> tuple[PreTrainedModel, nn.ModuleList]:
    """The model on `device`, ready to be walked, and its layers, whose weights stay where they are."""
    place = decoder_layers(model)
    layers = place.layers
    place.replace([])  # without weights they cannot be moved
    model = model.to(device).eval()
    model.requires_grad_(False)
    place.replace(list(layers.eval()))
    for layer, parts in zip(layers, placement.layers, strict=True):
        _keep_buffers(layer, set(parts.tensors), device)
    return model, layers


def _load_around_layers(
    files: ModelFiles, attention: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, Placement]:
    """The model on the CPU as transformers loads it with this `attention`, but for the tensors of decoder layers,
    which are on the meta device; and where those are. Raises UsageError."""
    whole = AutoConfig.from_pretrained(files.path, trust_remote_code=trust_remote_code)
    if getattr(whole, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{files.path}: quantised weights cannot be read layer by layer")
    try:
        with torch.device("meta"):
            empty = auto_class(files.head).from_config(whole, dtype=files.dtype, trust_remote_code=trust_remote_code)
        placement = place_weights(files.path, empty)
        given: dict[str, Tensor] = {}
        for stored in placement.others:
            with safe_open(stored.path, framework="pt") as file:
                given[stored.name] = file.get_tensor(stored.name)
        prefix = decoder_layers(empty).prefix
        # One number stands for each tensor of a layer: it takes no memory, and transformers finds nothing missing.
        given |= {
            name: torch.zeros((), dtype=files.dtype).expand(tensor.shape)
            for name, tensor in empty.state_dict().items()
            if name.startswith(prefix)
        }
        given |= {name: torch.zeros(()) for name in placement.unread}
        model, info = type(empty).from_pretrained(
            None,
            config=whole,
            state_dict=given,
            dtype=files.dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except KeyError:
        raise
    except Exception as error:  # as in `load_weights`
        if out_of_resource(error) or isinstance(error, PrefillError):
            raise
        raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    require_complete(files.origin, model, info, files.path)
    for layer, parts in zip(decoder_layers(model).layers, placement.layers, strict=True):
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

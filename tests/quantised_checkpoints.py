"""Tiny checkpoints in quantised formats, made by each format's own tool, or tensor by tensor as it is described."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from prefillcli.models.completeness import quiet_transformers

BLOCK = 32

Maker = Callable[[Path, Path], None]


def _with_tool(config: Callable[[], Any]) -> Maker:
    """Made by transformers with the format's own package."""

    def make(dense: Path, folder: Path) -> None:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config(), dtype=torch.float32)
            model.save_pretrained(folder)

    return make


def _torchao(name: str) -> Any:
    from torchao import quantization

    return TorchAoConfig(getattr(quantization, name)(version=2))


def _rewritten(entry: dict[str, Any], quantise: Callable[[str, Tensor], dict[str, Tensor]]) -> Maker:
    """Made by writing other tensors in the place of each matrix of a layer that is multiplied."""

    def make(dense: Path, folder: Path) -> None:
        shutil.copytree(dense, folder, dirs_exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for name, tensor in load_file(dense / "model.safetensors").items():
            chosen = ".layers." in name and "router" not in name and "proj" in name and not name.endswith("bias")
            tensors |= quantise(name, tensor) if chosen else {name: tensor}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))

    return make


def _fp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    blocks = weight.float().reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    packed = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {name: packed.reshape(rows, columns), f"{name}_scale_inv": scales}


def _mxfp8(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Scales are powers of two, of which the exponent is kept."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // 32, 32)
    exponents = (groups.abs().amax(-1) / 448).log2().ceil()
    packed = (groups / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    return {name: packed.reshape(rows, columns), f"{name}_scale_inv": (exponents + 127).to(torch.uint8)}


def _mxfp4(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Of a stack of experts, kept with its inputs last; the numbers are random, of about the size of the weights."""
    if weight.dim() != 3:
        return {name: weight}
    experts, inputs, outputs = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    shape = (experts, outputs, inputs // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def _integers(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers from 0 to 15 [outputs, inputs], zero points from 1 to 14 and scales, both [outputs, groups]."""
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // BLOCK, BLOCK)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 14).half().float()
    zeros = (-low / scales).round().clamp(1, 14)
    numbers = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return numbers.reshape(rows, columns).long(), zeros.long(), scales


def _in_int32(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of 4 bits in each, along the last dimension: the lowest bits hold the first of `order`."""
    eights = numbers.reshape(*numbers.shape[:-1], -1, 8)
    joined = sum(eights[..., at] << (4 * place) for place, at in enumerate(order))
    return joined.to(torch.uint32).view(torch.int32)


def _gptq(name: str, weight: Tensor) -> dict[str, Tensor]:
    numbers, zeros, scales = _integers(weight)
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": _in_int32(numbers).t(),
        f"{stem}qzeros": _in_int32(zeros.t().contiguous() - 1),
        f"{stem}scales": scales.t().half(),
        f"{stem}g_idx": (torch.arange(weight.shape[1]) // BLOCK).int(),
    }


def _awq(name: str, weight: Tensor) -> dict[str, Tensor]:
    numbers, zeros, scales = _integers(weight)
    stem, order = name.removesuffix("weight"), (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        f"{stem}qweight": _in_int32(numbers.t().contiguous(), order),
        f"{stem}qzeros": _in_int32(zeros.t().contiguous(), order),
        f"{stem}scales": scales.t().half(),
    }


def integer_weights(weight: Tensor) -> Tensor:
    """What a weight is once it was kept as integers, float32."""
    numbers, zeros, scales = (each.double() for each in _integers(weight))
    return ((numbers - zeros.repeat_interleave(BLOCK, 1)) * scales.repeat_interleave(BLOCK, 1)).float()


def _compressed(preset: str) -> Maker:
    """Made by compressed-tensors, with scales from the largest weights of a group."""

    def make(dense: Path, folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationConfig,
            QuantizationStatus,
            apply_quantization_config,
            preset_name_to_scheme,
        )
        from compressed_tensors.quantization.utils import calculate_qparams

        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
        scheme = preset_name_to_scheme(preset, ["Linear"])
        if scheme.weights.group_size:
            scheme.weights.group_size = BLOCK
        apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
        for module in model.modules():
            if getattr(module, "quantization_scheme", None) is None:
                continue
            scale, weight = module.weight_scale, module.weight.data
            groups = weight.reshape(1, -1) if scale.numel() == 1 else weight.reshape(scale.numel(), -1)
            scales, zeros = calculate_qparams(groups.amin(1), groups.amax(1), scheme.weights)
            scale.data.copy_(scales.reshape(scale.shape))
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data.copy_(zeros.reshape(scale.shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.02)
            module.quantization_status = QuantizationStatus.FROZEN
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        with quiet_transformers():
            model.save_pretrained(folder)
        compressor.update_config(folder)

    return make


def _compressed_experts(dense: Path, folder: Path) -> None:
    """Made matrix by matrix by compressed-tensors, with each expert by itself, as checkpoints on hubs are."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme

    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    scheme.weights.group_size = BLOCK
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")

    def quantise(name: str, weight: Tensor) -> dict[str, Tensor]:
        scale = (weight.float().reshape(len(weight), -1, BLOCK).abs().amax(-1) / 7.5).bfloat16()
        found = compressor.compress({"weight": weight.bfloat16(), "weight_scale": scale}, scheme)
        return {f"{name.removesuffix('weight')}{part}": each for part, each in found.items()}

    entry = QuantizationConfig(
        config_groups={"all": scheme},
        format="pack-quantized",
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=["lm_head", "re:.*gate$"],
    ).model_dump(mode="json")
    _rewritten(entry | {"quant_method": "compressed-tensors"}, quantise)(dense, folder)


#: How a dense checkpoint becomes one of a format.
MAKERS: dict[str, Maker] = {
    "nf4": _with_tool(lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "nf4-nested": _with_tool(
        lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    ),
    "int8": _with_tool(lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)),
    "torchao-w8": _with_tool(lambda: _torchao("Int8WeightOnlyConfig")),
    "torchao-w8a8": _with_tool(lambda: _torchao("Int8DynamicActivationInt8WeightConfig")),
    "fp8": _rewritten(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}, _fp8
    ),
    "fp8-experts": _rewritten(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}, _fp8
    ),
    "mxfp8": _rewritten(
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}, _mxfp8
    ),
    "mxfp4": _rewritten({"quant_method": "mxfp4"}, _mxfp4),
    "gptq": _rewritten({"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "desc_act": False}, _gptq),
    "gptq-experts": _rewritten({"quant_method": "gptq", "bits": 4, "group_size": BLOCK}, _gptq),
    "awq-experts": _rewritten({"quant_method": "awq", "bits": 4, "group_size": BLOCK}, _awq),
    "awq": _rewritten({"quant_method": "awq", "bits": 4, "group_size": BLOCK, "version": "gemm"}, _awq),
    "w4a16": _compressed("W4A16"),
    "w4a16-experts": _compressed_experts,
    "w4a16-asymmetric": _compressed("W4A16_ASYM"),
    "w8a8": _compressed("W8A8"),
    "w8a8-fp8": _compressed("FP8"),
    "w8a8-fp8-dynamic": _compressed("FP8_DYNAMIC"),
}


def make_quantised(kind: str, dense: Path, folder: Path) -> Path:
    """The model of the folder `dense` in a format of `MAKERS`, in a new folder with the same other files."""
    MAKERS[kind](dense, folder)
    for file in dense.iterdir():
        if not (folder / file.name).exists() and file.suffix != ".safetensors":
            shutil.copy(file, folder)
    return folder

"""Numbers of packed weights, which transformers unpacks slowly or leaves to other packages.

GPTQ and AWQ keep several small integers in each int32, with a scale and a zero point for a group of inputs.
transformers leaves them to a package that compiles its own kernels. Unpacking needs none: each weight is `(integer -
zero point) * scale`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

UNPACKED = "prefill-unpacked-integers"  # the `quant_method` of a configuration that is loaded in this way

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 the numbers of eight outputs are
_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_OUTPUTS = 64  # of a weight that are unpacked at a time, and stay in the cache


def why_not_unpacked(entry: Mapping[str, Any]) -> str | None:
    """Return why a GPTQ or AWQ checkpoint with this `quantization_config` cannot be unpacked; None if it can."""
    method, bits = entry.get("quant_method"), entry.get("bits", 4)
    if method == "awq":
        version = str(entry.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm" or not entry.get("zero_point", True):
            return f"{bits} bits in the layout {version!r} are not read, only 4 bits in 'gemm' with zero points"
        return None
    layout = entry.get("checkpoint_format", "gptq")
    if bits not in (2, 4, 8) or layout not in ("gptq", "gptq_v2") or entry.get("dynamic"):
        return f"{bits} bits in the layout {layout!r} are not read, only 2, 4 and 8 bits in 'gptq' and 'gptq_v2'"
    return None


def unpack_gptq(
    packed: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, *, bits: int, zero_offset: int
) -> Tensor:
    """Unpack the weight float32 [outputs, inputs] of a GPTQ layer.

    `packed` is int32 [inputs * bits / 32, outputs], `zeros` int32 [groups, outputs * bits / 32], `scales` [groups,
    outputs], `groups` the group of each input. A zero point is its saved number plus `zero_offset`. Raises ValueError
    where that offset is not 0 and the largest number is saved: programs read it in two ways.
    """
    most = (1 << bits) - 1
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    points = ((zeros[:, :, None] >> shifts) & most).flatten(1)
    if zero_offset and bool((points == most).any()):
        raise ValueError(f"a zero point of {most + zero_offset} does not fit in {bits} bits")
    parts = (((each.t()[:, :, None] >> shifts) & most).flatten(1) for each in torch.split(packed, _OUTPUTS, 1))
    return _scaled(parts, packed.shape[1], points + zero_offset, scales, groups)


def unpack_awq(packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Unpack the weight float32 [outputs, inputs] of an AWQ layer of 4 bits.

    `packed` is int32 [inputs, outputs / 8], `zeros` int32 [groups, outputs / 8], `scales` [groups, outputs].
    """
    shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32, device=packed.device)
    points = ((zeros[:, :, None] >> shifts) & 15).flatten(1)
    parts = (
        ((each.t().contiguous()[:, None] >> shifts[:, None]) & 15).flatten(0, 1)
        for each in torch.split(packed, _OUTPUTS // 8, 1)
    )
    return _scaled(parts, points.shape[1], points, scales, None)


def _scaled(parts: Iterable[Tensor], outputs: int, points: Tensor, scales: Tensor, groups: Tensor | None) -> Tensor:
    # The numbers float32 [outputs, inputs] of integers, which come as parts [some outputs, inputs] that stay in the
    # cache; `points` and `scales` are [groups, outputs]. Small integers are exact in float32.
    found, start = torch.empty(0), 0
    wide, zero = (each.float().t().contiguous() for each in (scales, points))
    for integers in parts:
        if not start:
            found = wide.new_empty((outputs, integers.shape[1]))
            size = found.shape[1] // wide.shape[1]
            in_order = torch.arange(found.shape[1], device=wide.device) // size
            at = None if groups is None or torch.equal(groups.long(), in_order) else groups.long()
        end = start + len(integers)
        scale, point = ((each[start:end, :, None] if at is None else each[start:end, at]) for each in (wide, zero))
        target = found[start:end]
        own = (len(integers), -1, size) if at is None else target.shape
        torch.mul(integers.float().view(own).sub_(point), scale, out=target.view(own))
        start = end
    return found


class _Unpack(ConversionOps):  # type: ignore[misc]  # transformers has no types
    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **_: Any
    ) -> dict[str, Any]:
        module, own = get_module_from_name(model, full_layer_name)
        dtype: torch.dtype = getattr(module, own).dtype
        found: dict[str, Any] = {name: each for name, each in input_dict.items() if not _part_of(name)}
        stems = dict.fromkeys(name.removesuffix(f"{part}$") for name in input_dict if (part := _part_of(name)))
        for stem in stems:
            given = [_listed(input_dict.get(f"{stem}{part}$")) for part in _PARTS]
            if any(each and len(each) != len(given[0]) for each in given):
                raise ValueError(f"{full_layer_name}: its packed tensors are not as many of each kind")
            weights = [
                self._unpack(*(each[at] if each else None for each in given)).to(dtype) for at in range(len(given[0]))
            ]
            if stem == ".":
                found[full_layer_name] = weights[0]
            else:
                found[f"{stem}weight$"] = weights
        return found

    def _unpack(self, packed: Any, zeros: Any, scales: Any, groups: Any) -> Tensor:
        if zeros is None or scales is None:
            raise ValueError("a layer has no scales or no zero points")
        if self._entry.layout == "awq":
            return unpack_awq(packed, zeros, scales)
        offset = 1 if self._entry.layout == "gptq" else 0
        return unpack_gptq(packed, zeros, scales, groups, bits=self._entry.bits, zero_offset=offset)


def _part_of(pattern: str) -> str | None:
    return next((part for part in _PARTS if pattern.endswith(f"{part}$")), None)


def _listed(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [] if value is None else [value]


# Weights of MXFP4 checkpoints: four bits each, with a power of two for 32 inputs.

_MXFP4_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpack experts bfloat16 [experts, inputs, outputs], as transformers does in four times as long.

    `blocks` are uint8 [experts, outputs, inputs / 32, 16], `scales` the exponents of two, uint8 [experts, outputs,
    inputs / 32].
    """
    experts, outputs, groups, _ = blocks.shape
    byte = torch.arange(256, dtype=torch.int32)
    doubled = 2 * torch.tensor([*_MXFP4_LEVELS, *(-each for each in _MXFP4_LEVELS)])
    pairs = torch.stack([doubled[byte & 15], doubled[byte >> 4]], 1)
    powers = torch.pow(2.0, byte - 128)  # of half the scales, so that the largest is finite
    found = torch.empty((experts, groups * 32, outputs), dtype=torch.bfloat16)
    for expert in range(experts):
        for start in range(0, outputs, _OUTPUTS):
            own, exponents = (each[expert, start : start + _OUTPUTS] for each in (blocks, scales))
            part = torch.index_select(pairs, 0, own.reshape(-1).int()).view(len(own), groups, 32)
            part.mul_(powers[exponents.int()][..., None])
            found[expert, :, start : start + len(own)] = part.flatten(1).t()
    return found


class _UnpackMxfp4(ConversionOps):  # type: ignore[misc]
    def convert(self, input_dict: dict[str, Any], full_layer_name: str = "", **_: Any) -> dict[str, Any]:
        given = {name.rpartition("_")[2]: _listed(each)[0] for name, each in input_dict.items()}
        return {full_layer_name: unpack_mxfp4(given["blocks"], given["scales"])}


def with_faster_operations(converter: WeightConverter) -> WeightConverter:
    """Return a converter of transformers with operations that give the same bits in less time, where there are any."""
    found = copy.copy(converter)
    found.operations = [_UnpackMxfp4() if isinstance(each, Mxfp4Dequantize) else each for each in found.operations]
    return found


@register_quantization_config(UNPACKED)
class UnpackedIntegersConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The packing of a checkpoint's integers: `layout` is gptq, gptq_v2 or awq."""

    def __init__(self, layout: str = "gptq", bits: int = 4, **_: Any) -> None:
        self.quant_method = UNPACKED
        self.layout = layout
        self.bits = bits


@register_quantizer(UNPACKED)
class IntegerUnpacker(HfQuantizer):  # type: ignore[misc]
    """Has transformers load packed integers as the whole numbers of ordinary layers."""

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Unpack before a family's own conversions join the experts of a layer."""
        updated = []
        for each in weight_conversions:
            sources = [name for name in getattr(each, "source_patterns", ()) if name.endswith(".weight")]
            if isinstance(each, WeightConverter) and sources:
                packed = [f"{name.removesuffix('weight')}{part}$" for name in sources for part in _PARTS]
                whole = [f"{name}$" if name in sources else name for name in each.source_patterns]
                each = self._converter([*whole, *packed], each._original_target_patterns, each.operations)
            updated.append(each)
        return [*updated, self._converter([rf".{part}$" for part in _PARTS], [".weight"], [])]

    def _converter(self, sources: list[str], targets: list[str], operations: list[Any]) -> Any:
        unpack = _Unpack(self.quantization_config)
        return WeightConverter(source_patterns=sources, target_patterns=targets, operations=[unpack, *operations])

    def is_serializable(self) -> bool:
        """Return False: the model differs from the file."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False

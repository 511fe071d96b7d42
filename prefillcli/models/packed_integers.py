"""Weights of GPTQ and AWQ checkpoints, unpacked while transformers loads them.

Both keep several small integers in each int32, with a scale and a zero point for a group of inputs. transformers
leaves them to a package that compiles kernels of its own. To unpack them none is needed: each weight is
`(integer - zero point) * scale`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name
from transformers.utils.quantization_config import QuantizationConfigMixin

UNPACKED = "prefill-unpacked-integers"
"""The `quant_method` of a configuration that is loaded in this way."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 the numbers of eight outputs are
_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def why_not_unpacked(entry: Mapping[str, Any]) -> str | None:
    """What keeps a GPTQ or AWQ checkpoint with this `quantization_config` from being unpacked; None if nothing."""
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


def loading_changes(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the file's own `quantization_config` where it is unpacked."""
    layout = "awq" if entry.get("quant_method") == "awq" else entry.get("checkpoint_format", "gptq")
    return {"quant_method": UNPACKED, "layout": layout, "bits": entry.get("bits", 4)}


def unpack_gptq(
    packed: Tensor, zeros: Tensor, scales: Tensor, groups: Tensor | None, *, bits: int, zero_offset: int
) -> Tensor:
    """The weight float32 [outputs, inputs] of a GPTQ layer.

    `packed` is int32 [inputs * bits / 32, outputs], `zeros` int32 [groups, outputs * bits / 32], `scales` [groups,
    outputs], `groups` the group of each input. `zero_offset` is what a zero point is larger by than what is saved.
    Raises ValueError where the largest number is saved of one that is larger: programs read it in two ways.
    """
    most = (1 << bits) - 1
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    integers = ((packed[:, None, :] >> shifts[:, None]) & most).flatten(0, 1)
    points = ((zeros[:, :, None] >> shifts) & most).flatten(1)
    if zero_offset and bool((points == most).any()):
        raise ValueError(f"a zero point of {most + zero_offset} does not fit in {bits} bits")
    if groups is None:
        groups = torch.arange(len(integers), device=packed.device) // (len(integers) // len(scales))
    at = groups.long()
    return ((integers - (points + zero_offset)[at]) * scales.float()[at]).t().contiguous()


def unpack_awq(packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """The weight float32 [outputs, inputs] of an AWQ layer of 4 bits.

    `packed` is int32 [inputs, outputs / 8], `zeros` int32 [groups, outputs / 8], `scales` [groups, outputs].
    """
    shifts = 4 * torch.tensor(_AWQ_ORDER, dtype=torch.int32, device=packed.device)
    integers, points = (((each[:, :, None] >> shifts) & 15).flatten(1) for each in (packed, zeros))
    repeats = len(integers) // len(scales)
    wide, zero = (each.repeat_interleave(repeats, 0) for each in (scales.float(), points))
    return ((integers - zero) * wide).t().contiguous()


class _Unpack(ConversionOps):  # type: ignore[misc]  # transformers has no types
    """Makes one weight of the tensors of each layer."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str = "", model: Any = None, **_: Any
    ) -> dict[str, Any]:
        dtype = _dtype_of(model, full_layer_name)
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


def _dtype_of(model: Any, name: str) -> torch.dtype:
    """The dtype that the model has for a parameter."""
    module, own = get_module_from_name(model, name)
    dtype: torch.dtype = getattr(module, own).dtype
    return dtype


def _listed(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [] if value is None else [value]


@register_quantization_config(UNPACKED)
class UnpackedIntegersConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """How the integers of a checkpoint are packed: `layout` is gptq, gptq_v2 or awq."""

    def __init__(self, layout: str = "gptq", bits: int = 4, **_: Any) -> None:
        self.quant_method = UNPACKED
        self.layout = layout
        self.bits = bits


@register_quantizer(UNPACKED)
class IntegerUnpacker(HfQuantizer):  # type: ignore[misc]
    """Has transformers load packed integers as the whole numbers of ordinary layers."""

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Unpacks before a family's own conversions join the experts of a layer."""
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
        """Never: the model is not what the file was."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Never."""
        return False

"""Which bytes of a model's files are which numbers of its decoder layers.

transformers renames tensors and joins those of experts when it loads a model. Here its own rules are applied to the
names alone, so that a layer can be read by itself, later and again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from prefillcli.errors import UsageError
from prefillcli.models.safetensors import data_start, read_header, weight_files
from prefillcli.prefill.forest import UnsupportedModelError
from prefillcli.prefill.layer_place import decoder_layers

_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file has it."""

    name: str
    path: Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` numbers that lie side by side in a file and in a tensor of a layer, where `start` is the first.

    `expert` is the one that they belong to; None where all tokens need them.
    """

    path: Path
    offset: int
    dtype: torch.dtype  # as the file has them
    count: int
    tensor: str  # its name in the layer
    start: int
    expert: int | None = None


@dataclass(slots=True)
class LayerFiles:
    """One decoder layer: its tensors by name, and the pieces that fill them."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    experts: int = 0  # how many experts have pieces of their own

    @property
    def bytes(self) -> int:
        """What the tensors take."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.tensors.values())


@dataclass(slots=True)
class Placement:
    """What a model's files hold: the tensors of its decoder layers, the others that it has, and the names of those
    that it does not have."""

    layers: list[LayerFiles]
    others: list[Stored]
    unread: list[str]


def place_weights(folder: Path, model: PreTrainedModel) -> Placement:
    """Where the weights of `model` are, which may be on the meta device: its tensors' names and shapes count.

    Raises UsageError for files that lack some of a layer's tensors or have others, and UnsupportedModelError where
    transformers makes a tensor of a layer from others in a way that is not known here.
    """
    place = decoder_layers(model)
    prefix = place.prefix
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    wanted = model.state_dict()
    placement = Placement([LayerFiles() for _ in place.layers], [], [])
    sources: dict[str, dict[str | None, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for stored in sorted(_stored_tensors(folder), key=lambda each: dot_natural_key(each.name)):
        name, pattern = rename_source_key(stored.name, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and stored.name in wanted:
            name, pattern = rename_source_key(stored.name, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            placement.unread.append(stored.name)
        elif name.startswith(prefix):
            sources[name][pattern].append(stored)
        else:
            placement.others.append(stored)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for name, tensor in wanted.items():
        if not name.startswith(prefix):
            continue
        if name not in sources and name in model.all_tied_weights_keys:
            raise UnsupportedModelError(
                f"{folder}: {name} is that of another layer, which is not read layer by layer; take --weights resident"
            )
        number, _, inner = name.removeprefix(prefix).partition(".")
        layer = placement.layers[int(number)]
        layer.tensors[inner] = (tensor.shape, tensor.dtype)
        layer.pieces += _pieces(folder, name, inner, tensor, sources.get(name, {}), by_pattern)
    for layer in placement.layers:
        _split_experts(layer)
    return placement


def _stored_tensors(folder: Path) -> Iterator[Stored]:
    """All tensors of the files; the last one of a name counts, as in transformers."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        start = data_start(path)
        for name, tensor in read_header(path).items():
            dtype = _DTYPES.get(tensor["dtype"])
            if dtype is None:
                raise UnsupportedModelError(
                    f"{path}: {name} is saved as {tensor['dtype']}, which is not read layer by layer; "
                    "take --weights resident"
                )
            found[name] = Stored(name, path, start + tensor["data_offsets"][0], tuple(tensor["shape"]), dtype)
    yield from found.values()


def _pieces(
    folder: Path,
    name: str,
    inner: str,
    tensor: Tensor,
    sources: Mapping[str | None, Sequence[Stored]],
    converters: Mapping[str, Any],
) -> list[Piece]:
    """The pieces of a layer's tensor `name`, called `inner` in the layer, from the tensors that become it."""
    if not sources:
        raise UsageError(f"{folder}: the weights lack {name}")
    if list(sources) == [None]:
        stored = sources[None][-1]
        if torch.Size(stored.shape) != tensor.shape:
            raise UsageError(f"{folder}: the shapes of the weights are not those of config.json")
        return [Piece(stored.path, stored.offset, stored.dtype, prod(stored.shape), inner, 0)]
    patterns = [pattern for pattern in sources if pattern is not None]
    converter = converters[patterns[0]]
    order = [pattern for pattern in converter.source_patterns if pattern in sources]
    if len(order) != len(sources) or not _joins_experts(converter.operations, len(order)):
        raise UnsupportedModelError(
            f"{folder}: transformers makes {name} from other tensors in a way that is not known layer by layer; "
            "take --weights resident"
        )
    parts = [sources[pattern] for pattern in order]
    experts = len(parts[0])
    widths = [stored[0].shape[0] for stored in parts]
    shape = (experts, sum(widths), *parts[0][0].shape[1:])
    alike = all(each.shape == stored[0].shape for stored in parts for each in stored)
    if not alike or any(len(stored) != experts for stored in parts) or torch.Size(shape) != tensor.shape:
        raise UsageError(f"{folder}: the shapes of the weights are not those of config.json")
    found = []
    for expert in range(experts):
        start = expert * prod(shape[1:])
        for each in (part[expert] for part in parts):
            found.append(Piece(each.path, each.offset, each.dtype, prod(each.shape), inner, start, expert))
            start += prod(each.shape)
    return found


def _joins_experts(operations: Sequence[Any], sources: int) -> bool:
    """Whether the operations stack one tensor of each expert, and join the stacks of several tensors side by side."""
    kinds = [(type(each), each.dim) for each in operations if isinstance(each, MergeModulelist | Concatenate)]
    joins = [(MergeModulelist, 0), (Concatenate, 1)]
    return len(kinds) == len(operations) and kinds == (joins if sources > 1 else joins[: len(kinds)] or joins)


def _split_experts(layer: LayerFiles) -> None:
    """Cut pieces that hold all experts into one for each: tensors of a module named `experts`, all as long."""
    lengths = {shape[0] for name, (shape, _) in layer.tensors.items() if _is_of_experts(name) and shape}
    if len(lengths) != 1:
        layer.pieces = [_without_expert(piece) for piece in layer.pieces]
        return
    (layer.experts,) = lengths
    pieces = []
    for piece in layer.pieces:
        if piece.expert is not None or not _is_of_experts(piece.tensor):
            pieces.append(piece)
            continue
        count = piece.count // layer.experts
        pieces += [
            Piece(
                piece.path,
                piece.offset + each * count * piece.dtype.itemsize,
                piece.dtype,
                count,
                piece.tensor,
                each * count,
                each,
            )
            for each in range(layer.experts)
        ]
    layer.pieces = pieces


def _is_of_experts(name: str) -> bool:
    return "experts" in name.split(".")[-2:-1]


def _without_expert(piece: Piece) -> Piece:
    return Piece(piece.path, piece.offset, piece.dtype, piece.count, piece.tensor, piece.start)

"""The places of a model's numbers in its files, and reading them.

transformers renames tensors, joins those of experts and changes some when it loads a model. Here its own rules are
applied to names and single tensors, so that one layer can be read later, and repeatedly.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
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

from prefillcli.errors import ContentChangedError, ResourceError, UsageError
from prefillcli.models.files import data_start, read_header, weight_files
from prefillcli.models.gguf import Change, GgufModel, TensorRules
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.packed import FLOATS, PackedMatrix, blocks_bytes, unpack

_CONVERTED = 16_384  # numbers converted at a time: too few for torch to start threads, which would slow the walk's
_UNPACKED = 1 << 18  # numbers of blocks that are unpacked at a time, and stay in the cache
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


# Fills bytes [bytes] from this byte of a file on.
ReadBytes = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Plain:
    """Numbers that are saved in a dtype."""

    dtype: torch.dtype

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` numbers in a file."""
        return count * self.dtype.itemsize

    def read(self, read: ReadBytes, offset: int, target: Tensor) -> None:
        """Fill `target` [numbers] on the CPU with the numbers from byte `offset` on, in its own dtype."""
        if self.dtype == target.dtype:
            read(offset, target.view(torch.uint8))
            return
        raw = torch.empty(min(_CONVERTED, len(target)), dtype=self.dtype)
        for start in range(0, len(target), _CONVERTED):
            part = target[start : start + _CONVERTED]
            saved = raw[: len(part)]
            read(offset + self.nbytes(start), saved.view(torch.uint8))
            part.copy_(saved)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Numbers in blocks of a GGUF file. `change` makes those of the model of them, in float32 [shape]."""

    kind: int
    shape: tuple[int, ...] = ()
    change: Change | None = None

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` numbers in a file."""
        return blocks_bytes(self.kind, count)

    def read(self, read: ReadBytes, offset: int, target: Tensor) -> None:
        """Fill `target` [numbers] on the CPU with the numbers from byte `offset` on, in its own dtype."""
        whole = target if self.change is None else torch.empty(len(target))
        step = _CONVERTED if whole.dtype != torch.float32 or self.kind in FLOATS else _UNPACKED
        raw = torch.empty(self.nbytes(min(step, len(whole))), dtype=torch.uint8)
        for start in range(0, len(whole), step):
            part = whole[start : start + step]
            saved = raw[: self.nbytes(len(part))]
            read(offset + self.nbytes(start), saved)
            unpack(self.kind, saved, part)
        if self.change is not None:
            changed = np.ascontiguousarray(self.change(whole.numpy().reshape(self.shape)), dtype=np.float32)
            own = torch.from_numpy(changed).view(-1)
            for start in range(0, len(target), _CONVERTED):
                target[start : start + _CONVERTED].copy_(own[start : start + _CONVERTED])


Form = Plain | Blocks


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a file has it."""

    name: str
    path: Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    form: Form


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` numbers that lie side by side in a file and in a tensor of a layer; there the first is number `start`.

    `expert` is their expert; None where all tokens need them.
    """

    path: Path
    offset: int
    form: Form
    count: int
    tensor: str  # its name in the layer
    start: int
    expert: int | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.form.nbytes(self.count)


@dataclass(slots=True)
class LayerFiles:
    """One decoder layer: its tensors by name, and the pieces that fill them."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    experts: int = 0  # the number of experts that have their own pieces


@dataclass(slots=True)
class Placement:
    """The contents of a model's files: the tensors of its decoder layers, its other tensors by the names that
    transformers loads them by, and the names of those that have no place in it."""

    layers: list[LayerFiles]
    others: list[Stored]
    unread: list[str]
    packed: dict[str, Stored] = field(default_factory=dict)  # those of the others that stay packed


def place_weights(folder: Path, model: PreTrainedModel) -> Placement:
    """Return the places of the weights of `model`, which may be on the meta device: only its tensors' names and shapes
    count.

    Raises UsageError for files that lack some of a layer's tensors or have others, and UnsupportedModelError where
    transformers makes a layer's tensor from others in a way that is unknown here.
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


#: A tensor of a GGUF file with the experts of a layer.
_GGUF_EXPERTS = re.compile(r"(?P<name>.*\.ffn_(?P<part>gate|up|down)_exps)\.weight")


def place_gguf(gguf: GgufModel, model: PreTrainedModel) -> Placement:
    """Return the places of the weights of `model` in the GGUF files that describe it, as `place_weights` does."""
    place = decoder_layers(model)
    prefix, rules, wanted = place.prefix, TensorRules(gguf, model), model.state_dict()
    placement = Placement([LayerFiles() for _ in place.layers], [], [])
    filled: dict[str, int] = defaultdict(int)
    for part in gguf.parts:
        for tensor in part.tensors:
            offset = part.data_start + tensor.offset
            experts = _GGUF_EXPERTS.fullmatch(tensor.name)
            name, change = rules.of(tensor) if experts is None else (rules.names.get(experts["name"]), None)
            if name is None or name not in wanted:  # settings that `describe_gguf` has taken over
                continue
            plain = FLOATS.get(tensor.kind) if change is None else None
            form = Blocks(tensor.kind, tensor.shape, change) if plain is None else Plain(plain)
            filled[name] += tensor.numbers
            if not name.startswith(prefix):
                shape = tuple(wanted[name].shape)
                placement.others.append(Stored(name, part.path, offset, shape, form))
                continue
            number, _, inner = name.removeprefix(prefix).partition(".")
            layer = placement.layers[int(number)]
            layer.tensors[inner] = wanted[name].shape, wanted[name].dtype
            if experts is None or experts["part"] == "down":
                layer.pieces.append(Piece(part.path, offset, form, tensor.numbers, inner, 0))
                continue
            count = tensor.numbers // tensor.shape[0]  # beside as many of the other part
            size, second = form.nbytes(count), experts["part"] == "up"
            layer.pieces += [
                Piece(part.path, offset + each * size, form, count, inner, (2 * each + second) * count, each)
                for each in range(tensor.shape[0])
            ]
    for name, tensor in wanted.items():
        if filled[name] != tensor.numel() and (filled[name] or name.startswith(prefix)):
            what = "lack" if not filled[name] else "have another shape for"
            raise UsageError(f"{gguf.origin}: the weights {what} {name}")
    for layer in placement.layers:
        _split_experts(layer)
    return placement


def _stored_tensors(folder: Path) -> Iterator[Stored]:
    # All tensors of the files; the last one of a name counts, as in transformers.
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
            found[name] = Stored(name, path, start + tensor["data_offsets"][0], tuple(tensor["shape"]), Plain(dtype))
    yield from found.values()


def _pieces(
    folder: Path,
    name: str,
    inner: str,
    tensor: Tensor,
    sources: Mapping[str | None, Sequence[Stored]],
    converters: Mapping[str, Any],
) -> list[Piece]:
    # The pieces of a layer's tensor `name`, called `inner` in the layer, from the tensors that become it.
    if not sources:
        raise UsageError(f"{folder}: the weights lack {name}")
    if list(sources) == [None]:
        stored = sources[None][-1]
        if torch.Size(stored.shape) != tensor.shape:
            raise UsageError(f"{folder}: the shapes of the weights are not those of config.json")
        return [Piece(stored.path, stored.offset, stored.form, prod(stored.shape), inner, 0)]
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
            found.append(Piece(each.path, each.offset, each.form, prod(each.shape), inner, start, expert))
            start += prod(each.shape)
    return found


def _joins_experts(operations: Sequence[Any], sources: int) -> bool:
    # Whether the operations stack one tensor of each expert, and join the stacks of several tensors side by side.
    kinds = [(type(each), each.dim) for each in operations if isinstance(each, MergeModulelist | Concatenate)]
    joins = [(MergeModulelist, 0), (Concatenate, 1)]
    return len(kinds) == len(operations) and kinds == (joins if sources > 1 else joins[: len(kinds)] or joins)


def _split_experts(layer: LayerFiles) -> None:
    # Cut pieces that hold all experts into one for each: tensors of a module named `experts`, all as long.
    lengths = {shape[0] for name, (shape, _) in layer.tensors.items() if _is_of_experts(name) and shape}
    if len(lengths) != 1:
        layer.pieces = [replace(piece, expert=None) for piece in layer.pieces]
        return
    (layer.experts,) = lengths
    pieces = []
    for piece in layer.pieces:
        if piece.expert is not None or not _is_of_experts(piece.tensor):
            pieces.append(piece)
            continue
        count = piece.count // layer.experts
        pieces += [
            replace(
                piece,
                offset=piece.offset + each * piece.form.nbytes(count),
                count=count,
                start=each * count,
                expert=each,
            )
            for each in range(layer.experts)
        ]
    layer.pieces = pieces


def _is_of_experts(name: str) -> bool:
    return "experts" in name.split(".")[-2:-1]


# Reading numbers from a model's files, with a check that the files do not change.


_STEP_BYTES = 16 << 20  # of one read: stopping takes as long as one read


class WeightFiles:
    """Files that are open for reading, by several threads if need be."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[Path, tuple[int, tuple[int, int]]] = {}
        self._stopped = False
        try:
            for path in sorted(set(paths)):
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._files[path] = (file, _version(file))
        except OSError as error:
            self.close()
            raise ResourceError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def read(self, piece: Piece | Stored, target: Tensor) -> None:
        """Fill `target` [numbers] on the CPU with the numbers of a piece or of a tensor.

        Raises ContentChangedError if the file ends too early, ResourceError if it cannot be read.
        """
        piece.form.read(partial(self._read_bytes, piece.path), piece.offset, target)

    def tensor(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor in `dtype`. Raises as `read`."""
        found = torch.empty(stored.shape, dtype=dtype)
        self.read(stored, found.view(-1))
        return found

    def matrix(self, stored: Stored, dtype: torch.dtype) -> PackedMatrix:
        """Return a matrix that is saved in blocks, whose numbers are those in `dtype`. Raises as `read`."""
        if not isinstance(stored.form, Blocks):
            raise TypeError(f"{stored.name} is not saved in blocks")
        rows, width = stored.shape
        saved = torch.empty(rows, stored.form.nbytes(width), dtype=torch.uint8)
        self._read_bytes(stored.path, stored.offset, saved.view(-1))
        return PackedMatrix(stored.form.kind, saved, width, dtype)

    def require_unchanged(self, paths: Iterable[Path]) -> None:
        """Raise ContentChangedError if one of these files has changed since it was opened."""
        for path in paths:
            file, version = self._files[path]
            if _version(file) != version:
                raise ContentChangedError(f"{path} has changed while the model was read from it; run the job again")

    def stop(self) -> None:
        """Let a read that another thread waits for end soon, with an error."""
        self._stopped = True

    def close(self) -> None:
        """Close the files. No thread may be reading."""
        for file, _ in self._files.values():
            os.close(file)
        self._files.clear()

    def _read_bytes(self, path: Path, offset: int, target: Tensor) -> None:
        file, _ = self._files[path]
        rest = memoryview(target.numpy().data)
        while rest:
            if self._stopped:
                raise InterruptedError("reading was stopped")
            try:
                count = os.preadv(file, [rest[:_STEP_BYTES]], offset)
            except OSError as error:
                raise ResourceError(f"{path}: cannot be read: {error.strerror}") from None
            if not count:
                raise ContentChangedError(f"{path} was cut short while the model was read from it; run the job again")
            rest, offset = rest[count:], offset + count


def _version(file: int) -> tuple[int, int]:
    found = os.fstat(file)
    return found.st_size, found.st_mtime_ns


def read_all(gguf: GgufModel, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all weights of a GGUF model in `dtype`, by the names that they have in `model`, which may be on the meta
    device. Raises UsageError, ContentChangedError and ResourceError."""
    placement = place_gguf(gguf, model)
    prefix = decoder_layers(model).prefix
    files = WeightFiles(part.path for part in gguf.parts)
    try:
        found = {}
        for number, layer in enumerate(placement.layers):
            for name, (shape, _) in layer.tensors.items():
                found[f"{prefix}{number}.{name}"] = torch.empty(shape, dtype=dtype)
            for piece in layer.pieces:
                target = found[f"{prefix}{number}.{piece.tensor}"].view(-1)
                files.read(piece, target[piece.start : piece.start + piece.count])
        for stored in placement.others:
            found[stored.name] = files.tensor(stored, dtype)
        files.require_unchanged({part.path for part in gguf.parts})
        return found
    finally:
        files.close()

"""The places of a model's numbers in its files, and reading them.

transformers renames tensors, joins those of experts and changes some when it loads a model. Here its own rules are
applied to names and single tensors, so that one layer can be read later, and repeatedly.
"""

from __future__ import annotations

import copy
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
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)
from transformers.quantizers.base import HfQuantizer

from prefillcli.errors import ContentChangedError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.models.files import data_start, read_header, weight_files
from prefillcli.models.gguf import Change, GgufModel, tensor_rules
from prefillcli.models.unpacking import with_faster_operations
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.packed import FLOATS, PackedMatrix, blocks_bytes, unpack

_CONVERTED = 16_384  # numbers converted at a time: too few for torch to start threads, which would slow the walk's
_UNPACKED = 1 << 18  # numbers of blocks that are unpacked at a time, and stay in the cache
_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
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

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return self.form.nbytes(prod(self.shape))


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


_SCRATCH = 3 * 4  # bytes for each number that is made: of integers, of what they become, and of all experts together


@dataclass(frozen=True, eq=False, slots=True)
class Conversion:
    """Tensors that are made of others: `convert` makes them of the `sources`, by name. Each source is read in its own
    dtype, or in the one beside it. `count` numbers are made; with `experts` they are those of all of them."""

    sources: tuple[tuple[Stored, torch.dtype | None], ...]
    convert: Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
    targets: tuple[str, ...]
    count: int
    experts: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its sources in the files."""
        return sum(stored.nbytes for stored, _ in self.sources)

    @property
    def scratch_bytes(self) -> int:
        """The bytes of memory that it takes for a while, at most."""
        return self.nbytes + _SCRATCH * self.count


@dataclass(slots=True)
class LayerFiles:
    """One decoder layer: its tensors by name, and the pieces and conversions that fill them."""

    tensors: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    experts: int = 0  # the number of experts that have their own pieces

    @property
    def paths(self) -> set[Path]:
        """The files that it is read from."""
        own = {piece.path for piece in self.pieces}
        return own | {stored.path for each in self.conversions for stored, _ in each.sources}


@dataclass(slots=True)
class Placement:
    """The contents of a model's files: the tensors of its decoder layers, its other tensors by the names that
    transformers loads them by, and the names of those that have no place in it."""

    layers: list[LayerFiles]
    others: list[Stored]
    unread: list[str]
    packed: dict[str, Stored] = field(default_factory=dict)  # those of the others that stay packed
    conversions: list[Conversion] = field(default_factory=list)  # that make others, by their names in the model


def place_weights(
    folder: Path,
    model: PreTrainedModel,
    dtype: torch.dtype,
    quantiser: HfQuantizer | None = None,
    names: Mapping[str, str] | None = None,
) -> Placement:
    """Return the places of the weights of `model`, which may be on the meta device: only its tensors' names and shapes
    count. Weights in `folder` that a `quantiser` of transformers unpacks become numbers of `dtype`; it changes the
    model, which must be on the meta device, as it does for loading. Of a checkpoint with other parts, `names` has by
    the names of tensors in the files those of the model's own.

    Raises UsageError for files that lack some of a layer's tensors or have others, and UnsupportedModelError where
    transformers makes a layer's tensor from others in a way that is unknown here.
    """
    place = decoder_layers(model)
    prefix = place.prefix
    whole = model.state_dict()
    if quantiser is not None:
        with torch.device("meta"):
            quantiser.preprocess_model(model, dtype=dtype)
    mapping = get_model_conversion_mapping(model, hf_quantizer=quantiser)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    wanted = model.state_dict()
    placement = Placement([LayerFiles() for _ in place.layers], [], [])
    sources: dict[str, dict[str | None, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for stored in sorted(_stored_tensors(folder), key=lambda each: dot_natural_key(each.name)):
        own = stored.name if names is None else names.get(stored.name)
        if own is None:
            continue
        name, pattern = rename_source_key(own, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and own in wanted:
            name, pattern = rename_source_key(own, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            placement.unread.append(own)
        elif name.startswith(prefix) or (quantiser is not None and pattern is not None):
            sources[name][pattern].append(stored)
        else:
            placement.others.append(stored)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    taken = set()
    if quantiser is not None:
        _place_conversions(folder, model, placement, sources, by_pattern, dtype)
        taken = _place_compressed(folder, model, placement, sources, whole, dtype)
    for name, tensor in wanted.items():
        if not name.startswith(prefix) or name in taken:
            continue
        if name not in sources and name in model.all_tied_weights_keys:
            raise UnsupportedModelError(
                f"{folder}: {name} is that of another layer, which is not read layer by layer; take --weights resident"
            )
        number, _, inner = name.removeprefix(prefix).partition(".")
        layer = placement.layers[int(number)]
        layer.tensors[inner] = (tensor.shape, tensor.dtype)
        if any(inner in each.targets for each in layer.conversions):
            continue
        layer.pieces += _pieces(folder, name, inner, tensor, sources.get(name, {}), by_pattern)
    for layer in placement.layers:
        _split_experts(layer)
    return placement


#: A tensor of a GGUF file with the experts of a layer.
_GGUF_EXPERTS = re.compile(r"(?P<name>.*\.ffn_(?P<part>gate|up|down)_exps)\.weight")


def place_gguf(gguf: GgufModel, model: PreTrainedModel) -> Placement:
    """Return the places of the weights of `model` in the GGUF files that describe it, as `place_weights` does."""
    place = decoder_layers(model)
    prefix, rules, wanted = place.prefix, tensor_rules(gguf, model), model.state_dict()
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
        raise UnsupportedModelError(_unknown(folder, name))
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


# Tensors that a quantiser of transformers makes while it loads a checkpoint.


def _place_conversions(
    folder: Path,
    model: PreTrainedModel,
    placement: Placement,
    sources: dict[str, dict[str | None, list[Stored]]],
    converters: Mapping[str, Any],
    dtype: torch.dtype,
) -> None:
    # Take from the `sources` of a model's tensors those that a converter changes, and place their conversions.
    prefix, wanted = decoder_layers(model).prefix, model.state_dict()
    for name in [name for name, found in sources.items() if list(found) != [None]]:
        found, tensor = sources.pop(name), wanted[name]
        in_order = sorted(
            ((stored, pattern) for pattern, each in found.items() if pattern is not None for stored in each),
            key=lambda each: dot_natural_key(each[0].name),
        )
        converter = converters[in_order[0][1]]
        if None in found or len(converter.target_patterns) != 1:
            raise UnsupportedModelError(_unknown(folder, name))
        converted = tuple((each, _first_dtype(model, each, name, dtype)) for each, _ in in_order)
        inner = name
        convert = _Converter(with_faster_operations(converter), model, name, tuple(pattern for _, pattern in in_order))
        if len(in_order) == 1 and convert.leaves(in_order[0][0]):
            if name.startswith(prefix):
                sources[name] = {None: [in_order[0][0]]}
            else:
                placement.others.append(in_order[0][0])
            continue
        into = placement.conversions
        if name.startswith(prefix):
            number, _, inner = name.removeprefix(prefix).partition(".")
            into = placement.layers[int(number)].conversions
        experts = tensor.shape[0] if _is_of_experts(inner) and tensor.dim() > 2 else 0
        into.append(Conversion(converted, replace(convert, target=inner), (inner,), tensor.numel(), experts))


@dataclass(frozen=True, slots=True)
class _Converter:
    # Makes the tensor `name` of a model with a converter of transformers, of tensors that match these patterns.
    converter: WeightConverter
    model: PreTrainedModel
    name: str
    patterns: tuple[str, ...]
    target: str = ""

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        own = copy.copy(self.converter)
        own.collected_tensors = defaultdict(list)
        for pattern, tensor in zip(self.patterns, tensors, strict=True):
            own.collected_tensors[pattern].append(tensor)
        (found,) = own.convert(self.name, model=self.model, config=self.model.config).values()
        return {self.target: found[0] if isinstance(found, list) else found}

    def leaves(self, stored: Stored) -> bool:
        # Whether its only source stays as it is.
        empty = torch.empty(stored.shape, dtype=_dtype_of(stored), device="meta")
        return empty.is_floating_point() and self([empty])[self.target] is empty


def _first_dtype(model: PreTrainedModel, stored: Stored, name: str, dtype: torch.dtype) -> torch.dtype | None:
    # The dtype to which transformers changes a tensor that becomes `name` before a converter gets it; None: its own.
    if stored.name != name or not _dtype_of(stored).is_floating_point:
        return None
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    pattern, globs, _ = build_glob_alternation(list(plan))
    if plan and (found := pattern.search(name)) is not None:
        return plan[globs[str(found.lastgroup)]]
    own: torch.dtype = model.get_parameter_or_buffer(name).dtype
    return own


def _dtype_of(stored: Stored) -> torch.dtype:
    if not isinstance(stored.form, Plain):
        raise TypeError(f"{stored.name} is saved in blocks")
    return stored.form.dtype


def _place_compressed(
    folder: Path,
    model: PreTrainedModel,
    placement: Placement,
    sources: dict[str, dict[str | None, list[Stored]]],
    whole: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> set[str]:
    # Place the conversions of modules of compressed-tensors, whose package unpacks them once they are loaded. Their
    # weights are of the shapes of the `whole` model. Returns the names of the tensors that they are made of.
    prefix, taken = decoder_layers(model).prefix, set()
    for path, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        from compressed_tensors.compressors import BaseCompressor

        number, _, inner = path.removeprefix(prefix).partition(".")
        if not path.startswith(prefix):
            raise UnsupportedModelError(f"{folder}: {path}, which is in no layer, is packed; take --weights resident")
        packed = {name: each for name, each in module.state_dict().items() if "." not in name}
        names = {f"{path}.{name}" for name in packed}
        if lacks := sorted(name for name in names if list(sources.get(name, ())) != [None]):
            raise UsageError(f"{folder}: the weights lack {lacks[0]}")
        converted = []
        for name in packed:
            stored = sources.pop(f"{path}.{name}")[None][-1]
            converted.append((stored, _first_dtype(model, stored, f"{path}.{name}", dtype)))
        unpack = _Decompressor(
            BaseCompressor.get_value_from_registry(scheme.format.value), scheme, inner, tuple(packed)
        )
        layer, made = placement.layers[int(number)], unpack(list(packed.values()))
        for name, tensor in made.items():
            # Those of tensors that were not packed, which no shape of packed ones tells.
            shape = whole[f"{prefix}{number}.{name}"].shape if name == f"{inner}.weight" else tensor.shape
            own = dtype if tensor.is_floating_point() and dtype == torch.float32 else tensor.dtype
            if name == f"{inner}.weight_zero_point":
                shape, own = packed["weight_scale"].shape, torch.int8
            layer.tensors[name] = shape, own
        count = whole[f"{path}.weight"].numel()
        layer.conversions.append(Conversion(tuple(converted), unpack, tuple(made), count))
        taken |= names
    return taken


def leave_unpacked(model: PreTrainedModel, quantiser: HfQuantizer) -> None:
    """Change the layers of `model`, which are on the meta device, as a quantiser leaves them once it has unpacked
    their weights: those of compressed-tensors still round what goes into them."""
    if not hasattr(quantiser, "compressor"):
        return
    from compressed_tensors.compressors import decompress_module

    quantiser.preprocess_model(model)
    for module in list(model.modules()):
        decompress_module(module, quantiser.compressor.force_compression_format)
    quantiser.compressor.remove_decompression_hook(model)
    quantiser.remove_quantization_config(model)


@dataclass(frozen=True, slots=True)
class _Decompressor:
    # Makes the tensors of the module `path` of a layer with compressed-tensors, of its packed ones.
    compressor: Any
    scheme: Any
    path: str
    names: tuple[str, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        found = self.compressor.decompress(dict(zip(self.names, tensors, strict=True)), self.scheme)
        return {f"{self.path}.{name}": each for name, each in found.items()}


def _unknown(folder: Path, name: str) -> str:
    return (
        f"{folder}: transformers makes {name} from other tensors in a way that is not known layer by layer; "
        "take --weights resident"
    )


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

    def convert(self, conversion: Conversion) -> Mapping[str, Tensor]:
        """Return the tensors of a conversion, by name. Raises as `read`, and UsageError for wrong ones."""
        sources = [(self.tensor(stored, _dtype_of(stored)), dtype) for stored, dtype in conversion.sources]
        try:
            with torch.no_grad():
                return conversion.convert([each if dtype is None else each.to(dtype) for each, dtype in sources])
        except Exception as error:  # transformers raises any type for wrong files
            if out_of_resource(error):
                raise
            raise UsageError(f"{conversion.sources[0][0].path}: cannot load the weights: {brief(error)}") from None

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


def read_outside(gguf: GgufModel, names: Sequence[str]) -> dict[str, Tensor]:
    """Read those of these tensors that a GGUF model has, which are none of its transformers model, in float32. Raises
    ContentChangedError and ResourceError."""
    files = WeightFiles(part.path for part in gguf.parts)
    try:
        found = {
            each.name: Stored(each.name, part.path, part.data_start + each.offset, each.shape, Blocks(each.kind))
            for part in gguf.parts
            for each in part.tensors
            if each.name in names
        }
        return {name: files.tensor(each, torch.float32) for name, each in found.items()}
    finally:
        files.close()

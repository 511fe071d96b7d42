"""Decoder layers whose weights are read from the model's files while others compute.

Memory has room for few layers at a time. A thread reads the next ones into slots, which are buffers of one layer's
size, and a layer's tensors are views of its slot. The walk uses layers in ascending order, once a pass, so it is known
which layer is needed last: that one makes room. Where there is room for more than two layers, some stay for good,
spread evenly, so that the reads spread as well.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
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

from prefillcli.errors import ContentChangedError, PrefillError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import limit_kernel_advice, quiet_transformers, require_complete
from prefillcli.models.files import data_start, read_header, weight_files
from prefillcli.models.find import ModelFiles, with_weights
from prefillcli.models.heads import auto_class
from prefillcli.models.multimodal import read_config
from prefillcli.models.open import Opened
from prefillcli.models.rehearsal import prove_model, settle_paths
from prefillcli.models.weights import WeightsPlan, draft_bytes, layer_bytes
from prefillcli.runtime import memory
from prefillcli.walk.forest import ATTENTION, UnsupportedModelError, register
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.walk import LayerSource, PassSpeed

# The map from bytes of a model's files to numbers of its decoder layers.
#
# transformers renames tensors and joins those of experts when it loads a model. Here its own rules are applied to the
# names alone, so that a single layer can be read later, and repeatedly.


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
    """`count` numbers that lie side by side in a file and in a tensor of a layer; there the first is number `start`.

    `expert` is their expert; None where all tokens need them.
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
    experts: int = 0  # the number of experts that have their own pieces


@dataclass(slots=True)
class Placement:
    """The contents of a model's files: the tensors of its decoder layers, its other tensors, and the names of those
    that are not there."""

    layers: list[LayerFiles]
    others: list[Stored]
    unread: list[str]


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
    # The pieces of a layer's tensor `name`, called `inner` in the layer, from the tensors that become it.
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
                offset=piece.offset + each * count * piece.dtype.itemsize,
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
_CONVERTED = 16_384  # numbers converted at a time: too few for torch to start threads, which would slow the walk's


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

    def read(self, path: Path, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Fill `target` [numbers] on the CPU with numbers that are saved as `dtype` from byte `offset` on.

        Raises ContentChangedError if the file ends too early, ResourceError if it cannot be read.
        """
        if dtype == target.dtype:
            self._read_bytes(path, offset, target.view(torch.uint8))
            return
        raw = torch.empty(min(_CONVERTED, len(target)), dtype=dtype)
        for start in range(0, len(target), _CONVERTED):
            part = target[start : start + _CONVERTED]
            saved = raw[: len(part)]
            self._read_bytes(path, offset + start * dtype.itemsize, saved.view(torch.uint8))
            part.copy_(saved)

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


_ALIGNED = 64  # bytes: a cache line, and the alignment of torch's tensors
_UNUSED_SHARE = 0.2  # experts are read when they are needed if more of them are likely to stay unused
ROLLING_SLOTS = 2  # one layer computes, the next one is read
_ROWS = 512  # of the product by which the speed of arithmetic is measured
_ROUNDS = 3


@dataclass(eq=False, slots=True)
class _Slot:
    """A buffer for one layer, and its contents."""

    pinned: int | None = None  # the layer that stays in it for good
    buffer: Tensor | None = None  # uint8, on the device
    layer: int | None = None  # that is in it, or is being read
    loaded: bool = False
    missing: set[int] = field(default_factory=set)  # experts that are not read
    used: Any = None  # CUDA event: all uses of the buffer are done


class StreamedLayers(LayerSource):
    """A `prefillcli.walk.walk.LayerSource` over files.

    `layers` are a model's decoder layers, with parameters on the meta device; `files` has the places of their numbers.
    At most `room` bytes of layers are on `device`: enough for two layers, or for one if the model has only one.
    `resident_bytes` of other weights stay there all the time. `experts_per_token` is the number to which a token is
    routed.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        files: Sequence[LayerFiles],
        device: torch.device,
        *,
        room: int,
        resident_bytes: int = 0,
        experts_per_token: int = 0,
    ) -> None:
        super().__init__(layers)
        self._files = list(files)
        self._device = device
        self.resident_bytes = resident_bytes
        self._per_token = experts_per_token
        laid_out = [_lay_out(each, device) for each in files]
        self._places = [places for places, _ in laid_out]
        self.slot_bytes = max(size for _, size in laid_out)
        count = min(room // self.slot_bytes, len(layers))
        if count < min(ROLLING_SLOTS, len(layers)):
            raise ValueError(f"{room} bytes have no room for two layers")
        pinned = spread(count if count == len(layers) else count - ROLLING_SLOTS, len(layers))
        self._slots = [_Slot(pinned=layer) for layer in pinned]
        self._slots += [_Slot() for _ in range(count - len(pinned))]
        self.memory_bytes = self.slot_bytes * count
        self.bytes_read = 0
        self.seconds_waited = 0.0
        self._reader = WeightFiles(piece.path for layer in files for piece in layer.pieces)
        self._changed = threading.Condition()
        self._at = 0  # the layer that is in use, or is needed next
        self._ended = False  # no layer follows in this pass
        self._in_use: _Slot | None = None
        self._tokens: tuple[float, float] = (float("inf"), float("inf"))
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._staging: Tensor | None = None  # pinned host memory, where the device is another
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._hooks = [hook for index in range(len(layers)) for hook in self._watch_experts(index)]

    @property
    def pass_bytes(self) -> int:
        """The bytes that a pass over all layers reads, once the layers that stay are loaded."""
        stay = {slot.pinned for slot in self._slots}
        return sum(self.layer_bytes(index) for index in range(len(self)) if index not in stay)

    @property
    def numbers_per_token(self) -> float:
        """The weights with which a token is multiplied in all layers; among the experts, only those to which it is
        routed."""
        return sum(
            piece.count * (1.0 if piece.expert is None else self._per_token / files.experts)
            for files in self._files
            for piece in files.pieces
        )

    def layer_bytes(self, index: int) -> int:
        """Return the number of bytes of a layer in the files."""
        return sum(piece.count * piece.dtype.itemsize for piece in self._files[index].pieces)

    def measure_speed(self) -> PassSpeed:
        """See `LayerSource`: read the first layer, and multiply with its largest matrix, which takes about as long as
        one layer of a pack."""
        begun = time.monotonic()
        with self.use(0) as layer, torch.inference_mode():
            read = time.monotonic() - begun
            matrices = [matrix.flatten(0, -3)[0] if matrix.dim() > 2 else matrix.data for matrix in layer.parameters()]
            weight = max((each for each in matrices if each.dim() == 2), key=torch.Tensor.numel)
            rows = torch.ones((_ROWS, weight.shape[1]), dtype=weight.dtype, device=weight.device)
            product = min(_seconds(rows, weight) for _ in range(_ROUNDS))
        number_seconds = product / (_ROWS * weight.numel())
        return PassSpeed(
            read_seconds=self.pass_bytes * read / self.layer_bytes(0),
            token_seconds=number_seconds * self.numbers_per_token,
        )

    def expect(self, tokens: int, last: int) -> None:
        """Expect the next pass to be over this many tokens, and in the last layer over `last`: few tokens leave
        experts unused."""
        with self._changed:
            self._tokens = (tokens, last)

    @contextmanager
    def use(self, index: int) -> Iterator[nn.Module]:
        slot = self._wait_for(index)
        layer, buffer = self._layers[index], slot.buffer
        if buffer is None:
            raise RuntimeError("a layer was loaded into no buffer")
        before = {name: _exchange(layer, name, view) for name, view in self._views(index, buffer).items()}
        try:
            yield layer
        finally:
            for name, tensor in before.items():
                _exchange(layer, name, tensor)
            if self._stream is not None:
                slot.used = torch.cuda.current_stream(self._device).record_event()
            with self._changed:
                self._in_use = None
                self._at = 0 if self._ended else (index + 1) % len(self)
                self._changed.notify_all()

    def end_pass(self) -> None:
        """See `LayerSource`: the layers that come first in a pass are read from now on."""
        with self._changed:
            self._ended, self._at = True, 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the reading, free memory and close files."""
        self._reader.stop()
        with self._changed:
            self._failure = self._failure or RuntimeError("the layers are closed")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            slot.buffer = None
        self._reader.close()

    def _wait_for(self, index: int) -> _Slot:
        # The slot with layer `index`, which is in use from now on. Raises the error of reading it.
        begun = time.monotonic()
        with self._changed:
            if self._in_use is not None:
                raise RuntimeError("one layer is used at a time")
            self._at, self._ended = index, False
            if self._thread is None:
                self._thread = threading.Thread(target=self._read_ahead, name="weights", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            while True:
                found = next((slot for slot in self._slots if slot.layer == index and slot.loaded), None)
                if found is not None:
                    break
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
            self._in_use = found
        self.seconds_waited += time.monotonic() - begun
        return found

    # In the thread that reads.

    def _read_ahead(self) -> None:
        try:
            while True:
                with self._changed:
                    while self._failure is None and (task := self._next()) is None:
                        self._changed.wait()
                    if self._failure is not None or task is None:
                        return
                    layer, slot = task
                    slot.layer, slot.loaded = layer, False
                    experts = self._files[layer].experts
                    slot.missing = set() if self._takes_all_experts(layer) else set(range(experts))
                pieces = [piece for piece in self._files[layer].pieces if piece.expert not in slot.missing]
                self._fill(slot, pieces)
                with self._changed:
                    slot.loaded = True
                    self._changed.notify_all()
        except BaseException as error:  # for the thread that waits
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next(self) -> tuple[int, _Slot] | None:
        # The layer to read next, and its slot; None while all layers that have room are loaded.
        held = {slot.layer for slot in self._slots}
        order = [(self._at + distance) % len(self) for distance in range(len(self))]
        layer = next((each for each in order if each not in held), None)
        if layer is None:
            return None
        for slot in self._slots:
            if slot.pinned == layer:
                return layer, slot
        free = [slot for slot in self._slots if slot.pinned is None and slot is not self._in_use]
        for slot in free:
            if slot.layer is None:
                return layer, slot
        last = max(free, key=lambda slot: order.index(slot.layer or 0), default=None)
        if last is None or order.index(last.layer or 0) < order.index(layer):
            return None
        return layer, last

    def _takes_all_experts(self, layer: int) -> bool:
        # Whether hardly any expert of a layer is likely to stay unused in the next pass.
        experts = self._files[layer].experts
        tokens = self._tokens[layer == len(self) - 1]
        if experts <= self._per_token or not self._per_token or tokens == float("inf"):
            return True
        return bool((1 - self._per_token / experts) ** tokens < _UNUSED_SHARE)

    def _fill(self, slot: _Slot, pieces: Sequence[Piece]) -> None:
        # Read pieces of the slot's layer into its buffer. Raises ContentChangedError, ResourceError.
        if slot.buffer is None:
            slot.buffer = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self._device)
        index = slot.layer or 0
        views = self._views(index, slot.buffer)
        if self._stream is None:
            self._read(pieces, lambda piece: _part(views, piece))
            return
        if slot.used is not None:
            slot.used.synchronize()
        if self._staging is None:
            self._staging = torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=True)
        staged = self._views(index, self._staging)
        with torch.cuda.stream(self._stream):
            for piece in pieces:
                self._read([piece], lambda piece: _part(staged, piece))
                _part(views, piece).copy_(_part(staged, piece), non_blocking=True)
        self._stream.synchronize()

    def _read(self, pieces: Sequence[Piece], target: Callable[[Piece], Tensor]) -> None:
        for piece in pieces:
            self._reader.read(piece.path, piece.offset, piece.dtype, target(piece))
        self._reader.require_unchanged({piece.path for piece in pieces})
        with self._changed:
            self.bytes_read += sum(piece.count * piece.dtype.itemsize for piece in pieces)

    def _views(self, index: int, buffer: Tensor) -> dict[str, Tensor]:
        # The tensors of layer `index` in a buffer.
        found = {}
        for name, (start, (shape, dtype)) in self._places[index].items():
            end = start + prod(shape) * dtype.itemsize
            found[name] = buffer[start:end].view(dtype).view(shape)
        return found

    # Experts that are read when tokens are routed to them.

    def _watch_experts(self, index: int) -> Iterator[Any]:
        names = {piece.tensor.rpartition(".")[0] for piece in self._files[index].pieces if piece.expert is not None}
        for name in sorted(names):

            def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._read_experts((*args, *kwargs.values()))

            yield self._layers[index].get_submodule(name).register_forward_pre_hook(before, with_kwargs=True)

    def _read_experts(self, arguments: Sequence[Any]) -> None:
        # Read the missing ones of the experts that the layer in use is about to call with these arguments.
        slot = self._in_use
        if slot is None or slot.layer is None or slot.buffer is None or not slot.missing:
            return
        begun = time.monotonic()
        routing = [each for each in arguments if isinstance(each, Tensor) and each.dtype in (torch.int64, torch.int32)]
        wanted = set(slot.missing)
        if len(routing) == 1:
            wanted &= set(torch.unique(routing[0]).tolist())
        pieces = [piece for piece in self._files[slot.layer].pieces if piece.expert in wanted]
        views = self._views(slot.layer, slot.buffer)
        for piece in pieces:
            place = _part(views, piece)
            host = place if self._stream is None else torch.empty(piece.count, dtype=place.dtype)
            self._read([piece], lambda piece, host=host: host)  # type: ignore[misc]  # mypy knows no such default
            if host is not place:
                place.copy_(host)
        slot.missing -= wanted
        self.seconds_waited += time.monotonic() - begun


def spread(count: int, layers: int) -> list[int]:
    """Return `count` of the layers 0 to `layers` - 1, as evenly spread as possible."""
    return [(2 * each + 1) * layers // (2 * count) for each in range(count)]


def _lay_out(
    files: LayerFiles, device: torch.device
) -> tuple[dict[str, tuple[int, tuple[torch.Size, torch.dtype]]], int]:
    # The place of each tensor in a slot, its shape and dtype, and the bytes of all together. On a CPU, the rounding of
    # float32 products depends on where in a cache line a matrix begins. Resident weights are mapped files, so a tensor
    # that is read unchanged gets the same alignment here as in its file.
    parts: dict[str, list[Piece]] = {}
    for piece in files.pieces:
        parts.setdefault(piece.tensor, []).append(piece)
    places, end = {}, 0
    for name, (shape, dtype) in files.tensors.items():
        first = parts[name][0]
        as_saved = device.type == "cpu" and first.dtype == dtype and _is_one_run(parts[name])
        # Not every writer pads its header, so numbers may begin between two places that torch accepts.
        start = end + (first.offset % _ALIGNED if as_saved and first.offset % dtype.itemsize == 0 else 0)
        places[name] = (start, (shape, dtype))
        end = -(-(start + prod(shape) * dtype.itemsize) // _ALIGNED) * _ALIGNED
    return places, end


def _is_one_run(pieces: Sequence[Piece]) -> bool:
    # Whether the pieces of a tensor lie side by side in one file.
    return all(
        after.path == before.path and after.offset == before.offset + before.count * before.dtype.itemsize
        for before, after in pairwise(pieces)
    )


def _part(views: dict[str, Tensor], piece: Piece) -> Tensor:
    # The numbers of a tensor that a piece fills, as one row.
    return views[piece.tensor].view(-1)[piece.start : piece.start + piece.count]


def _exchange(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    # Replace a layer's parameter or buffer by a tensor; return the one before.
    inside, _, own = name.rpartition(".")
    module = layer.get_submodule(inside)
    places: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    before: Tensor = places[own]
    parameter = places is module._parameters and not isinstance(tensor, nn.Parameter)
    places[own] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
    return before


def _seconds(rows: torch.Tensor, weight: torch.Tensor) -> float:
    begun = time.monotonic()
    torch.mm(rows, weight.T)[0, 0].item()  # waits for the device
    return time.monotonic() - begun


# A model whose layers' weights stay in the files: the decision to stream it, its memory, and its loading.


_STREAMED_SHARE = 1 / 4  # share of the free memory, where no --weights-memory is given
_STREAMED_TO = ("cpu", "cuda")  # kinds of devices
_ALIGNMENT_BYTES = 1 << 20  # for the gaps between the tensors of two layers


@dataclass(frozen=True, slots=True)
class StreamedPlan(WeightsPlan):
    """At most `taken` bytes of the weights are on the device: this process's `share` of the bytes that all may
    take."""

    share: float = 1.0
    mode = "stream"
    place = "streamed from the files"

    def load(
        self, files: ModelFiles, device: torch.device, *, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, StreamedLayers]:
        return load_streamed(files, device, memory=self.taken, share=self.share, trust_remote_code=trust_remote_code)


def plan_streamed(
    opened: Opened, weights_memory: str | None, *, always: bool, draft: bool, share: float
) -> StreamedPlan | None:
    """Plan the memory in which the weights are streamed; None where they are not.

    Unless they `always` are, they are streamed, if possible, where they do not fit in the device's memory or in
    `--weights-memory`. `draft` and `share` are as in `Feature.keep_weights`. Raises UsageError, and ResourceError
    where the device certainly has no room.
    """
    sizes = layer_bytes(opened.files, opened.device)
    total, most = sum(sizes.values()), memory.loadable_memory(opened.device)
    small = draft_bytes(opened) if draft else 0
    free = None if most is None else max(most - small, 0)
    allowed = memory.parse_size(weights_memory) if weights_memory else None
    limit = min((each for each in (allowed, free) if each is not None), default=total)
    streamable = opened.files.quantised is None and opened.files.part_of is None and opened.variants is None
    streamable = streamable and opened.device.type in _STREAMED_TO
    if not always and (total <= limit or not streamable):
        return None
    if opened.device.type not in _STREAMED_TO:
        raise UsageError(
            f"--weights stream: weights are streamed to CPUs and CUDA devices, not to {opened.device}\n"
            "take --weights resident, or --device cpu"
        )
    given = None if allowed is None else int(allowed * share)  # resident weights are shared between workers
    layers = sorted((size for number, size in sizes.items() if number is not None), reverse=True)
    least = sizes.get(None, 0) + sum(layers[:1]) * min(ROLLING_SLOTS, len(layers))
    if free is not None and max(least, given or 0) > free:
        dtype = str(opened.files.dtype).removeprefix("torch.")
        asked = f"--weights-memory {weights_memory}" if given else "embedding, head and two layers"
        and_draft = " beside the small model" if small else ""
        raise ResourceError(
            f"{opened.files.origin}: the weights take {total / 2**30:.1f} GiB in {dtype}, and even streamed, {asked} "
            f"take more than the {free / 2**30:.1f} GiB that {opened.device} has free{and_draft}\n"
            "take a smaller model, or another --dtype or --device"
        )
    enough = least + least // 50 + _ALIGNMENT_BYTES
    most_memory = given or max(enough, int((free or 0) * _STREAMED_SHARE * share))
    return StreamedPlan(total, min(most_memory, max(total, enough)), share)


def load_streamed(
    files: ModelFiles, device: torch.device, *, memory: int, share: float = 1.0, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, StreamedLayers]:
    """Load the model on `device` without the weights of its decoder layers; return it with the source that reads these
    from the files.

    At most `memory` bytes of weights will be on the device, this process's `share` of the bytes that all may take. A
    family that is not verified is rehearsed, which reads all weights several times. Raises ResourceError, with the
    memory that it takes, where this is too little; UnsupportedModelError for a model whose walk differs from its own
    forward, and for files that cannot be read layer by layer.
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
    sizes = [_lay_out(parts, device)[1] for parts in placement.layers]
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
    # The model on `device`, ready to be walked, and its layers, whose weights stay where they are.
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
    # The model on the CPU as transformers loads it with this `attention`, but with the tensors of decoder layers on
    # the meta device; and the places of these in the files. Raises UsageError.
    whole = read_config(files.path, trust_remote_code=trust_remote_code)
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
            tensor = attrgetter(name)(layer)
            _exchange(layer, name, torch.empty_like(tensor, device="meta"))
            parts.tensors[name] = tensor.shape, tensor.dtype
    return model, placement


def _keep_buffers(layer: nn.Module, streamed: set[str], device: torch.device) -> None:
    # Move those buffers of a layer to the device that are in no file.
    for prefix, module in layer.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and f"{prefix}.{name}".removeprefix(".") not in streamed:
                module._buffers[name] = buffer.to(device)

"""Decoder layers whose weights are read from the model's files while others compute.

Few layers have room in memory at a time. A thread reads the next ones into slots, which are buffers of one layer's
size, and a layer's tensors are views of its slot. The walk uses layers in ascending order, once a pass, so the layer
that is needed last is known: it makes room. Where there is room for more than two layers, some stay for good, spread
evenly, so that the reads spread as well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from prefillcli.models.placement import LayerFiles, Piece
from prefillcli.models.weight_files import WeightFiles

_ALIGNED = 64  # bytes: a cache line, and what torch's tensors begin at
_UNUSED_SHARE = 0.2  # experts are read when they are needed if more of them are likely to stay unused
ROLLING_SLOTS = 2  # one layer computes, the next one is read


@dataclass(eq=False, slots=True)
class _Slot:
    """A buffer for one layer, and what is in it."""

    pinned: int | None = None  # the layer that stays in it for good
    buffer: Tensor | None = None  # uint8, on the device
    layer: int | None = None  # that is in it, or is being read
    loaded: bool = False
    missing: set[int] = field(default_factory=set)  # experts that are not read
    used: Any = None  # CUDA event: what has used the buffer is done


class StreamedLayers:
    """A `prefillcli.prefill.layers.LayerSource` over files.

    `layers` are a model's decoder layers, with parameters on the meta device; `files` says where the numbers of each
    are. At most `room` bytes of layers are on `device`, which must be enough for two, or for one if there is only one.
    `resident_bytes` of other weights are there all the time. `experts_per_token` are those that a token is routed to.
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
        self._layers = list(layers)
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

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def memory_bytes(self) -> int:
        """What the slots take, once all are filled."""
        return self.slot_bytes * len(self._slots)

    @property
    def pass_bytes(self) -> int:
        """What a pass over all layers reads, once the layers that stay are there."""
        stay = {slot.pinned for slot in self._slots}
        return sum(self.layer_bytes(index) for index in range(len(self)) if index not in stay)

    @property
    def numbers_per_token(self) -> float:
        """Weights that a token is multiplied with in all layers: of the experts, those that it is routed to."""
        return sum(
            piece.count * (1.0 if piece.expert is None else self._per_token / files.experts)
            for files in self._files
            for piece in files.pieces
        )

    def layer_bytes(self, index: int) -> int:
        """What a layer takes in the files."""
        return sum(piece.count * piece.dtype.itemsize for piece in self._files[index].pieces)

    def expect(self, tokens: int, last: int) -> None:
        """The next pass is over so many tokens, and in the last layer over `last`: few tokens leave experts unused."""
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
        """As `LayerSource`: the layers that come first in a pass are read from now on."""
        with self._changed:
            self._ended, self._at = True, 0
            self._changed.notify_all()

    def close(self) -> None:
        """End the reading, and let go of memory and files."""
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
        """The slot with layer `index`, which is in use from now on. Raises what reading it raised."""
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
        """The layer to read next, and where to; None while all that have room are there."""
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
        """Whether hardly any expert of a layer is likely to stay unused in the next pass."""
        experts = self._files[layer].experts
        tokens = self._tokens[layer == len(self) - 1]
        if experts <= self._per_token or not self._per_token or tokens == float("inf"):
            return True
        return bool((1 - self._per_token / experts) ** tokens < _UNUSED_SHARE)

    def _fill(self, slot: _Slot, pieces: Sequence[Piece]) -> None:
        """Read pieces of the slot's layer into its buffer. Raises ContentChangedError, ResourceError."""
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
        """The tensors of layer `index` in a buffer."""
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
        """Read what is missing of the experts that the layer in use is about to call with these arguments."""
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
    """`count` of the layers 0 to `layers` - 1, as even as can be."""
    return [(2 * each + 1) * layers // (2 * count) for each in range(count)]


def slot_bytes(files: LayerFiles, device: torch.device) -> int:
    """Bytes of a slot for a layer."""
    return _lay_out(files, device)[1]


def _lay_out(
    files: LayerFiles, device: torch.device
) -> tuple[dict[str, tuple[int, tuple[torch.Size, torch.dtype]]], int]:
    """Where each tensor begins in a slot, its shape and dtype, and the bytes of them all.

    Products of float32 matrices on a CPU are rounded by where in a cache line a matrix begins. Resident weights are
    mapped files, so a tensor that is read as it is begins where it begins in its file.
    """
    parts: dict[str, list[Piece]] = {}
    for piece in files.pieces:
        parts.setdefault(piece.tensor, []).append(piece)
    places, end = {}, 0
    for name, (shape, dtype) in files.tensors.items():
        first = parts[name][0]
        as_saved = device.type == "cpu" and first.dtype == dtype and _is_one_run(parts[name])
        # Not every writer pads its header, so numbers may begin between two places that torch takes.
        start = end + (first.offset % _ALIGNED if as_saved and first.offset % dtype.itemsize == 0 else 0)
        places[name] = (start, (shape, dtype))
        end = -(-(start + prod(shape) * dtype.itemsize) // _ALIGNED) * _ALIGNED
    return places, end


def _is_one_run(pieces: Sequence[Piece]) -> bool:
    """Whether the pieces of a tensor lie side by side in one file."""
    return all(
        after.path == before.path and after.offset == before.offset + before.count * before.dtype.itemsize
        for before, after in pairwise(pieces)
    )


def _part(views: dict[str, Tensor], piece: Piece) -> Tensor:
    """The numbers of a tensor that a piece fills, as one row."""
    return views[piece.tensor].view(-1)[piece.start : piece.start + piece.count]


def _exchange(layer: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Put a tensor in the place of a layer's parameter or buffer; gives the one before."""
    inside, _, own = name.rpartition(".")
    module = layer.get_submodule(inside)
    places: dict[str, Any] = module._parameters if own in module._parameters else module._buffers
    before: Tensor = places[own]
    parameter = places is module._parameters and not isinstance(tensor, nn.Parameter)
    places[own] = nn.Parameter(tensor, requires_grad=False) if parameter else tensor
    return before

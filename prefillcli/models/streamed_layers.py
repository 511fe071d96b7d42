"""Decoder layers whose weights are read from the model's files while others compute.

Memory has room for few layers at a time. A thread reads the next ones into slots, which are buffers of one layer's
size, and a layer's tensors are views of its slot. The walk uses layers in ascending order, once a pass, so it is known
which layer is needed last: that one makes room. Where there is room for more than two layers, some stay for good,
spread evenly, so that the reads spread as well.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import get_hf_quantizer
from transformers.quantizers.base import HfQuantizer

from prefillcli.errors import PrefillError, ResourceError, UsageError, brief, out_of_resource
from prefillcli.models.completeness import limit_cast_advice, limit_kernel_advice, quiet_transformers, require_complete
from prefillcli.models.find import ModelFiles
from prefillcli.models.heads import auto_class
from prefillcli.models.multimodal import drop_towers, outline_text_part, read_config
from prefillcli.models.newest_flash import settle_attention
from prefillcli.models.open import Opened
from prefillcli.models.placement import (
    Blocks,
    Conversion,
    LayerFiles,
    Piece,
    Placement,
    Plain,
    Stored,
    WeightFiles,
    leave_unpacked,
    place_gguf,
    place_weights,
)
from prefillcli.models.rehearsal import prove_model
from prefillcli.models.weights import (
    WeightsPlan,
    draft_bytes,
    layer_bytes,
    plan_quantisation,
    plan_resident,
    rehearsal_tolerance,
    weight_bytes,
)
from prefillcli.runtime import memory
from prefillcli.walk.forest import ATTENTION, UnsupportedModelError, register
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.packed import keep_packed
from prefillcli.walk.walk import LayerSource, PassSpeed

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
        self.memory_bytes = self.slot_bytes * count + scratch_bytes(files)
        self.bytes_read = 0
        self.seconds_waited = 0.0
        self._reader = WeightFiles(path for layer in files for path in layer.paths)
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

        def used(count: int, experts: int) -> float:
            return count * self._per_token / experts if experts else count

        return sum(
            sum(used(each.count, 0 if each.expert is None else files.experts) for each in files.pieces)
            + sum(used(each.count, each.experts) for each in files.conversions)
            for files in self._files
        )

    def layer_bytes(self, index: int) -> int:
        """Return the number of bytes of a layer in the files."""
        files = self._files[index]
        return sum(each.nbytes for each in files.pieces) + sum(each.nbytes for each in files.conversions)

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
            _compute_alone()
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
            self._convert(index, views)
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
            self._convert(index, views)
        self._stream.synchronize()

    def _read(self, pieces: Sequence[Piece], target: Callable[[Piece], Tensor]) -> None:
        for piece in pieces:
            self._reader.read(piece, target(piece))
        self._reader.require_unchanged({piece.path for piece in pieces})
        with self._changed:
            self.bytes_read += sum(piece.nbytes for piece in pieces)

    def _convert(self, index: int, views: Mapping[str, Tensor]) -> None:
        # Make those tensors of a layer that come of others.
        files = self._files[index]
        for each in files.conversions:
            for name, tensor in self._reader.convert(each).items():
                if tensor.shape != views[name].shape:
                    raise UsageError(
                        f"{each.sources[0][0].path}: the shapes of the weights are not those of config.json"
                    )
                views[name].copy_(tensor)
        self._reader.require_unchanged({stored.path for each in files.conversions for stored, _ in each.sources})
        with self._changed:
            self.bytes_read += sum(each.nbytes for each in files.conversions)

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


def _compute_alone() -> None:
    # Let torch compute in this thread alone, so that it starts no threads beside those of the walk. It also keeps the
    # last number given for threads that are yet to come: another thread gives that one again.
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    other = threading.Thread(target=torch.set_num_threads, args=(count,))
    other.start()
    other.join()


def scratch_bytes(files: Sequence[LayerFiles]) -> int:
    """Return the bytes of memory that making a layer's tensors of others takes for a while, at most."""
    return max((each.scratch_bytes for layer in files for each in layer.conversions), default=0)


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
        given = parts.get(name, [])  # none where the numbers are made of others
        as_saved = device.type == "cpu" and bool(given) and given[0].form == Plain(dtype) and _is_one_run(given)
        # Not every writer pads its header, so numbers may begin between two places that torch accepts.
        start = end + (given[0].offset % _ALIGNED if as_saved and given[0].offset % dtype.itemsize == 0 else 0)
        places[name] = (start, (shape, dtype))
        end = -(-(start + prod(shape) * dtype.itemsize) // _ALIGNED) * _ALIGNED
    return places, end


def _is_one_run(pieces: Sequence[Piece]) -> bool:
    # Whether the pieces of a tensor lie side by side in one file.
    return all(
        after.path == before.path and after.offset == before.offset + before.nbytes
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
_UNPACKED_BYTES = 512 << 20  # of a packed model, where no --weights-memory is given: unpacking costs little
_ALIGNMENT_BYTES = 1 << 20  # for the gaps between the tensors of two layers


@dataclass(frozen=True, slots=True)
class StreamedPlan(WeightsPlan):
    """At most `taken` bytes of the weights are on the device: this process's `share` of the bytes that all may take.
    Where the user has not `given` them, they may be too few for two layers, and are raised."""

    share: float = 1.0
    given: bool = True
    mode = "stream"
    place = "streamed from the files"

    def load(
        self, files: ModelFiles, device: torch.device, *, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, StreamedLayers]:
        return load_streamed(
            files,
            device,
            memory=self.taken,
            firm=self.given,
            share=self.share,
            trust_remote_code=trust_remote_code,
        )


class LowerPlan(WeightsPlan):
    """The layers that are read are on the device, those above are not loaded (`ModelFiles.read_layers`)."""

    def load(
        self, files: ModelFiles, device: torch.device, *, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, LayerSource]:
        return load_lower(files, device, trust_remote_code=trust_remote_code)


def plan_lower(opened: Opened, *, draft: bool) -> WeightsPlan:
    """Plan weights that all stay on the device, without those of layers that are not read wherever a model is read
    layer by layer. A `draft` must fit beside them. Raises ResourceError where the device certainly has no room."""
    found, files, device = plan_resident(opened, draft=draft), opened.files, opened.device
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    packed = quantisation is not None and quantisation.kept == "packed"
    changed = packed or opened.variants is not None  # as a whole, not layer by layer
    mapped = not weight_bytes(files, device)
    if files.read_layers is None or mapped or changed or device.type not in _STREAMED_TO:
        return found
    return LowerPlan(found.bytes, found.taken)


def plan_streamed(
    opened: Opened, weights_memory: str | None, *, always: bool, draft: bool, share: float
) -> StreamedPlan | None:
    """Plan the memory in which the weights are streamed; None where they are not.

    Unless they `always` are, they are streamed, if possible, where they do not fit in the device's memory or in
    `--weights-memory`, and on CPUs where they are packed in the file. A `draft` must fit beside a target's; this
    worker has a `share` of the memory. Raises UsageError, and ResourceError where the device certainly has no room.
    """
    sizes, scratch = layer_bytes(opened.files, opened.device), 0
    streamable = opened.variants is None and opened.device.type in _STREAMED_TO
    streamable = streamable and opened.narrow is None  # whose weights are made once
    packed = opened.files.gguf is not None
    if opened.files.gguf is not None and opened.device.type == "cpu":
        sizes[None] = opened.files.gguf.bytes_around(opened.files.dtype)
    if opened.files.quantised is not None and streamable:
        try:
            with quiet_transformers():
                scratch = scratch_bytes(_outline(opened.files, opened.device).placement.layers)
        except (UnsupportedModelError, UsageError):
            streamable = False
        packed = True
    packed = packed and opened.device.type == "cpu"
    total, most = sum(sizes.values()), memory.loadable_memory(opened.device)
    small = draft_bytes(opened) if draft else 0
    free = None if most is None else max(most - small, 0)
    allowed = memory.parse_size(weights_memory) if weights_memory else None
    limit = min((each for each in (allowed, free) if each is not None), default=total)
    if not always and (not streamable or (not packed and total <= limit)):
        return None
    if opened.device.type not in _STREAMED_TO:
        raise UsageError(
            f"--weights stream: weights are streamed to CPUs and CUDA devices, not to {opened.device}\n"
            "take --weights resident, or --device cpu"
        )
    given = None if allowed is None else int(allowed * share)  # resident weights are shared between workers
    layers = sorted((size for number, size in sizes.items() if number is not None), reverse=True)
    least = sizes.get(None, 0) + scratch + sum(layers[:1]) * min(ROLLING_SLOTS, len(layers))
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
    wanted = int((free or 0) * _STREAMED_SHARE) if not packed else min(_UNPACKED_BYTES, free or 0)
    most_memory = given or max(enough, int(wanted * share))
    return StreamedPlan(total, min(most_memory, max(total, enough)), share, given is not None)


def load_streamed(
    files: ModelFiles,
    device: torch.device,
    *,
    memory: int,
    firm: bool = True,
    share: float = 1.0,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, StreamedLayers]:
    """Load the model on `device` without the weights of its decoder layers; return it with the source that reads these
    from the files.

    At most `memory` bytes of weights will be on the device, this process's `share` of the bytes that all may take, or
    as many as two layers need if it is not `firm`. A family that is not verified is rehearsed, which reads all weights
    several times. Raises ResourceError, with the memory that it takes, where this is too little; UnsupportedModelError
    for a model whose walk differs from its own forward, and for files that cannot be read layer by layer.
    """
    register()
    limit_kernel_advice(device.type)
    settle_attention(device, files.dtype, files.config)
    with quiet_transformers():
        try:
            model, placement = _load_around_layers(files, device, ATTENTION, trust_remote_code)
        except KeyError:
            model, placement = _load_around_layers(files, device, "eager", trust_remote_code)
    model, layers = _moved(model, placement, device)
    read = placement.layers[: files.read_layers]
    packed = _keep_ends_packed(files, model, placement.packed)
    around = packed + sum(tensor.nbytes for tensor in {id(p): p for p in model.parameters() if not p.is_meta}.values())
    sizes = [_lay_out(parts, device)[1] for parts in read]
    scratch = scratch_bytes(read)
    around += scratch
    least = around + min(ROLLING_SLOTS, len(sizes)) * max(sizes)
    memory = memory if firm else max(memory, least)
    if memory < least:
        given = f"{memory / 2**20:,.1f} MiB{' for each worker' if share < 1 else ''}"
        what = "embedding, head and unpacking" if scratch else "embedding and head"
        raise ResourceError(
            f"--weights-memory: {given} is too little for {files.origin}: {what} take "
            f"{around / 2**20:,.1f} MiB and a layer {max(sizes) / 2**20:,.1f} MiB\n"
            f"give {math.ceil(least / share / 2**20)}MiB or more, which is room for two layers"
        )
    per_token = getattr(files.config, "num_experts_per_tok", None) or 0

    def source_of(count: int | None, least: int = 0) -> StreamedLayers:
        return StreamedLayers(
            list(layers)[:count],
            placement.layers[:count],
            device,
            room=max(memory - around, least),
            resident_bytes=around - scratch,
            experts_per_token=per_token,
        )

    # Of all layers nothing is read where the family is known. They may be larger than those that are read later.
    whole = source_of(None, ROLLING_SLOTS * max(_lay_out(parts, device)[1] for parts in placement.layers))
    try:
        prove_model(model, files, whole, tolerance=rehearsal_tolerance(files, device))
    except BaseException:
        whole.close()
        raise
    if files.read_layers is None:
        return model, whole
    whole.close()
    return model, source_of(files.read_layers)


def load_lower(
    files: ModelFiles, device: torch.device, *, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, LayerSource]:
    """Load the layers of a model that are read (`ModelFiles.read_layers`) and what is around them; those above stay
    without weights. They are read layer by layer, and stay on the device. Raises as `load_streamed`."""
    model, source = load_streamed(files, device, memory=0, firm=False, trust_remote_code=trust_remote_code)
    lower = list(decoder_layers(model).layers)[: files.read_layers]
    try:
        for index, layer in enumerate(lower):
            with source.use(index):
                tensors = {name: each.detach().clone() for name, each in layer.state_dict().items()}
            for name, tensor in tensors.items():
                _exchange(layer, name, tensor)
    finally:
        source.close()
    return model, LayerSource(lower)


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


@dataclass(frozen=True, slots=True)
class _Outline:
    """A model without its weights: what transformers builds it of, its tensors on the meta device by name, and the
    places of their numbers. A `quantiser` unpacks those of a quantised checkpoint. Of the text model of a multimodal
    one, `towers` are the shapes of tensors that its class has besides, and `names` those of its own tensors by the
    files' names."""

    config: Any
    kind: type[PreTrainedModel]
    tensors: Mapping[str, Tensor]
    prefix: str  # of the tensors of a layer
    placement: Placement
    quantiser: HfQuantizer | None
    towers: Mapping[str, torch.Size] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def _outline(files: ModelFiles, device: torch.device, trust_remote_code: bool = False) -> _Outline:
    # Raises UsageError, and UnsupportedModelError where the weights cannot be read layer by layer.
    config, quantiser = read_config(files.path, trust_remote_code=trust_remote_code), None
    quantisation = plan_quantisation(files.origin, files.quantised, device)
    if quantisation is not None and quantisation.kept == "packed":
        raise UnsupportedModelError(
            f"{files.origin}: weights quantised with {quantisation.format.name} stay packed, and cannot be read layer "
            "by layer\ntake --weights resident"
        )
    try:
        if files.part_of is not None and quantisation is None:
            text = outline_text_part(files.path, config, files.dtype)
            placement = place_weights(files.path, text.empty, files.dtype, names=text.names)
            tensors, prefix = text.empty.state_dict(), decoder_layers(text.empty).prefix
            return _Outline(text.config, type(text.empty), tensors, prefix, placement, None, text.towers, text.names)
        if quantisation is not None:
            limit_cast_advice()
            config.quantization_config = {**config.quantization_config, **quantisation.changes}
            quantiser, config, _ = get_hf_quantizer(config, None, None, True, {})
            del config.quantization_config
        with torch.device("meta"):
            empty = auto_class(files.head).from_config(config, dtype=files.dtype, trust_remote_code=trust_remote_code)
        tensors, prefix = empty.state_dict(), decoder_layers(empty).prefix
        if files.gguf is not None:
            placement = place_gguf(files.gguf, empty)
            if device.type == "cpu":
                placement.packed = _packed_ends(empty, placement.others)
        else:
            placement = place_weights(files.path, empty, files.dtype, quantiser)
    except Exception as error:  # as in `load_weights`
        if out_of_resource(error) or isinstance(error, PrefillError):
            raise
        raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    return _Outline(config, type(empty), tensors, prefix, placement, quantiser)


def _load_around_layers(
    files: ModelFiles, device: torch.device, attention: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, Placement]:
    # The model on the CPU as transformers loads it with this `attention`, but with the tensors of decoder layers on
    # the meta device; and the places of these in the files. Raises UsageError.
    outline = _outline(files, device, trust_remote_code)
    placement, quantiser = outline.placement, outline.quantiser
    try:
        if files.gguf is None:
            named = {outline.names.get(stored.name, stored.name): stored for stored in placement.others}
            given = {name: _mapped(stored) for name, stored in named.items()} | _converted(placement.conversions)
        else:
            given = _read_around(files, placement.others, placement.packed)
        # One number stands for each tensor of a layer: it takes no memory, and transformers finds nothing missing.
        given |= {
            name: torch.zeros((), dtype=files.dtype).expand(tensor.shape)
            for name, tensor in outline.tensors.items()
            if name.startswith(outline.prefix)
        }
        given |= {name: torch.zeros((), dtype=files.dtype).expand(shape) for name, shape in outline.towers.items()}
        given |= {name: torch.zeros(()) for name in placement.unread}
        model, info = outline.kind.from_pretrained(
            None,
            config=outline.config,
            state_dict=given,
            dtype=files.dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )
        if outline.towers:
            drop_towers(model)
        require_complete(files.origin, model, info, files.path, quantised=quantiser is not None)
        layers = decoder_layers(model).layers
        for layer, parts in zip(layers, placement.layers, strict=True):
            for name, tensor in layer.state_dict().items():
                parts.tensors[name] = tensor.shape, tensor.dtype
                _exchange(layer, name, torch.empty_like(tensor, device="meta"))
        if quantiser is not None:
            leave_unpacked(model, quantiser)
    except KeyError:
        raise
    except Exception as error:  # as in `load_weights`
        if out_of_resource(error) or isinstance(error, PrefillError):
            raise
        raise UsageError(f"{files.path}: cannot load the weights: {brief(error)}") from None
    for layer, parts in zip(layers, placement.layers, strict=True):
        if parts.tensors.keys() != layer.state_dict().keys():
            raise UnsupportedModelError(
                f"{files.origin}: transformers changes its layers once they are loaded; take --weights resident"
            )
        for name, (shape, dtype) in parts.tensors.items():
            _exchange(layer, name, torch.empty(shape, dtype=dtype, device="meta"))
    return model, placement


def _converted(conversions: Sequence[Conversion]) -> dict[str, Tensor]:
    reader = WeightFiles(stored.path for each in conversions for stored, _ in each.sources)
    try:
        return {name: tensor for each in conversions for name, tensor in reader.convert(each).items()}
    finally:
        reader.close()


def _mapped(stored: Stored) -> Tensor:
    with safe_open(stored.path, framework="pt") as file:
        found: Tensor = file.get_tensor(stored.name)
        return found


def _read_around(files: ModelFiles, others: Sequence[Stored], packed: Collection[str]) -> dict[str, Tensor]:
    # The tensors of a GGUF model outside its layers. One number stands for those that stay packed.
    reader = WeightFiles(each.path for each in others)
    try:
        return {
            each.name: torch.zeros((), dtype=files.dtype).expand(each.shape)
            if each.name in packed
            else reader.tensor(each, files.dtype)
            for each in others
        }
    finally:
        reader.close()


def _packed_ends(model: PreTrainedModel, others: Sequence[Stored]) -> dict[str, Stored]:
    # The weights of embedding and head that can stay in blocks on a CPU, by their names.
    ends = _ends(model)
    in_blocks = {each.name: each for each in others if isinstance(each.form, Blocks) and each.form.change is None}
    found: dict[str, Stored] = {}
    for end in ends:
        names = _names_of(model, end.weight)
        users = [model.get_submodule(name.rpartition(".")[0]) for name in names]
        fits = all(isinstance(user, nn.Embedding) or type(user) is nn.Linear for user in users)
        if fits and all(user in ends for user in users):
            found |= {name: in_blocks[name] for name in names if name in in_blocks}
    return found


def _ends(model: PreTrainedModel) -> list[Any]:
    return [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]


def _names_of(model: PreTrainedModel, weight: Tensor) -> list[str]:
    # The names of a parameter, which modules may share.
    return [name for name, each in model.named_parameters(remove_duplicate=False) if each is weight]


def _keep_ends_packed(files: ModelFiles, model: PreTrainedModel, packed: Mapping[str, Stored]) -> int:
    # Give embedding and head their packed weights; return the bytes of these.
    reader = WeightFiles(each.path for each in packed.values())
    try:
        matrices = {name: reader.matrix(each, files.dtype) for name, each in packed.items()}
    finally:
        reader.close()
    found = [(end, matrices[name]) for end in _ends(model) for name in _names_of(model, end.weight) if name in packed]
    for end, matrix in found:
        keep_packed(end, matrix)
    return sum(matrix.nbytes for matrix in matrices.values())


def _keep_buffers(layer: nn.Module, streamed: set[str], device: torch.device) -> None:
    # Move those buffers of a layer to the device that are in no file.
    for prefix, module in layer.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and f"{prefix}.{name}".removeprefix(".") not in streamed:
                module._buffers[name] = buffer.to(device)

"""What layers keep of nodes that later packs hold: their K,V, and the states of recurrent modules behind them.

Offloaded from a CUDA device, K,V are in pinned host memory. They leave while the next layer is computed, and those of
the next layer come while one is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.plan.pack import Held, Key, Pack
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.own_cache import LayerPast, Path, moved
from prefillcli.prefill.walk_state import WalkState

# Copies between a CUDA device and host memory, beside what the device computes.
#
# They run in a stream of their own, in order. Memory of the device belongs to the stream that computes: a tensor
# that is copied is kept until that stream waits for its copy. So a process that is many layers ahead of the device
# reserves no more memory than one that is not, as it would with `Tensor.record_stream`.


class CopyStream:
    """Copies of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An empty tensor in host memory that the device reads and writes by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy `source` to `target`, once everything is done that the device has been given so far.

        Both must be contiguous, and the one on the device must live until `wait` for the returned event.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def wait(self, copied: torch.cuda.Event) -> None:
        """What the device is given from now on comes after this copy. The process itself does not wait."""
        torch.cuda.current_stream(self._device).wait_event(copied)

    def finish(self) -> None:
        """Wait until all copies are done, so that the process can read host memory."""
        self._stream.synchronize()


class Leaving:
    """Tensors of the device on their way to the host: no more than `most` groups of them at a time."""

    def __init__(self, copies: CopyStream, most: int) -> None:
        self._copies = copies
        self._most = most
        self._groups: deque[list[tuple[Tensor, torch.cuda.Event]]] = deque()

    def begin(self) -> None:
        """Begin a group. What is computed from now on comes after the copies of older ones."""
        while len(self._groups) >= self._most:
            self._let_go()
        self._groups.append([])

    def start(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, which nothing else changes, to host memory."""
        self._groups[-1].append((source, self._copies.start(target, source)))

    def clear(self) -> None:
        """What is computed from now on comes after all copies."""
        while self._groups:
            self._let_go()

    def _let_go(self) -> None:
        for _, copied in self._groups.popleft():
            self._copies.wait(copied)


def copies_for(device: torch.device) -> CopyStream | None:
    """What copies between host memory and a device; None where that is the same memory."""
    return CopyStream(device) if device.type == "cuda" else None


# The residual stream of a pack: on the walk's device, or in host memory, from which chunks go to the device and
# back.
#
# On the host it takes no memory of the device, however long a prompt is. There the rows of the next chunk come while
# the current chunk is computed.


class ResidualRows:
    """Reads and writes rows of residual streams [1, tokens, hidden] for a walk on `device`.

    With `on_host` the streams are in host memory. All copies of a CUDA device go through one CUDA stream, in order: a
    row is written back before it is read again.
    """

    def __init__(self, device: torch.device, *, on_host: bool = False) -> None:
        self._device = device
        self._home = torch.device("cpu") if on_host else device
        self._copies = copies_for(device) if on_host else None
        self._leaving = None if self._copies is None else Leaving(self._copies, 1)

    def empty(self, tokens: int, like: Tensor) -> Tensor:
        """A stream for so many tokens, with the width and dtype of the rows `like` [1, rows, hidden]."""
        shape = (1, tokens, like.shape[-1])
        if self._copies is not None:
            return self._copies.host_memory(shape, like.dtype)
        return torch.empty(shape, dtype=like.dtype, device=self._home)

    def each(self, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The rows of each span, on the device; those of the next one are on their way meanwhile."""
        coming = [self._fetch(hidden, *span) for span in spans[:1]]
        try:
            for number in range(len(spans)):
                rows, copied = coming.pop()
                coming += [self._fetch(hidden, *span) for span in spans[number + 1 : number + 2]]
                self._wait(copied)  # and not for copies that were begun since
                yield rows
        finally:  # whatever ends a walk, memory is not used again while it is written
            for _, copied in coming:
                self._wait(copied)

    def write(self, hidden: Tensor, start: int, rows: Tensor) -> None:
        """Put rows [1, rows, hidden] of the device in the place from `start` on."""
        place = hidden[:, start : start + rows.shape[1]]
        if self._leaving is None:
            place.copy_(rows)
            return
        self._leaving.begin()
        self._leaving.start(place, rows.contiguous())

    def pick(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The rows at `at` int64 [rows], which is on the CPU, on the device: [1, rows, hidden]."""
        if self._copies is not None:
            self._copies.finish()  # of rows that are on their way to the host
        return hidden[:, at.to(self._home)].to(self._device)

    def _wait(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None and self._copies is not None:
            self._copies.wait(copied)

    def _fetch(self, hidden: Tensor, start: int, end: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Rows on the device, and the event after which they are there."""
        source = hidden[:, start:end]
        if self._copies is None:
            return source.to(self._device), None
        rows = torch.empty(source.shape, dtype=source.dtype, device=self._device)
        return rows, self._copies.start(rows, source)


KeyValue = tuple[Tensor, Tensor]


class HeldPart(NamedTuple):
    """One layer's part of a node of `tokens` tokens."""

    tokens: int
    keys_values: KeyValue | None  # [1, kv heads, tokens, width] each; None of a layer without attention
    states: tuple[LinearAttentionLayer, ...] | tuple[LayerPast] = ()  # of each recurrent module, or the own cache's


class _Coming(NamedTuple):
    """K,V of held nodes that are on their way to the device."""

    layer: int
    held: tuple[Held, ...]
    keys_values: list[KeyValue]
    copied: torch.cuda.Event | None  # the last copy; None where there is none


class HeldParts:
    """The parts of every layer, by `Held.key`: on `device`, or with `offload` in host memory."""

    def __init__(self, layers: int, device: torch.device, *, offload: bool = False) -> None:
        self._layers: list[dict[Key, HeldPart]] = [{} for _ in range(layers)]
        self._device = device
        self._place = torch.device("cpu") if offload else device
        self._copies = copies_for(device) if offload else None
        self._leaving = None if self._copies is None else Leaving(self._copies, 1)
        self._leaves: int | None = None  # the layer whose K,V left last
        self._given: _Coming | None = None  # what was asked for last
        self._next: _Coming | None = None

    def clear(self) -> None:
        """Drop everything."""
        self._land()
        for parts in self._layers:
            parts.clear()

    def holds(self, key: Key) -> bool:
        """Whether every layer has its part of this node."""
        return all(key in parts for parts in self._layers)

    def drop_others(self, keep: Set[Key], layer: int | None = None) -> None:
        """Drop what is not to be kept, of one layer or of all."""
        if layer is None:
            self._land()  # another pack begins
        for parts in self._layers if layer is None else [self._layers[layer]]:
            for key in parts.keys() - keep:
                del parts[key]

    def put_nodes(self, layer: int, state: WalkState, attention: ForestAttention) -> None:
        """Keep a layer's part of the nodes of a pack that later packs hold, when all of it has passed; drop others."""
        pack = state.whole
        self.drop_others(pack.keep, layer)
        for at, key in zip(state.held_nodes, pack.kept_nodes.values(), strict=True):
            first, last = (pack.held_tokens + state.tree.offsets[each] for each in (at, at + 1))
            both = None
            if attention.attended:
                keys, values = attention.keys_values
                both = keys[:, :, first:last], values[:, :, first:last]
            self.put(layer, key, HeldPart(last - first, both, state.recurrence.end_of(at)))

    def put(self, layer: int, key: Key, part: HeldPart) -> None:
        """Keep a copy of a layer's part of a node."""
        both = part.keys_values
        if both is not None and self._copies is not None:
            both = self._offloaded(layer, both)
        elif both is not None:
            both = both[0].to(self._place, copy=True), both[1].to(self._place, copy=True)
        states = part.states
        if states and isinstance(states[0], LayerPast):
            states = (moved(states[0], self._place),)
        self._layers[layer][key] = part._replace(keys_values=both, states=states)

    def keys_values(self, layer: int, pack: Pack) -> list[KeyValue]:
        """A layer's K,V of the nodes that a pack holds; none of a layer without attention."""
        if self._copies is not None:
            return self._fetched(self._copies, layer, pack.held)
        found = [(node, self._layers[layer][node.key].keys_values) for node in pack.held]
        return [_cut(both, node) for node, both in found if both is not None]

    def states(self, layer: int, pack: Pack) -> Mapping[int, tuple[LinearAttentionLayer, ...]]:
        """The states that a pack's roots begin behind in a layer, by root. Raises ValueError."""
        found = {}
        for root, above in enumerate(pack.attach):
            if not above:
                continue
            last = pack.held[above[-1]]
            part = self._layers[layer][last.key]
            if part.states:
                _refuse_cut(last, part)
                found[root] = part.states
        return found

    def paths(self, layer: int, pack: Pack) -> Mapping[int, Path]:
        """What the model's own cache keeps in a layer of the paths that a pack's roots begin behind, by root. Raises
        ValueError."""
        found = {}
        for root, above in enumerate(pack.attach):
            nodes = [pack.held[number] for number in above]
            parts = [self._layers[layer][node.key] for node in nodes]
            for node, part in zip(nodes, parts, strict=True):
                _refuse_cut(node, part)
            if parts:
                found[root] = tuple(part.states[0] for part in parts if isinstance(part.states[0], LayerPast))
        return found

    # Offloaded from a CUDA device. On the host, tokens come first, so that any run of them is contiguous.

    def _offloaded(self, layer: int, both: KeyValue) -> KeyValue:
        if self._copies is None or self._leaving is None:
            raise RuntimeError("nothing is offloaded from this device")
        if layer != self._leaves:
            self._leaving.begin()
            self._leaves = layer
        rows = []
        for each in both:
            source = each[0].transpose(0, 1).clone(memory_format=torch.contiguous_format)
            rows.append(self._copies.host_memory(tuple(source.shape), source.dtype))
            self._leaving.start(rows[-1], source)
        return rows[0], rows[1]

    def _fetched(self, copies: CopyStream, layer: int, held: tuple[Held, ...]) -> list[KeyValue]:
        given = self._given
        if given is None or (given.layer, given.held) != (layer, held):
            given, coming = None, self._next
            if coming is not None and (coming.layer, coming.held) == (layer, held):
                given = coming
            else:
                self._forget(coming)
                given = self._fetch(copies, layer, held)
            if given.copied is not None:
                copies.wait(given.copied)
            self._given = given
            self._next = self._fetch(copies, layer + 1, held) if layer + 1 < len(self._layers) else None
        return given.keys_values

    def _fetch(self, copies: CopyStream, layer: int, held: tuple[Held, ...]) -> _Coming:
        found: list[KeyValue] = []
        copied = None
        for node in held:
            part = self._layers[layer].get(node.key)
            if part is None or part.keys_values is None:
                continue
            pair = []
            for rows in part.keys_values:
                source = rows[node.offset : node.offset + node.length]
                target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
                copied = copies.start(target, source)
                pair.append(target.transpose(0, 1)[None])
            found.append((pair[0], pair[1]))
        return _Coming(layer, held, found, copied)

    def _forget(self, coming: _Coming | None) -> None:
        """Let go of K,V that nobody has asked for, once their memory is not written any more."""
        if coming is not None and coming.copied is not None and self._copies is not None:
            self._copies.wait(coming.copied)

    def _land(self) -> None:
        """Wait for all copies, and let go of their memory on the device."""
        self._forget(self._next)
        self._given = self._next = None
        if self._leaving is not None:
            self._leaving.clear()
            self._leaves = None


def _refuse_cut(node: Held, part: HeldPart) -> None:
    if node.offset or node.length != part.tokens:
        raise ValueError("a node that is held has a state at its end alone")


def _cut(both: KeyValue, node: Held) -> KeyValue:
    part = slice(node.offset, node.offset + node.length)
    return both[0][:, :, part], both[1][:, :, part]

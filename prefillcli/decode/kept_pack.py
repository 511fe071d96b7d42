"""K,V of all layers, and the states behind the reads, of a pack that is written on after it was scored.

While a pack is walked each layer hands over what is needed of it: its own buffer, so that the next layer gets new
room, or a copy in host memory, which leaves a CUDA device while the next layer is computed. Once the scores say which
reads are wanted, what only the others see is let go of, and `select` gives what lies on the paths of those that are
written on together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.own_cache import OwnCacheLayer
from prefillcli.prefill.recurrent import changed_state
from prefillcli.prefill.walk import KeyValue, Leaving, WalkState, copies_for

# Layers of a CUDA device that are kept in host memory: they leave while the next layer is computed, and come back
# for the rows that are written on.


States = tuple[LinearAttentionLayer, ...]  # what the recurrent modules of a layer know at a place
Name = TypeVar("Name")


class HostLayers:
    """Copies of layers between `device` and pinned host memory. Raises RuntimeError for one that has none.

    On the host tokens come first, [tokens, kv heads, width], so that any run of them is contiguous.
    """

    def __init__(self, device: torch.device) -> None:
        copies = copies_for(device)
        if copies is None:
            raise RuntimeError(f"{device}: its memory is that of the host")
        self._copies = copies
        self._device = device
        self._leaving = Leaving(copies, 1)
        self._coming: list[Tensor] = []
        self._came: torch.cuda.Event | None = None

    def leave(
        self, both: KeyValue | None, states: Mapping[Name, States]
    ) -> tuple[KeyValue | None, dict[Name, States]]:
        """What will be a layer's part on the host: K,V [1, kv heads, tokens, width], which may be overwritten from now
        on, and states."""
        self._leaving.begin()
        rows = [self._to_host(each[0].transpose(0, 1)) for each in both or ()]
        moved = {name: tuple(changed_state(each, self._to_host) for each in own) for name, own in states.items()}
        return (rows[0], rows[1]) if rows else None, moved

    def fetch(
        self, both: KeyValue | None, runs: Sequence[tuple[int, int]], states: Sequence[States]
    ) -> tuple[KeyValue | None, list[States]]:
        """What will be some runs of a layer's tokens on the device, and states; it is not there before `arrive`."""
        moved = [tuple(changed_state(each, self._to_device) for each in own) for own in states]
        if both is None:
            return None, moved
        found = []
        for rows in both:
            tokens = sum(end - start for start, end in runs)
            target = torch.empty((tokens, *rows.shape[1:]), dtype=rows.dtype, device=self._device)
            at = 0
            for start, end in runs:
                self._came = self._copies.start(target[at : at + end - start], rows[start:end])
                at += end - start
            self._coming.append(target)
            found.append(target.transpose(0, 1)[None])
        return (found[0], found[1]), moved

    def arrive(self) -> None:
        """What the device is given from now on comes after all copies, and may use their memory again."""
        self._leaving.clear()
        if self._came is not None:
            self._copies.wait(self._came)
        self._coming.clear()
        self._came = None

    def _to_host(self, tensor: Tensor) -> Tensor:
        source = tensor.clone(memory_format=torch.contiguous_format)
        target = self._copies.host_memory(tuple(source.shape), source.dtype)
        self._leaving.start(target, source)
        return target

    def _to_device(self, tensor: Tensor) -> Tensor:
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._came = self._copies.start(target, tensor)
        self._coming.append(target)
        return target


# Tokens `start:end` of a buffer, and the number of tokens before the first on its path.
Run = tuple[int, int, int]
# A part of what reads see: a node of the pack by its number, or one that it holds by -1 less its number.
Part = int

NEARLY_ALL = 0.9  # where more than this share of a pack's tokens is wanted, the rest is not worth a copy


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer's part of some rows: K,V [1, kv heads, tokens, width] each, None where it does not attend; and for each
    row the states of its recurrent modules behind the row's prompt."""

    keys_values: KeyValue | None
    states: list[States]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What is kept of the prompts of some rows, one for each wanted read, in the order in which they were asked for.

    `paths` are the runs of the layers' buffers that a row sees, root first. A row's prompt has `lengths` tokens; the
    last one stands at the position of that number in `positions`.
    """

    paths: list[list[Run]]
    lengths: list[int]
    positions: list[int]
    layers: list[KeptLayer]


@dataclass(frozen=True, slots=True)
class _TakenLayer:
    """A layer as it was walked: its K,V of `tokens` tokens, where each part begins among them, and the states behind
    the ends of reads. In host memory, K,V are [tokens, kv heads, width] each."""

    keys_values: KeyValue | None
    tokens: int
    places: dict[Part, int]
    states: dict[int, States]


class KeptPack:
    """What the layers of a walk leave of `pack`.

    With `on_host` what a CUDA device computes is kept in host memory. Nothing is let go of before it was copied, so a
    pack that is given up is to be released.
    """

    def __init__(self, pack: Pack, *, on_host: bool = False) -> None:
        self._pack = pack
        self._tree = Tree(pack)
        self._on_host = on_host
        self._host: HostLayers | None = None
        self._layers: list[_TakenLayer] = []

    def take(self, index: int, state: WalkState, attention: ForestAttention) -> None:
        """Take over layer `index`, which all chunks have passed. The attention has room for the next one."""
        held = {-1 - number: start for number, start in enumerate(self._tree.held_starts)}
        own = {node: state.tree.held + at for node, at in zip(state.nodes, state.tree.offsets, strict=False)}
        states: dict[int, States] = {}
        if not isinstance(state.recurrence, OwnCacheLayer) and state.recurrence:
            states = {state.nodes[node]: state.recurrence.end_of(node) for node, _ in state.pack.reads}
        both: KeyValue | None = None
        if self._on_host:
            self._host = self._host or HostLayers(state.hidden.device)
            both, states = self._host.leave(attention.keys_values if attention.attended else None, states)
        elif attention.attended:
            both = attention.take_keys_values()
        self._layers.append(_TakenLayer(both, state.tree.held + len(state.tokens), held | own, states))

    def end_of(self, read: int) -> int:
        """The node that a read ends. In the order of these numbers, reads that share most stand side by side."""
        return self._pack.reads[read][0]

    def parts_of(self, read: int) -> dict[Part, int]:
        """The parts of what a read sees, with their tokens."""
        return {part: self._length(part) for part in self._parts(self.end_of(read))}

    @property
    def tokens_here(self) -> int:
        """Tokens whose K,V are on the device; none of them where they are on the host."""
        return 0 if self._on_host else max((layer.tokens for layer in self._layers), default=0)

    @torch.inference_mode()
    def drop_others(self, reads: Sequence[int]) -> None:
        """Let go of what is not on the paths of these reads, one layer after the other.

        On the host all stays until it is released: its memory was set aside for all of the pack.
        """
        if not reads:
            self.release()
        if self._on_host:
            return
        wanted = self._layout(reads)
        tokens = sum(self._length(part) for part in wanted)
        ends = {self.end_of(read) for read in reads}
        for number, layer in enumerate(self._layers):
            if tokens > NEARLY_ALL * layer.tokens:
                continue
            states = {end: own for end, own in layer.states.items() if end in ends}
            self._layers[number] = replace(layer, keys_values=None, tokens=tokens, places=wanted, states=states)
            both = list(layer.keys_values or ())
            runs = self._runs(layer, wanted)
            del layer
            picked = [_picked(both.pop(0), runs) for _ in range(len(both))]
            if picked:
                self._layers[number] = replace(self._layers[number], keys_values=(picked[0], picked[1]))

    @torch.inference_mode()
    def select(self, reads: Sequence[int]) -> KeptRows:
        """What lies on the paths of these reads: numbers in `pack.reads`, some may come twice."""
        ends = [self.end_of(read) for read in reads]
        # Where parts begin, if that is the same in all layers: it is not where reads have left.
        first = self._layers[0].places
        in_place = not self._on_host and all(layer.places == first for layer in self._layers)
        layout = first if in_place else self._layout(reads)
        layers = []
        for layer in self._layers:
            states = [layer.states[end] for end in ends] if layer.states else [() for _ in ends]
            both = layer.keys_values
            if self._host is not None:
                both, states = self._host.fetch(both, self._runs(layer, layout), states)
            elif both is not None and not in_place:
                runs = self._runs(layer, layout)
                both = _picked(both[0], runs), _picked(both[1], runs)
            layers.append(KeptLayer(both, states))
        if self._host is not None:
            self._host.arrive()
        paths = [self._path_in(layout, end) for end in ends]
        tokens = [self._pack.offsets[end + 1] - 1 for end in ends]
        depths, positions = self._tree.depths[tokens], self._tree.positions[tokens]
        return KeptRows(paths, (depths + 1).tolist(), positions.tolist(), layers)

    @torch.inference_mode()
    def release(self) -> None:
        if self._host is not None:
            self._host.arrive()
        self._layers.clear()

    def _parts(self, node: int) -> list[Part]:
        # What the end of a node sees, root first.
        path = [node]
        while (parent := self._pack.parents[path[-1]]) >= 0:
            path.append(parent)
        return [*(-1 - number for number in self._pack.attach[path[-1]]), *reversed(path)]

    def _length(self, part: Part) -> int:
        if part < 0:
            return self._pack.held[-1 - part].length
        return self._pack.offsets[part + 1] - self._pack.offsets[part]

    def _layout(self, reads: Sequence[int]) -> dict[Part, int]:
        # Where the parts of these reads begin, if they alone stand one behind the other.
        parts = {part for read in reads for part in self._parts(self.end_of(read))}
        held, own = sorted((part for part in parts if part < 0), reverse=True), sorted(p for p in parts if p >= 0)
        places, at = {}, 0
        for part in [*held, *own]:
            places[part] = at
            at += self._length(part)
        return places

    def _runs(self, layer: _TakenLayer, wanted: dict[Part, int]) -> list[tuple[int, int]]:
        # The tokens `start:end` of a layer that these parts are, in the order of their new places.
        joined: list[tuple[int, int]] = []
        for part in wanted:
            start = layer.places[part]
            end = start + self._length(part)
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        return joined

    def _path_in(self, places: dict[Part, int], end: int) -> list[Run]:
        runs: list[Run] = []
        for part in self._parts(end):
            start, depth = places[part], self._pack.held[-1 - part].start if part < 0 else self._pack.starts[part]
            if runs and runs[-1][1] == start and runs[-1][2] + start - runs[-1][0] == depth:
                runs[-1] = (runs[-1][0], start + self._length(part), runs[-1][2])
            elif self._length(part):
                runs.append((start, start + self._length(part), depth))
        return runs


def _picked(whole: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
    if list(runs) == [(0, whole.shape[2])]:
        return whole
    return torch.cat([whole[:, :, start:end] for start, end in runs], dim=2)

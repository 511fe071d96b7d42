"""Texts after the reads of a pack whose K,V are kept: attention and forward of new tokens, rows that fit together."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.errors import out_of_memory
from prefillcli.plan.pack import Pack
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import attend, merge_into
from prefillcli.walk.continuations import Beginning, Continuation, DecodingReport, Writing, whole_steps
from prefillcli.walk.forest import ForestAttention, Scoring, WatchedLayer
from prefillcli.walk.layout import KeyWindow, Span, SpanSet, Tree, on_device
from prefillcli.walk.lockstep import Drafter, NewTokens, write_texts
from prefillcli.walk.own_cache import OwnCacheLayer
from prefillcli.walk.recurrent import BranchRecurrence, changed_state
from prefillcli.walk.walk import KeyValue, LayerWalk, Leaving, Tick, WalkState, copies_for

# K,V of all layers, and the states after the reads, of a pack that is written on after it was scored.
#
# While a pack is walked, each layer hands over its K,V and states: its own buffer, so that the next layer gets new
# room, or a copy in host memory, which leaves a CUDA device while the next layer is computed. Once the scores show the
# wanted reads, K,V that only the others see are released, and `select` gives those on the paths of the reads that are
# written on together.


# Layers of a CUDA device that are kept in host memory: they leave while the next layer is computed, and come back
# for the rows that are written on.


States = tuple[LinearAttentionLayer, ...]  # the states of a layer's recurrent modules at a place
Name = TypeVar("Name")


class HostLayers:
    """Copies of layers between `device` and pinned host memory. Raises RuntimeError for a device without it.

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
        """Start to copy a layer's part to the host: K,V [1, kv heads, tokens, width], which may be overwritten from
        now on, and states."""
        self._leaving.begin()
        rows = [self._to_host(each[0].transpose(0, 1)) for each in both or ()]
        moved = {name: tuple(changed_state(each, self._to_host) for each in own) for name, own in states.items()}
        return (rows[0], rows[1]) if rows else None, moved

    def fetch(
        self, both: KeyValue | None, runs: Sequence[tuple[int, int]], states: Sequence[States]
    ) -> tuple[KeyValue | None, list[States]]:
        """Start to copy some runs of a layer's tokens, and states, to the device; the copies are complete after
        `arrive`."""
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
        """Work queued on the device from now on comes after all copies, and may use their memory again."""
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
# A part of the tokens that reads see: a node of the pack by its number, or a held node by -1 less its number.
Part = int

NEARLY_ALL = 0.9  # where more than this share of a pack's tokens is wanted, the rest is not worth a copy


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """A layer's part of some rows: K,V [1, kv heads, tokens, width] each, None where it does not attend; and for each
    row the states of its recurrent modules after the row's prompt."""

    keys_values: KeyValue | None
    states: list[States]


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The kept K,V and states of the prompts of some rows, one row for each wanted read, in the order of the request.

    `paths` are the runs of the layers' buffers that a row sees, root first. A row's prompt has `lengths` tokens; the
    last one stands at the row's position in `positions`.
    """

    paths: list[list[Run]]
    lengths: list[int]
    positions: list[int]
    layers: list[KeptLayer]


@dataclass(frozen=True, slots=True)
class _TakenLayer:
    """A layer as it was walked: its K,V of `tokens` tokens, where each part begins among them, and the states after
    the ends of reads. In host memory, K,V are [tokens, kv heads, width] each."""

    keys_values: KeyValue | None
    tokens: int
    places: dict[Part, int]
    states: dict[int, States]


class KeptPack:
    """The K,V and states that the layers of a walk leave of `pack`.

    With `on_host` the results of a CUDA device are kept in host memory. Nothing is released before it was copied, so
    whoever gives up a pack must release it.
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
        """The node that a read ends. In the order of these numbers, reads that share most are neighbours."""
        return self._pack.reads[read][0]

    def parts_of(self, read: int) -> dict[Part, int]:
        """The parts that a read sees, with their tokens."""
        return {part: self._length(part) for part in self._parts(self.end_of(read))}

    @property
    def tokens_here(self) -> int:
        """Tokens whose K,V are on the device; none of them where they are on the host."""
        return 0 if self._on_host else max((layer.tokens for layer in self._layers), default=0)

    @torch.inference_mode()
    def drop_others(self, reads: Sequence[int]) -> None:
        """Release all parts that are not on the paths of these reads, one layer after the other.

        On the host all parts stay until `release`: their memory was set aside for the whole pack.
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
        """The K,V and states on the paths of these reads: numbers in `pack.reads`, some may come twice."""
        ends = [self.end_of(read) for read in reads]
        # Where parts begin, if that is the same in all layers. It is not the same where reads have left.
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
        # The parts that the end of a node sees, root first.
        path = [node]
        while (parent := self._pack.parents[path[-1]]) >= 0:
            path.append(parent)
        return [*(-1 - number for number in self._pack.attach[path[-1]]), *reversed(path)]

    def _length(self, part: Part) -> int:
        if part < 0:
            return self._pack.held[-1 - part].length
        return self._pack.offsets[part + 1] - self._pack.offsets[part]

    def _layout(self, reads: Sequence[int]) -> dict[Part, int]:
        # Where the parts of these reads begin, if they alone stand one after the other.
        parts = {part for read in reads for part in self._parts(self.end_of(read))}
        held, own = sorted((part for part in parts if part < 0), reverse=True), sorted(p for p in parts if p >= 0)
        places, at = {}, 0
        for part in [*held, *own]:
            places[part] = at
            at += self._length(part)
        return places

    def _runs(self, layer: _TakenLayer, wanted: dict[Part, int]) -> list[tuple[int, int]]:
        # The tokens `start:end` of a layer that make up these parts, in the order of their new places.
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


# Attention of new tokens over the kept K,V of their prompts and over the tokens read after these.


# New tokens after several rows: which keys each of them sees.


MOST_END = 256  # tokens of a prompt's end that are copied
MOST_PADDED = 2  # times the copied tokens, if all rows are padded to the longest end


def private_ends(paths: Sequence[Sequence[Run]]) -> Int64Array:
    """The number of tokens at the end of each row's prompt whose K,V are copied to stand with the tokens after it:
    short ends that no other row sees. Attention over all of these is then one call."""
    seen = Counter(run for path in paths for run in path)
    ends = np.asarray([path[-1][1] - path[-1][0] if path and seen[path[-1]] == 1 else 0 for path in paths])
    ends[ends > MOST_END] = 0
    fits = [most for most in set(ends.tolist()) if most * len(ends) <= MOST_PADDED * ends[ends <= most].sum()]
    ends[ends > max(fits, default=0)] = 0
    return ends


def room_of_end(tokens: int) -> int:
    """The most room that the copy of a prompt's end of this many tokens takes, with the padding that pays."""
    return MOST_PADDED * tokens if tokens <= MOST_END else 0


class RowTokens:
    """Some new tokens of each of some rows, one row after the other.

    `slots` are the rows' numbers, `counts` how many new tokens each has. A row sees the runs `paths[slot]` of the kept
    K,V, `lengths[slot]` tokens. After them it already has `read[slot]` tokens by itself.
    """

    def __init__(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        *,
        paths: Sequence[Sequence[Run]],
        lengths: Int64Array,
        read: Int64Array,
        device: torch.device,
    ) -> None:
        self.slots = np.asarray(slots, dtype=np.int64)
        self.counts = np.asarray(counts, dtype=np.int64)
        self._paths, self._device = paths, device
        self._ends = np.cumsum(self.counts)
        self.tokens = int(self._ends[-1])
        self.most = int(self.counts.max())
        self._row = np.repeat(np.arange(len(slots)), self.counts)  # of each token
        steps = np.arange(self.tokens) - np.repeat(self._ends - self.counts, self.counts)
        self._lengths = lengths[self.slots]
        self._places: Int64Array = read[self.slots][self._row] + steps  # among the tokens that the row has by itself
        self.own = int(self._places.max()) + 1
        self.depths: Int64Array = self._lengths[self._row] + self._places
        self.slot_index = on_device(self.slots[self._row], device)
        self.place_index = on_device(self._places, device)
        self._steps = steps
        self._batch: tuple[Tensor, Tensor] | None = None
        self._spans: dict[KeyWindow | None, list[tuple[Span, Tensor | None]]] = {}
        self._visible: dict[tuple[KeyWindow | None, int], Tensor | None] = {}

    @property
    def batch(self) -> tuple[Tensor, Tensor] | None:
        """The tokens as a padded batch [rows, longest]: the index of each (padded with a row's first), and the places
        of all tokens in the flattened batch. None where each row has the same number of them."""
        if self._batch is None and self.most * len(self.slots) > self.tokens:
            index = np.repeat((self._ends - self.counts)[:, None], self.most, axis=1)
            index[self._row, self._steps] = np.arange(self.tokens)
            places = self._row * self.most + self._steps
            self._batch = on_device(index, self._device), on_device(places, self._device)
        return self._batch

    def spans(self, window: KeyWindow | None) -> list[tuple[Span, Tensor | None]]:
        """The keys of the prompts that the tokens see; where a window hides some, with a mask, bool [1, 1, queries,
        keys]."""
        if window not in self._spans:
            found = SpanSet(self.depths, window)
            starts = (self._ends - self.counts).tolist()
            for slot, first, last in zip(self.slots.tolist(), starts, self._ends.tolist(), strict=True):
                for start, end, depth in self._paths[slot]:
                    found.add(first, last, start, end, depth)
            self._spans[window] = [(span, self._seen(span, window)) for span in found.merged()]
        return self._spans[window]

    def _seen(self, span: Span, window: KeyWindow | None) -> Tensor | None:
        if window is None or not span.masked:
            return None
        oldest = window.oldest(self.depths[span.q0 : span.q1])
        keys = np.arange(span.k0, span.k1) - span.k0 + span.k_depth
        return on_device(keys[None, :] >= oldest[:, None], self._device)[None, None]

    def visible(self, window: KeyWindow | None, groups: int) -> Tensor | None:
        """The mask of the padded batch over the first `own` tokens that rows have by themselves; None: all are
        visible.

        Bool [rows, 1, groups * longest, own]: `groups` heads of the queries, one after the other, see the same.
        """
        if (window, groups) not in self._visible:
            last = np.full((len(self.slots), self.most), self.own - 1)
            last[self._row, self._steps] = self._places
            keys = np.arange(self.own)
            seen = keys <= last[:, :, None]
            if window is not None:
                oldest = window.oldest(self._lengths[:, None] + last) - self._lengths[:, None]
                seen &= keys >= oldest[:, :, None]
            repeated = np.tile(seen, (1, groups, 1))[:, None]
            self._visible[window, groups] = None if seen.all() else on_device(repeated, self._device)
        return self._visible[window, groups]


def with_room(whole: Tensor | None, like: Tensor, rows: int, tokens: int, room: int) -> Tensor:
    """K or V with room for this many tokens of each row: `whole` [rows, kv heads, room, width] where it suffices, else
    a copy with `room` for more. An empty one takes its heads, width and dtype from `like`."""
    if whole is not None and whole.shape[2] >= tokens:
        return whole
    grown = like.new_zeros(rows, like.shape[1], room, like.shape[3])
    if whole is not None:
        grown[:, :, : whole.shape[2]] = whole
    return grown


class OwnTokens:
    """One layer's K,V of the tokens that each row has by itself: [rows, kv heads, room, width] each.

    These are the copied end of its prompt, of `ends[row]` tokens, and the tokens read after it. `kept` are the
    layer's K,V of the prompts, on the runs `paths`.
    """

    def __init__(self, kept: KeyValue | None, paths: Sequence[Sequence[Run]], ends: Int64Array) -> None:
        self._rows = len(paths)
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        if kept is not None and ends.any():
            last = np.asarray([path[-1][1] - 1 if path else 0 for path in paths])
            first = np.where(ends > 0, last + 1 - ends, last)
            index = np.minimum(first[:, None] + np.arange(ends.max())[None, :], last[:, None])
            at = on_device(index, kept[0].device).flatten()
            copies = (each[0][:, at].view(each.shape[1], *index.shape, -1).transpose(0, 1) for each in kept)
            tokens = int(ends.max()) + 1
            self.keys, self.values = (
                with_room(each, each, self._rows, tokens, whole_steps(tokens)) for each in copies
            )

    def append(self, tokens: RowTokens, key: Tensor, value: Tensor) -> None:
        """Put K,V [1, kv heads, tokens, width] of new tokens where they belong."""
        self.keys, self.values = (
            with_room(whole, new, self._rows, tokens.own, whole_steps(tokens.own))
            for whole, new in ((self.keys, key), (self.values, value))
        )
        for whole, new in ((self.keys, key), (self.values, value)):
            whole.transpose(1, 2)[tokens.slot_index, tokens.place_index] = new[0].transpose(0, 1)

    def keep(self, slots: Int64Array) -> None:
        self._rows = len(slots)
        if self.keys is not None and self.values is not None:
            at = on_device(slots, self.keys.device)
            self.keys, self.values = self.keys[at], self.values[at]

    def of(self, tokens: RowTokens) -> KeyValue:
        """The K,V of the rows that have new tokens, up to the last of these, [rows, kv heads, tokens, width] each."""
        if self.keys is None or self.values is None:
            raise RuntimeError("nothing was read after the prompts")
        if len(tokens.slots) == self._rows and (tokens.slots[1:] > tokens.slots[:-1]).all():
            return self.keys[:, :, : tokens.own], self.values[:, :, : tokens.own]
        at = on_device(tokens.slots, self.keys.device)
        return self.keys[at, :, : tokens.own], self.values[at, :, : tokens.own]


class RowAttention(ForestAttention):
    """Attention of these new tokens of several rows. The queries of the layer are in `queries`."""

    def __init__(self, tokens: RowTokens) -> None:
        super().__init__(0)
        self._new = tokens
        self._own: OwnTokens  # of the layer that is called

    @property
    def depths(self) -> Int64Array:
        return self._new.depths

    @property
    def window(self) -> KeyWindow | None:
        """The window of the layer that was called last, if it has one."""
        return self._scoring.window

    def begin_layer(self, kept: KeyValue | None, own: OwnTokens) -> None:
        """The next call is of the layer with these K,V of the prompts, and of the tokens after them."""
        self.start_layer(())
        self._own, self.calls = own, 0
        self.keys, self.values = (None, None) if kept is None else kept

    def receive(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> None:
        self._own.append(self._new, key, value)
        self.queries.append(query[0])

    def compute(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
        out, lse = _attend_own(self._new, query, self._own.of(self._new), scoring)
        keys, values = self.keys_values
        for span, visible in self._new.spans(scoring.window):
            at, run = slice(span.q0, span.q1), slice(span.k0, span.k1)
            q, k, v = query[:, :, at], keys[:, :, run], values[:, :, run]
            if visible is None:
                part = _attend_together(q, k, v, scoring)
            else:
                part = attend(q, k, v, visible=visible, **scoring.how)
            merge_into(out[:, :, at], lse[:, :, at], *part)
        return out, lse


def _attend_own(tokens: RowTokens, query: Tensor, own: KeyValue, scoring: Scoring) -> tuple[Tensor, Tensor]:
    # Attention over the tokens that rows have by themselves: output [1, heads, tokens, width] and its log-sum-exp.
    heads, width = query.shape[1], query.shape[3]
    batch = tokens.batch
    rows = len(tokens.slots)
    if batch is None:
        padded = query.reshape(heads, rows, tokens.most, width)
    else:
        padded = query[0][:, batch[0].flatten()].view(heads, rows, tokens.most, width)
    kv_heads = own[0].shape[1]
    groups = heads // kv_heads
    together = padded.transpose(0, 1).reshape(rows, kv_heads, groups * tokens.most, width)
    out, lse = attend(together, *own, visible=tokens.visible(scoring.window, groups), **scoring.how)
    out, lse = out.reshape(rows, heads, tokens.most, -1), lse.reshape(rows, heads, tokens.most)
    by_token, lse = out.transpose(1, 2).reshape(-1, heads, out.shape[3]), lse.transpose(0, 1).reshape(heads, -1)
    if batch is not None:
        by_token, lse = by_token[batch[1]], lse[:, batch[1]]
    return by_token.contiguous()[None].transpose(1, 2), lse[None]  # some layers only view the tokens' outputs


def _attend_together(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    # `attend` where every query sees every key: the heads of a K,V head are queries of one head, so that K,V are read
    # once for all of them.
    heads, tokens, width = query.shape[1:]
    kv_heads = key.shape[1]
    out, lse = attend(query.reshape(1, kv_heads, heads // kv_heads * tokens, width), key, value, **scoring.how)
    return out.reshape(1, heads, tokens, -1), lse.reshape(1, heads, tokens)


# The model's forward over new tokens after kept prompts: several of each of some rows in one pass.


# Queries of the newest tokens of rows, by layer. A retrieval cache is chosen by them.


@dataclass(slots=True)
class NewestQueries:
    """The queries of a model's last pass over its rows: `queries` [heads, tokens, width] of each layer, None for one
    without attention, and the place of each row's newest token among them. `windows` are the layers', as far as they
    attend."""

    windows: list[KeyWindow | None]
    queries: list[Tensor | None]
    places: dict[int, int] = field(default_factory=dict)

    def of(self, layer: int, row: int) -> Tensor | None:
        """The query [heads, width] of a row's newest token, after position encoding."""
        queries = self.queries[layer]
        return None if queries is None else queries[:, self.places[row]]


class KeptForward:
    """A walked model over new tokens of rows whose prompts are kept (`prefillcli.walk.lockstep.Forward`).

    Row number i is after the prompt number i of `rows`. `tick` is called after each layer and may raise to stop.
    A model with recurrent layers cannot forget what it has read. With `watches_queries`, `queries` are those of each
    layer, [heads, tokens, width] for each pass.
    """

    def __init__(
        self, walk: LayerWalk, rows: KeptRows, tick: Tick = lambda tokens: None, *, watches_queries: bool = False
    ) -> None:
        self.walk, self._rows, self._tick = walk, rows, tick
        self._slots = {number: number for number in range(len(rows.paths))}
        self._ends = private_ends(rows.paths)
        self._paths = [path[:-1] if end else path for path, end in zip(rows.paths, self._ends, strict=True)]
        self._lengths = np.asarray(rows.lengths, dtype=np.int64) - self._ends
        self._positions = np.asarray(rows.positions, dtype=np.int64)
        self._read = self._ends.copy()
        self._own = [OwnTokens(layer.keys_values, rows.paths, self._ends) for layer in rows.layers]
        self._recurrences = [BranchRecurrence(layer.states) for layer in rows.layers]
        self.queries: list[list[Tensor]] = [[] for _ in rows.layers]
        self._watches_queries = watches_queries
        self._newest: NewestQueries | None = None
        self.can_forget = not any(self._recurrences)

    def __call__(self, new: NewTokens) -> Iterator[Tensor]:
        return self._logits(self._hidden(new))

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        yield from self.walk.logits(hidden)

    @torch.inference_mode()
    def _hidden(self, new: NewTokens) -> Tensor:
        # The residual stream after the last layer, [1, tokens, hidden].
        slots, counts = [self._slots[row] for row, _ in new], [len(own) for _, own in new]
        tokens = RowTokens(
            slots,
            counts,
            paths=self._paths,
            lengths=self._lengths,
            read=self._read,
            device=self.walk.device,
        )
        ids = torch.as_tensor([token for _, own in new for token in own])
        behind = np.repeat((self._positions - self._lengths - self._ends + 1)[tokens.slots], tokens.counts)
        if self._newest is not None:
            ends = (np.cumsum(counts) - 1).tolist()
            self._newest.places = {row: end for (row, _), end in zip(new, ends, strict=True)}
        recording = self.walk.record(ids, tokens.depths + behind)
        hidden = recording.hidden
        with RowAttention(tokens) as attention:
            for index, (kept, own) in enumerate(zip(self._rows.layers, self._own, strict=True)):
                attention.begin_layer(kept.keys_values, own)
                with self.walk.layers.use(index) as layer, self._recurrences[index].calls(layer, slots, counts):
                    hidden = self.walk.call(layer, hidden, recording.calls[index], attention)
                if self._watches_queries:
                    self.queries[index] += attention.queries
                if self._newest is not None and attention.queries:
                    self._newest.queries[index] = attention.queries[0]
                    self._newest.windows[index] = attention.window
                self._tick(0.0)
        self._read[tokens.slots] += tokens.counts
        return hidden

    def forget(self, row: int, tokens: int) -> None:
        """As in `Forward`. Raises RuntimeError where `can_forget` is False."""
        if tokens and not self.can_forget:
            raise RuntimeError("the states of recurrent layers cannot be taken back")
        self._read[self._slots[row]] -= tokens
        if self._newest is not None and row in self._newest.places:
            self._newest.places[row] -= tokens

    def drop(self, rows: Collection[int]) -> None:
        stay = [(row, slot) for row, slot in self._slots.items() if row not in rows]
        slots = np.asarray([slot for _, slot in stay], dtype=np.int64)
        self._slots = {row: slot for slot, (row, _) in enumerate(stay)}
        self._paths = [self._paths[slot] for slot in slots]
        self._lengths, self._positions = self._lengths[slots], self._positions[slots]
        self._ends, self._read = self._ends[slots], self._read[slots]
        for own, recurrence in zip(self._own, self._recurrences, strict=True):
            own.keep(slots)
            recurrence.keep(slots.tolist())

    def watch_newest(self) -> NewestQueries:
        """The newest tokens' queries, from the next pass on."""
        layers = len(self._rows.layers)
        self._newest = NewestQueries([None] * layers, [None] * layers)
        return self._newest

    def prompt_keys_values(self, layer: int, row: int) -> KeyValue | None:
        """A layer's K,V [kv heads, tokens, width] of a row's prompt; None where it does not attend."""
        both, path = self._rows.layers[layer].keys_values, self._rows.paths[row]
        if both is None:
            return None
        keys, values = (torch.cat([each[0, :, start:end] for start, end, _ in path], dim=1) for each in both)
        return keys, values

    def text_keys_values(self, layer: int, rows: Int64Array, places: Int64Array) -> KeyValue | None:
        """A layer's K,V [tokens, kv heads, width] of some tokens after prompts: of each its row, and its place after
        the row's prompt. None where the layer does not attend."""
        keys, values = self._own[layer].keys, self._own[layer].values
        if keys is None or values is None:
            return None
        numbers = np.asarray([self._slots[row] for row in rows.tolist()], dtype=np.int64)
        slots, at = on_device(numbers, keys.device), on_device(places + self._ends[numbers], keys.device)
        return keys[slots, :, at], values[slots, :, at]

    def text_read(self, row: int) -> int:
        """Return how many tokens after a row's prompt were read."""
        slot = self._slots[row]
        return int(self._read[slot] - self._ends[slot])

    def text_position(self, row: int) -> int:
        """The position of the first token after a row's prompt."""
        return int(self._positions[self._slots[row]]) + 1


# The rows of a kept pack that are written on together: as many as memory allows.


Row = tuple[int, Beginning]  # A read of a pack by its number, and the tokens that its text begins after


@dataclass(slots=True)
class RowRoom:
    """The number of rows that fit. The device shows how many do not: `most_rows` is None until memory runs out.

    While texts are written, the K,V of `most_tokens` tokens may be on the device, those of prompts included; None: of
    any number. A row counts `row_tokens` beside its tokens. `longest` and `switch` as in `Beginning.room`.
    """

    most_tokens: int | None = None
    row_tokens: float = 0.0
    most_rows: int | None = None
    longest: int | None = None
    switch: int = 0

    def of_text(self, beginning: Beginning, writing: Writing) -> float:
        """The tokens that a row counts beside its prompt."""
        return whole_steps(len(beginning.tokens) + writing.tokens + writing.speculation.tokens) + self.row_tokens

    def groups(
        self, kept: KeptPack, rows: Sequence[tuple[int, Row]], writing: Writing, pass_tokens: int
    ) -> Iterator[list[int]]:
        """The numbers of the rows that are written together, those that share a prefix side by side.

        `rows` are numbered reads and beginnings. One pass over several rows reads at most `pass_tokens` tokens. A row
        that does not fit alone is left out, unless its prompt is on the device already: then it is a group by itself.
        """
        group: list[int] = []
        parts: dict[Part, int] = {}
        own, longest = 0.0, 0
        for number, (read, beginning) in sorted(rows, key=lambda each: kept.end_of(each[1][0])):
            prompt = {} if kept.tokens_here else kept.parts_of(read)
            text = self.of_text(beginning, writing)
            first = max(len(beginning.tokens), writing.speculation.tokens + 1)
            if not kept.tokens_here and self._too_many(sum(prompt.values()) + text):
                continue
            together = parts | prompt
            text += writing.speculation.kept_twice(len(beginning.prompt))
            text += room_of_end(kept.parts_of(read)[kept.end_of(read)])
            tokens = kept.tokens_here + sum(together.values()) + own + text
            size = len(group) + 1
            if group and (
                self._too_many(tokens)
                or size * max(longest, first) > pass_tokens
                or (self.most_rows is not None and size > self.most_rows)
            ):
                yield group
                group, together, own, longest = [], prompt, 0.0, 0
            group.append(number)
            parts, own, longest = together, own + text, max(longest, first)
        if group:
            yield group

    def _too_many(self, tokens: float) -> bool:
        return self.most_tokens is not None and tokens > self.most_tokens


# The drafter that guesses tokens for the rows of a forward, if there is one.
MakeDrafter = Callable[[KeptForward], Drafter | None]


def write_behind(
    walk: LayerWalk,
    kept: KeptPack,
    rows: Sequence[Row],
    writing: Writing,
    *,
    room: RowRoom | None = None,
    make_drafter: MakeDrafter = lambda forward: None,
    tick: Tick = lambda tokens: None,
    report: DecodingReport | None = None,
) -> list[Continuation | None]:
    """Write after reads of the pack that `kept` has walked: one text for each of the rows, which are given as (number
    of the read, beginning).

    Rows that do not fit in the `room` together are written one group after the other. When memory runs out, the room
    is smaller from then on. A row that does not fit alone has None. `tick` is called after each layer of a pass and
    may raise to stop. The cost of writing is added to the `report`. The pack is released.
    """
    report, room = report or DecodingReport(), room or RowRoom()
    begun = time.monotonic()
    kept.drop_others([read for read, _ in rows])
    found: dict[int, Continuation] = {}
    waiting = dict(enumerate(rows))
    while waiting:
        group = next(room.groups(kept, list(waiting.items()), writing, walk.chunk_tokens), [])
        if not group:
            break
        together = [rows[number] for number in group]
        texts = _written_together(walk, kept, together, writing, room, make_drafter, tick, report)
        if texts is None:
            _let_go(walk.device)
            room.most_rows = max(len(group) // 2, 1)
            if len(group) > 1:
                continue
        for number, text in zip(group, texts or [], strict=False):
            found[number] = text
        for number in group:
            del waiting[number]
    kept.release()
    report.seconds += time.monotonic() - begun
    return [found.get(number) for number in range(len(rows))]


def _written_together(
    walk: LayerWalk,
    kept: KeptPack,
    rows: Sequence[Row],
    writing: Writing,
    room: RowRoom,
    make_drafter: MakeDrafter,
    tick: Tick,
    report: DecodingReport,
) -> list[Continuation] | None:
    # The texts of one group; None where memory runs out. Then everything that it made is released with its frame.
    try:
        forward = KeptForward(walk, kept.select([read for read, _ in rows]), tick)
        beginnings, drafter = [beginning for _, beginning in rows], make_drafter(forward)
        return write_texts(
            forward, beginnings, writing, longest=room.longest, switch=room.switch, drafter=drafter, report=report
        )
    except Exception as error:
        if not out_of_memory(error):
            raise
        return None


def _let_go(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Greedy decoding after all reads of a pack in lock step, for the queries of the decoded tokens.
#
# This is SpecPrefill's lookahead: the attention of the decoded tokens is used, the tokens themselves are not. The
# pack's K,V in all layers are kept while it lasts, with those of the decoded tokens.


@dataclass(slots=True)
class Lookahead:
    """Queries of a pack's watched tokens, and of tokens decoded greedily after its reads.

    `counts[i]` tokens were decoded after read i before an end of text. `layers`, one for each of the model's that
    attend, begin with the queries of the watched tokens in their order; those of each read's first decoded token
    follow, then of the second.
    """

    counts: list[int]
    layers: Iterator[WatchedLayer]


@torch.inference_mode()
def look_ahead(
    walk: LayerWalk,
    pack: Pack,
    watched: Sequence[int],
    steps: int,
    stop_tokens: frozenset[int],
    tick: Tick = lambda tokens: None,
) -> Lookahead:
    """`walk.watch`, and decode `steps` tokens after each read, greedily.

    All layers' K,V, and the states of recurrent layers after each read, stay in memory as long as the result.
    Raises UnsupportedModelError for a model that is walked with its own cache.
    """
    walk.check_queries()
    state = walk.begin(pack, keep_ends=True)
    hidden = state.hidden
    kept, layers = KeptPack(pack), []
    with ForestAttention(len(pack.tokens), watched) as attention:
        for index, layer in walk.through_layers(state, attention, tick):
            if attention.attended:
                layers.append(attention.watched_layer(index))
            if index == len(walk.layers) - 1:
                hidden = walk.read_last(state, layer, attention)
            kept.take(index, state, attention)
    reads = range(len(pack.reads))
    forward = KeptForward(walk, kept.select(reads), tick, watches_queries=True)
    logits = walk.logits(hidden)
    counts, going = torch.zeros(len(reads), dtype=torch.long), torch.ones(len(reads), dtype=torch.bool)
    for _ in range(steps):
        tokens = torch.cat([each.argmax(dim=-1) for each in logits]).cpu()
        going &= ~torch.isin(tokens, torch.as_tensor(sorted(stop_tokens), dtype=torch.long))
        if not going.any():
            break
        counts += going
        logits = forward([(read, [token]) for read, token in enumerate(tokens.tolist())])
    decoded = forward.queries
    with_decoded = (
        replace(layer, queries=torch.cat([layer.queries, *decoded[layer.number]], dim=1)) for layer in layers
    )
    return Lookahead(counts.tolist(), with_decoded)

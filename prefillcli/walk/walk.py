"""The layer walk: chunked prefill with its two loops interchanged.

For each layer, for each chunk: the unmodified transformers layer is called on a slice of the residual stream, its
output overwrites the slice, and only this layer's K,V exist. Before the first layer (embedding, position encoding) and
after the last (norm, head), the model's own forward runs, with stand-ins for the layers.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.plan.pack import KEYS_SHARE, Held, Key, LayersDone, Pack
from prefillcli.plan.trie import TrieNode, build_forest, token_order
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import ROW_STEP, longest_batched
from prefillcli.walk.features import PackFeatures, uncut
from prefillcli.walk.forest import Attend, ForestAttention, KeysStored, UnsupportedModelError, WatchedLayer
from prefillcli.walk.fusion import Preparation, fused
from prefillcli.walk.layout import Chunk, KeyWindow, LastTokens, Tree, split_evenly
from prefillcli.walk.model_ends import HEAD_ROWS, CallBuffers, LayerCall, ModelEnds, Recording, lend_shared
from prefillcli.walk.own_cache import (
    NO_DECODING,
    NO_QUERIES,
    LayerPast,
    OwnCache,
    OwnCacheLayer,
    Path,
    has_forest_attention,
    moved,
)
from prefillcli.walk.recurrent import LayerRecurrence, ReadRuns, recurrent_modules

# Where a pack is cut into chunks. One call of a layer computes one chunk.


# Gives (start, end) of each chunk, by the number of a pack's tokens and the most that a chunk may have.
ChunkCutter = Callable[[Tree, int, int], list[tuple[int, int]]]


def cut_anywhere(tree: Tree, tokens: int, most: int, step: int = ROW_STEP) -> list[tuple[int, int]]:
    """A `ChunkCutter`: the fewest chunks of about one length, multiples of `step`."""
    return split_evenly(tokens, most, step) if tokens else []


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of a walk. There may be one that is stricter than the fastest way of each device.

    Kernels for packed weights ignore `mode`, and models that are walked with their own cache ignore `attend` and
    `read`. Where that must not happen, `no_packed_weights` and `no_own_cache` are the messages for the user.
    """

    prepare: Preparation = fused  # the context in which layers are called
    # All of a model's forward but attention is computed in it.
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)
    attend: Attend | None = None
    read: ReadRuns | None = None
    cutter: Callable[[Sequence[nn.Module], torch.device], ChunkCutter] = lambda layers, device: cut_anywhere
    state_step: int = 0  # as in `plan.pack.Limits`
    no_packed_weights: str | None = None
    no_own_cache: str | None = None


FASTEST = Arithmetic()

Tick = Callable[[float], None]


class LayerWalk:
    """A causal language model of transformers, walked layer by layer.

    `model` must be in eval mode and have the forest attention (`prefillcli.walk.forest.ATTENTION`); one that has an
    attention of transformers is walked with its own cache. Its layers stay unchanged; while the walk exists, stand-ins
    take their places. The layers that are called come from `layers`, by default the model's. These may be the lower
    ones alone: then nothing is asked of the head. One call of a layer computes `chunk_tokens`. With `offload_held` the
    K,V that later packs hold are kept in host memory, with `hidden_on_host` the residual stream.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_tokens: int,
        offload_held: bool = False,
        hidden_on_host: bool = False,
        layers: LayerSource | None = None,
        arithmetic: Arithmetic = FASTEST,
    ) -> None:
        self.model, self.chunk_tokens, self.arithmetic = model, chunk_tokens, arithmetic
        self._ends = ModelEnds(model, arithmetic.mode)
        self.layers: LayerSource = layers or LayerSource(self._ends.layers)
        self.device = self._ends.device
        self._cut = arithmetic.cutter(self._ends.layers, self.device)
        self._residual = ResidualRows(self.device, on_host=hidden_on_host)
        self._held = HeldParts(len(self.layers), self.device, offload=offload_held)
        self._own_cache = None if has_forest_attention(model) else OwnCache(model, self._ends)
        self.windows: set[KeyWindow] = set()  # that layers have asked for so far
        self.features: Callable[[Pack], PackFeatures] | None = None  # of images

    @property
    def keeps_ends(self) -> bool:
        """Return whether a node's end is kept, which can be read only after all of its tokens."""
        return self._own_cache is not None or any(map(recurrent_modules, self._ends.layers))

    def close(self) -> None:
        self._ends.close()
        self._held.clear()

    @torch.inference_mode()
    def read_logits(
        self,
        pack: Pack,
        tick: Tick = lambda tokens: None,
        exits: ExitRule | None = None,
        done: LayersDone | None = None,
        thinning: ThinningRule | None = None,
        kept: Keeper | None = None,
    ) -> Iterator[Tensor]:
        """Walk `pack`; yield float32 logits [reads, vocabulary] in pieces, in the order of `pack.reads`: of each the
        last token, and then the tokens after it that are read.

        `tick` is called after each step with the number of tokens it advanced by, so that they add up to the pack's;
        it may raise to stop the walk. K,V that later packs hold are kept for them. Reads that leave early by the rule
        `exits` get no logits. `done` counts the layers that each of the pack's nodes goes through. The rule `thinning`
        leaves tokens behind. `kept` takes the K,V and states of the layers.
        """
        if thinning is not None:
            self.check_queries()
        if kept is not None:
            self.check_decoding()
        self._held.drop_others(pack.keep | {node.key for node in pack.held})  # the nodes that another plan has left
        state, hidden, whole = self.begin(pack, done, keep_ends=kept is not None), None, False
        with ForestAttention(pack.held_tokens + len(pack.tokens), attend=self.arithmetic.attend) as attention:
            for index, layer in self.through_layers(state, attention, tick, exits, thinning):
                self._held.put_nodes(index, state, attention)
                if index == len(self.layers) - 1 and state.reads:
                    whole = state.reads_all
                    if exits is not None and index in exits.layers:
                        self._leave_last(index, state, layer, attention, exits)
                    if state.reads and not whole:
                        hidden = self.read_last(state, layer, attention)
                if kept is not None:
                    kept.take(index, state, attention)
            self.windows |= attention.windows
        if not state.chunks:  # of the layers that were not computed
            self._held.drop_others(pack.keep)
        if state.reads and len(self.layers) < len(self._ends.layers):
            raise ValueError("the model is not read up to its head, which some prompts ask")
        if hidden is not None:
            yield from self.logits(hidden)
        elif whole and state.reads:
            # Many tokens are read: their rows are not all copied at a time.
            at = torch.as_tensor(state.read_tokens)
            for start, end in split_evenly(len(at), HEAD_ROWS):
                yield from self.logits(self._residual.pick(state.hidden, at[start:end]))

    def holds(self, key: Key) -> bool:
        """Return whether all layers' parts of a node are kept under this key."""
        return self._held.holds(key)

    def check_queries(self) -> None:
        """Raises UnsupportedModelError if the walk does not see the queries of the model's layers."""
        if self._own_cache is not None:
            raise UnsupportedModelError(NO_QUERIES)

    def check_decoding(self) -> None:
        """Raises UnsupportedModelError if no text can be written after a pack."""
        if self._own_cache is not None:
            raise UnsupportedModelError(NO_DECODING)

    @torch.inference_mode()
    def watch(
        self, pack: Pack, watched: Sequence[int], tick: Tick = lambda tokens: None
    ) -> Generator[WatchedLayer, None, None]:
        """Walk `pack`, which holds nothing, for the queries of its tokens `watched` (ascending), layer by layer.

        A layer is valid until the next one is taken. Layers without attention are left out.
        """
        self.check_queries()
        with ForestAttention(len(pack.tokens), watched, attend=self.arithmetic.attend) as attention:
            for number, _ in self.through_layers(self.begin(pack), attention, tick):
                if attention.attended:
                    yield attention.watched_layer(number)

    # The parts of a walk, also for the work that follows one.

    def begin(self, pack: Pack, done: LayersDone | None = None, *, keep_ends: bool = False) -> WalkState:
        """The state of `pack` before the first layer. `done` will count its nodes' layers; `keep_ends`: states at
        reads stay."""
        tokens = torch.as_tensor(pack.tokens, dtype=torch.long)
        features = self._features(pack)
        tree = _tree(pack, features, tokens)
        chunks = self._chunks(tree, len(tokens))
        hidden, calls = self._embed(tokens, chunks, features)
        done = done or LayersDone.none(pack)
        done.layers = len(self.layers)
        return WalkState(
            whole=pack,
            pack=pack,
            reads=range(len(pack.reads)),
            nodes=range(len(pack.parents)),
            done=done,
            tree=tree,
            tokens=tokens,
            chunks=chunks,
            calls=calls,
            hidden=hidden,
            features=features,
            keep_ends=keep_ends,
        )

    def through_layers(
        self,
        state: WalkState,
        attention: ForestAttention,
        tick: Tick,
        exits: ExitRule | None = None,
        thinning: ThinningRule | None = None,
    ) -> Iterator[tuple[int, nn.Module]]:
        """Bring all chunks through one layer after the other.

        Yields each layer with its number once its K,V are complete; it is in use until the next is taken. Reads leave
        by the rule `exits`, tokens by `thinning`. Ends early when nothing is left to compute.
        """
        for index in range(len(self.layers)):
            most = max(chunk.end - chunk.start for chunk in state.chunks)
            asked = exits is not None and index < len(self.layers) - 1 and state.reads and index in exits.layers
            rule = exits if asked else None
            with self.layers.use(index) as layer, self.arithmetic.prepare(layer, most):
                before = None if rule is None else self._at_last_tokens(state)
                self.start_layer(state, index, layer, attention)
                if rule is not None and before is not None and rule.peeks(index) and not state.recurrence:
                    self.store_keys(state, index, layer, attention, lambda tokens: tick(0.0))
                    after = self.read_last(state, layer, attention, index)[0]
                    self._let_leave(index, state, attention, tick, rule, before, after, through=index)
                    self.start_layer(state, index, layer, attention)
                    rule = None
                if state.chunks:
                    if thinning is not None:
                        # Layers without attention have no queries: it sees those of the next one that attends.
                        watched = thinning.watched(state.pack, state.tree) if index >= thinning.layer else ()
                        if len(watched) and index == len(self.layers) - 1:
                            raise UnsupportedModelError(
                                "no layer attends between the one that is to choose tokens and the last"
                            )
                        attention.watch(watched)
                    self.through_layer(state, index, layer, attention, tick)
                    if state.features is not None and (added := state.features.added(index, state.tokens)) is not None:
                        self._residual.add(state.hidden, *added)
                    yield index, layer
                    if thinning is not None and attention.watches and attention.attended:
                        self._thin(index, state, attention, thinning, tick)
                        thinning = None
                if rule is not None and before is not None:
                    after = self._at_last_tokens(state)
                    self._let_leave(index, state, attention, tick, rule, before, after, through=index + 1)
                if not state.chunks:
                    self.layers.end_pass()
                    return

    def through_layer(
        self, state: WalkState, index: int, layer: nn.Module, attention: ForestAttention, tick: Tick
    ) -> None:
        """Bring all chunks through one layer; its output overwrites its input.

        The last layer computes only K,V, unless it is recurrent or called with the model's own cache.
        """
        if index == len(self.layers) - 1 and not state.recurrence and not state.reads_all:
            # Nothing reads the last layer's output but the head, which needs the prompts' last tokens alone.
            self.store_keys(state, index, layer, attention, tick)
            return
        with state.recurrence as recurrence:
            for chunk, call, rows in self._each_chunk(state, index):
                attention.chunk(chunk)
                recurrence.chunk(chunk.start, chunk.end)
                if isinstance(recurrence, OwnCacheLayer):
                    rows = recurrence.output(rows, state.tokens)
                else:
                    rows = self.call(layer, rows, call, attention)
                self._residual.write(state.hidden, chunk.start, rows)
                tick((chunk.end - chunk.start) / len(self.layers))
        state.done.full[state.nodes] += 1

    def call(self, layer: nn.Module, rows: Tensor, call: LayerCall, attention: ForestAttention) -> Tensor:
        """A layer's output for some rows of its input, [1, tokens, hidden]. Raises UnsupportedModelError."""
        out = self._ends.call(layer, rows, call, attention.depths)
        if attention.calls > 1 or not isinstance(out, Tensor) or out.shape != rows.shape:
            raise UnsupportedModelError(
                f"a layer of type {type(layer).__name__} attends more than once over its tokens, or gives something "
                "else than a row for each; this architecture cannot be walked layer by layer"
            )
        return out

    def read_last(self, state: WalkState, layer: nn.Module, attention: ForestAttention, index: int = -1) -> Tensor:
        """A layer's output for the prompts' last tokens alone, [1, reads, hidden]; its K,V must be complete.

        `index` is the layer's, by default that of the last one, which also reads the tokens after these. A recurrent
        layer has computed them already.
        """
        if state.recurrence:
            tokens = state.read_tokens if index < 0 else state.last_tokens
            return self._residual.pick(state.hidden, torch.as_tensor(tokens))
        tokens = state.read_tokens if index < 0 else state.last_tokens
        own = index if index >= 0 else len(self.layers) - 1
        in_order = np.argsort(tokens, kind="stable")  # neighbours have one ancestor
        rows = []
        for start, end in split_evenly(len(tokens), self.chunk_tokens):
            last = LastTokens(state.tree, tokens[in_order[start:end]], self.device)
            at = torch.as_tensor(last.tokens)
            recording = self._recorded(state.tokens[at], state.tree.positions[last.tokens], state.features)
            lend_shared(recording.calls, state.calls[0], len(at))
            attention.last_tokens(last)
            rows.append(self.call(layer, self._residual.pick(state.hidden, at), recording.calls[own], attention))
        return torch.cat(rows, dim=1)[:, torch.as_tensor(np.argsort(in_order), device=self.device)]

    def record(self, tokens: Tensor, positions: Int64Array) -> Recording:
        """The arguments that the model's own forward over `tokens` int64 [tokens] passes to its layers."""
        return self._ends.record(tokens, positions)

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The model's norm and head over `hidden` [1, tokens, hidden]: float32 [tokens, vocabulary], in parts."""
        return self._ends.logits(hidden)

    @torch.inference_mode()
    def label_logits(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """The logits of a few tokens, float32 [rows, tokens], after any layer: the model's own norm and head read
        `hidden` [rows, hidden]. Only these tokens' rows of the head are computed."""
        return self._ends.label_logits(hidden, tokens)

    def regroup(self, state: WalkState, left: Remainder, attention: ForestAttention) -> None:
        """Lay out the rest of `state.pack` anew, between two layers.

        Rows of the residual stream move to their new places, and keep their positions. Only these are computed then.
        """
        at = torch.as_tensor(left.tokens)
        state.pack, state.nodes = left.pack, [state.nodes[node] for node in left.nodes]
        state.tokens = state.tokens[at]
        state.tree = _tree(left.pack, state.features, state.tokens)
        buffers = CallBuffers(len(at))
        buffers.take_over(state.calls, at)
        state.chunks, state.calls = self._chunks(state.tree, len(at)), []
        attention.resize(left.pack.held_tokens + len(at))
        hidden = state.hidden
        if not left.in_order:
            state.hidden = self._residual.empty(len(at), hidden)
        for chunk in state.chunks:  # mostly in place: a row's new place is never after its old one
            self._residual.write(state.hidden, chunk.start, self._residual.pick(hidden, at[chunk.start : chunk.end]))
        state.hidden = state.hidden[:, : len(at)]
        state.calls = [self._arguments(state.tokens, chunk, buffers, state.features)[1] for chunk in state.chunks]
        state.done.regroupings += 1

    def _thin(self, index: int, state: WalkState, attention: ForestAttention, rule: ThinningRule, tick: Tick) -> None:
        thinned = rule(state.pack, state.tree, attention.watched_layer(index))
        attention.watch(())
        left, before = thin_pack(state.pack, [each.tokens for each in thinned]), len(state.tokens)
        self.regroup(state, left, attention)
        tick((before - len(left.tokens)) * (1 - (index + 1) / len(self.layers)))

    def _chunks(self, tree: Tree, tokens: int) -> list[Chunk]:
        batched, parts = longest_batched(self.device, self.model.dtype), self._cut(tree, tokens, self.chunk_tokens)
        return [Chunk(tree, start, end, self.device, batched) for start, end in uncut(parts, tree.both_ways)]

    def _features(self, pack: Pack) -> PackFeatures | None:
        # The features of a pack's images. Raises UnsupportedModelError.
        if not pack.images:
            return None
        if self.features is None:
            raise UnsupportedModelError("the model is walked without the part of it that reads images")
        if self._own_cache is not None:
            raise UnsupportedModelError("the model is walked with its own cache, and reads text alone")
        return self.features(pack)

    def _each_chunk(self, state: WalkState, index: int) -> Iterator[tuple[Chunk, LayerCall, Tensor]]:
        spans = [(chunk.start, chunk.end) for chunk in state.chunks]
        rows_of_chunks = self._residual.each(state.hidden, spans)
        for chunk, calls, rows in zip(state.chunks, state.calls, rows_of_chunks, strict=True):
            yield chunk, calls[index], rows

    def _at_last_tokens(self, state: WalkState) -> Tensor:
        # The residual stream at the reads' last tokens, [reads, hidden].
        return self._residual.pick(state.hidden, torch.as_tensor(state.last_tokens))[0]

    def start_layer(self, state: WalkState, index: int, layer: nn.Module, attention: ForestAttention) -> None:
        """Begin a layer, with the K,V and states held from earlier packs."""
        attention.start_layer(self._held.keys_values(index, state.pack))
        kept = state.asked_nodes
        if self._own_cache is not None:
            paths = self._held.paths(index, state.pack)
            state.recurrence = OwnCacheLayer(self._own_cache, index, layer, state.tree, kept=kept, given=paths)
            return
        given = self._held.states(index, state.pack)
        state.recurrence = LayerRecurrence(layer, state.tree, kept=kept, given=given, read=self.arithmetic.read)

    def store_keys(
        self, state: WalkState, index: int, layer: nn.Module, attention: ForestAttention, tick: Tick
    ) -> None:
        """Compute a layer's K,V of all chunks, and nothing else; nothing at all of a layer without attention."""
        attends = True
        for chunk, call, rows in self._each_chunk(state, index):
            if attends:
                attention.chunk(chunk, keys_only=True)
                try:
                    self.call(layer, rows, call, attention)
                except KeysStored:
                    pass
                else:
                    attends = False
            tick((chunk.end - chunk.start) / len(self.layers))
        state.done.keys[state.nodes] += 1

    def _let_leave(
        self,
        index: int,
        state: WalkState,
        attention: ForestAttention,
        tick: Tick,
        rule: ExitRule,
        before: Tensor,
        after: Tensor,
        *,
        through: int,
    ) -> None:
        # Ask the rule at layer `index` which reads go on. Take out the tokens that only the others needed, where that
        # pays. The reads have gone through `through` layers.
        going = _going(rule, index, state.reads, before, after)
        if len(going) == len(state.reads):
            return
        at = [bisect_left(state.reads, read) for read in going]
        left = remainder(state.pack, at, state.held_nodes)
        state.reads, gone = going, len(state.tokens) - len(left.tokens)
        ahead = len(self.layers) - 1 - through + KEYS_SHARE
        # Laying out anew costs `regroup_cost` layers for each token that stays, and spares the layers ahead for each
        # that goes; of the last one only K,V would have been computed.
        stays = self._own_cache is not None and self._own_cache.carries
        if not left.nodes or (not stays and gone * ahead > rule.regroup_cost * len(left.tokens)):
            self.regroup(state, left, attention)
            tick(gone * (1 - through / len(self.layers)))
        else:
            state.pack = _reading(state.pack, at)

    def _leave_last(
        self, index: int, state: WalkState, layer: nn.Module, attention: ForestAttention, rule: ExitRule
    ) -> None:
        # Ask the rule at the last layer, whose K,V are complete: nothing is left to save but the norm and the head.
        before = after = self._at_last_tokens(state)
        if not state.reads_all:
            after = self.read_last(state, layer, attention, index)[0]
        going = _going(rule, index, state.reads, before, after)
        state.pack = _reading(state.pack, [bisect_left(state.reads, read) for read in going])
        state.reads = going

    def _embed(
        self, tokens: Tensor, chunks: list[Chunk], features: PackFeatures | None
    ) -> tuple[Tensor, list[list[LayerCall]]]:
        # The residual stream before the first layer, [1, tokens, hidden], and each chunk's layer arguments.
        hidden, calls = torch.empty(0), []
        buffers = CallBuffers(len(tokens))
        for chunk in chunks:
            rows, call = self._arguments(tokens, chunk, buffers, features, embed=True)
            if chunk.start == 0:
                hidden = self._residual.empty(len(tokens), rows)
            self._residual.write(hidden, chunk.start, rows)
            calls.append(call)
            del rows  # before the next chunk's are made
        return hidden, calls

    def _arguments(
        self,
        tokens: Tensor,
        chunk: Chunk,
        buffers: CallBuffers,
        features: PackFeatures | None,
        *,
        embed: bool = False,
    ) -> tuple[Tensor, list[LayerCall]]:
        # A chunk's rows of the residual stream before the first layer, and the other arguments of each layer.
        own = tokens[chunk.start : chunk.end]
        if self._own_cache is not None:  # which has them made for each call
            return self._own_cache.embed(own, chunk.positions), [((), {})] * len(self.layers)
        recording = self._recorded(own, chunk.positions, features, embed=embed)
        return recording.hidden, buffers.keep(recording.calls, chunk.end - chunk.start)

    def _recorded(
        self, tokens: Tensor, positions: Int64Array, features: PackFeatures | None, *, embed: bool = False
    ) -> Recording:
        # The arguments of the layers for these tokens; with `embed` also their residual stream before the first layer.
        if features is None:
            return self.record(tokens, positions)
        embedded = features.embedded(tokens) if embed else None
        return self._ends.record(features.ids(tokens), features.positions(tokens, positions), embedded=embedded)


# A pack on its way through the layers.


@dataclass(slots=True)
class WalkState:
    """A pack on its way through the layers.

    Reads that have left are not in it any more; tokens that only they needed go on until the rest is laid out anew.
    """

    whole: Pack  # as it was before the first layer
    pack: Pack  # those of its parts that still go on
    reads: Sequence[int]  # number of each of its reads in the whole pack, ascending
    nodes: Sequence[int]  # of each of its nodes
    done: LayersDone  # of the whole pack's nodes
    tree: Tree
    tokens: Tensor
    chunks: list[Chunk]
    calls: list[list[LayerCall]]  # of each chunk, of each layer
    hidden: Tensor  # the residual stream, [1, tokens, hidden]
    features: PackFeatures | None = None  # of images
    keep_ends: bool = False  # the states after the reads are wanted
    recurrence: LayerRecurrence | OwnCacheLayer = field(init=False)  # of the layer that is computed

    @property
    def held_nodes(self) -> list[int]:
        return [bisect_left(self.nodes, node) for node in self.whole.kept_nodes]

    @property
    def asked_nodes(self) -> list[int]:
        """The nodes of the rest whose last states are wanted."""
        return self.held_nodes + ([node for node, _ in self.pack.reads] if self.keep_ends else [])

    @property
    def last_tokens(self) -> Int64Array:
        """The token that each read ends with."""
        return np.asarray([self.pack.offsets[node + 1] - 1 for node, _ in self.pack.reads], dtype=np.int64)

    @property
    def read_tokens(self) -> Int64Array:
        """The same, and the tokens after each that are read."""
        if not self.pack.behind:
            return self.last_tokens
        offsets, found = self.pack.offsets, []
        for last, own in zip(self.last_tokens.tolist(), self.pack.behind, strict=True):
            found.append(np.array([last], dtype=np.int64))
            if own:  # they stand one after the other
                found.append(np.arange(offsets[own[0]], offsets[own[-1] + 1], dtype=np.int64))
        return np.concatenate(found) if found else self.last_tokens

    @property
    def reads_all(self) -> bool:
        """Return whether the last layer computes all tokens, like the layers before, because many are read."""
        lengths = np.diff(self.pack.offsets)
        behind = lengths[[node for own in self.pack.behind for node in own]]
        return len(behind) > 0 and (int(behind.max()) > LONGEST_BEHIND or behind.sum() > READ_SHARE * lengths.sum())


class Keeper(Protocol):
    """Keeps the K,V and states that layers leave, for the work that follows a walk."""

    def take(self, index: int, state: WalkState, attention: ForestAttention) -> None:
        """Take over the K,V and states of layer `index`, after all chunks have passed it and its last tokens were
        read."""


# Where the walk takes its layers from.


@dataclass(frozen=True, slots=True)
class PassSpeed:
    """The time of one pass over layers that are elsewhere: `read_seconds` for the weights, and `token_seconds` for
    each token's products with them, at the speed of a large product."""

    read_seconds: float
    token_seconds: float

    @property
    def hiding_tokens(self) -> int:
        """Tokens from which on a pass takes longer for arithmetic than for reading."""
        return math.ceil(self.read_seconds / self.token_seconds)


class LayerSource:
    """A model's decoder layers: here those whose weights are all on the device. Others may be elsewhere.

    The walk uses one at a time, in ascending order, once for each pass over the model.
    """

    # Of layers that are elsewhere: the most bytes that they take on the device, the bytes of other weights, which are
    # always there, the bytes read so far, and how long the walk has waited for them.
    memory_bytes: int = 0
    resident_bytes: int = 0
    bytes_read: int = 0
    seconds_waited: float = 0.0

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(layers)

    def __len__(self) -> int:
        return len(self._layers)

    def measure_speed(self) -> PassSpeed | None:
        """The time of a pass for its weights; None where they are on the device."""
        return None

    def expect(self, tokens: int, last: int) -> None:
        """The next pass is over this many tokens, and in the last layer over `last`."""

    @contextmanager
    def use(self, index: int) -> Iterator[nn.Module]:
        """Layer `index` with its weights on the walk's device. They are not needed any more once the context ends."""
        yield self._layers[index]

    def end_pass(self) -> None:
        """No further layer is used in this pass; the next pass begins with the first. May be called while a layer is
        in use."""

    def close(self) -> None:
        """No further layer is used."""


#: Longer runs after prompts, or a larger share of a pack, are read in whole chunks: alone, each token would be one
#: query over its run.
LONGEST_BEHIND = 64
READ_SHARE = 0.25
REGROUP_LAYERS = 0.05  # the cost of laying out a token anew, in layers of a token, where it was not measured


# Reads that leave between two layers, with the tokens that no other read needs.


class ExitRule(Protocol):
    """A rule by which reads of a pack leave between two layers.

    `regroup_cost` is the cost of laying out the rest of a pack anew for each of its tokens, in layers of a token.
    Until that pays, tokens that nobody needs any more go on with the others. With 0 they never do.
    """

    @property
    def layers(self) -> Collection[int]:
        """The layers at which the rule is asked, counted from 0. At the last one nothing is left to save but the
        head."""

    @property
    def regroup_cost(self) -> float: ...

    def peeks(self, layer: int) -> bool:
        """Return whether the rule is asked before the layer is computed for all tokens.

        Then the last tokens alone go through it first. Its K,V are computed twice for the tokens that go on.
        """

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        """Return those of the `reads` that go on, ascending.

        `reads` are numbers in `pack.reads`, ascending, of undecided reads; `before` and `after` are the residual
        stream at their last tokens before and after the layer, [reads, hidden]. A read that is left out is decided:
        the rule does not see it again, and it gets no logits. A rule that returns all reads only looks on.
        """


def _tree(pack: Pack, features: PackFeatures | None, tokens: Tensor) -> Tree:
    if features is None:
        return Tree(pack)
    return Tree(pack, features.runs(tokens), in_windows=features.traits.in_windows)


def _going(rule: ExitRule, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
    going = sorted(rule(layer, reads, before, after))
    if not set(going) <= set(reads):
        raise ValueError("an exit rule lets reads go on that have left")
    return going


def _reading(pack: Pack, at: Sequence[int]) -> Pack:
    # The same pack, of which only the reads at these places go on.
    behind = tuple(pack.behind_read(read) for read in at) if pack.behind else ()
    return replace(pack, reads=[pack.reads[read] for read in at], behind=behind)


@dataclass(frozen=True, slots=True)
class Remainder:
    """The rest of a pack.

    `pack` counts its nodes anew and keeps nothing; `nodes` are their old numbers, `tokens` int64 [n] the old numbers
    of its tokens. Both are ascending where tokens leave with the reads that needed them.
    """

    pack: Pack
    nodes: list[int]
    tokens: Int64Array

    @property
    def in_order(self) -> bool:
        """Return whether no token has moved after its old place."""
        return bool((np.diff(self.tokens) > 0).all())


def remainder(pack: Pack, reads: Sequence[int], kept_nodes: Sequence[int]) -> Remainder:
    """The nodes of `pack` on the paths of these `reads` (numbers in `pack.reads`) and of `kept_nodes`.

    Kept are the nodes whose K,V later packs hold: they go through every layer even if their reads have left.
    """
    needed: set[int] = {node for read in reads for node in pack.behind_read(read)}
    for end in [*(pack.reads[read][0] for read in reads), *kept_nodes]:
        node = end
        while node >= 0 and node not in needed:
            needed.add(node)
            node = pack.parents[node]
    nodes = sorted(needed)
    number = {node: at for at, node in enumerate(nodes)} | {-1: -1}
    runs = [np.arange(pack.offsets[node], pack.offsets[node + 1], dtype=np.int64) for node in nodes]
    tokens: Int64Array = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
    left = Pack(
        index=pack.index,
        tokens=pack.tokens[tokens],
        positions=pack.positions[tokens],
        offsets=[0, *np.cumsum([len(run) for run in runs], dtype=np.int64).tolist()],
        starts=[pack.starts[node] for node in nodes],
        parents=[number[pack.parents[node]] for node in nodes],
        attach=[pack.attach[node] for node in nodes],
        reads=[(number[pack.reads[read][0]], pack.reads[read][1]) for read in reads],
        held=pack.held,
        behind=tuple(tuple(number[node] for node in own) for own in map(pack.behind_read, reads))
        if pack.behind
        else (),
    )
    return Remainder(left, nodes, tokens)


# Prompts that go on after a layer with some of their tokens, at the positions that these had.


class Thinned(NamedTuple):
    """The part of a read that goes on: the numbers of its `tokens` in the pack, ascending, its last token among them.

    `reason` says why a prompt that was to be thinned goes on whole; None if it was not, or if it is thinner now.
    """

    tokens: Int64Array
    reason: str | None = None


class ThinningRule(Protocol):
    """Chooses after a layer which tokens go on. A pack that it is used on holds nothing of other packs.

    It goes by the prompts that a pack reads, and can be pickled.
    """

    @property
    def layer(self) -> int:
        """The number of the layer after which tokens are left behind (or after the next that attends). It is not the
        last."""

    def of(self, prompts: Collection[int]) -> ThinningRule:
        """The rule for these prompts alone. The others go on whole."""

    def watched(self, pack: Pack, tree: Tree) -> Sequence[int]:
        """The tokens whose queries the rule needs in that layer, as ascending numbers in the pack.

        A pack without such tokens goes on whole.
        """

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> Sequence[Thinned]:
        """The part of each read of the pack that goes on. `layer` has all keys, and the queries of the `watched`
        tokens."""


def thin_pack(pack: Pack, kept: Sequence[Int64Array]) -> Remainder:
    """The forest of the remaining parts of the reads of `pack`. Reads share the kept tokens of a prefix up to the
    first token that one of them lacks. After it each read has its own tokens. A node has the number of the old node
    in which it ends.

    Raises ValueError if a read loses its last token, or if the pack holds something of other packs, or for them.
    """
    if pack.held or pack.keep:
        raise ValueError("a pack that is thinned holds nothing of other packs and nothing for them")
    ends = [pack.offsets[node + 1] - 1 for node, _ in pack.reads]
    if any(not len(own) or own[-1] != end for own, end in zip(kept, ends, strict=True)):
        raise ValueError("a read goes on with its last token")
    lengths = [pack.offsets[node + 1] - pack.offsets[node] for node, _ in pack.reads]
    moved: dict[int, int] = {}  # nodes after reads
    reads_of_node: dict[int, list[int]] = {}
    runs: list[Int64Array] = []
    starts: list[int] = []
    parents: list[int] = []
    stack: list[tuple[TrieNode, int]] = [(root, -1) for root in reversed(build_forest(kept, token_order(kept)))]
    while stack:
        node, parent = stack.pop()
        number = len(runs)
        runs.append(kept[node.prompt][node.start : node.end])
        starts.append(node.start)
        parents.append(parent)
        reads_of_node[number] = node.ending
        for read in node.ending:
            for old in pack.behind_read(read):
                moved[old] = len(runs)
                runs.append(np.arange(pack.offsets[old], pack.offsets[old + 1], dtype=np.int64))
                starts.append(node.end + pack.starts[old] - pack.starts[pack.reads[read][0]] - lengths[read])
                parents.append(moved.get(pack.parents[old], number))
        stack.extend((child, number) for child in reversed(node.children))
    end_of = {read: node for node, reads in reads_of_node.items() for read in reads}
    tokens: Int64Array = np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)
    thin = Pack(
        index=pack.index,
        tokens=pack.tokens[tokens],
        positions=pack.positions[tokens],
        offsets=[0, *np.cumsum([len(run) for run in runs], dtype=np.int64).tolist()],
        starts=starts,
        parents=parents,
        attach=[()] * len(runs),
        reads=[(end_of[read], prompts) for read, (_, prompts) in enumerate(pack.reads)],
        behind=tuple(tuple(moved[node] for node in own) for own in pack.behind),
    )
    nodes = [bisect_right(pack.offsets, int(run[-1])) - 1 for run in runs]
    return Remainder(thin, nodes, tokens)


# Copies between a CUDA device and host memory, beside the device's computation.
#
# They run in a stream of their own, in order. Memory of the device belongs to the stream that computes: a tensor
# that is copied is kept until that stream waits for its copy. So a process that is many layers ahead of the device
# reserves no more memory than one that is not, as it would with `Tensor.record_stream`.


class CopyStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An empty tensor in pinned host memory, which the device reads and writes by itself."""
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def start(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy `source` to `target`, after all work that is queued on the device so far.

        Both must be contiguous, and the one on the device must live until `wait` for the returned event.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        copied: torch.cuda.Event = self._stream.record_event()
        return copied

    def wait(self, copied: torch.cuda.Event) -> None:
        """Work queued on the device from now on comes after this copy. The process itself does not wait."""
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
        """Begin a group. Work queued from now on comes after the copies of older groups."""
        while len(self._groups) >= self._most:
            self._let_go()
        self._groups.append([])

    def start(self, target: Tensor, source: Tensor) -> None:
        """Copy `source`, which nothing else changes, to host memory."""
        self._groups[-1].append((source, self._copies.start(target, source)))

    def clear(self) -> None:
        """Work queued from now on comes after all copies."""
        while self._groups:
            self._let_go()

    def _let_go(self) -> None:
        for _, copied in self._groups.popleft():
            self._copies.wait(copied)


def copies_for(device: torch.device) -> CopyStream | None:
    """The copies between host memory and a device; None where that is the same memory."""
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
        """A stream for this many tokens, with the width and dtype of the rows `like` [1, rows, hidden]."""
        shape = (1, tokens, like.shape[-1])
        if self._copies is not None:
            return self._copies.host_memory(shape, like.dtype)
        return torch.empty(shape, dtype=like.dtype, device=self._home)

    def each(self, hidden: Tensor, spans: Sequence[tuple[int, int]]) -> Iterator[Tensor]:
        """The rows of each span, on the device; the rows of the next span are copied meanwhile."""
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

    def add(self, hidden: Tensor, at: Tensor, rows: Tensor) -> None:
        """Add rows [rows, hidden] of the device to those at `at` int64 [rows], which is on the CPU."""
        if self._copies is not None:
            self._copies.finish()
        hidden[0, at.to(self._home)] += rows.to(self._home, hidden.dtype)

    def pick(self, hidden: Tensor, at: Tensor) -> Tensor:
        """The rows at `at` int64 [rows], which is on the CPU, on the device: [1, rows, hidden]."""
        if self._copies is not None:
            self._copies.finish()  # of rows that are on their way to the host
        return hidden[:, at.to(self._home)].to(self._device)

    def _wait(self, copied: torch.cuda.Event | None) -> None:
        if copied is not None and self._copies is not None:
            self._copies.wait(copied)

    def _fetch(self, hidden: Tensor, start: int, end: int) -> tuple[Tensor, torch.cuda.Event | None]:
        # Rows on the device, and the event after which they are complete.
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
        self._given: _Coming | None = None  # the last request
        self._next: _Coming | None = None

    def clear(self) -> None:
        self._land()
        for parts in self._layers:
            parts.clear()

    def holds(self, key: Key) -> bool:
        """Return whether every layer has its part of this node."""
        return all(key in parts for parts in self._layers)

    def drop_others(self, keep: Set[Key], layer: int | None = None) -> None:
        """Drop the nodes that are not to be kept, of one layer or of all."""
        if layer is None:
            self._land()  # another pack begins
        for parts in self._layers if layer is None else [self._layers[layer]]:
            for key in parts.keys() - keep:
                del parts[key]

    def put_nodes(self, layer: int, state: WalkState, attention: ForestAttention) -> None:
        """Keep a layer's part of those nodes of a pack that later packs hold, once the whole pack has passed; drop
        others."""
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
        """The states that a pack's roots begin after in a layer, by root. Raises ValueError."""
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
        """The past in the model's own cache, for a layer, of the paths that a pack's roots begin after, by root.
        Raises ValueError."""
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
        # Release K,V that nobody has asked for, once their memory is not written any more.
        if coming is not None and coming.copied is not None and self._copies is not None:
            self._copies.wait(coming.copied)

    def _land(self) -> None:
        # Wait for all copies, and release their memory on the device.
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

"""The layer walk: chunked prefill with its two loops interchanged.

For each layer, for each chunk: the unmodified transformers layer is called on a slice of the residual stream, its
output overwrites the slice, and only this layer's K,V exist. What the model does before its first layer (embedding,
position encoding) and after its last (norm, head) is the model's own forward with stand-ins for the layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.plan.pack import KEYS_SHARE, Key, LayersDone, Pack
from prefillcli.prefill.attention import ROW_STEP, longest_batched
from prefillcli.prefill.forest import Attend, ForestAttention, KeysStored, UnsupportedModelError, WatchedLayer
from prefillcli.prefill.fusion import Preparation, fused
from prefillcli.prefill.layer_calls import CallBuffers, LayerCall, Recording, lend_shared
from prefillcli.prefill.layout import Chunk, IntArray, KeyWindow, LastTokens, Tree, split_evenly
from prefillcli.prefill.model_ends import ModelEnds
from prefillcli.prefill.own_cache import NO_DECODING, NO_QUERIES, OwnCache, OwnCacheLayer, has_forest_attention
from prefillcli.prefill.recurrent import LayerRecurrence, ReadRuns, recurrent_modules
from prefillcli.prefill.walk_state import (
    ExitRule,
    HeldParts,
    Keeper,
    LayerSource,
    Remainder,
    ResidualRows,
    ThinningRule,
    WalkState,
    going_on,
    remainder,
    thin_pack,
    watch_for,
)

# Where a pack is cut into chunks, which are computed by one call of a layer each.


ChunkCutter = Callable[[Tree, int, int], list[tuple[int, int]]]
"""Gives (start, end) of the chunks of a pack of so many tokens, for chunks of at most so many."""


def cut_anywhere(tree: Tree, tokens: int, most: int, step: int = ROW_STEP) -> list[tuple[int, int]]:
    """A `ChunkCutter`: the fewest chunks of about one length, multiples of `step`."""
    return split_evenly(tokens, most, step) if tokens else []


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a walk computes. A feature may bring one that is stricter than the fastest way of each device.

    Kernels for packed weights know nothing of `mode`, and models that are walked with their own cache nothing of
    `attend` and `read`: where that must not be, `no_packed_weights` and `no_own_cache` say so to the user.
    """

    prepare: Preparation = fused
    """Through what layers are called."""
    mode: AbstractContextManager[Any] = field(default_factory=nullcontext)
    """All of a model's forward but attention is computed in it."""
    attend: Attend | None = None
    read: ReadRuns | None = None
    cutter: Callable[[Sequence[nn.Module], torch.device], ChunkCutter] = lambda layers, device: cut_anywhere
    state_step: int = 0
    """As in `plan.pack.Limits`."""
    no_packed_weights: str | None = None
    no_own_cache: str | None = None


FASTEST = Arithmetic()

Tick = Callable[[float], None]


class LayerWalk:
    """A causal language model of transformers, walked layer by layer.

    `model` must be in eval mode and have the forest attention (`prefillcli.prefill.forest.ATTENTION`); one that has an
    attention of transformers is walked with its own cache. Its layers stay what they are; while the walk exists,
    stand-ins take their places. The layers that are called come from `layers`, by default the model's. `chunk_tokens`
    are computed by one call of a layer. Of a pack, `offload_held` keeps what later ones hold in host memory, and
    `hidden_on_host` the residual stream.
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
        self._held = HeldParts(len(self._ends.layers), self.device, offload=offload_held)
        self._own_cache = None if has_forest_attention(model) else OwnCache(model, self._ends)
        self.windows: set[KeyWindow] = set()  # that layers have asked for so far

    @property
    def keeps_ends(self) -> bool:
        """Whether something is kept of a node that only what follows all of its tokens can read."""
        return self._own_cache is not None or any(map(recurrent_modules, self._ends.layers))

    def close(self) -> None:
        """Give the model its layers back."""
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
        """Walk `pack`; yield float32 logits [reads, vocabulary] in pieces, in the order of `pack.reads`.

        `tick` is called after each step with the number of tokens it advanced by, so that they add up to the pack's;
        it may raise to stop the walk. K,V that later packs hold are kept for them. Reads that the rule `exits`
        lets leave early get no logits. `done`, of the pack's nodes, counts the layers that they go through. The rule
        `thinning` leaves tokens behind. What the layers leave is `kept`.
        """
        if thinning is not None:
            self.check_queries()
        if kept is not None:
            self.check_decoding()
        self._held.drop_others(pack.keep | {node.key for node in pack.held})  # what another plan has left
        state, hidden = self.begin(pack, done, keep_ends=kept is not None), None
        with ForestAttention(pack.held_tokens + len(pack.tokens), attend=self.arithmetic.attend) as attention:
            for index, layer in self.through_layers(state, attention, tick, exits, thinning):
                self._held.put_nodes(index, state, attention)
                if index == len(self.layers) - 1 and state.reads:
                    hidden = self.read_last(state, layer, attention)
                if kept is not None:
                    kept.take(index, state, attention)
            self.windows |= attention.windows
        if not state.chunks:  # of the layers that were not computed
            self._held.drop_others(pack.keep)
        if hidden is not None:
            yield from self.logits(hidden)

    def holds(self, key: Key) -> bool:
        """Whether all layers' parts of a node are kept under this key."""
        return self._held.holds(key)

    def check_queries(self) -> None:
        """Raises UnsupportedModelError if the walk does not see the queries of the model's layers."""
        if self._own_cache is not None:
            raise UnsupportedModelError(NO_QUERIES)

    def check_decoding(self) -> None:
        """Raises UnsupportedModelError if no text can be written behind a pack."""
        if self._own_cache is not None:
            raise UnsupportedModelError(NO_DECODING)

    @torch.inference_mode()
    def watch(
        self, pack: Pack, watched: Sequence[int], tick: Tick = lambda tokens: None
    ) -> Generator[WatchedLayer, None, None]:
        """Walk `pack`, which holds nothing, for the queries of its tokens `watched` (ascending), layer by layer.

        A layer is valid until the next one is asked for. Those without attention are left out.
        """
        self.check_queries()
        with ForestAttention(len(pack.tokens), watched, attend=self.arithmetic.attend) as attention:
            for number, _ in self.through_layers(self.begin(pack), attention, tick):
                if attention.attended:
                    yield attention.watched_layer(number)

    # The parts of a walk, also for what follows one.

    def begin(self, pack: Pack, done: LayersDone | None = None, *, keep_ends: bool = False) -> WalkState:
        """`pack` before the first layer. `done` will count its nodes' layers; `keep_ends`: states at reads stay."""
        tokens = torch.as_tensor(pack.tokens, dtype=torch.long)
        tree = Tree(pack)
        chunks = self._chunks(tree, len(tokens))
        hidden, calls = self._embed(tokens, chunks)
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

        Yields each layer with its number once its K,V are complete; it is in use until the next is asked for.
        Reads leave as `exits` says, tokens as `thinning` does. Ends early when nothing is left to compute.
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
                        watch_for(thinning, index, len(self.layers), state, attention)
                    self.through_layer(state, index, layer, attention, tick)
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
        if index == len(self.layers) - 1 and not state.recurrence:
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

        `index` is the layer's, by default that of the last one. A recurrent layer has computed them already.
        """
        if state.recurrence:
            return self._at_last_tokens(state)[None]
        in_order = np.argsort([node for node, _ in state.pack.reads], kind="stable")  # neighbours have one ancestor
        nodes = [state.pack.reads[at][0] for at in in_order]
        rows = []
        for start, end in split_evenly(len(nodes), self.chunk_tokens):
            last = LastTokens(state.tree, nodes[start:end], self.device)
            at = torch.as_tensor(last.tokens)
            recording = self.record(state.tokens[at], state.tree.positions[last.tokens])
            lend_shared(recording.calls, state.calls[0], len(at))
            attention.last_tokens(last)
            hidden = self._residual.pick(state.hidden, at)
            rows.append(self.call(layer, hidden, recording.calls[index], attention))
        return torch.cat(rows, dim=1)[:, torch.as_tensor(np.argsort(in_order), device=self.device)]

    def record(self, tokens: Tensor, positions: IntArray) -> Recording:
        """What the model's own forward over `tokens` int64 [tokens] hands to its layers."""
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
        """Lay out anew what is left of `state.pack`, between two layers.

        Rows of the residual stream move to their new places, and keep their positions. Only these are computed then.
        """
        at = torch.as_tensor(left.tokens)
        state.pack, state.nodes = left.pack, [state.nodes[node] for node in left.nodes]
        state.tokens, state.tree = state.tokens[at], Tree(left.pack)
        buffers = CallBuffers(len(at))
        buffers.take_over(state.calls, at)
        state.chunks, state.calls = self._chunks(state.tree, len(at)), []
        attention.resize(left.pack.held_tokens + len(at))
        hidden = state.hidden
        if not left.in_order:
            state.hidden = self._residual.empty(len(at), hidden)
        for chunk in state.chunks:  # mostly in place: a row's new place is never behind its old one
            rows = self._residual.pick(hidden, at[chunk.start : chunk.end])
            self._residual.write(state.hidden, chunk.start, rows)
        state.hidden = state.hidden[:, : len(at)]
        state.calls = [self._arguments(state.tokens, chunk, buffers)[1] for chunk in state.chunks]
        state.done.regroupings += 1

    def _thin(self, index: int, state: WalkState, attention: ForestAttention, rule: ThinningRule, tick: Tick) -> None:
        """Let the tokens go on that the rule chooses after layer `index`."""
        thinned = rule(state.pack, state.tree, attention.watched_layer(index))
        attention.watch(())
        left, before = thin_pack(state.pack, [each.tokens for each in thinned]), len(state.tokens)
        self.regroup(state, left, attention)
        tick((before - len(left.tokens)) * (1 - (index + 1) / len(self.layers)))

    def _chunks(self, tree: Tree, tokens: int) -> list[Chunk]:
        batched, parts = longest_batched(self.device, self.model.dtype), self._cut(tree, tokens, self.chunk_tokens)
        return [Chunk(tree, start, end, self.device, batched) for start, end in parts]

    def _each_chunk(self, state: WalkState, index: int) -> Iterator[tuple[Chunk, LayerCall, Tensor]]:
        """The chunks with the arguments of layer `index` and their rows of its input."""
        spans = [(chunk.start, chunk.end) for chunk in state.chunks]
        rows_of_chunks = self._residual.each(state.hidden, spans)
        for chunk, calls, rows in zip(state.chunks, state.calls, rows_of_chunks, strict=True):
            yield chunk, calls[index], rows

    def _at_last_tokens(self, state: WalkState) -> Tensor:
        """The residual stream at the reads' last tokens, [reads, hidden]."""
        return self._residual.pick(state.hidden, torch.as_tensor(state.last_tokens))[0]

    def start_layer(self, state: WalkState, index: int, layer: nn.Module, attention: ForestAttention) -> None:
        """Begin a layer, with what is held of it."""
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
        """A layer's K,V of all chunks, and nothing else of it; nothing at all of a layer without attention."""
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
        """Ask the rule at layer `index` which reads go on. Take out what only the others needed, where that pays.

        `through` layers are behind them.
        """
        going = going_on(rule, index, state.reads, before, after)
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
            state.pack = replace(state.pack, reads=[state.pack.reads[read] for read in at])

    def _embed(self, tokens: Tensor, chunks: list[Chunk]) -> tuple[Tensor, list[list[LayerCall]]]:
        """The residual stream before the first layer, [1, tokens, hidden], and each chunk's layer arguments."""
        hidden: Tensor | None = None
        calls = []
        buffers = CallBuffers(len(tokens))
        for chunk in chunks:
            rows, call = self._arguments(tokens, chunk, buffers)
            if hidden is None:
                hidden = self._residual.empty(len(tokens), rows)
            self._residual.write(hidden, chunk.start, rows)
            calls.append(call)
            del rows  # before the next chunk's are made
        if hidden is None:
            raise ValueError("a pack holds at least one token")
        return hidden, calls

    def _arguments(self, tokens: Tensor, chunk: Chunk, buffers: CallBuffers) -> tuple[Tensor, list[LayerCall]]:
        """A chunk's rows of the residual stream before the first layer, and the other arguments of each layer."""
        own = tokens[chunk.start : chunk.end]
        if self._own_cache is not None:  # which has them made for each call
            return self._own_cache.embed(own, chunk.positions), [((), {})] * len(self.layers)
        recording = self.record(own, chunk.positions)
        return recording.hidden, buffers.keep(recording.calls, chunk.end - chunk.start)

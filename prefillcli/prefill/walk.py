"""The layer walk: chunked prefill with its two loops interchanged.

For each layer, for each chunk: the unmodified transformers layer is called on a slice of the residual stream, its
output overwrites the slice, and only this layer's K,V exist. What the model does before its first layer (embedding,
position encoding) and after its last (norm, head) is the model's own forward with stand-ins for the layers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.plan.pack import Held, Key, Pack
from prefillcli.prefill.attention import longest_batched
from prefillcli.prefill.forest import ForestAttention, KeysStored, UnsupportedModelError, WatchedLayer
from prefillcli.prefill.fusion import fused
from prefillcli.prefill.layer_calls import CallBuffers, LayerCall, Recording
from prefillcli.prefill.layers import LayerSource, ResidentLayers
from prefillcli.prefill.layout import Chunk, IntArray, LastTokens, Tree, split_evenly
from prefillcli.prefill.leaving import ExitRule, remainder
from prefillcli.prefill.residual import ResidualRows

LOGIT_BYTES = 16 << 20  # float32 logits of this size at a time

KeyValue = tuple[Tensor, Tensor]
Tick = Callable[[float], None]


class _Recorded(BaseException):
    """All layers' arguments are recorded."""


class _StandIn(nn.Module):
    """Takes a decoder layer's place in the model: has its attributes, and hands its calls to the walk."""

    def __init__(self, layer: nn.Module, index: int, walk: LayerWalk) -> None:
        super().__init__()
        self.layer = layer
        self._report: Callable[..., Tensor] = lambda *a, **k: walk._reached(index, *a, **k)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._report(hidden_states, *args, **kwargs)


@dataclass(slots=True)
class WalkState:
    """A pack on its way through the layers. Without the reads that have left, and what only they needed."""

    pack: Pack  # what is left of the pack
    reads: Sequence[int]  # number of each of its reads in the whole pack, ascending
    nodes: Sequence[int]  # of each of its nodes
    tree: Tree
    tokens: Tensor
    chunks: list[Chunk]
    calls: list[list[LayerCall]]  # of each chunk, of each layer
    hidden: Tensor  # the residual stream, [1, tokens, hidden]

    @property
    def last_tokens(self) -> IntArray:
        """The token that each read ends with."""
        return np.asarray([self.pack.offsets[node + 1] - 1 for node, _ in self.pack.reads], dtype=np.int64)


class LayerWalk:
    """A causal language model of transformers, walked layer by layer.

    `model` must be loaded with the forest attention (`prefillcli.prefill.forest.ATTENTION`) and be in eval mode. Its
    layers stay what they are; while the walk exists, stand-ins take their places in the model. The layers that are
    called come from `layers`, by default those of the model. `chunk_tokens` are computed by one call of a layer.
    `offload_held` keeps the K,V held between packs in host memory, `hidden_on_host` the residual stream of a pack.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_tokens: int,
        offload_held: bool = False,
        hidden_on_host: bool = False,
        layers: LayerSource | None = None,
    ) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens
        decoder = model.get_decoder()
        self._own_layers: list[nn.Module] = list(decoder.layers)
        self.layers: LayerSource = layers or ResidentLayers(self._own_layers)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._residual = ResidualRows(self.device, on_host=hidden_on_host)
        decoder.layers = nn.ModuleList(_StandIn(layer, i, self) for i, layer in enumerate(self._own_layers))
        self._decoder = decoder
        self._recording: Recording | None = None
        self._injected: Tensor | None = None
        self._held: list[dict[Key, KeyValue]] = [{} for _ in self._own_layers]  # by `Held.key`
        self._offload_held = offload_held
        self.windows: set[int] = set()  # sliding windows that layers have asked for so far

    def close(self) -> None:
        """Give the model its layers back."""
        self._decoder.layers = nn.ModuleList(self._own_layers)
        self._held.clear()

    @torch.inference_mode()
    def read_logits(
        self, pack: Pack, tick: Tick = lambda tokens: None, exits: ExitRule | None = None
    ) -> Iterator[Tensor]:
        """Walk `pack`; yield float32 logits [reads, vocabulary] in pieces, in the order of `pack.reads`.

        `tick` is called after each step with the number of tokens it advanced by, so that they add up to the pack's;
        it may raise to stop the walk. K,V that later packs hold are kept for them. Reads that the rule `exits`
        lets leave early get no logits.
        """
        for cache in self._held:  # what another plan has left is not in this one's account of memory
            _drop_others(cache, pack.keep | {node.key for node in pack.held})
        state, hidden = self.begin(pack), None
        with ForestAttention(pack.held_tokens + len(pack.tokens)) as attention:
            for index, layer in self.through_layers(state, attention, tick):
                self._hold(index, pack, state, attention)
                if index < len(self.layers) - 1:
                    if exits is not None:
                        self._let_leave(index, pack, state, attention, exits, tick)
                elif state.reads:
                    hidden = self.read_last(state, layer, attention)
            self.windows |= attention.windows
        if hidden is not None:
            yield from self.logits(hidden)

    def holds(self, key: Key) -> bool:
        """Whether the K,V of all layers are kept under this key."""
        return all(key in cache for cache in self._held)

    @torch.inference_mode()
    def watch(
        self, pack: Pack, watched: Sequence[int], tick: Tick = lambda tokens: None
    ) -> Generator[WatchedLayer, None, None]:
        """Walk `pack`, which holds nothing, for the queries of its tokens `watched` (ascending), layer by layer.

        A layer is valid until the next one is asked for. Of the last one only keys and queries are computed.
        """
        with ForestAttention(len(pack.tokens), watched) as attention:
            for _ in self.through_layers(self.begin(pack), attention, tick):
                yield attention.watched_layer

    # The parts of a walk, also for what follows one.

    def begin(self, pack: Pack) -> WalkState:
        """`pack` before the first layer."""
        tokens = torch.as_tensor(pack.tokens, dtype=torch.long)
        tree = Tree(pack)
        chunks = self._chunks(tree, len(tokens))
        hidden, calls = self._embed(tokens, chunks)
        return WalkState(pack, range(len(pack.reads)), range(len(pack.parents)), tree, tokens, chunks, calls, hidden)

    def through_layers(
        self, state: WalkState, attention: ForestAttention, tick: Tick
    ) -> Iterator[tuple[int, nn.Module]]:
        """Bring all chunks through one layer after the other.

        Yields each layer with its number once its K,V are complete; it is in use until the next is asked for. Ends
        early when there is nothing left to compute.
        """
        for index in range(len(self.layers)):
            if not state.chunks:
                return
            most = max(chunk.end - chunk.start for chunk in state.chunks)
            with self.layers.use(index) as layer, fused(layer, most):
                attention.start_layer([self._held_part(index, node) for node in state.pack.held])
                self.through_layer(state, index, layer, attention, tick)
                yield index, layer

    def through_layer(
        self, state: WalkState, index: int, layer: nn.Module, attention: ForestAttention, tick: Tick
    ) -> None:
        """Bring all chunks through one layer; its output overwrites its input. The last layer computes only K,V."""
        last = index == len(self.layers) - 1
        spans = [(chunk.start, chunk.end) for chunk in state.chunks]
        rows_of_chunks = self._residual.each(state.hidden, spans)
        for chunk, call, rows in zip(state.chunks, state.calls, rows_of_chunks, strict=True):
            attention.chunk(chunk, keys_only=last)
            if last:
                self._store_keys(layer, rows, call[index], attention)
            else:
                self._residual.write(state.hidden, chunk.start, self.call(layer, rows, call[index], attention))
            tick((chunk.end - chunk.start) / len(self.layers))

    def call(self, layer: nn.Module, rows: Tensor, call: LayerCall, attention: ForestAttention) -> Tensor:
        """A layer's output for some rows of its input, [1, tokens, hidden]. Raises UnsupportedModelError."""
        out = layer(rows, *call[0], **call[1])
        if isinstance(out, tuple):
            out = out[0]
        if attention.calls != 1 or not isinstance(out, Tensor) or out.shape != rows.shape:
            raise UnsupportedModelError(
                f"a layer of type {type(layer).__name__} does not attend exactly once over its tokens; "
                "this architecture cannot be walked layer by layer"
            )
        return out

    def read_last(self, state: WalkState, layer: nn.Module, attention: ForestAttention) -> Tensor:
        """The last layer's output for the prompts' last tokens alone, [1, reads, hidden]."""
        ends = [node for node, _ in state.pack.reads]
        in_order = np.argsort(ends, kind="stable")  # neighbours see the same ancestors
        nodes = [ends[at] for at in in_order]
        rows = []
        for start, end in split_evenly(len(nodes), self.chunk_tokens):
            last = LastTokens(state.tree, nodes[start:end], self.device)
            at = torch.as_tensor(last.tokens)
            recording = self.record(state.tokens[at], state.tree.positions[last.tokens])
            attention.last_tokens(last)
            hidden = self._residual.pick(state.hidden, at)
            rows.append(self.call(layer, hidden, recording.calls[-1], attention))
        return torch.cat(rows, dim=1)[:, torch.as_tensor(np.argsort(in_order), device=self.device)]

    def record(self, tokens: Tensor, positions: np.typing.NDArray[np.int64]) -> Recording:
        """What the model's own forward over `tokens` int64 [tokens] hands to its layers."""
        recording = Recording()
        with self._staged(recording=recording):
            try:
                self.model(
                    input_ids=tokens[None].to(self.device),
                    position_ids=torch.as_tensor(positions)[None].to(self.device),
                    use_cache=False,
                )
            except _Recorded:
                return recording
        raise UnsupportedModelError("the model's forward does not call all of its layers")

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The model's own norm and head over `hidden` [1, tokens, hidden]: float32 [tokens, vocabulary], in pieces of
        a bounded size."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        for start, end in split_evenly(hidden.shape[1], max(1, LOGIT_BYTES // (4 * vocabulary))):
            yield self._head(hidden[:, start:end])

    def _chunks(self, tree: Tree, tokens: int) -> list[Chunk]:
        batched = longest_batched(self.device, self.model.dtype)
        parts = split_evenly(tokens, self.chunk_tokens) if tokens else []
        return [Chunk(tree, start, end, self.device, batched) for start, end in parts]

    def _store_keys(self, layer: nn.Module, rows: Tensor, call: LayerCall, attention: ForestAttention) -> None:
        try:
            self.call(layer, rows, call, attention)
        except KeysStored:
            return
        raise UnsupportedModelError(f"a layer of type {type(layer).__name__} does not call the attention interface")

    def _let_leave(
        self, index: int, pack: Pack, state: WalkState, attention: ForestAttention, exits: ExitRule, tick: Tick
    ) -> None:
        """Ask the rule after layer `index` which reads go on; take out the others and what only they needed."""
        if not state.reads:
            return
        ends = torch.as_tensor(state.last_tokens)
        going = list(exits(index, state.reads, self._residual.pick(state.hidden, ends)[0]))
        if going == list(state.reads):
            return
        if not set(going) <= set(state.reads):
            raise ValueError("an exit rule lets reads go on that have left")
        kept = [bisect_left(state.nodes, node) for node in pack.kept_nodes]
        left = remainder(state.pack, [bisect_left(state.reads, read) for read in going], kept)
        state.reads, state.pack = going, left.pack
        gone = len(state.tokens) - len(left.tokens)
        if not gone:
            return  # prompts that others begin with
        if not left.nodes:
            for cache in self._held[index + 1 :]:  # of the layers that are not computed
                _drop_others(cache, pack.keep)
        state.nodes = [state.nodes[node] for node in left.nodes]
        state.tokens, state.tree = state.tokens[torch.as_tensor(left.tokens)], Tree(left.pack)
        state.chunks, state.calls = self._chunks(state.tree, len(left.tokens)), []
        attention.resize(left.pack.held_tokens + len(left.tokens))
        at = torch.as_tensor(left.tokens)
        for chunk in state.chunks:  # in place: a row's new place is never behind its old one
            rows = self._residual.pick(state.hidden, at[chunk.start : chunk.end])
            self._residual.write(state.hidden, chunk.start, rows)
        state.hidden = state.hidden[:, : len(left.tokens)]
        buffers = CallBuffers(len(left.tokens))
        state.calls = [self._arguments(state.tokens, chunk, buffers)[1] for chunk in state.chunks]
        tick(gone * (1 - (index + 1) / len(self.layers)))

    # What surrounds the layers: the model's own forward.

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
        recording = self.record(tokens[chunk.start : chunk.end], chunk.positions)
        return recording.hidden, buffers.keep(recording.calls, chunk.end - chunk.start)

    def _head(self, hidden: Tensor) -> Tensor:
        """Final norm and head, with whatever scaling the model gives its logits: float32 [tokens, vocabulary]."""
        with self._staged(injected=hidden):
            placeholder = torch.zeros(1, hidden.shape[1], dtype=torch.long, device=self.device)
            logits: Tensor = self.model(input_ids=placeholder, use_cache=False).logits
        return logits[0].float()

    @contextmanager
    def _staged(self, *, recording: Recording | None = None, injected: Tensor | None = None) -> Iterator[None]:
        self._recording, self._injected = recording, injected
        try:
            yield
        finally:
            self._recording = self._injected = None

    def _reached(self, index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._recording is not None:
            if index == 0:
                self._recording.first = hidden_states
            self._recording.calls.append((args, kwargs))
            if index == len(self._own_layers) - 1:
                raise _Recorded
            return hidden_states
        if self._injected is None:
            raise RuntimeError("the model is being walked; call its layers through the walk")
        return self._injected

    def _hold(self, index: int, pack: Pack, state: WalkState, attention: ForestAttention) -> None:
        """Keep this layer's K,V of the nodes of `pack` that later packs hold; drop the others."""
        cache = self._held[index]
        _drop_others(cache, pack.keep)
        place = torch.device("cpu") if self._offload_held else self.device
        keys, values = attention.keys_values
        for node, key in pack.kept_nodes.items():
            at = bisect_left(state.nodes, node)
            first, last = (pack.held_tokens + state.tree.offsets[each] for each in (at, at + 1))
            cache[key] = (
                keys[:, :, first:last].to(place, copy=True),
                values[:, :, first:last].to(place, copy=True),
            )

    def _held_part(self, index: int, node: Held) -> KeyValue:
        """This layer's K,V of a held node."""
        part = slice(node.offset, node.offset + node.length)
        keys, values = self._held[index][node.key]
        return keys[:, :, part], values[:, :, part]


def _drop_others(cache: dict[Key, KeyValue], keep: Set[Key]) -> None:
    """Drop what is not to be kept."""
    for key in cache.keys() - keep:
        del cache[key]

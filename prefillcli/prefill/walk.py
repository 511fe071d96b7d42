"""The layer walk: chunked prefill with its two loops interchanged.

For each layer, for each chunk: the unmodified transformers layer is called on a slice of the residual stream, its
output overwrites the slice, and only this layer's K,V exist. What the model does before its first layer (embedding,
position encoding) and after its last (norm, head) is the model's own forward with stand-ins for the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.plan.pack import Pack
from prefillcli.prefill.attention import longest_batched
from prefillcli.prefill.forest import ForestAttention, KeysStored, Sight, Step, UnsupportedModelError
from prefillcli.prefill.layout import Chunk, Reads, Tree, split_evenly
from prefillcli.prefill.recording import LayerCall, Recording, Shelf

LOGIT_BYTES = 16 << 20  # float32 logits of this size at a time

KeyValue = tuple[Tensor, Tensor]
Tick = Callable[[float], None]


class _Recorded(BaseException):
    """All layers' arguments are recorded."""


class _Stage(nn.Module):
    """Stands in for a decoder layer, answers its attributes, and does what the walk asks."""

    def __init__(self, layer: nn.Module, index: int, walk: LayerWalk) -> None:
        super().__init__()
        self.layer = layer
        self._report: Callable[..., Tensor] = lambda *a, **k: walk._stage(index, *a, **k)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._report(hidden_states, *args, **kwargs)


@dataclass(slots=True)
class _Pass:
    """A pack on its way through the layers."""

    pack: Pack
    tree: Tree
    tokens: Tensor
    chunks: list[Chunk]
    calls: list[list[LayerCall]]  # of each chunk, of each layer
    hidden: Tensor  # the residual stream, [1, tokens, hidden]
    output: Tensor  # where a layer's output goes; the same tensor, unless the walk is told to copy


@dataclass(slots=True)
class Lookahead:
    """Queries of a pack's watched tokens, and of tokens decoded greedily behind its reads.

    `counts[i]` tokens were decoded behind read i before an end of text. `sights`, one for each layer, begin with the
    queries of the watched tokens in their order; those of each read's first decoded token follow, then of the second.
    """

    counts: list[int]
    sights: Iterator[Sight]


class LayerWalk:
    """A causal language model of transformers, walked layer by layer.

    `model` must be loaded with the forest attention (`prefillcli.prefill.forest.ATTENTION`) and be in eval mode. Its
    layers stay what they are; while the walk exists their places in the model are taken by stand-ins. `chunk_tokens`
    are computed by one call of a layer. `offload_held` keeps the K,V held between packs in host memory. Without
    `in_place` a layer's output goes to a second residual stream: it is there to measure what overwriting saves.
    """

    def __init__(
        self, model: PreTrainedModel, *, chunk_tokens: int, offload_held: bool = False, in_place: bool = True
    ) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.in_place = in_place
        decoder = model.get_decoder()
        self.layers: list[nn.Module] = list(decoder.layers)
        self.device: torch.device = model.get_input_embeddings().weight.device
        decoder.layers = nn.ModuleList(_Stage(layer, i, self) for i, layer in enumerate(self.layers))
        self._decoder = decoder
        self._recording: Recording | None = None
        self._injected: Tensor | None = None
        self._held: list[dict[tuple[int, int], KeyValue]] = [{} for _ in self.layers]  # by `Held.key`
        self._offload_held = offload_held
        self.windows: set[int] = set()  # sliding windows that layers have asked for so far

    def close(self) -> None:
        """Give the model its layers back."""
        self._decoder.layers = nn.ModuleList(self.layers)
        self._held.clear()

    @torch.inference_mode()
    def read_logits(self, pack: Pack, tick: Tick = lambda tokens: None) -> Iterator[Tensor]:
        """Walk `pack`; yield float32 logits [reads, vocabulary] in pieces, in the order of `pack.reads`.

        `tick` is called after each step with the number of tokens it advanced by, so that they add up to the pack's;
        it may raise to stop the walk. K,V that later packs hold are kept for them.
        """
        state = self._begin(pack)
        with ForestAttention(pack.held_tokens + len(pack.tokens)) as attention:
            for index in self._layers(state, attention, tick):
                self._hold(index, pack, attention)
            self.windows |= attention.windows
            hidden = self._read_last(state, attention)
        yield from self._logits(hidden)

    @torch.inference_mode()
    def watch(
        self, pack: Pack, watched: Sequence[int], tick: Tick = lambda tokens: None
    ) -> Generator[Sight, None, None]:
        """Walk `pack`, which holds nothing, for what its tokens `watched` (ascending) look at: one sight a layer.

        A sight is good until the next one is asked for. Of the last layer nothing but keys and queries is computed.
        """
        with ForestAttention(len(pack.tokens), watched) as attention:
            for _ in self._layers(self._begin(pack), attention, tick):
                yield attention.sight

    @torch.inference_mode()
    def look_ahead(
        self,
        pack: Pack,
        watched: Sequence[int],
        steps: int,
        stop_tokens: frozenset[int],
        tick: Tick = lambda tokens: None,
    ) -> Lookahead:
        """`watch`, and decode `steps` tokens behind each read, greedily.

        All layers' K,V are kept until the last sight was taken or forgotten.
        """
        state = self._begin(pack)
        nodes = [node for node, _ in pack.reads]
        last = Reads(state.tree, nodes, self.device).tokens
        stored: list[KeyValue] = []
        first: list[Sight] = []
        with ForestAttention(len(pack.tokens), watched) as attention:
            for _ in self._layers(state, attention, tick):
                first.append(attention.sight)
                stored.append(attention.take())
            attention.recall(stored[-1], first[-1].scoring)
            hidden = self._read_last(state, attention)
            queries = [[sight.queries] for sight in first]
            own = [Step(Reads(state.tree, nodes, self.device)) for _ in self.layers]
            counts = torch.zeros(len(nodes), dtype=torch.long)
            going = torch.ones(len(nodes), dtype=torch.bool)
            for step in range(1, steps + 1):
                tokens = torch.cat([logits.argmax(dim=-1) for logits in self._logits(hidden)]).cpu()
                going &= ~torch.isin(tokens, torch.as_tensor(sorted(stop_tokens), dtype=torch.long))
                if not going.any():
                    break
                counts += going
                recording = self._record(tokens, state.tree.positions[last] + step)
                if recording.hidden is None:
                    raise UnsupportedModelError("the model's forward does not reach its layers")
                hidden = recording.hidden
                for index, layer in enumerate(self.layers):
                    own[index].reads.ahead = step
                    attention.recall(stored[index], first[index].scoring)
                    attention.step(own[index])
                    hidden = self._call(layer, hidden, recording.calls[index], attention)
                    queries[index].append(attention.sight.queries)
                    tick(0.0)
        sights = (
            Sight(sight.keys, torch.cat(asked, dim=1), sight.scoring)
            for sight, asked in zip(first, queries, strict=True)
        )
        return Lookahead(counts.tolist(), sights)

    def _begin(self, pack: Pack) -> _Pass:
        tree = Tree(pack)
        tokens = torch.as_tensor(pack.tokens, dtype=torch.long)
        batched = longest_batched(self.device, self.model.dtype)
        parts = split_evenly(len(tokens), self.chunk_tokens)
        chunks = [Chunk(tree, start, end, self.device, batched) for start, end in parts]
        hidden, calls = self._embed(tokens, chunks)
        output = hidden if self.in_place else torch.empty_like(hidden)
        return _Pass(pack, tree, tokens, chunks, calls, hidden, output)

    def _layers(self, state: _Pass, attention: ForestAttention, tick: Tick) -> Iterator[int]:
        """Bring all chunks through one layer after the other; yields a layer's number when its K,V are complete."""
        share = 1.0 / len(self.layers)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attention.start_layer([self._held[index][node.key] for node in state.pack.held])
            for chunk, call in zip(state.chunks, state.calls, strict=True):
                attention.chunk(chunk, keys_only=index == last)
                rows = state.hidden[:, chunk.start : chunk.end]
                if index == last:
                    self._store_keys(layer, rows, call[index], attention)
                else:
                    state.output[:, chunk.start : chunk.end] = self._call(layer, rows, call[index], attention)
                tick((chunk.end - chunk.start) * share)
            if index != last:
                state.hidden, state.output = state.output, state.hidden
            yield index

    def _call(self, layer: nn.Module, rows: Tensor, call: LayerCall, attention: ForestAttention) -> Tensor:
        out = layer(rows, *call[0], **call[1])
        if isinstance(out, tuple):
            out = out[0]
        if attention.calls != 1 or not isinstance(out, Tensor) or out.shape != rows.shape:
            raise UnsupportedModelError(
                f"a layer of type {type(layer).__name__} does more or other than attend once over its tokens; "
                "this architecture cannot be walked layer by layer"
            )
        return out

    def _store_keys(self, layer: nn.Module, rows: Tensor, call: LayerCall, attention: ForestAttention) -> None:
        try:
            self._call(layer, rows, call, attention)
        except KeysStored:
            return
        raise UnsupportedModelError(f"a layer of type {type(layer).__name__} does not call the attention interface")

    def _read_last(self, state: _Pass, attention: ForestAttention) -> Tensor:
        """The last layer's output for the prompts' last tokens alone, [1, reads, hidden]."""
        asked = [node for node, _ in state.pack.reads]
        in_order = np.argsort(asked, kind="stable")  # neighbours see the same ancestors
        nodes = [asked[at] for at in in_order]
        rows = []
        for start, end in split_evenly(len(nodes), self.chunk_tokens):
            reads = Reads(state.tree, nodes[start:end], self.device)
            at = torch.as_tensor(reads.tokens)
            recording = self._record(state.tokens[at], state.tree.positions[reads.tokens])
            attention.reads(reads)
            hidden = state.hidden[:, at.to(self.device)]
            rows.append(self._call(self.layers[-1], hidden, recording.calls[-1], attention))
        return torch.cat(rows, dim=1)[:, torch.as_tensor(np.argsort(in_order), device=self.device)]

    # What surrounds the layers: the model's own forward.

    def _embed(self, tokens: Tensor, chunks: list[Chunk]) -> tuple[Tensor, list[list[LayerCall]]]:
        """The residual stream before the first layer, [1, tokens, hidden], and each chunk's layer arguments."""
        hidden: Tensor | None = None
        calls = []
        shelf = Shelf(len(tokens))
        for chunk in chunks:
            recording = self._record(tokens[chunk.start : chunk.end], chunk.positions)
            if recording.hidden is None:
                raise UnsupportedModelError("the model's forward does not reach its layers")
            if hidden is None:
                shape = (1, len(tokens), recording.hidden.shape[-1])
                hidden = torch.empty(shape, dtype=recording.hidden.dtype, device=self.device)
            hidden[:, chunk.start : chunk.end] = recording.hidden
            calls.append(shelf.keep(recording.calls, chunk.end - chunk.start))
            del recording  # before the next chunk's is made
        if hidden is None:
            raise ValueError("a pack holds at least one token")
        return hidden, calls

    def _record(self, tokens: Tensor, positions: np.typing.NDArray[np.int64]) -> Recording:
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

    def _logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """`_head` in pieces of a bounded size."""
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        for start, end in split_evenly(hidden.shape[1], max(1, LOGIT_BYTES // (4 * vocabulary))):
            yield self._head(hidden[:, start:end])

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

    def _stage(self, index: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._recording is not None:
            if index == 0:
                self._recording.hidden = hidden_states
            self._recording.calls.append((args, kwargs))
            if index == len(self.layers) - 1:
                raise _Recorded
            return hidden_states
        if self._injected is None:
            raise RuntimeError("the model is being walked; call its layers through the walk")
        return self._injected

    def _hold(self, index: int, pack: Pack, attention: ForestAttention) -> None:
        """Keep this layer's K,V of the nodes that later packs hold; let go of the others."""
        cache = self._held[index]
        for key in cache.keys() - pack.keep:
            del cache[key]
        place = torch.device("cpu") if self._offload_held else self.device
        keys, values = attention.keys_values
        for pack_index, node in pack.keep:
            if pack_index == pack.index:
                first, last = (pack.held_tokens + pack.offsets[at] for at in (node, node + 1))
                cache[pack_index, node] = (
                    keys[:, :, first:last].to(place, copy=True),
                    values[:, :, first:last].to(place, copy=True),
                )

"""The ways to prefill one prompt, whose memory use is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION, ForestAttention
from prefillcli.prefill.layer_calls import decoder_layers, embedding_device
from prefillcli.prefill.layout import split_evenly
from prefillcli.prefill.leaving import WalkState
from prefillcli.prefill.model_ends import last_row
from prefillcli.prefill.walk import LayerWalk

MODES = {
    "full": "transformers, one forward, the K,V of all layers kept (use_cache=True)",
    "chunked": "chunked prefill: transformers, chunk by chunk, the K,V of all layers kept",
    "drop": "the layer walk with one chunk: K,V of one layer, nothing chunked",
    "hybrid-copy": "the layer walk in chunks, a layer's output in a second residual stream",
    "hybrid": "the layer walk in chunks, in place, as `prefill score` does it",
}

#: Modes that run transformers' own forward, which may fail in its own ways on some architecture.
OF_TRANSFORMERS = ("full", "chunked")

#: Called with the number of tokens that a step advanced by; it may raise.
Tick = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt through the model in one mode; gives its last logits, float32 [vocabulary]."""

    model: PreTrainedModel
    mode: str
    chunk_tokens: int

    def __call__(self, prompt: TokenArray, tick: Tick = lambda tokens: None) -> Tensor:
        if self.mode in OF_TRANSFORMERS:
            return self._forward(prompt, tick)
        return self._walk(prompt, tick)

    @torch.inference_mode()
    def _forward(self, prompt: TokenArray, tick: Tick) -> Tensor:
        self.model.set_attn_implementation("sdpa")
        chunk = len(prompt) if self.mode == "full" else self.chunk_tokens
        ids = torch.as_tensor(prompt, dtype=torch.long)[None].to(embedding_device(self.model))
        cache = DynamicCache()
        logits: Tensor | None = None
        with _ticking(self.model, tick):
            for start, end in split_evenly(len(prompt), chunk):
                logits = self.model(
                    input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, logits_to_keep=1
                ).logits
        if logits is None:
            raise ValueError("a prompt has at least one token")
        return last_row(logits)

    def _walk(self, prompt: TokenArray, tick: Tick) -> Tensor:
        self.model.set_attn_implementation(ATTENTION)
        chunk = len(prompt) if self.mode == "drop" else self.chunk_tokens
        kind = CopyingWalk if self.mode == "hybrid-copy" else LayerWalk
        walk = kind(self.model, chunk_tokens=chunk)
        try:
            (pack,) = make_plan([prompt], Limits(len(prompt), len(prompt))).packs
            return torch.cat(list(walk.read_logits(pack, tick)))[0]
        finally:
            walk.close()


class CopyingWalk(LayerWalk):
    """A walk that has a second residual stream for each layer's output: it shows what overwriting saves."""

    _second: Tensor | None = None

    def through_layer(
        self, state: WalkState, index: int, layer: torch.nn.Module, attention: ForestAttention, tick: Tick
    ) -> None:
        if index < len(self.layers) - 1:  # the last layer has no output
            if self._second is None or self._second.shape != state.hidden.shape:
                self._second = torch.empty_like(state.hidden)
            state.hidden, self._second = self._second.copy_(state.hidden), state.hidden
        super().through_layer(state, index, layer, attention, tick)


@contextmanager
def _ticking(model: PreTrainedModel, tick: Tick) -> Iterator[None]:
    """`tick` after each call of a layer, with its share of the tokens."""
    layers = list(decoder_layers(model).layers)

    def called(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        tick(inputs[0].shape[1] / len(layers))

    hooks = [layer.register_forward_hook(called) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

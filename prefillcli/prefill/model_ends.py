"""What a model does before its first layer and after its last: its own forward, with stand-ins for the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.prefill.forest import UnsupportedModelError
from prefillcli.prefill.layer_calls import Recording
from prefillcli.prefill.layout import IntArray, split_evenly

LOGIT_BYTES = 16 << 20  # float32 logits of this size at a time


class _Recorded(BaseException):
    """All layers' arguments are recorded."""


class _StandIn(nn.Module):
    """Takes a decoder layer's place in the model: has its attributes, and hands its calls to the model's ends."""

    def __init__(self, layer: nn.Module, index: int, ends: ModelEnds) -> None:
        super().__init__()
        self.layer = layer
        self._report: Callable[..., Tensor] = lambda *a, **k: ends._reached(index, *a, **k)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._report(hidden_states, *args, **kwargs)


class _LabelHead(nn.Module):
    """Some rows of a head."""

    def __init__(self, head: nn.Linear, tokens: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight[tokens], requires_grad=False)
        self.bias = None if head.bias is None else nn.Parameter(head.bias[tokens], requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


class ModelEnds:
    """A causal language model of transformers without its decoder layers.

    Until `close`, stand-ins take the layers' places in the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self.layers: list[nn.Module] = list(self._decoder.layers)
        self.device: torch.device = model.get_input_embeddings().weight.device
        self._decoder.layers = nn.ModuleList(_StandIn(layer, i, self) for i, layer in enumerate(self.layers))
        self._recording: Recording | None = None
        self._injected: Tensor | None = None

    def close(self) -> None:
        """Give the model its layers back."""
        self._decoder.layers = nn.ModuleList(self.layers)

    def record(self, tokens: Tensor, positions: IntArray) -> Recording:
        """What the model's own forward over `tokens` int64 [tokens] hands to its layers."""
        recording = Recording()
        with self._staged(recording=recording):
            try:
                self._model(
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
        vocabulary = self._model.get_output_embeddings().weight.shape[0]
        for start, end in split_evenly(hidden.shape[1], max(1, LOGIT_BYTES // (4 * vocabulary))):
            yield self._head(hidden[:, start:end])

    def label_logits(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """The logits of a few tokens, float32 [rows, tokens], after any layer: the model's own norm and head read
        `hidden` [rows, hidden]. Only these tokens' rows of the head are computed."""
        head = self._model.get_output_embeddings()
        at = torch.as_tensor(tokens, dtype=torch.long, device=head.weight.device)
        if type(head) is not nn.Linear:  # a subclass may compute something else
            return torch.cat([logits[:, at] for logits in self.logits(hidden[None])])
        self._model.set_output_embeddings(_LabelHead(head, at))
        try:
            return self._head(hidden[None])
        finally:
            self._model.set_output_embeddings(head)

    def _head(self, hidden: Tensor) -> Tensor:
        """Final norm and head, with whatever scaling the model gives its logits: float32 [tokens, vocabulary]."""
        with self._staged(injected=hidden):
            placeholder = torch.zeros(1, hidden.shape[1], dtype=torch.long, device=self.device)
            logits: Tensor = self._model(input_ids=placeholder, use_cache=False).logits
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
            if index == len(self.layers) - 1:
                raise _Recorded
            return hidden_states
        if self._injected is None:
            raise RuntimeError("the model is being walked; call its layers through the walk")
        return self._injected

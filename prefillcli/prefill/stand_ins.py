"""Stand-ins for decoder layers: the model's own forward runs over them, and they say what it hands to its layers.

What a layer gives back differs from family to family: the residual stream, or a tuple that begins with it. Which form
a model's forward takes is found out by running it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prefillcli.prefill.forest import UnsupportedModelError
from prefillcli.prefill.lanes import Lanes
from prefillcli.prefill.layer_calls import Recording

TRIAL_TOKENS = 7  # no number of lanes


class Reached(Protocol):
    """What is to happen where the model's forward calls layer `index`."""

    def __call__(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class StandIn(nn.Module):
    """Takes a decoder layer's place in the model: has its attributes, and hands its calls on."""

    def __init__(self, layer: nn.Module, reached: Callable[[Tensor, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.layer = layer
        self._hand_on = reached

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._hand_on(hidden_states, args, kwargs)


class AllRecorded(BaseException):
    """All layers' arguments are recorded."""


class WrongForm(ValueError):
    """The model's forward takes another form of a layer's output."""


@dataclass(frozen=True, slots=True)
class OutputForm:
    """What a layer gives back: the residual stream alone, or a tuple of it and `others` more.

    `carried` are those of the others that the next layer is called with: their number, and the position or name of
    that argument.
    """

    others: int | None
    carried: Mapping[int, int | str] = field(default_factory=dict)

    def give(self, hidden: Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """A layer's output, with what it was called with handed on."""
        if self.others is None:
            return hidden
        others: list[Any] = [None] * self.others
        for number, place in self.carried.items():
            if isinstance(place, str):
                others[number] = (kwargs or {}).get(place)
            elif place < len(args):
                others[number] = args[place]
        return (hidden, *others)


#: In the order in which they are tried.
FORMS = (OutputForm(None), *(OutputForm(others) for others in range(4)))


class TrialForward:
    """One forward with layers that change nothing, to see how the model calls them.

    Raises WrongForm where it takes another form of output, and UnsupportedModelError where it cannot be cut into
    layers.
    """

    def __init__(self, form: OutputForm) -> None:
        self._form = form
        self._markers = [object() for _ in range(form.others or 0)]
        self._last: Tensor | None = None
        self._carried: dict[int, int | str] = {}
        self.lanes = Lanes()
        self.reached = 0

    @property
    def form(self) -> OutputForm:
        """The form, with what is carried from layer to layer."""
        return OutputForm(self._form.others, self._carried)

    def __call__(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if index != self.reached:
            raise UnsupportedModelError("the model does not call each of its layers once, in their order")
        if self._last is None:
            self.lanes = Lanes.of(hidden, TRIAL_TOKENS)
        elif not isinstance(hidden, Tensor) or hidden.shape != self._last.shape:
            raise WrongForm
        elif not torch.equal(hidden, self._last):
            raise UnsupportedModelError("the model changes the residual stream between its layers")
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        markers = {id(marker): number for number, marker in enumerate(self._markers)}
        self._carried |= {markers[id(value)]: place for place, value in places if id(value) in markers}
        self._last, self.reached = hidden.clone(), self.reached + 1
        return hidden if self._form.others is None else (hidden, *self._markers)


class CallRecorder:
    """Records what the layers are called with, as `recording`, for `layers` layers. Raises AllRecorded then."""

    def __init__(self, form: OutputForm, lanes: Lanes, layers: int) -> None:
        self.recording = Recording()
        self._form, self._lanes, self._layers = form, lanes, layers

    def __call__(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls = self.recording.calls
        if index != len(calls):
            raise UnsupportedModelError("the model does not call each of its layers once, in their order")
        if index == 0:
            self.recording.first = self._lanes.fold(hidden)
        calls.append((args, kwargs))
        if index == self._layers - 1:
            raise AllRecorded
        return self._form.give(hidden, args, kwargs)


class Injection:
    """Gives back rows [1, tokens, width] of a folded residual stream, whatever the layers are called with."""

    def __init__(self, form: OutputForm, lanes: Lanes, rows: Tensor) -> None:
        self._form, self._hidden = form, lanes.unfold(rows)

    def __call__(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._form.give(self._hidden, args, kwargs)


def stand_ins(layers: list[nn.Module], reached: Reached) -> Iterator[StandIn]:
    """One for each layer, which say their number to `reached`."""
    for index, layer in enumerate(layers):
        yield StandIn(layer, partial(reached, index))

"""A model before its first layer and after its last: its own forward, with stand-ins for the layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.errors import brief
from prefillcli.plan.plan import LONG
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.forest import UnsupportedModelError
from prefillcli.walk.layout import split_evenly
from prefillcli.walk.packed import packed_rows

# Residual streams of several lanes, kept as one wide row for each token.
#
# Most models pass [1, tokens, hidden] from layer to layer. Some pass several such streams, which their layers mix.


@dataclass(frozen=True, slots=True)
class Lanes:
    """The form in which a model's layers take the residual stream.

    `count` lanes come as [1, tokens, lanes, hidden], or with `first` as [lanes, 1, tokens, hidden]. `count` 0: one
    stream, [1, tokens, hidden].
    """

    count: int = 0
    first: bool = False

    @classmethod
    def of(cls, hidden: Tensor, tokens: int) -> Self:
        """The lanes of `hidden`, a layer's input for this many tokens. Raises UnsupportedModelError."""
        shape = tuple(hidden.shape)
        if len(shape) == 3 and shape[:2] == (1, tokens):
            return cls()
        if len(shape) == 4 and shape[:2] == (1, tokens):
            return cls(shape[2])
        if len(shape) == 4 and shape[1:3] == (1, tokens):
            return cls(shape[0], first=True)
        raise UnsupportedModelError(f"the layers take {list(shape)} for {tokens} tokens, which the walk does not know")

    def fold(self, hidden: Tensor) -> Tensor:
        """A layer's input as one row for each token, [1, tokens, lanes * hidden]."""
        if not self.count:
            return hidden
        return (hidden.permute(1, 2, 0, 3) if self.first else hidden).flatten(2)

    def unfold(self, rows: Tensor) -> Tensor:
        """A layer's input, made of rows [1, tokens, lanes * hidden]."""
        if not self.count:
            return rows
        lanes = rows.view(*rows.shape[:2], self.count, -1)
        return lanes.permute(2, 0, 1, 3).contiguous() if self.first else lanes


# Stand-ins for decoder layers: the model's own forward runs over them, and they record its calls.
#
# The output of a layer differs from family to family: the residual stream, or a tuple that begins with it. A trial run
# finds the form that a model's forward takes.


TRIAL_TOKENS = 7  # no number of lanes


#: Called instead of the layer of this number, with this residual stream and arguments.
Reached = Callable[[int, Tensor, tuple[Any, ...], dict[str, Any]], Any]


class StandIn(nn.Module):
    """Takes a decoder layer's place in the model: has its attributes, and passes its calls on."""

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
    """A layer's output: the residual stream alone, or a tuple that begins with it and has `others` more.

    `carried` are those of the others that the next layer is called with: their number, and the position or name of
    that argument.
    """

    others: int | None
    carried: Mapping[int, int | str] = field(default_factory=dict)

    def give(self, hidden: Tensor, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """A layer's output that passes on the arguments of its call."""
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

    Raises WrongForm for a model that takes another form of output, and UnsupportedModelError for one that cannot be
    cut into layers.
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
        """The form, with the values that layers pass on."""
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
    """Records the calls of `layers` layers, as `recording`. Then raises AllRecorded."""

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
    """Returns rows [1, tokens, width] of a folded residual stream, whatever the layers' arguments."""

    def __init__(self, form: OutputForm, lanes: Lanes, rows: Tensor) -> None:
        self._form, self._hidden = form, lanes.unfold(rows)

    def __call__(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._form.give(self._hidden, args, kwargs)


# Rotary tables of prompts that passed the length where a model's position encodings change.
#
# Transformers looks at the largest position of a call, and encodes all positions of the call by it. A chunk holds
# tokens of several prompts, and a long prompt spreads over chunks. So the positions of long prompts are marked
# (`plan.marked_positions`), and a model's rotary module is called for marked ones with one more position after them,
# at which the encodings change.


Tables = tuple[Tensor, ...]


class LengthTables:
    """Until `close`, a model's rotary modules of this kind give marked positions the tables of long prompts."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
        for module in self._modules:
            rotary: Any = module
            switch = rotary.config.rope_parameters["original_max_position_embeddings"]  # the longest that is not long
            module.forward = _by_length(module.forward, int(switch))

    def __bool__(self) -> bool:
        return bool(self._modules)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            del module.forward


def _by_length(forward: Callable[..., Tables], switch: int) -> Callable[..., Tables]:
    # A rotary module's forward over `position_ids` [1, tokens], for marked and unmarked ones alike.
    def tables(x: Tensor, position_ids: Tensor, **others: Any) -> Tables:
        marked = position_ids >= LONG
        if not marked.any():
            return forward(x, position_ids, **others)
        own = torch.where(marked, position_ids - LONG, position_ids)
        behind = torch.full_like(own[:, :1], switch)
        long = tuple(each[:, :-1] for each in forward(x, torch.cat([own, behind], dim=1), **others))
        if marked.all():
            return long
        short = forward(x, torch.where(marked, 0, own), **others)
        return tuple(torch.where(marked[..., None], a, b) for a, b in zip(long, short, strict=True))

    return tables


# Stands in for the cache of a layer that asks it how many tokens are before its own.
#
# In a forest that number differs from token to token.


class DepthCache:
    """Holds nothing, and gives the number of tokens before each of the tokens at `depths`, less those of the call."""

    def __init__(self, depths: Int64Array, device: torch.device) -> None:
        self._before = torch.as_tensor(depths - np.arange(len(depths)), device=device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """int64 [tokens]; plus the tokens' numbers in the call, these are the depths."""
        return self._before

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *others: Any) -> tuple[Tensor, Tensor]:
        return keys, values


#: Float32 logits of this size at a time. Each piece is a pass of the model's forward, which a GPU waits for.
LOGIT_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
MOST_FIRST_POSITION = 3  # RoBERTa begins after the number of its padding token
HEAD_ROWS = 1024  # rows at a time, at most: some models make a mask for as many tokens

#: How a model's forward calls the cache that its layers fill.
_CACHES = ("past_key_values", "cache_params", "layer_past", "state")


@dataclass(frozen=True, slots=True)
class _Manner:
    """The calls of a model's layers, as a trial has shown."""

    form: OutputForm
    lanes: Lanes
    vocabulary: int  # numbers of a token's logits
    first_position: int  # that it gives a prompt's first token by itself
    pooled: bool  # one row of logits for each prompt, of its last token: a classification head


class _LabelHead(nn.Module):
    """Some rows of a head."""

    def __init__(self, head: nn.Linear, tokens: Tensor) -> None:
        super().__init__()
        packed = packed_rows(head)
        tokens = tokens.to(head.weight.device) if packed is None else tokens
        weight = head.weight[tokens] if packed is None else packed.rows(tokens)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if head.bias is None else nn.Parameter(head.bias[tokens], requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight, self.bias)


def logit_bytes(device: torch.device, vocabulary: int) -> int:
    """Bytes of the largest piece of logits on a device; a piece holds at least one token."""
    token = 4 * vocabulary
    if device.type != "cuda":
        return max(LOGIT_BYTES["cpu"], token)
    return max(min(LOGIT_BYTES["cuda"], HEAD_ROWS * token), token)


class ModelEnds:
    """A causal language model of transformers, or one with a classification head, without its decoder layers.

    Such a head gives the logits of its classes. All is computed in `mode`. Until `close`, stand-ins take the layers'
    places in the model. Raises UnsupportedModelError if the layers are not found.
    """

    def __init__(self, model: PreTrainedModel, mode: AbstractContextManager[Any] | None = None) -> None:
        self._model, self._mode = model, mode or nullcontext()
        self._place = decoder_layers(model)
        self.layers: list[nn.Module] = list(self._place.layers)
        self.device: torch.device = embedding_device(model)
        # Llama 4's layers ask a cache how many tokens are before them: their queries grow with their depth.
        self._asked_for_depths = bool(getattr(model.config.get_text_config(), "attn_temperature_tuning", False))
        self._takes = _parameters(model, self._place.prefix)
        self._length_tables = LengthTables(model)
        self._reached: Reached = _is_walked
        self._place.replace(
            [StandIn(layer, partial(self._at_layer, index)) for index, layer in enumerate(self.layers)]
        )

    def close(self) -> None:
        self._length_tables.close()
        self._place.replace(self.layers)

    @property
    def lanes(self) -> Lanes:
        """The lanes of the residual stream, which is folded everywhere outside the layers and the model's ends."""
        return self._manner.lanes

    @property
    def carried(self) -> Mapping[int, int | str]:
        """The values that layers pass on beside the residual stream: their numbers in the output, and where the next
        layer takes them."""
        return {number: place for number, place in self._manner.form.carried.items() if place not in _CACHES}

    def record(
        self,
        tokens: Tensor,
        positions: Int64Array,
        *,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Recording:
        """The arguments that the model's own forward over `tokens` int64 [tokens] passes to its layers.

        `positions` are [tokens], or [axes, tokens]. `embedded` are numbers of tokens, and rows [rows, hidden] that
        take the places of their embeddings.
        That forward gets `attention_mask` and `cache`, a cache of transformers that holds the tokens before these.
        With `use_cache` it makes a cache where none is given. Without one, raises UnsupportedModelError where a layer
        needs more of the one before than the residual stream.
        """
        manner = self._manner
        if not self._length_tables and (positions >= LONG).any():
            raise UnsupportedModelError("its position encodings change with the prompt's length in an unknown way")
        use_cache = use_cache or cache is not None
        if manner.form.carried and not use_cache:
            raise UnsupportedModelError("the model hands more than the residual stream from layer to layer")
        recorder = CallRecorder(manner.form, manner.lanes, len(self.layers))
        given: dict[str, Any] = {"use_cache": use_cache}
        if attention_mask is not None:
            given["attention_mask"] = attention_mask
        try:
            with _embedding(self._model, embedded):
                self._run(recorder, tokens, manner.first_position + positions, cache=cache, **given)
        except AllRecorded:
            return recorder.recording
        raise UnsupportedModelError("the model's forward does not call all of its layers")

    def call(self, layer: nn.Module, rows: Tensor, call: LayerCall, depths: Int64Array) -> Any:
        """A layer's output for rows [1, tokens, width] of the folded residual stream, of tokens at `depths`: such
        rows, or whatever the layer returns first."""
        args, kwargs = call
        if self._asked_for_depths:
            kwargs = {**kwargs, "past_key_values": DepthCache(depths, self.device)}
        with self._mode:
            out = layer(self.lanes.unfold(rows), *args, **kwargs)
        if isinstance(out, tuple | list):
            out = out[0]
        return self.lanes.fold(out) if isinstance(out, Tensor) else out

    def logits(self, hidden: Tensor) -> Iterator[Tensor]:
        """The model's own norm and head over `hidden` [1, tokens, width]: float32 [tokens, vocabulary], in pieces of
        a bounded size."""
        vocabulary = self._manner.vocabulary
        rows = max(1, min(HEAD_ROWS, logit_bytes(hidden.device, vocabulary) // (4 * vocabulary)))
        for start, end in split_evenly(hidden.shape[1], rows):
            yield self._head(hidden[:, start:end])

    def label_logits(self, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
        """The logits of a few tokens, float32 [rows, tokens], after any layer: the model's own norm and head read
        `hidden` [rows, width]. Only these tokens' rows of the head are computed."""
        head = self._model.get_output_embeddings()
        at = torch.as_tensor(tokens, dtype=torch.long, device=hidden.device)
        if type(head) is not nn.Linear:  # a subclass may compute something else
            return torch.cat([logits[:, at] for logits in self.logits(hidden[None])])
        self._model.set_output_embeddings(_LabelHead(head, at))
        try:
            return self._head(hidden[None])
        finally:
            self._model.set_output_embeddings(head)

    def _head(self, hidden: Tensor) -> Tensor:
        # Final norm and head, with whatever scaling the model gives its logits: float32 [tokens, vocabulary].
        form, placeholder = self._manner.form, torch.zeros(hidden.shape[1], dtype=torch.long)
        if not self._manner.pooled:
            return self._run(Injection(form, self.lanes, hidden), placeholder, placeholder)[0].float()
        # Each token is its own prompt, so that it is the last one.
        prompts = Injection(form, self.lanes, hidden.transpose(0, 1))
        with _some_padding(self._model.config.get_text_config()):
            return self._run(prompts, placeholder[:, None], placeholder[:1]).float()

    def _run(self, reached: Reached, tokens: Tensor, positions: Int64Array | Tensor | None, **given: Any) -> Tensor:
        # The logits of the model's forward over `tokens` [tokens] or [prompts, tokens], where `reached` stands for
        # its layers.
        cache = given.pop("cache", None)
        given = {"use_cache": False} | given
        if positions is not None:
            given["position_ids"] = torch.as_tensor(positions)[..., None, :].to(self.device)
        given = {name: value for name, value in given.items() if name in self._takes}
        if cache is not None:
            name = next((name for name in _CACHES if name in self._takes), None)
            if name is None:
                raise UnsupportedModelError("the model's forward takes no cache")
            given[name] = cache
        self._reached = reached
        try:
            with self._mode:
                out = self._model(input_ids=tokens.view(-1, tokens.shape[-1]).to(self.device), **given)
        finally:
            self._reached = _is_walked
        logits: Tensor = out.logits
        return logits

    def _at_layer(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._reached(index, hidden, args, kwargs)

    @cached_property
    def _manner(self) -> _Manner:
        # How the model calls its layers. Raises UnsupportedModelError.
        reasons: list[str] = []
        with torch.no_grad():
            for form in FORMS:
                try:
                    return self._try(form)
                except UnsupportedModelError as error:
                    reasons.insert(0, str(error))
                except torch.OutOfMemoryError:
                    raise
                except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
                    reasons.append(f"{type(error).__name__}: {brief(error)}")
        raise UnsupportedModelError(reasons[0])

    def _try(self, form: OutputForm) -> _Manner:
        trial, tokens = TrialForward(form), self._trial_tokens()
        logits = self._run(trial, tokens, torch.arange(TRIAL_TOKENS))
        if trial.reached != len(self.layers):
            raise UnsupportedModelError("the model's forward does not call all of its layers")
        pooled = logits.dim() == 2 and len(logits) == 1
        if not pooled and (logits.dim() != 3 or logits.shape[:2] != (1, TRIAL_TOKENS)):
            raise ValueError(f"the logits have the shape {list(logits.shape)}")
        first = self._first_position(trial.form, trial.lanes)
        return _Manner(trial.form, trial.lanes, logits.shape[-1], first, pooled)

    def _trial_tokens(self) -> Tensor:
        padding = getattr(self._model.config.get_text_config(decoder=True), "pad_token_id", None)
        return torch.as_tensor([token for token in range(TRIAL_TOKENS + 1) if token != padding][:TRIAL_TOKENS])

    def _first_position(self, form: OutputForm, lanes: Lanes) -> int:
        # The position that the model gives a prompt's first token: 0, or some above that of padding.
        def embedded(positions: Tensor | None) -> Tensor:
            recorder = CallRecorder(form, lanes, len(self.layers))
            with suppress(AllRecorded):
                self._run(recorder, self._trial_tokens(), positions)
            return recorder.recording.hidden

        by_itself = embedded(None)
        for first in range(MOST_FIRST_POSITION + 1):
            other = embedded(first + torch.arange(TRIAL_TOKENS))
            if torch.allclose(other, by_itself, rtol=0, atol=0, equal_nan=True):
                return first
        raise UnsupportedModelError("the model does not count positions from a prompt's first token")


def last_row(logits: Tensor) -> Tensor:
    """The logits of a prompt's last token, float32 [vocabulary], from the model's own forward over the prompt. That
    forward gives logits for some of the tokens; a classification head gives them for the last one alone."""
    return logits.flatten(0, -2)[-1].float()


@contextmanager
def _embedding(model: PreTrainedModel, embedded: tuple[Tensor, Tensor] | None) -> Iterator[None]:
    # In this context rows take the places of the embeddings of some tokens.
    if embedded is None:
        yield
        return
    at, rows = embedded

    def put(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        out = out.clone()
        out[0, at.to(out.device)] = rows.to(out.device, out.dtype)
        return out

    hook = model.get_input_embeddings().register_forward_hook(put)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _some_padding(config: Any) -> Iterator[None]:
    # In this context the model has a padding token: without one, it classifies one prompt at a time.
    before = getattr(config, "pad_token_id", None)
    config.pad_token_id = 0 if before is None else before
    try:
        yield
    finally:
        config.pad_token_id = before


def _is_walked(index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError("the model is being walked; call its layers through the walk")


def _parameters(model: PreTrainedModel, prefix: str) -> frozenset[str]:
    # The names of the arguments that a model's forward takes, or passes on to the module that holds its layers.
    module: nn.Module = model
    names: set[str] = set()
    for part in ("", *prefix.split(".")[:-2]):
        module = getattr(module, part) if part else module
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            continue
        taken = inspect.signature(module.forward).parameters.values()
        names |= {each.name for each in taken}
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken):
            break
    return frozenset(names)


# The arguments that a model's forward passes to its layers, recorded chunk by chunk.
#
# The same tensors (rotary tables, position ids) go to every layer, and live as long as the pack. Left where each
# chunk's forward put them, they lie scattered between its temporaries, and the allocator cannot use the gaps again:
# with small chunks that costs as much as the residual stream. So they are copied into one buffer each.
#
# Some models have later layers attend over the keys and values of an earlier one. Every layer gets those in a mapping.
# They are kept for the whole pack too.


LayerCall = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Recording:
    """One forward over some tokens: the arguments of its layers."""

    first: Tensor | None = None
    # The arguments of each layer, but for the residual stream.
    calls: list[LayerCall] = field(default_factory=list)

    @property
    def hidden(self) -> Tensor:
        """The residual stream before the first layer, [1, tokens, hidden]. Raises UnsupportedModelError."""
        if self.first is None:
            raise UnsupportedModelError("the model's forward does not reach its layers")
        return self.first


class SharedKeysValues(MutableMapping[Any, tuple[Tensor, Tensor]]):
    """K,V [1, kv heads, tokens, width] that layers leave for later ones, for some tokens of a pack.

    `whole` are those of all its tokens, by the layer's name for them; `start` is the first token of these.
    """

    def __init__(self, whole: dict[Any, tuple[Tensor, Tensor]], start: int, tokens: int, pack_tokens: int) -> None:
        self.whole = whole
        self._part = slice(start, start + tokens)
        self._tokens = (tokens, pack_tokens)

    def __getitem__(self, name: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.whole[name]
        return keys[:, :, self._part], values[:, :, self._part]

    def __setitem__(self, name: Any, both: tuple[Tensor, Tensor]) -> None:
        own, tokens = self._tokens
        if not all(isinstance(each, Tensor) and each.dim() == 4 and each.shape[2] == own for each in both):
            raise UnsupportedModelError("a layer hands more than its keys and values on to later layers")
        if name not in self.whole:
            keys, values = (each.new_empty(1, each.shape[1], tokens, each.shape[3]) for each in both)
            self.whole[name] = keys, values
        for place, each in zip(self.whole[name], both, strict=True):
            place[:, :, self._part] = each

    def __delitem__(self, name: Any) -> None:
        raise UnsupportedModelError("a layer takes back what it has handed on to later layers")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.whole)

    def __len__(self) -> int:
        return len(self.whole)


def lend_shared(calls: list[LayerCall], of_chunk: list[LayerCall], tokens: int) -> None:
    """Make it possible to call layers that attend over K,V of earlier ones by themselves, with `calls`: lend them K,V
    for this many tokens, which are not used. `of_chunk` are the calls of any chunk of the pack."""
    for mapping, shared in zip(_mappings(calls), _mappings(of_chunk), strict=True):
        if not mapping and isinstance(shared, SharedKeysValues):
            for name, (keys, values) in shared.whole.items():
                mapping[name] = tuple(
                    each.new_zeros(()).expand(1, each.shape[1], tokens, each.shape[3]) for each in (keys, values)
                )


def _mappings(calls: list[LayerCall]) -> list[MutableMapping[Any, Any]]:
    # The mappings that layers are called with, each once.
    given = [value for args, kwargs in calls for value in (*args, *kwargs.values())]
    return list({id(each): each for each in given if isinstance(each, MutableMapping)}.values())


class CallBuffers:
    """Buffers for the tensors of all chunks of a pack of `tokens` tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._buffers: dict[tuple[int, torch.dtype, int], Tensor] = {}
        self._filled: dict[tuple[int, torch.dtype, int], int] = {}
        self._shared: list[dict[Any, tuple[Tensor, Tensor]]] = []  # of each mapping that layers share
        self._begun = 0  # tokens of the chunks so far

    def take_over(self, calls: list[list[LayerCall]], at: Tensor) -> None:
        """Keep the K,V that layers have left for later ones, for the pack's tokens `at`, whose chunks had these
        calls."""
        for mapping in _mappings([call for chunk in calls[:1] for call in chunk]):
            if isinstance(mapping, SharedKeysValues):
                kept: dict[Any, tuple[Tensor, Tensor]] = {}
                self._shared.append(kept)
                for name in list(mapping.whole):  # one at a time: the old ones go
                    keys, values = mapping.whole.pop(name)
                    rows = at.to(keys.device)
                    kept[name] = keys[:, :, rows], values[:, :, rows]

    def keep(self, calls: list[LayerCall], chunk_tokens: int) -> list[LayerCall]:
        """The same calls with their tensors moved to the buffers. Tensors that layers share stay shared."""
        moved: dict[int, Tensor] = {}
        mappings: dict[int, SharedKeysValues] = {}
        start, self._begun = self._begun, self._begun + chunk_tokens

        def move(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in moved:
                    moved[id(value)] = self._move(value, len(moved), chunk_tokens)
                return moved[id(value)]
            if isinstance(value, tuple | list):
                return type(value)(move(part) for part in value)
            if isinstance(value, MutableMapping) and not value:  # for the K,V that layers will leave there
                if id(value) not in mappings:
                    if len(mappings) == len(self._shared):
                        self._shared.append({})
                    mappings[id(value)] = SharedKeysValues(
                        self._shared[len(mappings)], start, chunk_tokens, self._tokens
                    )
                return mappings[id(value)]
            if isinstance(value, dict):
                return {key: move(part) for key, part in value.items()}
            return value

        return [(move(args), {name: move(value) for name, value in kwargs.items()}) for args, kwargs in calls]

    def _move(self, tensor: Tensor, number: int, chunk_tokens: int) -> Tensor:
        per_token, rest = divmod(tensor.numel(), chunk_tokens)
        if rest or not per_token:
            return tensor  # not one entry for each token
        key = (number, tensor.dtype, per_token)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(per_token * self._tokens, dtype=tensor.dtype, device=tensor.device)
            self._filled[key] = 0
        start = self._filled[key]
        self._filled[key] = start + tensor.numel()
        return self._buffers[key][start : start + tensor.numel()].view(tensor.shape).copy_(tensor)


# Where a causal language model keeps its decoder layers.
#
# Families call that list `layers`, `h`, `blocks` or `layer`, and transformers' own look-up finds the module around
# it only in some of them.


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """The list of a model's decoder layers, and its place: attribute `name` of the module `owner`.

    The names of the layers' tensors begin with `prefix` in the model.
    """

    owner: nn.Module
    name: str
    prefix: str

    @property
    def layers(self) -> nn.ModuleList:
        found: nn.ModuleList = getattr(self.owner, self.name)
        return found

    def replace(self, layers: Sequence[nn.Module]) -> None:
        setattr(self.owner, self.name, nn.ModuleList(layers))


def decoder_layers(model: PreTrainedModel) -> DecoderLayers:
    """Return where `model` keeps its decoder layers; its weights may be on the meta device.

    That is the list of modules with as many members as the configuration has layers; of several such lists, the one
    with the most weights. Raises UnsupportedModelError if there is none.
    """
    counts = _layer_counts(model.config)
    names = {module: name for name, module in model.named_modules()}
    found: list[tuple[bool, int, DecoderLayers]] = []
    for part in (model.get_decoder(), model):
        if not isinstance(part, nn.Module) or part not in names:
            continue
        for owner, name in _lists_of_layers(part):
            members: nn.ModuleList = getattr(owner, name)
            place = DecoderLayers(owner, name, f"{names[members]}.")
            found.append((len(members) in counts, sum(each.numel() for each in members.parameters()), place))
        if any(as_configured for as_configured, _, _ in found):
            break  # the decoder's own come first: an image's encoder may be as deep, and larger
    if not found:
        raise UnsupportedModelError(
            f"{model.config.model_type} keeps its decoder layers where the walk does not find them"
        )
    return max(found, key=lambda each: each[:2])[2]


def embedding_device(model: PreTrainedModel) -> torch.device:
    """The device of a model's tokens: that of its embedding."""
    embedding = model.get_input_embeddings()
    if embedding is not None and packed_rows(embedding) is not None:
        return torch.device("cpu")
    weights = [] if embedding is None else list(embedding.parameters())
    device: torch.device = (weights or list(model.parameters()))[0].device
    return device


def _layer_counts(config: Any) -> set[int]:
    text = config.get_text_config(decoder=True)
    given = {key: value for key, value in text.to_dict().items() if key.endswith(("layer", "layers"))}
    given["num_hidden_layers"] = getattr(text, "num_hidden_layers", None)
    return {value for value in given.values() if isinstance(value, int) and value > 0}


def _lists_of_layers(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    # The lists in a module whose members have submodules, but for the lists inside such members.
    for name, part in module.named_children():
        if isinstance(part, nn.ModuleList) and len(part) and all(any(each.children()) for each in part):
            yield module, name
        else:
            yield from _lists_of_layers(part)

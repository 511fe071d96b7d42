"""The sizes of a model as its own forward shows them, on the meta device, where tensors have shapes and no numbers.

Configurations of families differ in names and in what they leave out; their modules do not lie. A few hundred tokens
go through the model as transformers builds it. What every layer allocates, multiplies, hands to attention and puts
into its cache is written down. No weight is read, and no memory is taken.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from prefillcli.models.completeness import quiet_transformers
from prefillcli.prefill.layer_calls import decoder_layers

TOKENS = 512  # of the forward: whole chunks of what scans in chunks
SCAN_OPERATIONS = 9
"""Operations of Mamba-1's scan for one number of the state and token, which are not products: 9 L D N in the count of
VMamba (arXiv 2401.10166, appendix), with L tokens, D channels and N states of each."""

_ATTENTION = "prefillcli-sizes"
_running: ContextVar[_Forward] = ContextVar("running_forward")  # each thread has its own


@dataclass(slots=True)
class LayerSizes:
    """What one layer does for one token: floating-point operations, and bytes in the model's dtype."""

    before: float = 0.0  # operations up to attention
    behind: float = 0.0  # and after it; all of a layer without attention
    scan: float = 0.0  # of a recurrence, beside those
    pair: float = 0.0  # of one query with one key, over all heads
    window: int | None = None  # most keys that a query sees, itself included
    attends: bool = False
    key_value: int = 0  # K,V of a token
    states: int = 0  # at the end of a path, whatever its length
    transient: int = 0  # what is alive at once while it computes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A model of decoder layers, by one token of its forward."""

    residual: int  # bytes of a token between two layers
    arguments: int  # bytes of what layers are called with beside it: positions, their encodings, K,V that layers share
    layers: tuple[LayerSizes, ...]
    head: float  # operations outside of the layers


class NoSizesError(Exception):
    """The model cannot be built, or not be run, without numbers. The message says why."""


_found: dict[tuple[str, str, torch.dtype], ModelSizes | str] = {}


def model_sizes(config: Any, dtype: torch.dtype) -> ModelSizes:
    """The sizes of the causal language model of a transformers text configuration. Raises NoSizesError."""
    name = type(config).__name__, str(config.to_json_string(use_diff=False)), dtype
    if name not in _found:
        _found[name] = _sizes(config, dtype)
    found = _found[name]
    if isinstance(found, str):
        raise NoSizesError(found)
    return found


def _sizes(config: Any, dtype: torch.dtype) -> ModelSizes | str:
    """The sizes, or why there are none."""
    AttentionInterface.register(_ATTENTION, _attend)
    AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)
    why = ""
    for attention in (_ATTENTION, "eager"):  # some families' attention is their own, or wants a mask
        try:
            with quiet_transformers(), torch.no_grad():
                with torch.device("meta"):
                    model = AutoModelForCausalLM.from_config(
                        copy.deepcopy(config), dtype=dtype, attn_implementation=attention
                    )
                model.config.pad_token_id = None  # looked for in what has no numbers
                return _Forward(model.eval()).run()
        except Exception as error:  # of any family's modules
            why = f"{type(error).__name__}: {error}"
    return why


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    _running.get().attend(query, key, value, kwargs.get("sliding_window"))
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


class _Forward:
    """One forward of a model, watched."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._layers = list(decoder_layers(model).layers)
        self._sizes = [LayerSizes() for _ in self._layers]
        self._at: LayerSizes | None = None  # of the layer that is computed
        self._residual = 0
        self._arguments: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}  # of a layer, by its number
        self._skips = True
        self._head = 0.0
        self._live = _LiveBytes(self._count)
        self._base = 0

    def run(self) -> ModelSizes:
        """Watch it. Whatever a family's modules raise goes through."""
        _running.set(self)
        first: dict[str, int] = {}
        same = [
            first.setdefault(_description(layer, at, self._model.config), at) for at, layer in enumerate(self._layers)
        ]
        for at, (layer, sizes) in enumerate(zip(self._layers, self._sizes, strict=True)):
            layer.register_forward_pre_hook(self._begin(sizes), with_kwargs=True)
            layer.forward = self._once(same[at], layer.forward)
            layer.register_forward_hook(self._end)
        for module in self._model.modules():
            if type(module).__name__.endswith("Experts"):
                module.forward = self._experts(module)  # which tokens go where needs numbers
        with self._live:
            out = self._model(input_ids=torch.zeros(1, TOKENS, dtype=torch.long, device="meta"), use_cache=True)
        self._read_cache(out)
        for layer, sizes in zip(self._layers, self._sizes, strict=True):
            sizes.scan += _scan_operations(layer)
            if not sizes.attends:
                sizes.before, sizes.behind = 0.0, sizes.before
        arguments = sum(tensor.nbytes for tensor in self._arguments.values()) // TOKENS
        return ModelSizes(self._residual, arguments, tuple(self._sizes[at] for at in same), self._head)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> None:
        """A layer attends."""
        if self._at is not None:
            self._at.attends = True
            self._at.pair += 2.0 * query.shape[1] * (query.shape[-1] + value.shape[-1])
            self._at.window = window
            self._at.key_value = max(self._at.key_value, (key.nbytes + value.nbytes) // TOKENS)

    def _once(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward; of layers with the same description only the first is computed."""

        def once(*args: Any, **kwargs: Any) -> Any:
            if number not in self._outputs or not self._skips:
                self._outputs[number] = forward(*args, **kwargs)
            return self._outputs[number]

        return once

    def _begin(self, sizes: LayerSizes) -> Callable[..., None]:
        def begin(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not self._skips:
                return
            hidden, *others = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self._residual = max(self._residual, hidden.nbytes // TOKENS)
            for each in others:
                if TOKENS in each.shape[:2] and each.shape[2:3] != (TOKENS,):  # masks have two such sides
                    self._arguments[id(each)] = each
            for each in _left_for_later((*args, *kwargs.values())):
                self._arguments[id(each)] = each
            self._at, self._base = sizes, self._live.now
            self._live.most = self._live.now

        return begin

    def _end(self, *_: Any) -> None:
        if self._at is not None:
            self._at.transient = max(self._at.transient, (self._live.most - self._base) // TOKENS)
        self._at = None

    def _count(self, operations: float, pairs: bool = False) -> None:
        """A product, of all `pairs` of two tokens or not."""
        if self._at is None:
            self._head += operations / TOKENS
            return
        if pairs:
            self._at.attends = True
            self._at.pair += operations / TOKENS**2
        elif self._at.attends:
            self._at.behind += operations / TOKENS
        else:
            self._at.before += operations / TOKENS

    def _experts(self, module: nn.Module) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            chosen = [
                each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and not each.is_floating_point()
            ]
            rows = chosen[0].numel() if chosen else hidden.numel() // hidden.shape[-1]
            matrices = [each for each in module.parameters() if each.dim() == 3]
            made = [hidden.new_empty(rows, sum(each.shape[1:])) for each in matrices]  # alive until it returns
            self._count(sum(2.0 * rows * each[0].numel() for each in matrices))
            return torch.zeros_like(hidden) if made else hidden

        return forward

    def _read_cache(self, out: Any) -> None:
        """What the forward leaves for the tokens behind: K,V of tokens, and states."""
        kept = [value for name, value in dict(out).items() if name not in ("logits", "loss", "hidden_states")]
        rest = 0
        for cache in kept:
            layers = list(getattr(cache, "layers", ()))
            for layer, sizes in zip(layers, self._sizes, strict=False):
                both = [getattr(layer, name, None) for name in ("keys", "values")]
                pair = [each for each in both if isinstance(each, Tensor) and each.dim() > 1]
                sizes.key_value = max(sizes.key_value, sum(each.nbytes // each.shape[-2] for each in pair))
                for each in _tensors(layer):
                    if any(each is one for one in pair):
                        continue
                    if TOKENS in each.shape:  # what selects keys
                        sizes.key_value += each.nbytes // TOKENS
                    else:
                        sizes.states += each.nbytes
            rest += _rest_bytes(cache)
        for layer, sizes in zip(self._layers, self._sizes, strict=True):
            own = [vars(module) for module in layer.modules()]
            states = [each for part in own for name, each in part.items() if "state" in name]
            sizes.states += sum(each.nbytes for each in states if isinstance(each, Tensor))
        if rest:  # a family keeps them in its own way: what all layers keep is divided between them
            self._outputs, self._skips = {}, False
            rest = sum(_rest_bytes(cache) for cache in self._short_caches())
            for sizes in self._sizes:
                sizes.states += rest // len(self._sizes)

    def _short_caches(self) -> list[Any]:
        """What a forward of a few tokens through all layers leaves."""
        out = self._model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), use_cache=True)
        return [value for name, value in dict(out).items() if name not in ("logits", "loss", "hidden_states")]


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its base has no types
    """Bytes of the tensors that were made and are alive; `count` is told the operations of every product."""

    def __init__(self, count: Callable[[float, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = count
        self._tensors: dict[int, int] = {}  # of each storage
        self.now = 0
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            batched = [
                each.shape[1:] for each in tree_leaves((args, out)) if isinstance(each, Tensor) and each.dim() == 3
            ]
            pairs = any(list(shape) == [TOKENS, TOKENS] for shape in batched)
            self._tell(float(formula(*args, **kwargs, out_val=out)), pairs)
        if not func.is_view:
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    self._add(tensor)
        return out

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._tensors:
            return
        self._tensors[key] = size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._tensors.pop(key, 0)


def _scan_operations(layer: nn.Module) -> float:
    """Operations of a layer's scans that are no products: those of Mamba-1, whose states each have a decay."""
    every = [parameter for name, parameter in layer.named_parameters() if name.endswith("A_log")]
    return float(sum(SCAN_OPERATIONS * each.numel() for each in every if each.dim() > 1 and each.shape[-1] > 1))


def _description(layer: nn.Module, number: int, config: Any) -> str:
    """What tells layers apart that do not compute the same: their modules, sizes and settings."""
    kinds = getattr(config, "layer_types", None) or ()
    said = [repr(kinds[number]) if number < len(kinds) else ""]
    for name, module in layer.named_modules():
        own = [(key, each) for key, each in vars(module).items() if isinstance(each, bool | int | float | str)]
        own = sorted((key, each) for key, each in own if "idx" not in key and key != "layer_id")
        said.append(f"{name} {type(module).__name__} {own}")
    said += [f"{name} {tuple(each.shape)}" for name, each in layer.named_parameters()]
    return "\n".join(said)


def _left_for_later(arguments: Sequence[Any]) -> Iterator[Tensor]:
    """K,V that earlier layers have left, in a mapping that every layer is called with."""
    for mapping in arguments:
        if isinstance(mapping, MutableMapping):
            yield from _tensors(list(mapping.values()))


def _rest_bytes(cache: Any) -> int:
    """Bytes of what a cache keeps outside of its `layers`."""
    own = vars(cache) if getattr(cache, "layers", None) else {"all": cache}
    return sum(each.nbytes for each in _tensors({name: each for name, each in own.items() if name != "layers"}))


def _tensors(thing: Any) -> Iterator[Tensor]:
    """All tensors of floating-point numbers in an object's attributes, lists and dictionaries."""
    if isinstance(thing, Tensor):
        if thing.is_floating_point():
            yield thing
    elif isinstance(thing, dict):
        for each in thing.values():
            yield from _tensors(each)
    elif isinstance(thing, list | tuple):
        for each in thing:
            yield from _tensors(each)
    elif hasattr(thing, "__dict__"):
        yield from _tensors({k: v for k, v in vars(thing).items() if isinstance(v, Tensor | dict | list | tuple)})

"""The sizes of a model, measured on its own forward on the meta device, where tensors have shapes and no numbers.

Configurations of families differ in names and in what they leave out; their modules do not lie. A few hundred tokens
go through the model as transformers builds it. Everything that a layer allocates, multiplies, passes to attention and
puts into its cache is recorded. No weight is read, and no memory is taken."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from prefillcli.errors import ResourceError
from prefillcli.images.image import ImageTraits
from prefillcli.models.completeness import quiet_transformers
from prefillcli.models.shape import FLOAT32_ROTARY, VERIFIED, Shape, usual_settings
from prefillcli.plan.pack import Limits
from prefillcli.runtime.memory import available_memory
from prefillcli.walk.continuations import whole_steps
from prefillcli.walk.fusion import copy_pays
from prefillcli.walk.model_ends import decoder_layers, logit_bytes
from prefillcli.walk.own_cache import JOINED_PATHS, SCORE_BYTES
from prefillcli.walk.recurrent import STATE_BYTES

TOKENS = 512  # of the forward: whole chunks, for layers that scan in chunks
# Operations of Mamba-1's scan for one number of the state and token, which are not products: 9 L D N in the count of
# VMamba (arXiv 2401.10166, appendix), with L tokens, D channels and N states of each.
SCAN_OPERATIONS = 9

_ATTENTION = "prefillcli-sizes"
_running: ContextVar[_Forward] = ContextVar("running_forward")  # each thread has its own


@dataclass(slots=True)
class LayerSizes:
    """The cost of one layer for one token: floating-point operations, and bytes in the model's dtype."""

    before: float = 0.0  # operations up to attention
    behind: float = 0.0  # and after it; all of a layer without attention
    scan: float = 0.0  # of a recurrence, beside those
    pair: float = 0.0  # of one query with one key, over all heads
    window: int | None = None  # most keys that a query sees, itself included
    attends: bool = False
    key_value: int = 0  # K,V of a token
    states: int = 0  # at the end of a path, whatever its length
    transient: int = 0  # the bytes alive at once while it computes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The cost of a model of decoder layers for one token of its forward."""

    residual: int  # bytes of a token between two layers
    arguments: int  # bytes of the layers' other arguments: positions, their encodings, K,V that layers share
    layers: tuple[LayerSizes, ...]
    head: float  # operations outside of the layers


class NoSizesError(Exception):
    """The model cannot be built or run without numbers. The message gives the reason."""


_found: dict[tuple[str, str, torch.dtype], ModelSizes | str] = {}


def model_sizes(config: Any, dtype: torch.dtype) -> ModelSizes:
    """Return the sizes of the causal language model of a transformers text configuration. Raises NoSizesError."""
    name = type(config).__name__, str(config.to_json_string(use_diff=False)), dtype
    if name not in _found:
        _found[name] = _sizes(config, dtype)
    found = _found[name]
    if isinstance(found, str):
        raise NoSizesError(found)
    return found


def _sizes(config: Any, dtype: torch.dtype) -> ModelSizes | str:
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
                model.config.pad_token_id = None  # looked for in tensors without numbers
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
        # Watch it. Whatever a family's modules raise goes through.
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
                module.forward = self._experts(module)  # the routing of tokens needs numbers
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
        if self._at is not None:
            self._at.attends = True
            self._at.pair += 2.0 * query.shape[1] * (query.shape[-1] + value.shape[-1])
            self._at.window = window
            self._at.key_value = max(self._at.key_value, (key.nbytes + value.nbytes) // TOKENS)

    def _once(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        # A layer's forward; of layers with the same description only the first is computed.
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
        # A product, of all `pairs` of two tokens or not.
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
        # The bytes that the forward leaves for later tokens: K,V of tokens, and states.
        rest = 0
        for cache in _caches(out):
            layers = list(getattr(cache, "layers", ()))
            for layer, sizes in zip(layers, self._sizes, strict=False):
                both = [getattr(layer, name, None) for name in ("keys", "values")]
                pair = [each for each in both if isinstance(each, Tensor) and each.dim() > 1]
                sizes.key_value = max(sizes.key_value, sum(each.nbytes // each.shape[-2] for each in pair))
                for each in _tensors(layer):
                    if any(each is one for one in pair):
                        continue
                    if TOKENS in each.shape:  # tensors that select keys, one for each token
                        sizes.key_value += each.nbytes // TOKENS
                    else:
                        sizes.states += each.nbytes
            rest += _rest_bytes(cache)
        for layer, sizes in zip(self._layers, self._sizes, strict=True):
            own = [vars(module) for module in layer.modules()]
            states = [each for part in own for name, each in part.items() if "state" in name]
            sizes.states += sum(each.nbytes for each in states if isinstance(each, Tensor))
        if rest:  # a family keeps them in its own way: the total is divided between the layers
            self._outputs, self._skips = {}, False
            # A few tokens go through all layers once more: their caches are not longer for more tokens.
            out = self._model(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"), use_cache=True)
            rest = sum(_rest_bytes(cache) for cache in _caches(out))
            for sizes in self._sizes:
                sizes.states += rest // len(self._sizes)


def _caches(out: Any) -> list[Any]:
    return [value for name, value in dict(out).items() if name not in ("logits", "loss", "hidden_states")]


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # its base has no types
    """Bytes of the new tensors that are alive; `count` gets the operations of every product."""

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
    # Operations of a layer's scans that are not products: those of Mamba-1, whose states each have a decay.
    every = [parameter for name, parameter in layer.named_parameters() if name.endswith("A_log")]
    return float(sum(SCAN_OPERATIONS * each.numel() for each in every if each.dim() > 1 and each.shape[-1] > 1))


def _description(layer: nn.Module, number: int, config: Any) -> str:
    # The differences between layers that do not compute the same: modules, sizes and settings.
    kinds = getattr(config, "layer_types", None) or ()
    said = [repr(kinds[number]) if number < len(kinds) else ""]
    for name, module in layer.named_modules():
        own = [(key, each) for key, each in vars(module).items() if isinstance(each, bool | int | float | str)]
        own = sorted((key, each) for key, each in own if "idx" not in key and key != "layer_id")
        said.append(f"{name} {type(module).__name__} {own}")
    said += [f"{name} {tuple(each.shape)}" for name, each in layer.named_parameters()]
    return "\n".join(said)


def _left_for_later(arguments: Sequence[Any]) -> Iterator[Tensor]:
    # K,V that earlier layers have left, in a mapping that every layer is called with.
    for mapping in arguments:
        if isinstance(mapping, MutableMapping):
            yield from _tensors(list(mapping.values()))


def _rest_bytes(cache: Any) -> int:
    # Bytes that a cache keeps outside of its `layers`.
    own = vars(cache) if getattr(cache, "layers", None) else {"all": cache}
    return sum(each.nbytes for each in _tensors({name: each for name, each in own.items() if name != "layers"}))


def _tensors(thing: Any) -> Iterator[Tensor]:
    # All tensors of floating-point numbers in an object's attributes, lists and dictionaries.
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


#: A pack this large keeps every core or tensor core busy; a larger one only loses more work when it is killed. On a
#: slow device packs are smaller (`plan_packs`).
PACK_TOKENS = {"cpu": 65_536, "cuda": 262_144, "mps": 65_536}
CHUNK_TOKENS = {"cpu": 2048, "cuda": 8192, "mps": 2048}
MIN_CHUNK_TOKENS = 64
CHUNK_SHARE = 1 / 8  # of the budget, at most, for a layer's tensors for one chunk
FREE_SHARE = 0.7  # of the free memory, taken where no budget is given
VOTES_SHARE = 0.25  # of a draft's budget, for the importance of tokens
POSITION_BYTES = 8
HELD_SHARE = 0.5  # of the budget, at most, for K,V kept from pack to pack
#: Copies of one layer's K,V that a token takes on the device while its K,V are in host memory: the ones that are used,
#: and on a GPU those that leave, those that were fetched and those that come.
HELD_COPIES = {"cpu": 1, "cuda": 4, "mps": 4}
OPEN_BRANCHES = 8  # nodes on a path whose states wait for later nodes
ACTIVATION_COPIES = 2  # of the output of a layer's modules: the walk gathers rows, and puts them back


@dataclass(frozen=True, slots=True)
class MemoryLaw:
    """Bytes of a walk over a model with these numbers, in its dtype."""

    residual: int  # a token's row of the residual stream
    key_value: int  # a token's K,V in one layer
    rotary: int  # a token's position, and its encoding
    layers: int
    transient: int  # a layer's tensors for one token of a chunk
    vocabulary: int
    weights: int = 0  # of a layer's linear parts
    outputs: int = 0  # numbers that these parts compute for one token
    size: int = 4  # bytes of a number
    host: int = 0  # a token's bytes in host memory, where the residual stream is kept there
    all_key_values: int = 0  # a token's K,V in all layers
    states: int = 0  # of all layers at the end of a node
    layer_states: int = 0  # of the layer with most
    scores: int = 0  # of attention that keeps them

    @property
    def token(self) -> int:
        """Bytes per token that last as long as the pack."""
        return self.residual + self.key_value + self.rotary

    def tokens_within(self, operations: float, *, least: int) -> int:
        """Return the number of tokens for which this many operations of products suffice, at least `least`: a power of
        two, which a little more or less speed does not change. Attention is not counted."""
        tokens = operations / max(2 * self.weights * self.layers, 1)
        return max(least, 1 << max(int(tokens), 1).bit_length() - 1)

    def with_hidden_on_host(self) -> MemoryLaw:
        """Return the law of a device that holds only the residual rows of a few chunks; the host holds them all."""
        # Rows of a chunk exist three times: read ahead, computed, written back.
        return replace(self, residual=0, host=self.residual, transient=self.transient + 3 * self.residual)

    def with_images(self, traits: ImageTraits) -> MemoryLaw:
        """Return the law of prompts that are features of images at worst: rows that later layers add to them wait for
        these layers, and positions have several axes."""
        positions = (traits.axes - 1) * POSITION_BYTES
        return replace(self, rotary=self.rotary + positions + traits.added_layers * self.residual)

    def with_own_cache(self) -> MemoryLaw:
        """Return the law of a model that is walked with its own attention and cache.

        A token's K,V are in the parts of its path, in the joined paths, in the path that a call makes longer, and once
        more where fewer heads of K,V are repeated for those of the queries.
        """
        return replace(self, key_value=(JOINED_PATHS + 3) * self.key_value, scores=2 * SCORE_BYTES)

    def constant(self, chunk_tokens: int, device: torch.device) -> int:
        """Return the number of bytes per pack whatever its size: a chunk's activations, logits, and on a CPU a layer's
        weights laid out."""
        copied = device.type == "cpu" and copy_pays(self.weights, self.outputs, chunk_tokens)
        size = self.transient * chunk_tokens + 3 * logit_bytes(device, self.vocabulary)
        batched = min(STATE_BYTES, chunk_tokens * self.layer_states)
        size += OPEN_BRANCHES * self.layer_states + 2 * batched
        return size + self.scores + (self.weights * self.size if copied else 0)


def memory_law(config: Any, dtype: torch.dtype, classes: int | None = None) -> MemoryLaw:
    """Return the law for a transformers text configuration: by its settings for verified families, whose names are
    known; else by the model's own forward. Where that does not run without numbers, the settings are read as those of
    usual attention. With a classification head, a token has as many logits as there are `classes`. Raises NoCostModel
    if the settings lack even the width of the model."""
    law = _vocabulary_law(config, dtype)
    return law if classes is None else replace(law, vocabulary=classes)


def _vocabulary_law(config: Any, dtype: torch.dtype) -> MemoryLaw:
    if config.model_type not in VERIFIED:
        try:
            return _law_of(model_sizes(config, dtype), config, dtype)
        except NoSizesError:
            config = usual_settings(config)
    shape, size = Shape(config), dtype.itemsize
    # Normed rows in float32 and rows in dtype; q, k, v before and after rotation and the output twice; gate, up,
    # their product and its activation.
    rows = shape.hidden * (3 * 4 + 3 * size)
    rotary = torch.float32.itemsize if config.model_type in FLOAT32_ROTARY else size
    attention = 4 * (shape.heads + shape.kv_heads) * shape.head_width
    return MemoryLaw(
        residual=shape.hidden * size,
        key_value=2 * shape.kv_heads * shape.head_width * size,
        rotary=2 * shape.head_width * shape.ropes * rotary + POSITION_BYTES,
        layers=shape.layers,
        transient=rows + size * (attention + 4 * shape.inner),
        vocabulary=shape.vocabulary,
        weights=shape.hidden * (2 * shape.head_width * (shape.heads + shape.kv_heads) + 3 * shape.inner),
        outputs=shape.head_width * (shape.heads + 2 * shape.kv_heads) + 2 * (shape.hidden + shape.inner),
        size=size,
        all_key_values=2 * shape.kv_heads * shape.head_width * size * shape.layers,
    )


def _law_of(sizes: ModelSizes, config: Any, dtype: torch.dtype) -> MemoryLaw:
    largest = max(sizes.layers, key=lambda layer: layer.before + layer.behind)
    # A layer that attends without a cache of transformers keeps at most a row of the residual stream for K, and one
    # for V.
    key_values = [layer.key_value or 2 * sizes.residual * layer.attends for layer in sizes.layers]
    return MemoryLaw(
        residual=sizes.residual,
        key_value=max(key_values),
        rotary=sizes.arguments + POSITION_BYTES,
        layers=len(sizes.layers),
        transient=ACTIVATION_COPIES * max(layer.transient for layer in sizes.layers),
        vocabulary=Shape(config).vocabulary,
        weights=int(largest.before + largest.behind) // 2,
        outputs=max(layer.transient for layer in sizes.layers) // dtype.itemsize,
        size=dtype.itemsize,
        all_key_values=sum(key_values),
        states=sum(layer.states for layer in sizes.layers),
        layer_states=max(layer.states for layer in sizes.layers),
    )


def choose_chunk(law: MemoryLaw, budget: int, device: torch.device) -> int:
    """Choose the number of tokens of one call of a layer: a number that is fast on the device, halved until it takes a
    small part of the budget."""
    tokens = CHUNK_TOKENS[device.type]
    while tokens > MIN_CHUNK_TOKENS and law.transient * tokens > budget * CHUNK_SHARE:
        tokens //= 2
    return tokens


def pack_limits(
    law: MemoryLaw,
    *,
    budget: int,
    device: torch.device,
    chunk_tokens: int,
    pack_tokens: int | None = None,
    prefix_kv: str = "auto",
) -> Limits:
    """Return the limits of one pack in `budget` bytes. Raises ResourceError if not even a small prompt fits."""
    if prefix_kv not in ("auto", "discard", "keep", "offload"):
        raise ValueError(f"{prefix_kv!r} is not a prefix_kv: use auto, discard, keep or offload")
    room = budget - law.constant(chunk_tokens, device)
    most = room // law.token
    if law.host:
        most = min(most, int(available_memory(torch.device("cpu")) * FREE_SHARE) // law.host)
    if most < 16:
        need = law.constant(chunk_tokens, device) + 16 * law.token
        smaller = " or lower chunk_tokens" if law.transient * chunk_tokens > need / 2 else ""
        raise ResourceError(
            f"a memory budget of {budget / 2**20:,.0f} MiB is too small: this model needs {need / 2**20:,.0f} MiB "
            f"with chunk_tokens {chunk_tokens}; raise --memory{smaller}"
        )
    all_layers = max(law.all_key_values, 1)
    in_place = prefix_kv in ("auto", "keep")
    held = 0 if prefix_kv == "discard" else int(room * HELD_SHARE) // all_layers
    if prefix_kv == "offload":
        held = available_memory(torch.device("cpu")) // 2 // all_layers
    return Limits(
        tokens=min(pack_tokens or PACK_TOKENS[device.type], most),
        max_tokens=most,
        held_tokens=held,
        held_cost=(all_layers if in_place else law.key_value * HELD_COPIES[device.type]) / law.token,
        whole_nodes=law.states > 0,
        node_tokens=math.ceil(law.states / all_layers),
    )


def draft_limits(
    law: MemoryLaw, *, budget: int, device: torch.device, chunk_tokens: int, queries: int, all_layers: bool
) -> Limits:
    """Return the limits of one pack of a draft that is walked for the importance of tokens, with `queries` for each
    prompt.

    With `all_layers` the K,V of every layer are kept until tokens are decoded. Importance takes a float32 for each
    token of each prompt and query. Nothing is held between packs. Raises ResourceError if nothing fits.
    """
    room = budget - law.constant(chunk_tokens, device)
    votes = int(room * VOTES_SHARE) // (4 * queries)
    token = law.token + (law.all_key_values - law.key_value if all_layers else 0)
    most = (room - 4 * queries * max(votes, 0)) // token
    if most < 16 or votes < 16:
        raise ResourceError(
            f"a memory budget of {budget / 2**20:,.0f} MiB is too small for the small model; raise --memory"
        )
    return Limits(tokens=min(PACK_TOKENS[device.type], most), max_tokens=most, read_tokens=votes)


# The part of a budget for texts after prompts: K,V of all layers, while prompts are scored and while texts are
# written.
#
# A pack whose K,V are kept takes those of all layers beside the residual stream: on a CUDA device in host memory, else
# in the budget itself. When it is scored, the residual stream is gone, and texts take its place.


# The prompts after which texts are written: all, or some by their scores. Later: the K,V kept of a pack cannot be
# used, because the wanted prompts are known only after other packs, or because prompts are not read to the end
# unchanged.
TextsOf = Literal["all", "some", "later"]

LEAST_KEPT = 16  # tokens of a pack; less is nothing
HELD_BESIDE_KEPT = 1 / 8  # of the budget, at least, for K,V held from pack to pack beside a kept pack
PINNED_ROUNDING = 2  # torch rounds the size of pinned memory up to a power of two
LEAVING_LAYERS = 2  # whose K,V are on a CUDA device at a time: of the one that is computed, and a copy that leaves
SOME_SHARE = 0.1  # of the prompts get texts, where only their scores decide
PACK_OVERHEAD = 1 / 8  # the cost of a pack beside its tokens, in chunks


@dataclass(frozen=True, slots=True)
class KeepOrAgain:
    """The decision whether K,V survive scoring or wanted prompts are read again, and its reason."""

    kept: bool
    reason: str


def limits_with_texts(
    limits: Limits,
    law: MemoryLaw,
    *,
    room: int,
    device: torch.device,
    text_tokens: int,
    offloaded: bool = False,
    share: float = 1.0,
) -> Limits:
    """Return limits with room for texts of `text_tokens` each, in `room` bytes: the budget less the fixed cost of
    packs of any size. K,V that are held from pack to pack are in it, or `offloaded`. `share` is the part of the free
    host memory that may be used, if K,V leave a device. `kept_tokens` is 0 where not even a small prompt fits with a
    text."""
    held_here = 0 if offloaded else law.all_key_values
    on_host = device.type == "cuda"
    kept_token = law.token - law.key_value + (LEAVING_LAYERS * law.key_value if on_host else law.all_key_values)
    least, most = int(room * HELD_BESIDE_KEPT), limits.held_tokens * held_here
    held = min(most, max(least, room - limits.tokens * kept_token))
    text_token = max(law.all_key_values + law.key_value, law.residual)
    kept, written = (room - held) // kept_token, (room - held) // text_token
    if on_host:
        free = int(available_memory(torch.device("cpu")) * FREE_SHARE * share)
        free -= limits.held_tokens * law.all_key_values * offloaded + law.host * limits.max_tokens
        kept = min(kept, free // (PINNED_ROUNDING * max(law.all_key_values, 1)))
    kept_end = law.states / text_token
    row_tokens = replace(limits, kept_end=kept_end).row_tokens
    kept = int(min(kept, written - whole_steps(text_tokens) - row_tokens))
    if kept < LEAST_KEPT:
        return limits
    return replace(
        limits,
        kept_tokens=kept,
        kept_held_tokens=held // held_here if held_here else limits.held_tokens,
        kept_end=kept_end,
        written_tokens=written,
    )


def keep_or_again(limits: Limits, *, chunk_tokens: int, least_tokens: int, texts_of: TextsOf) -> KeepOrAgain:
    """Return whether packs are made so that they can be kept.

    A pack costs its tokens and `PACK_OVERHEAD`. A pack of less than `least_tokens` costs as much as one of that many,
    because it waits for weights. Scoring all prompts in packs that can be kept has one cost. The other is scoring them
    in packs of the usual size, and reading the wanted ones (all, or `SOME_SHARE`) again in small packs. Packs are kept
    if the first is no larger.
    """
    kept, usual = limits.kept_tokens, limits.tokens
    if not kept:
        return KeepOrAgain(False, "K,V of all layers do not fit for any prompt with a text: no text is written")
    if texts_of == "later":
        return KeepOrAgain(False, "the prompts that get a text are known only when others are scored")
    if kept >= usual:
        return KeepOrAgain(True, f"K,V of all layers fit for packs of {usual:,} tokens")

    def cost(tokens: int) -> float:
        return max(tokens, least_tokens) / tokens + PACK_OVERHEAD * chunk_tokens / tokens

    small, large = cost(kept), cost(usual)
    again = small * (1.0 if texts_of == "all" else SOME_SHARE)
    if small <= large + again:
        return KeepOrAgain(True, f"packs are cut to {kept:,} tokens, not {usual:,}, so that K,V of all layers fit")
    return KeepOrAgain(
        False,
        f"K,V of all layers fit for packs of {kept:,} tokens: scoring all prompts in such packs takes about "
        f"{small / large:.2f} times as long as in packs of {usual:,}; reading the wanted ones again takes less",
    )

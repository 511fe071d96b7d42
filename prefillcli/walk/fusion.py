"""The layers of a model in fewer passes over memory.

What stands between products is one pass each: a norm, with the residual addition before it, a rotary encoding of
queries and keys, an activation that is multiplied with other numbers. On CPUs `layer_passes.cpp` computes them, on
CUDA Triton's kernels (`triton_passes.py`).

On CPUs a product is faster with weights in the layout that oneDNN computes in, and with the weights of all linear
layers that read the same rows. The layouts are made for a layer's turn and last as long, so they take memory for one
layer. Without a C++ compiler, products apply activations themselves.

The modules stay unchanged: during its turn a module is called through another function, which computes the same. A
kind of module is called so only after one of its class, or a small copy of it, has agreed with its own forward.
Modules with hooks are left alone. Results differ from those of the modules in rounding alone: numbers are not rounded
to the dtype in the middle of a pass.
"""

from __future__ import annotations

import copy
import ctypes
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from prefillcli.errors import UsageError, brief
from prefillcli.walk import attention
from prefillcli.walk.attention import ROW_STEP, compiled_library
from prefillcli.walk.forest import leave_untraced

LEAST_TOKENS = 512  # of a chunk: with fewer, making the layout takes longer than it saves
COPY_SHARE = 3  # numbers of weights at most, for each output of a linear layer and token of a chunk
PIECE_BYTES = 16 << 20  # of what an MLP computes between two products: more leaves the cache, or is mapped each time
TOLERANCE = 1e-5  # of the largest number, in float32, between a fused module and its own forward

_DTYPES = (torch.bfloat16, torch.float32)
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
#: Linear layers of one module that read the same rows.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: The activations that a product can apply, as (attribute, algorithm) of the operator.
_ACTIVATIONS: dict[str, tuple[str, str]] = {
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
    "GELUTanh": ("gelu", "tanh"),
    "GELUActivation": ("gelu", "none"),
}
#: The activations of the compiled pass, by class, as in the source.
_PASS_ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "GELUTanh": 1}

Forward = Callable[..., Any]
# A context that makes a layer faster during its turn, for chunks of this many tokens.
Preparation = Callable[[nn.Module, int], AbstractContextManager[None]]
# What some linear layers compute of rows [1, tokens, inputs]: of each [1, tokens, outputs], which may be views.
Product = Callable[[Tensor], Sequence[Tensor]]
# Gives the product of linear layers that read the same rows, for chunks of this many tokens, instead of products in
# the model's dtype. None: it does not take them.
Products = Callable[[Sequence[nn.Linear], int], Product | None]


def copy_pays(weights: int, outputs: int, chunk_tokens: int) -> bool:
    """Return whether a layer's weights are copied into another layout for chunks of this many tokens.

    `weights` counts the numbers in its linear layers, `outputs` those that they compute for one token. The copy is
    then at most about as large as the layer's outputs for a chunk.
    """
    return chunk_tokens >= LEAST_TOKENS and weights <= COPY_SHARE * outputs * chunk_tokens


@contextmanager
def fused(
    layer: nn.Module, chunk_tokens: int, *, always: bool = False, products: Products | None = None
) -> Iterator[None]:
    """In this context the parts of `layer` that can be fused are, if that pays for chunks of `chunk_tokens` tokens.

    With `always` they are fused for other chunks too, with the weights in their own layout, and each linear layer has
    its own product. `products` are asked first, for each group of linear layers that read the same rows. On CUDA
    linear layers stay as they are.
    """
    device = next((each.device for each in layer.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        with passed(layer, device):
            yield
        return
    linear = [module for module in layer.modules() if _fits(module)]
    weights, outputs = (sum(numbers) for numbers in zip(*map(_sizes, linear), strict=True)) if linear else (0, 0)
    pays = copy_pays(weights, outputs, chunk_tokens)
    if not linear or not (pays or always or products):
        yield
        return
    with ExitStack() as stack:
        computed = _Computed({}, {})
        for group in groups(layer, linear):
            for some, product in computed.add(group, chunk_tokens, pays=pays, always=always, products=products):
                for each, forward in zip(some, parts_of(product, len(some)), strict=True):
                    stack.enter_context(called_through(each, forward))
        for module, forward in list(_fused_modules(layer, computed, compiled_passes())):
            stack.enter_context(called_through(module, forward))
        yield


@contextmanager
def passed(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """In this context what stands between the products of a `layer` on a CUDA `device` is one pass each, where Triton
    is there and right. Its linear layers, whatever they are, are called."""
    passes = triton_passes(device)
    with ExitStack() as stack:
        for module, forward in [] if passes is None else list(_fused_modules(layer, _called(layer), passes)):
            stack.enter_context(called_through(module, forward))
        yield


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    return linear.weight.numel(), linear.out_features


def _fits(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or not _is_bare(module):
        return False
    if type(module.weight) is not nn.Parameter:  # packed numbers
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype in _DTYPES


def _is_bare(module: nn.Module) -> bool:
    # Whether nothing stands between a module's callers and its class: a hook, or another forward.
    return "forward" not in vars(module) and not module._forward_hooks and not module._forward_pre_hooks


@contextmanager
def called_through(module: nn.Module, forward: Forward) -> Iterator[None]:
    """Redirect calls of `module` to `forward`. A module whose calls are redirected already is left alone."""
    if "forward" in vars(module):
        yield
        return
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


# Products.


def groups(layer: nn.Module, linear: Sequence[nn.Linear], *, fused: bool = True) -> Iterator[list[nn.Linear]]:
    """All of the linear layers, those together that read the same rows; of an MLP, if it is to be `fused`, where one
    compiled pass takes what they compute."""
    left = {id(each): each for each in linear}
    for module in layer.modules():
        for names in _TOGETHER:
            some = [left[id(part)] for name in names if id(part := getattr(module, name, None)) in left]
            kinds = {(each.in_features, each.weight.dtype, each.bias is None) for each in some}
            if (
                len(some) == len(names)
                and len(kinds) == 1
                and (names[0] == "q_proj" or not fused or _gating(module, compiled_passes()) is not None)
            ):
                yield [left.pop(id(each)) for each in some]
    yield from ([each] for each in left.values())


class _Computed(NamedTuple):
    """The products of a layer's turn, by the ids of their linear layers, and the weights of those that are alone."""

    products: dict[tuple[int, ...], Product]
    weights: dict[int, Tensor]

    def add(
        self, group: list[nn.Linear], chunk_tokens: int, *, pays: bool, always: bool, products: Products | None
    ) -> Iterator[tuple[list[nn.Linear], Product]]:
        """Add the products of some linear layers that read the same rows; yields each with its layers."""
        found = None if products is None else products(group, chunk_tokens)
        if found is None and not ((pays or always) and operators_work(group[0].weight.dtype)):
            return
        if found is None and pays and not always and len(group) > 1:
            found = _together(group, chunk_tokens)
        if found is not None:
            self.products[tuple(map(id, group))] = found
            yield group, found
            return
        for each in group:
            self.weights[id(each)] = weight = _laid_out(each.weight, chunk_tokens) if pays else each.weight
            self.products[id(each),] = alone = _alone(each, weight)
            yield [each], alone

    def of(self, *linear: nn.Linear) -> Product | None:
        """The product of linear layers that read the same rows, made of several where they are not together."""
        found = self.products.get(tuple(map(id, linear)))
        if found is not None:
            return found
        products = [self.products[id(each),] for each in linear if (id(each),) in self.products]
        return None if len(products) < len(linear) else lambda rows: [product(rows)[0] for product in products]


def _called(layer: nn.Module) -> _Computed:
    # The products of the modules themselves.
    def product(module: nn.Module) -> Product:
        return lambda rows: (module(rows),)

    return _Computed({(id(module),): product(module) for module in layer.modules()}, {})


def _laid_out(weight: Tensor, rows: int) -> Tensor:
    laid_out: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return laid_out


def _alone(linear: nn.Linear, weight: Tensor) -> Product:
    bias, multiply = linear.bias, torch.ops.mkldnn._linear_pointwise
    return lambda rows: (multiply(rows, weight, bias, "none", [], ""),)


def _together(group: Sequence[nn.Linear], rows: int) -> Product:
    # The copy of the weights is gone before a chunk's tensors are there, and smaller than they are.
    weight = _laid_out(torch.cat([each.weight for each in group]), rows)
    bias = None if group[0].bias is None else torch.cat([each.bias for each in group])
    sizes, multiply = [each.out_features for each in group], torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows, weight, bias, "none", [], "").split(sizes, -1)


def parts_of(product: Product, count: int) -> list[Forward]:
    """The forward of each of the linear layers of a product, which is computed once for the same rows."""
    if count == 1:
        return [lambda rows: product(rows)[0]]
    last: list[Tensor] = []  # the rows of which parts are there that have not been taken
    found: dict[int, Tensor] = {}

    def part(number: int, rows: Tensor) -> Tensor:
        if not last or last[0] is not rows or number not in found:
            last[:] = [rows]
            found.update(enumerate(product(rows)))
        taken = found.pop(number)
        if not found:
            last.clear()
        return taken

    return [partial(part, number) for number in range(count)]


# Modules in fewer passes. Each kind is compared with its own forward first.


def _fused_modules(
    layer: nn.Module, computed: _Computed, passes: Passes | None
) -> Iterator[tuple[nn.Module, Forward]]:
    # The modules that are called through another function, with that function.
    norms: dict[str, _Norm] = {}
    gated: set[str] = set()
    for name, module in layer.named_modules():
        if not _is_bare(module):
            continue
        if (norm := _norm_of(module, passes)) is not None:
            norms[name] = norm
            yield module, norm.forward
        elif (mlp := _gated_mlp(module, computed, passes)) is not None:
            gated.add(name)
            yield module, mlp
        elif passes is not None and (turned := _with_rotary(module, passes)) is not None:
            yield module, turned
    children = dict(layer.named_children())
    if passes is None or children.keys() != _PARTS.keys() or "post_attention_layernorm" not in norms:
        return
    if "mlp" in gated and all(map(_is_bare, (layer, children["self_attn"], children["input_layernorm"]))):
        yield layer, _whole_layer(layer, norms["post_attention_layernorm"], passes)


def _gated_mlp(mlp: nn.Module, computed: _Computed, passes: Passes | None) -> Forward | None:
    # The forward of a module that is an MLP which `_gated` computes.
    children = dict(mlp.named_children())
    if children.keys() != _GATED or type(children["act_fn"]).__name__ not in _ACTIVATIONS:
        return None
    found = _gated(mlp, computed, passes)
    return found if found is not None and _agrees(mlp, passes) else None


def _gated(mlp: nn.Module, computed: _Computed, passes: Passes | None) -> Forward | None:
    # `down(act(gate(x)) * up(x))` in two products, or three.
    parts: Any = mlp
    gate, up, down = parts.gate_proj, parts.up_proj, parts.down_proj
    both, last, gating = computed.of(gate, up), computed.of(down), _gating(mlp, passes)
    if both is None or last is None:
        return None
    if gating is not None:

        def compute(rows: Tensor) -> Tensor:
            return last(gating(*both(rows)))[0]

        if passes is not None and passes.KIND != "cpu":
            return compute
        row = (gate.out_features + up.out_features) * gate.weight.itemsize
        return partial(_in_pieces, compute, max(PIECE_BYTES // row // ROW_STEP, 1) * ROW_STEP)
    if not {id(gate), id(up)} <= computed.weights.keys():
        return None
    gate_weight, up_weight = computed.weights[id(gate)], computed.weights[id(up)]
    activation, algorithm = _ACTIVATIONS[type(parts.act_fn).__name__]
    multiply = torch.ops.mkldnn._linear_pointwise

    def forward(rows: Tensor) -> Tensor:
        gates = multiply(rows, gate_weight, gate.bias, activation, [], algorithm)
        return last(multiply.binary(rows, gates, up_weight, up.bias, "mul"))[0]

    return forward


def _in_pieces(compute: Callable[[Tensor], Tensor], most: int, rows: Tensor) -> Tensor:
    # A module's output for rows [..., tokens, width], `most` tokens at a time.
    if rows.shape[-2] <= most:
        return compute(rows)
    return torch.cat([compute(each) for each in torch.split(rows, most, -2)], dim=-2)


def _gating(mlp: Any, passes: Passes | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    # The pass between the products of a gated MLP.
    number = _PASS_ACTIVATIONS.get(type(getattr(mlp, "act_fn", None)).__name__)
    if passes is None or number is None or getattr(mlp.gate_proj, "out_features", 0) % passes.LANES:
        return None
    return partial(passes.gate, number)


_known: dict[tuple[type, type, bool], bool] = {}  # classes of an MLP and its activation, and whether on a CPU


def _agrees(mlp: nn.Module, passes: Passes | None) -> bool:
    parts: Any = mlp
    kind = type(mlp), type(parts.act_fn), passes is None or passes.KIND == "cpu"
    if kind not in _known:
        same = False
        with suppress(Exception):  # whatever it is, the class stays as it is
            same = _difference(_small(mlp), passes) <= TOLERANCE
        _known[kind] = same
    return _known[kind]


def _small(mlp: nn.Module) -> nn.Module:
    # A copy of a gated MLP, cut down to a few numbers, in float32.
    parts: Any = mlp
    linear = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
    memo: dict[int, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for name, (outputs, inputs) in linear.items():
        own = getattr(parts, name)
        cut = nn.Linear(inputs, outputs, bias=own.bias is not None)
        for each in cut.parameters():
            each.requires_grad_(False).copy_(torch.randn(each.shape, generator=generator) * 0.3)
        memo[id(own)] = cut
    return copy.deepcopy(mlp, memo)


@torch.inference_mode()
def _difference(mlp: nn.Module, passes: Passes | None) -> float:
    # The largest difference between a module's own forward and the fused one, over the largest number.
    parts: Any = mlp
    rows, computed = _random(1, 24, parts.gate_proj.in_features), _Computed({}, {})
    wanted: Tensor = mlp(rows)
    if passes is not None and passes.KIND != "cpu":  # they agree with torch's
        passes, computed = _BY_TORCH, _called(mlp)
    else:
        for each in (parts.gate_proj, parts.up_proj, parts.down_proj):
            list(computed.add([each], 24, pays=True, always=False, products=None))
    forward = _gated(mlp, computed, passes)
    return float("inf") if forward is None else float((forward(rows) - wanted).abs().max() / wanted.abs().max())


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@cache
def operators_work(dtype: torch.dtype) -> bool:
    """Return whether this torch has oneDNN's operators, and their results in a dtype are right on this machine."""
    linear, tolerance = nn.Linear(32, 48).to(dtype), TOLERANCE if dtype == torch.float32 else 2e-2
    with suppress(Exception), torch.inference_mode():  # an older torch, or one without oneDNN
        rows, other = (_random(1, 24, width).to(dtype) for width in (32, 48))
        weight = _laid_out(linear.weight, 24)
        plain = _alone(linear, weight)(rows)[0]
        times = torch.ops.mkldnn._linear_pointwise.binary(rows, other, weight, linear.bias, "mul")
        wanted = linear(rows)
        return _close(plain, wanted, tolerance) and _close(times, wanted * other, tolerance)
    return False


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return float((found.float() - wanted.float()).abs().max()) <= tolerance * float(wanted.float().abs().max())


# Norms. Which of the usual forms a class has is found out: they differ in two places.


@dataclass(frozen=True, slots=True)
class NormForm:
    """`x / sqrt(mean(x^2) + epsilon) * (weight + added)`; with `early` the first factor is rounded to the dtype."""

    epsilon: float
    added: float = 0.0
    early: bool = False


class _Norm(NamedTuple):
    """A module that is an RMS norm of this form."""

    module: nn.Module
    form: NormForm
    passes: Passes

    @property
    def weight(self) -> Tensor:
        module: Any = self.module
        return module.weight  # type: ignore[no-any-return]

    def forward(self, *args: Any, **named: Any) -> Any:
        if len(args) != 1 or named or not self.passes.norms(args[0], self.weight):
            return type(self.module).forward(self.module, *args, **named)
        return self.passes.norm(args[0], self.weight, self.form)


_forms: dict[Any, NormForm | None] = {}  # by a norm's class and settings


def _norm_of(module: nn.Module, passes: Passes | None) -> _Norm | None:
    parameters = dict(module.named_parameters())
    weight, epsilons = parameters.get("weight"), [each for name, each in vars(module).items() if "eps" in name]
    if passes is None or len(parameters) != 1 or weight is None or weight.dim() != 1 or len(epsilons) != 1:
        return None
    if not isinstance(epsilons[0], float) or weight.dtype not in passes.dtypes or len(weight) % passes.LANES:
        return None
    simple = ((name, value) for name, value in vars(module).items() if isinstance(value, int | float | str))
    kind = type(module), len(weight), *simple
    if kind not in _forms:
        found = None
        with suppress(Exception), torch.inference_mode():  # whatever it is, the class stays as it is
            found = _form_of(module, epsilons[0])
        _forms[kind] = found
    form = _forms[kind]
    return None if form is None else _Norm(module, form, passes)


def _form_of(module: Any, epsilon: float) -> NormForm | None:
    width = len(module.weight)
    rows = _random(5, width) * torch.tensor([1e-3, 1e-2, 1.0, 10.0, 100.0])[:, None]
    forms = [NormForm(epsilon, added, early) for added in (0.0, 1.0) for early in (False, True)]
    differences: list[float] = []
    for dtype in (torch.float32, torch.bfloat16):  # where the module rounds shows in the latter alone
        own = nn.Parameter(_random(width, seed=2).to(dtype), requires_grad=False)
        wanted = copy.deepcopy(module, {id(module.weight): own})(rows.to(dtype))
        found = [_BY_TORCH.norm(rows.to(dtype), own, form) for form in forms]
        if dtype == torch.float32:
            forms = [form for form, each in zip(forms, found, strict=True) if _close(each, wanted, TOLERANCE)]
        differences = [float((each.float() - wanted.float()).abs().mean()) for each in found]
    return forms[differences.index(min(differences))] if forms else None


# Rotary encodings. Modules call a function of their file; during a turn they run with another one in its place.


_ROTARY = "apply_rotary_pos_emb"


def _with_rotary(module: nn.Module, passes: Passes) -> Forward | None:
    own: Any = type(module).forward
    if not isinstance(own, FunctionType) or _ROTARY not in own.__code__.co_names:
        return None
    function = own.__globals__.get(_ROTARY)
    if function is None or not _turns(function):
        return None
    names = own.__globals__ | {_ROTARY: partial(_turned, function, passes)}
    copied = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    copied.__kwdefaults__ = own.__kwdefaults__
    return MethodType(copied, module)


def _turned(function: Forward, passes: Passes, *args: Any, **named: Any) -> Any:
    return passes.rotary(*args) if len(args) == 4 and not named and passes.turns(*args) else function(*args, **named)


@cache
def _turns(function: Forward) -> bool:
    # Whether a function is the rotary encoding that the passes compute.
    with suppress(Exception), torch.inference_mode():  # whatever it is, it stays
        given = _turning(torch.float32)
        pairs = zip(_BY_TORCH.rotary(*given), function(*given), strict=True)
        return all(_close(found, wanted, TOLERANCE) for found, wanted in pairs)
    return False


def _turning(dtype: torch.dtype) -> list[Tensor]:
    # Queries, keys and random tables, whose halves differ.
    heads = [_random(1, 5, heads, 64, seed=heads).to(dtype).transpose(1, 2) for heads in (4, 2)]
    return [*heads, *(_random(1, 5, 64, seed=seed).to(dtype) for seed in (7, 8))]


# Decoder layers of the usual kind: a norm before attention and one before the MLP, each with an addition after it.


def _attend(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
    return hidden_states * hidden_states * 0.3 + 0.7, None


#: The parts of such a layer, with functions that take their places in a trial.
_PARTS: dict[str, Forward] = {
    "input_layernorm": lambda rows: rows * 2 + 1,
    "self_attn": _attend,
    "post_attention_layernorm": lambda rows: rows * 3 - 2,
    "mlp": torch.sin,
}


def _whole_layer(layer: nn.Module, norm: _Norm, passes: Passes) -> Forward:
    parts: Any = layer
    known: dict[frozenset[str], dict[str, Any] | None] = {}  # by the names of a call's arguments

    def forward(hidden_states: Tensor, *others: Any, **named: Any) -> Any:
        names = frozenset(named)
        if names not in known:
            known[names] = None
            with suppress(Exception):  # whatever it is, the layer stays as it is
                known[names] = _handed_on(layer, names)
        constants = known[names]
        if others or constants is None or not passes.norms(hidden_states, norm.weight) or hidden_states.dim() != 3:
            return type(layer).forward(layer, hidden_states, *others, **named)
        attended = parts.self_attn(hidden_states=parts.input_layernorm(hidden_states), **constants, **named)[0]
        sums = attended.contiguous()  # nobody else has it
        normed = passes.add_and_norm(sums, hidden_states, norm.weight, norm.form)
        return passes.add(sums, parts.mlp(normed))

    return forward


def _handed_on(layer: nn.Module, names: frozenset[str]) -> dict[str, Any] | None:
    # Tries whether a layer adds attention of its normed input and an MLP of the normed sum, and hands these arguments
    # on to attention. Gives the other arguments of attention, by name.
    seen: dict[str, Any] = {}

    def attend(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        seen.update(named)
        return _attend(hidden_states)

    rows, given = _random(1, 3, 8), {name: object() for name in names}
    with ExitStack() as stack:
        for name, place in (_PARTS | {"self_attn": attend}).items():
            stack.enter_context(_replaced(getattr(layer, name), place))
        found = type(layer).forward(layer, rows, **given)
    sums = rows + _attend(rows * 2 + 1)[0]
    constants = {name: value for name, value in seen.items() if name not in given}
    handed_on = all(seen.get(name) is value for name, value in given.items())
    plain = all(value is None or isinstance(value, bool) for value in constants.values())
    same = _close(found, sums + torch.sin(sums * 3 - 2), TOLERANCE)
    return constants if same and handed_on and plain else None


@contextmanager
def _replaced(module: nn.Module, forward: Forward) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


# The passes.


class Passes:
    """What stands between the products of a layer, by torch's operators: the other ways are compared with them.

    Inside, all is float32. A row's result has the same bits whatever rows are beside it. Rows are [..., width] in one
    of the `dtypes`, on a device of one `KIND`, with a width that is a multiple of `LANES`.
    """

    KIND, LANES = "cpu", 1

    def __init__(self, dtypes: Sequence[torch.dtype]) -> None:
        self.dtypes = tuple(dtypes)

    def gate(self, activation: int, gates: Tensor, others: Tensor) -> Tensor:
        """The activation of this number, of `gates`, times `others`: rows of one shape."""
        numbers, functional = gates.float(), nn.functional
        found = functional.gelu(numbers, approximate="tanh") if activation else functional.silu(numbers)
        return (found * others.float()).to(gates.dtype)

    def norms(self, rows: Any, weight: Tensor) -> bool:
        """Return whether `norm` takes rows and weights."""
        return (
            isinstance(rows, Tensor)
            and rows.device == weight.device
            and rows.dtype == weight.dtype
            and rows.dtype in self.dtypes
            and rows.shape[-1] == len(weight)
            and rows.stride(-1) == 1
            and (rows.is_contiguous() or (rows.dim() == 4 and len(rows) == 1))
        )

    def norm(self, rows: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        """The RMS norm of contiguous rows, or of heads [1, tokens, heads, width] anywhere in memory."""
        numbers = rows.float()
        numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + form.epsilon)
        if form.early:
            numbers = numbers.to(rows.dtype).float()
        return (numbers * (weight.float() + form.added)).to(rows.dtype)

    def add_and_norm(self, rows: Tensor, more: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        """Add `more` to contiguous rows, in place. Gives the norm of the sums."""
        return self.norm(self.add(rows, more), weight, form)

    def add(self, rows: Tensor, more: Tensor) -> Tensor:
        """Add `more` to contiguous rows, in place. Gives the rows."""
        return rows.add_(more)

    def turns(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> bool:
        """Return whether `rotary` takes queries and keys [1, heads, tokens, width] and tables [1, tokens, width]."""
        given = (query, key, cosines, sines)
        return (
            query.dim() == key.dim() == 4
            and query.dtype in self.dtypes
            and all(each.dtype == query.dtype and each.device == query.device for each in given)
            and all(each.stride(-1) == 1 and len(each) == 1 for each in given)
            and all(each.shape == (1, *query.shape[2:]) and each.is_contiguous() for each in (cosines, sines))
            and key.shape[2:] == query.shape[2:]
            and query.shape[3] % (2 * self.LANES) == 0
        )

    def rotary(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [1, heads, tokens, width], turned by tables [1, tokens, width]: views of
        [1, tokens, heads, width]."""
        cosines, sines = (each.float().unsqueeze(1) for each in (cosines, sines))

        def turned(heads: Tensor) -> Tensor:
            first, second = heads.float().chunk(2, dim=-1)
            found = torch.cat((first, second), -1) * cosines + torch.cat((-second, first), -1) * sines
            return found.to(heads.dtype)

        return turned(query), turned(key)


_BY_TORCH = Passes(_DTYPES)


class CompiledPasses(Passes):
    """The functions of `layer_passes.cpp`, for tensors in bfloat16 or float32 on the CPU."""

    LANES = 16  # as in the source

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(_DTYPES)
        number, real, pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        arguments: dict[str, list[Any]] = {
            "gate": [*[pointer] * 3, *[number] * 5],
            "norm": [*[pointer] * 5, *[number] * 5, real, real, number, number],
            "add": [*[pointer] * 3, *[number] * 3],
            "rotary": [*[pointer] * 6, *[number] * 9],
        }
        self._calls: dict[tuple[str, torch.dtype], Any] = {}
        for name, dtype in itertools.product(arguments, _DTYPES):
            call = getattr(library, f"prefill_{name}_{str(dtype)[6:]}")
            call.argtypes, call.restype = arguments[name], None
            self._calls[name, dtype] = call

    def gate(self, activation: int, gates: Tensor, others: Tensor) -> Tensor:
        width, count = gates.shape[-1], gates.numel() // gates.shape[-1]
        if gates.stride() != others.stride() or gates.stride(-1) != 1 or gates.shape[-2] != count:
            gates, others = gates.contiguous(), others.contiguous()
        out = torch.empty(gates.shape, dtype=gates.dtype)
        sizes = count, width, gates.stride(-2), activation, torch.get_num_threads()
        self._calls["gate", out.dtype](gates.data_ptr(), others.data_ptr(), out.data_ptr(), *sizes)
        return out

    def norm(self, rows: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        out = torch.empty(rows.shape, dtype=rows.dtype)
        self._norm(rows, None, None, weight, out, form)
        return out

    def add_and_norm(self, rows: Tensor, more: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        out = torch.empty_like(rows)
        self._norm(rows, more.contiguous(), rows, weight, out, form)
        return out

    def _norm(
        self, rows: Tensor, more: Tensor | None, sums: Tensor | None, weight: Tensor, out: Tensor, form: NormForm
    ) -> None:
        width = rows.shape[-1]
        sizes = rows.numel() // width, 1, width, width
        if not rows.is_contiguous():
            sizes = rows.shape[1], rows.shape[2], rows.stride(1), rows.stride(2)
        places = (None if each is None else each.data_ptr() for each in (rows, more, sums, weight, out))
        how = form.added, form.epsilon, form.early, torch.get_num_threads()
        self._calls["norm", rows.dtype](*places, *sizes, width, *how)

    def add(self, rows: Tensor, more: Tensor) -> Tensor:
        width, more = rows.shape[-1], more.contiguous()
        sizes = rows.numel() // width, width, torch.get_num_threads()
        self._calls["add", rows.dtype](rows.data_ptr(), more.data_ptr(), rows.data_ptr(), *sizes)
        return rows

    def rotary(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        both = query, key
        out = [torch.empty(1, each.shape[2], each.shape[1], each.shape[3], dtype=each.dtype) for each in both]
        sizes = [size for each in both for size in (each.shape[1], each.stride(2), each.stride(1))]
        places = (each.data_ptr() for each in (query, key, cosines, sines, *out))
        self._calls["rotary", query.dtype](*places, *query.shape[2:], *sizes, torch.get_num_threads())
        return out[0].transpose(1, 2), out[1].transpose(1, 2)


@cache
def compiled_passes() -> Passes | None:
    """The passes for CPUs, if this machine can compile them and they compute what torch does."""
    return _right_passes(torch.device("cpu"))


@cache
def triton_passes(device: torch.device) -> Passes | None:
    """The passes for a CUDA device, if it has Triton and they compute what torch does."""
    return _right_passes(device)


def _right_passes(device: torch.device) -> Passes | None:
    return _passes_on(device) if set(check_passes(device).values()) == {"agrees"} else None


def _passes_on(device: torch.device) -> Passes | None:
    # Those that are made for a device.
    if device.type == "cuda" and find_spec("triton") is not None:
        from prefillcli.walk.triton_passes import TritonPasses

        return TritonPasses(attention.compute_capability(device))
    library = compiled_library("layer_passes.cpp") if device.type == "cpu" else None
    return None if library is None else CompiledPasses(library)


def check_passes(device: torch.device) -> dict[str, str]:
    """By dtype, whether the passes for a device are `not here`, or each of them `agrees` with torch, or one `differs`
    or `fails`."""
    passes = _passes_on(device)
    if passes is None:
        return {str(dtype)[6:]: "not here" for dtype in _DTYPES}
    return {str(dtype)[6:]: _compared(passes, device, dtype) for dtype in passes.dtypes}


@torch.inference_mode()
def _compared(passes: Passes, device: torch.device, dtype: torch.dtype) -> str:
    # Whether each pass computes what torch does, within the rounding of the dtype.
    rows, more, weight = (_random(*shape, seed=7).to(device, dtype) for shape in ((1, 40, 96), (2, 40, 96), (96,)))
    more, heads = more[1:], _random(1, 40, 5, 96).to(device, dtype)[:, :, 1:4]
    turning = [each.to(device) for each in _turning(dtype)]

    def found(by: Passes) -> list[Tensor]:
        sums = rows.clone()
        return [
            by.add_and_norm(sums, more, weight, NormForm(1e-6)),
            sums,
            by.norm(heads, weight, NormForm(1e-3, 1.0, early=True)),
            by.add(rows.clone(), more),
            by.gate(0, rows * 9, more),
            by.gate(1, rows, more),
            *by.rotary(*turning),
        ]

    tolerance = TOLERANCE if dtype == torch.float32 else 2e-2
    try:
        same = all(_close(*pair, tolerance) for pair in zip(found(passes), found(_BY_TORCH), strict=True))
    except Exception:  # of any of the stages of a compilation
        return "fails"
    return "agrees" if same else "differs"


# Layers that are called through torch.compile: norms, rotary encodings, activations and sums in fewer kernels.
#
# A layer's class is compiled once for all its layers and all lengths of chunks. Its attention is the walk's own and is
# not traced, so a layer is four graphs: the code before and after attention, in the layer and in its attention
# module. Parts of a layer that torch.compile does not understand are called as they are.


@contextmanager
def compiled(layer: nn.Module, chunk_tokens: int) -> Iterator[None]:
    """In this context calls of `layer` go through its compiled class, whatever `chunk_tokens` is."""
    forward = MethodType(_compile(type(layer).forward), layer)
    with torch._dynamo.config.patch(suppress_errors=True), called_through(layer, forward):
        yield


def check_compiler(device: torch.device) -> None:
    """Raise UsageError if torch.compile does not work for the device."""
    leave_untraced()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own parts, while it imports them
            found = torch.compile(_sample, dynamic=True)(torch.ones(3, device=device))
        if not torch.allclose(found.cpu(), _sample(torch.ones(3))):
            raise ValueError("it computes something else")
    except Exception as error:  # of any of the stages of a compilation
        raise UsageError(
            f"--compile: torch.compile does not work for {device}: {brief(error)}\nleave it out"
        ) from None


def _sample(rows: torch.Tensor) -> torch.Tensor:
    return torch.tanh(rows) * 2 + 1


@cache
def _compile(forward: Callable[..., Any]) -> Callable[..., Any]:
    once: Callable[..., Any] = torch.compile(forward, dynamic=True)
    return once

"""Linear layers and gated MLPs of a layer in fewer passes over memory, on CPUs.

A product is faster with weights in the layout that oneDNN computes in. It can also apply an activation, and multiply
with another tensor, while its result is in a core's cache. torch's compiler uses the same operators. The layout is
made for a layer's turn and lasts as long, so it takes memory for one layer.

The modules stay unchanged: during its turn a module is called through another function, which computes the same. A
kind of MLP is fused only after a small instance of its class has agreed with its own forward. Results differ from
those of the modules in rounding alone: activations are not rounded to the dtype before they are multiplied.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from prefillcli.errors import UsageError, brief
from prefillcli.prefill.forest import leave_untraced

LEAST_TOKENS = 512  # of a chunk: with fewer, making the layout takes longer than it saves
COPY_SHARE = 3  # numbers of weights at most, for each output of a linear layer and token of a chunk
TOLERANCE = 1e-5  # of the largest number, in float32, between a fused MLP and its own forward

_DTYPES = (torch.bfloat16, torch.float32)
_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}
#: The activations that a product can apply, as (attribute, algorithm) of the operator.
_ACTIVATIONS: dict[str, tuple[str, str]] = {
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
    "GELUTanh": ("gelu", "tanh"),
    "GELUActivation": ("gelu", "none"),
}

Forward = Callable[..., Any]
# A context that makes a layer faster during its turn, for chunks of so many tokens.
Preparation = Callable[[nn.Module, int], AbstractContextManager[None]]


def copy_pays(weights: int, outputs: int, chunk_tokens: int) -> bool:
    """Whether a layer's weights are copied into another layout for chunks of so many tokens.

    `weights` counts the numbers in its linear layers, `outputs` those that they compute for one token. The copy is
    then at most about as large as the layer's outputs for a chunk.
    """
    return chunk_tokens >= LEAST_TOKENS and weights <= COPY_SHARE * outputs * chunk_tokens


@contextmanager
def fused(layer: nn.Module, chunk_tokens: int, *, always: bool = False) -> Iterator[None]:
    """In this context the parts of `layer` that can be fused are, if that pays for chunks of `chunk_tokens` tokens.

    With `always` they are fused for other chunks too, with the weights in their own layout.
    """
    linear = [module for module in layer.modules() if _fits(module)]
    weights, outputs = (sum(numbers) for numbers in zip(*map(_sizes, linear), strict=True)) if linear else (0, 0)
    pays = copy_pays(weights, outputs, chunk_tokens)
    if not linear or not _operators_work() or not (pays or always):
        yield
        return
    with ExitStack() as stack:
        prepared = {id(each): _laid_out(each, chunk_tokens) if pays else each.weight for each in linear}
        mlps = [module for module in layer.modules() if _is_gated(module, prepared)]
        for each in linear:
            stack.enter_context(called_through(each, _linear(each, prepared[id(each)])))
        for mlp in mlps:
            stack.enter_context(called_through(mlp, _gated(mlp, prepared)))
        yield


def _sizes(linear: nn.Linear) -> tuple[int, int]:
    return linear.weight.numel(), linear.out_features


def _fits(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or "forward" in vars(module):  # others may compute something else
        return False
    if type(module.weight) is not nn.Parameter:  # packed numbers
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype in _DTYPES


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


def _laid_out(linear: nn.Linear, rows: int) -> Tensor:
    weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight, rows)
    return weight


def _linear(linear: nn.Linear, weight: Tensor) -> Forward:
    bias, multiply = linear.bias, torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows, weight, bias, "none", [], "")


def _gated(mlp: nn.Module, prepared: dict[int, Tensor]) -> Forward:
    # `down(act(gate(x)) * up(x))` in three products.
    parts: Any = mlp
    gate, up, down = parts.gate_proj, parts.up_proj, parts.down_proj
    gate_weight, up_weight, down_weight = (prepared[id(each)] for each in (gate, up, down))
    activation, algorithm = _ACTIVATIONS[type(parts.act_fn).__name__]
    multiply = torch.ops.mkldnn._linear_pointwise

    def forward(rows: Tensor) -> Tensor:
        gates = multiply(rows, gate_weight, gate.bias, activation, [], algorithm)
        inner = multiply.binary(rows, gates, up_weight, up.bias, "mul")
        out: Tensor = multiply(inner, down_weight, down.bias, "none", [], "")
        return out

    return forward


def _is_gated(module: nn.Module, prepared: dict[int, Tensor]) -> bool:
    # Whether a module is an MLP that `_gated` computes.
    children = dict(module.named_children())
    if children.keys() != _GATED or type(children["act_fn"]).__name__ not in _ACTIVATIONS:
        return False
    linear = [each for name, each in children.items() if name != "act_fn"]
    return all(id(each) in prepared for each in linear) and _agrees(module)


_known: dict[tuple[type, type], bool] = {}  # classes of an MLP and its activation


def _agrees(mlp: nn.Module) -> bool:
    parts: Any = mlp
    kind = type(mlp), type(parts.act_fn)
    if kind not in _known:
        _known[kind] = False
        with suppress(Exception):  # whatever it is, the class stays as it is
            _known[kind] = _difference(_small(mlp)) <= TOLERANCE
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
def _difference(mlp: nn.Module) -> float:
    # The largest difference between a module's own forward and the fused one, over the largest number.
    parts: Any = mlp
    rows = torch.randn(1, 24, parts.gate_proj.in_features, generator=torch.Generator().manual_seed(1))
    wanted: Tensor = mlp(rows)
    prepared = {id(each): _laid_out(each, 24) for each in (parts.gate_proj, parts.up_proj, parts.down_proj)}
    return float((_gated(mlp, prepared)(rows) - wanted).abs().max() / wanted.abs().max())


@cache
def _operators_work() -> bool:
    # Whether this torch has the operators, and their results are right on this machine in both dtypes.
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(32, 48)
    with suppress(Exception), torch.inference_mode():  # an older torch, or one without oneDNN
        for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.bfloat16, 2e-2)):
            cut = linear.to(dtype)
            rows, other = (torch.randn(1, 24, width, generator=generator).to(dtype) for width in (32, 48))
            weight = _laid_out(cut, 24)
            plain = _linear(cut, weight)(rows)
            times = torch.ops.mkldnn._linear_pointwise.binary(rows, other, weight, cut.bias, "mul")
            wanted = cut(rows)
            if not _close(plain, wanted, tolerance) or not _close(times, wanted * other, tolerance):
                return False
        return True
    return False


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return float((found.float() - wanted.float()).abs().max()) <= tolerance * float(wanted.float().abs().max())


# Layers that are called through torch.compile: norms, rotary encodings, activations and sums in fewer kernels.
#
# A layer's class is compiled once for all its layers and all lengths of chunks. Its attention is the walk's own and is
# not traced, so a layer is four graphs: the code before and behind attention, in the layer and in its attention
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

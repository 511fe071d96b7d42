"""Elementwise operators whose bits do not depend on where an element lies.

On CPUs, torch computes elements in vectors. What is left over at the end of a thread's share it computes one by one,
and for some operators by another formula: silu, sigmoid and softplus in float32, rsqrt in bfloat16. So elements are
laid out so that nothing is left over, whatever the number of threads.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

STEP = 64  # elements: two vectors of the widest kind, which is what torch computes at a time
GRAIN = (
    32768  # elements of a thread at least, in torch (at::internal::GRAIN_SIZE); for gelu there are always all threads
)
SMALL = 16384  # elements that one thread computes alone, whatever the operator

#: Operators that round once, or not at all: one by one they give what they give in vectors.
EXACT = {
    "aten::mul", "aten::div", "aten::neg", "aten::abs", "aten::relu", "aten::relu6", "aten::clamp",
    "aten::clamp_min", "aten::clamp_max", "aten::maximum", "aten::minimum", "aten::fmax", "aten::fmin",
    "aten::where", "aten::masked_fill", "aten::eq", "aten::ne", "aten::lt", "aten::le", "aten::gt",
    "aten::ge", "aten::logical_and", "aten::logical_or", "aten::logical_not", "aten::logical_xor",
    "aten::bitwise_and", "aten::bitwise_or", "aten::bitwise_not", "aten::bitwise_xor", "aten::isnan",
    "aten::isinf", "aten::isfinite", "aten::isposinf", "aten::isneginf", "aten::sqrt", "aten::reciprocal",
    "aten::round", "aten::floor", "aten::ceil", "aten::trunc", "aten::sign", "aten::sgn", "aten::square",
    "aten::nan_to_num", "aten::_to_copy", "aten::clone", "aten::copy", "aten::fill", "aten::threshold",
    "aten::floor_divide", "aten::remainder", "aten::positive",
}  # fmt: skip
_SUMS = {"aten::add", "aten::sub", "aten::rsub"}


@cache
def is_uneven(func: OpOverload) -> bool:
    """Whether an operator is elementwise and may compute some elements by another formula.

    Elementwise is one that torch tags so and that gives one tensor. `aten::equal` is tagged too, and gives a bool.
    """
    pointwise = torch.Tag.pointwise in func.tags and [str(each.type) for each in func._schema.returns] == ["Tensor"]
    return pointwise and _base(func) not in EXACT


def compute_evenly(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an elementwise operator gives, computed in whole vectors.

    All arguments are taken by the names that the operator's schema has for them, however they were given.
    """
    names = [each.name for each in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    inputs = {name: each for name, each in given.items() if name != "out"}
    tensors = {name: each for name, each in inputs.items() if isinstance(each, Tensor) and each.dim() > 0}
    if not tensors or next(iter(tensors.values())).device.type != "cpu" or not _rounds(func, inputs):
        return func(*args, **kwargs)
    if func._schema.is_mutable:
        target: Tensor = given["out"] if "out" in given else given["self"]
        return target.copy_(_laid_out_and_back(_functional(func), inputs, tensors))
    return _laid_out_and_back(func, inputs, tensors)


def _laid_out_and_back(func: OpOverload, inputs: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(each.shape for each in tensors.values())
    )
    count = math.prod(shape)
    room = _room(count)
    if count == room and all(each.shape == shape and each.is_contiguous() for each in tensors.values()):
        return _called(func, inputs)
    laid_out = {name: _laid_out(each, shape, room) for name, each in tensors.items()}
    return _called(func, inputs | laid_out)[:count].view(shape)


def _called(func: OpOverload, given: dict[str, Any]) -> Tensor:
    """The operator of arguments by name, those that its schema has by place in their order."""
    places = [each.name for each in func._schema.arguments if not each.kwarg_only and each.name in given]
    found: Tensor = func(*(given[name] for name in places), **{k: v for k, v in given.items() if k not in places})
    return found


def _room(count: int) -> int:
    """The fewest elements from `count` on whose share for each thread is a multiple of `STEP`."""
    most, room = torch.get_num_threads(), count
    while True:
        shares = math.lcm(most, max(1, min(most, -(-room // GRAIN)))) if room > SMALL else 1
        rounded = -(-room // (STEP * shares)) * STEP * shares
        if rounded == room:
            return room
        room = rounded


def _rounds(func: OpOverload, given: dict[str, Any]) -> bool:
    """Whether an operator rounds more than once for these arguments."""
    name, exponent = _base(func), given.get("exponent")
    if name in _SUMS:
        return given.get("alpha", 1) not in (1, -1)
    if name == "aten::pow" and not isinstance(exponent, Tensor):
        return bool(exponent != 2)
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in given.values())


def _base(func: OpOverload) -> str:
    return func._schema.name.rstrip("_")


def _functional(func: OpOverload) -> OpOverload:
    """The operator that gives a new tensor, of one that writes into another."""
    packet = getattr(torch.ops.aten, _base(func).removeprefix("aten::"))
    name = func._overloadname
    name = "default" if name == "out" else name.removesuffix("_out")
    found: OpOverload = getattr(packet, name)
    return found


def _laid_out(each: Tensor, shape: torch.Size, room: int) -> Tensor:
    """The elements in a row [room]; ones behind, of which every function is defined."""
    found = each.new_ones(room)
    found[: math.prod(shape)].view(shape).copy_(each.expand(shape))
    return found

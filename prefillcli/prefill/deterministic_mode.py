"""Layers whose rows have the same bits whatever rows are beside them.

All but attention and recurrence is computed row by row. Three things make a row depend on others: products, whose
order of additions follows from their shape; elements that are left over when threads share a tensor; and sums over a
single row, which threads share. While this mode lasts, operators of these three kinds are computed in ways that do not
depend on them. The others pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from prefillcli.prefill.even_elements import GRAIN, compute_evenly, is_uneven
from prefillcli.prefill.row_products import RowProducts

AS_TORCH_DOES: AbstractContextManager[Any] = nullcontext()
"""No mode."""

NARROW = 16  # outputs: in float32, with fewer of them MKL computes some rows of a product in another order

_Handler = Callable[["DeterministicMode", OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class DeterministicMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, what torch computes of a row does not depend on others, nor on the number of threads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = RowProducts()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        handler = _handlers().get(func._schema.name)
        if handler is not None:
            return handler(self, func, args, given)
        if is_uneven(func):
            return compute_evenly(func, args, given)
        if _is_composite(func):  # what it is made of may be one of those
            with self:
                return func.decompose(*args, **given)
        return func(*args, **given)


def numbers_mode(deterministic: bool) -> AbstractContextManager[Any]:
    """The mode in which a walk computes: this one, or none."""
    return DeterministicMode() if deterministic else AS_TORCH_DOES


@cache
def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(_name(func), "CompositeImplicitAutograd")


def _name(func: OpOverload) -> str:
    name: str = func.name()  # type: ignore[no-untyped-call]
    return name


def _kind(name: str, *given: Any) -> tuple[Any, ...]:
    """All by which a library may choose how it computes a product, beside its rows."""
    return (
        name,
        *((each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each for each in given),
    )


def _is_narrow(weight: Tensor) -> bool:
    """Whether a weight [..., inputs, outputs] is made wider for a product."""
    return weight.shape[-1] < NARROW and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _linear(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    rows, weight, bias = (*args, *kwargs.values(), None)[:3]
    if _is_narrow(weight.t()):
        flat = _multiply(mode, torch.ops.aten.mm.default, (rows.reshape(-1, rows.shape[-1]), weight.t()), {})
        found = flat.view(*rows.shape[:-1], weight.shape[0])
        return found if bias is None else found + bias
    product = partial(functional.linear, weight=weight, bias=bias)
    found = mode.products.compute(_kind("linear", weight, bias), product, rows.reshape(-1, rows.shape[-1]))
    return found.view(*rows.shape[:-1], weight.shape[0])


def _multiply(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """mm and bmm."""
    rows, weight = args[:2]
    if rows.shape[-1] == 1 or not rows.is_floating_point():  # nothing is added up, or exactly
        return func(*args, **kwargs)
    if _is_narrow(weight):
        wide = functional.pad(weight, (0, NARROW - weight.shape[-1]))
        return _multiply(mode, func, (rows, wide, *args[2:]), kwargs)[..., : weight.shape[-1]]
    kind = _kind(func._schema.name, weight, str(kwargs))
    return mode.products.compute(kind, lambda some: func(some, weight, *args[2:], **kwargs), rows)


def _multiply_and_add(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """addmm and baddbmm: `beta * added + alpha * (rows @ weight)`."""
    added, rows, weight = args[:3]
    if (added.dim() == 1 or added.shape[-2] == 1) and not _is_narrow(weight):
        kind = _kind(func._schema.name, weight, added, str(kwargs))
        return mode.products.compute(kind, lambda some: func(added, some, weight, **kwargs), rows)
    multiply = torch.ops.aten.mm if rows.dim() == 2 else torch.ops.aten.bmm
    found = _multiply(mode, multiply.default, (rows, weight), {})
    return found * kwargs.get("alpha", 1) + added * kwargs.get("beta", 1)


def _multiply_vector(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """mv: the vector is the one row."""
    return _multiply(mode, torch.ops.aten.mm.default, (args[1][None], args[0].t()), {})[0]


def _multiply_groups(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """_grouped_mm: each expert's rows with its own weight."""
    rows, weight = args[:2]
    ends = kwargs.get("offs", args[2] if len(args) > 2 else None)
    if ends is None or rows.dim() != 2 or weight.dim() != 3:
        return func(*args, **kwargs)
    found = rows.new_zeros(len(rows), weight.shape[-1])
    start = 0
    for own, end in zip(weight, ends.tolist(), strict=True):
        if start < end:
            found[start:end] = _multiply(mode, torch.ops.aten.mm.default, (rows[start:end], own), {})
        start = end
    return found


def _fused_linear(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """oneDNN's product with an activation, or multiplied with other rows (`fusion.py`)."""
    several = 2 if func._overloadname == "binary" else 1
    rows, (weight, *others) = args[:several], args[several:]
    inner = tuple(each.reshape(-1, each.shape[-1]) for each in rows)

    def as_laid_out(*some: Tensor) -> Any:
        return func(*some, weight, *others, **kwargs)

    def plainly(*some: Tensor) -> Any:
        return func(*some, weight.to_dense(), *others, **kwargs)

    bias = others[0] is not None
    kind = _kind(_name(func), weight.is_mkldnn, tuple(weight.shape), weight.dtype, bias, str(others[1:]), str(kwargs))
    reference = plainly if weight.is_mkldnn else None
    found = mode.products.compute(kind, as_laid_out, *inner, reference=reference)
    return found.view(*rows[0].shape[:-1], found.shape[-1])


def _gated(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """glu: half of the numbers times the sigmoid of the others."""
    first, second = args[0].chunk(2, dim=args[1] if len(args) > 1 else -1)
    with mode:
        found = first * torch.sigmoid(second)
    return found


def _reduce(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a single row, threads would share the sum: with another one beside it they share the rows."""
    values = args[0]
    if values.device.type != "cpu" or values.numel() < GRAIN or len(args) < 2 or args[1] is None:
        return func(*args, **kwargs)
    reduced = {dim % values.dim() for dim in ([args[1]] if isinstance(args[1], int) else args[1])}
    others = [dim for dim in range(values.dim()) if dim not in reduced]
    if not others or any(values.shape[dim] != 1 for dim in others):
        return func(*args, **kwargs)
    keeps = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    at = others[0] if keeps else 0
    return func(torch.cat([values, values], dim=others[0]), *args[1:], **kwargs).narrow(at, 0, 1)


@cache
def _handlers() -> dict[str, _Handler]:
    """What takes the place of an operator, by its name."""
    return {
        "aten::linear": _linear,
        "aten::mm": _multiply,
        "aten::bmm": _multiply,
        "aten::addmm": _multiply_and_add,
        "aten::baddbmm": _multiply_and_add,
        "aten::mv": _multiply_vector,
        "aten::_grouped_mm": _multiply_groups,
        "mkldnn::_linear_pointwise": _fused_linear,
        "aten::glu": _gated,
        "aten::sum": _reduce,
        "aten::mean": _reduce,
        "aten::logsumexp": _reduce,
    }

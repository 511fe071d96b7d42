"""Layers whose rows have the same bits, whatever rows are beside them.

All but attention and recurrence is computed row by row. Three things make a row depend on others: products, whose
order of additions follows from their shape; elements that are left over when threads share a tensor; and sums over a
single row, which threads share. While the mode lasts, operators of these three kinds are computed in ways that do not
depend on other rows. All other operators pass unchanged.

Attention, recurrence and chunks are computed so that a token's bits depend on its path alone: the tokens of its prompt
so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.errors import ResourceError
from prefillcli.plan.blocks import floor_to
from prefillcli.stats.arrays import Int64Array
from prefillcli.walk.attention import BlockArray, forest_kernel, product, room_for_output, takes
from prefillcli.walk.forest import Scoring, attend_by_kernel
from prefillcli.walk.fusion import fused
from prefillcli.walk.layout import Chunk, LastTokens, Tree, on_device
from prefillcli.walk.recurrent import (
    MOST_STATES,
    ModuleCall,
    NodeRun,
    PathStates,
    fork_state,
    pick_states,
    recurrent_modules,
    stack_states,
    tensors_of,
)
from prefillcli.walk.walk import Arithmetic, ChunkCutter, cut_anywhere

# Elementwise operators whose bits do not depend on where an element lies.
#
# On CPUs, torch computes elements in vectors. It computes elements that are left over at the end of a thread's share
# one by one, and for some operators by another formula: silu, sigmoid and softplus in float32, rsqrt in bfloat16. The
# layout here leaves no elements over, whatever the number of threads.


STEP = 64  # elements: two vectors of the widest kind, as many as torch computes at a time
GRAIN = 32768  # the fewest elements of a thread in torch (at::internal::GRAIN_SIZE); gelu always takes all threads
SMALL = 16384  # elements that one thread computes alone, whatever the operator
#: Operators that round once, or not at all: one by one they give the same bits as in vectors.
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
    """Return whether an operator is elementwise and may compute some elements by another formula.

    Elementwise operators have torch's tag and give one tensor. `aten::equal` has the tag too, but gives a bool.
    """
    pointwise = torch.Tag.pointwise in func.tags and [str(each.type) for each in func._schema.returns] == ["Tensor"]
    return pointwise and _base(func) not in EXACT


def compute_evenly(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of an elementwise operator, computed in whole vectors.

    All arguments are taken by their names in the operator's schema, however they were given.
    """
    given = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | kwargs
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
    # Calls the operator with arguments by name; those that its schema has by place go in their order.
    places = [each.name for each in func._schema.arguments if not each.kwarg_only and each.name in given]
    others = {name: value for name, value in given.items() if name not in places}
    return cast(Tensor, func(*(given[name] for name in places), **others))


def _room(count: int) -> int:
    # The smallest number of elements, `count` or more, of which each thread's share is a multiple of `STEP`.
    most, room = torch.get_num_threads(), count  # torch shares `room` elements among min(most, room / GRAIN) threads
    while True:
        shares = math.lcm(most, max(1, min(most, -(-room // GRAIN)))) if room > SMALL else 1
        rounded = -(-room // (STEP * shares)) * STEP * shares
        if rounded == room:
            return room
        room = rounded


def _rounds(func: OpOverload, given: dict[str, Any]) -> bool:
    # Whether an operator rounds more than once for these arguments.
    name, exponent = _base(func), given.get("exponent")
    if name in _SUMS:
        return given.get("alpha", 1) not in (1, -1)
    if name == "aten::pow" and not isinstance(exponent, Tensor):
        return bool(exponent != 2)
    return any(isinstance(each, Tensor) and each.is_floating_point() for each in given.values())


def _base(func: OpOverload) -> str:
    return func._schema.name.rstrip("_")


def _functional(func: OpOverload) -> OpOverload:
    # The variant of an operator that gives a new tensor, for one that writes into another.
    packet = getattr(torch.ops.aten, _base(func).removeprefix("aten::"))
    name = func._overloadname
    name = "default" if name == "out" else name.removesuffix("_out")
    return cast(OpOverload, getattr(packet, name))


def _laid_out(each: Tensor, shape: torch.Size, room: int) -> Tensor:
    # The elements in a row [room], with ones behind them: every function is defined at one.
    found = each.new_ones(room)
    found[: math.prod(shape)].view(shape).copy_(each.expand(shape))
    return found


# Products whose rows have the same bits, whatever rows are beside them and however many threads compute.
#
# A library chooses its way by the shape of a product and the number of threads. Tests, not assumptions, decide whether
# two ways add up a row in the same order: tiles of a few rows, computed by one thread, define the bits of each
# product's rows. A faster way, with more rows or threads, is compared with them in full before its first use. If it
# differs, one thread computes that product from then on, and if that differs too, it does so in those tiles.


TILE_ROWS = {"cpu": 64}  # the rows of a tile, whose bits count; few on CPUs, as one thread computes them
TILE_ROWS_ELSEWHERE = 256
FEW_ROWS = 16  # CPUs: numbers of rows are rounded up to a multiple of this, above a tile to a multiple of tiles
# Takes one tensor or several [..., rows, inputs], and gives [..., rows, outputs].
Product = Callable[..., Tensor]


class RowProducts:
    """Products of rows with weights, and the findings about them.

    The way to compute a product depends on which ways agree on this machine; the bits of a row do not.
    """

    def __init__(self) -> None:
        self._most_threads: dict[tuple[Hashable, int, int], int] = {}
        self._tiled: set[Hashable] = set()  # kinds whose tiles do not depend on a row's place

    def compute(self, kind: Hashable, product: Product, *rows: Tensor, reference: Product | None = None) -> Tensor:
        """`product(*rows)`, for rows that may have any number.

        `kind` has everything by which a library may choose a way, besides the number of rows: operation, dtype, shapes
        and strides. `reference` computes the same with weights in their original layout. Raises ResourceError if not
        even tiles of one shape give a row the same bits at each place.
        """
        count = rows[0].shape[-2]
        if not count:
            return product(*rows)
        padded = tuple(_padded(each, _rounded(count, each.device)) for each in rows)
        size, threads = padded[0].shape[-2], torch.get_num_threads()
        asked = kind, size, threads
        if asked not in self._most_threads:
            self._most_threads[asked] = self._found_out(kind, product, padded, reference or product)
        most = self._most_threads[asked]
        if most == threads:
            found = product(*padded)
        elif most:
            with computing_with(most):
                found = product(*padded)
        else:
            found = _in_tiles(reference or product, padded)
        return found[..., :count, :]

    def _found_out(self, kind: Hashable, product: Product, rows: tuple[Tensor, ...], reference: Product) -> int:
        # The number of threads with which the product of so many rows has the bits of its tiles; 0: with no number.
        rows = tuple(map(_random_like, rows))  # the given rows may be few, and zeros below them would prove nothing
        if kind not in self._tiled:
            _check_tiles(reference, rows)
            self._tiled.add(kind)
        wanted, threads = _in_tiles(reference, rows), torch.get_num_threads()
        for tried in sorted({threads, 1}, reverse=True):
            with computing_with(tried):
                if _same_bits(product(*rows), wanted):
                    return tried
        return 0


def _random_like(rows: Tensor) -> Tensor:
    drawn = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
    return drawn.to(rows.device, rows.dtype)


def _rounded(count: int, device: torch.device) -> int:
    tile = tile_rows(device)
    step = FEW_ROWS if device.type == "cpu" and count < tile else tile
    return -(-count // step) * step


def tile_rows(device: torch.device) -> int:
    """The number of rows in a tile, whose product defines their bits. More rows are rounded up to a multiple of it."""
    return TILE_ROWS.get(device.type, TILE_ROWS_ELSEWHERE)


def _padded(rows: Tensor, count: int) -> Tensor:
    # The rows and some below, `count` in all, contiguous. Those below are any numbers in memory there, mostly the rest
    # of another product, or zeros: no row depends on them.
    given, size = rows.shape[-2], (*rows.shape[:-2], count, rows.shape[-1])
    if given == count:
        return rows.contiguous()
    end = rows.storage_offset() + count * rows.shape[-1]
    if rows.dim() == 2 and rows.is_contiguous() and end * rows.itemsize <= rows.untyped_storage().nbytes():
        return rows.as_strided(size, rows.stride())
    found = rows.new_empty(size)
    found[..., :given, :] = rows
    found[..., given:, :] = 0
    return found


def _tiles(rows: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    size = tile_rows(rows[0].device)
    for start in range(0, rows[0].shape[-2], size):
        yield tuple(_padded(each[..., start : start + size, :], size) for each in rows)


def _in_tiles(product: Product, rows: tuple[Tensor, ...]) -> Tensor:
    # The product by one thread in tiles of one shape, which defines its bits.
    with computing_with(1):
        found = torch.cat([product(*tile) for tile in _tiles(rows)], dim=-2)
    return found[..., : rows[0].shape[-2], :]


def _check_tiles(product: Product, rows: tuple[Tensor, ...]) -> None:
    # Raise ResourceError unless rows keep their bits where they move within a tile.
    shape = (*rows[0].shape[:-2], tile_rows(rows[0].device))
    tile = tuple(_random_like(each.new_empty(*shape, each.shape[-1])) for each in rows)
    with computing_with(1):
        wanted = product(*tile)
        for by in (1, 13):
            moved = product(*(each.roll(by, dims=-2) for each in tile))
            if not _same_bits(moved.roll(-by, dims=-2), wanted):
                raise ResourceError(
                    "--deterministic: on this machine a matrix product gives a row other bits at another place\n"
                    "take another --device or --dtype, or leave it out"
                )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))


@contextmanager
def computing_with(count: int) -> Iterator[None]:
    """While this lasts, this many threads compute."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


NARROW = 16  # outputs: with fewer of them MKL computes some rows of a float32 product in another order
_Handler = Callable[["DeterministicMode", OpOverload, tuple[Any, ...], dict[str, Any]], Any]


class DeterministicMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this lasts, torch's results for a row do not depend on other rows, nor on the number of threads."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products = RowProducts()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        handler = _HANDLERS.get(func._schema.name)
        if handler is not None:
            return handler(self, func, args, given)
        if is_uneven(func):
            return compute_evenly(func, args, given)
        if _is_composite(func):  # an operator that it is made of may be one of those
            with self:
                return func.decompose(*args, **given)
        return func(*args, **given)


@cache
def _is_composite(func: OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(_name(func), "CompositeImplicitAutograd")


def _name(func: OpOverload) -> str:
    return str(func.name())  # type: ignore[no-untyped-call]


def _kind(name: str, *given: Any) -> tuple[Any, ...]:
    # Everything by which a library may choose its way to compute a product, besides the rows.
    return (
        name,
        *((each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each for each in given),
    )


def _is_narrow(weight: Tensor) -> bool:
    # Whether a weight [..., inputs, outputs] is made wider for a product.
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
    # mm and bmm.
    rows, weight = args[:2]
    if rows.shape[-1] == 1 or not rows.is_floating_point():  # there are no sums, or they are exact
        return func(*args, **kwargs)
    if _is_narrow(weight):
        wide = functional.pad(weight, (0, NARROW - weight.shape[-1]))
        return _multiply(mode, func, (rows, wide, *args[2:]), kwargs)[..., : weight.shape[-1]]
    kind = _kind(func._schema.name, weight, str(kwargs))
    return mode.products.compute(kind, lambda some: func(some, weight, *args[2:], **kwargs), rows)


def _multiply_and_add(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # addmm and baddbmm: `beta * added + alpha * (rows @ weight)`.
    added, rows, weight = args[:3]
    if (added.dim() == 1 or added.shape[-2] == 1) and not _is_narrow(weight):
        kind = _kind(func._schema.name, weight, added, str(kwargs))
        return mode.products.compute(kind, lambda some: func(added, some, weight, **kwargs), rows)
    multiply = torch.ops.aten.mm if rows.dim() == 2 else torch.ops.aten.bmm
    found = _multiply(mode, multiply.default, (rows, weight), {})
    return found * kwargs.get("alpha", 1) + added * kwargs.get("beta", 1)


def _multiply_vector(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # mv: the vector is the one row.
    return _multiply(mode, torch.ops.aten.mm.default, (args[1][None], args[0].t()), {})[0]


def _multiply_groups(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # _grouped_mm: each expert's rows with its own weight.
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
    # oneDNN's product with an activation, or multiplied with other rows (`fusion.py`).
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
    # glu: half of the numbers times the sigmoid of the others.
    first, second = args[0].chunk(2, dim=args[1] if len(args) > 1 else -1)
    with mode:
        found = first * torch.sigmoid(second)
    return found


def _reduce(mode: DeterministicMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Threads would share the sum over a single row. With another row beside it they share out the rows.
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


# Functions that replace operators, by the operators' names.
_HANDLERS: dict[str, _Handler] = {
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


# Attention: a query sees the keys of its path in blocks whose first depths are multiples of `KEYS`, in their order,
# whatever nodes they lie in. All products have one shape in all of a model's calls: a fixed number of blocks of
# queries, each with a fixed number of queries, padded. A block of keys that a query does not see changes nothing: its
# powers are 0, and earlier sums are multiplied by 1. The operators have to ensure only that rows of a product and
# elements do not depend on their places. `forest_attention.cpp` does not need that, and is used where it is built.


QUERIES = 32  # of a block, for each head
KEYS = 128  # of a block
BLOCKS = {"cpu": 8}  # of queries in a product
BLOCKS_ELSEWHERE = 64


class _Together(NamedTuple):
    """Blocks of queries that are computed together.

    `tokens` [blocks, QUERIES] are the queries' numbers, padded with each block's last one; `valid` marks those that
    are no padding. `depths` [blocks, QUERIES] are theirs. `places` and `key_depths` [steps, blocks, KEYS] are the
    places of each step's keys in the buffer, and their depths, -1 where there is no such key.
    """

    tokens: Tensor
    valid: Tensor
    depths: Tensor
    places: Tensor
    key_depths: Tensor


def attend_by_path(
    computed: Chunk | LastTokens, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """An `Attend` (`walk/forest.py`): by the kernel where it takes these shapes, else by torch's operators."""
    kernel = forest_kernel() if takes(query, value, key.shape[1]) else None
    if kernel is not None:
        return attend_by_kernel(kernel, computed, query, key, value, scoring)
    blocks, runs = computed.blocks(scoring.window, QUERIES)
    out, lse = room_for_output(query, value)
    by_token = out[0].transpose(0, 1)
    count = BLOCKS.get(query.device.type, BLOCKS_ELSEWHERE)
    by_steps = np.argsort([_steps(block, runs) for block in blocks], kind="stable")  # neighbours are of one length
    for first in range(0, len(blocks), count):
        part = _together(blocks[by_steps[first : first + count]], runs, count, query.device)
        found, found_lse = _attend(query, key, value, part, scoring)
        at = part.tokens[part.valid]
        by_token.index_copy_(0, at, found[part.valid].to(query.dtype))
        lse[0].index_copy_(1, at, found_lse[part.valid].T)
    return out, lse


def _attend(query: Tensor, key: Tensor, value: Tensor, part: _Together, scoring: Scoring) -> tuple[Tensor, Tensor]:
    # Output float32 [blocks, QUERIES, heads, width] and log-sum-exp [blocks, QUERIES, heads] of some blocks.
    heads, width = query.shape[1], query.shape[3]
    kv_heads, narrow = value.shape[1], value.shape[3]
    count, groups = len(part.tokens), heads // kv_heads
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    rows = query[0].transpose(0, 1)[part.tokens.flatten()].view(count, QUERIES, kv_heads, groups, width)
    rows = rows.permute(0, 2, 3, 1, 4).reshape(count * kv_heads, groups * QUERIES, width)
    out = torch.zeros(*rows.shape[:2], narrow, device=query.device)
    total = torch.zeros(rows.shape[:2], device=query.device)
    top = torch.full_like(total, -math.inf)
    oldest = scoring.window.oldest(part.depths) if scoring.window else torch.zeros_like(part.depths)

    def gathered(states: Tensor, index: Tensor) -> Tensor:
        each = states[index.flatten()].view(count, KEYS, kv_heads, -1)
        return each.transpose(1, 2).reshape(count * kv_heads, KEYS, -1)

    for index, depths in zip(part.places, part.key_depths, strict=True):
        scores = product(rows, gathered(keys, index).transpose(1, 2)) * scoring.scale
        if scoring.softcap is not None:
            scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
        hidden = (depths[:, None] > part.depths[..., None]) | (depths[:, None] < oldest[..., None])
        hidden |= (depths < 0)[:, None]
        of_heads = scores.view(count, kv_heads * groups, QUERIES, KEYS)
        of_heads.masked_fill_(hidden[:, None], -math.inf)
        # An online softmax: powers are of scores minus the highest so far, and earlier sums are scaled down as that
        # rises.
        highest = torch.maximum(top, scores.amax(dim=-1))
        shift = torch.where(highest == -math.inf, 0.0, highest)
        powers = torch.exp(scores - shift[..., None])
        fade = torch.exp(top - shift)
        total = total * fade + powers.sum(dim=-1)
        out = out * fade[..., None] + product(powers, gathered(values, index))
        top = highest
    out = out / total[..., None]
    lse = top + torch.log(total)
    shape = (count, kv_heads * groups, QUERIES)
    return out.view(*shape, narrow).transpose(1, 2), lse.view(shape).transpose(1, 2)


def _steps(block: Int64Array, runs: BlockArray) -> int:
    # The number of blocks of keys from the first to the last that a block of queries sees.
    first, end = _seen(block, runs)
    return -(-end // KEYS) - first // KEYS


def _seen(block: Int64Array, runs: BlockArray) -> tuple[int, int]:
    # The depths first:end of the keys that a block of queries sees.
    _, rows, depth, first, last, _ = block.tolist()
    start, end, behind = runs[last - 1].tolist()
    return int(runs[first, 2]), min(behind + end - start, depth + rows)


def _together(blocks: BlockArray, runs: BlockArray, count: int, device: torch.device) -> _Together:
    # Some blocks, with the last one repeated until there are `count`.
    valid = np.zeros((count, QUERIES), np.bool_)
    rows = np.minimum(np.arange(QUERIES)[None], blocks[:, 1:2] - 1)
    valid[: len(blocks)] = np.arange(QUERIES)[None] < blocks[:, 1:2]
    steps = max(_steps(block, runs) for block in blocks)
    index = np.zeros((len(blocks), steps * KEYS), np.int64)
    depths = np.full((len(blocks), steps * KEYS), -1, np.int64)
    for at, block in enumerate(blocks):
        first, end = _seen(block, runs)
        base = first // KEYS * KEYS
        index[at] = runs[block[3], 0]  # any visible key will do
        for start, stop, depth in runs[block[3] : block[4]].tolist():
            last = min(depth + stop - start, end)
            if depth < last:
                index[at, depth - base : last - base] = np.arange(start, start + last - depth)
                depths[at, depth - base : last - base] = np.arange(depth, last)
    more = np.r_[np.arange(len(blocks)), np.full(count - len(blocks), len(blocks) - 1)]
    per_step = (each[more].reshape(count, steps, KEYS).swapaxes(0, 1) for each in (index, depths))
    numbers = ((blocks[:, column : column + 1] + rows)[more] for column in (0, 2))
    tokens, query_depths = (on_device(each, device) for each in numbers)
    at_keys = [on_device(each, device) for each in per_step]
    return _Together(tokens, on_device(valid, device), query_depths, at_keys[0], at_keys[1])


# Recurrent modules that read every path in the same pieces, so that a token's bits depend on its path alone.
#
# A piece is the tokens between two depths that are multiples of a step, and the last of a prompt is padded to as many.
# So a module is always called for pieces of one length. Pieces of several paths are computed in one call if each then
# has the same bits as alone, with one thread. That is tested for each number of pieces at its first use; if it fails,
# they are computed one by one.


# Tokens of a piece. A branch computes half of them again, on average; shorter pieces make smaller products.
PIECE = 64
TOGETHER = 16  # pieces in one call; a power of 2
_agreed: dict[Hashable, bool] = {}


@dataclass(slots=True)
class _Reader:
    """A run of a chunk's tokens that is read up to token `at`, and the `state` there; None: at a prompt's
    beginning."""

    run: NodeRun
    at: int
    state: LinearAttentionLayer | None


def read_in_pieces(
    call: ModuleCall, runs: Sequence[NodeRun], tree: Tree, states: PathStates[LinearAttentionLayer]
) -> None:
    """A `ReadRuns` (`walk/recurrent.py`): in pieces of `PIECE` tokens."""
    waiting, unfinished = list(runs), {run.node for run in runs}
    readers: list[_Reader] = []
    while waiting or readers:
        at = 0
        while at < len(waiting) and len(readers) < TOGETHER:
            if tree.parents[waiting[at].node] in unfinished:
                at += 1
            else:
                run = waiting.pop(at)
                readers.append(_Reader(run, run.start, states.before(run)))
        _read_pieces(call, readers, runs[0].start, tree, states)
        for reader in readers:
            if reader.at == reader.run.end:
                unfinished.discard(reader.run.node)
                if reader.state is not None:
                    states.after(reader.run, reader.state)
        readers = [reader for reader in readers if reader.at < reader.run.end]


def _read_pieces(
    call: ModuleCall, readers: Sequence[_Reader], first: int, tree: Tree, states: PathStates[LinearAttentionLayer]
) -> None:
    # The next piece of every reader. Tokens of the call are counted from the pack's token `first`.
    alike: dict[bool, list[tuple[_Reader, int]]] = {True: [], False: []}
    for reader in readers:
        run = reader.run
        to_depth = tree.starts[run.node] - tree.offsets[run.node]
        end = min(run.end, floor_to(reader.at + to_depth, PIECE) + PIECE - to_depth)
        if end - reader.at < PIECE and (end < run.end or states.needed(run)):  # no whole piece of a plan with steps
            reader.state = reader.state or LinearAttentionLayer(number_of_states=MOST_STATES)
            call.compute(slice(reader.at - first, end - first), reader.state)
            reader.at = end
        else:
            alike[reader.state is None].append((reader, end))
    for some in alike.values():
        if not some:
            continue
        index, valid = _tokens([(reader.at - first, end - first) for reader, end in some], call.device)
        before = [reader.state for reader, _ in some if reader.state is not None]
        found = _compute(call, index, valid, before)
        for (reader, end), state in zip(some, found, strict=True):
            reader.state, reader.at = state, end


def _tokens(spans: Sequence[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    # The tokens of spans [pieces, PIECE], padded with each span's last one, and a mask of those that are no padding.
    starts, ends = (np.asarray(each)[:, None] for each in zip(*spans, strict=True))
    numbers = starts + np.arange(PIECE)[None]
    return on_device(np.minimum(numbers, ends - 1), device), on_device(numbers < ends, device)


def _compute(
    call: ModuleCall, index: Tensor, valid: Tensor, before: Sequence[LinearAttentionLayer]
) -> list[LinearAttentionLayer]:
    # Compute pieces `index` [pieces, PIECE], behind these states or at the beginning; return the states behind them.
    pieces = len(index)
    size = 1 << (pieces - 1).bit_length()
    asked = call.kind, size, tuple(index.shape[1:]), bool(before), torch.get_num_threads()
    found: list[LinearAttentionLayer] = []
    if _agreed.get(asked, True):
        rows = [*range(pieces), *[pieces - 1] * (size - pieces)]
        state = stack_states([before[row] for row in rows]) if before else None
        state = state or LinearAttentionLayer(number_of_states=MOST_STATES)
        out = call.compute_at(index[rows], state)
        found = [pick_states(state, [row]) for row in range(pieces)]
        parts = _cut(out, slice(0, pieces))
        if asked in _agreed:
            call.put(index, valid, parts)
            return found
    with computing_with(1):
        alone, behind = [], []
        for row in range(pieces):
            own = fork_state(before[row]) if before else LinearAttentionLayer(number_of_states=MOST_STATES)
            alone.append(call.compute_at(index[row : row + 1], own))
            behind.append(own)
    for row, out in enumerate(alone):
        call.put(index[row : row + 1], valid[row : row + 1], out)
    if found:
        same_out = all(_same(_cut(parts, slice(row, row + 1)), out) for row, out in enumerate(alone))
        pairs = zip(found, behind, strict=True)
        _agreed[asked] = same_out and all(_same(tensors_of(one), tensors_of(other)) for one, other in pairs)
    return behind


def _cut(out: Any, rows: slice) -> Any:
    return out[rows] if isinstance(out, Tensor) else tuple(part[rows] for part in out)


def _same(one: Any, other: Any) -> bool:
    pairs = [(one, other)] if isinstance(one, Tensor) else zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


# Chunks, and all together.


def cut_between_pieces(tree: Tree, tokens: int, most: int) -> list[tuple[int, int]]:
    """A `ChunkCutter`: chunks of at most `most` tokens, or of one piece of a path."""
    depths = tree.depths
    first = depths == np.repeat(tree.starts, np.diff(tree.offsets))
    cuts = np.append(np.flatnonzero((depths % PIECE == 0) | first), tokens)
    chunks = []
    start = 0
    while start < tokens:
        at = int(np.searchsorted(cuts, start + most, side="right")) - 1
        end = int(cuts[at] if cuts[at] > start else cuts[at + 1])
        chunks.append((start, end))
        start = end
    return chunks


def chunk_cutter(layers: Sequence[nn.Module], device: torch.device) -> ChunkCutter:
    """The way to cut packs for these layers.

    Recurrent layers read whole pieces. For others, chunks are whole tiles, as products are: else most tensors would
    have to be copied and padded.
    """
    if any(map(recurrent_modules, layers)):
        return cut_between_pieces
    return partial(cut_anywhere, step=tile_rows(device))


def by_row() -> Arithmetic:
    """The arithmetic of a walk in which a row's bits depend on the row alone."""
    return Arithmetic(
        mode=DeterministicMode(),
        prepare=partial(fused, always=True),  # even at a loss: else a chunk's size decides between two ways
        attend=attend_by_path,
        read=read_in_pieces,
        cutter=chunk_cutter,
        state_step=PIECE,
        no_packed_weights="--deterministic: {format} weights stay packed here, and the kernels that multiply them are "
        "not known to give a row the same bits beside others\n"
        "take the model as it was before it was quantised, or leave --deterministic out",
        no_own_cache="--deterministic: this model is walked with its own attention and cache, whose sums depend on "
        "how its prompts are cut\ntake another model, or leave it out",
    )

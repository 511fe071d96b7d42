"""Quantising rows, scaling products of int8 and merging attention, in one launch each: Triton kernels for CUDA.

Each row is read once and its small numbers are written. By separate operations turning and quantising take nine
launches, which pass over the row in float32 again and again: longer than the product itself takes in FP8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TURNED = 64  # neighbouring inputs that are turned together
WIDEST = 32_768  # numbers of a row, which are in the registers of one program
_COLUMNS = 1024  # of a program that scales products
_TOKENS = 16  # of a head, in a program that merges attention
_HALF = tl.constexpr(12_582_912.0)  # 1.5 * 2**23: numbers added to it, up to 2**22, are rounded to even ones


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    rows, signs, numbers, scales, width, stride,
    LARGEST: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, TURNS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    # One row, as GROUPS groups of neighbours.
    row = tl.program_id(0).to(tl.int64)
    own = tl.arange(0, GROUP)
    at = tl.arange(0, GROUPS)[:, None] * GROUP + own[None, :]
    found = tl.load(rows + row * stride + at, mask=at < width, other=0.0)
    if TURNS:
        turn = tl.load(signs + own[:, None] * GROUP + own[None, :])
        found = tl.dot(found, turn, input_precision="ieee") * 0.125  # the root of a GROUP-th
    found = found.to(tl.float32)
    scale = tl.max(tl.abs(found)) / LARGEST
    found = found / tl.maximum(scale, 1e-30)
    if ROUNDS:
        found = (found + _HALF) - _HALF
    tl.store(numbers + row * width + at, found.to(numbers.dtype.element_ty), mask=at < width)
    tl.store(scales + row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _rescale(products, row_scales, column_scales, out, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    # Some columns of a row of products.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = at < columns
    scale = tl.load(row_scales + row) * tl.load(column_scales + at, mask=there)
    found = tl.load(products + row * columns + at, mask=there).to(tl.float32) * scale
    tl.store(out + row * columns + at, found.to(out.dtype.element_ty), mask=there)


def takes(rows: Tensor) -> bool:
    """Return whether rows are quantised in one launch: in float32 their turn is too large for one."""
    return rows.dtype != torch.float32 and rows.shape[1] <= WIDEST


def quantise(rows: Tensor, signs: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
    """Rows [rows, width] in small numbers of a `dtype`, turned by the `signs` [TURNED, TURNED] of a Hadamard matrix,
    in the rows' dtype, where the width is a multiple of that; and what gives the rows back, float32 [rows, 1]."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    count, width = rows.shape
    numbers = torch.empty(count, width, dtype=dtype, device=rows.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=rows.device)
    groups = max(16, triton.next_power_of_2(-(-width // TURNED)))  # 16: the fewest rows of a product
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _quantise[(count,)](
            rows, signs, numbers, scales, width, rows.stride(0), LARGEST=largest, GROUPS=groups,
            GROUP=TURNED, TURNS=width % TURNED == 0, ROUNDS=dtype == torch.int8, num_warps=max(4, groups // 32),
        )  # fmt: skip
    return numbers, scales


def rescale(products: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Products int32 [rows, columns] times the scales of rows [rows, 1] and of columns [columns, 1], in `dtype`."""
    count, columns = products.shape
    out = torch.empty(count, columns, dtype=dtype, device=products.device)
    with torch.cuda.device_of(products):  # type: ignore[no-untyped-call]
        _rescale[(count, triton.cdiv(columns, _COLUMNS))](
            products, row_scales, column_scales, out, columns, COLUMNS=_COLUMNS
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, lse, part, part_lse, tokens, width, out_head, out_token, lse_head, part_head, part_token, part_lse_head,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # Some tokens of a head. Strides are those of heads and of tokens.
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    there = token < tokens
    old = tl.load(lse + head * lse_head + token, mask=there, other=0.0)
    new = tl.load(part_lse + head * part_lse_head + token, mask=there, other=0.0)
    top = tl.maximum(old, new)
    top = tl.where(top == -float("inf"), 0.0, top)
    more = tl.exp(new - top)
    total = tl.exp(old - top) + more
    weight = tl.where(total == 0.0, 0.0, more / tl.where(total == 0.0, 1.0, total))
    at = tl.arange(0, WIDTH)[None, :]
    inside = there[:, None] & (at < width)
    kept = out + head * out_head + token[:, None] * out_token + at
    first = tl.load(kept, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(part + head * part_head + token[:, None] * part_token + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(kept, (first + weight[:, None] * (second - first)).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + head * lse_head + token, top + tl.log(total), mask=there)


def merges(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> bool:
    """Return whether `merge` takes such tensors."""
    return len(out) == 1 and all(each.stride(-1) == 1 for each in (out, lse, part, part_lse))


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into `out` [1, heads, tokens, width] and `lse` [1, heads, tokens], in
    place."""
    _, heads, tokens, width = out.shape
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _merge[(triton.cdiv(tokens, _TOKENS), heads)](
            out, lse, part, part_lse, tokens, width, *out.stride()[1:3], lse.stride(1), *part.stride()[1:3],
            part_lse.stride(1), TOKENS=_TOKENS, WIDTH=triton.next_power_of_2(width),
        )  # fmt: skip

"""What stands between the products of a layer, in one launch each: Triton kernels for CUDA.

Inside, all is float32, as in `layer_passes.cpp`. A row is in one program, whatever rows are beside it, and the order
of its additions follows from its width alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prefillcli.walk.fusion import NormForm, Passes

NUMBERS = 1024  # of a program, unless a row has more
HEADS = 8  # of a token, which one program turns


@triton.jit  # type: ignore[untyped-decorator]
def _gate(gates, others, out, count, TANH: tl.constexpr, NUMBERS: tl.constexpr):  # type: ignore[no-untyped-def]
    # Some numbers, in whatever rows.
    at = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    found = tl.load(gates + at, mask=at < count, other=0.0).to(tl.float32)
    power = found
    if TANH:  # x / 2 * (1 + tanh(z)) = x * sigmoid(2 z)
        power = 1.5957691216 * (found + 0.044715 * found * found * found)
    found = found / (1.0 + tl.exp(-power)) * tl.load(others + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out + at, found.to(out.dtype.element_ty), mask=at < count)


@triton.jit  # type: ignore[untyped-decorator]
def _norm(  # type: ignore[no-untyped-def]
    rows, more, sums, weights, out, count, heads, row_stride, head_stride, width, added, epsilon,
    EARLY: tl.constexpr, ADDS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # Some rows. A row is one of the `heads` of a token.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (row < count) & (at < width)
    place = row * width + at
    found = tl.load(rows + row // heads * row_stride + row % heads * head_stride + at, mask=inside, other=0.0)
    if ADDS:
        found = found.to(tl.float32) + tl.load(more + place, mask=inside, other=0.0).to(tl.float32)
        found = found.to(sums.dtype.element_ty)
        tl.store(sums + place, found, mask=inside)
    found = found.to(tl.float32)
    found = found * tl.rsqrt(tl.sum(found * found, axis=1) / width + epsilon)[:, None]
    if EARLY:
        found = found.to(out.dtype.element_ty).to(tl.float32)
    found = found * (tl.load(weights + at, mask=at < width, other=0.0).to(tl.float32) + added)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    heads, out, first_head, count, head_stride, half, cosines, sines, HEADS: tl.constexpr, HALF: tl.constexpr
):
    # Some heads of a token: x cos + (-second half, first half) sin.
    head = first_head + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    there = at < half
    inside = (head < count) & there
    own = heads + head.to(tl.int64) * head_stride + at
    first = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(own + half, mask=inside, other=0.0).to(tl.float32)
    one = first * tl.load(cosines + at, mask=there).to(tl.float32)
    one -= second * tl.load(sines + at, mask=there).to(tl.float32)
    other = second * tl.load(cosines + half + at, mask=there).to(tl.float32)
    other += first * tl.load(sines + half + at, mask=there).to(tl.float32)
    to = out + head * 2 * half + at
    tl.store(to, one.to(out.dtype.element_ty), mask=inside)
    tl.store(to + half, other.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotary(  # type: ignore[no-untyped-def]
    query, key, cosines, sines, query_out, key_out, half, queries, query_head, query_token, keys, key_head, key_token,
    HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    # Some heads of a token, of its queries or its keys. Strides are those of heads and of tokens.
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    before = tl.cdiv(queries, HEADS)
    cosines += token * 2 * half
    sines += token * 2 * half
    if group < before:
        to = query_out + token * queries * 2 * half
        _turn(query + token * query_token, to, group * HEADS, queries, query_head, half, cosines, sines, HEADS, HALF)
    else:
        to = key_out + token * keys * 2 * half
        group -= before
        _turn(key + token * key_token, to, group * HEADS, keys, key_head, half, cosines, sines, HEADS, HALF)


class TritonPasses(Passes):
    """The kernels, for tensors on a CUDA device of this compute capability; a sum alone is torch's."""

    KIND = "cuda"

    def __init__(self, capability: tuple[int, int]) -> None:
        half = (torch.float16,) if capability < (8, 0) else (torch.bfloat16, torch.float16)
        super().__init__((*half, torch.float32))

    def gate(self, activation: int, gates: Tensor, others: Tensor) -> Tensor:
        gates, others = gates.contiguous(), others.contiguous()
        out, count = torch.empty_like(gates), gates.numel()
        with torch.cuda.device_of(gates):  # type: ignore[no-untyped-call]
            _gate[(triton.cdiv(count, NUMBERS),)](gates, others, out, count, TANH=activation == 1, NUMBERS=NUMBERS)
        return out

    def norm(self, rows: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        return _normed(rows, None, weight, form)

    def add_and_norm(self, rows: Tensor, more: Tensor, weight: Tensor, form: NormForm) -> Tensor:
        return _normed(rows, more.contiguous(), weight, form)

    def rotary(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        tokens, width = query.shape[2:]
        both = query, key
        out = [each.new_empty(1, tokens, each.shape[1], width) for each in both]
        sizes = [size for each in both for size in (each.shape[1], *each.stride()[1:3])]
        grid = tokens, sum(triton.cdiv(each.shape[1], HEADS) for each in both)
        with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            _rotary[grid](
                query, key, cosines, sines, *out, width // 2, *sizes,
                HEADS=HEADS, HALF=triton.next_power_of_2(width // 2),
            )  # fmt: skip
        return out[0].transpose(1, 2), out[1].transpose(1, 2)


def _normed(rows: Tensor, more: Tensor | None, weight: Tensor, form: NormForm) -> Tensor:
    # The norm of rows, or of their sums with `more`, which are in the place of the rows then.
    width = rows.shape[-1]
    out, count = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device), rows.numel() // width
    sizes = (1, width, width) if rows.is_contiguous() else (rows.shape[2], rows.stride(1), rows.stride(2))
    wide = triton.next_power_of_2(width)
    together = max(NUMBERS // wide, 1)
    with torch.cuda.device_of(rows):  # type: ignore[no-untyped-call]
        _norm[(triton.cdiv(count, together),)](
            rows, rows if more is None else more, rows, weight, out, count, *sizes, width, form.added, form.epsilon,
            EARLY=form.early, ADDS=more is not None, ROWS=together, WIDTH=wide,
            num_warps=min(max(wide // 1024, 4), 16),
        )  # fmt: skip
    return out

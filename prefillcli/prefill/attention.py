"""Attention with its log-sum-exp, so that attention over parts of the keys can be merged.

Shapes are `[batch, heads, tokens, head_dim]` as in transformers' attention functions; K,V may have fewer heads than
the queries (GQA), and are never repeated. The log-sum-exp is float32 `[batch, heads, tokens]`, natural, of the
scaled scores.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from prefillcli.prefill.attention_paths import may_take
from prefillcli.prefill.cpu_kernels import Shift, attend_by_products, fast_products, products_pay

KEY_BLOCK = 1024  # keys at a time where scores are computed explicitly
COPIED_KEYS = 4096  # keys at a time where they are copied: on CPUs below float32, by the kernel for every query head


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
    shift: Shift | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of `query` over `key`, `value`: the output and its log-sum-exp.

    `causal` needs as many keys as queries. `visible` (bool, broadcastable to `[batch, 1, queries, keys]`) hides keys;
    a query that sees none gets output 0 and log-sum-exp -inf. `softcap` bounds each score s to
    `softcap * tanh(s / softcap)`. With a `shift`, made for this `scale`, the keys are moved and the log-sum-exp is of
    the moved scores; it cannot be combined with a soft cap.
    """
    if softcap is None and query.device.type == "cpu":
        if query.dtype == torch.float32 or causal or visible is not None:
            return _attend_on_cpu(query, key, value, scale, causal, visible, shift)
        out = lse = None
        for start in range(0, key.shape[2], COPIED_KEYS):
            k, v = (x[:, :, start : start + COPIED_KEYS] for x in (key, value))
            part = _attend_on_cpu(query, k, v, scale, False, None, shift)
            if out is None or lse is None:
                out, lse = part
            else:
                merge_into(out, lse, *part)
        if out is None or lse is None:
            raise ValueError("no keys to attend over")
        return out, lse
    if softcap is None and visible is None and fits_flash(query, value):
        wide = _widened(value, query.shape[-1])
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, wide, 0.0, causal, scale=scale)
        return found[0][..., : value.shape[-1]], found[1]
    if shift:
        key, scale = shift.moved(key), math.log(2)
    return attend_blockwise(query, key, value, scale=scale, causal=causal, visible=visible, softcap=softcap)


def longest_batched(device: torch.device, dtype: torch.dtype) -> int:
    """Pieces of similar length with at most so many tokens are faster as one padded batch than one by one."""
    if device.type == "cuda":
        return 1024
    return 256 if fast_products(device, dtype) else 64


def _attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, visible: Tensor | None, shift: Shift | None
) -> tuple[Tensor, Tensor]:
    if shift is not None:
        key, scale = shift.moved(key), math.log(2)
        if visible is None and products_pay(query, key):
            return attend_by_products(query, key, value, causal=causal, safe=shift.safe)
    width, narrow = query.shape[-1], value.shape[-1]
    if width == narrow:
        return _flash_cpu(query, key, value, scale, causal, visible)
    # Explicit scores are faster than wider values, except for triangles. In bfloat16 they are less exact.
    exact = query.dtype == torch.float32 or shift is not None
    if narrow > width or (exact and not causal):
        return attend_blockwise(query, key, value, scale=scale, causal=causal, visible=visible)
    out, lse = _flash_cpu(query, key, _widened(value, width), scale, causal, visible)
    return out[..., :narrow], lse


def fits_flash(query: Tensor, value: Tensor) -> bool:
    """Whether the device's flash kernel takes such queries and values, the latter made as wide as the former.

    It is PyTorch's for CUDA, and needs compute capability 8.0: a T4 or V100 has none.
    """
    width, device = query.shape[-1], query.device
    if device.type != "cuda" or query.dtype == torch.float32 or value.shape[-1] > width:
        return False
    return width <= 256 and width % 8 == 0 and may_take("flash-cuda", device) and compute_capability(device) >= (8, 0)


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """What a CUDA device can do, as NVIDIA counts it."""
    return torch.cuda.get_device_capability(device)


def _widened(value: Tensor, width: int) -> Tensor:
    """The values with zeros behind, as wide as the keys: what flash kernels want."""
    return functional.pad(value, (0, width - value.shape[-1])) if value.shape[-1] < width else value


def _flash_cpu(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    if not may_take("flash-cpu", query.device):
        return attend_blockwise(query, key, value, scale=scale, causal=causal, visible=visible)
    bias = None
    if visible is not None:
        bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    if visible is not None:  # the kernel says 0 where nothing is seen
        lse = torch.where(visible.any(dim=-1), lse, -math.inf)
    return out, lse


def attend_blockwise(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    visible: Tensor | None = None,
    softcap: float | None = None,
    block: int = KEY_BLOCK,
) -> tuple[Tensor, Tensor]:
    """`attend` with explicit scores, in blocks of keys under an online softmax in float32. Runs on any device.

    Half-precision products are not rounded: with scores around 200, rounding would move them by whole units.
    """
    if not causal:
        return _attend_in_blocks(query, key, value, scale, visible, softcap, block)
    parts = []
    for start in range(0, query.shape[2], block):  # the keys behind a block of queries are left out
        rows = query[:, :, start : start + block]
        end = start + rows.shape[2]
        parts.append(_attend_in_blocks(rows, key[:, :, :end], value[:, :, :end], scale, None, softcap, block, start))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([out for out, _ in parts], dim=2), torch.cat([lse for _, lse in parts], dim=2)


def _attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visible: Tensor | None,
    softcap: float | None,
    block: int,
    first: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend_blockwise`; where queries are causal, the `first` of them stands at that key, the last at the end."""
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    stacked = query.reshape(batch * kv_heads, heads // kv_heads * queries, width)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    out = torch.zeros(*stacked.shape[:2], value.shape[-1], device=query.device)
    total = torch.zeros(stacked.shape[:2], device=query.device)
    top = torch.full_like(total, -math.inf)
    steps = range(0, keys, block) if first is None else range(0, first + 1, block)
    for start in steps:
        part = slice(start, min(start + block, keys))
        scores = _product(stacked, key[:, part].transpose(1, 2)).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        seen = None if visible is None else visible[..., part]
        if start == first:
            seen = torch.ones(queries, keys - start, dtype=torch.bool, device=query.device).tril()
        if seen is not None:
            hidden = ~seen.expand(batch, 1, queries, -1).unsqueeze(2)
            scores.view(batch, kv_heads, -1, queries, hidden.shape[-1]).masked_fill_(hidden, -math.inf)
        new_top = torch.maximum(top, scores.amax(dim=-1))
        shift = torch.where(new_top == -math.inf, 0.0, new_top)
        scores.sub_(shift.unsqueeze(-1)).exp_()
        fade = torch.exp(top - shift)
        total.mul_(fade).add_(scores.sum(dim=-1))
        out.mul_(fade.unsqueeze(-1)).add_(_product(scores, value[:, part]))
        top = new_top
    lse = torch.where(total == 0, -math.inf, top + torch.log(total))
    out.div_(torch.where(total == 0, 1.0, total).unsqueeze(-1))
    shape = (batch, heads, queries)
    return out.to(query.dtype).view(*shape, -1), lse.view(shape)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """The product of `one` [n, rows, m], which may be float32, and `other` [n, m, columns], in float32."""
    if other.dtype == torch.float32:
        return torch.bmm(one, other)
    if other.device.type == "cuda" and torch.version.hip is None:
        return torch.bmm(one.to(other.dtype), other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into `out` and `lse`, in place.

    The share of the new part is exp(part_lse) / (exp(lse) + exp(part_lse)). A query that sees nothing of either stays
    so.
    """
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0).unsqueeze(-1).to(out.dtype)
    out.lerp_(part.to(out.dtype), weight)
    torch.logaddexp(lse, part_lse, out=lse)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let each head's sink (a learned score without a value; `sinks` [heads]) take its share, in place."""
    out.mul_(torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1).to(out.dtype))


def room_for_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output `[1, heads, tokens, width]` (a view of `[1, tokens, heads, width]`) and log-sum-exp."""
    _, heads, tokens, _ = query.shape
    out = torch.empty(1, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    return out.transpose(1, 2), torch.empty(1, heads, tokens, dtype=torch.float32, device=query.device)

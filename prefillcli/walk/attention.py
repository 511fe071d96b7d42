"""The ways to compute attention, by name, and those that are ruled out on a device."""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from prefillcli.runtime.user_cache import compile_beside, load_compiled, share_openmp, why_not_compiled

#: Each way with a description. "blocks" runs everywhere, and takes the place of a way that is ruled out.
PATHS: dict[str, str] = {
    "blocks": "explicit scores in float32, some keys at a time",
    "flash-cpu": "PyTorch's flash attention for CPUs",
    "products": "products in bfloat16 whose scores stay in the cache, on CPUs with instructions for them",
    "kernel": "a whole chunk in one call of the compiled kernel, on CPUs with AVX2",
    "flash-cuda": "PyTorch's flash attention for CUDA",
    "varlen-flash": "the same for many sequences of different lengths in one call",
    "flex": "compiled flex attention, for soft caps",
}

_ruled_out: dict[tuple[str, torch.device], str] = {}


def rule_out(path: str, device: torch.device, why: str) -> None:
    """Rule out this way of attention on `device`, in this process. Raises KeyError for an unknown way."""
    if path not in PATHS:
        raise KeyError(path)
    _ruled_out[path, _plain(device)] = why


def only_blocks(device: torch.device, why: str) -> None:
    """Compute attention on `device` with explicit scores alone."""
    for path in PATHS:
        if path != "blocks" and may_take(path, device):
            rule_out(path, device, why)


def may_take(path: str, device: torch.device) -> bool:
    """Return whether attention on `device` may be computed this way."""
    return (path, _plain(device)) not in _ruled_out


def ruled_out(device: torch.device) -> dict[str, str]:
    """The ways that are ruled out on `device`, and why."""
    return {path: why for (path, where), why in _ruled_out.items() if where == _plain(device)}


def allow_all() -> None:
    _ruled_out.clear()


def _plain(device: torch.device) -> torch.device:
    # The device with its number: "cuda" is the first one.
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device


ROWS = 512  # queries at a time, those of all heads of a K,V head together
SCORES = ROWS * 1024  # of a K,V head at a time
TOGETHER = 4 * SCORES  # of all sequences and heads at a time
LOG2_E = math.log2(math.e)
ROW_STEP, KEY_STEP = 16, 64  # rows and keys of a product are multiples of these
MOVED_KEYS = 4096  # at a time, in float32
SAFE = 80.0  # 2 to the power of it, summed over a million keys and weighed with values, is within float32
FEWEST_SCORES, FEWEST_KEYS = 8192, 32  # of all sequences, of one head: with fewer, the flash kernel is as fast


@dataclass(slots=True)
class Shift:
    """The shift and scale of a layer's keys: `factor * key + offset`, the latter float32 [1, kv heads, 1, width].

    A query's product with a moved key is its score as a binary logarithm, less a number that is the same for all keys:
    a softmax does not change with it, and the powers stay small enough to need no maximum.
    All parts of a query's attention must be over keys with the same shift: log-sum-exps are of the moved scores.
    """

    factor: float
    offset: Tensor
    key: float = 0.0  # length of the longest moved key
    query: float = 0.0  # of the longest query

    @classmethod
    def of(cls, key: Tensor, scale: float) -> Shift:
        """The shift that brings the mean of these keys to 0. Scores are `scale` times a product."""
        factor = scale * LOG2_E
        return cls(factor, key.mean(dim=2, keepdim=True, dtype=torch.float32).mul_(-factor))

    def include(self, key: Tensor | None = None, query: Tensor | None = None) -> None:
        """Take note of keys and queries that attention will be called with."""
        for part in () if key is None else torch.split(key, MOVED_KEYS, dim=2):
            self.key = max(self.key, _longest(self.moved(part)))
        if query is not None:
            self.query = max(self.query, _longest(query))

    def moved(self, key: Tensor) -> Tensor:
        """A copy of the keys, rounded once: a bfloat16 addition would round the factor, too."""
        return torch.add(self.offset, key, alpha=self.factor).to(key.dtype)

    @property
    def safe(self) -> bool:
        """Return whether no power of a moved score overflows."""
        # No product of two vectors is larger than the product of their lengths (Cauchy-Schwarz).
        return self.query * self.key <= SAFE

    def taken(self, query: Tensor) -> Tensor:
        """The amount by which moving the keys has lowered the queries' scores, float32 `[1, heads, tokens]`."""
        offset = self.offset.repeat_interleave(query.shape[1] // self.offset.shape[1], dim=1)
        return torch.matmul(query.float(), offset.transpose(2, 3)).squeeze(3).mul_(-math.log(2))


def fast_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether this device is fast at products: bfloat16 on a CPU with instructions for it."""
    cpu = device.type == "cpu" and dtype == torch.bfloat16
    return cpu and has_bfloat16_instructions() and may_take("products", device)


@cache
def has_bfloat16_instructions() -> bool:
    """Return whether the processor multiplies matrices of bfloat16 by itself."""
    return bool({"amx_bf16", "avx512_bf16"} & _instructions())


def _instructions() -> set[str]:
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not say which
    hidden = _HIDDEN.get(torch.backends.cpu.get_cpu_capability(), ())
    return {name for name, there in able.items() if there and not name.startswith(hidden)}


def products_pay(query: Tensor, key: Tensor) -> bool:
    """Return whether this is faster than the flash kernel, for tensors that have a `Shift`."""
    keys = key.shape[0] * key.shape[2]
    return keys >= FEWEST_KEYS and keys * query.shape[2] >= FEWEST_SCORES


def attend_by_products(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, safe: bool = False
) -> tuple[Tensor, Tensor]:
    """Softmax attention over moved keys: the output and its log-sum-exp, shaped as in `attention.attend`.

    All tensors have one dtype; this way is made for bfloat16. `causal` needs as many keys as queries. `safe`: no power
    of a score overflows.
    """
    batch, heads, queries = query.shape[:3]
    kv_heads, keys = key.shape[1:3]
    groups = heads // kv_heads
    query = query.view(batch, kv_heads, groups, queries, -1)
    out = torch.empty(batch, queries, heads, value.shape[-1], dtype=query.dtype).transpose(1, 2)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32)
    out_rows, lse_rows = (x.view(batch, kv_heads, groups, *x.shape[2:]) for x in (out, lse))
    rows = max(ROWS // groups, 1)
    sequences = max(TOGETHER // (heads * min(rows, queries) * min(keys, SCORES // ROWS)), 1)
    for first in range(0, batch, sequences):
        some = slice(first, first + sequences)
        for start in range(0, queries, rows):
            at = slice(start, min(start + rows, queries))
            seen = slice(0, at.stop if causal else keys)
            values, total, part_lse = _rows(
                query[some, :, :, at], key[some, :, seen], value[some, :, seen], safe, causal
            )
            torch.div(values, total.unsqueeze(-1), out=out_rows[some, :, :, at])
            lse_rows[some, :, :, at] = part_lse
    return out, lse


def _rows(query: Tensor, key: Tensor, value: Tensor, safe: bool, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    # Weighted sum of values, total weight and log-sum-exp, for queries `[sequences, heads, groups, tokens, width]` and
    # K,V `[sequences, heads, tokens, width]`. `causal`: the queries' tokens are the last of the keys'. Scores are
    # binary logarithms. All shapes are rounded up, because the library caches its preparations for each shape of a
    # product.
    *shape, width = query.shape
    groups, tokens = shape[2:]
    rows = round_up(tokens, ROW_STEP)
    stacked = _padded(query, rows).reshape(-1, groups * rows, width)
    key, value = key.flatten(0, 1), value.flatten(0, 1)
    keys = key.shape[1]
    whole = keys - tokens if causal else keys  # of these every query sees all
    step = max(SCORES // (groups * rows), 1)
    parts = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    sums: tuple[Tensor, Tensor] | None = None
    top = torch.zeros((), dtype=query.dtype)
    for start, end in [*parts, (whole, keys)] if causal else parts:
        diagonal = start >= whole
        length = rows if diagonal else round_up(end - start, KEY_STEP)
        # Contiguous: else the product makes a transposed copy, which takes a fifth of its time.
        scores = torch.bmm(stacked, _padded(key[:, start:end], length).contiguous().transpose(1, 2))
        triangle = scores.view(len(stacked), groups, rows, -1) if diagonal else None
        if triangle is None:
            scores[..., end - start :].fill_(-math.inf)
        elif not safe:
            triangle.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf)
        if not safe:
            highest = scores.amax(dim=-1)
            if sums:
                highest = torch.maximum(top, highest)
                fade = torch.exp2((top - highest).float())
                sums = sums[0] * fade.unsqueeze(-1), sums[1] * fade
            top = highest
            scores.sub_(top.unsqueeze(-1))
        scores.exp2_()
        if triangle is not None:
            triangle.tril_()
        part = torch.bmm(scores, _padded(value[:, start:end], length)), scores.sum(dim=-1)
        sums = (sums[0].float().add_(part[0]), sums[1].float().add_(part[1])) if sums else part
    if sums is None:
        raise ValueError("no keys to attend over")
    values, total = sums
    lse = torch.log2(total.float()).add_(top).mul_(math.log(2))
    padded = (*shape[:3], rows)
    values, total, lse = (x.view(*padded, *x.shape[2:])[:, :, :, :tokens] for x in (values, total, lse))
    return values, total, lse


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step


def _padded(states: Tensor, tokens: int) -> Tensor:
    # `[..., tokens, width]`, with zeros after.
    return functional.pad(states, (0, 0, 0, tokens - states.shape[-2])) if tokens > states.shape[-2] else states


def _longest(vectors: Tensor) -> float:
    return float(torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float32).max())


# Attention of a chunk over its forest as one call of a compiled kernel, on CPUs with AVX2 or more.
#
# `forest_attention.cpp` computes what the products do, but writes no scores to memory. A tile of keys is scored,
# raised to powers of two and multiplied with its values while it is in a core's cache. Tiles follow from the depths
# of keys, so a query's result has the same bits in every pack and chunk, with any number of threads. It needs a C++
# compiler at the first start. Without one, on other processors, or where it does not agree with explicit scores, it
# is not used.


LANES = 64  # queries of all heads of a K,V head in one block, as in the source
WIDEST = 256  # numbers of a head
TILE = 96  # keys that are looked at together, as in the source
#: Compilers' flags by the instructions that they allow. Not `-march=native`: a cache of compiled libraries that
#: several machines share keeps one for each set of flags.
_FLAGS = {
    "avx2": "-mavx2",
    "fma3": "-mfma",
    "f16c": "-mf16c",
    "avx512_f": "-mavx512f",
    "avx512_bw": "-mavx512bw",
    "avx512_dq": "-mavx512dq",
    "avx512_vl": "-mavx512vl",
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
}
_TILE_FLAGS = {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16", "amx_int8": "-mamx-int8"}
#: Instructions that torch does not take, by its name for the processor, which ATEN_CPU_CAPABILITY sets.
_HIDDEN = {"AVX2": ("avx512", "amx"), "DEFAULT": ("avx", "fma", "f16c", "amx")}

BlockArray = npt.NDArray[np.int64]


class ForestKernel:
    """The kernel of a library; `form` names the instructions that it uses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        library.prefill_forest_form.restype = ctypes.c_char_p
        self.form: str = library.prefill_forest_form().decode()
        self._call = library.prefill_forest_attention
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self._call.argtypes = [*[pointer] * 6, number, pointer, pointer, number, *[ctypes.c_float] * 2, number]
        self._call.restype = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: BlockArray,
        runs: BlockArray,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of `query` [1, heads, tokens, width] over runs of `key` and `value` [1, kv heads, keys, width].

        `blocks` int64 [blocks, 6]: the first query, the number of queries, the first one's depth, the runs that the
        block sees (first and end), and the depth up to which it shares keys with the block before it; 0 if it is
        computed apart from that. Blocks that are computed together have at most `LANES` queries of all heads of a K,V
        head; with a window none begins above the first of them. `runs` int64 [runs, 3]: keys (start and end) and the
        depth of the first. Each run of a block goes on where the one before ends. A query sees keys up to its own
        depth; a sliding `window` limits them to the last `window` depths. Gives the output [1, heads, tokens, width]
        and the natural log-sum-exp of the scaled scores float32 [1, heads, tokens].
        """
        out, lse = room_for_output(query, value)
        sizes = np.array(
            [
                query.shape[1], key.shape[1], query.shape[3], value.shape[3], window or 0,
                *query.stride()[1:3], *key.stride()[1:3], *value.stride()[1:3], *out.stride()[1:3], lse.stride(1),
            ],
            np.int64,
        )  # fmt: skip
        tensors = (each.data_ptr() for each in (query, key, value, out, lse))
        arrays = (each.ctypes.data for each in (runs, sizes))
        threads = torch.get_num_threads()
        how = scale * math.log2(math.e), softcap or 0.0, query.dtype == torch.bfloat16
        self._call(*tensors, blocks.ctypes.data, len(blocks), *arrays, threads, *how)
        return out, lse


def takes(query: Tensor, value: Tensor, kv_heads: int) -> bool:
    """Return whether the kernel, where it is available, computes attention of these shapes and dtypes."""
    if query.device.type != "cpu" or query.dtype not in (torch.bfloat16, torch.float32):
        return False
    widths = query.shape[3], value.shape[3]
    return (
        query.stride(3) == value.stride(3) == 1
        and query.shape[1] % kv_heads == 0
        and query.shape[1] // kv_heads <= LANES
        and max(widths) <= WIDEST
        and not any(width % 16 for width in widths)
    )


KERNEL, PRODUCTS = "forest_attention.cpp", "int8_products.cpp"
SOURCES = (KERNEL, PRODUCTS, "layer_passes.cpp", "unpack_blocks.cpp")
_STRICT = "-ffp-contract=off"


def compile_for_all_processors() -> None:
    """Compile every C++ file for each kind of processor that has its own form, beside the files.

    For an image or an installation that runs where no compiler is: a minute or two for all of them. Raises
    OSError or SubprocessError.
    """
    every = [*_FLAGS.values()]
    avx512 = every[:7]
    kinds = (every[:3], avx512, [*avx512, _FLAGS["avx512_vnni"]], every, [*every, *_TILE_FLAGS.values()])
    package = __package__ or ""
    for kind in kinds:
        for name in SOURCES:
            compile_beside(package, name, [*kind, _STRICT])


@cache
def compiled_library(name: str, package: str = "prefillcli.walk") -> ctypes.CDLL | None:
    """The C++ file of a package, compiled for this processor; None if that is impossible.

    It shares the OpenMP threads of torch, and may use the instructions of `_FLAGS` that the processor has: compilers
    define `__AVX512BF16__` and the like.
    """
    if not share_openmp("torch"):
        return None
    have = _instructions()
    flags = [flag for instruction, flag in _FLAGS.items() if instruction in have]
    # Linux gives the state of tiles only to those that ask; an older compiler does not know them.
    tiles = have >= _TILE_FLAGS.keys() and torch.cpu._init_amx()
    for more in ([*_TILE_FLAGS.values()], []) if tiles else ([],):
        library = load_compiled(package, name, [*flags, *more, _STRICT])
        if library is not None:
            return library
    return None


def why_no_library(name: str) -> str | None:
    """Return why a C++ file of the walk is not compiled here although this processor could run it, and a cure after a
    line break. None if it is, or could not be run."""
    if not has_kernel_instructions() or compiled_library(name) is not None:
        return None
    return why_not_compiled(name)


@cache
def compiled_kernel() -> ForestKernel | None:
    """The kernel, if this machine can compile and run it."""
    if not has_kernel_instructions():
        return None
    library = compiled_library(KERNEL)
    return None if library is None else ForestKernel(library)


def forest_kernel() -> ForestKernel | None:
    """The kernel, if it is available and not ruled out."""
    return compiled_kernel() if may_take("kernel", torch.device("cpu")) else None


def has_kernel_instructions() -> bool:
    """Return whether the processor is one on which the kernel was found to be faster than torch."""
    return {"avx2", "fma3"} <= _instructions()


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

        def part(start: int) -> tuple[Tensor, Tensor]:
            k, v = (x[:, :, start : start + COPIED_KEYS] for x in (key, value))
            return _attend_on_cpu(query, k, v, scale, False, None, shift)

        out, lse = part(0)
        for start in range(COPIED_KEYS, key.shape[2], COPIED_KEYS):
            merge_into(out, lse, *part(start))
        return out, lse
    if softcap is None and visible is None and fits_flash(query, value):
        wide = _widened(value, query.shape[-1])
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, wide, 0.0, causal, scale=scale)
        return found[0][..., : value.shape[-1]], found[1]
    if shift:
        key, scale = shift.moved(key), math.log(2)
    return attend_blockwise(query, key, value, scale=scale, causal=causal, visible=visible, softcap=softcap)


def longest_batched(device: torch.device, dtype: torch.dtype) -> int:
    """The largest number of tokens at which pieces of similar length are faster as one padded batch than one by
    one."""
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
    """Return whether the device's flash kernel takes such queries and values, the latter made as wide as the former.

    It is PyTorch's for CUDA, and needs compute capability 8.0: a T4 or V100 has none.
    """
    width, device = query.shape[-1], query.device
    if device.type != "cuda" or query.dtype == torch.float32 or value.shape[-1] > width:
        return False
    return (
        width <= WIDEST and width % 8 == 0 and may_take("flash-cuda", device) and compute_capability(device) >= (8, 0)
    )


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _widened(value: Tensor, width: int) -> Tensor:
    # The values, padded with zeros to the width of the keys, as flash kernels need them.
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
    for start in range(0, query.shape[2], block):  # the keys after a block of queries are left out
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
    # `attend_blockwise`; where queries are causal, the `first` of them stands at that key, the last at the end.
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
        scores = product(stacked, key[:, part].transpose(1, 2)).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        seen = None if visible is None else visible[..., part]
        if start == first:
            seen = torch.ones(queries, keys - start, dtype=torch.bool, device=query.device).tril()
        if seen is not None:
            hidden = ~seen.expand(batch, 1, queries, -1).unsqueeze(2)
            scores.view(batch, kv_heads, -1, queries, hidden.shape[-1]).masked_fill_(hidden, -math.inf)
        # An online softmax: powers are of scores less the highest so far. When a higher score comes, the sums so far
        # are scaled down.
        new_top = torch.maximum(top, scores.amax(dim=-1))
        shift = torch.where(new_top == -math.inf, 0.0, new_top)
        scores.sub_(shift.unsqueeze(-1)).exp_()
        fade = torch.exp(top - shift)
        total.mul_(fade).add_(scores.sum(dim=-1))
        out.mul_(fade.unsqueeze(-1)).add_(product(scores, value[:, part]))
        top = new_top
    lse = torch.where(total == 0, -math.inf, top + torch.log(total))
    out.div_(torch.where(total == 0, 1.0, total).unsqueeze(-1))
    shape = (batch, heads, queries)
    return out.to(query.dtype).view(*shape, -1), lse.view(shape)


def product(one: Tensor, other: Tensor) -> Tensor:
    """The product of `one` [n, rows, m], which may be float32, and `other` [n, m, columns], in float32."""
    if other.dtype == torch.float32:
        return torch.bmm(one, other)
    if other.device.type == "cuda" and torch.version.hip is None:
        return torch.bmm(one.to(other.dtype), other, out_dtype=torch.float32)
    return torch.bmm(one.float(), other.float())


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention over further keys into `out` and `lse`, in place.

    The share of the new part is exp(part_lse) / (exp(lse) + exp(part_lse)). A query that sees nothing in either part
    stays as it is.
    """
    kernels = merging_kernels(out.device)
    if kernels is not None and kernels.merges(out, lse, part, part_lse):
        kernels.merge(out, lse, part, part_lse)
    else:
        merge_by_torch(out, lse, part, part_lse)


def merge_by_torch(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """`merge_into` by separate operations."""
    # sigmoid(b - a) is exp(b) / (exp(a) + exp(b)), and does not overflow. Where both are -inf it is NaN: nothing is
    # added.
    weight = torch.sigmoid(part_lse - lse).nan_to_num_(0.0).unsqueeze(-1).to(out.dtype)
    out.lerp_(part.to(out.dtype), weight)
    torch.logaddexp(lse, part_lse, out=lse)


@cache
def merging_kernels(device: torch.device) -> Any:
    """The functions of `triton_kernels.py`, if the device has Triton and they merge as torch does; else None."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    with suppress(Exception):  # of any of the stages of a compilation
        from prefillcli.walk import triton_kernels

        return triton_kernels if _merge_agrees(triton_kernels, device) else None
    return None


@torch.inference_mode()
def _merge_agrees(kernels: Any, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 3, 37, size, generator=generator).to(device) for size in (40, 40, 1, 1)]
    out, part, lse, part_lse = *parts[:2], *(each.squeeze(3) * 9 for each in parts[2:])
    lse[:, :, 3:9] = part_lse[:, :, 6:12] = -math.inf
    wanted = out.clone(), lse.clone()
    merge_by_torch(*wanted, part, part_lse)
    kernels.merge(out, lse, part, part_lse)
    pairs = zip((out, lse), wanted, strict=True)
    return all(torch.allclose(found, each, rtol=1e-4, atol=1e-4) for found, each in pairs)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let each head's sink (a learned score without a value; `sinks` [heads]) take its share, in place."""
    # A sink is one more term of the sum, exp(sink), with the value 0: the rest's share is exp(lse) / (exp(lse) +
    # exp(sink)).
    share = torch.sigmoid(lse - sinks.float().view(1, -1, 1)).unsqueeze(-1)
    out.mul_(share)  # float32 times the output, so only the product is rounded


def room_for_output(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised output `[1, heads, tokens, width]` (a view of `[1, tokens, heads, width]`) and log-sum-exp."""
    _, heads, tokens, _ = query.shape
    out = torch.empty(1, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device)
    return out.transpose(1, 2), torch.empty(1, heads, tokens, dtype=torch.float32, device=query.device)

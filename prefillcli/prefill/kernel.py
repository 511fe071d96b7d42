"""Attention of a chunk over its forest as one call of a compiled kernel, on CPUs with AVX512-BF16.

`forest_attention.cpp` computes what the products do, but writes no scores to memory. A tile of keys is scored, raised
to powers of two and multiplied with its values while it is in a core's cache. Tiles follow from the depths of keys, so
a query's result has the same bits in every pack and chunk, with any number of threads. It needs a C++ compiler at the
first start. Without one, on other processors, or where it does not agree with explicit scores, it is not used.
"""

from __future__ import annotations

import ctypes
import math
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prefillcli.prefill.attention_paths import may_take
from prefillcli.runtime.compiled import load_compiled, share_openmp

LANES = 64  # queries of all heads of a K,V head in one block, as in the source
WIDEST = 256  # numbers of a head, as in the source
_SOURCE = ("prefillcli.prefill", "forest_attention.cpp")
_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mfma", "-ffp-contract=off")

BlockArray = npt.NDArray[np.int64]


class ForestKernel:
    """The compiled kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
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
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attention of `query` [1, heads, tokens, width] over runs of `key` and `value` [1, kv heads, keys, width].

        `blocks` int64 [blocks, 5]: the first query and how many there are, its depth, and which of the runs it sees
        (first and end); at most `LANES` queries of all heads of a K,V head. `runs` int64 [runs, 3]: keys (start and
        end) and the depth of the first; those of a block go on where the one before ends. A query sees keys up to its
        own depth, and with a sliding `window` those of the last so many depths. Written are `out`
        [1, heads, tokens, width] and the natural log-sum-exp of the scaled scores `lse` float32 [1, heads, tokens].
        """
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


def takes(query: Tensor, value: Tensor, kv_heads: int) -> bool:
    """Whether the kernel computes attention of these shapes and dtypes, where it is there."""
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


@cache
def compiled_kernel() -> ForestKernel | None:
    """The kernel, if this machine can compile and run it."""
    if not has_kernel_instructions() or not share_openmp("torch"):
        return None
    library = load_compiled(*_SOURCE, _FLAGS)
    return None if library is None else ForestKernel(library)


def forest_kernel() -> ForestKernel | None:
    """The kernel, if it is there and is not ruled out."""
    return compiled_kernel() if may_take("kernel", torch.device("cpu")) else None


def has_kernel_instructions() -> bool:
    """Whether the processor has what the kernel is compiled for."""
    able: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # an older torch does not tell
    return all(able.get(name) for name in ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"))

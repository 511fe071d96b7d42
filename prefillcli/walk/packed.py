"""Numbers that stay in GGUF's blocks in memory, and are unpacked where they are used.

A block holds small integers with their scales. A compiled function unpacks the common kinds (`unpack_blocks.cpp`); the
package `gguf` unpacks the others, 10 to 100 times as slowly. Both give the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from prefillcli.walk.attention import compiled_library

_STEP = 16_384  # numbers unpacked at a time for another dtype: for so few torch starts no threads
_HEAD_NUMBERS = 16 << 20  # of a head that are unpacked at a time
FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # kinds that are plain numbers


def block_of(kind: int) -> tuple[int, int]:
    """Return how many numbers a block of a kind has, and how many bytes. The package `gguf` must know the kind."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    return int(numbers), int(size)


def blocks_bytes(kind: int, count: int) -> int:
    """Return the bytes of `count` numbers of a kind, in whole blocks."""
    numbers, size = block_of(kind)
    return count // numbers * size


def unpack(kind: int, saved: Tensor, target: Tensor, *, threads: int = 1) -> None:
    """Fill `target` [numbers] with the numbers of the blocks in `saved` uint8 [bytes], both on the CPU and contiguous.
    They are those of `gguf.dequantize`, rounded to the dtype of `target`."""
    if kind in FLOATS:
        target.copy_(saved.view(FLOATS[kind]))
        return
    numbers, size = block_of(kind)
    if target.dtype == torch.float32:
        _unpack(kind, saved, target, len(target) // numbers, threads)
        return
    scratch = torch.empty(min(_STEP, len(target)))
    for start in range(0, len(target), _STEP):
        part = target[start : start + _STEP]
        own = scratch[: len(part)]
        _unpack(kind, saved[start // numbers * size :], own, len(part) // numbers, 1)
        part.copy_(own)


def _unpack(kind: int, saved: Tensor, target: Tensor, blocks: int, threads: int) -> None:
    function = _compiled()
    if function is not None and function(kind, saved.data_ptr(), blocks, threads, target.data_ptr()):
        return
    import gguf

    _, size = block_of(kind)
    rows = saved[: blocks * size].view(blocks, size).numpy()
    target.copy_(torch.from_numpy(gguf.dequantize(rows, gguf.GGMLQuantizationType(kind))).view(-1))


@cache
def _compiled() -> Any | None:
    library = compiled_library("unpack_blocks.cpp")
    if library is None:
        return None
    number, address = ctypes.c_int64, ctypes.c_void_p
    library.prefill_unpack_blocks.argtypes = [number, address, number, number, address]
    library.prefill_unpack_blocks.restype = number
    return library.prefill_unpack_blocks


class PackedMatrix:
    """A matrix [rows, width] in blocks: `saved` uint8 [rows, bytes]. Its numbers have the values that they have in
    `dtype`."""

    def __init__(self, kind: int, saved: Tensor, width: int, dtype: torch.dtype) -> None:
        self._kind, self._saved, self._width, self._dtype = kind, saved, width, dtype

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def nbytes(self) -> int:
        return self._saved.nbytes

    def rows(self, at: Tensor | slice) -> Tensor:
        """Return some rows [rows, width]."""
        saved = self._saved[at].contiguous()
        found = torch.empty(len(saved), self._width, dtype=self._dtype)
        unpack(self._kind, saved.view(-1), found.view(-1), threads=torch.get_num_threads())
        return found

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows, some at a time: their places and their numbers."""
        step = max(64, _HEAD_NUMBERS // self._width // 64 * 64)
        for start in range(0, len(self), step):
            at = slice(start, min(start + step, len(self)))
            yield at, self.rows(at)


def packed_rows(module: nn.Module) -> PackedMatrix | None:
    """Return the packed weight of an embedding or a head; None where it is an ordinary one."""
    found: PackedMatrix | None = getattr(module, "packed_weight", None)
    return found


def keep_packed(module: nn.Embedding | nn.Linear, matrix: PackedMatrix) -> None:
    """Give an embedding or a head its weight as a packed matrix: only the rows that are used are unpacked, of a head
    some at a time. Its own weight becomes one without numbers, on the meta device."""
    vars(module)["packed_weight"] = matrix
    if not module.weight.is_meta:
        module.weight = nn.Parameter(torch.empty_like(module.weight, device="meta"), requires_grad=False)
    if isinstance(module, nn.Embedding):
        module.padding_idx = None  # which is for training, and no number of the rows that are used
        vars(module)["forward"] = partial(_embed, module, matrix)
    else:
        vars(module)["forward"] = partial(_multiply, module, matrix)


def _embed(module: nn.Embedding, matrix: PackedMatrix, tokens: Tensor) -> Tensor:
    at, places = torch.unique(tokens, return_inverse=True)
    return _with_weight(module, matrix.rows(at), type(module).forward, places)


def _multiply(module: nn.Linear, matrix: PackedMatrix, rows: Tensor) -> Tensor:
    out = rows.new_empty(*rows.shape[:-1], len(matrix))
    for at, weight in matrix.pieces():
        bias = None if module.bias is None else module.bias[at]
        out[..., at] = nn.functional.linear(rows, weight.to(rows.dtype), bias)
    return out


def _with_weight(module: nn.Module, weight: Tensor, forward: Callable[..., Tensor], *args: Any) -> Tensor:
    # What the module's class computes with another weight, in the dtype that its own has now.
    own = module._parameters["weight"]
    dtype = weight.dtype if own is None else own.dtype
    module._parameters["weight"] = nn.Parameter(weight.to(dtype), requires_grad=False)
    try:
        return forward(module, *args)
    finally:
        module._parameters["weight"] = own

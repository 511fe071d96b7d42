"""CUDA tensors without a GPU: they have shapes, dtypes and a device, but no numbers. Calls on them are counted."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from prefillcli.walk import attention, cuda_kernels, fusion, narrow

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)  # of the device that there is not
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>) }
"""
_FREE = ("_unsafe_view", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "lift_fresh")
_COMPARE = ("equal", "allclose")
_READ = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", *_COMPARE)
_COPY = ("_to_copy", "copy_")


class OperatorCounts(TorchDispatchMode):
    """Counts operators that compute on CUDA, and those for which the host waits.

    `launches` is by operator; views and allocations are none. `waits` is by reason: numbers that the host reads,
    boolean indices, whose size it must know, and copies between the host and the device, unless they are from pinned
    memory and nobody waits. A boolean index is taken as if every entry were True.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    @property
    def flash(self) -> int:
        """Calls of flash attention."""
        return sum(count for name, count in self.launches.items() if "flash_attention" in name or "varlen" in name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        namespace, name = func._schema.name.split("::")
        if namespace == "prim":
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:  # what it is made of is counted, in inference mode too
                return func.decompose(*args, **kwargs)
        if name in ("index", "index_put", "index_put_"):
            args = self._plain_index(name, args)
        found = name in _COMPARE or func(*args, **kwargs)  # fake tensors have no numbers to compare
        given = [each for each in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        made = [each for each in torch.utils._pytree.tree_leaves(found) if isinstance(each, Tensor)]
        if not any(each.is_cuda for each in [*given, *made]):
            return found
        if name in _READ:
            self.waits[name] += 1
        if name in _COPY:
            self._count_copy(name, given, made, kwargs, args)
        if name not in _FREE and not _is_view(func):
            self.launches[name] += 1
            self.launches["zeros"] += name == "_varlen_attn"  # a state of random numbers, which it never uses
        return found

    def _count_copy(self, name: str, given: list[Tensor], made: list[Tensor], kwargs: Any, args: Any) -> None:
        source = given[1] if name == "copy_" else given[0]
        if source.device == made[0].device:
            return
        waits = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        host = made[0] if source.is_cuda else source
        if waits or not getattr(host, "is_pinned_here", False):
            self.waits["copy to the host" if source.is_cuda else "copy from the host"] += 1

    def _plain_index(self, name: str, args: Any) -> Any:
        indices: list[Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype != torch.bool:
                indices.append(index)
                continue
            self.waits["boolean index"] += index.is_cuda
            indices += [index.new_empty(index.numel(), dtype=torch.long) for _ in index.shape]
        return (args[0], indices, *args[2:])


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _flex_stand_in(counts: OperatorCounts) -> Callable[..., Any]:
    """Takes the place of compiled flex attention, which no compiler makes for a GPU that is not there: one launch."""

    def attend(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Any]:
        out = query.new_empty(*query.shape[:3], value.shape[3])
        counts.launches["flex_attention"] += 1
        return out, SimpleNamespace(lse=out.new_empty(out.shape[:3], dtype=torch.float32))

    return attend


def _narrow_stand_in(counts: OperatorCounts) -> Any:
    """Takes the place of the Triton kernels around products in small numbers: one launch each."""

    def quantise(rows: Tensor, signs: Tensor, dtype: torch.dtype, largest: float) -> tuple[Tensor, Tensor]:
        counts.launches["quantise"] += 1
        return torch.empty_like(rows, dtype=dtype), rows.new_empty(len(rows), 1, dtype=torch.float32)

    def rescale(products: Tensor, row_scales: Tensor, column_scales: Tensor, dtype: torch.dtype) -> Tensor:
        counts.launches["rescale"] += 1
        return torch.empty_like(products, dtype=dtype)

    return SimpleNamespace(quantise=quantise, rescale=rescale, takes=lambda rows: True)


def _merge_stand_in(counts: OperatorCounts) -> Any:
    """Takes the place of the Triton kernel that merges attention: one launch."""

    def merge(*tensors: Tensor) -> None:
        counts.launches["merge"] += 1

    return SimpleNamespace(merge=merge, merges=lambda *tensors: True)


class _PassesStandIn(fusion.Passes):
    """Takes the place of the Triton kernels between products: one launch each, but for a sum, which is torch's."""

    KIND = "cuda"

    def __init__(self, counts: OperatorCounts) -> None:
        super().__init__((torch.bfloat16, torch.float16, torch.float32))
        self._launches = counts.launches

    def gate(self, activation: int, gates: Tensor, others: Tensor) -> Tensor:
        self._launches["gate"] += 1
        return torch.empty_like(gates)

    def norm(self, rows: Tensor, weight: Tensor, form: fusion.NormForm) -> Tensor:
        self._launches["norm"] += 1
        return rows.new_empty(rows.shape)

    def add_and_norm(self, rows: Tensor, more: Tensor, weight: Tensor, form: fusion.NormForm) -> Tensor:
        return self.norm(rows, weight, form)

    def rotary(self, query: Tensor, key: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        self._launches["rotary"] += 1
        query, key = (each.transpose(1, 2).new_empty(each.transpose(1, 2).shape) for each in (query, key))
        return query.transpose(1, 2), key.transpose(1, 2)


#: What finds out by numbers on the CPU whether the passes compute what a class does.
_BY_NUMBERS = ("_agrees", "_form_of", "_turns", "_handed_on")


def _with_numbers(find: Callable[..., Any]) -> Callable[..., Any]:
    def found(*given: Any) -> Any:
        with _disable_current_modes():
            return find(*given)

    return found


@contextmanager
def fake_cuda() -> Iterator[OperatorCounts]:
    """Tensors made on `DEVICE` meanwhile are fake. Yields the counts of what is called on them.

    Raises RuntimeError if this torch has no CUDA and there is no C++ compiler to make up for it.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        _no_op_guard()

    def pinned(tensor: Tensor, device: Any = None) -> Tensor:
        copy = tensor.clone()
        copy.is_pinned_here = True  # type: ignore[attr-defined]
        return copy

    counts = OperatorCounts()
    with (
        patch.object(Tensor, "pin_memory", pinned),
        patch.object(attention, "compute_capability", lambda device: CAPABILITY),
        patch.object(cuda_kernels, "_lacks_compiler", lambda: None),
        patch.object(attention, "merging_kernels", lambda device: _merge_stand_in(counts)),
        patch.object(narrow, "quantising_kernels", lambda device, kind: _narrow_stand_in(counts)),
        patch.object(fusion, "triton_passes", lambda device: _PassesStandIn(counts)),
        ExitStack() as stack,
        patch.object(cuda_kernels, "compiled_flex", lambda: _flex_stand_in(counts)),
        FakeTensorMode(allow_non_fake_inputs=True),
        counts,
    ):
        for name in _BY_NUMBERS:
            stack.enter_context(patch.object(fusion, name, _with_numbers(getattr(fusion, name))))
        yield counts


@cache
def _no_op_guard() -> ctypes.CDLL:
    """Lets a torch that is built without CUDA change to a CUDA device, which does nothing."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("fake CUDA tensors need a C++ compiler where torch is built without CUDA")
    torch_folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "guard.so"
        (Path(folder) / "guard.cpp").write_text(_GUARD)
        flags = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
        linked = [f"-L{torch_folder / 'lib'}", "-lc10"]  # which is loaded already
        subprocess.run([compiler, *flags, f"{folder}/guard.cpp", "-o", str(made), *linked], check=True)
        return ctypes.CDLL(str(made))

"""The compiled kernels for other processors than this one: attention against explicit scores, int8 against NumPy."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from importlib import resources
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.runtime import user_cache
from prefillcli.walk import attention, attention_checks
from prefillcli.walk.attention import ForestKernel
from prefillcli.walk.narrow import Int8Kernel
from tests.unit.walk import test_kernel as kernels
from tests.unit.walk import test_narrow as products

pytestmark = pytest.mark.nightly

HERE = Path(__file__).parent / "kernel_forms"
SOURCE = resources.files("prefillcli.walk").joinpath("forest_attention.cpp")
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
#: What the kernel is compiled for, and the instructions of this processor that it needs. A model of Intel's tile
#: instructions takes the place of those.
HERE_TOO = {
    "AVX2": (["-mavx2", "-mfma"], {"avx2", "fma3"}),
    "AVX-512": (["-mavx2", "-mfma", "-mavx512f"], {"avx512_f"}),
    "AMX": (
        ["-mavx2", "-mfma", "-mavx512f", "-mavx512bf16", "-include", str(HERE / "tiles.h")],
        {"avx512_f", "avx512_bf16"},
    ),
}
_VNNI = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16", "-mavx512vnni"]
INT8_HERE_TOO = {
    "AVX2": (["-mavx2", "-mfma"], {"avx2", "fma3"}),
    "AVX512-VNNI": (_VNNI, {"avx512_vnni", "avx512_bf16"}),
    "AMX": ([*_VNNI, "-include", str(HERE / "tiles.h")], {"avx512_vnni", "avx512_bf16"}),
}


class EmulatedKernel(ForestKernel):
    """The kernel in another program, which is run by a command."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._command, self._folder = command, folder

    def _call(self, *arguments: Any) -> None:
        pointers, (blocks, count, runs, sizes, _, factor, cap, halves) = arguments[:5], arguments[5:]
        number = 2 if halves else 4
        told = np.frombuffer(ctypes.string_at(sizes, 14 * 8), np.int64)
        heads, kv_heads, width, value_width = told[:4].tolist()
        table = np.frombuffer(ctypes.string_at(blocks, count * 48), np.int64).reshape(-1, 6)
        spans = np.frombuffer(ctypes.string_at(runs, int(table[:, 4].max()) * 24), np.int64).reshape(-1, 3)
        queries, keys = int((table[:, 0] + table[:, 1]).max()), int(spans[:, 1].max())

        def extent(rows: int, tokens: int, wide: int, steps: slice) -> int:
            return number * int(np.dot(told[steps], (rows - 1, tokens - 1)) + wide)

        lengths = (
            extent(heads, queries, width, slice(5, 7)), extent(kv_heads, keys, width, slice(7, 9)),
            extent(kv_heads, keys, value_width, slice(9, 11)), extent(heads, queries, value_width, slice(11, 13)),
            4 * int(told[13] * (heads - 1) + queries),
        )  # fmt: skip
        parts = [*starmap(ctypes.string_at, zip(pointers, lengths, strict=True))]
        parts += [table.tobytes(), spans.tobytes(), told.tobytes()]
        given, found = self._folder / "given", self._folder / "found"
        how = np.array((factor, cap), np.float32).tobytes() + np.int64(halves).tobytes()
        given.write_bytes(b"".join(np.int64(len(part)).tobytes() + part for part in parts) + how)
        subprocess.run([*self._command, str(given), str(found)], check=True, timeout=600)
        out = found.read_bytes()
        assert len(out) == lengths[3] + lengths[4]
        ctypes.memmove(pointers[3], out[: lengths[3]], lengths[3])
        ctypes.memmove(pointers[4], out[lengths[3] :], lengths[4])


def assert_agrees(kernel: ForestKernel, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_checks, "compiled_kernel", lambda: kernel)
    monkeypatch.setattr(attention_checks, "has_kernel_instructions", lambda: True)
    check = attention_checks.check_path("kernel", torch.device("cpu"), dtype)
    assert check.status == "agrees", check.why
    assert check.error is not None
    assert check.error < (1.5e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", HERE_TOO)
def test_the_kernel_for_other_instructions_agrees(
    form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, needed = HERE_TOO[form]
    if not needed <= attention._instructions():
        pytest.skip(f"the processor lacks {', '.join(sorted(needed))}")
    library = user_cache.load_compiled("prefillcli.walk", "forest_attention.cpp", [*flags, "-ffp-contract=off"])
    if library is None:
        pytest.skip("no C++ compiler")
    kernel = ForestKernel(library)
    assert kernel.form == form
    assert_agrees(kernel, dtype, monkeypatch)
    monkeypatch.setattr(attention, "compiled_kernel", lambda: kernel)
    kernels.test_nodes_that_are_computed_together_get_the_bits_of_one_alone()


@pytest.mark.parametrize("form", INT8_HERE_TOO)
def test_products_of_int8_for_other_instructions_are_those_of_the_rounded_numbers(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags, needed = INT8_HERE_TOO[form]
    if not needed <= attention._instructions():
        pytest.skip(f"the processor lacks {', '.join(sorted(needed))}")
    library = user_cache.load_compiled("prefillcli.walk", "int8_products.cpp", flags)
    if library is None:
        pytest.skip("no C++ compiler")
    kernel = Int8Kernel(library)
    assert kernel.form == form
    monkeypatch.setattr(products, "int8_kernel", lambda: kernel)
    for outputs, width in ((64, 64), (80, 112), (208, 192)):
        for dtype in (torch.float32, torch.bfloat16):
            products.test_products_are_those_of_the_rounded_numbers("kernel", dtype, outputs, width)
    products.test_a_row_has_the_same_bits_beside_any_others("kernel")


@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="needs Debian's g++-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("processor", ["armv8-a", "armv8.2-a+bf16", "armv8.2-a+bf16+sve"])
def test_the_kernel_agrees_on_an_emulated_arm_processor(
    processor: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """NEON, its products of pairs of bfloat16, and what compilers make of it where there is SVE."""
    program = tmp_path / "driver"
    flags = ["-O3", "-std=c++17", "-fopenmp", "-static", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"]
    files = [str(HERE / "driver.cpp"), str(SOURCE)]
    subprocess.run([str(CROSS), *flags, f"-march={processor}", *files, "-o", str(program)], check=True, timeout=300)
    assert_agrees(EmulatedKernel([str(EMULATOR), "-cpu", "max", str(program)], tmp_path), dtype, monkeypatch)

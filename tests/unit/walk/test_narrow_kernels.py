"""Triton's kernels around products in small numbers: by its interpreter, and compiled for GPUs that are not here.

Both need a process of their own: Triton reads how it is to run when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from prefillcli.walk import narrow

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="make test-triton installs Triton where there is no GPU"
)

CASES = [(1, 64), (5, 112), (7, 192), (3, 4096), (2, 14336)]  # rows, and numbers of each
DTYPES = [torch.float32, torch.float16]  # the interpreter multiplies no bfloat16, and rounds otherwise to FP8


def drawn(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Some rows of a wider tensor; the last one is 0 where there are several."""
    found = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(0))
    found[:, 3::97] *= 40
    found[1:][-1:] = 0
    return found.to(dtype)[:, :width]


def products() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Products, and the scales of their rows and columns."""
    generator = torch.Generator().manual_seed(0)
    scales = (torch.rand(size, 1, generator=generator) for size in (6, 2100))
    return torch.arange(6 * 2100, dtype=torch.int32).view(6, 2100) - 99, *scales


_INTERPRET = """
import sys
import torch
from prefillcli.walk import narrow, narrow_kernels
from tests.unit.walk.test_narrow_kernels import CASES, DTYPES, drawn, products

found = {}
for dtype in DTYPES:
    signs = narrow._signs(torch.device("cpu"), dtype)
    for case in CASES:
        found[case, dtype] = narrow_kernels.quantise(drawn(*case, dtype), signs, torch.int8, 127.0)
found["products"] = narrow_kernels.rescale(*products(), torch.float32)
torch.save(found, sys.argv[1])
"""
_COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prefillcli.walk import narrow_kernels

capability, numbers, groups = int(sys.argv[1]), sys.argv[2], 64
known = dict(LARGEST=127.0, GROUPS=groups, GROUP=64, TURNS=True, ROUNDS=numbers == "*i8")
signature = dict(rows="*bf16", signs="*bf16", numbers=numbers, scales="*fp32", width="i32", stride="i32")
source = ASTSource(narrow_kernels._quantise, signature | dict.fromkeys(known, "constexpr"), known)
made = compile(source, target=GPUTarget("cuda", capability, 32), options=dict(num_warps=max(4, groups // 32)))
print(made.asm["ptx"])
"""


def run(code: str, *words: str, **environment: str) -> str:
    own = os.environ | environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, *words], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[object, torch.Tensor]:
    file = tmp_path_factory.mktemp("triton") / "found.pt"
    run(_INTERPRET, str(file), TRITON_INTERPRET="1")
    found: dict[object, torch.Tensor] = torch.load(file)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_separate_operations(
    interpreted: dict[object, torch.Tensor], case: tuple[int, int], dtype: torch.dtype
) -> None:
    found, scales = interpreted[case, dtype]
    wanted, wanted_scales = narrow.quantised_by_torch(drawn(*case, dtype), "int8")
    assert wanted.abs().max() == 127
    torch.testing.assert_close(scales, wanted_scales)
    apart = (found.int() - wanted.int()).abs()
    assert int(apart.max()) <= 1
    assert float((apart > 0).double().mean()) < 2e-3  # where a number lies between two small ones


def test_products_are_scaled(interpreted: dict[object, torch.Tensor]) -> None:
    numbers, rows, columns = products()
    torch.testing.assert_close(interpreted["products"], numbers * (rows * columns.t()))


@pytest.mark.parametrize(("capability", "numbers"), [(80, "*i8"), (90, "*i8"), (90, "*fp8e4nv"), (100, "*fp8e4nv")])
def test_a_row_is_one_launch_whose_turn_is_a_product_of_tensor_cores(
    capability: int, numbers: str, tmp_path: Path
) -> None:
    ptx = run(_COMPILE, str(capability), numbers, TRITON_CACHE_DIR=str(tmp_path))
    assert ptx.count(".entry") == 1
    assert "mma" in ptx
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (numbers == "*fp8e4nv")

"""Triton's kernels: by its interpreter, and compiled for GPUs that are not here.

Both need a process of their own: Triton reads how it is to run when it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from prefillcli.walk import fusion, narrow
from tests.unit.walk.families import make_model
from tests.unit.walk.test_walk import assert_equal, eager, mixed

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="make test-triton installs Triton where there is no GPU"
)

ROWS = [(1, 16), (7, 80), (5, 3, 96), (2, 5000)]  # with the width last; in the middle, heads
HEADS = [(1, 4, 2, 64), (5, 9, 1, 80), (3, 16, 8, 96)]  # tokens, heads of queries and keys, and their width
FORMS = [fusion.NormForm(1e-6), fusion.NormForm(1e-3, 1.0), fusion.NormForm(1e-5, early=True)]
WALKED = ["llama", "qwen3", "gemma2"]
MERGED = [(1, 64), (37, 80), (16, 128)]  # tokens, and the width of a head
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


def parts(dtype: torch.dtype, tokens: int, width: int) -> list[torch.Tensor]:
    """Attention of two parts: outputs, which lie token by token, and log-sum-exps; some queries see nothing in one of
    them, or in both."""
    generator = torch.Generator().manual_seed(0)
    outs = [torch.randn(1, tokens + 2, 3, width, generator=generator).to(dtype).transpose(1, 2) for _ in range(2)]
    lses = [torch.randn(1, 3, tokens + 2, generator=generator) * 9 for _ in range(2)]
    lses[0][:, :, ::4] = -torch.inf
    lses[1][:, :, ::6] = -torch.inf
    return [each[:, :, 1:-1] for pair in zip(outs, lses, strict=True) for each in pair]


def passed(passes: fusion.Passes, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What the passes make of rows of a shape; heads lie apart."""
    generator = torch.Generator().manual_seed(0)
    wide = (torch.randn(*shape[:-1], 2 * shape[-1], generator=generator).to(dtype)[None] for _ in range(2))
    rows, more = (each[..., : shape[-1]] for each in wide)
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    found = [passes.gate(activation, rows * 9, more) for activation in (0, 1)]
    for form in FORMS:
        sums = rows.contiguous()
        found += [passes.norm(rows if len(shape) == 3 else sums, weight, form)]
        found += [passes.add_and_norm(sums, more, weight, form), sums]
    return found


def turned(passes: fusion.Passes, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries and keys, which lie token by token in one tensor, after the rotary encoding."""
    tokens, queries, keys, width = shape
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(1, tokens, queries + keys + 1, width, generator=generator).to(dtype)
    tables = [torch.randn(1, tokens, width, generator=generator).to(dtype) for _ in range(2)]
    heads = (each.transpose(1, 2) for each in (both[:, :, :queries], both[:, :, queries:-1]))
    return list(passes.rotary(*heads, *tables))


def few() -> list[Any]:
    """Prompts that the interpreter reads in seconds."""
    return [prompt[-20:] for prompt in mixed()[:3]]


_INTERPRET = """
import sys
import torch
from prefillcli.walk import fusion, narrow, triton_kernels
from prefillcli.walk.triton_passes import TritonPasses
from prefillcli.walk.walk import Arithmetic
from tests.unit.walk.families import make_model
from tests.unit.walk.test_triton_kernels import (
    CASES, DTYPES, HEADS, MERGED, ROWS, WALKED, drawn, few, passed, parts, products, turned
)
from tests.unit.walk.test_walk import walked


called = {}
for name in ("gate", "norm", "add_and_norm", "rotary"):
    def noted(self, *given, own=getattr(TritonPasses, name), name=name):
        called[name] = called.get(name, 0) + 1
        return own(self, *given)
    setattr(TritonPasses, name, noted)

found = {}
for dtype in DTYPES:
    signs = narrow._signs(torch.device("cpu"), dtype)
    for case in CASES:
        found[case, dtype] = triton_kernels.quantise(drawn(*case, dtype), signs, torch.int8, 127.0)
    for shape in MERGED:
        out, lse, part, part_lse = parts(dtype, *shape)
        triton_kernels.merge(out, lse, part, part_lse)
        found["merged", dtype, shape] = out, lse
    for shape in ROWS:
        found["passed", dtype, shape] = passed(TritonPasses((8, 0)), shape, dtype)
    for shape in HEADS:
        found["turned", dtype, shape] = turned(TritonPasses((8, 0)), shape, dtype)
whole = torch.randn(1, 40, 96, generator=torch.Generator().manual_seed(0))
passes, weight, form = TritonPasses((8, 0)), whole[0, 0] + 1, fusion.NormForm(1e-6)
alone = [passes.norm(whole[:, row : row + 1].contiguous(), weight, form) for row in range(40)]
found["rows alone"] = passes.norm(whole, weight, form), torch.cat(alone, 1)
fusion.triton_passes = lambda device: TritonPasses((8, 0))
arithmetic = Arithmetic(prepare=lambda layer, tokens: fusion.passed(layer, torch.device("cpu")))
for family in WALKED:
    called.clear()
    scores = walked(make_model(family, head_dim=32), few(), chunk=33, arithmetic=arithmetic)
    found["walked", family] = scores, dict(called)
found["products"] = triton_kernels.rescale(*products(), torch.float32)
torch.save(found, sys.argv[1])
"""
_COMPILE = """
import sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from prefillcli.walk import triton_kernels, triton_passes

capability, numbers, groups = int(sys.argv[1]), sys.argv[2], 64


def made(kernel, kinds, known):
    names = [name for name in kernel.arg_names if name not in known]
    signature = dict(zip(names, kinds + ["i32"] * len(names))) | dict.fromkeys(known, "constexpr")
    signature |= {name: "fp32" for name in ("added", "epsilon") if name in signature}
    print(compile(ASTSource(kernel, signature, known), target=GPUTarget("cuda", capability, 32)).asm["ptx"])


known = dict(LARGEST=127.0, GROUPS=groups, GROUP=64, TURNS=True, ROUNDS=numbers == "*i8")
made(triton_kernels._quantise, ["*bf16", "*bf16", numbers, "*fp32"], known)
made(triton_kernels._rescale, ["*i32", "*fp32", "*fp32", "*bf16"], dict(COLUMNS=1024))
made(triton_kernels._merge, ["*bf16", "*fp32", "*bf16", "*fp32"], dict(TOKENS=16, WIDTH=128))
for kind in ("*bf16", "*fp16", "*fp32"):
    for tanh in (False, True):
        made(triton_passes._gate, [kind] * 3, dict(TANH=tanh, NUMBERS=1024))
    for early, adds, width in ((False, True, 4096), (True, False, 128)):
        known = dict(EARLY=early, ADDS=adds, ROWS=max(1024 // width, 1), WIDTH=width)
        made(triton_passes._norm, [kind] * 5, known)
    made(triton_passes._rotary, [kind] * 6, dict(HEADS=8, HALF=64))
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MERGED)
def test_attention_is_merged(
    interpreted: dict[object, torch.Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    out, lse, part, part_lse = parts(dtype, *shape)
    weights = torch.stack([lse, part_lse]).double()
    share = weights.softmax(0)[1].nan_to_num(0.0).unsqueeze(-1)
    found, found_lse = interpreted["merged", dtype, shape]
    torch.testing.assert_close(found, (out.double() * (1 - share) + part.double() * share).to(dtype))
    torch.testing.assert_close(found_lse, weights.logsumexp(0).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*ROWS, *HEADS])
def test_passes_compute_what_torch_does(
    interpreted: dict[object, torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    name, compute = ("passed", passed) if shape in ROWS else ("turned", turned)
    wanted = compute(fusion.Passes(DTYPES), shape, dtype)
    for found, each in zip(interpreted[name, dtype, shape], wanted, strict=True):
        torch.testing.assert_close(found, each, atol=2e-6 if dtype == torch.float32 else 2e-3, rtol=2e-3)


def test_a_row_keeps_its_bits_beside_others(interpreted: dict[object, torch.Tensor]) -> None:
    together, alone = interpreted["rows alone"]
    assert torch.equal(together, alone)


@pytest.mark.parametrize("family", WALKED)
def test_scores_are_those_of_the_eager_forward(interpreted: dict[object, Any], family: str) -> None:
    scores, called = interpreted["walked", family]
    assert_equal(scores, eager(make_model(family, head_dim=32), few()))
    whole = family != "gemma2"  # whose layers norm what attention gives before they add it
    assert called.keys() == {"gate", "norm", "rotary"} | ({"add_and_norm"} if whole else set())


@pytest.mark.parametrize(("capability", "numbers"), [(80, "*i8"), (90, "*i8"), (90, "*fp8e4nv"), (100, "*fp8e4nv")])
def test_kernels_are_compiled_and_a_row_is_turned_by_tensor_cores(
    capability: int, numbers: str, tmp_path: Path
) -> None:
    ptx = run(_COMPILE, str(capability), numbers, TRITON_CACHE_DIR=str(tmp_path))
    assert ptx.count(".entry") == 3 + 3 * 5  # kernels, and those of passes in three dtypes
    assert "mma" in ptx
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (numbers == "*fp8e4nv")

"""Products in int8 and FP8: against exact products of the same small numbers, the model's own, and row by row."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard
from torch import nn
from transformers import AutoModelForCausalLM

from prefillcli.errors import UsageError
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.runtime import user_cache
from prefillcli.walk import attention, narrow
from prefillcli.walk.forest import ATTENTION, ForestAttention, register
from prefillcli.walk.narrow import Int8Kernel, KernelWeights, TorchWeights, in_smaller_numbers, int8_kernel
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.fake_cuda import DEVICE, fake_cuda
from tests.unit.walk.families import make_config
from tests.unit.walk.test_walk import each_device, mixed, model_of, walked, wanted

KERNEL = pytest.mark.skipif(int8_kernel() is None, reason="no compiler, or no AVX2")
WAYS = ["torch", pytest.param("kernel", marks=KERNEL)]


def made(way: str, weight: torch.Tensor) -> Any:
    if way == "torch":
        return TorchWeights(weight, "int8")
    kernel = int8_kernel()
    assert kernel is not None
    return KernelWeights(weight, kernel)


def drawn(rows: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows with a few channels that are large in all of them, as a model's have."""
    found = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    found[:, 3::97] *= 40
    return found.to(dtype)


def exact(rows: torch.Tensor, weight: torch.Tensor, form: str = "") -> np.ndarray:
    """The product of rows and weights that are turned, scaled and rounded, as a form of the kernel rounds them, by
    NumPy in float64."""

    def turned(numbers: torch.Tensor) -> np.ndarray:
        own = numbers.double().numpy()
        if own.shape[1] % 64:
            return own
        return (own.reshape(len(own), -1, 64) @ (hadamard(64) / 8)).reshape(own.shape)

    def rounded(own: np.ndarray, *bounds: np.ndarray) -> np.ndarray:
        step = np.max([each.max(axis=tuple(range(1, each.ndim))) for each in bounds], axis=0)[:, None]
        return np.rint(own / step) * step

    one, other = turned(rows), turned(weight)
    if form != "AVX2":
        return rounded(one, np.abs(one) / 127) @ rounded(other, np.abs(other) / 127).T
    found = np.zeros((len(one), len(other)))
    for start in range(0, one.shape[1], 128):
        part, weights = one[:, start : start + 128], other[:, start : start + 128]
        pairs = np.abs(weights).reshape(len(weights), -1, 4, 2, 2).sum(axis=4)
        bounds = np.abs(weights) / 127, pairs / (32767 // 200 - 1), pairs.sum(axis=2) / (32767 // 100 - 4)
        found += rounded(part, np.abs(part) / 100) @ rounded(weights, *bounds).T
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "width"), [(64, 64), (80, 112), (208, 192), (576, 1536)])
def test_products_are_those_of_the_rounded_numbers(way: str, dtype: torch.dtype, outputs: int, width: int) -> None:
    rows, weight = drawn(31, width, dtype), drawn(outputs, width, dtype, seed=1) / width**0.5
    weights = made(way, weight)
    found = weights.product(weights.quantised(rows), None, torch.float32).double().numpy()
    correct = exact(rows, weight, getattr(weights, "form", ""))
    # A number in the middle between two steps may fall to either, as turning adds up in another order.
    assert np.linalg.norm(found - correct) < 1e-3 * np.linalg.norm(correct)
    plain = (rows.double() @ weight.double().T).numpy()
    assert np.linalg.norm(found - plain) < 0.03 * np.linalg.norm(plain)


@each_device
@pytest.mark.parametrize(("kind", "least", "most"), [("int8", 1e-4, 0.02), ("fp8", 1e-3, 0.05)])
@pytest.mark.parametrize("rows", [3, 70])
def test_products_by_torch_on_any_device(kind: Any, least: float, most: float, rows: int, device: str) -> None:
    given, weight = drawn(rows, 192, torch.bfloat16), drawn(208, 192, torch.bfloat16, seed=1)
    if device == "cpu" and kind == "fp8":
        pytest.skip("torch scales rows of FP8 on CUDA")
    weights = TorchWeights(weight.to(device), kind)
    found = weights.product(weights.quantised(given.to(device)), None, torch.bfloat16).cpu().double()
    plain = given.double() @ weight.double().T
    assert least < float((found - plain).norm() / plain.norm()) < most


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_beside_any_others(way: str) -> None:
    rows, weights = drawn(700, 128, torch.bfloat16), made(way, drawn(96, 128, torch.bfloat16, seed=1))
    together = weights.product(weights.quantised(rows), None, torch.bfloat16)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        for start, end in ((0, 1), (5, 11), (239, 242), (600, 700)):
            alone = weights.product(weights.quantised(rows[start:end]), None, torch.bfloat16)
            assert torch.equal(alone, together[start:end])
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def avx2() -> Int8Kernel:
    """The kernel for AVX2 alone, where the processor may have more."""
    flags = ["-mavx2", "-mfma", "-ffp-contract=off"]
    able = {"avx2", "fma3"} <= attention._instructions()
    library = user_cache.load_compiled("prefillcli.walk", "int8_products.cpp", flags) if able else None
    if library is None:
        pytest.skip("no compiler, or no AVX2")
    kernel = Int8Kernel(library)
    assert kernel.form == "AVX2"
    return kernel


def as_avx2_multiplies(numbers: np.ndarray, panels: np.ndarray, outputs: int) -> np.ndarray:
    """Sums of products [rows, outputs, groups of 16 inputs] of a row's bytes [rows, inputs] with packed weights: each
    instruction as Intel documents it, and never one that saturates."""
    rows, inputs = numbers.shape
    groups = panels.reshape(outputs // 16, inputs // 16, 5, 16, 4).transpose(0, 3, 1, 2, 4)
    groups = groups.reshape(outputs, inputs // 16, 5, 4)
    four = numbers.reshape(rows, 1, inputs // 16, 4, 2, 2).astype(np.int32)
    weights = groups[:, :, 1:].reshape(1, outputs, inputs // 16, 4, 2, 2).astype(np.int32)
    pairs = (four * weights).sum(axis=-1)  # vpmaddubsw, and its saturation
    assert -32768 <= pairs.min() <= pairs.max() <= 32767
    less = groups[:, :, 0].copy().view(np.int16)[None]
    words = pairs.astype(np.int16).sum(axis=3, dtype=np.int16) + less  # vpaddw wraps around
    signed = ((four - 100) * weights).sum(axis=(3, 5))
    assert np.array_equal(words, signed)
    return words.astype(np.int32).sum(axis=-1)  # vpmaddwd


@pytest.mark.parametrize("weight", ["random", "one", "a pair", "a word", "all", "alternating"])
@pytest.mark.parametrize(("outputs", "width"), [(16, 16), (48, 80), (32, 144), (16, 1616)])
def test_avx2_never_saturates(avx2: Int8Kernel, weight: str, outputs: int, width: int) -> None:
    """Bit for bit as in a model of its instructions, for the rows that are the worst for each output channel."""
    given = drawn(outputs, width) / 40
    if weight in ("all", "alternating"):
        given = (torch.ones(outputs, width) if weight == "all" else 1 - torch.arange(width) % 2 * 2.0).expand_as(given)
    else:
        given[1::2, {"random": [], "one": [5], "a pair": [4, 5], "a word": [2, 3, 6, 7, 10, 11, 14, 15]}[weight]] = 9
    weights = KernelWeights(given, avx2)
    panels = weights._panels.numpy().view(np.int8)
    signs = given.sign().to(torch.int32)
    worst = torch.cat(
        [signs, -signs, torch.ones(1, width, dtype=torch.int32), -torch.ones(1, width, dtype=torch.int32)]
    )
    drawn_too = torch.randint(-100, 101, (7, width), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    wanted = torch.cat([worst * 100, drawn_too])
    numbers, scales, sums = weights.quantised(drawn(len(wanted), width))
    numbers[: len(wanted), :width] = (wanted + 100).to(torch.uint8).view(torch.int8)
    found = weights.product((numbers, scales, sums), None, torch.float32).numpy()
    products = as_avx2_multiplies((wanted + 100).numpy(), panels, outputs)
    correct = np.zeros_like(found)
    for part in range(scales.shape[1]):
        own = products[:, :, part * 8 : part * 8 + 8].sum(axis=-1).astype(np.float32)
        step = scales[:, part, None].numpy() * weights._scales[part].numpy()
        correct = own * step + correct if part else own * step
    assert np.array_equal(found, correct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_avx2_quantises_rows_by_parts(avx2: Int8Kernel, dtype: torch.dtype) -> None:
    rows = drawn(5, 144, dtype)
    rows[1, 128:] = 0
    rows[2, 3] = 1e30
    numbers, scales, _ = KernelWeights(drawn(16, 144), avx2).quantised(rows)
    assert scales.shape == (5, 2)
    for part, at in enumerate((slice(0, 128), slice(128, 144))):
        own = rows[:, at].float()
        assert torch.equal(scales[:, part], own.abs().amax(1) / 100)
        given = torch.where(own == 0, 0, own * (100 / own.abs().amax(1, keepdim=True))).round() + 100
        assert torch.equal(numbers[:5, at].view(torch.uint8), given.to(torch.uint8))
    assert (numbers[:5, 144:].view(torch.uint8) == 100).all()


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_zeros_and_what_is_no_number(way: str) -> None:
    rows, weights = drawn(3, 64), made(way, torch.zeros(64, 64).index_fill(0, torch.arange(5), 0.5))
    rows[0] = 0
    bias = torch.arange(64.0)
    found = weights.product(weights.quantised(rows), bias, torch.float32)
    assert torch.equal(found[0], bias)
    assert torch.equal(found[:, 5:], bias[5:].expand(3, -1))


@pytest.mark.parametrize(
    ("family", "least"),
    [("llama", 16), ("qwen2", 16), ("gemma2", 16), ("gpt_oss", 16), ("llama", 64)],  # keys' have 32 outputs
)
def test_a_walk_in_int8_is_near_the_eager_forward(family: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "LEAST", least)
    model, correct = copy.deepcopy(model_of(family)), wanted(family, mixed)
    limits, how = Limits(110, 10**6, held_tokens=10**6), in_smaller_numbers(model, "int8")
    error = walked(model, mixed(), chunk=97, limits=limits, arithmetic=how) - correct
    assert 1e-5 < float(error.norm() / correct.norm()) < 0.05
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_chooses_experts_stays_and_a_layer_that_is_there_twice_changes_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(narrow, "LEAST", 16)
    model = copy.deepcopy(model_of("llama"))
    layers = model.model.layers
    layers[0].mlp.gate = nn.Linear(64, 64)
    layers[1] = layers[0]
    in_smaller_numbers(model, "int8")
    assert layers[0].mlp.gate.weight.numel() == 64 * 64
    assert layers[0].mlp.up_proj.weight.numel() == layers[2].self_attn.q_proj.weight.numel() == 0


def test_what_has_no_such_products_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--compute fp8: cpu has no products in FP8"):
        narrow.check_narrow("fp8", torch.device("cpu"))
    narrow.check_narrow("int8", torch.device("cpu"))
    model = copy.deepcopy(model_of("llama"))
    for layer in model.model.layers:
        for each in [each for each in layer.modules() if isinstance(each, nn.Linear)]:
            each.weight = nn.Parameter(each.weight.to(torch.float8_e4m3fn), requires_grad=False)
            each.weight.__class__ = type("Packed", (nn.Parameter,), {})
    with pytest.raises(UsageError, match="no weights of this model can be multiplied so"):
        in_smaller_numbers(model, "int8")


@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_on_cuda_rows_are_quantised_once_and_nobody_waits(
    kind: Any, triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    monkeypatch.setattr(narrow, "_changes", lambda module: isinstance(module, nn.Linear))  # fake weights are a type
    (pack,) = make_plan([np.arange(50, dtype=np.int32), np.arange(3, 60, dtype=np.int32)], Limits(10**4, 10**4)).packs
    with fake_cuda() as counts, torch.inference_mode():
        if not triton:
            monkeypatch.setattr(narrow, "quantising_kernels", lambda device, kind: None)
        narrow.check_narrow(kind, DEVICE)
        with torch.device(DEVICE):
            config = make_config("llama")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=ATTENTION)
        walk = LayerWalk(model.eval(), chunk_tokens=512, arithmetic=in_smaller_numbers(model, kind))
        state, waits = walk.begin(pack), []
        with ForestAttention(len(pack.tokens)) as attention:
            for _ in walk.through_layers(state, attention, lambda tokens: None):
                waits.append(dict(counts.waits))
                counts.waits.clear()
        walk.close()
    layers = len(waits)
    assert counts.launches["_int_mm" if kind == "int8" else "_scaled_mm"] == 7 * (layers - 1) + 3
    quantised = 7 * layers + 4 * (layers - 1) + 1  # weights, then rows: for q, k and v, for gate and up together
    assert counts.launches["quantise" if triton else "amax"] == quantised
    assert counts.launches["rescale"] == (counts.launches["_int_mm"] if triton else 0)
    assert not any(waits[1:])

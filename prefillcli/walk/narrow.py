"""Products in low precision: linear layers that multiply in int8, or in FP8 on CUDA.

A row is quantised by its own largest number when it is multiplied, a weight by the largest of its output channel. Rows
have a few channels with numbers so large that little is left for the others. So 64 neighbours at a time are first
turned into as many sums and differences of all of them (a Hadamard matrix, as in QuaRot, Ashkboos et al. 2024, arXiv
2404.00456), for rows and weights alike: that changes no product, and every sum has its share of a large number. It
needs no rows to calibrate on.

On CPUs with AVX2, AVX512-VNNI or AMX `int8_products.cpp` multiplies, elsewhere torch; on CUDA with Triton
`triton_kernels.py` quantises. Sums of int8 products are exact, so a row's result has the same bits whatever it is
computed with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.errors import UsageError
from prefillcli.walk import attention
from prefillcli.walk.attention import compiled_library
from prefillcli.walk.fusion import Product, called_through, fused, groups, parts_of
from prefillcli.walk.model_ends import decoder_layers
from prefillcli.walk.walk import Arithmetic

Narrow = Literal["int8", "fp8"]

TURNED = 64  # neighbouring inputs that are turned together
LEAST = 64  # inputs and outputs of a linear layer that changes: smaller ones choose experts or mix heads
_CHOOSE = ("gate", "router")  # names of linear layers that choose experts, in some families for more than 64
FP8 = torch.float8_e4m3fn
_LARGEST = {"int8": 127.0, "fp8": 448.0}
_DTYPES = (torch.bfloat16, torch.float32)  # of the kernel's rows and weights
_ROWS, _STEP = 32, 64  # the kernel's memory for rows is for multiples of this many rows and inputs


def check_narrow(kind: Narrow, device: torch.device, encoder: str | None = None) -> None:
    """Raise UsageError if the device has no products of this kind, or the model is an `encoder` of this name."""
    if encoder is not None:
        raise UsageError(
            f"--compute {kind}: {encoder} is an encoder, and only decoders compute in low precision\nleave it out"
        )
    if kind == "fp8" and (device.type != "cuda" or attention.compute_capability(device) < (8, 9)):
        raise UsageError(
            f"--compute fp8: {device} has no products in FP8, which need CUDA and a compute capability of 8.9\n"
            "give --compute int8"
        )


@torch.inference_mode()
def narrow_ways(device: torch.device) -> dict[str, dict[str, Any]]:
    """By kind, what multiplies on the device, and the error of a product as a share of its size: in int8 about 0.01,
    in FP8 0.04."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(128, 96, bias=False)
    linear.weight = nn.Parameter(torch.randn(96, 128, generator=generator).to(device, torch.bfloat16))
    rows = torch.randn(50, 128, generator=generator).to(device, torch.bfloat16)
    for kind in ("int8", "fp8"):
        with suppress(UsageError):
            check_narrow(kind, device)
            weights = _weights(linear, kind)
            correct = rows.double() @ linear.weight.double().t()
            error = weights.product(weights.quantised(rows), None, torch.float32) - correct
            by = f"the compiled kernel for {weights.form}" if isinstance(weights, KernelWeights) else "torch"
            by += " and Triton" if quantising_kernels(device, kind) is not None else ""
            found[kind] = {"by": by, "error": float(error.norm() / correct.norm())}
    return found


def in_smaller_numbers(model: PreTrainedModel, kind: Narrow) -> Arithmetic:
    """Return how a walk over `model` multiplies in `kind`: the linear layers of its decoder layers lose their own
    weights.

    Raises UsageError if none of them can.
    """
    linear = {each: None for each in narrowed_layers(model) if not each.weight.is_meta}  # of layers that are read
    if not linear:
        raise UsageError(
            f"--compute {kind}: no weights of this model can be multiplied so: they are packed, or of unusual shapes\n"
            "leave --compute out"
        )
    numbers = next(iter(linear)).weight
    weights: dict[nn.Module, Weights] = {}
    for each in linear:
        weights[each] = _weights(each, kind)
        each.weight = nn.Parameter(each.weight.new_empty(0), requires_grad=False)

    def products(group: Sequence[nn.Linear], chunk_tokens: int) -> Product | None:
        changed = next((weights[each] for each in group if each in weights), None)
        if changed is None:
            return None

        def product(rows: Tensor) -> list[Tensor]:
            flat = rows.reshape(-1, rows.shape[-1])
            quantised = changed.quantised(flat)
            found = [
                weights[each].product(quantised, each.bias, rows.dtype)
                if each in weights
                else nn.functional.linear(flat, each.weight, each.bias)
                for each in group
            ]
            return [each.view(*rows.shape[:-1], -1) for each in found]

        return product

    @contextmanager
    def called(layer: nn.Module, chunk_tokens: int) -> Iterator[None]:
        with ExitStack() as stack:
            for group in groups(layer, [each for each in layer.modules() if each in linear], fused=False):
                product = products(group, chunk_tokens)
                if product is not None:
                    for each, forward in zip(group, parts_of(product, len(group)), strict=True):
                        stack.enter_context(called_through(each, forward))
            stack.enter_context(fused(layer, chunk_tokens))
            yield

    fits = numbers.device.type == "cpu" and numbers.dtype in _DTYPES
    return Arithmetic(prepare=partial(fused, products=products) if fits else called)


def narrowed_layers(model: PreTrainedModel) -> dict[nn.Linear, None]:
    """The linear layers of a model's decoder layers that can multiply in low precision; its weights may be on the meta
    device."""
    parts = (part for layer in decoder_layers(model).layers for part in layer.named_modules())
    return {each: None for name, each in parts if _changes(each) and name.split(".")[-1] not in _CHOOSE}


def narrow_product(linear: nn.Linear, kind: Narrow) -> Callable[[Tensor], Tensor]:
    """The product of rows [rows, inputs] with the weights of a linear layer, in low precision."""
    weights = _weights(linear, kind)
    return lambda rows: weights.product(weights.quantised(rows), linear.bias, rows.dtype)


def _changes(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:  # packed numbers, or something else
        return False
    outputs, inputs = module.weight.shape
    return min(outputs, inputs) >= LEAST and outputs % 16 == inputs % 16 == 0


class Weights(Protocol):
    """A linear layer's weights in small numbers."""

    def quantised(self, rows: Tensor) -> Any:
        """Rows [rows, inputs] in small numbers."""

    def product(self, rows: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Quantised rows times the weights, [rows, outputs] in `dtype`."""


def _weights(linear: nn.Linear, kind: Narrow) -> Weights:
    weight = linear.weight
    kernel = int8_kernel() if weight.device.type == "cpu" and weight.dtype in _DTYPES else None
    return TorchWeights(weight, kind) if kernel is None else KernelWeights(weight, kernel)


# By torch.


def turned(numbers: Tensor) -> Tensor:
    """Numbers [..., width] as float32, `TURNED` neighbours at a time times a Hadamard matrix; as they are where the
    width is no multiple of that."""
    numbers, width = numbers.float(), numbers.shape[-1]
    if width % TURNED:
        return numbers
    found: Tensor = (numbers.reshape(*numbers.shape[:-1], -1, TURNED) @ _hadamard(numbers.device)).flatten(-2)
    return found


@cache
def _hadamard(device: torch.device) -> Tensor:
    found: Tensor = _signs(device, torch.float32) * TURNED**-0.5
    return found


@cache
def _signs(device: torch.device, dtype: torch.dtype) -> Tensor:
    found = torch.ones(1, 1, dtype=dtype, device=device)
    while len(found) < TURNED:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found


def quantised_by_torch(rows: Tensor, kind: Narrow) -> tuple[Tensor, Tensor]:
    """Rows [rows, width] in small numbers, by torch's operators, and what gives the rows back, float32 [rows, 1]."""
    numbers, largest = turned(rows), _LARGEST[kind]
    scales = numbers.abs().amax(-1, keepdim=True) / largest
    numbers = numbers / scales.clamp_min(1e-30)
    return (numbers.round().to(torch.int8) if kind == "int8" else numbers.to(FP8)), scales


@cache
def quantising_kernels(device: torch.device, kind: Narrow) -> Any:
    """The functions of `triton_kernels.py`, if the device has Triton and they compute what torch does; else None."""
    if device.type != "cuda" or find_spec("triton") is None:
        return None
    with suppress(Exception):  # of any of the stages of a compilation
        from prefillcli.walk import triton_kernels

        return triton_kernels if _kernels_agree(triton_kernels, device, kind) else None
    return None


@torch.inference_mode()
def _kernels_agree(kernels: Any, device: torch.device, kind: Narrow) -> bool:
    # A number in the middle between two small ones may become either.
    rows = torch.randn(33, 192, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    both = _by_kernels(kernels, rows, kind), quantised_by_torch(rows, kind)
    found, wanted = (numbers.float() * scales for numbers, scales in both)
    same = torch.linalg.norm(found - wanted) <= 2e-3 * torch.linalg.norm(wanted)
    products = torch.arange(66, dtype=torch.int32, device=device).view(33, 2) - 20
    scales = both[1][1]
    scaled = kernels.rescale(products, scales, scales[:2].contiguous(), torch.float32)
    return bool(same & torch.allclose(scaled, products * (scales * scales[:2].t())))


def _by_kernels(kernels: Any, rows: Tensor, kind: Narrow) -> tuple[Tensor, Tensor]:
    dtype = torch.int8 if kind == "int8" else FP8
    found: tuple[Tensor, Tensor] = kernels.quantise(rows, _signs(rows.device, rows.dtype), dtype, _LARGEST[kind])
    return found


class TorchWeights:
    """Weights [outputs, inputs] for torch's products in int8 and FP8."""

    def __init__(self, weight: Tensor, kind: Narrow) -> None:
        self._kind = kind
        self._kernels = quantising_kernels(weight.device, kind)
        self._numbers, self._scales = self.quantised(weight)

    def quantised(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The small numbers [rows, inputs] and what gives the rows back, float32 [rows, 1]."""
        if self._kernels is None or not self._kernels.takes(rows):
            return quantised_by_torch(rows, self._kind)
        return _by_kernels(self._kernels, rows, self._kind)

    def product(self, rows: tuple[Tensor, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """As of `Weights`."""
        numbers, scales = rows
        count = len(numbers)
        if count <= 16:  # CUDA multiplies more rows only
            numbers, scales = (torch.cat([each, each.new_zeros(17 - count, each.shape[1])]) for each in rows)
        if self._kind == "fp8":
            out = torch._scaled_mm(
                numbers, self._numbers.t(), scale_a=scales, scale_b=self._scales.t(), out_dtype=torch.bfloat16
            )
        elif self._kernels is None:
            out = torch._int_mm(numbers, self._numbers.t()) * (scales * self._scales.t())
        else:
            out = self._kernels.rescale(torch._int_mm(numbers, self._numbers.t()), scales, self._scales, dtype)
        out = out[:count].to(dtype)
        return out if bias is None else out + bias


# By the kernel.


class Int8Kernel:
    """The functions of `int8_products.cpp`; `form` names the instructions that they use."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.quantise, self.pack, self.multiply, self.bytes, self.parts = (
            getattr(library, f"prefill_int8_{name}") for name in ("quantise", "pack", "product", "bytes", "parts")
        )
        self.quantise.argtypes = [pointer, *[number] * 5, *[pointer] * 3]
        self.bytes.argtypes, self.parts.argtypes = [number] * 2, [number]
        self.bytes.restype = self.parts.restype = number
        self.pack.argtypes = [pointer, *[number] * 4, pointer, pointer]
        self.multiply.argtypes = [*[pointer] * 6, number, pointer]
        for each in (self.quantise, self.pack, self.multiply):
            each.restype = None
        library.prefill_int8_form.restype = ctypes.c_char_p
        self.form: str = library.prefill_int8_form().decode()


class KernelWeights:
    """Weights [outputs, inputs] for the kernel."""

    def __init__(self, weight: Tensor, kernel: Int8Kernel) -> None:
        self._kernel, (self._outputs, self._width) = kernel, weight.shape
        self.form = kernel.form
        # Where the width is padded, rows have zeros: whatever stands there adds nothing
        self._panels = torch.zeros(kernel.bytes(self._outputs, self._width), dtype=torch.uint8)
        self._scales = torch.empty(kernel.parts(self._width), self._outputs)
        shape = self._outputs, self._width, torch.get_num_threads(), weight.dtype == torch.bfloat16
        weight = weight.contiguous()  # held while it is read
        kernel.pack(weight.data_ptr(), *shape, self._panels.data_ptr(), self._scales.data_ptr())

    def quantised(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The small numbers with what they are padded by, what gives the rows back, and sums of the numbers."""
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        numbers = torch.empty(_multiple(len(rows), _ROWS), _multiple(rows.shape[1], _STEP), dtype=torch.int8)
        scales = torch.empty(len(rows), self._kernel.parts(self._width))
        sums = torch.empty(len(rows), dtype=torch.int32)
        how = rows.stride(0), *rows.shape, torch.get_num_threads(), rows.dtype == torch.bfloat16
        self._kernel.quantise(rows.data_ptr(), *how, *(each.data_ptr() for each in (numbers, scales, sums)))
        return numbers, scales, sums

    def product(self, rows: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """As of `Weights`."""
        out = torch.empty(len(rows[1]), self._outputs, dtype=dtype)
        sizes = np.array([len(out), self._width, self._outputs, out.stride(0), torch.get_num_threads()], np.int64)
        tensors = (each.data_ptr() for each in (*rows, self._panels, self._scales))
        self._kernel.multiply(*tensors, sizes.ctypes.data, dtype == torch.bfloat16, out.data_ptr())
        return out if bias is None else out.add_(bias)


def _multiple(size: int, step: int) -> int:
    return -(-size // step) * step


@cache
def int8_kernel() -> Int8Kernel | None:
    """The kernel, if this machine can compile and run it, and its products are right."""
    library = compiled_library(attention.PRODUCTS)
    if library is None or not hasattr(library, "prefill_int8_product"):
        return None
    kernel = Int8Kernel(library)
    return kernel if _multiplies(kernel) else None


def _multiplies(kernel: Int8Kernel) -> bool:
    def product(rows: Tensor, weight: Tensor) -> Tensor:
        weights = KernelWeights(weight, kernel)
        return weights.product(weights.quantised(rows), None, torch.float32)

    rows, weight = torch.randn(2, 75, 192, generator=torch.Generator().manual_seed(0))
    weight = weight[:48]
    plain = rows @ weight.t()
    near = torch.linalg.norm(product(rows, weight) - plain) <= 0.03 * torch.linalg.norm(plain)
    # Ones that are not turned are exact: products with them are rows and weights as they were rounded.
    rows, weight, ones = rows[:, :176], weight[:, :176], torch.eye(176)
    wanted = product(rows, ones) @ product(ones, weight)
    return bool(near & torch.allclose(product(rows, weight), wanted, rtol=1e-4, atol=1e-3))

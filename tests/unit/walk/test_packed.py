"""Weights in GGUF's blocks: unpacked as the package `gguf` unpacks them, and used by embedding and head."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from prefillcli.walk import packed
from prefillcli.walk.packed import PackedMatrix, block_of, keep_packed, packed_rows, unpack

ROWS, WIDTH = 600, 512  # more than are unpacked at a time, and more than one part of a head


def _readable(kind: Kind) -> bool:
    try:
        gguf.dequantize(np.zeros((1, block_of(kind)[1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind for kind in Kind if _readable(kind)]
COMPILED = (
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4,
)  # fmt: skip


def blocks(kind: Kind, count: int) -> torch.Tensor:
    """Any bytes but those whose scales are no numbers."""
    numbers, size = block_of(kind)
    data = np.random.default_rng(3).integers(0, 256, (4 * count // numbers, size), dtype=np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(gguf.dequantize(data, kind)).all(axis=1)
    return torch.from_numpy(data[finite][: count // numbers].copy())


def wanted(kind: Kind, saved: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(saved.numpy(), kind)).view(-1)


@pytest.mark.sampled(30)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_have_the_numbers_of_the_package(
    kind: Kind, compiled: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(packed, "_compiled", lambda: None)
    saved = blocks(kind, 65_536)
    numbers = wanted(kind, saved).to(dtype)
    for threads in (1, 3):
        found = torch.full_like(numbers, 7)
        unpack(kind, saved.view(-1), found, threads=threads)
        assert torch.equal(found, numbers)


def test_the_common_kinds_are_compiled() -> None:
    function = packed._compiled()
    assert function is not None
    target = torch.empty(256)
    for kind in COMPILED:
        saved = blocks(kind, 256).view(-1)
        count = 256 // block_of(kind)[0]
        assert function(kind, saved.data_ptr(), count, 1, target.data_ptr()), kind.name


def test_scales_that_are_no_numbers_stay_none() -> None:
    saved = torch.zeros(34, dtype=torch.uint8)
    saved[2:] = 1
    for low, high, number in ((0, 0x7C, "inf"), (0, 0xFC, "-inf"), (1, 0x7C, "nan"), (1, 0, "5.960464477539063e-08")):
        saved[0], saved[1] = low, high
        found = torch.empty(32)
        unpack(Kind.Q8_0, saved, found)
        assert torch.equal(found, torch.full((32,), float(number))) or (number == "nan" and found.isnan().all())


@pytest.fixture
def matrix() -> tuple[PackedMatrix, torch.Tensor]:
    """A matrix in blocks, and its numbers."""
    saved = torch.from_numpy(gguf.quantize(np.random.default_rng(1).normal(0, 1, (ROWS, WIDTH)), Kind.Q8_0))
    numbers = wanted(Kind.Q8_0, saved).view(ROWS, WIDTH)
    return PackedMatrix(Kind.Q8_0, saved, WIDTH, torch.float32), numbers


@pytest.mark.parametrize("kind", [nn.Embedding, Gemma3TextScaledWordEmbedding])
def test_an_embedding_unpacks_the_rows_of_its_tokens(
    kind: type[nn.Embedding], matrix: tuple[PackedMatrix, torch.Tensor]
) -> None:
    tokens = torch.tensor([[5, 0, 599, 5, 17]])
    whole = kind(ROWS, WIDTH, padding_idx=5).requires_grad_(False)
    whole.weight.copy_(matrix[1])
    module = kind(ROWS, WIDTH, padding_idx=5)
    keep_packed(module, matrix[0])
    assert torch.equal(module(tokens), whole(tokens))
    assert module.weight.is_meta
    assert module.weight.shape == (ROWS, WIDTH)


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_is_unpacked_some_rows_at_a_time(
    bias: bool, matrix: tuple[PackedMatrix, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_HEAD_NUMBERS", 128 * WIDTH)
    module = nn.Linear(WIDTH, ROWS, bias=bias).requires_grad_(False)
    rows = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    wanted = nn.functional.linear(rows, matrix[1], module.bias)
    keep_packed(module, matrix[0])
    assert packed_rows(module) is matrix[0]
    torch.testing.assert_close(module(rows), wanted, rtol=1e-5, atol=1e-4)
    at = torch.tensor([3, 599])
    assert torch.equal(matrix[0].rows(at), matrix[1][at])

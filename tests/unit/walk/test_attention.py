"""Attention against torch's own softmax attention in float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prefillcli.walk import attention
from prefillcli.walk.attention import Shift, apply_sinks, attend, attend_blockwise, attend_by_products, merge_into


def random_qkv(queries: int = 13, keys: int = 29, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, 6, queries, 16, generator=generator)
    return query, *(torch.randn(2, 2, keys, 16, generator=generator) for _ in range(2))


def reference(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    key, value = (x.double().repeat_interleave(3, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * 0.3
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, -1).nan_to_num() @ value, torch.logsumexp(scores, -1)


def assert_same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(found[0].double(), wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("implementation", [attend, attend_blockwise])
def test_attention_and_its_log_sum_exp(implementation, softcap: float | None) -> None:
    qkv = random_qkv()
    assert_same(implementation(*qkv, scale=0.3, softcap=softcap), reference(*qkv, softcap=softcap))
    square = random_qkv(queries=17, keys=17)
    tril = torch.ones(17, 17, dtype=torch.bool).tril()
    causal = implementation(*square, scale=0.3, causal=True, softcap=softcap)
    assert_same(causal, reference(*square, visible=tril, softcap=softcap))


@pytest.mark.parametrize("implementation", [attend, attend_blockwise])
def test_a_query_that_sees_nothing_weighs_nothing(implementation) -> None:
    qkv = random_qkv()
    visible = torch.rand(13, 29, generator=torch.Generator().manual_seed(3)) < 0.4
    visible[4] = False
    found = implementation(*qkv, scale=0.3, visible=visible[None, None])
    assert_same(found, reference(*qkv, visible=visible))
    assert torch.all(found[1][:, :, 4] == -math.inf)


@pytest.mark.parametrize("width", [8, 12, 24])
def test_values_of_another_width_than_the_keys(width: int) -> None:
    query, key, _ = random_qkv()
    value = torch.randn(2, 2, 29, width, generator=torch.Generator().manual_seed(4))
    assert_same(attend(query, key, value, scale=0.3), reference(query, key, value))
    square, tril = random_qkv(queries=29), torch.ones(29, 29, dtype=torch.bool).tril()
    assert_same(attend(*square[:2], value, scale=0.3, causal=True), reference(*square[:2], value, visible=tril))
    shift = Shift.of(key, 0.3)
    found, lse = attend(query, key, value, scale=0.3, shift=shift)
    assert_same((found, lse + shift.taken(query)), reference(query, key, value))


def test_blocks_of_keys_change_nothing() -> None:
    qkv = random_qkv(keys=50)
    assert_same(attend_blockwise(*qkv, scale=0.3, block=7), reference(*qkv))
    square = random_qkv(queries=50, keys=50)
    tril = torch.ones(50, 50, dtype=torch.bool).tril()
    for block in (7, 10, 64):
        found = attend_blockwise(*square, scale=0.3, block=block, causal=True, softcap=2.0)
        assert_same(found, reference(*square, visible=tril, softcap=2.0))


def test_blocks_of_causal_keys_compute_little_of_the_hidden_triangle(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, multiply = [], torch.bmm

    def noted(one: Tensor, other: Tensor) -> Tensor:
        scores.append(one.shape[1] * other.shape[2])
        return multiply(one, other)

    monkeypatch.setattr(torch, "bmm", noted)
    attend_blockwise(*(torch.randn(1, 1, 80, 4) for _ in range(3)), scale=0.3, causal=True, block=10)
    assert sum(scores[::2]) == 36 * 10 * 10, "the blocks on the diagonal and below"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_blocks_err_no_more_than_flash_where_scores_are_large(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, 1, 1, 16, generator=generator)
    common *= 25 / common.norm()  # a direction that all share: the scores are around 0.3 * 25^2

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(1, heads, tokens, 16, generator=generator)

    query, key, value = (
        (x + y).to(dtype) for x, y in ((drawn(6, 500), common), (drawn(2, 900), common), (drawn(2, 900), 0))
    )
    wanted, wanted_lse = reference(query, key, value)
    assert 180 < wanted_lse.mean() < 220
    flash, flash_lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, scale=0.3
    )
    visible = torch.ones(500, 900, dtype=torch.bool)
    for found, lse in (
        attend_blockwise(query, key, value, scale=0.3),
        attend_blockwise(query, key, value, scale=0.3, visible=visible[None, None], block=100),
    ):
        assert (found - wanted).square().mean() <= 1.05 * (flash - wanted).square().mean()
        assert (lse - wanted_lse).abs().max() <= 1.05 * (flash_lse - wanted_lse).abs().max() + 1e-4


@pytest.mark.parametrize(("capability", "fits"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_cuda_devices_without_flash_take_blocks(
    capability: tuple[int, int], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "compute_capability", lambda device: capability)
    with FakeTensorMode():
        query, _, value = (torch.empty(1, heads, 9, 16, device="cuda", dtype=torch.float16) for heads in (6, 2, 2))
        assert attention.fits_flash(query, value) is fits
        assert not attention.fits_flash(query.float(), value.float())


@given(st.sets(st.integers(1, 28), max_size=5), st.integers(0, 9))
@settings(max_examples=50)
def test_parts_of_the_keys_merge_to_the_whole(cuts: set[int], seed: int) -> None:
    query, key, value = random_qkv(seed=seed)
    edges = [0, *sorted(cuts), 29]
    parts = [attend(query, key[:, :, a:b], value[:, :, a:b], scale=0.3) for a, b in pairwise(edges)]
    out, lse = parts[0][0].clone(), parts[0][1].clone()
    for part, part_lse in parts[1:]:
        merge_into(out, lse, part, part_lse)
    assert_same((out, lse), reference(query, key, value))


def test_a_sink_is_one_more_score_without_a_value() -> None:
    query, key, value = random_qkv()
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(1))
    out, lse = attend(query, key, value, scale=0.3)
    apply_sinks(out, lse, sinks)
    scores = query.double() @ key.double().repeat_interleave(3, dim=1).transpose(2, 3) * 0.3
    column = sinks.double().view(1, 6, 1, 1).expand(2, 6, 13, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    torch.testing.assert_close(out.double(), weights @ value.double().repeat_interleave(3, dim=1), atol=1e-5, rtol=0)


def test_a_sink_rounds_the_output_in_half_precision_once() -> None:
    generator = torch.Generator().manual_seed(2)
    out = torch.randn(1, 6, 300, 16, generator=generator).bfloat16()
    lse, sinks = torch.randn(1, 6, 300, generator=generator), torch.randn(6, generator=generator)
    wanted = out.double() * torch.sigmoid(lse.double() - sinks.double().view(1, 6, 1)).unsqueeze(-1)
    apply_sinks(out, lse, sinks)
    assert (out == wanted.bfloat16()).double().mean() > 0.999


def moved_products(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """By products over moved keys, as the walk attends; the log-sum-exp is that of the keys themselves."""
    shift = Shift.of(key[:, :, :1000], 0.3)
    shift.include(key, query)
    out, lse = attend_by_products(query, shift.moved(key), value, causal=causal, safe=shift.safe)
    return out, lse + shift.taken(query)


def eager_bfloat16(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """As transformers' eager attention: products in bfloat16, softmax in float32."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 3.0, 10.0], ids=["small scores", "large ones", "beyond every bound"])
@pytest.mark.parametrize("moved", [0.0, 20.0], ids=["keys around 0", "keys around another point"])
@pytest.mark.parametrize("batch", [1, 3])
def test_products_are_as_near_as_the_eager_forward(causal: bool, size: float, moved: float, batch: int) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, keys = (1500, 1500) if causal else (700, 1300)

    def drawn(heads: int, tokens: int) -> Tensor:
        return torch.randn(batch, heads, tokens, 32, generator=generator)

    query = (size * drawn(6, queries)).bfloat16()
    key = (size * drawn(2, keys) + moved * drawn(2, 1)).bfloat16()
    value = drawn(2, keys).bfloat16()
    tril = torch.ones(queries, keys, dtype=torch.bool).tril() if causal else None
    wanted, wanted_lse = reference(query, key, value, visible=tril)
    out, lse = moved_products(query, key, value, causal=causal)
    error = (out - wanted).abs().mean()
    eager_error = (eager_bfloat16(query, key, value, 0.3, causal) - wanted).abs().mean()
    assert error < 1.2 * eager_error
    assert error < 0.003 or size > 1
    spread = float(wanted_lse.abs().mean())
    assert (lse - wanted_lse).abs().mean() < 2**-8 * max(1.0, spread)


def test_products_of_float32_are_exact() -> None:
    qkv = random_qkv(queries=40, keys=70)
    for causal in (False, True):
        if causal:
            qkv = random_qkv(queries=70, keys=70)
        visible = torch.ones(70, 70, dtype=torch.bool).tril() if causal else None
        found, wanted = moved_products(*qkv, causal=causal), reference(*qkv, visible=visible)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=0)


def test_products_in_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "ROWS", 18)
    monkeypatch.setattr(attention, "SCORES", 18 * 11)
    monkeypatch.setattr(attention, "TOGETHER", 6 * 18 * 11)
    for safe in (attention.SAFE, 0.0):
        monkeypatch.setattr(attention, "SAFE", safe)
        test_products_of_float32_are_exact()


def test_products_of_all_lengths_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()
    multiply = torch.bmm

    def noted(one: Tensor, other: Tensor) -> Tensor:
        shapes.add((one.shape, other.shape))
        return multiply(one, other)

    monkeypatch.setattr(torch, "bmm", noted)
    for tokens in range(1, 257):
        query, key, value = random_qkv(queries=tokens, keys=tokens)
        attend_by_products(query, key, value, causal=True)
        attend_by_products(query[:, :, :100], key, value)
    assert len(shapes) <= 64

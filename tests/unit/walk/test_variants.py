"""Attention in other forms than the usual one, walked, against the model's own eager forward."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from prefillcli.plan.pack import Limits
from prefillcli.walk import attention, forest
from tests.unit.walk.test_sparse import eager_sparse, kept_of, walked_sparse
from tests.unit.walk.test_walk import assert_equal, eager, mixed, p_yes, three_levels, walked
from tests.unit.walk.variants import IN_HALF, VARIANTS, make_variant

every_variant = pytest.mark.parametrize("variant", VARIANTS)
PACKS = Limits(110, 10**6, held_tokens=10**6)


@cache
def model_of(variant: str) -> nn.Module:
    return make_variant(variant)


@cache
def wanted(variant: str) -> torch.Tensor:
    return eager(model_of(variant), mixed())


@pytest.mark.sampled(3)
@every_variant
def test_logits_equal_the_eager_forward(variant: str) -> None:
    """In one pack, and in packs that hold a prefix."""
    assert_equal(walked(model_of(variant), mixed(), chunk=97), wanted(variant))
    assert_equal(walked(model_of(variant), mixed(), chunk=41, limits=PACKS, offload_held=True), wanted(variant))


@pytest.mark.sampled(1)
@every_variant
def test_bfloat16_is_near_the_eager_forward(variant: str) -> None:
    """By the products and by the compiled kernel, as this machine has them; float32 over the same weights is right."""
    changes = IN_HALF if "kv_lora_rank" in VARIANTS[variant][1] else {}
    half, exact = make_variant(variant, torch.bfloat16, **changes), make_variant(variant, **changes)
    exact.load_state_dict({name: weight.float() for name, weight in half.state_dict().items()})
    reference = p_yes(eager(exact, three_levels()))
    own = (p_yes(eager(half, three_levels())) - reference).abs().mean()
    for chunk in (97, 1000):
        found = (p_yes(walked(half, three_levels(), chunk=chunk, limits=PACKS)) - reference).abs().mean()
        assert found <= max(1.3 * float(own), 6e-3)


@every_variant
def test_products_over_moved_keys_give_the_same_scores(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, forest):
        monkeypatch.setattr(module, "fast_products", lambda device, dtype: True)
    monkeypatch.setattr(attention, "FEWEST_SCORES", 100)
    assert_equal(walked(model_of(variant), mixed(), chunk=97, limits=PACKS), wanted(variant))


@pytest.mark.parametrize("variant", ["deepseek_v3", "llama4_text"])
def test_kept_tokens_are_read_at_their_own_positions(variant: str) -> None:
    """Parts of local attention, and temperatures, count kept tokens; rotations take positions."""
    model, prompts = model_of(variant), mixed()
    kept = kept_of(prompts)
    assert_equal(walked_sparse(model, prompts, kept, chunk=41, limits=PACKS), eager_sparse(model, prompts, kept))

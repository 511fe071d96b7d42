"""With `deterministic`, a row's score has the same bits whatever it is computed with."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.walk.determinism import by_row
from tests.unit.walk.shuffling import FAMILIES, all_kinds, as_they_come, label_bits, model_of, random_shuffle

SHUFFLES, NIGHTLY_SHUFFLES = 2, int(os.environ.get("SHUFFLES", "50"))
_NIGHTLY_FAMILIES = ("qwen3_next", "nemotron_h")
each_family = pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.nightly) if each in _NIGHTLY_FAMILIES else each for each in FAMILIES],
)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def assert_same_bits(family: str, dtype: torch.dtype, shuffles: int, **options: Any) -> None:
    """So many random shuffles of all prompts give the bits of the prompts as they come."""
    model, prompts, rng = model_of(family, dtype), all_kinds(), np.random.default_rng(shuffles)
    wanted = label_bits(model, prompts, as_they_come(len(prompts)), **options)
    assert len(np.unique(wanted)) > wanted.size / 3, "scores must differ enough to tell a wrong row"
    for number in range(shuffles):
        shuffle = random_shuffle(rng, len(prompts))
        found = label_bits(model, prompts, shuffle, **options)
        there = found.any(axis=1)
        assert there.sum() >= len(set(shuffle.order)) - len(shuffle.done)
        differ = np.flatnonzero((found != wanted).any(axis=1) & there)
        assert not differ.size, f"shuffle {number}, {shuffle}: prompts {differ.tolist()} have other bits"


@pytest.mark.sampled(1)
@each_family
@each_dtype
def test_a_prompts_bits_do_not_depend_on_neighbours_order_packs_chunks_schedule_or_threads(
    family: str, dtype: torch.dtype
) -> None:
    assert_same_bits(family, dtype, SHUFFLES, arithmetic=by_row())


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
@each_dtype
def test_many_shuffles_give_the_same_bits(family: str, dtype: torch.dtype) -> None:
    assert_same_bits(family, dtype, NIGHTLY_SHUFFLES, arithmetic=by_row())


def test_without_it_bits_do_depend_on_them() -> None:
    """What the tests above would see."""
    with pytest.raises(AssertionError, match="have other bits"):
        assert_same_bits("llama", torch.bfloat16, SHUFFLES)

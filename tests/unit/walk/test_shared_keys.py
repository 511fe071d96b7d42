"""Layers that attend over the keys and values of an earlier layer: the walk keeps those for the whole pack."""

from __future__ import annotations

from collections import UserDict
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prefillcli.models import law
from prefillcli.models.law import memory_law
from prefillcli.plan.pack import Limits
from prefillcli.walk.forest import UnsupportedModelError, register
from prefillcli.walk.model_ends import CallBuffers
from tests.unit.walk import test_leaving, test_walk
from tests.unit.walk.test_leaving import LeaveAfter
from tests.unit.walk.tiny_models import VOCABULARY, make_tiny_model

FAMILIES = ["gemma3n_text", "gemma4_text"]
every_family = pytest.mark.parametrize("family", FAMILIES)


def branches() -> list[test_walk.Prompt]:
    """Prompts that share prefixes over two levels, and one that shares nothing."""
    rng = np.random.default_rng(3)

    def words(count: int) -> test_walk.Prompt:
        return rng.integers(3, VOCABULARY, count).astype(np.int32)

    root, middle = words(31), words(14)
    return [np.concatenate([root, middle, words(count)]) for count in (1, 9, 22)] + [
        np.concatenate([root, words(12)]),
        words(40),
    ]


@cache
def model_of(family: str) -> Any:
    register()
    return make_tiny_model(family)


@cache
def wanted(family: str) -> Tensor:
    return test_walk.eager(model_of(family), branches())


@every_family
@pytest.mark.parametrize("limits", [test_walk.ONE_PACK, Limits(60, 10**6, held_tokens=10**6)], ids=["one", "several"])
@pytest.mark.parametrize("chunk", [13, 4096])
def test_logits_equal_the_eager_forward(family: str, limits: Limits, chunk: int) -> None:
    found = test_walk.walked(model_of(family), branches(), chunk=chunk, limits=limits)
    torch.testing.assert_close(found, wanted(family), atol=1e-4, rtol=0)


@every_family
@pytest.mark.parametrize("peek", [False, True])
@pytest.mark.parametrize("layer", [1, 3, 4])  # K,V are shared from layer 4 on, and are those of layers 2 and 3
def test_those_that_stay_have_the_logits_of_the_eager_forward(family: str, peek: bool, layer: int) -> None:
    model, rule = model_of(family), LeaveAfter({0: layer, 2: layer, 3: layer}, peek=peek)
    found = test_leaving.walked(model, branches(), rule, chunk=13).logits
    assert found.keys() == {1, 4}
    for prompt, logits in found.items():
        torch.testing.assert_close(logits, wanted(family)[prompt], atol=1e-4, rtol=0)


@every_family
def test_the_memory_law_counts_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = model_of(family).config
    counted = memory_law(config, torch.float32)
    monkeypatch.setattr(law, "_found", {})
    monkeypatch.setattr(law, "_left_for_later", lambda arguments: [])
    full = 32 if family == "gemma4_text" else 16  # width of a head
    both = 4 * 2 * 2 * (16 + full)  # bytes of K,V with two heads each, in a sliding and a full layer
    assert counted.token - memory_law(config, torch.float32).token == both


def test_what_is_not_keys_and_values_is_refused() -> None:
    left: UserDict[str, Any] = UserDict()  # two layers get the mapping that the first one leaves K,V in
    ((_, kwargs), _) = CallBuffers(6).keep([((), {"left": left}), ((), {"left": left, "more": {}})], 6)
    with pytest.raises(UnsupportedModelError, match="more than its keys and values"):
        kwargs["left"]["hidden"] = (torch.zeros(1, 6, 8), None)

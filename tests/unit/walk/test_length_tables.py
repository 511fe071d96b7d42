"""Prompts on both sides of the length where position encodings change, against the model's own eager forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from torch import nn

from prefillcli.engines.torch import TorchEngine
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import LONG, make_plan, marked_positions
from prefillcli.walk.forest import UnsupportedModelError, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import make_model
from tests.unit.walk.test_sparse import eager_sparse, kept_of, walked_sparse
from tests.unit.walk.test_walk import Prompt, assert_equal, eager, mixed, tokens, walked

SWITCH = 120
ROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * number for number in range(8)],
    "long_factor": [2.0 + 0.7 * number for number in range(8)],
    "original_max_position_embeddings": SWITCH,
    "factor": 4096 / SWITCH,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"original_max_position_embeddings": SWITCH},
    "llama": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "long_mscale": 1.3, "short_mscale": 1.1},
}


@cache
def model_of(family: str) -> nn.Module:
    register()
    changes = FAMILIES[family]
    scales = {name: changes[name] for name in ("long_mscale", "short_mscale") if name in changes}
    others = {name: value for name, value in changes.items() if name not in scales}
    return make_model(family, rope_parameters=ROPE | scales, **others)


def both_sides() -> list[Prompt]:
    """A history that short and long prompts begin with, prompts at the switch, and others."""
    rng = np.random.default_rng(8)
    history = tokens(rng, 100)
    lengths = (1, 19, 20, 21, 40, 90, 90)
    return [*(np.concatenate([history, tokens(rng, n)]) for n in lengths), *mixed()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "limits",
    [Limits(10**6, 10**6, switch=SWITCH), Limits(110, 10**6, held_tokens=10**6, switch=SWITCH)],
    ids=["one pack", "held"],
)
def test_each_prompt_has_the_tables_of_its_length(family: str, limits: Limits) -> None:
    model, prompts = model_of(family), both_sides()
    assert_equal(walked(model, prompts, chunk=41, limits=limits), eager(model, prompts))


def test_tables_of_the_other_side_are_wrong() -> None:
    model, prompts = model_of("phi3"), both_sides()
    unmarked = walked(model, prompts, chunk=1000, limits=Limits(10**6, 10**6))
    difference = (unmarked - eager(model, prompts)).abs().amax(dim=1)
    assert difference.max() > 0.05


def test_a_prompt_that_has_lost_tokens_is_as_long_as_before() -> None:
    model, prompts = model_of("phi3"), both_sides()
    kept = kept_of(prompts)
    limits = Limits(110, 10**6, held_tokens=10**6, switch=SWITCH)
    found = walked_sparse(model, prompts, kept, chunk=41, limits=limits)
    assert_equal(found, eager_sparse(model, prompts, kept))


def test_prefixes_are_shared_on_either_side_and_not_across() -> None:
    prompts = [np.arange(n, dtype=np.int32) for n in (100, 110, 130, 150)]
    assert make_plan(prompts, Limits(10**6, 10**6, switch=SWITCH)).unique_tokens == 110 + 150


def test_a_prompt_at_the_switch_is_not_long() -> None:
    assert marked_positions(None, SWITCH, SWITCH) is None
    marked = marked_positions(None, SWITCH + 1, SWITCH)
    assert marked is not None
    assert marked.tolist() == list(range(LONG, LONG + SWITCH + 1))
    kept = np.array([0, 5, SWITCH], dtype=np.int32)
    assert marked_positions(kept, 3, SWITCH).tolist() == [LONG, LONG + 5, LONG + SWITCH]
    assert marked_positions(kept, 3, 0) is kept


def test_a_model_without_such_tables_refuses_marked_positions() -> None:
    register()
    with pytest.raises(UnsupportedModelError, match="position encodings"):
        walked(make_model("llama"), both_sides(), chunk=41, limits=Limits(10**6, 10**6, switch=SWITCH))


def test_the_model_has_its_own_forward_afterwards() -> None:
    model = model_of("phi3")
    engine = TorchEngine(LayerWalk(model, chunk_tokens=64), limits=Limits(10**6, 10**6, switch=SWITCH))
    engine.close()
    assert not any("forward" in vars(module) for module in model.modules())

"""The registry of families says what the tests do, and the manual says what the registry does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

from prefillcli.models.shape import SEE_A_WINDOW, SEE_ALL, VERIFIED, NoCostModel, Shape, refusal
from tests.unit.walk.families import FAMILIES, make_config

ARCHITECTURES = Path(__file__).parents[3] / "docs" / "architectures.md"


def test_verified_are_the_families_that_the_walk_is_tested_with() -> None:
    assert set(VERIFIED) == set(FAMILIES)


@pytest.mark.parametrize(("family", "title"), VERIFIED.items())
def test_a_family_is_one_of_transformers_and_in_the_manual(family: str, title: str) -> None:
    config = AutoConfig.for_model(family)
    assert config.model_type == family
    assert set(getattr(config, "layer_types", None) or ()) <= SEE_ALL | SEE_A_WINDOW
    assert title in " ".join(ARCHITECTURES.read_text().split())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_size_of_a_verified_family_is_known(family: str) -> None:
    config = make_config(family)
    shape = Shape(config)
    assert (shape.hidden, shape.heads, shape.kv_heads, shape.head_width) == (64, 4, 2, 16)
    assert len(shape.windows) == shape.layers
    assert shape.sliding_window in (None, *shape.windows)
    assert all(shape.mlp(layer).width > 0 for layer in range(shape.layers))


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("bert", {}, "is an encoder"),
        ("bert", {"is_decoder": True}, None),
        ("t5", {}, "is an encoder-decoder"),
        ("paligemma", {}, "reads a prompt in both directions"),
        ("nemotron_h", {}, None),
        ("gpt_neox", {}, None),
    ],
)
def test_only_what_cannot_score_is_refused(family: str, changes: dict[str, object], why: str | None) -> None:
    config = AutoConfig.for_model(family, **changes)
    found = refusal(config, config.get_text_config(), causal=True)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_a_size_that_is_missing_is_named() -> None:
    config = SimpleNamespace(model_type="openelm", num_key_value_heads=[1, 2, 2])
    with pytest.raises(NoCostModel, match="num_key_value_heads of openelm"):
        _ = Shape(config).kv_heads
    with pytest.raises(NoCostModel, match="openelm has no hidden_size"):
        _ = Shape(config).hidden

"""Texts behind kept packs against transformers' own greedy generation."""

from __future__ import annotations

from functools import cache

from prefillcli.decode.continuations import Writing
from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.walk import LayerWalk
from tests.decode.generated import Reference, assert_same_texts, beginnings, generated, greedy, written
from tests.prefill.families import each_family
from tests.prefill.test_walk import model_of, three_levels

TOKENS = 12


@cache
def references(family: str) -> tuple[Writing, list[Reference]]:
    """Texts of which some end at a stop token."""
    rows = beginnings(three_levels())
    endless = [generated(model_of(family), row, greedy(TOKENS)).tokens for row in rows]
    writing = greedy(TOKENS, {endless[0][5], endless[7][9]})
    return writing, [generated(model_of(family), row, writing) for row in rows]


@each_family
def test_texts_are_those_of_transformers(family: str) -> None:
    writing, wanted = references(family)
    model = model_of(family)
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=97)
    try:
        found = written(walk, beginnings(three_levels()), writing)
    finally:
        walk.close()
    assert assert_same_texts(found, wanted, writing) <= 1
    assert "stop" in {text.finish_reason for text in found}

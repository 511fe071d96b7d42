"""Texts behind kept packs against transformers' own greedy generation."""

from __future__ import annotations

from functools import cache

import pytest

from prefillcli.prefill.forest import ATTENTION
from prefillcli.prefill.walk import LayerWalk
from tests.decode.generated import Reference, assert_same_texts, beginnings, generated, greedy, written
from tests.prefill.families import each_family
from tests.prefill.test_walk import mixed, model_of, three_levels

WRITING = greedy(12, tuple(range(2, 211, 9)))


@cache
def references(family: str) -> list[Reference]:
    return [generated(model_of(family), row, WRITING) for row in beginnings(three_levels())]


@each_family
def test_texts_are_those_of_transformers(family: str) -> None:
    wanted = references(family)
    model = model_of(family)
    model.set_attn_implementation(ATTENTION)
    walk = LayerWalk(model, chunk_tokens=97)
    try:
        found = written(walk, beginnings(three_levels()), WRITING)
    finally:
        walk.close()
    assert assert_same_texts(found, wanted, WRITING) <= 1
    assert {text.finish_reason for text in found} == {"stop", "length"}

"""Texts behind kept packs against transformers' own greedy generation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk.continuations import Beginning, DecodingReport, Writing
from prefillcli.walk.decoding import RowRoom
from tests.unit.walk.families import WINDOW, each_family, make_model
from tests.unit.walk.generated import (
    ONE_PACK,
    Reference,
    Teacher,
    assert_same_texts,
    beginnings,
    computed,
    generated,
    greedy,
    walking,
    written,
)
from tests.unit.walk.test_sparse import kept_of
from tests.unit.walk.test_walk import mixed, model_of, three_levels
from tests.unit.walk.variants import make_variant

TOKENS = 12
SPREAD = Limits(110, 10**6, held_tokens=10**6)  # some packs hold what earlier ones have computed


@cache
def references(family: str) -> tuple[Writing, list[Reference]]:
    """Texts of which some end at a stop token."""
    rows = beginnings(three_levels())
    endless = [generated(model_of(family), row, greedy(TOKENS)).tokens for row in rows]
    tokens = sorted({token for text in endless for token in text})
    rarest = min(tokens, key=lambda token: sum(token in text for text in endless))
    writing = greedy(TOKENS, {rarest})
    return writing, [generated(model_of(family), row, writing) for row in rows]


def teacher_of(rows: Sequence[Beginning], wanted: Sequence[Reference]) -> Teacher:
    return Teacher({row.key: reference.tokens for row, reference in zip(rows, wanted, strict=True)})


@pytest.mark.sampled(2)
@each_family
def test_texts_are_those_of_transformers(family: str) -> None:
    writing, wanted = references(family)
    with walking(model_of(family)) as walk:
        found = written(walk, beginnings(three_levels()), writing)
    assert assert_same_texts(found, wanted, writing) <= 1
    assert "stop" in {text.finish_reason for text in found}


@pytest.mark.sampled(2)
@each_family
def test_right_and_wrong_guesses_change_no_text(family: str) -> None:
    writing, wanted = references(family)
    rows = beginnings(three_levels())
    teacher = teacher_of(rows, wanted)
    with walking(model_of(family)) as walk:
        found = written(walk, rows, writing, limits=SPREAD, make_drafter=lambda forward: teacher)
    assert assert_same_texts(found, wanted, writing) <= 1
    assert teacher.right > 10
    assert teacher.wrong > 10


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gpt_oss", "qwen2"])
@pytest.mark.parametrize("guessing", [False, True])
def test_texts_go_on_beyond_sliding_windows(family: str, guessing: bool) -> None:
    model = make_model(family, sliding_window=9)
    rows, writing = beginnings(mixed()[:9]), greedy(2 * WINDOW // 3)
    wanted = [generated(model, row, writing) for row in rows]
    teacher = teacher_of(rows, wanted) if guessing else None
    with walking(model, chunk_tokens=31) as walk:
        found = written(walk, rows, writing, make_drafter=lambda forward: teacher)
    assert assert_same_texts(found, wanted, writing) <= 1


@pytest.mark.parametrize("size", [4, 16])
def test_texts_go_on_beyond_parts_of_local_attention(size: int) -> None:
    model = make_variant("llama4_text", attention_chunk_size=size)
    rows, writing = beginnings(mixed()[:6]), greedy(10)
    wanted = [computed(model, row, writing) for row in rows]
    teacher = teacher_of(rows, wanted)
    with walking(model) as walk:
        found = written(walk, rows, writing, make_drafter=lambda forward: teacher)
    assert assert_same_texts(found, wanted, writing) <= 1


def test_rows_may_be_written_in_groups_and_packs() -> None:
    rows, writing = beginnings(mixed()[:16]), greedy(5)
    with walking(model_of("gemma2")) as walk:
        whole = written(walk, rows, writing)
        for limits, room in (
            (ONE_PACK, RowRoom(most_rows=3)),
            (ONE_PACK, RowRoom(1)),
            (SPREAD, None),
            (SPREAD, RowRoom(1)),
        ):
            parts = written(walk, rows, writing, limits=limits, room=room)
            assert [text.tokens for text in parts] == [text.tokens for text in whole]


def test_a_prompt_with_gaps_is_written_on_behind_its_last_position() -> None:
    model, prompts = model_of("llama"), mixed()[:8]
    rows = [
        Beginning(prompt if own is None else prompt[own], (7, 8), str(number), positions=own)
        for number, (prompt, own) in enumerate(zip(prompts, kept_of(prompts), strict=True))
    ]
    writing = greedy(6)
    with walking(model) as walk:
        found = written(walk, rows, writing)
    model.set_attn_implementation("eager")
    for row, text in zip(rows, found, strict=True):
        ids = [*row.prompt.tolist(), *row.tokens, *text.tokens]
        at = np.arange(len(row.prompt)) if row.positions is None else row.positions
        places = [*at.tolist(), *(int(at[-1]) + 1 + np.arange(len(ids) - len(at))).tolist()]
        given = {"position_ids": torch.as_tensor([places]), "attention_mask": torch.ones(1, len(ids))}
        logits = model(input_ids=torch.as_tensor([ids]), use_cache=False, **given).logits[0, -7:-1]
        assert logits.argmax(-1).tolist() == list(text.tokens)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_prompt_tokens_are_computed_once(family: str) -> None:
    """Every token that a layer's first product sees is one of the pack's, or one behind a prompt."""
    model, rows, writing, report = model_of(family), beginnings(mixed()), greedy(4), DecodingReport()
    seen = 0

    def count(module: Any, args: Any) -> None:
        nonlocal seen
        seen += args[0].shape[1]

    hook = model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(count)
    try:
        with walking(model) as walk:
            texts = written(walk, rows, writing, report=report)
    finally:
        hook.remove()
    (pack,) = make_plan([row.prompt for row in rows], ONE_PACK).packs
    behind = sum(len(row.tokens) + len(text.tokens) - 1 for row, text in zip(rows, texts, strict=True))
    assert seen == len(pack.tokens) + behind
    assert (report.texts, report.tokens) == (len(rows), 4 * len(rows))


def test_in_bfloat16_texts_part_at_near_ties_alone() -> None:
    model = make_model("llama", torch.bfloat16)
    rows, writing = beginnings(mixed()[:16]), greedy(16)
    wanted = [generated(model, row, writing) for row in rows]
    with walking(model) as walk:
        found = written(walk, rows, writing)
    for own, (tokens, gaps) in zip(found, wanted, strict=True):
        parted = [at for at, pair in enumerate(zip(own.tokens, tokens, strict=True)) if pair[0] != pair[1]]
        assert not parted or gaps[parted[0]] < 0.05

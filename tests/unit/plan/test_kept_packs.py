"""Packs that are cut so that their K,V of all layers can be kept."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prefillcli.plan import SCHEDULES
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from tests.unit.plan.test_plan import prompts_of_few_words, spelled


@settings(max_examples=100)
@given(
    prompts_of_few_words,
    st.integers(1, 60),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.4, 3.0]),
    st.sampled_from(sorted(SCHEDULES)),
)
def test_each_pack_can_be_kept_unless_its_one_prompt_is_too_long(prompts, kept, held, end, schedule) -> None:
    limits = Limits(
        50, 10**6, held_tokens=held, kept_tokens=kept, kept_end=end, kept_held_tokens=held, kept_packs=True
    )
    packs = make_plan(prompts, limits, schedule).packs
    assert spelled(packs, limits) == {n: p.tolist() for n, p in enumerate(prompts)}
    for pack in packs:
        size = pack.held_tokens + len(pack.tokens) + end * len(pack.reads)
        assert limits.can_keep(pack) == (size <= kept)
        if size > kept:
            assert len(pack.reads) == 1, "another prompt made it too large"
            assert len(prompts[pack.prompts[0]]) + end > kept, "without what it holds it could be kept"


def test_the_packs_of_texts_are_no_larger_than_what_is_kept() -> None:
    limits = Limits(1000, 2000, held_tokens=500, kept_tokens=300, kept_held_tokens=100)
    prompts = [np.arange(at, at + 70, dtype=np.int32) for at in range(0, 700, 70)]
    assert [len(pack.tokens) for pack in make_plan(prompts, limits).packs] == [700], "scored in one"
    assert [len(pack.tokens) for pack in make_plan(prompts, limits.for_texts()).packs] == [280, 280, 140]
    assert limits.for_texts().held_tokens == 100
    nothing = replace(limits, kept_tokens=0)
    assert nothing.for_texts() == nothing

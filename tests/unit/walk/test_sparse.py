"""Packs of kept tokens at their original positions, against the model's own eager forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from tests.unit.walk.families import each_family
from tests.unit.walk.test_walk import ONE_PACK, Prompt, assert_equal, mixed, model_of, walked


def kept_of(prompts: list[Prompt]) -> list[Prompt | None]:
    """Random runs of each prompt, the same of what prompts share; every fourth prompt is read in full."""
    rng = np.random.default_rng(11)
    runs = np.repeat(rng.random(200) < 0.4, 7)
    kept: list[Prompt | None] = []
    for number, prompt in enumerate(prompts):
        mask = runs[: len(prompt)].copy()
        mask[:2] = mask[-5:] = True
        kept.append(None if number % 4 == 3 else np.flatnonzero(mask).astype(np.int32))
    return kept


def eager_sparse(model: Any, prompts: list[Prompt], kept: list[Prompt | None]) -> torch.Tensor:
    """Each prompt's kept tokens alone, with their position ids and a causal mask."""
    model.set_attn_implementation("eager")
    rows = []
    for prompt, own in zip(prompts, kept, strict=True):
        at = np.arange(len(prompt)) if own is None else own
        ids = torch.as_tensor(prompt[at]).long()[None]
        with torch.inference_mode():
            logits = model(
                input_ids=ids,
                position_ids=torch.as_tensor(at).long()[None],
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            ).logits
        rows.append(logits[0, -1].float())
    return torch.stack(rows)


def walked_sparse(
    model: Any, prompts: list[Prompt], kept: list[Prompt | None], *, chunk: int, limits: Limits = ONE_PACK
) -> torch.Tensor:
    tokens = [prompt if own is None else prompt[own] for prompt, own in zip(prompts, kept, strict=True)]
    return walked(model, tokens, chunk=chunk, limits=limits, positions=kept)


@pytest.mark.sampled(5)
@each_family
@pytest.mark.parametrize(
    "limits", [ONE_PACK, Limits(60, 10**6, held_tokens=10**6), Limits(60, 10**6)], ids=["one pack", "kept", "again"]
)
def test_kept_tokens_are_read_at_their_own_positions(family: str, limits: Limits) -> None:
    model, prompts = model_of(family), mixed()
    kept = kept_of(prompts)
    assert_equal(walked_sparse(model, prompts, kept, chunk=41, limits=limits), eager_sparse(model, prompts, kept))


def test_positions_matter() -> None:
    model, prompts = model_of("llama"), mixed()
    kept = kept_of(prompts)
    squeezed = [prompt if own is None else prompt[own] for prompt, own in zip(prompts, kept, strict=True)]
    difference = walked_sparse(model, prompts, kept, chunk=97) - walked(model, squeezed, chunk=97)
    assert difference.abs().max() > 0.05


def test_the_same_tokens_at_other_positions_are_not_shared() -> None:
    tokens = np.arange(20, dtype=np.int32)
    shifted = np.arange(20, dtype=np.int32) + np.arange(20, dtype=np.int32) // 10 * 5
    plan = make_plan([tokens, tokens, tokens], ONE_PACK, positions=[None, shifted, shifted])
    assert plan.unique_tokens == 30, "the first ten once, the others once for each position"
    assert plan.packs[0].positions.tolist() == [*range(10), *range(10, 20), *range(15, 25)]

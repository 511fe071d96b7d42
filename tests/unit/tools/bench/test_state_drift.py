"""State drift, against the states in transformers' own cache after eager forwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.drift import DRIFT_ROWS, StateDrift, state_drift
from prefillcli.core.request import Request
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.rows.records import Prompt
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import LayerWalk
from tests.unit.walk.families import VOCABULARY, make_model
from tests.unit.walk.test_recurrent import RECURRENT

PLENTY = Limits(10**6, 10**6)


def questions(rows: int = 3) -> list[Request]:
    """Prompts of which about a quarter is kept."""
    rng = np.random.default_rng(6)
    found = []
    for row in range(rows):
        tokens = rng.integers(3, VOCABULARY, 150 + 40 * row).astype(np.int32)
        kept = np.sort(rng.choice(len(tokens), len(tokens) // 4, replace=False))
        found.append(Request(Prompt(row, tokens, LabelSet(())), kept, "random"))
    return found


def drift_of(model: Any, asked: list[Request], chunk: int = 64) -> StateDrift | None:
    register()
    model.set_attn_implementation(ATTENTION)

    @contextmanager
    def walking() -> Iterator[LayerWalk]:
        walk = LayerWalk(model, chunk_tokens=chunk)
        try:
            yield walk
        finally:
            walk.close()

    return state_drift(walking, PLENTY, asked)


def cached_states(model: Any, tokens: np.ndarray, positions: np.ndarray) -> dict[int, torch.Tensor]:
    """What transformers' own cache holds of each recurrent layer, numbered from 1, after one eager forward."""
    model.set_attn_implementation("eager")
    ids, places = (torch.as_tensor(each, dtype=torch.long)[None] for each in (tokens, positions))
    with torch.inference_mode():
        out = model(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids), use_cache=True)
    found = {}
    for number, layer in enumerate(out.past_key_values.layers, start=1):
        if not hasattr(layer, "conv_states"):
            continue
        state = layer.recurrent_states[0] if layer.recurrent_states[0] is not None else layer.conv_states[0]
        if state is not None:  # MLPs have an entry too
            found[number] = state
    return found


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "lfm2"])
def test_drift_is_that_of_transformers_own_states(family: str) -> None:
    model: Any = make_model(family, **RECURRENT[family])
    wanted: dict[int, list[float]] = {}
    for each in questions():
        prompt, kept = each.prompt.tokens, each.kept
        assert kept is not None
        whole = cached_states(model, prompt, np.arange(len(prompt)))
        for layer, state in cached_states(model, prompt[kept], kept).items():
            wanted.setdefault(layer, []).append(float((state - whole[layer]).norm() / whole[layer].norm()))
    found = drift_of(model, questions())
    assert found is not None
    assert found.rows == 3
    assert {each.layer for each in found.layers} == set(wanted)
    for each in found.layers:
        assert (each.median, each.largest) == pytest.approx(
            (np.median(wanted[each.layer]), max(wanted[each.layer])), abs=1e-4
        )
    every = [value for own in wanted.values() for value in own]
    assert (found.median, found.largest) == pytest.approx((np.median(every), max(every)), abs=1e-4)
    assert found.median > 0.1, "the kept tokens must leave other states, or this shows nothing"


def test_only_compressed_rows_count_and_not_all_of_many() -> None:
    model: Any = make_model("lfm2", **RECURRENT["lfm2"])
    whole = [Request(each.prompt) for each in questions()]
    assert drift_of(model, whole) is None
    found = drift_of(model, [*whole, *questions(DRIFT_ROWS + 2)])
    assert found is not None
    assert found.rows == DRIFT_ROWS


def test_a_model_without_recurrent_layers_has_no_drift() -> None:
    assert drift_of(make_model("llama"), questions(1)) is None

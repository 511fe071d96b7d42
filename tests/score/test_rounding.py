"""Scores in float32 of a model whose attention is sharp, against its own forward in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

import prefillcli
from benchmarks.rounding import exact_scores, odd_prompts
from benchmarks.score_runs import SAMPLES

MODEL = str(SAMPLES / "models" / "target")
BOUND = 1e-4
"""Of a difference between two scores of a row, as docs/score.md promises."""
ROWS = 40


def scores(prompts: list[str], **options: Any) -> np.ndarray:
    table = prefillcli.score(prompts, MODEL, dtype="float32", **options)
    return np.asarray(table["score"], np.float64)


def test_sharp_attention_costs_the_walk_no_more_digits_than_the_models_own_forward() -> None:
    prompts = odd_prompts(ROWS)
    exact, top = exact_scores(MODEL, prompts)
    assert top > 100, "this attention is not sharp: the test would show nothing"
    # One process, smaller packs, and two halves as workers or a resume would score them
    ways = [
        scores(prompts),
        scores(prompts, pack_tokens=512, chunk_tokens=128),
        np.concatenate([scores(prompts[: ROWS // 2 - 7]), scores(prompts[ROWS // 2 - 7 :])]),
    ]
    own = np.abs(scores(prompts, engine="hf") - exact)
    for found in ways:
        error = np.abs(found - exact)
        assert error.max() <= BOUND / 2
        # Largest errors are a matter of luck, so they are compared with a margin.
        assert error.max() <= 8 * own.max()
        assert np.sqrt(np.square(error).mean()) <= 4 * np.sqrt(np.square(own).mean())

"""Scores in float32 of a model whose attention is sharp, against its own forward in float64."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import prefillcli
from benchmarks.needles import TOPICS
from benchmarks.sample_text import CREDITORS, SUBJECTS
from benchmarks.score_runs import SAMPLES

MODEL = str(SAMPLES / "models" / "target")
BOUND = 1e-4
"""Of a difference between two scores of a row, as docs/score.md promises."""
ROWS = 40
LABELS = (" Yes", " No")
LETTERS = (*range(32, 127), *range(160, 3000))


def odd_prompts(rows: int, seed: int = 0) -> list[str]:
    """Prompts that the sample models were not trained on, which makes their attention sharp.

    In turn twenty that begin with the same sixty random words, and twenty of random characters of several alphabets.
    """
    words = sorted({word for name in (*TOPICS, *SUBJECTS, *CREDITORS) for word in name.split()})
    rng = Random(f"rounding {seed}")
    prompts: list[str] = []
    while len(prompts) < rows:
        beginning = f"User {len(prompts)} likes {' '.join(rng.choices(words, k=60))}. "
        prompts += [f"{beginning}Post {post} is about {rng.choice(words)}. Answer:" for post in range(20)]
        for _ in range(20):
            characters = [chr(rng.choice(LETTERS)) for _ in range(rng.randint(3, 150))]
            prompts.append(f"{''.join(characters)} Answer:")
    return prompts[:rows]


def exact_scores(folder: str, prompts: Sequence[str]) -> tuple[np.ndarray, float]:
    """P(Yes) of each prompt by the eager forward in float64, and the largest score of its attention."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()
    yes, no = (tokenizer.encode(label, add_special_tokens=False)[-1] for label in LABELS)
    tops: list[float] = []
    softmax = torch.nn.functional.softmax

    def watched(scores: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        # Eager attention casts scores to float32 for the softmax, which would make the reference inexact.
        tops.append(float(scores[scores > torch.finfo(scores.dtype).min / 2].abs().max()))
        return softmax(scores, *rest, **how | {"dtype": torch.float64})

    found = np.empty(len(prompts))
    torch.nn.functional.softmax = watched  # type: ignore[assignment]
    try:
        with torch.inference_mode():
            for row, prompt in enumerate(prompts):
                logits = model(tokenizer(prompt, return_tensors="pt").input_ids).logits[0, -1]
                found[row] = torch.sigmoid(logits[yes] - logits[no]).item()
    finally:
        torch.nn.functional.softmax = softmax
    return found, max(tops)


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

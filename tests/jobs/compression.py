"""Prompts to compress, and SpecPrefill done by hand with transformers' own eager forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from tests.jobs.jobs import Reference, read_output, score

RATE, ABOVE, CHUNK, FIRST, LAST, WINDOW, POOL = 0.3, 64, 8, 4, 16, 8, 5
HOW = {
    "keep": RATE,
    "compress_above": ABOVE,
    "select_chunk": CHUNK,
    "keep_first": FIRST,
    "keep_last": LAST,
    "query_window": WINDOW,
    "lookahead": 1,
    "query_reduce": "mean",
    "keep_private": False,
    "pool": POOL,
}
SAME = 1e-6
"""Of a float32 score that is computed in other company."""
QUESTION = "\nAnswer:"

Prompt = list[int]


def compressed(inputs: Any, output: str = "out.parquet", **flags: Any) -> dict[str, Any]:
    """The summary of a job that compresses in the way of `HOW`."""
    return score(inputs, output, **{"overwrite": True, **HOW, **flags})


def full_rows(inputs: Any, model: Path, **flags: Any) -> list[dict[str, Any]]:
    """The rows of the same job without a draft."""
    assert score(inputs, "full.parquet", model=model, overwrite=True, **flags)["exit_code"] in (0, 3)
    return read_output("full.parquet")


def unrelated(reference: Reference, lengths: Sequence[int], seed: int = 0) -> list[Prompt]:
    """Random prompts of these lengths that ask the same; no two begin with the same token."""
    rng = np.random.default_rng(seed)
    end = reference.ids(QUESTION, special=False)
    firsts = rng.permutation(np.arange(3, 260))
    return [
        [int(firsts[number]), *rng.integers(3, 260, length - 1 - len(end)).tolist(), *end]
        for number, length in enumerate(lengths)
    ]


def lines_of(prompts: Sequence[Prompt], **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """JSON lines with the prompts and more columns; an Ellipsis leaves the column out of its line."""
    rows = []
    for number, prompt in enumerate(prompts):
        own = {name: values[number] for name, values in columns.items() if values[number] is not ...}
        rows.append({"prompt_token_ids": prompt, **own})
    return rows


def assert_close(rows: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], tolerance: float = SAME) -> None:
    """The rows have the same answers."""
    assert [row["error"] for row in rows] == [row["error"] for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        if row["error"] is None:
            assert row["score"] == pytest.approx(other["score"], abs=tolerance)
            assert row["logprob_Yes"] == pytest.approx(other["logprob_Yes"], abs=10 * tolerance)
            assert row["prediction"] == other["prediction"]


class ByHand:
    """A model and its draft under transformers' eager forward, one prompt at a time."""

    def __init__(self, reference: Reference, model: Path, draft: Path) -> None:
        self._reference = reference
        self._model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
        self._draft = AutoModelForCausalLM.from_pretrained(draft, attn_implementation="eager").eval()

    @torch.inference_mode()
    def importance(self, prompt: Prompt) -> np.ndarray:
        """What the draft's last `WINDOW` tokens look at: softmax, pooling, largest over heads, mean over queries."""
        layers = self._draft(torch.tensor([prompt]), output_attentions=True, use_cache=False).attentions
        shares = torch.cat([layer[0, :, -WINDOW:] for layer in layers])
        return F.avg_pool1d(shares, POOL, 1, POOL // 2).amax(0).mean(0).numpy()

    def kept(self, prompt: Prompt, rate: float = RATE) -> np.ndarray:
        """The best chunks, and both ends."""
        importance = self.importance(prompt).astype(float)
        chunks = [importance[at : at + CHUNK].mean() for at in range(0, len(prompt), CHUNK)]
        best = sorted(range(len(chunks)), key=lambda chunk: -chunks[chunk])[: math.ceil(round(rate * len(chunks), 9))]
        at = np.arange(len(prompt))
        return at[np.isin(at // CHUNK, best) | (at < FIRST) | (at >= len(prompt) - LAST)]

    def score(self, prompt: Prompt, kept: np.ndarray) -> float:
        """Share of Yes when the model reads the kept tokens at the positions they have in the prompt."""
        logits = self.logits(prompt, kept)[-1]
        yes, no = (float(logits[self._reference.token(text)]) for text in (" Yes", " No"))
        return 1 / (1 + math.exp(no - yes))

    @torch.inference_mode()
    def logits(self, prompt: Prompt, kept: np.ndarray) -> torch.Tensor:
        """Logits [kept, vocabulary] when the model reads the kept tokens at the positions they have in the prompt."""
        tokens = torch.tensor(prompt)[kept][None]
        unseen = torch.full((len(kept), len(kept)), torch.finfo(torch.float32).min).triu(1)[None, None]
        logits: torch.Tensor = self._model(
            tokens, position_ids=torch.tensor(kept)[None], attention_mask=unseen, use_cache=False
        ).logits[0]
        return logits


def behind(
    logits: Callable[[Prompt, np.ndarray], torch.Tensor], prompt: Prompt, kept: np.ndarray, text: Prompt
) -> Any:
    """Log-probabilities of a text's tokens behind the kept tokens of a prompt, float64 [tokens]."""
    at = np.append(kept, np.arange(len(prompt), len(prompt) + len(text)))
    found = logits([*prompt, *text], at)[len(kept) - 1 : -1].double().log_softmax(-1)
    return found[torch.arange(len(text)), torch.tensor(text)].numpy()

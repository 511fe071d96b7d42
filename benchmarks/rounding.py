"""How far scores in float32 are from exact ones: those of the walk in large and in small packs, and of a plain loop.

python -m benchmarks.rounding
python -m benchmarks.rounding --model samples/models/draft --rows 10000

Half of the rows are random words, twenty at a time behind the same beginning, and half are random characters. Exact is
the model's own eager forward in float64. The last line of stdout is JSON: for each pair of ways to compute the scores,
the largest difference, the one that a row in a thousand exceeds, and the median.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

import prefillcli
from benchmarks.console import log
from benchmarks.sample_text import CREDITORS, SUBJECTS
from prefillcli.bench.material import TOPICS

WAYS: dict[str, dict[str, Any]] = {
    "walk": {},
    "walk, small packs": {"pack_tokens": 1024, "chunk_tokens": 256},
    "walk, deterministic": {"deterministic": True},
    "transformers": {"engine": "hf"},
}
"""Options of a Scorer by what is measured."""
LABELS = (" Yes", " No")
LETTERS = (*range(32, 127), *range(160, 3000))

Scores = npt.NDArray[np.float64]


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


def exact_scores(folder: str, prompts: Sequence[str]) -> tuple[Scores, float]:
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


def main(
    model: Annotated[str, typer.Option(help="A folder of a Llama or the like.")] = "samples/models/target",
    rows: Annotated[int, typer.Option(help="Prompts.")] = 2000,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
) -> None:
    """Compute all scores in each way, and compare."""
    prompts = odd_prompts(rows, seed)
    log(f"{len(prompts)} prompts: float64")
    exact, top = exact_scores(model, prompts)
    found: dict[str, Scores] = {"exact": exact}
    for name, options in WAYS.items():
        log(name)
        table = prefillcli.score(prompts, model, labels="Yes,No", dtype="float32", **options)
        found[name] = np.asarray(table["score"], np.float64)
    result: dict[str, Any] = {"rows": len(prompts), "largest_attention_score": top}
    for one, other in combinations(found, 2):
        apart = np.abs(found[one] - found[other])
        result[f"{one} / {other}"] = {
            "largest": float(apart.max()),
            "one_in_1000": float(np.quantile(apart, 0.999)),
            "median": float(np.median(apart)),
            "row": int(apart.argmax()),
        }
    typer.echo(json.dumps(result))


if __name__ == "__main__":
    typer.run(main)

"""How much a score depends on a row's neighbours: the same reviews in random orders, packs, chunks and schedules.

python -m benchmarks.shuffles --dtype bfloat16

In each shuffle the reviews of SmolLM2's demo come in a random order, and the sizes of packs and chunks, the schedule
and the number of threads are drawn at random. The last line of stdout is JSON: how far the scores of a row lie apart
over all shuffles, how many rows have both answers, and how many always have the same bits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.console import log
from prefillcli.engines.torch import TorchEngine
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.plan import SCHEDULES
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.walk import LayerWalk
from recipes.choose_prompt import CANDIDATES, CHOSEN
from recipes.real_model import real_model, reviews

FEWEST_TOKENS = 128  # of a pack, and 32 of a chunk: the random sizes begin there


def drawn_settings(rng: np.random.Generator, most_tokens: int, threads: int) -> dict[str, Any]:
    """Options that must not change a score, at random; sizes are even on a scale of logarithms."""

    def size(least: int, most: int) -> int:
        return int(np.exp(rng.uniform(np.log(least), np.log(most))))

    return {
        "pack_tokens": size(FEWEST_TOKENS, most_tokens),
        "chunk_tokens": size(FEWEST_TOKENS // 4, 4096),
        "schedule": str(rng.choice(list(SCHEDULES))),
        "threads": int(rng.integers(1, threads + 1)),
    }


def summary(scores: npt.NDArray[np.float64]) -> dict[str, Any]:
    """Of scores [shuffles, rows], NaN where a row was not drawn: by how much and how often they differ.

    A flip is a score whose answer is not the one that most scores of the row give.
    """
    times = np.isfinite(scores).sum(axis=0)
    scores, times = scores[:, times > 1], times[times > 1]
    if not scores.size:
        return {}
    spread, yes = np.nanmax(scores, axis=0) - np.nanmin(scores, axis=0), (scores >= 0.5).sum(axis=0)
    flips = np.minimum(yes, times - yes)
    return {
        "shuffles": len(scores),
        "rows": len(times),
        "scores": int(times.sum()),
        "largest_difference": float(spread.max()),
        "median_difference": float(np.median(spread)),
        "flips": int(flips.sum()),
        "rows_with_both_answers": int((flips > 0).sum()),
        "rows_with_one_score": int((spread == 0).sum()),
    }


def score_shuffled(
    model: PreTrainedModel, prompts: Sequence[TokenArray], labels: LabelSet, drawn: Mapping[str, Any]
) -> npt.NDArray[np.float64]:
    """The probability of the first of two labels for each prompt, in packs and chunks as `drawn`."""
    torch.set_num_threads(drawn["threads"])
    walk = LayerWalk(model, chunk_tokens=drawn["chunk_tokens"])
    engine = TorchEngine(walk, limits=Limits(drawn["pack_tokens"], 1 << 30))
    found = np.empty(len(prompts))
    with closing(engine):
        for pack in make_plan(prompts, engine.limits, drawn["schedule"]).packs:
            for answers in engine.answer(pack, lambda prompt: labels, lambda tokens: None):
                for answer in answers:
                    yes, no = answer.logprobs
                    found[answer.prompt] = 1 / (1 + np.exp(no - yes))
    return found


def main(
    rows: Annotated[int, typer.Option(help="The first N reviews of the test split.")] = 343,
    at_once: Annotated[int, typer.Option(help="Reviews of a shuffle, drawn at random; 0: all.")] = 0,
    shuffles: Annotated[int, typer.Option(help="Random orders.")] = 50,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of the orders and settings.")] = 0,
    threads: Annotated[int, typer.Option(help="Most threads.")] = 2,
    scores_file: Annotated[Path | None, typer.Option(help="Also write all scores here, after each shuffle.")] = None,
) -> None:
    """Score the rows as often, and compare."""
    chosen = CANDIDATES[CHOSEN]
    files = read_model_files(real_model(), dtype=dtype)
    model, tokenizer = load_model(files, torch.device("cpu")), AutoTokenizer.from_pretrained(real_model())
    asked = [chosen.asked.replace("REVIEW", each.text) for each in reviews("Test")[:rows]]
    prompts = [np.asarray(tokenizer(text).input_ids, np.int32) for text in asked]
    labels = LabelSet.of([[int(tokenizer(f" {label}").input_ids[-1])] for label in chosen.labels])
    rng, found = np.random.default_rng(seed), np.full((shuffles, len(prompts)), np.nan)
    for number in range(shuffles):
        order = rng.permutation(len(prompts))[: at_once or None]
        drawn = drawn_settings(rng, 16_384, threads)
        begun = time.perf_counter()
        found[number, order] = score_shuffled(model, [prompts[row] for row in order], labels, drawn)
        log(f"{number + 1} of {shuffles}: {time.perf_counter() - begun:.0f} s {drawn} {summary(found[: number + 1])}")
        if scores_file is not None:
            np.save(scores_file, found[: number + 1])
    typer.echo(json.dumps({"dtype": dtype, **summary(found)}))


if __name__ == "__main__":
    typer.run(main)

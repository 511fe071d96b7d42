"""`python -m benchmarks.drafts`: the sample draft and the one with a tokenizer of its own, on the same rows.

The rows of two shipped data sets, each set planned as one window, and new rows that share nothing. Every round reads
them in full and with each draft, in turn, in processor seconds of one thread. Tables and a line of JSON go to stdout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.console import log, log_run
from benchmarks.methods import compressed_walk, compressor_for, layer_walk
from benchmarks.score_runs import SAMPLES
from benchmarks.spread import Spread
from prefillcli.bench.contest import interleaved
from prefillcli.data.prompts.translation import Translator
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.reading.compress.settings import Compression
from prefillcli.stats.evaluation import exact_interval
from recipes.evaluate_samples import Row, draw_rows, sample_rows
from recipes.sample_tokenizer import answer_tokens

DRAFTS = {"same tokenizer": "draft", "own tokenizer": "draft-words"}
WORKLOADS = ("post_recommendation", "credit_verification", "new rows")


def rows_of(workload: str, count: int) -> list[Row]:
    """The rows of a shipped data set, or `count` new ones of each of two domains."""
    if workload == "new rows":
        return [row for row in draw_rows("drafts", count) if row.domain != "labeling"]
    return [row for row in sample_rows() if row.domain == workload]


def measure(workload: str, rows: Sequence[Row], keep: float, rounds: int) -> list[dict[str, Any]]:
    """What each draft keeps, how many answers flip, and what it takes beside reading in full."""
    target, tokenizer = load_sample("target"), AutoTokenizer.from_pretrained(SAMPLES / "models" / "target")
    labels = answer_tokens(tokenizer)
    prompts = [np.asarray(tokenizer(row.prompt)["input_ids"], np.int32) for row in rows]
    settings = Compression(compress_above=0)
    compressors, found = {}, []
    for name, folder in DRAFTS.items():
        own = AutoTokenizer.from_pretrained(SAMPLES / "models" / folder)
        translator = Translator(tokenizer, own) if name == "own tokenizer" else None
        compressors[name] = compressor_for(load_sample(folder), settings, translator=translator)
    full = torch.softmax(layer_walk(target, prompts)[:, labels], dim=1)
    runs = {name: (lambda own=own: compressed_walk(target, own, prompts, keep)) for name, own in compressors.items()}
    seconds = interleaved(
        {"full": lambda: layer_walk(target, prompts), **runs}, rounds, on_run=log_run, clock=time.process_time
    )
    for name, compressor in compressors.items():
        with closing(compressor):
            before = compressor.picker.tokens
            logits, kept = compressed_walk(target, compressor, prompts, keep)
            answers = torch.softmax(logits[:, labels], dim=1)
            flips = int((answers.argmax(dim=1) != full.argmax(dim=1)).sum())
            right = [("Yes", "No")[at] == row.answer for at, row in zip(answers.argmax(dim=1), rows, strict=True)]
            gains = [whole / part for whole, part in zip(seconds["full"], seconds[name], strict=True)]
            found.append(
                {
                    "workload": workload,
                    "draft": name,
                    "rows": len(rows),
                    "kept": sum(kept) / sum(map(len, prompts)),
                    "draft_tokens": compressor.picker.tokens - before,
                    "flips": flips,
                    "interval": exact_interval(flips, len(rows)),
                    "difference": float((answers - full).abs().mean()),
                    "accuracy": sum(right) / len(right),
                    "seconds": Spread.of(seconds[name]),
                    "gain": Spread.of(gains),
                }
            )
    return found


def load_sample(name: str) -> PreTrainedModel:
    """A sample model in float32, ready to be walked."""
    register()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        SAMPLES / "models" / name, dtype=torch.float32, attn_implementation=ATTENTION
    )
    return model.eval().requires_grad_(False)


def main(
    workload: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(WORKLOADS)}; repeatable.")] = None,
    keep: Annotated[float, typer.Option(help="Keep rate.")] = 0.2,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    rows: Annotated[int, typer.Option(help="New rows of each domain.")] = 60,
) -> None:
    """Compare the two drafts."""
    torch.set_num_threads(1)
    found = []
    for name in workload or WORKLOADS:
        log(name)
        found += measure(name, rows_of(name, rows), keep, rounds)
    table = Table("rows", "draft", "kept", "its tokens", "flips", "difference", "accuracy", "seconds", "gain")
    for each in found:
        low, high = each["interval"]
        table.add_row(
            f"{each['workload']}, {each['rows']}",
            each["draft"],
            f"{each['kept']:.1%}",
            f"{each['draft_tokens']:,}",
            f"{each['flips']} ({low:.1%}-{high:.1%})",
            f"{each['difference']:.4f}",
            f"{each['accuracy']:.1%}",
            str(each["seconds"]),
            str(each["gain"]),
        )
    Console(width=150).print(table)
    print(json.dumps({"keep": keep, "threads": 1, "drafts": found}, default=asdict))


if __name__ == "__main__":
    typer.run(main)

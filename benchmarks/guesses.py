"""`python -m benchmarks.guesses`: decoding alone, with drafters, beside plain lock step.

Prompts are read once and their K,V kept. Then the texts behind them are written in turn by each way, in groups of
rows; what drafters learn from earlier groups is kept for the round. A table and a line of JSON go to stdout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.console import log, log_run
from benchmarks.models import random_llama
from benchmarks.score_runs import SAMPLES
from prefillcli.bench.contest import interleaved
from prefillcli.decode.behind import KeptForward, KeptPack
from prefillcli.decode.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.decode.drafters import JobDrafters
from prefillcli.decode.lockstep import Chooser, write_texts
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ATTENTION, register
from prefillcli.prefill.walk import LayerWalk

WAYS = ("off", "lookup", "suffix")
INPUTS = ("credit", "posts", "reviews", "random")


def texts_to_continue(
    name: str, rows: int, tokens: int, folder: Path
) -> tuple[PreTrainedModel, list[TokenArray], Any]:
    """A model, prompts, and the tokens that stand behind each."""
    if name == "random":
        draw = np.random.default_rng(0)
        prompts = [draw.integers(3, 32_000, tokens).astype(np.int32) for _ in range(rows)]
        return random_llama("100M", torch.float32), prompts, [(5,)] * rows
    register()
    if name == "reviews":
        from benchmarks.reviews import review_prompts  # it downloads

        model, prompts, label = folder / "model", review_prompts(rows, folder), " positive because"
    else:
        model, label = SAMPLES / "models" / "target", " Yes because"
        prompts = []
    tokenizer = AutoTokenizer.from_pretrained(model)
    if name == "credit":
        lines = (SAMPLES / "credit_verification.jsonl").read_text().splitlines()[:rows]
        prompts = [np.asarray(tokenizer(json.loads(line)["prompt"]).input_ids, np.int32) for line in lines]
    elif name == "posts":
        asked = pq.read_table(SAMPLES / "post_recommendation.parquet").column("prompt").to_pylist()[:rows]
        prompts = [np.asarray(tokenizer(prompt).input_ids, np.int32) for prompt in asked]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=ATTENTION)
    return loaded.eval(), prompts, [tuple(tokenizer(label, add_special_tokens=False).input_ids)] * len(prompts)


def kept_groups(
    walk: LayerWalk, rows: Sequence[Beginning], size: int
) -> list[tuple[KeptPack, list[tuple[int, Beginning]]]]:
    """Groups of `size` rows whose prompts have been read, with the number of each row's read."""
    groups = []
    for start in range(0, len(rows), size):
        some = rows[start : start + size]
        (pack,) = make_plan([row.prompt for row in some], Limits(10**7, 10**7)).packs
        kept = KeptPack(pack)
        list(walk.read_logits(pack, kept=kept))
        reads = [(read, some[number]) for read, (_, numbers) in enumerate(pack.reads) for number in numbers]
        groups.append((kept, reads))
    return groups


def write(walk: LayerWalk, groups: list[Any], writing: Writing, report: DecodingReport) -> list[tuple[int, ...]]:
    """All texts, group by group."""
    drafters, chooser, found = JobDrafters(), Chooser(writing.temperature, writing.seed), []
    for kept, reads in groups:
        forward = KeptForward(walk, kept.select([read for read, _ in reads]))
        drafter = drafters.of(forward, writing, report)
        begun = time.perf_counter()
        texts = write_texts(
            forward, [row for _, row in reads], writing, chooser=chooser, drafter=drafter, report=report
        )
        report.seconds += time.perf_counter() - begun
        found += [text.tokens for text in texts]
    return found


def main(
    material: Annotated[str, typer.Argument(help=f"One of {', '.join(INPUTS)}.")],
    rows: Annotated[int, typer.Option(help="Texts.")] = 32,
    group: Annotated[int, typer.Option(help="Rows that are written together.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(help="Of each random prompt.")] = 4096,
    guesses: Annotated[int, typer.Option(help="Most tokens to guess for a pass.")] = 6,
    temperature: Annotated[float, typer.Option(help="Of drawing tokens.")] = 0.0,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads that compute.")] = 1,
    folder: Annotated[Path, typer.Option(help="Where the real model is.")] = Path("out/real"),
) -> None:
    """Measure decoding with guesses."""
    torch.set_num_threads(threads)
    model, prompts, behind = texts_to_continue(material, rows, prompt_tokens, folder)
    beginnings = [
        Beginning(prompt, own, str(number)) for number, (prompt, own) in enumerate(zip(prompts, behind, strict=True))
    ]
    reports: dict[str, DecodingReport] = {}
    texts: dict[str, list[tuple[int, ...]]] = {}
    with closing(LayerWalk(model, chunk_tokens=2048)) as walk:
        groups = kept_groups(walk, beginnings, group)
        log(f"{material}: {sum(map(len, prompts)):,} tokens of prompts read")

        def run(way: str) -> None:
            reports[way] = DecodingReport()
            how = Writing(tokens, temperature=temperature, speculation=Speculation(way, guesses))
            texts[way] = write(walk, groups, how, reports[way])

        seconds = interleaved({way: partial(run, way) for way in WAYS}, rounds, on_run=log_run)
    table = Table("way", "seconds", "speed", "passes of a row per token", "guesses right", "same texts")
    lines = []
    plain = float(np.median(seconds["off"]))
    for way in WAYS:
        report = reports[way]
        ratios = [own / other for own, other in zip(seconds["off"], seconds[way], strict=True)]
        right = {name: f"{counts.accepted} of {counts.proposed}" for name, counts in report.drafters.items()}
        line = {
            "way": way,
            "seconds": round(float(np.median(seconds[way])), 3),
            "speed": round(float(np.median(ratios)), 3),
            "row_passes_per_token": round(report.row_passes / max(1, report.tokens), 3),
            "right": right,
            "same": texts[way] == texts["off"],
        }
        lines.append(line)
        table.add_row(*(str(each) for each in line.values()))
    Console(width=150).print(table)
    print(
        json.dumps(
            {"material": material, "rows": rows, "group": group, "tokens": tokens, "plain": plain, "ways": lines}
        )
    )


if __name__ == "__main__":
    typer.run(main)

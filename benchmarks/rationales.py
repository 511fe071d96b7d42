"""Texts behind scored prompts: lock-step decoding with every drafter against transformers' padded `generate`.

python -m benchmarks.rationales

Contexts are private: no two prompts share a token. End to end, one side scores and writes behind the K,V that it has
kept; the other scores by the same walk, then calls `generate`, which reads the prompts again in padded batches.
Decoding alone begins behind K,V that are there. Progress goes to stderr, the table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.console import log
from benchmarks.models import random_llama
from benchmarks.spread import Spread
from benchmarks.writing import GeneratedTexts, TextRun, TextTask, scored_packs
from prefillcli.plan.behind import LabelSet
from prefillcli.plan.pack import Limits
from prefillcli.plan.trie import TokenArray
from prefillcli.walk.continuations import Beginning, DecodingReport, Speculation, Writing
from prefillcli.walk.decoding import KeptForward
from prefillcli.walk.drafters import drafter_of
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.lockstep import write_texts
from prefillcli.walk.walk import LayerWalk
from recipes.real_model import real_model, reviews

DRAFTERS = ("off", "lookup", "retrieval")
QUESTION = "\nQuestion: Is the writer of these reviews mostly satisfied? Answer:"
BECAUSE = " Yes because"


@dataclass(slots=True)
class Round:
    """Seconds of a round: with the K,V kept and without, of `generate` with its reading, and of decoding alone."""

    keeping: float = 0.0
    scoring: float = 0.0
    generating: float = 0.0
    decoding: dict[str, float] = field(default_factory=dict)

    def end_to_end(self, drafter: str) -> float:
        """Scoring, then `generate`, over the walk with its texts."""
        return (self.scoring + self.generating) / (self.keeping + self.decoding[drafter])


def main(
    model: Annotated[str, typer.Option(help="100M or 25M, with random weights, or smollm2.")] = "100M",
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16; repeatable.")] = None,
    rows: Annotated[int, typer.Option(help="Prompts that are written on.")] = 8,
    lengths: Annotated[str, typer.Option(help="Tokens of the shortest and the longest prompt.")] = "4096-16384",
    tokens: Annotated[int, typer.Option(help="Tokens of a text.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds of everything.")] = 3,
    budget: Annotated[int, typer.Option(help="Tokens of a retrieval cache.")] = 1024,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens of a chunk of the walk.")] = 2048,
    cpu_time: Annotated[bool, typer.Option(help="Measure this process's time on cores, on a busy machine.")] = False,
) -> None:
    """Measure end to end and decoding alone, each round of everything in turn."""
    clock = time.process_time if cpu_time else time.perf_counter
    results = []
    for name in dtype or ["float32", "bfloat16"]:
        network, prompts, words = _material(model, getattr(torch, name), rows, lengths)
        writing = Writing(tokens, speculation=Speculation(budget=budget))
        task = _task(prompts, words, writing)
        done, runs = [], dict[str, TextRun]()
        for number in range(rounds):
            log(f"{model}, {name}, round {number + 1}")
            done.append(_round(network, task, chunk_tokens, clock, runs))
        results.append(_result(name, done, runs))
    _print(f"{model}, {rows} rows of {lengths} tokens, {tokens} tokens each", results)
    print(json.dumps({"model": model, "rows": rows, "lengths": lengths, "tokens": tokens, "budget": budget,
                      "threads": torch.get_num_threads(), "cpu_time": cpu_time, "results": results}))  # fmt: skip


def _material(
    model: str, dtype: torch.dtype, rows: int, lengths: str
) -> tuple[PreTrainedModel, list[TokenArray], tuple[int, ...]]:
    """A model, private prompts for it, and the tokens that follow each."""
    low, high = map(int, lengths.split("-"))
    sizes = np.linspace(low, high, rows).astype(int).tolist()
    generator = np.random.default_rng(0)
    if model != "smollm2":
        network = random_llama(model, dtype)
        most = network.config.vocab_size
        return network, [generator.integers(3, most, size).astype(np.int32) for size in sizes], (5, 6)
    register()
    folder = real_model()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = [tokenizer(f"Review: {each.text}\n")["input_ids"] for each in reviews("Train")]
    stream = np.array([token for number in generator.permutation(len(text)) for token in text[number]], dtype=np.int32)
    question = np.array(tokenizer(QUESTION)["input_ids"], dtype=np.int32)
    starts = np.cumsum([0, *sizes]) % max(1, len(stream) - high)
    prompts = [
        np.concatenate([stream[start : start + size - len(question)], question])
        for start, size in zip(starts, sizes, strict=False)
    ]
    return network, prompts, tuple(tokenizer(BECAUSE)["input_ids"])


def _task(prompts: list[TokenArray], words: tuple[int, ...], writing: Writing) -> TextTask:
    return TextTask(
        prompts=prompts,
        labels=lambda number: LabelSet.of([[5], [6]]),
        beginning=lambda number, logprobs: Beginning(prompts[number], words, str(number)),
        writing=writing,
        limits=Limits(sum(map(len, prompts)), sum(map(len, prompts))),
        longest=1 << 20,
    )


@contextmanager
def _walking(network: PreTrainedModel, chunk_tokens: int) -> Iterator[LayerWalk]:
    network.set_attn_implementation(ATTENTION)
    walk = LayerWalk(network, chunk_tokens=chunk_tokens)
    try:
        yield walk
    finally:
        walk.close()


def _round(
    network: PreTrainedModel,
    task: TextTask,
    chunk_tokens: int,
    clock: Callable[[], float],
    runs: dict[str, TextRun],
) -> Round:
    """One of everything. `runs` gets what each drafter and `generate` have written."""
    done, walking = Round(), partial(_walking, network, chunk_tokens)
    with walking() as walk:
        begun = clock()
        for scored in scored_packs(walk, task, keep=True):
            done.keeping = clock() - begun
            if scored.kept is None:
                raise ValueError("nothing is kept")
            kept = scored.kept.select([read for read, _ in scored.rows])
            for name in DRAFTERS:
                own, report = task.with_drafter(name).writing, DecodingReport()
                begun = clock()
                forward = KeptForward(walk, kept)
                drafter = drafter_of(forward, own, report, None)
                texts = write_texts(forward, [each for _, each in scored.rows], own, drafter=drafter, report=report)
                done.decoding[name] = clock() - begun
                runs[name] = TextRun(dict(zip(scored.beginnings, texts, strict=True)), report)
                log(f"  {name}: {done.decoding[name]:.2f} s")
    padded = GeneratedTexts("generate-padded", network, walking, 32_768)
    with walking() as walk:
        begun = clock()
        beginnings = {
            key: own for each in scored_packs(walk, task, keep=False) for key, own in each.beginnings.items()
        }
        done.scoring = clock() - begun
    begun = clock()
    runs[padded.name] = padded.write(task, beginnings)
    done.generating = clock() - begun
    log(f"  scored in {done.keeping:.1f} s (without keeping {done.scoring:.1f}), generated in {done.generating:.1f}")
    return done


def _result(dtype: str, rounds: list[Round], runs: dict[str, TextRun]) -> dict[str, Any]:
    plain = runs["off"]
    found = {}
    for name in DRAFTERS:
        report = runs[name].report
        guesses = report.drafters.values()
        found[name] = {
            "seconds": asdict(Spread.of([each.decoding[name] for each in rounds])),
            "over_plain": asdict(Spread.of([each.decoding["off"] / each.decoding[name] for each in rounds])),
            "end_to_end": asdict(Spread.of([each.end_to_end(name) for each in rounds])),
            "passes": report.row_passes / max(1, report.tokens),
            "proposed": sum(each.proposed for each in guesses),
            "accepted": sum(each.accepted for each in guesses),
        }
    same = {name: sum(text.tokens == plain.texts[row].tokens for row, text in run.texts.items())
            for name, run in runs.items()}  # fmt: skip
    parts = {name: asdict(Spread.of([getattr(each, name) for each in rounds]))
             for name in ("keeping", "scoring", "generating")}  # fmt: skip
    gap = min(text.gap for text in plain.texts.values())
    return {"dtype": dtype, "drafters": found, "same_texts": same, "smallest_gap": gap, **parts}


def _print(title: str, results: list[dict[str, Any]]) -> None:
    table = Table("dtype", "", "decoding, s", "plain / it (goal >= 1)", "passes", "right", "same texts",
                  "scoring + generate / end to end (goal >= 1.5)", title=title, title_justify="left")  # fmt: skip
    for result in results:
        for name, each in result["drafters"].items():
            right = f"{each['accepted'] / each['proposed']:.0%}" if each["proposed"] else ""
            table.add_row(
                result["dtype"],
                "plain" if name == "off" else name,
                str(Spread(**each["seconds"])),
                str(Spread(**each["over_plain"])),
                f"{each['passes']:.2f}",
                right,
                str(result["same_texts"][name]),
                str(Spread(**each["end_to_end"])),
            )
        spreads = {name: Spread(**result[name]) for name in ("keeping", "scoring", "generating")}
        words = f"scored in {spreads['keeping']} s, without keeping K,V in {spreads['scoring']} s; "
        words += f"generate took {spreads['generating']} s"
        table.add_row(result["dtype"], "generate", words, "", "", "", str(result["same_texts"]["generate-padded"]), "")
    Console(width=190).print(table)


if __name__ == "__main__":
    typer.run(main)

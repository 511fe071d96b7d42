"""`python -m benchmarks.peers`: the layer walk against a plain loop, padded batches and vLLM on the same rows.

Progress goes to stderr, the table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log, log_run
from benchmarks.models import random_llama
from benchmarks.reviews import TOPICS, question_prompts, review_prompts
from benchmarks.runners import CORES, Runner, Scores, Settings
from benchmarks.spread import Spread
from benchmarks.workloads import short_rows
from prefillcli.bench.contest import interleaved
from prefillcli.plan.trie import TokenArray
from prefillcli.profile.children import prompts_with_histories, random_prompt
from prefillcli.report.section import mebibytes
from recipes.real_model import real_model

WALK, PLAIN, PADDED, VLLM = "torch walk", "plain loop", "padded batches", "vLLM"
#: What is tried for each setting, one after the other, each time with the best so far of the others.
TRIALS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    PADDED: {"batch_tokens": (512, 2048, 8192)},
    VLLM: {
        "enforce_eager": (False, True),
        "max_num_batched_tokens": (512, 2048, 8192, 32_768),
        "block_size": (16, 32, 64, 128),
        "cores": (CORES, "0"),
        "libiomp": (True, False),
    },
}
KV_CACHE = 1 << 30  # bytes that vLLM is given: more than any of these workloads fills


@dataclass(frozen=True, slots=True)
class RaceRows:
    """Rows to score, and the settings that stand where none are tried.

    `equal`: where all rows cost the same, the number of them, evenly spaced, that contenders score which share nothing
    between rows.
    """

    text: str
    prompts: list[TokenArray]
    goals: Mapping[str, str]
    settings: Mapping[str, Settings]
    equal: int | None = None
    left_out: Mapping[str, str] | None = None

    def rows(self, name: str) -> list[int]:
        """The rows that a contender scores."""
        count = len(self.prompts)
        if self.equal is None or self.equal >= count or name not in (PLAIN, PADDED):
            return list(range(count))
        return [row * count // self.equal for row in range(self.equal)]


def _vllm(tokens: int, block: int, *, eager: bool = False) -> Settings:
    sizes = {"enforce_eager": eager, "max_num_batched_tokens": tokens, "block_size": block}
    return {**sizes, "cores": CORES, "libiomp": True}


def shared(vocabulary: int, scale: float) -> RaceRows:
    """Post recommendation, as in PrefillOnly."""
    users, posts, history, post = 2, max(2, int(40 * scale)), int(2_000 * scale), int(150 * scale)
    return RaceRows(
        f"{users} users x {posts} posts, {history:,} + {post} tokens",
        prompts_with_histories(users, posts, history, post, vocabulary),
        {VLLM: ">= 3", PLAIN: ">= 15"},
        {PADDED: {"batch_tokens": 8192}, VLLM: _vllm(32_768, 32)},
        equal=4,
    )


def one(vocabulary: int, scale: float) -> RaceRows:
    """Credit verification, as in PrefillOnly."""
    tokens = int(16_000 * scale)
    return RaceRows(
        f"one prompt of {tokens:,} tokens",
        [random_prompt(tokens, vocabulary)],
        {VLLM: ">= 1.5", PLAIN: ">= 1.5"},
        {VLLM: _vllm(2048, 32)},
        left_out={PADDED: "one row is never padded: it is the plain loop"},
    )


def many(vocabulary: int, scale: float) -> RaceRows:
    """Short texts that share nothing, as in labelling."""
    rows = max(2, int(400 * scale))
    return RaceRows(
        f"{rows} rows of 20-500 tokens",
        short_rows(rows, 20, 500, vocabulary),
        {PADDED: ">= 1.5"},
        {PADDED: {"batch_tokens": 2048}, VLLM: _vllm(8192, 32)},
    )


def real(_: int, scale: float) -> RaceRows:
    """Reviews behind two examples, for the real model and its tokenizer."""
    rows = max(2, int(400 * scale))
    return RaceRows(
        f"{rows} reviews behind two examples, SmolLM2-135M",
        review_prompts(rows),
        {VLLM: ">= 1.2"},
        {PADDED: {"batch_tokens": 2048}, VLLM: _vllm(8192, 32)},
    )


def questions(_: int, scale: float) -> RaceRows:
    """Ten questions about each of some documents, for the real model and its tokenizer."""
    documents, tokens = 3, max(100, int(2_000 * scale))
    return RaceRows(
        f"{documents} documents x {len(TOPICS)} questions, {tokens:,} tokens and a line, SmolLM2-135M",
        question_prompts(documents, tokens),
        {VLLM: ">= 2"},
        {PADDED: {"batch_tokens": 8192}, VLLM: _vllm(32_768, 32)},
        equal=3,
    )


REAL = REVIEWS, QUESTIONS = "reviews", "questions"
WORKLOADS: Mapping[str, Callable[[int, float], RaceRows]] = {
    "shared": shared, "single": one, "short": many, REVIEWS: real, QUESTIONS: questions,
}  # fmt: skip


def main(
    model: Annotated[str, typer.Option(help="Size of the random Llama: 25M or 100M.")] = "25M",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(WORKLOADS)}; repeatable. {' and '.join(REAL)} bring their own model."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    scale: Annotated[float, typer.Option(help="Shrinks prompts and rows, for a quick look.")] = 1.0,
    trial: Annotated[bool, typer.Option("--try/--no-try", help="Find the peers' best settings first.")] = False,
) -> None:
    """Race the walk against its peers: same model, rows, dtype and cores, in turn."""
    network = random_llama(model, getattr(torch, dtype))
    vocabulary: int = network.config.vocab_size
    names = [WALK, PLAIN, PADDED, VLLM]
    if find_spec("vllm") is None:
        log("vLLM is not installed here, so it is left out: `make bench-peers` brings its own")
        names.remove(VLLM)
    results = {}
    with TemporaryDirectory() as folder:
        network.save_pretrained(folder)
        del network
        for which in workload or list(WORKLOADS):
            log(f"{which}, {model}, {dtype}")
            home = real_model() if which in REAL else Path(folder)
            results[which] = race(WORKLOADS[which](vocabulary, scale), names, home, dtype, rounds, trial)
    for result in results.values():
        _print(result)
    print(json.dumps({"model": model, "dtype": dtype, "cores": os.cpu_count(), "workloads": results}))


def race(
    workload: RaceRows, names: Sequence[str], model: Path, dtype: str, rounds: int, trial: bool
) -> dict[str, Any]:
    """All contenders on one workload, as a value for JSON."""
    open_one = partial(_open, workload=workload, model=model, dtype=dtype)
    names = [name for name in names if name not in (workload.left_out or {})]
    settings = {name: dict(workload.settings.get(name, {})) for name in names}
    if trial:
        settings |= {name: _best(name, settings[name], open_one) for name in TRIALS if name in names}
    with ExitStack() as stack:
        runners = {name: stack.enter_context(closing(open_one(name, settings=settings[name]))) for name in names}
        firsts = {name: runner.run_watched() for name, runner in runners.items()}
        scores = {name: scores for name, (scores, _, _) in firsts.items()}
        seconds = interleaved(
            {name: runner.run for name, runner in runners.items()}, rounds, warm_up=False, on_run=log_run
        )
    rows = {name: workload.rows(name) for name in names}
    rates = {name: [len(rows[name]) / each for each in seconds[name]] for name in names}
    tokens = {name: sum(len(workload.prompts[row]) for row in rows[name]) / len(rows[name]) for name in names}
    contenders = {
        name: {
            "rows": len(rows[name]),
            "rows_per_second": _spread(rates[name]),
            "tokens_per_second": _spread([rate * tokens[name] for rate in rates[name]]),
            "walk_is_faster_by": _spread([w / r for w, r in zip(rates[WALK], rates[name], strict=True)]),
            "goal": workload.goals.get(name, ""),
            "seconds_to_start": runners[name].seconds_to_start,
            "ready_bytes": before,
            "peak_bytes_above_ready": peak - before,
            "largest_difference": _difference(scores[WALK][rows[name]], scores[name]),
            "settings": runners[name].about,
        }
        for name, (_, before, peak) in firsts.items()
    }
    low, high = float(scores[WALK].min()), float(scores[WALK].max())
    left_out = dict(workload.left_out or {})
    return {
        "text": workload.text,
        "lowest_score": low,
        "highest_score": high,
        "contenders": contenders,
        "left_out": left_out,
    }


def _open(name: str, *, settings: Settings, workload: RaceRows, model: Path, dtype: str) -> Runner:
    prompts = [workload.prompts[row] for row in workload.rows(name)]
    more = {"kv_cache_memory_bytes": KV_CACHE} if name == VLLM else {}
    return Runner(name, model, dtype, prompts, {**settings, **more})


def _best(name: str, start: dict[str, Any], open_one: Callable[..., Runner]) -> dict[str, Any]:
    """The fastest settings, one coordinate after the other. Every try is a new process: seconds of its second run."""
    taken: dict[str, float] = {}

    def seconds(settings: dict[str, Any]) -> float:
        key = str(settings)
        if key not in taken:
            try:
                with closing(open_one(name, settings=settings)) as runner:
                    (taken[key],) = interleaved({name: runner.run}, 1)[name]
            except RuntimeError as error:
                log(f"  {name} {settings}: {error}")
                taken[key] = float("inf")
            else:
                log(f"  {name} {settings}: {taken[key]:.2f} s")
        return taken[key]

    best = start
    for setting, values in TRIALS[name].items():
        best = min((best, *({**best, setting: value} for value in values)), key=seconds)
    log(f"  {name}, the best: {best}")
    return best


def _difference(scores: Scores, others: Scores) -> float:
    return float(np.abs(scores - others).max())


def _spread(values: list[float]) -> dict[str, float]:
    spread = Spread.of(values)
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def _show(spread: Mapping[str, float], digits: int = 2) -> str:
    return "{median:,.{d}f} ({low:,.{d}f}-{high:,.{d}f})".format(**spread, d=digits)


def _print(result: Mapping[str, Any]) -> None:
    columns = ("", "rows/s", "tokens/s", "walk / it", "goal", "start, s", "ready, MiB", "+ peak, MiB", "difference")
    scores = f"scores {result['lowest_score']:.3f}-{result['highest_score']:.3f}"
    table = Table(*columns, title=f"{result['text']}; {scores}", title_justify="left")
    for name, each in result["contenders"].items():
        table.add_row(
            name,
            _show(each["rows_per_second"]),
            _show(each["tokens_per_second"], 0),
            _show(each["walk_is_faster_by"]) if name != WALK else "",
            each["goal"],
            f"{each['seconds_to_start']:.1f}",
            mebibytes(each["ready_bytes"]),
            mebibytes(each["peak_bytes_above_ready"]),
            f"{each['largest_difference']:.1e}" if name != WALK else "",
        )
    console = Console(width=150)
    console.print(table)
    for name, each in result["contenders"].items():
        settings = ", ".join(f"{key} {value}" for key, value in each["settings"].items())
        console.print(f"  {name}: {each['rows']} rows, {settings}", highlight=False)
    for name, why in result["left_out"].items():
        console.print(f"  {name}: left out, {why}", highlight=False)


if __name__ == "__main__":
    typer.run(main)

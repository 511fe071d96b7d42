"""`python -m benchmarks.peers`: the layer walk against the programs that people would pick, on the same rows.

Each contender runs in a process and, where it needs one, in a virtual environment of its own. One whose environment is
not made is left out. Progress goes to stderr, the table and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.console import log, log_run
from benchmarks.contenders import CORES
from benchmarks.models import random_llama
from benchmarks.reviews import TOPICS, question_prompts, review_prompts, review_truths, sentiment_tokens
from benchmarks.runners import ROOT, Runner
from benchmarks.serving import Scores, Settings
from benchmarks.spread import Spread
from benchmarks.workloads import prompts_with_histories, random_prompt, short_rows
from prefillcli.models.dtype import times_as_long
from prefillcli.plan.trie import TokenArray
from prefillcli.report.section import mebibytes
from prefillcli.stats.evaluation import auc
from prefillcli.tools.bench.contest import interleaved
from prefillcli.tools.doctor import processor_instructions
from prefillcli.walk.narrow import int8_kernel
from recipes.real_model import real_model

WALK, WALK_INT8, PLAIN, PADDED, VLLM = "torch walk", "torch walk int8", "plain loop", "padded batches", "vLLM"
LLAMA_BF16, LLAMA_Q8, LLAMA_Q4 = (f"llama.cpp {kind}" for kind in ("BF16", "Q8_0", "Q4_K"))
ZENTORCH = "padded, zentorch"
OPENVINO, OPENVINO_INT8 = "OpenVINO bf16", "OpenVINO int8"
SHARES_NOTHING = (PLAIN, PADDED, ZENTORCH)
SLOW_LOOP = {PLAIN: "padded batches are faster"}
#: Of contenders that do not read this variable.
THREADS = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
KV_CACHE = 1 << 30  # bytes that vLLM is given: more than any of these workloads fills


@dataclass(frozen=True, slots=True)
class Contender:
    """Where a contender is found, and with what it is raced.

    `way` and `environment` are as in `Runner`, the folder below the root of the clone. `tries` is what is tried for
    each setting, one after the other, each time with the best so far of the others. `float32` are the settings that
    change in a race in float32; None: it races in bfloat16 only.
    """

    way: str
    environment: str | None = None
    settings: Settings = field(default_factory=dict)
    tries: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    float32: Settings | None = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        return None if self.environment is None else ROOT / self.environment


def _llama_cpp(kind: str) -> Contender:
    tries = {
        "sequences": (1, 4, 16, 64),
        "batch_tokens": (512, 2048, 4096),
        "micro_batch": (128, 256, 512, 1024, 2048),
        "unified": (True, False),
        "flash": (True, False),
    }
    sizes = {"batch_tokens": 2048, "micro_batch": 512, "sequences": 1, "unified": True, "flash": True}
    settings = {"kind": kind, "threads": THREADS, **sizes}
    float32: Settings | None = None if kind == "BF16" else {}
    return Contender("benchmarks.llama_cpp_peer:llama_cpp_peer", ".venv-llamacpp", settings, tries, float32)


def _openvino(weights: str) -> Contender:
    tries: dict[str, Sequence[Any]] = {"batch_tokens": (512, 1024, 2048, 4096, 8192), "cache": ("bf16", "u8")}
    if weights != "none":
        tries |= {"weights": ("INT8_SYM", "INT8_ASYM"), "group": (0, 32, 64, 128), "precision": ("bf16", "f32")}
    fixed = {"weights": weights, "group": 128 if weights != "none" else 0, "cache": "bf16", "precision": "bf16"}
    settings = {"batch_tokens": 4096, "threads": THREADS, **fixed}
    float32 = None if weights == "none" else {"cache": "u8", "precision": "f32"}
    return Contender("benchmarks.openvino_peer:openvino_peer", ".venv-openvino", settings, tries, float32)


CONTENDERS: Mapping[str, Contender] = {
    WALK: Contender("benchmarks.contenders:walk"),
    WALK_INT8: Contender("benchmarks.contenders:walk", settings={"narrow": "int8"}),
    PLAIN: Contender("benchmarks.contenders:plain"),
    PADDED: Contender("benchmarks.contenders:padded", tries={"batch_tokens": (512, 2048, 8192)}),
    VLLM: Contender(
        "benchmarks.contenders:vllm",
        ".venv-vllm",
        {"kv_cache_memory_bytes": KV_CACHE},
        {
            "enforce_eager": (False, True),
            "max_num_batched_tokens": (512, 2048, 8192, 32_768),
            "block_size": (16, 32, 64, 128),
            "cores": (CORES, "0"),
            "libiomp": (True, False),
        },
    ),
    LLAMA_BF16: _llama_cpp("BF16"),
    LLAMA_Q8: _llama_cpp("Q8_0"),
    LLAMA_Q4: _llama_cpp("Q4_K"),
    ZENTORCH: Contender(
        "benchmarks.contenders:padded",
        ".venv-zentorch",
        {"batch_tokens": 2048, "zentorch": True},
        {"batch_tokens": (512, 2048, 8192)},
    ),
    OPENVINO: _openvino("none"),
    OPENVINO_INT8: _openvino("INT8_ASYM"),
}


@dataclass(frozen=True, slots=True)
class RaceRows:
    """Rows to score, and the settings that stand where none are tried.

    `equal`: where all rows cost the same, the number of them, evenly spaced, that contenders score which share nothing
    between rows. `truths`: whether each row's answer is the first of the `labels`.
    """

    text: str
    prompts: list[TokenArray]
    goals: Mapping[str, str]
    settings: Mapping[str, Settings]
    equal: int | None = None
    truths: Sequence[bool] | None = None
    labels: tuple[int, int] = (5, 7)  # to random weights their meaning does not matter
    left_out: Mapping[str, str] | None = None

    def rows(self, name: str) -> list[int]:
        """The rows that a contender scores."""
        count = len(self.prompts)
        if self.equal is None or self.equal >= count or name not in SHARES_NOTHING:
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
        {VLLM: ">= 2.2", PLAIN: ">= 15"},
        {PADDED: {"batch_tokens": 8192}, VLLM: _vllm(32_768, 32)},
        equal=4,
    )


def one(vocabulary: int, scale: float) -> RaceRows:
    """Credit verification, as in PrefillOnly."""
    tokens = int(16_000 * scale)
    return RaceRows(
        f"one prompt of {tokens:,} tokens",
        [random_prompt(tokens, vocabulary)],
        {VLLM: ">= 1.6", PLAIN: ">= 1.5"},
        {VLLM: _vllm(2048, 32)},
        left_out=dict.fromkeys((PADDED, ZENTORCH), "one row is never padded: it is the plain loop"),
    )


def many(vocabulary: int, scale: float) -> RaceRows:
    """Short texts that share nothing, as in labelling."""
    rows = max(2, int(400 * scale))
    return RaceRows(
        "20-500 tokens, nothing shared",
        short_rows(rows, 20, 500, vocabulary),
        {VLLM: ">= 1.4", PADDED: ">= 1.5"},
        {PADDED: {"batch_tokens": 2048}, VLLM: _vllm(8192, 32), LLAMA_BF16: {"micro_batch": 256}},
        left_out=SLOW_LOOP,
    )


_OF_SMOLLM2 = {"group": 64}  # of which its hidden size is a multiple


def real(_: int, scale: float) -> RaceRows:
    """Reviews behind two examples, for the real model and its tokenizer."""
    rows = max(2, int(400 * scale))
    return RaceRows(
        "reviews behind two examples, SmolLM2-135M",
        review_prompts(rows),
        {VLLM: ">= 1.4"},
        {
            PADDED: {"batch_tokens": 2048},
            VLLM: _vllm(8192, 32),
            LLAMA_BF16: {"micro_batch": 256},
            OPENVINO: {"batch_tokens": 8192},
            OPENVINO_INT8: {"batch_tokens": 8192, **_OF_SMOLLM2},
        },
        left_out=SLOW_LOOP,
        truths=review_truths(rows),
        labels=sentiment_tokens(),
    )


def questions(_: int, scale: float) -> RaceRows:
    """Ten questions about each of some documents, for the real model and its tokenizer."""
    documents, tokens = 3, max(100, int(2_000 * scale))
    return RaceRows(
        f"{documents} documents x {len(TOPICS)} questions, {tokens:,} tokens and a line, SmolLM2-135M",
        question_prompts(documents, tokens),
        {VLLM: ">= 2"},
        {PADDED: {"batch_tokens": 8192}, VLLM: _vllm(32_768, 32), OPENVINO_INT8: _OF_SMOLLM2},
        equal=3,
    )


REAL = REVIEWS, QUESTIONS = "reviews", "questions"
USUAL = (REVIEWS, "short", "shared", QUESTIONS)
WORKLOADS: Mapping[str, Callable[[int, float], RaceRows]] = {
    "shared": shared, "single": one, "short": many, REVIEWS: real, QUESTIONS: questions,
}  # fmt: skip


def main(
    model: Annotated[str, typer.Option(help="Size of the random Llama: 25M or 100M.")] = "25M",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float32, or auto: float32 where products in bfloat16 are slower.")
    ] = "auto",
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(WORKLOADS)}; repeatable. {' and '.join(REAL)} bring their own model."),
    ] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help=f"{WALK} races against these; repeatable: {', '.join(CONTENDERS)}.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds after the warm-up.")] = 3,
    rows: Annotated[int, typer.Option(help="Most rows of a workload.")] = 80,
    scale: Annotated[float, typer.Option(help="Shrinks prompts and rows, for a quick look.")] = 1.0,
    cpu_time: Annotated[
        bool, typer.Option(help="Measure time on cores, on a busy machine, with one thread each.")
    ] = False,
    trial: Annotated[bool, typer.Option("--try/--no-try", help="Find the peers' best settings first.")] = False,
) -> None:
    """Race the walk against its peers: same model, rows and cores, in turn."""
    if dtype == "auto":
        dtype = "float32" if times_as_long("bfloat16", "float32", torch.device("cpu")) > 1 else "bfloat16"
    network = random_llama(model, getattr(torch, dtype))
    vocabulary: int = network.config.vocab_size
    names = [name for name in CONTENDERS if name == WALK or not contender or name in contender]
    missing = [name for name in names if (folder := CONTENDERS[name].folder) and not (folder / ".ready").exists()]
    for name in missing:
        log(f"{name} is left out: {CONTENDERS[name].environment} is not made; `make bench-peers` makes it")
    names = [name for name in names if name not in missing]
    if WALK_INT8 in names and int8_kernel() is None:
        log(f"{WALK_INT8} is left out: nothing here multiplies fast in int8")
        names.remove(WALK_INT8)
    if dtype != "bfloat16":
        names = [name for name in names if CONTENDERS[name].float32 is not None]
    results = {}
    with TemporaryDirectory() as temporary:
        made = Path(temporary, "model")
        network.save_pretrained(made)
        del network
        for which in workload or USUAL:
            log(f"{which}, {model}, {dtype}, {', '.join(processor_instructions())}")
            home = real_model() if which in REAL else made
            raced = WORKLOADS[which](vocabulary, scale)
            raced = replace(raced, prompts=raced.prompts[:rows], truths=raced.truths and raced.truths[:rows])
            results[which] = race(raced, names, home, dtype, rounds, trial, cpu_time)
    _print(results)
    machine = {"cores": os.cpu_count(), "instructions": processor_instructions()}
    print(json.dumps({"model": model, "dtype": dtype, **machine, "cpu_time": cpu_time, "workloads": results}))


def race(
    workload: RaceRows, names: Sequence[str], model: Path, dtype: str, rounds: int, trial: bool, cpu_time: bool
) -> dict[str, Any]:
    """All contenders on one workload, as a value for JSON. A peer whose process ends is left out."""
    open_one = partial(_open, workload=workload, model=model, dtype=dtype)
    left_out = dict(workload.left_out or {})
    names = [name for name in names if name not in left_out]
    settings = {name: {**CONTENDERS[name].settings, **workload.settings.get(name, {})} for name in names}
    if dtype == "float32":
        settings = {name: {**own, **(CONTENDERS[name].float32 or {})} for name, own in settings.items()}
    with closing(_open(WALK, settings={}, workload=workload, model=model, dtype="float32")) as exact:
        wanted = exact.run()
    if trial:
        settings |= {name: _best(name, settings[name], open_one, cpu_time) for name in names if CONTENDERS[name].tries}
    with ExitStack() as stack:
        runners, firsts = {}, {}
        for name in names:
            try:
                runner = stack.enter_context(closing(open_one(name, settings=settings[name])))
                firsts[name] = runner.run_watched()
                runners[name] = runner
            except RuntimeError as error:
                if name in (WALK, WALK_INT8):  # a fault of our own
                    raise
                left_out[name] = str(error)
                log(f"{name} is left out: {error}")
        names = list(runners)
        seconds = timed(runners, rounds, cpu_time, on_run=log_run)
    rows = {name: workload.rows(name) for name in names}
    rates = {name: [len(rows[name]) / each for each in seconds[name]] for name in names}
    tokens = {name: sum(len(workload.prompts[row]) for row in rows[name]) / len(rows[name]) for name in names}
    contenders = {
        name: {
            "rows": len(rows[name]),
            "rows_per_second": _spread(rates[name]),
            "tokens_per_second": _spread([rate * tokens[name] for rate in rates[name]]),
            "walk_is_faster_by": _spread([w / r for w, r in zip(rates[WALK], rates[name], strict=True)]),
            "goal": workload.goals.get(name, ">= 1" if CONTENDERS[name].environment else ""),
            "seconds_to_start": runners[name].seconds_to_start,
            "ready_bytes": before,
            "peak_bytes_above_ready": peak - before,
            **quality(scores, wanted, workload.truths, rows[name]),
            "settings": runners[name].about,
        }
        for name, (scores, before, peak) in firsts.items()
    }
    return {
        "text": f"{len(workload.prompts)} rows: {workload.text}",
        "lowest_score": float(wanted.min()),
        "highest_score": float(wanted.max()),
        "contenders": contenders,
        "left_out": left_out,
    }


def timed(runners: Mapping[str, Runner], rounds: int, cpu_time: bool, **more: Any) -> dict[str, list[float]]:
    """Seconds of each round of each contender, in turn; on cores if `cpu_time`."""
    clock = (lambda: sum(each.processor_seconds() for each in runners.values())) if cpu_time else time.perf_counter
    methods = {name: runner.run for name, runner in runners.items()}
    return interleaved(methods, rounds, warm_up=False, clock=clock, **more)


def quality(scores: Scores, wanted: Scores, truths: Sequence[bool] | None, rows: Sequence[int]) -> dict[str, Any]:
    """How far the scores of these rows are from `wanted` of all rows, which are in float32, and their AUC if known."""
    differences = np.abs(scores - wanted[rows])
    return {
        "mean_difference": float(differences.mean()),
        "largest_difference": float(differences.max()),
        "auc": None if truths is None else auc(scores, [truths[row] for row in rows]),
    }


def _open(name: str, *, settings: Settings, workload: RaceRows, model: Path, dtype: str) -> Runner:
    prompts = [workload.prompts[row] for row in workload.rows(name)]
    own = CONTENDERS[name]
    return Runner(own.way, model, dtype, prompts, settings, labels=workload.labels, environment=own.folder)


def _best(name: str, start: dict[str, Any], open_one: Callable[..., Runner], cpu_time: bool) -> dict[str, Any]:
    """The fastest settings, one coordinate after the other. Every try is a new process: seconds of its second run."""
    taken: dict[str, float] = {}

    def seconds(settings: dict[str, Any]) -> float:
        key = str(settings)
        if key not in taken:
            try:
                with closing(open_one(name, settings=settings)) as runner:
                    runner.run()
                    (taken[key],) = timed({name: runner}, 1, cpu_time)[name]
            except RuntimeError as error:
                log(f"  {name} {settings}: {error}")
                taken[key] = float("inf")
            else:
                log(f"  {name} {settings}: {taken[key]:.2f} s")
        return taken[key]

    best = start
    for setting, values in CONTENDERS[name].tries.items():
        best = min((best, *({**best, setting: value} for value in values)), key=seconds)
    log(f"  {name}, the best: {best}")
    return best


def _spread(values: list[float]) -> dict[str, float]:
    spread = Spread.of(values)
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def _show(spread: Mapping[str, float], digits: int = 2) -> str:
    return "{median:,.{d}f} ({low:,.{d}f}-{high:,.{d}f})".format(**spread, d=digits)


def _print(results: Mapping[str, Any]) -> None:
    columns = ("", "rows/s", "tokens/s", "walk / it", "goal", "mean difference", "AUC", "start, s", "MiB", "+ peak")
    table = Table(*columns)
    for which, result in results.items():
        table.add_section()
        table.add_row(f"[bold]{which}")
        for name, each in result["contenders"].items():
            table.add_row(
                name,
                _show(each["rows_per_second"]),
                _show(each["tokens_per_second"], 0),
                _show(each["walk_is_faster_by"]) if name != WALK else "",
                each["goal"],
                f"{each['mean_difference']:.1e}",
                "" if each["auc"] is None else f"{each['auc']:.3f}",
                f"{each['seconds_to_start']:.1f}",
                mebibytes(each["ready_bytes"]),
                mebibytes(each["peak_bytes_above_ready"]),
            )
    console = Console(width=160)
    console.print(table)
    for which, result in results.items():
        scores = f"scores {result['lowest_score']:.3f}-{result['highest_score']:.3f}"
        console.print(f"{which}: {result['text']}; {scores}", highlight=False)
        for name, each in result["contenders"].items():
            settings = ", ".join(f"{key} {value}" for key, value in each["settings"].items())
            console.print(f"  {name}: {each['rows']} rows, {settings}", highlight=False)
        for name, why in result["left_out"].items():
            console.print(f"  {name}: left out, {why}", highlight=False)


if __name__ == "__main__":
    typer.run(main)

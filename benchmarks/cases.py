"""The cases that are measured; each is one row of the table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.console import log_run
from benchmarks.flops import plain_flops, predicted_speedup, table5
from benchmarks.memory import peak_in_child
from benchmarks.methods import compressed_walk, compressor_for, layer_walk, plain_loop, plan_for
from benchmarks.models import random_draft, random_llama
from benchmarks.score_runs import SAMPLES, outside_share, score_file, write_short_rows
from benchmarks.spread import Spread
from benchmarks.workloads import prompts_with_histories, random_prompt
from prefillcli.models.law import choose_chunk, memory_law
from prefillcli.models.shape import prefill_flops, walk_flops
from prefillcli.reading.compress.settings import Compression
from prefillcli.report.section import mebibytes
from prefillcli.tools.bench.contest import interleaved

Row = dict[str, Any]


def _single(size: str, dtype: torch.dtype, rounds: int, scale: float) -> Row:
    model = random_llama(size, dtype)
    tokens = int(16_000 * scale)
    prompts = [random_prompt(tokens, model.config.vocab_size)]
    seconds = interleaved(
        {"plain": lambda: plain_loop(model, prompts), "walk": lambda: layer_walk(model, prompts)},
        rounds,
        on_run=log_run,
    )
    plain, walk = ([tokens / s for s in seconds[name]] for name in ("plain", "walk"))
    return {
        "case": f"one prompt of {tokens:,} tokens, tokens/s",
        "dtype": str(dtype).removeprefix("torch."),
        "plain": f"{Spread.of(plain).median:,.0f}",
        "walk": f"{Spread.of(walk).median:,.0f}",
        "ratio": str(Spread.of([w / p for w, p in zip(walk, plain, strict=True)])),
        "goal": ">= 1.2",
    }


def _posts(post: int, goal: str) -> Callable[[str, torch.dtype, int, float], Row]:
    """8 users x 40 posts of `post` tokens behind histories of 2,000.

    The plain loop does one row for each user: all rows cost it the same, and 320 would take an hour.
    """

    def measure(size: str, dtype: torch.dtype, rounds: int, scale: float) -> Row:
        model = random_llama(size, dtype)
        users, posts, history = 8, max(2, int(40 * scale)), int(2_000 * scale)
        prompts = prompts_with_histories(users, posts, history, post, model.config.vocab_size)
        some = prompts[::posts]
        seconds = interleaved(
            {"plain": lambda: plain_loop(model, some), "walk": lambda: layer_walk(model, prompts)},
            rounds,
            on_run=log_run,
        )
        plain, walk = [len(some) / s for s in seconds["plain"]], [len(prompts) / s for s in seconds["walk"]]
        plan = plan_for(model, prompts)
        saved = plain_flops(model.config, prompts) / walk_flops(model.config, plan)
        return {
            "case": f"{users} users x {posts} posts, {history:,} + {post} tokens, rows/s (computed / unique tokens "
            f"{plan.computed_tokens / plan.unique_tokens:.3f}, FLOPs saved {saved:.1f}x)",
            "dtype": str(dtype).removeprefix("torch."),
            "plain": f"{Spread.of(plain).median:.2f}",
            "walk": f"{Spread.of(walk).median:.2f}",
            "ratio": str(Spread.of([w / p for w, p in zip(walk, plain, strict=True)])),
            "goal": goal,
        }

    return measure


def _memory(size: str, dtype: torch.dtype, rounds: int, scale: float) -> Row:
    """Peak memory of one long prompt, with the chunks that follow from a budget of 1.3 times the law."""
    tokens = int(32_768 * scale)
    law = memory_law(random_llama(size, dtype).config, dtype)
    lawful = law.residual + law.key_value
    chunk = choose_chunk(law, int(1.3 * lawful * tokens), torch.device("cpu"))
    peaks = {
        "plain": peak_in_child(_one_prompt, plain_loop, size, dtype, tokens),
        "walk": peak_in_child(_one_prompt, partial(layer_walk, chunk_tokens=chunk), size, dtype, tokens),
    }
    return {
        "case": f"one prompt of {tokens:,} tokens, chunks of {chunk}, peak bytes/token (law {lawful:,})",
        "dtype": str(dtype).removeprefix("torch."),
        "plain": f"{peaks['plain'] / tokens:,.0f}",
        "walk": f"{peaks['walk'] / tokens:,.0f}",
        "ratio": f"{peaks['walk'] / tokens / lawful:.2f} of the law",
        "goal": "<= 1.3",
    }


def _one_prompt(method: Callable[..., object], size: str, dtype: torch.dtype, tokens: int) -> Callable[[], object]:
    model = random_llama(size, dtype)
    method(model, [random_prompt(64, model.config.vocab_size)])  # what is set up once is not the prompt's
    prompts = [random_prompt(tokens, model.config.vocab_size)]
    return lambda: method(model, prompts)


def _specprefill(keep: float) -> Callable[[str, torch.dtype, int, float], Row]:
    """One prompt through draft, selection and target, against the target's walk over all of it."""

    def measure(size: str, dtype: torch.dtype, rounds: int, scale: float) -> Row:
        model = random_llama(size, dtype)
        config = model.config
        draft = random_draft(config.vocab_size, dtype)
        tokens = int(16_384 * scale)
        prompts = [random_prompt(tokens, config.vocab_size)]
        compressor = compressor_for(
            draft, Compression(lookahead=1, query_reduce="mean", select_chunk=32, compress_above=0)
        )
        with closing(compressor):
            kept = compressed_walk(model, compressor, prompts, keep)[1][0]
            seconds = interleaved(
                {
                    "full": lambda: layer_walk(model, prompts),
                    "compressed": lambda: compressed_walk(model, compressor, prompts, keep),
                },
                rounds,
                on_run=log_run,
            )
        speedups = [full / part for full, part in zip(seconds["full"], seconds["compressed"], strict=True)]
        by_flops = predicted_speedup(config, draft.config, tokens, kept)
        by_table = predicted_speedup(config, draft.config, tokens, kept, flops=table5)
        share = prefill_flops(draft.config, tokens).total / prefill_flops(config, tokens).total
        return {
            "case": f"one prompt of {tokens:,} tokens, {kept / tokens:.1%} kept, draft {share:.1%} of the FLOPs: "
            f"speedup over the walk in full ({by_flops:.2f} by FLOPs, {by_table:.2f} by table 5); measured / by FLOPs",
            "dtype": str(dtype).removeprefix("torch."),
            "plain": "",
            "walk": str(Spread.of(speedups)),
            "ratio": str(Spread.of([speedup / by_flops for speedup in speedups])),
            "goal": ">= 0.95",
            "predicted": {"flops": by_flops, "table5": by_table},
        }

    return measure


def _sample_jobs(size: str, dtype: torch.dtype, rounds: int, scale: float) -> Row:
    """The time that reading, tokenising, planning and writing take beside the model, on the samples."""
    shares = {}
    with TemporaryDirectory() as folder:
        for name in ("post_recommendation.parquet", "credit_verification.jsonl", "labeling.parquet"):
            report = score_file(SAMPLES / name, Path(folder) / f"{name}.parquet", "target")
            shares[name.partition(".")[0]] = outside_share(report)
    return {
        "case": "wall time outside the model: " + ", ".join(f"{k} {v:.1%}" for k, v in shares.items()),
        "dtype": "as saved",
        "plain": "",
        "walk": f"{max(shares.values()):.1%}",
        "ratio": "",
        "goal": "<= 5%",
    }


def _big_file(size: str, dtype: torch.dtype, rounds: int, scale: float) -> Row:
    """Peak host memory of `prefill score` over many short JSON lines against few."""
    few, many = int(10_000 * scale), int(200_000 * scale)
    peaks, speed = {}, 0.0
    with TemporaryDirectory() as folder:
        for rows in (few, many):
            data = Path(folder) / f"{rows}.jsonl"
            write_short_rows(data, rows)
            report = score_file(data, Path(folder) / f"{rows}.parquet", "draft")
            peaks[rows] = report["peak_memory_bytes"]["host"]
            speed = report["rows_per_second"]
    return {
        "case": f"{many:,} short JSON lines ({speed:,.0f} rows/s): peak MiB, of {few:,} and of all",
        "dtype": "as saved",
        "plain": mebibytes(peaks[few]),
        "walk": mebibytes(peaks[many]),
        "ratio": f"{peaks[many] / peaks[few]:.2f}",
        "goal": "<= 1.2",
    }


CASES = {
    "single": _single,
    "post-recommendation": _posts(100, ">= 12"),
    "longer-posts": _posts(150, ""),
    "memory": _memory,
    "specprefill": _specprefill(0.2),
    "specprefill-0.1": _specprefill(0.1),
    "sample-jobs": _sample_jobs,
    "big-file": _big_file,
}

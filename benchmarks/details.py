"""`python -m benchmarks.details`: the numbers that docs/ quotes beside the races. Tables go to stdout."""

from __future__ import annotations

import copy
import gc
import math
import os
import resource
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import typer
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

from benchmarks.console import log, log_run
from benchmarks.contenders import CORES
from benchmarks.flops import answer_flops
from benchmarks.methods import layer_walk, plan_for, walk_plan, windowed_walk
from benchmarks.models import SHAPES, random_llama
from benchmarks.peers import KV_CACHE, REVIEWS, THREADS, WORKLOADS, Contender, timed
from benchmarks.reviews import ASKED, question_tokens, review_truths, sentiment_tokens
from benchmarks.runners import Runner
from benchmarks.score_runs import outside_share, score_file
from benchmarks.serving import Options
from benchmarks.spread import Spread
from benchmarks.workloads import prompts_with_histories, short_rows
from prefillcli.engines.encoders import EncoderEngine
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.models.shape import walk_flops
from prefillcli.plan import SCHEDULES
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray, build_forest, forest_tokens, token_order
from prefillcli.prompts.builder import EncoderBuilder
from prefillcli.prompts.labels import ClassLabels
from prefillcli.prompts.questions import Label
from prefillcli.prompts.settings import PromptSettings
from prefillcli.report.section import mebibytes
from prefillcli.rows.records import RowBatch
from prefillcli.runtime.memory import keep_blocks, resident_memory
from prefillcli.runtime.user_cache import load_compiled, share_openmp
from prefillcli.stats.evaluation import auc
from prefillcli.stats.flips import rows_for
from prefillcli.stats.labels import Measure
from prefillcli.tools.bench.contest import interleaved
from prefillcli.walk import forest, fusion
from prefillcli.walk.attention import ForestKernel, Shift, attend, attend_blockwise, attend_by_products
from prefillcli.walk.forest import ATTENTION
from prefillcli.walk.narrow import in_smaller_numbers
from prefillcli.walk.walk import FASTEST
from recipes.real_model import gguf_file, real_model, reviews

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def schedules() -> None:
    """Tokens computed over unique tokens: 20 users x 50 posts in random order, 2,000 + 150 tokens."""
    prompts = prompts_with_histories(20, 50, 2_000, 150, 8_000)
    prompts = [prompts[row] for row in np.random.default_rng(0).permutation(len(prompts))]
    table = Table("packs of", "prefix cache", *SCHEDULES)
    for tokens, held in ((65_536, 0), (65_536, 10_000), (8_192, 3_000), (1, 3_000)):
        plans = [make_plan(prompts, Limits(tokens, 10**7, held_tokens=held), name) for name in SCHEDULES]
        ratios = [f"{plan.computed_tokens / plan.unique_tokens:.2f}" for plan in plans]
        table.add_row(f"{tokens:,}", f"{held:,}", *ratios)
    Console(width=120).print(table)


@app.command()
def attention(threads: int = 1, rounds: int = 9) -> None:
    """GFLOP/s of attention in bfloat16 on the CPU: 8 heads over 4 K,V heads of 64, the flash kernel and products."""
    torch.set_num_threads(threads)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    table = Table("queries", "keys", "causal", "flash kernel", "products", "products, with a maximum")
    for queries, keys, causal in (
        (1_024, 4_096, False), (150, 2_000, False), (32, 2_000, False), (1_024, 1_024, True), (150, 150, True),
    ):  # fmt: skip
        query, key, value = (torch.randn(1, heads, n, 64) for heads, n in ((8, queries), (4, keys), (4, keys)))
        q, k, v = (x.bfloat16() for x in (query, key, value))
        moved = Shift.of(k, 0.125).moved(k)
        with torch.inference_mode():
            seconds = interleaved(
                {
                    "flash": lambda: flash(q, k, v, 0.0, causal, scale=0.125),  # noqa: B023 - called at once
                    "products": lambda: attend_by_products(q, moved, v, causal=causal, safe=True),  # noqa: B023
                    "bounded": lambda: attend_by_products(q, moved, v, causal=causal),  # noqa: B023
                },
                rounds,
            )
        work = 4 * 64 * 8 * queries * keys / (2 if causal else 1) / 1e9
        rates = [f"{work / float(np.median(seconds[name])):.0f}" for name in ("flash", "products", "bounded")]
        table.add_row(f"{queries:,}", f"{keys:,}", str(causal), *rates)
    Console(width=120).print(table)


#: What the compiled kernel's forms need.
FORMS = {"AVX2": ["-mavx2", "-mfma"]}
FORMS["AVX-512"] = [*FORMS["AVX2"], "-mavx512f"]
FORMS["AVX512-BF16"] = [*FORMS["AVX-512"], "-mavx512bf16"]
FORMS["AMX"] = [*FORMS["AVX512-BF16"], "-mamx-tile", "-mamx-bf16"]


@app.command()
def forms(form: Annotated[str, typer.Argument(help=" or ".join(FORMS))], rounds: int = 9) -> None:
    """GFLOP/s of one thread: a form of the compiled kernel, and torch's own attention, which is told by its
    environment to use no more: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2, or
    avx512, AVX512_CORE_VNNI and AVX512. 8 heads over 4 K,V heads of 64."""
    torch.set_num_threads(1)
    if form == "AMX" and not torch.cpu._init_amx():  # Linux gives tiles to those that ask
        raise typer.BadParameter("the processor has no AMX, or Linux does not give it")
    library = load_compiled("prefillcli.walk", "forest_attention.cpp", [*FORMS[form], "-ffp-contract=off"])
    if library is None or not share_openmp("torch"):
        raise typer.BadParameter("no C++ compiler, or no OpenMP of GNU in torch")
    kernel = ForestKernel(library)
    table = Table("dtype", "queries", "keys", "causal", "torch", f"kernel, {kernel.form}", "kernel / torch")
    for dtype in (torch.bfloat16, torch.float32):
        for queries, keys, causal in (
            (1_024, 4_096, False), (150, 2_000, False), (32, 2_000, False), (1_024, 1_024, True), (150, 150, True),
        ):  # fmt: skip
            q, k, v = (torch.randn(1, heads, n, 64).to(dtype) for heads, n in ((8, queries), (4, keys), (4, keys)))
            depth = 0 if causal else keys
            blocks = [[at, min(32, queries - at), depth + at, 0, 1, 0] for at in range(0, queries, 32)]
            tables = np.array(blocks, np.int64), np.array([[0, keys, 0]], np.int64)
            ways: dict[str, Callable[[], object]] = {
                "torch": partial(attend, q, k, v, scale=0.125, causal=causal),
                "kernel": partial(kernel.attend, q, k, v, *tables, scale=0.125, window=None),
            }
            with torch.inference_mode():
                seconds = interleaved(ways, rounds, clock=time.process_time)
            taken = {name: float(np.median(each)) for name, each in seconds.items()}
            work = 4 * 64 * 8 * queries * keys / (2 if causal else 1) / 1e9
            rates = [f"{work / each:.0f}" for each in taken.values()]
            gain = f"{taken['torch'] / taken['kernel']:.2f}"
            table.add_row(str(dtype)[6:], f"{queries:,}", f"{keys:,}", str(causal), *rates, gain)
    Console(width=120).print(table)


@app.command()
def latent(rounds: int = 9) -> None:
    """Milliseconds of attention on the CPU with keys of 192 and values of 128 numbers, as behind latents (MLA)."""
    scale, table = 192**-0.5, Table("dtype", "batch", "heads", "queries", "keys", "causal", "ms", "of explicit scores")
    for dtype in (torch.float32, torch.bfloat16):
        for batch, kv_heads, queries, keys, causal in (
            (1, 16, 512, 512, True), (8, 16, 200, 200, True), (64, 16, 32, 32, True),
            (1, 16, 256, 4_096, False), (1, 4, 256, 4_096, False), (1, 16, 16, 4_096, False),
        ):  # fmt: skip
            q = torch.randn(batch, 16, queries, 192, dtype=dtype)
            k, v = (torch.randn(batch, kv_heads, keys, width, dtype=dtype) for width in (192, 128))
            shift = Shift.of(k, scale)
            ways: dict[str, Callable[[], object]] = {
                "explicit scores": partial(attend_blockwise, q, k, v, scale=scale, causal=causal),
                "flash kernel, values widened": partial(_widened_flash, q, k, v, scale, causal),
                "products": partial(_moved_products, shift, q, k, v, causal),
            }
            with torch.inference_mode():
                taken = {name: float(np.median(each)) for name, each in interleaved(ways, rounds).items()}
            names = [*(f"{name} {1e3 * seconds:.0f}" for name, seconds in taken.items())]
            shares = [f"{seconds / taken['explicit scores']:.2f}" for seconds in taken.values()]
            sizes = (batch, f"16/{kv_heads}", queries, keys, causal)
            table.add_row(str(dtype)[6:], *map(str, sizes), "\n".join(names), "\n".join(shares))
    Console(width=140).print(table)


def _widened_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> torch.Tensor:
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - value.shape[-1]))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: torch.Tensor = flash(query, key, value, 0.0, causal, scale=scale)[0]
    return out


def _moved_products(
    shift: Shift, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> torch.Tensor:
    return attend_by_products(query, shift.moved(key), value, causal=causal, safe=True)[0]


@app.command()
def products(rounds: int = 40) -> None:
    """Products in bfloat16: GFLOP/s by number of rows, and what the layout of the keys costs attention's first one."""
    weights = torch.randn(1_408, 512).bfloat16().t()
    states = {rows: torch.randn(rows, 512).bfloat16() for rows in (2_048, 2_047, 2_008, 2_002, 2_001)}
    query, key = torch.randn(4, 512, 64).bfloat16(), torch.randn(4, 4_096, 64).bfloat16()[:, 1_024:2_048]
    dense = key.contiguous()
    with torch.inference_mode():
        linear = interleaved(
            {str(rows): partial(torch.mm, each, weights) for rows, each in states.items()},
            rounds,
        )
        scores = interleaved(
            {
                "slice": lambda: torch.bmm(query, key.transpose(1, 2)),
                "slice made contiguous": lambda: torch.bmm(query, key.contiguous().transpose(1, 2)),
                "contiguous": lambda: torch.bmm(query, dense.transpose(1, 2)),
            },
            rounds,
        )
    table = Table("rows, by 512 by 1,408", "GFLOP/s")
    for rows, seconds in linear.items():
        table.add_row(f"{int(rows):,}", f"{2 * int(rows) * 512 * 1_408 / float(np.median(seconds)) / 1e9:,.0f}")
    Console(width=120).print(table)
    table = Table("keys: 1,024 of 4,096, for 4 x 512 queries of 64", "us")
    for name, seconds in scores.items():
        table.add_row(name, f"{float(np.median(seconds)) * 1e6:,.0f}")
    Console(width=120).print(table)


@app.command()
def shapes(times: int = 8, rows: int = 60) -> None:
    """Memory in use, and time, while the walk of 25M in bfloat16 scores ever new rows of 20 to 500 tokens."""
    network = random_llama("25M", torch.bfloat16)
    table = Table("rows so far", "MiB in use", "processor s")
    table.add_row("0", mebibytes(resident_memory()), "")
    for seed in range(1, times + 1):
        prompts = short_rows(rows, 20, 500, network.config.vocab_size, seed)
        begun = time.process_time()
        layer_walk(network, prompts)
        table.add_row(f"{seed * rows:,}", mebibytes(resident_memory()), f"{time.process_time() - begun:.2f}")
    Console(width=120).print(table)


@app.command()
def packs(rounds: int = 5, model: str = "25M", dtype: str = "bfloat16") -> None:
    """What smaller packs cost: time of the walk, as a multiple of that with packs of 65,536 tokens."""
    network = random_llama(model, getattr(torch, dtype))
    vocabulary: int = network.config.vocab_size
    table = Table("prompts", "packs of", "time", "tokens computed")
    for name, prompts in (
        ("400 of 20 to 500 tokens", short_rows(400, 20, 500, vocabulary)),
        ("20 users x 20 posts of 100 behind 2,000", prompts_with_histories(20, 20, 2_000, 100, vocabulary)),
    ):
        plans = {
            tokens: make_plan(prompts, Limits(tokens, 1 << 30, held_tokens=1 << 30))
            for tokens in (65_536, 32_768, 16_384, 8_192)
        }
        seconds = interleaved(
            {str(tokens): partial(walk_plan, network, plan) for tokens, plan in plans.items()}, rounds
        )
        for tokens, plan in plans.items():
            ratios = [own / base for own, base in zip(seconds[str(tokens)], seconds["65536"], strict=True)]
            table.add_row(name, f"{tokens:,}", str(Spread.of(ratios)), f"{plan.computed_tokens:,}")
    Console(width=120).print(table)


@app.command()
def operators(
    workload: Annotated[str, typer.Argument(help="shared, single, short or reviews, as in the race.")] = "shared",
) -> None:
    """Where the walk's time goes in bfloat16, by operator of torch. What is no operator of torch is not there."""
    network, prompts = race_material(workload)
    layer_walk(network, prompts)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watched:
        layer_walk(network, prompts)
    print(watched.key_averages().table(sort_by="self_cpu_time_total", row_limit=20))
    plan = plan_for(network, prompts)
    print(f"{(walk_flops(network.config, plan) + answer_flops(network.config, plan)) / 1e12:.2f} TFLOP")


@app.command()
def compiled(
    workload: Annotated[list[str] | None, typer.Argument(help="shared, single, short or reviews.")] = None,
    rounds: int = 3,
    scale: Annotated[float, typer.Option(help="Shrinks prompts and rows.")] = 1.0,
    threads: int = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
) -> None:
    """What the compiled kernel, fused products and compiled passes bring, in processor seconds, and how near the walk
    comes to the speed of a plain product. `reviews` is the real model, the others are 25M."""
    torch.set_num_threads(threads)
    ways = {
        "none": (False, False, False), "fused products": (True, False, False), "kernel": (False, False, True),
        "both": (True, False, True), "and passes": (True, True, True),
    }  # fmt: skip
    chosen = getattr(torch, dtype)
    rows, weights = torch.randn(2_048, 1_024, dtype=chosen), torch.randn(1_024, 1_024, dtype=chosen)
    for name in workload or ["shared", "single", "short", "reviews"]:
        network, prompts = race_material(name, scale)
        network = network.to(chosen)
        scores: dict[str, torch.Tensor] = {}

        def walk(way: str) -> None:
            with switched(*ways[way]):
                scores[way] = torch.softmax(layer_walk(network, prompts)[:, [5, 7]], -1)[:, 0]  # noqa: B023 - at once

        seconds: dict[str, list[float]] = {each: [] for each in [*ways, "product"]}
        for turn in range(rounds + 1):
            for each, own in seconds.items():
                begun = time.process_time()
                if each != "product":
                    walk(each)
                else:
                    for _ in range(20):
                        torch.mm(rows, weights)
                if turn:
                    own.append(time.process_time() - begun)
        plan = plan_for(network, prompts)
        work = walk_flops(network.config, plan) + answer_flops(network.config, plan)
        best, peak = (float(np.median(seconds[each])) for each in ("and passes", "product"))
        rate, product = work / best, 20 * 2 * 2_048 * 1_024 * 1_024 / peak
        gains = Spread.of([a / b for a, b in zip(seconds["none"], seconds["and passes"], strict=True)])
        table = Table("workload", *ways, "none / all", "TFLOP", "GFLOP/s", "of a product", "share", "difference")
        table.add_row(
            name, *(f"{np.median(seconds[way]):.2f}" for way in ways), str(gains), f"{work / 1e12:.2f}",
            f"{rate / 1e9:.0f}", f"{product / 1e9:.0f}", f"{rate / product:.2f}",
            f"{float((scores['and passes'] - scores['none']).abs().max()):.1e}",
        )  # fmt: skip
        Console(width=150).print(table)


@app.command(name="narrow")
def in_int8(
    workload: Annotated[list[str] | None, typer.Argument(help="shared, single, short or reviews.")] = None,
    rounds: int = 3,
    scale: Annotated[float, typer.Option(help="Shrinks prompts and rows.")] = 1.0,
    skip: Annotated[int, typer.Option(help="First rows to leave out.")] = 0,
    rows: Annotated[int | None, typer.Option(help="So many of the others.")] = None,
    numbers: Annotated[list[str] | None, typer.Option(help="bfloat16 and int8; float32.")] = None,
    threads: int = 1,
) -> None:
    """What products of int8 gain over bfloat16, or other `numbers` over the first ones, in processor seconds of the
    whole walk (after float32, int8 has the rest in float32), and what they do to P: its mean and largest difference
    from the walk in float32, how much of it is a shift, flips, and the AUC of `reviews`."""
    named = numbers or ["bfloat16", "int8"]
    torch.set_num_threads(threads)
    for name in workload or ["short", REVIEWS]:
        network, prompts = race_material(name, scale)
        tokens, truth = [5, 7], None
        if name == REVIEWS:
            tokens, truth = list(sentiment_tokens()), review_truths(len(prompts))[skip:][:rows]
        prompts = prompts[skip:][:rows]
        plan, exact = plan_for(network, prompts), copy.deepcopy(network).float()
        network.set_attn_implementation(ATTENTION)
        exact.set_attn_implementation(ATTENTION)
        ways = {"float32": (exact, FASTEST), "bfloat16": (network, FASTEST)}
        if "int8" in named:
            narrow = copy.deepcopy(exact if named[0] == "float32" else network)
            ways["int8"] = (narrow, in_smaller_numbers(narrow, "int8"))
        ways = {each: ways[each] for each in named}
        scores: dict[str, torch.Tensor] = {}
        seconds: dict[str, list[float]] = {each: [] for each in ways}
        for turn in range(rounds + 1):
            for each, (model, how) in ways.items():
                begun = time.process_time()
                scores[each] = walk_plan(model, plan, arithmetic=how)[:, tokens].softmax(-1)[:, 0]
                if turn:
                    seconds[each].append(time.process_time() - begun)
        correct = walk_plan(exact, plan)[:, tokens].softmax(-1)[:, 0]
        table = Table("workload", "numbers", "seconds", "gain", "difference of P", "shift", "largest", "flips", "AUC")
        for each, found in (scores | {"float32": correct}).items():
            off, own = (found - correct).abs(), seconds.get(each, [])
            area = None if truth is None else auc(found.double().numpy(), truth)  # None for rows of one answer
            gain = Spread.of([a / b for a, b in zip(seconds[named[0]], own, strict=True)]) if own else ""
            table.add_row(
                name, each, f"{np.median(own):.2f}" if own else "", "" if each == named[0] else str(gain),
                f"{off.mean():.4f}",
                f"{(found - correct).mean():.4f}", f"{off.max():.3f}",
                f"{((found > 0.5) != (correct > 0.5)).sum()} of {len(off)}",
                "" if area is None else f"{area:.3f}",
            )  # fmt: skip
        Console(width=150).print(table)


@contextmanager
def switched(fused: bool, passes: bool, kernel: bool) -> Iterator[None]:
    """Turn off what is not wanted, for a comparison."""
    with ExitStack() as stack:
        if not fused:
            stack.enter_context(patch.object(fusion, "copy_pays", lambda *_: False))
        if not passes:
            stack.enter_context(patch.object(fusion, "compiled_passes", lambda: None))
        if not kernel:
            stack.enter_context(patch.object(forest, "takes", lambda *_: False))
        yield


def race_material(workload: str, scale: float = 1.0) -> tuple[PreTrainedModel, list[TokenArray]]:
    """The model and the prompts of a race of `benchmarks.peers`, in bfloat16."""
    gc.freeze()  # as the program does behind its imports
    keep_blocks()
    if workload == REVIEWS:
        files = read_model_files(real_model(), dtype="bfloat16")
        return load_model(files, torch.device("cpu")), WORKLOADS[workload](0, scale).prompts
    network = random_llama("25M", torch.bfloat16)
    return network, WORKLOADS[workload](network.config.vocab_size, scale).prompts


@app.command()
def windows(
    document: int = 4_000,
    questions: int = 400,
    question: int = 40,
    rows: Annotated[int, typer.Option(help="In a window.")] = 50,
    rounds: int = 3,
    dtype: str = "bfloat16",
) -> None:
    """One document with many questions, in windows that share its prefix or do not: 25M, rows/s and tokens."""
    network = random_llama("25M", getattr(torch, dtype))
    prompts = prompts_with_histories(1, questions, document, question, network.config.vocab_size)
    cut = [prompts[at : at + rows] for at in range(0, questions, rows)]
    ways: dict[str, tuple[list[list[TokenArray]], int]] = {
        "one window": ([prompts], 0),
        "one window, blocks": ([prompts], BLOCK_TOKENS),
        f"windows of {rows}": (cut, 0),
        f"windows of {rows}, blocks": (cut, BLOCK_TOKENS),
    }
    computed: dict[str, int] = {}

    def walk(name: str) -> None:
        computed[name] = windowed_walk(network, *ways[name])

    seconds = interleaved({name: partial(walk, name) for name in ways}, rounds)
    table = Table("way", "rows/s", "tokens computed", "over the file's unique ones")
    unique = plan_for(network, prompts).unique_tokens
    for name, each in seconds.items():
        rates = Spread.of([questions / s for s in each])
        table.add_row(name, str(rates), f"{computed[name]:,}", f"{computed[name] / unique:.3f}")
    Console(width=120).print(table)


@app.command()
def encoders(rows: int = 100, rounds: int = 2, characters: int = 10_000) -> None:
    """The first characters of real reviews, tokenised and read by a random BERT of base size in float32: rows for each
    second of one core."""
    torch.set_num_threads(1)
    texts = [each.text[:characters] for each in reviews("Test")[:rows]]
    backend = Tokenizer(models.WordPiece(**{"unk_token": "[UNK]"}))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    trainer = trainers.WordPieceTrainer(vocab_size=30_000, special_tokens=[*special.values()], show_progress=False)
    backend.train_from_iterator((each.text for each in reviews("Train")), trainer)
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    config = BertConfig(num_labels=1)
    model = BertForSequenceClassification(config).eval()
    settings = PromptSettings(max_length=512, on_long="truncate-right", vocab_size=config.vocab_size, encoder=True)
    labels = ClassLabels([Label("grade")], ((0,),), Measure.VALUES)
    engine = EncoderEngine(model, "none")

    def scored(tokens: int) -> None:
        batch = RowBatch(0, np.arange(len(texts)), {"prompt": texts}, pa.table({}), {}, 0)
        prompts, _ = EncoderBuilder(tokenizer, settings, ["prompt"]).build(batch, labels)
        engine.batch_tokens = tokens
        for pack in make_plan([each.tokens for each in prompts], engine.limits).packs:
            list(engine.answer(pack, lambda prompt: prompts[prompt].labels, lambda tokens: None))

    def piped(size: int) -> None:
        classify = pipeline("text-classification", model=model, tokenizer=tokenizer, function_to_apply="none")
        classify(texts, batch_size=size, truncation=True, max_length=512)

    contenders = {f"batches of {tokens:,} tokens": partial(scored, tokens) for tokens in (256, 512, 2_048)}
    contenders |= {"one by one": partial(scored, 1)}
    contenders |= {f"pipeline, batch_size={size}": partial(piped, size) for size in (1, 8, 32)}
    table = Table("reviews", "rows/s of a core")
    for name, seconds in interleaved(contenders, rounds, warm_up=False, clock=time.process_time).items():
        table.add_row(name, str(Spread.of([len(texts) / each for each in seconds])))
    Console(width=120).print(table)


@app.command()
def start(rounds: int = 5) -> None:
    """From the start of `prefill score` until the real model is ready to score two reviews: seconds on the clock, and
    processor time."""
    with TemporaryDirectory() as folder:
        data = _short_reviews(Path(folder), 2)
        found = [_ready(data, Path(folder, f"{number}.parquet")) for number in range(rounds + 1)][1:]  # warmed up
    table = Table("", "seconds")
    for name, seconds in zip(("on the clock", "of a processor"), zip(*found, strict=True), strict=True):
        table.add_row(name, str(Spread.of(list(seconds))))
    Console().print(table)


def _ready(data: Path, output: Path) -> tuple[float, float]:
    # The command, which ends once its model is ready.
    code = """
import os, time
from prefillcli import cli
def ready(self, *given):
    load(self, *given)
    os.write(1, f"{time.time()} {time.process_time()}".encode())
    os._exit(0)
begun = cli.load_options
def begin(*given):
    global load
    found = begun(*given)
    from prefillcli.scoring.score import ScoreJob
    load, ScoreJob._load_models = ScoreJob._load_models, ready
    return found
cli.load_options = begin
cli.main()
"""
    command = [sys.executable, "-c", code, "score", str(data), "-o", str(output), "-m", str(real_model()), "--no-chat"]
    before = time.time()
    done = subprocess.run([*command, "--quiet"], check=True, capture_output=True, text=True)  # noqa: S603 - our own
    clock, processor = map(float, done.stdout.split())
    return clock - before, processor


PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained(sys.argv[1]) for kind in (AutoModelForCausalLM, AutoTokenizer))
for text in ("Is it a refund? Answer:", "Was it a refund? Answer:"):
    print(model(**tokenizer(text, return_tensors="pt")).logits[0, -1].softmax(-1).max())
"""


@app.command()
def small(rounds: int = 5) -> None:
    """Whole commands that do little, and a plain transformers script with the same model: processor seconds of the
    process and its children, with the bytecode that Python keeps, and without any."""
    model = str(Path("samples/models/tickets").resolve())
    with TemporaryDirectory() as folder:
        tickets, out = str(Path("samples/tickets.csv").resolve()), str(Path(folder, "o.parquet"))
        data = ["-m", "prefillcli", "score", tickets, "-m", model, "--ask", "Refund?", "-o", out, "--overwrite"]
        lines = {  # with the exit code of each
            "prefill --help": (["-m", "prefillcli", "--help"], 0),
            "prefill score --help": (["-m", "prefillcli", "score", "--help"], 0),
            "an option that is wrong": ([*data, "--labels", "Yes,No"], 2),
            "a column that is not there": ([*data, "--prompt-column", "body"], 2),
            "two rows": ([*data, "--limit", "2"], 0),
            "two rows in a plain script": (["-c", PLAIN, model], 0),
        }
        table = Table("", "bytecode kept", "no bytecode")
        for name, (line, code) in lines.items():
            kept = {"PYTHONPYCACHEPREFIX": str(Path(folder, "kept")), "PYTHONDONTWRITEBYTECODE": ""}
            compiled = {"PYTHONPYCACHEPREFIX": str(Path(folder, "none")), "PYTHONDONTWRITEBYTECODE": "1"}
            seconds = partial(_processor_seconds, line, folder, code)
            seconds(kept)  # Python compiles what it keeps
            found = [[seconds(each) for each in (kept, compiled)] for _ in range(rounds)]
            table.add_row(name, *(str(Spread.of(list(each))) for each in zip(*found, strict=True)))
    Console().print(table)


def _processor_seconds(line: Sequence[str], folder: str, code: int, environment: Mapping[str, str]) -> float:
    """The processor seconds of a command. Raises RuntimeError if it does not end with this exit code."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command, env = [sys.executable, *line], os.environ | environment
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode != code:
        raise RuntimeError(f"{' '.join(line)} ended with {done.returncode} instead of {code}\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@app.command()
def outside(rows: int = 5_000, sample: bool = False) -> None:
    """The part of a run's wall time that is spent neither in the real model (or the sample of a million parameters)
    nor on loading it, for short pieces of reviews of 12 to 82 tokens."""
    with TemporaryDirectory() as folder:
        data = _short_reviews(Path(folder), rows)
        model = "target" if sample else real_model().resolve()
        report = score_file(data, Path(folder, "scores.parquet"), model, "--no-chat")
    seconds = {name: round(spent, 2) for name, spent in report["seconds"].items() if spent}
    Console(width=120).print(f"{rows:,} rows: {outside_share(report):.1%} outside the model; seconds {seconds}")


def _short_reviews(folder: Path, rows: int) -> Path:
    # A Parquet file of seeded pieces of reviews, of 12 to 37 words.
    words = " ".join(each.text for each in reviews("Train")).split()
    chance = np.random.default_rng(0)
    sizes = chance.integers(12, 38, rows)
    places = chance.integers(0, len(words) - 38, rows)
    texts = [" ".join(words[at : at + size]) for at, size in zip(places, sizes, strict=True)]
    pq.write_table(pa.table({"prompt": texts}), folder / "short.parquet")
    return folder / "short.parquet"


@app.command()
def save_model(
    size: Annotated[str, typer.Argument(help=", ".join(SHAPES))],
    folder: Path,
    dtype: str = "float32",
) -> None:
    """Write a random Llama into a folder, for `prefill profile --model FOLDER`."""
    random_llama(size, getattr(torch, dtype)).save_pretrained(folder)


@app.command()
def questions(
    documents: int = 4,
    characters: int = 8_500,
    rounds: int = 3,
    model: Annotated[Path | None, typer.Option(help="A GGUF file. SmolLM2-135M-Instruct if not given.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the program and of vLLM. llama.cpp computes with the file's.")
    ] = "float32",
    contender: Annotated[list[str] | None, typer.Option(help="Only ten questions and these; repeatable.")] = None,
    cpu_time: Annotated[bool, typer.Option(help="Measure time on cores, on a busy machine.")] = False,
) -> None:
    """Seconds for ten typed questions about real texts of some 2,000 tokens, for one of them, and of llama.cpp and
    vLLM for the same ten, in turn. The peers get the tokens of all prompts and options, and compute a text once."""
    gguf = model or gguf_file()
    text = "\n\n".join(each.text for each in reviews("Train"))
    texts = [text[at * characters : (at + 1) * characters] for at in range(documents)]
    asked = [each.to_json() for each in ASKED]
    prompts, options = question_tokens(gguf, asked, texts)
    with ExitStack() as stack:
        runners = {}
        for name, each in _question_contenders(asked, texts, options).items():
            if contender and name not in (*contender, TEN):
                continue
            if each.folder is not None and not (each.folder / ".ready").exists():
                log(f"{name} is left out: {each.environment} is not made; `make bench-peers` makes it")
                continue
            runner = Runner(each.way, gguf, dtype, prompts, each.settings, labels=(0, 0), environment=each.folder)
            runners[name] = stack.enter_context(closing(runner))
        shares = {name: runner.run() for name, runner in runners.items()}
        seconds = timed(runners, rounds, cpu_time, on_run=log_run)
    table = Table("", "seconds", "texts/s", "times as long as ten questions", "largest difference of P")
    for name, own in seconds.items():
        rates = Spread.of([documents / each for each in own])
        ratios = Spread.of([a / b for a, b in zip(own, seconds[TEN], strict=True)])
        same = len(shares[name]) == len(shares[TEN])
        off = f"{np.abs(shares[name] - shares[TEN]).max():.1e}" if same and name != TEN else ""
        table.add_row(name, str(Spread.of(own)), str(rates), str(ratios), off)
    Console(width=120).print(table)
    ten, one = (forest_tokens(build_forest(each, token_order(each))) for each in (prompts, prompts[:: len(asked)]))
    Console(width=120).print(f"{documents} texts; tokens of ten questions {ten:,}, of one {one:,}")


TEN = "ten questions"


def _question_contenders(
    asked: Sequence[Mapping[str, Any]], texts: Sequence[str], options: Sequence[Options]
) -> dict[str, Contender]:
    ours = partial(Contender, "benchmarks.contenders:questions", None)
    llama_cpp = partial(Contender, "benchmarks.llama_cpp_peer:llama_cpp_questions", ".venv-llamacpp")
    sizes: dict[str, Any] = {"batch_tokens": 2_048, "micro_batch": 512, "sequences": 64, "threads": THREADS}
    sizes |= {"unified": True, "flash": True, "options": options}
    vllm: dict[str, Any] = {"enforce_eager": True, "max_num_batched_tokens": 8_192, "block_size": 32}
    vllm |= {"kv_cache_memory_bytes": KV_CACHE, "cores": CORES, "libiomp": True, "options": options}
    return {
        "one question": ours({"asked": asked[:1], "texts": texts}),
        TEN: ours({"asked": asked, "texts": texts}),
        "llama.cpp": llama_cpp({**sizes, "at_once": len(asked)}),
        "llama.cpp, one by one": llama_cpp({**sizes, "at_once": 1}),
        "vLLM": Contender("benchmarks.contenders:vllm_questions", ".venv-vllm", vllm),
    }


@app.command()
def bounds(orders: int = 15) -> None:
    """Judged rows that prove a flip rate in spite of some flips, by three bounds at 95 %.

    Betting (Waudby-Smith and Ramdas, arXiv 2010.09686, section 5) without replacement: the capital of a mixture of
    fixed shares, at the median of some `orders` of the flips.
    """
    table = Table("rate", "flips", "Clopper-Pearson", *(f"{kind}, of {of:,}" for of in FILES for kind in KINDS))
    for rate in (0.01, 0.02, 0.05):
        for flips in (0, 1, 2, 5):
            cells = [f"{rows_for(rate, flips):,}"]
            for of in FILES:
                cells += [f"{rows_for(rate, flips, of=of):,}", f"{_rows_to_win(rate, flips, of, orders):,}"]
            table.add_row(f"{rate:.0%}", f"{flips}", *cells)
    Console(width=150).print(table)


FILES = (2_000, 10_000, 1_000_000)
KINDS = ("hypergeometric", "betting")


def _rows_to_win(rate: float, flips: int, of: int, orders: int) -> int:
    def wins(rows: int) -> bool:
        found = sorted(_log_capital(rate, flips, of, rows, seed) for seed in range(orders))
        return found[orders // 2] >= math.log(20)

    most = rows_for(rate, flips)
    return bisect_left(range(min(4 * most, of)), True, lo=flips, key=wins)


def _log_capital(rate: float, flips: int, of: int, rows: int, seed: int) -> float:
    flipped = np.zeros(rows)
    flipped[np.random.default_rng(seed).permutation(rows)[:flips]] = 1
    before = np.cumsum(flipped) - flipped
    mean = (rate * of - before) / (of - np.arange(rows))  # of the rows that are left, if the rate is that of all
    shares = np.linspace(0.05, 0.999, 20)[:, None]
    logs = np.log1p(shares * (mean - flipped) / (1 - mean)).sum(axis=1)
    return float(np.logaddexp.reduce(logs) - np.log(len(logs)))


if __name__ == "__main__":
    app()

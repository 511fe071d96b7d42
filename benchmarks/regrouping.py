"""What leaving between two layers takes and saves: `python -m benchmarks.regrouping [--model FOLDER]`.

The costs of laying out the rest anew and of K,V alone, in layers; then whole walks in which half of the rows leave in
the middle, in processor time, beside the formula. Progress goes to stderr, tables and one line of JSON to stdout.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.console import log
from benchmarks.models import random_llama
from benchmarks.workloads import prompts_with_histories
from prefillcli.models.find import read_model_files
from prefillcli.models.load import load_model
from prefillcli.plan.pack import Limits, Pack, in_full
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.fusion import fused
from prefillcli.prefill.walk import LayerWalk, remainder

#: Prefixes, rows behind each, tokens of a prefix, tokens of a row.
PACKS = {"reviews": (1, 64, 300, 120), "long prefix": (1, 20, 2000, 150), "short rows": (1, 256, 40, 24)}


def layers_needed(pack: Pack, through: Sequence[int | None], layers: int) -> npt.NDArray[np.float64]:
    """Layers of a token that each node takes, float64 [nodes].

    Read k leaves when `through[k]` layers are behind it, or never (None). A model has `layers`. Nodes that later packs
    hold go through all of them.
    """
    whole = in_full(layers)
    needed = np.zeros(len(pack.parents))
    ends = [(node, whole if count is None else count) for (node, _), count in zip(pack.reads, through, strict=True)]
    for node, most in [*ends, *((node, whole) for node in pack.kept_nodes)]:
        step = node
        while step >= 0 and needed[step] < most:
            needed[step] = most
            step = pack.parents[step]
    return needed


def remaining_work(pack: Pack, through: Sequence[int | None], layers: int) -> float:
    """The part of a pack's work that exits leave, between 0 and 1. Arguments as in `layers_needed`."""
    needed = layers_needed(pack, through, layers) * np.diff(pack.offsets)
    return float(needed.sum() / (in_full(layers) * len(pack.tokens)))


LEAVING_ROUNDS = 3


@torch.inference_mode()
def measure_leaving(
    walk: LayerWalk, pack: Pack, clock: Callable[[], float], rounds: int = LEAVING_ROUNDS
) -> tuple[float, float] | None:
    """Time a layer in the middle of the model over `pack`, which holds nothing. Returns the cost of laying out a token
    anew between two layers, and of computing only its K,V, both in layers of a token.

    For each step the fastest round counts: other programs can only make it slower. A model of one layer has no middle:
    None. `clock` gives seconds; it waits for a device that computes asynchronously.
    """
    index = len(walk.layers) // 2
    if index == len(walk.layers) - 1:
        return None
    state = walk.begin(pack)
    whole = remainder(pack, range(len(pack.reads)), [])
    before = state.hidden.clone()
    most = max(chunk.end - chunk.start for chunk in state.chunks)
    with ForestAttention(len(pack.tokens)) as attention, walk.layers.use(index) as layer, fused(layer, most):

        def layer_alone() -> None:
            walk.start_layer(state, index, layer, attention)
            walk.through_layer(state, index, layer, attention, lambda tokens: None)

        def keys_alone() -> None:
            walk.start_layer(state, index, layer, attention)
            walk.store_keys(state, index, layer, attention, lambda tokens: None)

        def regrouped() -> None:  # the layer's call determines which keys a query sees
            walk.regroup(state, whole, attention)
            layer_alone()

        layer_alone()
        steps = (layer_alone, keys_alone, regrouped)
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(rounds):
            for step, own in zip(steps, seconds, strict=True):
                state.hidden.copy_(before)
                begun = clock()
                step()
                own.append(clock() - begun)
    alone, keys, both = (min(own) for own in seconds)
    return max(0.0, both / alone - 1), keys / alone


class HalfLeave:
    """Every second read leaves at a layer in the middle."""

    regroup_cost = 0.0

    def __init__(self, layer: int, *, peek: bool) -> None:
        self.layers: Collection[int] = (layer,)
        self._peek = peek

    def peeks(self, layer: int) -> bool:
        return self._peek

    def __call__(self, layer: int, reads: Sequence[int], before: Tensor, after: Tensor) -> Sequence[int]:
        return [read for read in reads if read % 2]


def main(
    model: Annotated[Path | None, typer.Option(help="A model's folder; without it, a random Llama of 25M.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    rounds: Annotated[int, typer.Option(help="Rounds; the least and the median count.")] = 5,
    chunk: Annotated[int, typer.Option(help="Tokens of a chunk.")] = 2048,
) -> None:
    """Measure on one thread."""
    torch.set_num_threads(1)
    loaded: PreTrainedModel = (
        random_llama("25M", getattr(torch, dtype))
        if model is None
        else load_model(read_model_files(model, dtype=dtype), torch.device("cpu"))
    )
    found: list[dict[str, Any]] = []
    table = Table(
        "pack", "tokens", "regroup, layers", "K,V, layers", "half leave", "with peek", "formula", "with peek"
    )
    with closing(LayerWalk(loaded, chunk_tokens=chunk)) as walk:
        for name, shape in PACKS.items():
            log(name)
            prompts = prompts_with_histories(*shape, int(loaded.config.vocab_size))
            (pack,) = make_plan(prompts, Limits(1 << 30, 1 << 30)).packs
            costs = measure_leaving(walk, pack, time.process_time, rounds)
            if costs is None:
                raise SystemExit("a model of one layer has no exits")
            faster = _whole_walks(walk, pack, rounds)
            found.append({"pack": name, "tokens": len(pack.tokens), "regroup": costs[0], "keys": costs[1], **faster})
            numbers = [f"{value:.3f}" for value in found[-1].values() if isinstance(value, float)]
            table.add_row(name, str(len(pack.tokens)), *numbers)
    Console(width=110).print(table)
    print(json.dumps({"model": str(model or "25M"), "dtype": dtype, "chunk": chunk, "packs": found}))


def _whole_walks(walk: LayerWalk, pack: Pack, rounds: int) -> dict[str, float]:
    """How many times as fast walks are in which half of the rows leave in the middle, and what the formula says."""
    layers = len(walk.layers)
    rules = {"plain": None, "left": HalfLeave(layers // 2, peek=False), "peeked": HalfLeave(layers // 2, peek=True)}
    seconds: dict[str, list[float]] = {name: [] for name in rules}
    for _ in range(rounds):
        for name, rule in rules.items():
            begun = time.process_time()
            for _ in walk.read_logits(pack, exits=rule):
                pass
            seconds[name].append(time.process_time() - begun)
    times = {name: statistics.median(own) for name, own in seconds.items()}
    half = [None if read % 2 else layers // 2 for read in range(len(pack.reads))]
    one_more = [None if each is None else each + 1 for each in half]
    return {
        "left": times["plain"] / times["left"],
        "peeked": times["plain"] / times["peeked"],
        "left by formula": 1 / remaining_work(pack, one_more, layers),
        "peeked by formula": 1 / remaining_work(pack, half, layers),
    }


if __name__ == "__main__":
    typer.run(main)

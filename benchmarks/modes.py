"""`python -m benchmarks.modes`: memory of a prompt in each mode that PrefillOnly compares (figure 10).

`full` and `chunked` are transformers with the K,V of all layers, `hybrid` is the layer walk. Two modes show the worth
of its parts: `drop` walks in one chunk, `hybrid-copy` has a second residual stream for each layer's output. Each run
has a process of its own. The table goes to stderr, the same as one line of JSON to stdout.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.console import log
from benchmarks.models import SHAPES, random_llama
from benchmarks.workloads import random_prompt
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.walk import LayerWalk, Tick, WalkState
from prefillcli.profile.measuring import in_child, make_malloc_exact
from prefillcli.profile.measuring import prefill as one_mode
from prefillcli.runtime.memory import with_peak

MODES = ("full", "chunked", "drop", "hybrid-copy", "hybrid")
_WARM_UP_TOKENS = 129


class CopyingWalk(LayerWalk):
    """A walk that has a second residual stream for each layer's output: it shows what overwriting saves."""

    _second: Tensor | None = None

    def through_layer(
        self, state: WalkState, index: int, layer: torch.nn.Module, attention: ForestAttention, tick: Tick
    ) -> None:
        if index < len(self.layers) - 1:  # the last layer has no output
            if self._second is None or self._second.shape != state.hidden.shape:
                self._second = torch.empty_like(state.hidden)
            state.hidden, self._second = self._second.copy_(state.hidden), state.hidden
        super().through_layer(state, index, layer, attention, tick)


def prefill(model: PreTrainedModel, mode: str, chunk: int, prompt: TokenArray) -> Tensor:
    """The last logits of one prompt, float32 [vocabulary]."""
    if mode == "drop":
        return one_mode(model, "hybrid", len(prompt), prompt)
    if mode != "hybrid-copy":
        return one_mode(model, mode, chunk, prompt)
    walk = CopyingWalk(model, chunk_tokens=chunk)
    try:
        (pack,) = make_plan([prompt], Limits(len(prompt), len(prompt))).packs
        return torch.cat(list(walk.read_logits(pack)))[0]
    finally:
        walk.close()


def measure(size: str, mode: str, chunk: int, tokens: int) -> int:
    """In a child: the peak of one prompt above the loaded model, in bytes."""
    make_malloc_exact()
    torch.set_num_threads(1)
    model = random_llama(size, torch.float32)
    vocabulary = int(model.config.vocab_size)
    prefill(model, mode, _WARM_UP_TOKENS // 2, random_prompt(_WARM_UP_TOKENS, vocabulary))
    prompt = random_prompt(tokens, vocabulary)
    return with_peak(partial(prefill, model, mode, chunk, prompt))[1] or 0


def main(
    model: Annotated[str, typer.Option(help=f"Size of the random Llama: {', '.join(SHAPES)}.")] = "25M",
    tokens: Annotated[int, typer.Option(help="Of the longer prompt; the other has half of them.")] = 8192,
    chunk: Annotated[int, typer.Option(help="Tokens in a chunk.")] = 256,
) -> None:
    """Measure the peak of two prompts in each mode."""
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        log(f"{mode}: {tokens // 2:,} and {tokens:,} tokens")
        peaks = [in_child(measure, model, mode, chunk, length) for length in (tokens // 2, tokens)]
        each = (peaks[1] - peaks[0]) / (tokens - tokens // 2)
        found[mode] = {"peak_bytes": peaks[1], "token_bytes": each}
    table = Table("mode", "peak MiB", "bytes per token", "prompt in the memory of full")
    for mode, own in found.items():
        longer = found["full"]["token_bytes"] / own["token_bytes"]
        table.add_row(mode, f"{own['peak_bytes'] / 2**20:,.1f}", f"{own['token_bytes']:,.0f}", f"{longer:.1f}x")
    Console(stderr=True, width=100).print(table)
    print(json.dumps(found))


if __name__ == "__main__":
    typer.run(main)

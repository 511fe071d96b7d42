"""GemFilter: the tokens that the prompt's last one looks at in an early layer of the model (arXiv 2409.17422)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing

import torch
import torch.nn.functional as F

from prefillcli.compress.base import Float32Array, ImportanceEstimate, Tick
from prefillcli.compress.fallbacks import NOT_FINITE
from prefillcli.compress.pickers.row_picker import RowPicker
from prefillcli.data.rows import Prompt
from prefillcli.plan.account import account
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan, marked_positions
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.walk import LayerWalk

POOL = 5


class GemFilter(RowPicker):
    """The model walks the prompts up to `layer`, and reads what it kept of them from its first layer on.

    Queries times keys of the last token, summed over the heads and averaged over `POOL` tokens, rank single tokens. As
    all pickers here it keeps the ends too, and the positions, which the paper counts anew. `walking` gives a walk of
    the model; `limits` are those of its packs.
    """

    method = "gemfilter"

    def __init__(self, layer: int, walking: Callable[[], AbstractContextManager[LayerWalk]], limits: Limits) -> None:
        self.layer = layer
        self._walking = walking
        self._limits = Limits(limits.tokens, limits.max_tokens, switch=limits.switch)

    def rank(self, prompt: Prompt) -> Float32Array | None:
        return self.estimate([prompt], lambda tokens: None)[0].importance

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        found = [ImportanceEstimate() for _ in prompts]
        with self._walking() as walk:
            tokens = [prompt.tokens for prompt in prompts]
            positions = [marked_positions(None, len(own), self._limits.switch) for own in tokens]
            for pack in make_plan(tokens, self._limits, positions=positions).packs:
                begun = time.monotonic()
                votes = self._votes(walk, pack, tick)
                self.tokens += len(pack.tokens)
                seconds = time.monotonic() - begun
                for part in account(pack):
                    own = found[part.prompt]
                    own.importance, own.seconds = votes[part.prompt], seconds * part.share
                    own.reason = NOT_FINITE if own.importance is None else None
        return found

    def _votes(self, walk: LayerWalk, pack: Pack, tick: Tick) -> dict[int, Float32Array | None]:
        tree = Tree(pack)
        ends = [pack.offsets[node + 1] - 1 for node, _ in pack.reads]
        watched = sorted(set(ends))
        with closing(walk.watch(pack, watched, tick)) as layers:
            layer = next(each for each in layers if each.number == self.layer)
        tick(len(pack.tokens) * (1 - (self.layer + 1) / len(walk.layers)))  # the other layers are left out
        votes: dict[int, Float32Array | None] = {}
        for (node, prompts), end in zip(pack.reads, ends, strict=True):
            own = summed_scores(layer, tree.path(node), watched.index(end))
            finite = bool(own.isfinite().all())
            votes |= dict.fromkeys(prompts, own.cpu().numpy() if finite else None)
        return votes


def summed_scores(layer: WatchedLayer, path: Sequence[tuple[int, int]], query: int) -> torch.Tensor:
    """A query's products with the keys of a path, summed over heads and pooled, float32 [tokens]."""
    keys = torch.cat([layer.keys[:, start:end] for start, end in path], dim=1).float()
    # The query heads of a K,V head are neighbours; their sum times the key is the sum of their products.
    queries = layer.queries[:, query].float().reshape(keys.shape[0], -1, keys.shape[2]).sum(dim=1)
    scores = torch.einsum("hw,htw->t", queries, keys)
    return F.avg_pool1d(scores[None, None], POOL, 1, POOL // 2)[0, 0]

"""Greedy decoding behind all reads of a pack in lock step, for the queries of the decoded tokens.

This is SpecPrefill's lookahead: what the decoded tokens attend to is used, the tokens themselves are not. The pack's
K,V in all layers are kept while it lasts, with those of the decoded tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from prefillcli.decode.forward import KeptForward
from prefillcli.decode.kept_pack import KeptPack
from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import ForestAttention, WatchedLayer
from prefillcli.prefill.walk import LayerWalk, Tick


@dataclass(slots=True)
class Lookahead:
    """Queries of a pack's watched tokens, and of tokens decoded greedily behind its reads.

    `counts[i]` tokens were decoded behind read i before an end of text. `layers`, one for each of the model's that
    attend, begin with the queries of the watched tokens in their order; those of each read's first decoded token
    follow, then of the second.
    """

    counts: list[int]
    layers: Iterator[WatchedLayer]


@torch.inference_mode()
def look_ahead(
    walk: LayerWalk,
    pack: Pack,
    watched: Sequence[int],
    steps: int,
    stop_tokens: frozenset[int],
    tick: Tick = lambda tokens: None,
) -> Lookahead:
    """`walk.watch`, and decode `steps` tokens behind each read, greedily.

    All layers' K,V, and the states of recurrent layers behind each read, stay in memory as long as the result.
    Raises UnsupportedModelError for a model that is walked with its own cache.
    """
    walk.check_queries()
    state, hidden = walk.begin(pack, keep_ends=True), None
    kept, layers = KeptPack(pack, len(walk.layers)), []
    with ForestAttention(len(pack.tokens), watched) as attention:
        for index, layer in walk.through_layers(state, attention, tick):
            if attention.attended:
                layers.append(attention.watched_layer(index))
            if index == len(walk.layers) - 1:
                hidden = walk.read_last(state, layer, attention)
            kept.take(index, state, attention)
    if hidden is None:
        raise ValueError("a model has at least one layer")
    reads = range(len(pack.reads))
    forward = KeptForward(walk, kept.select(reads), tick, watches_queries=True)
    logits = walk.logits(hidden)
    counts, going = torch.zeros(len(reads), dtype=torch.long), torch.ones(len(reads), dtype=torch.bool)
    for _ in range(steps):
        tokens = torch.cat([each.argmax(dim=-1) for each in logits]).cpu()
        going &= ~torch.isin(tokens, torch.as_tensor(sorted(stop_tokens), dtype=torch.long))
        if not going.any():
            break
        counts += going
        logits = forward([(read, [token]) for read, token in enumerate(tokens.tolist())])
    return Lookahead(counts.tolist(), _with_decoded(layers, forward))


def _with_decoded(layers: Sequence[WatchedLayer], forward: KeptForward) -> Iterator[WatchedLayer]:
    """Each layer that attends, with all queries."""
    for layer in layers:
        yield replace(layer, queries=torch.cat([layer.queries, *forward.queries[layer.number]], dim=1))

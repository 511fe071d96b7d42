"""What it takes that rows leave between two layers: laying out the others anew, and a layer's K,V alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.fusion import fused
from prefillcli.prefill.leaving import remainder
from prefillcli.prefill.walk import LayerWalk

ROUNDS = 3


class LeavingCosts(NamedTuple):
    """In layers of a token, for each token of a pack."""

    regroup: float  # laying it out anew between two layers
    keys: float  # computing K,V alone


@torch.inference_mode()
def measure_leaving(
    walk: LayerWalk, pack: Pack, clock: Callable[[], float], rounds: int = ROUNDS
) -> LeavingCosts | None:
    """Time a layer in the middle of the model over `pack`, which holds nothing.

    Of each step the fastest round counts: other programs can only make it slower. A model of one layer has no middle:
    None. `clock` gives seconds; where a device computes by itself, it waits for it.
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

        def regrouped() -> None:  # which keys a query sees is found out when the layer is called
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
    return LeavingCosts(max(0.0, both / alone - 1), keys / alone)

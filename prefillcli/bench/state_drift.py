"""State drift: how far the final states of recurrent layers are from those of the whole prompt.

A recurrent layer advances only at the tokens that it reads, so after a compressed prompt its state is another one than
after the whole prompt ("SpecPrefill on Unified Memory" leaves open by how much).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.bench.report import LayerDrift, StateDrift
from prefillcli.compress.selection import Request
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.prefill.forest import ForestAttention
from prefillcli.prefill.own_cache import LayerPast
from prefillcli.prefill.walk import LayerWalk

DRIFT_ROWS = 8  # of each method: the first that it has compressed; both ways of reading them are walked once more


def state_drift(
    walking: Callable[[], AbstractContextManager[LayerWalk]], limits: Limits, requests: Sequence[Request]
) -> StateDrift | None:
    """The drift over the first `DRIFT_ROWS` compressed requests; None without any, or without recurrent layers.

    `walking` gives a walk of the target. Each request is walked whole and compressed, by itself.
    """
    rows = [each for each in requests if each.compressed][:DRIFT_ROWS]
    found: dict[int, list[float]] = {}
    with walking() as walk:
        for request in rows:
            whole = final_states(walk, Request(request.prompt), limits)
            for number, states in final_states(walk, request, limits).items():
                found.setdefault(number, []).append(distance(states, whole[number]))
    if not found:
        return None
    every = [each for layer in found.values() for each in layer]
    return StateDrift(
        rows=len(rows),
        median=statistics.median(every),
        largest=max(every),
        layers=[
            LayerDrift(layer=number + 1, median=statistics.median(own), largest=max(own))
            for number, own in found.items()
        ],
    )


@torch.inference_mode()
def final_states(walk: LayerWalk, request: Request, limits: Limits) -> dict[int, list[Tensor]]:
    """The states that a prompt leaves in each recurrent layer, by the layer's number from 0."""
    (pack,) = make_plan([request.tokens], limits, positions=[request.positions]).packs
    ((end, _),) = pack.reads
    found: dict[int, list[Tensor]] = {}
    with ForestAttention(len(pack.tokens)) as attention:
        state = walk.begin(pack, keep_ends=True)
        for number, _ in walk.through_layers(state, attention, lambda tokens: None):
            if state.recurrence:
                carried = [tensor for each in state.recurrence.end_of(end) for tensor in _carried(each)]
                found |= {number: carried} if carried else {}
    return found


def _carried(end: LinearAttentionLayer | LayerPast) -> list[Tensor]:
    """The recurrent states among what a layer keeps; K,V are none."""
    entries = end.entries.values() if isinstance(end, LayerPast) else [end]
    return [tensor for each in entries if isinstance(each, LinearAttentionLayer) for tensor in state_tensors(each)]


def state_tensors(state: LinearAttentionLayer) -> list[Tensor]:
    """What a module has carried from its first token on: recurrent states, or those of a convolution alone."""
    carried = [each for each in state.recurrent_states.values() if each is not None]
    return carried or [each for each in state.conv_states.values() if each is not None]


def distance(states: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """L2 distance of one layer's states from those of the whole prompt, over the norm of the latter."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(states, whole, strict=True))
    size = sum(float(each.double().square().sum()) for each in whole)
    return float((apart / size) ** 0.5) if size else 0.0

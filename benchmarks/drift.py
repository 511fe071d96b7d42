"""State drift: the distance of recurrent layers' final states from those of the whole prompt.

A recurrent layer advances only at the tokens that it reads, so its state after a compressed prompt differs from that
after the whole prompt ("SpecPrefill on Unified Memory" leaves open by how much).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.core.request import Request
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import make_plan
from prefillcli.walk.forest import ForestAttention
from prefillcli.walk.own_cache import LayerPast
from prefillcli.walk.walk import LayerWalk

DRIFT_ROWS = 8  # the first compressed prompts; each is walked once more whole and once more compressed


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """Of one recurrent layer, over some rows; layers are numbered from 1."""

    layer: int
    median: float
    largest: float


@dataclass(frozen=True, slots=True)
class StateDrift:
    """How far the final states of recurrent layers are from those of the whole prompt.

    L2 distance over the norm of the latter; median and largest over all rows and layers.
    """

    rows: int  # compressed rows that were examined
    median: float
    largest: float
    layers: list[LayerDrift]


def state_drift(
    walking: Callable[[], AbstractContextManager[LayerWalk]], limits: Limits, questions: Sequence[Request]
) -> StateDrift | None:
    """The drift over the first `DRIFT_ROWS` compressed questions; None without any, or without recurrent layers.

    `walking` gives a walk of the target. Each question is walked whole and compressed, by itself.
    """
    rows = [each for each in questions if each.compressed][:DRIFT_ROWS]
    found: dict[int, list[float]] = {}
    with walking() as walk:
        for question in rows:
            whole = final_states(walk, Request(question.prompt), limits)
            for number, states in final_states(walk, question, limits).items():
                found.setdefault(number, []).append(distance(states, whole[number]))
    if not found:
        return None
    every = [each for layer in found.values() for each in layer]
    return StateDrift(
        rows=len(rows),
        median=statistics.median(every),
        largest=max(every),
        layers=[LayerDrift(number + 1, statistics.median(own), max(own)) for number, own in found.items()],
    )


def distance(states: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """L2 distance of one layer's states from those of the whole prompt, over the norm of the latter."""
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(states, whole, strict=True))
    size = sum(float(each.double().square().sum()) for each in whole)
    return float((apart / size) ** 0.5) if size else 0.0


@torch.inference_mode()
def final_states(walk: LayerWalk, question: Request, limits: Limits) -> dict[int, list[Tensor]]:
    """The states that a prompt leaves in each recurrent layer, by the layer's number from 0."""
    (pack,) = make_plan([question.tokens], limits, positions=[question.positions]).packs
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
    # The recurrent ones of a layer's states, without K,V.
    entries = end.entries.values() if isinstance(end, LayerPast) else [end]
    return [tensor for each in entries if isinstance(each, LinearAttentionLayer) for tensor in state_tensors(each)]


def state_tensors(state: LinearAttentionLayer) -> list[Tensor]:
    """The states that a module carries from its first token on: recurrent ones, or those of a convolution alone."""
    carried = [each for each in state.recurrent_states.values() if each is not None]
    return carried or [each for each in state.conv_states.values() if each is not None]

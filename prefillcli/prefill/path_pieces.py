"""Recurrent modules that read every path in the same pieces, so that a token's bits depend on its path alone.

A piece is the tokens between two depths that are multiples of a step, and the last of a prompt is padded to as many.
So a module is always called for pieces of one length. Pieces of several paths are computed in one call where each has
the bits that it has alone, with one thread. Whether it has is found out for each number of pieces, when it first comes
up; else they are computed one by one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from prefillcli.plan.state_steps import floor_to
from prefillcli.prefill.layout import Tree, on_device
from prefillcli.prefill.path_states import NodeRun, PathStates
from prefillcli.prefill.recurrent_states import MOST_STATES, fork_state, pick_states, stack_states, tensors_of

TOGETHER = 16  # pieces in one call; a power of 2

_agreed: dict[Hashable, bool] = {}


class PieceCall(Protocol):
    """One call of a module, as `recurrent.ModuleCall` computes it in parts."""

    @property
    def kind(self) -> Hashable: ...
    @property
    def device(self) -> torch.device: ...
    def compute(self, tokens: slice, state: LinearAttentionLayer) -> None: ...
    def compute_at(self, index: Tensor, state: LinearAttentionLayer | None) -> Any: ...
    def put(self, index: Tensor, valid: Tensor, out: Any) -> None: ...


@dataclass(slots=True)
class _Reader:
    """A run of a chunk's tokens that is read up to token `at`, where the `state` is; None: at a prompt's beginning."""

    run: NodeRun
    at: int
    state: LinearAttentionLayer | None


def read_in_pieces(
    call: PieceCall, runs: Sequence[NodeRun], tree: Tree, states: PathStates[LinearAttentionLayer], step: int
) -> None:
    """Compute a call over these runs of a chunk, parents before their children, in pieces of `step` tokens."""
    waiting, unfinished = list(runs), {run.node for run in runs}
    readers: list[_Reader] = []
    while waiting or readers:
        at = 0
        while at < len(waiting) and len(readers) < TOGETHER:
            if tree.parents[waiting[at].node] in unfinished:
                at += 1
            else:
                run = waiting.pop(at)
                readers.append(_Reader(run, run.start, states.before(run)))
        _read_pieces(call, readers, runs[0].start, tree, states, step)
        for reader in readers:
            if reader.at == reader.run.end:
                unfinished.discard(reader.run.node)
                if reader.state is not None:
                    states.after(reader.run, reader.state)
        readers = [reader for reader in readers if reader.at < reader.run.end]


def _read_pieces(
    call: PieceCall,
    readers: Sequence[_Reader],
    first: int,
    tree: Tree,
    states: PathStates[LinearAttentionLayer],
    step: int,
) -> None:
    """The next piece of every reader. Tokens of the call are counted from the pack's token `first`."""
    alike: dict[bool, list[tuple[_Reader, int]]] = {True: [], False: []}
    for reader in readers:
        run = reader.run
        to_depth = tree.starts[run.node] - tree.offsets[run.node]
        end = min(run.end, floor_to(reader.at + to_depth, step) + step - to_depth)
        if end - reader.at < step and (end < run.end or states.needed(run)):  # what is no piece of a plan with steps
            reader.state = reader.state or LinearAttentionLayer(number_of_states=MOST_STATES)
            call.compute(slice(reader.at - first, end - first), reader.state)
            reader.at = end
        else:
            alike[reader.state is None].append((reader, end))
    for some in alike.values():
        if not some:
            continue
        spans = [(reader.at - first, end - first) for reader, end in some]
        index, valid = _tokens(spans, step, call.device)
        before = [reader.state for reader, _ in some if reader.state is not None]
        found = _compute(call, index, valid, before)
        for (reader, end), state in zip(some, found, strict=True):
            reader.state, reader.at = state, end


def _tokens(spans: Sequence[tuple[int, int]], step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of spans [pieces, step], padded with each span's last one, and which are not padding."""
    starts, ends = (np.asarray(each)[:, None] for each in zip(*spans, strict=True))
    numbers = starts + np.arange(step)[None]
    return on_device(np.minimum(numbers, ends - 1), device), on_device(numbers < ends, device)


def _compute(
    call: PieceCall, index: Tensor, valid: Tensor, before: Sequence[LinearAttentionLayer]
) -> list[LinearAttentionLayer]:
    """Compute pieces `index` [pieces, step], behind these states or at the beginning; gives the states behind them."""
    pieces = len(index)
    size = 1 << (pieces - 1).bit_length()
    asked = call.kind, size, tuple(index.shape[1:]), bool(before), torch.get_num_threads()
    found: list[LinearAttentionLayer] = []
    if _agreed.get(asked, True):
        rows = [*range(pieces), *[pieces - 1] * (size - pieces)]
        state = stack_states([before[row] for row in rows]) if before else None
        state = state or LinearAttentionLayer(number_of_states=MOST_STATES)
        out = call.compute_at(index[rows], state)
        found = [pick_states(state, [row]) for row in range(pieces)] if pieces > 1 else [pick_states(state, [0])]
        parts = _cut(out, slice(0, pieces))
        if asked in _agreed:
            call.put(index, valid, parts)
            return found
    with _one_thread():
        alone, behind = [], []
        for row in range(pieces):
            own = fork_state(before[row]) if before else LinearAttentionLayer(number_of_states=MOST_STATES)
            alone.append(call.compute_at(index[row : row + 1], own))
            behind.append(own)
    for row, out in enumerate(alone):
        call.put(index[row : row + 1], valid[row : row + 1], out)
    if found:
        same_out = all(_same(_cut(parts, slice(row, row + 1)), out) for row, out in enumerate(alone))
        pairs = zip(found, behind, strict=True)
        _agreed[asked] = same_out and all(_same(tensors_of(one), tensors_of(other)) for one, other in pairs)
    return behind


def _cut(out: Any, rows: slice) -> Any:
    return out[rows] if isinstance(out, Tensor) else tuple(part[rows] for part in out)


def _same(one: Any, other: Any) -> bool:
    pairs = [(one, other)] if isinstance(one, Tensor) else zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

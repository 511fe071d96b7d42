"""Where a pack is cut into chunks, which are computed by one call of a layer each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import nn

from prefillcli.plan.state_steps import STATE_STEP
from prefillcli.prefill.layout import Tree, split_evenly
from prefillcli.prefill.products import ROW_STEP
from prefillcli.prefill.recurrent import recurrent_modules
from prefillcli.prefill.row_products import tile_rows

ChunkCutter = Callable[[Tree, int, int], list[tuple[int, int]]]
"""Gives (start, end) of the chunks of a pack of so many tokens, for chunks of at most so many."""


def chunk_cutter(layers: Sequence[nn.Module], device: torch.device, *, deterministic: bool) -> ChunkCutter:
    """What cuts packs for these layers.

    If `deterministic`, products are of whole tiles, so chunks are, too; else most tensors would be copied to be made
    longer. Recurrent layers read whole pieces.
    """
    if deterministic and any(map(recurrent_modules, layers)):
        return cut_between_pieces
    return partial(_cut_anywhere, step=tile_rows(device) if deterministic else ROW_STEP)


def cut_between_pieces(tree: Tree, tokens: int, most: int) -> list[tuple[int, int]]:
    """(start, end) of chunks of a pack: at most `most` tokens, or one piece of a path (`path_pieces.py`)."""
    depths = tree.depths
    first = depths == np.repeat(tree.starts, np.diff(tree.offsets))
    cuts = np.append(np.flatnonzero((depths % STATE_STEP == 0) | first), tokens)
    chunks = []
    start = 0
    while start < tokens:
        at = int(np.searchsorted(cuts, start + most, side="right")) - 1
        end = int(cuts[at] if cuts[at] > start else cuts[at + 1])
        chunks.append((start, end))
        start = end
    return chunks


def _cut_anywhere(tree: Tree, tokens: int, most: int, step: int) -> list[tuple[int, int]]:
    return split_evenly(tokens, most, step) if tokens else []

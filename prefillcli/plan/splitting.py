"""A pack split into smaller ones, for a device whose memory it does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prefillcli.plan.pack import Held, Pack
from prefillcli.plan.refills import alone, without_idle

WORTH = 0.9
"""A half with more than this share of the tokens is not worth computing what both share twice."""
NO_INDEX = -1
"""The index of packs that are no packs of a plan: they keep nothing of their own."""


def split_pack(pack: Pack, most: int) -> list[Pack]:
    """Packs that answer what `pack` answers and keep what it keeps, of at most `most` tokens each where that pays.

    First each node that later packs hold is computed alone, and read by the rest. What several of the others share is
    computed in each of them. A prompt is never split, nor is a pack of which no smaller part is much smaller.
    """
    if len(pack.tokens) <= most or not pack.reads:
        return [pack]
    stays = pack.keep | {node.key for node in pack.held}
    kept = pack.kept_nodes
    first = [replace(alone(key, {pack.index: pack}), keep=stays) for _, key in sorted(kept.items())]
    reads = sorted(range(len(pack.reads)), key=lambda read: pack.reads[read][0])
    parts = _halved(pack, reads, set(kept), most)
    if len(first) + len(parts) == 1:
        return [pack]
    return [*first, *_charged_once([replace(part, keep=stays) for part in parts])]


def isolated_reads(pack: Pack) -> list[Pack]:
    """Packs that answer what `pack` answers and keep what it keeps, of one read each."""
    stays = pack.keep | {node.key for node in pack.held}
    kept = pack.kept_nodes
    first = [replace(alone(key, {pack.index: pack}), keep=stays) for _, key in sorted(kept.items())]
    parts = [_part(pack, [read], set(kept)) for read in range(len(pack.reads))]
    return [*first, *_charged_once([replace(part, keep=stays) for part in parts])]


def _halved(pack: Pack, reads: Sequence[int], kept: set[int], most: int) -> list[Pack]:
    """Packs for these reads, in the order of their nodes."""
    whole = _part(pack, reads, kept)
    if len(whole.tokens) <= most or len(reads) == 1:
        return [whole]
    sizes = np.cumsum([pack.offsets[pack.reads[read][0] + 1] - pack.offsets[pack.reads[read][0]] for read in reads])
    middle = min(max(int(np.searchsorted(sizes, sizes[-1] / 2, side="right")), 1), len(reads) - 1)
    halves = [_halved(pack, part, kept, most) for part in (reads[:middle], reads[middle:])]
    if max(len(part.tokens) for half in halves for part in half) > WORTH * len(whole.tokens):
        return [whole]
    return [part for half in halves for part in half]


def _part(pack: Pack, reads: Sequence[int], kept: set[int]) -> Pack:
    """What answers these reads of a pack, if its nodes `kept` are held."""
    needed: set[int] = set()
    for read in reads:
        node = pack.reads[read][0]  # computed in any case: K,V alone give no answer
        while node >= 0 and node not in needed:
            needed.add(node)
            parent = pack.parents[node]
            node = -1 if parent in kept else parent
    nodes = sorted(needed)
    number = {node: at for at, node in enumerate(nodes)}
    spans = [(pack.offsets[node], pack.offsets[node + 1]) for node in nodes]
    held = list(pack.held)
    place: dict[int, int] = {}
    for node in sorted(kept):
        place[node] = len(held)
        length = pack.offsets[node + 1] - pack.offsets[node]
        held.append(Held(pack.kept_nodes[node], pack.index, pack.starts[node], length))

    def above(node: int) -> tuple[int, ...]:
        """The held nodes on the path to a root of the part."""
        path: list[int] = []
        while (parent := pack.parents[node]) >= 0:
            path.append(place[parent])
            node = parent
        return (*pack.attach[node], *reversed(path))

    inside = [pack.parents[node] >= 0 and pack.parents[node] not in kept for node in nodes]
    part = Pack(
        index=NO_INDEX,
        tokens=np.concatenate([pack.tokens[start:end] for start, end in spans]),
        positions=np.concatenate([pack.positions[start:end] for start, end in spans]),
        offsets=[0, *np.cumsum([end - start for start, end in spans]).tolist()],
        starts=[pack.starts[node] for node in nodes],
        parents=[number[pack.parents[node]] if own else -1 for node, own in zip(nodes, inside, strict=True)],
        attach=[() if own else above(node) for node, own in zip(nodes, inside, strict=True)],
        reads=[(number[pack.reads[read][0]], pack.reads[read][1]) for read in reads],
        held=tuple(held),
        adapter=pack.adapter,
    )
    return without_idle(part)


def _charged_once(parts: Sequence[Pack]) -> list[Pack]:
    """The parts, in which the first that reads a charged node is charged for it."""
    seen: set[object] = set()
    found = []
    for part in parts:
        names = [(node.key, node.offset) for node in part.held]
        held = [
            replace(node, charged=node.charged and name not in seen)
            for node, name in zip(part.held, names, strict=True)
        ]
        seen.update(names)
        found.append(replace(part, held=tuple(held)))
    return found

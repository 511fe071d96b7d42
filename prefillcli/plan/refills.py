"""Packs that stand alone: with what computes the K,V that they hold, for a worker that does not have them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prefillcli.plan.pack import Held, Key, Pack


@dataclass(frozen=True, slots=True)
class FreePack:
    """A pack that any worker can compute.

    Each of the `refills` computes one node that the pack holds, behind those before it. They run if the worker does
    not have its K,V.
    """

    pack: Pack
    refills: tuple[Pack, ...] = ()


def free_packs(packs: Sequence[Pack]) -> Iterator[FreePack]:
    """The packs of a plan, given ones first, that answer prompts, each as one that stands alone."""
    by_index = {pack.index: pack for pack in packs}
    for pack in packs:
        if pack.reads:
            pack = without_idle(pack)
            keys = pack.keep | {node.key for node in pack.held}
            refills = refills_of(pack, lambda key: alone(key, by_index))
            yield FreePack(pack, tuple(replace(refill, keep=keys) for refill in refills))


def refills_of(pack: Pack, source: Callable[[Key], Pack | None]) -> list[Pack]:
    """What computes each node that `pack` holds for prompts of its own, those nearer to the root first.

    `source` says what has computed a node, or None if that is not needed. It is computed behind what this pack holds
    of its path: the same tokens may be held by another key by now, where they were computed again for a prompt.
    """
    paths: dict[Key, tuple[Held, ...]] = {}
    for above in pack.attach:
        nodes = [pack.held[number] for number in above]
        for at, node in enumerate(nodes):
            paths.setdefault(node.key, tuple(replace(each, charged=False) for each in nodes[:at]))
    found = []
    for node in sorted(_whole(pack.held), key=lambda node: node.start):
        refill = source(node.key) if node.key in paths else None
        if refill is not None and not isinstance(node.key, str):
            path = paths[node.key]
            refill = replace(refill, held=path, attach=[tuple(range(len(path)))])
        if refill is not None:
            found.append(refill)
    return found


def groups_of(packs: Iterable[FreePack]) -> Iterator[list[FreePack]]:
    """Neighbours that hold K,V of one another, together."""
    group: list[FreePack] = []
    kept: set[Key] = set()
    for each in packs:
        if group and kept.isdisjoint(node.key for node in each.pack.held):
            yield group
            group, kept = [], set()
        group.append(each)
        kept |= each.pack.keep
    if group:
        yield group


def without_idle(pack: Pack) -> Pack:
    """The pack without the nodes that it holds for later packs alone."""
    used = sorted({number for above in pack.attach for number in above})
    numbers = {number: at for at, number in enumerate(used)}
    attach = [tuple(numbers[number] for number in above) for above in pack.attach]
    return replace(pack, attach=attach, held=tuple(pack.held[number] for number in used))


def with_own_prefix(pack: Pack, without: Container[Key], sources: Mapping[Key, Pack]) -> Pack:
    """A pack of one read, or of none, that holds no node of these keys, nor one below them: it computes them itself.

    `sources` says of a key what pack has computed that node, with nothing else.
    """
    above = [pack.held[number] for number in pack.attach[0]]
    kept = next((at for at, node in enumerate(above) if node.key in without), len(above))
    if kept == len(above):
        return pack
    spans = [(sources[node.key], node.offset, node.offset + node.length) for node in above[kept:]]
    tokens = [*(source.tokens[start:end] for source, start, end in spans), pack.tokens]
    positions = [*(source.positions[start:end] for source, start, end in spans), pack.positions]
    longer = sum(end - start for _, start, end in spans)
    return replace(
        pack,
        tokens=np.concatenate(tokens),
        positions=np.concatenate(positions),
        offsets=[0, *(offset + longer for offset in pack.offsets[1:])],
        starts=[pack.starts[0] - longer, *pack.starts[1:]],
        attach=[tuple(range(kept)), *pack.attach[1:]],
        held=tuple(above[:kept]),
    )


def _whole(held: Sequence[Held]) -> list[Held]:
    """One node for each key."""
    return list({node.key: node for node in held}.values())


def alone(key: Key, packs: dict[int, Pack]) -> Pack:
    """What computes the block or node that is held under `key`, with nothing else."""
    if isinstance(key, str):
        return next(pack for pack in packs.values() if pack.block == key)
    index, number = key
    source = packs[index]
    path = []
    step = source.parents[number]
    top = number
    while step >= 0:
        length = source.offsets[step + 1] - source.offsets[step]
        path.append(Held((index, step), index, source.starts[step], length))
        step, top = source.parents[step], step
    before = tuple(replace(source.held[at], charged=False) for at in source.attach[top]) + tuple(reversed(path))
    tokens = slice(source.offsets[number], source.offsets[number + 1])
    return Pack(
        index=index,
        tokens=source.tokens[tokens],
        positions=source.positions[tokens],
        offsets=[0, tokens.stop - tokens.start],
        starts=[source.starts[number]],
        parents=[-1],
        attach=[tuple(range(len(before)))],
        reads=[],
        held=before,
        block=key,
        adapter=source.adapter,
    )

"""Packs that stand alone: with what computes the K,V that they hold, for a worker that does not have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
            pack = _without_idle(pack)
            keys = pack.keep | {node.key for node in pack.held}
            refills = [replace(_alone(node.key, by_index), keep=keys) for node in _whole(pack.held)]
            yield FreePack(pack, tuple(refills))


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


def _without_idle(pack: Pack) -> Pack:
    """The pack without the nodes that it holds for later packs alone."""
    used = sorted({number for above in pack.attach for number in above})
    numbers = {number: at for at, number in enumerate(used)}
    attach = [tuple(numbers[number] for number in above) for above in pack.attach]
    return replace(pack, attach=attach, held=tuple(pack.held[number] for number in used))


def _whole(held: Sequence[Held]) -> list[Held]:
    """One node for each key, those nearer to the root first."""
    return sorted({node.key: node for node in held}.values(), key=lambda node: node.start)


def _alone(key: Key, packs: dict[int, Pack]) -> Pack:
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

"""The plan of one window: in which order, with what shared, in which packs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from prefillcli.plan.blocks import (
    NO_COVER,
    CarriedBlock,
    Cover,
    WindowBlocks,
    align_nodes,
    cover_nodes,
    find_blocks,
    order_siblings,
    shared_ends,
)
from prefillcli.plan.cutter import cut_packs, given_packs
from prefillcli.plan.pack import Key, Limits, Pack
from prefillcli.plan.queue import Queue
from prefillcli.plan.trie import (
    KeyArray,
    TokenArray,
    TrieNode,
    build_forest,
    dissolve_small_nodes,
    forest_tokens,
    keys_with_positions,
    token_order,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Packs of a window, in the order they run, and what they share.

    `unique_tokens` is the size of the trie of all prompts without what is given: the least that must be computed.
    `given` are the packs of the blocks that the window before has handed on, which run only if their K,V are lost.
    `carried` are the blocks that are handed to the next window.
    """

    packs: list[Pack]
    unique_tokens: int
    given: list[Pack] = field(default_factory=list)
    carried: tuple[CarriedBlock, ...] = ()

    @property
    def computed_tokens(self) -> int:
        return sum(len(pack.tokens) for pack in self.packs)


def make_plan(
    prompts: Sequence[TokenArray],
    limits: Limits,
    schedule: str = "prefix-tree",
    positions: Sequence[TokenArray | None] | None = None,
    *,
    adapters: Sequence[str | None] | None = None,
    carried: Sequence[CarriedBlock] = (),
    block_tokens: int = 0,
) -> Plan:
    """Plan `prompts` (token ids each) under `limits`, in the order of one of the `SCHEDULES`.

    `prefix-tree` goes through the trie of the prompts depth first, so that every shared prefix is computed once.
    `fifo` keeps the order given, `srjf` takes short prompts first, `srjf-calibrated` those with the fewest tokens that
    are not at hand: computed in the same pack, or held in the prefix cache. `positions` are ascending, one for each
    token of a prompt; None where they count from 0. Tokens are shared only at the same positions.
    `adapters` name the adapter that reads each prompt; None: no prompt has one. A pack has prompts of one adapter, and
    those of an adapter come one after the other.

    `carried` are the blocks that the plan of the window before carries. A prefix of `block_tokens` and more at this
    window's end is cut into blocks; with 0 there are none.
    """
    cases = [(schedule, limits)]
    return next(make_plans(prompts, cases, positions, adapters=adapters, carried=[carried], block_tokens=block_tokens))


def make_plans(
    prompts: Sequence[TokenArray],
    cases: Iterable[tuple[str, Limits]],
    positions: Sequence[TokenArray | None] | None = None,
    *,
    adapters: Sequence[str | None] | None = None,
    carried: Iterable[Sequence[CarriedBlock]] = repeat(()),
    block_tokens: int = 0,
) -> Iterator[Plan]:
    """The plan of `make_plan` with each schedule and limits, and of each the blocks that are `carried` there.

    What the prompts share is looked for once.
    """
    positions = positions or [None] * len(prompts)
    adapters = adapters or [None] * len(prompts)
    window = _Prompts(prompts, positions, adapters)
    for (schedule, limits), before in zip(cases, carried, strict=False):
        blocks = window.blocks(limits, before, block_tokens)
        roots, cover = window.forest(blocks, whole=limits.whole_nodes, step=limits.state_step)
        given = given_packs(blocks.given, prompts, positions, adapters)
        packs = cut_packs(Queue(roots, schedule, window.groups), prompts, limits, positions, cover, adapters)
        unique = window.unique_tokens - sum(len(pack.tokens) for pack in given)
        yield Plan(packs, unique, given, tuple((block.end, block.key) for block in blocks.carried))


def packs_to_run(plan: Plan, done: Iterable[int], at_hand: Container[Key | None] = ()) -> list[Pack]:
    """The packs a run still needs: those with a prompt not in `done`, and those whose K,V they hold.

    Given blocks whose keys are `at_hand` are not computed again.
    """
    finished = set(done)
    wanted: set[int] = set()
    packs = [*(pack for pack in plan.given if pack.block not in at_hand), *plan.packs]
    for pack in reversed(packs):
        if pack.index in wanted or not finished.issuperset(pack.prompts):
            wanted.add(pack.index)
            wanted.update(pack.needs)
    return [pack for pack in packs if pack.index in wanted]


class _Prompts:
    """The prompts of a window and what they share, looked for once for each set of blocks."""

    def __init__(
        self,
        prompts: Sequence[TokenArray],
        positions: Sequence[TokenArray | None],
        adapters: Sequence[str | None],
    ) -> None:
        self._prompts = prompts
        self._positions = positions
        self._adapters = adapters
        self.groups = _groups_of(adapters)
        """The group of each prompt: those of one adapter. Empty where there is one alone."""
        self._keys: Sequence[KeyArray] = prompts
        if any(own is not None for own in positions) or self.groups:
            groups = self.groups or [0] * len(prompts)
            self._keys = [
                keys_with_positions(tokens, own, group)
                for tokens, own, group in zip(prompts, positions, groups, strict=True)
            ]
        self._order = token_order(self._keys)
        if self.groups:
            self._order.sort(key=self.groups.__getitem__)
        roots = build_forest(self._keys, self._order)
        self.unique_tokens = forest_tokens(roots)
        last = len(prompts) - 1
        self._shared = {
            whole: shared_ends(roots, self._keys, last, whole=whole) if prompts else [] for whole in (False, True)
        }
        alone = dissolve_small_nodes(roots), NO_COVER
        self._forests = {(NO_COVER.blocks.ends, whole, 0): alone for whole in (False, True)}

    def blocks(self, limits: Limits, carried: Sequence[CarriedBlock], block_tokens: int) -> WindowBlocks:
        """The blocks that fit the limits together with any one prompt."""
        if not block_tokens or not limits.held_tokens or not self._prompts:
            return WindowBlocks()
        room = float(limits.held_tokens)
        if limits.held_cost:
            room = min(room, (limits.max_tokens - max(map(len, self._prompts))) / limits.held_cost)
        shared = self._shared[limits.whole_nodes]
        ends = self._adapters[0], self._adapters[-1]
        return find_blocks(self._prompts, self._positions, shared, int(room), carried, block_tokens, limits, ends)

    def forest(self, blocks: WindowBlocks, *, whole: bool = False, step: int = 0) -> tuple[list[TrieNode], Cover]:
        """The forest with small nodes dissolved, split at the ends of blocks; with `whole` each block is one node, and
        with a `step` nodes are aligned to it."""
        name = blocks.ends, whole, step
        if name not in self._forests:
            roots = build_forest(self._keys, self._order)
            cover = cover_nodes(roots, self._keys, blocks, whole=whole)
            if step:
                align_nodes(roots, step)
            roots = dissolve_small_nodes(roots, fixed=cover.nodes)
            order_siblings(roots, cover)
            self._forests[name] = roots, cover
        return self._forests[name]


def _groups_of(adapters: Sequence[str | None]) -> list[int]:
    """Numbers of the adapters, one for each prompt, in the order in which they read; empty if there is one.

    The first prompt's comes first and the last prompt's last: what these share with other windows is held for a short
    time then.
    """
    names = list(dict.fromkeys(adapters))
    if len(names) < 2:
        return []
    if adapters[-1] != names[0]:
        names.remove(adapters[-1])
        names.append(adapters[-1])
    numbers = {name: number for number, name in enumerate(names)}
    return [numbers[name] for name in adapters]


# Prompts that a model reads with other position encodings than shorter ones.
#
# With some rotary encodings (longrope) all of a prompt's positions are encoded in another way once it passes a
# length. Such a prompt's tokens are marked in their positions. So they share a prefix with one another, but not with
# those of shorter prompts, and whatever is cut out of a pack can be told apart.


LONG = 1 << 30
"""Is added to the positions of such prompts."""


def marked_positions(positions: TokenArray | None, tokens: int, switch: int) -> TokenArray | None:
    """The positions of a prompt of so many tokens (None: 0, 1, 2, ...), marked if it is longer than `switch`.

    A prompt that has lost tokens is as long as its last position says. With `switch` 0 no length is too long.
    """
    last = tokens - 1 if positions is None else int(positions[-1])
    if not switch or last < switch:
        return positions
    own = np.arange(tokens, dtype=np.int32) if positions is None else positions.astype(np.int32)
    return own + np.int32(LONG)

"""The plan of one window: in which order, with what shared, in which packs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prefillcli.plan.pack import Limits, Pack, cut_packs
from prefillcli.plan.queue import Queue
from prefillcli.plan.trie import (
    KeyArray,
    TokenArray,
    build_forest,
    dissolve_small_nodes,
    forest_tokens,
    keys_with_positions,
    token_order,
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Packs of a window, in the order they run, and what they share.

    `unique_tokens` is the size of the trie of all prompts: the least that any order must compute.
    """

    packs: list[Pack]
    unique_tokens: int

    @property
    def computed_tokens(self) -> int:
        return sum(len(pack.tokens) for pack in self.packs)


def make_plan(
    prompts: Sequence[TokenArray],
    limits: Limits,
    schedule: str = "prefix-tree",
    positions: Sequence[TokenArray | None] | None = None,
) -> Plan:
    """Plan `prompts` (token ids each) under `limits`, in the order of one of the `SCHEDULES`.

    `prefix-tree` goes through the trie of the prompts depth first, so that every shared prefix is computed once.
    `fifo` keeps the order given, `srjf` takes short prompts first, `srjf-calibrated` those with the fewest tokens that
    are not at hand: computed in the same pack, or held in the prefix cache. `positions` are ascending, one for each
    token of a prompt; None where they count from 0. Tokens are shared only at the same positions.
    """
    return next(make_plans(prompts, [(schedule, limits)], positions))


def make_plans(
    prompts: Sequence[TokenArray],
    cases: Iterable[tuple[str, Limits]],
    positions: Sequence[TokenArray | None] | None = None,
) -> Iterator[Plan]:
    """The plan of `make_plan` with each schedule and limits; what the prompts share is looked for once."""
    positions = positions or [None] * len(prompts)
    keys: Sequence[KeyArray] = prompts
    if any(own is not None for own in positions):
        keys = [keys_with_positions(tokens, own) for tokens, own in zip(prompts, positions, strict=True)]
    forest = build_forest(keys, token_order(keys))
    unique = forest_tokens(forest)
    forest = dissolve_small_nodes(forest)
    for schedule, limits in cases:
        yield Plan(cut_packs(Queue(forest, schedule), prompts, limits, positions), unique)


def packs_to_run(plan: Plan, done: Iterable[int]) -> list[Pack]:
    """The packs a resumed run still needs: those with a prompt not in `done`, and those whose K,V they hold."""
    finished = set(done)
    wanted: set[int] = set()
    for pack in reversed(plan.packs):
        if pack.index in wanted or not finished.issuperset(pack.prompts):
            wanted.add(pack.index)
            wanted.update(pack.needs)
    return [pack for pack in plan.packs if pack.index in wanted]

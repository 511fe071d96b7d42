"""Going on when a device's memory runs out: with smaller chunks, then with smaller packs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from prefillcli.engines.base import Answer, ReducedPacks
from prefillcli.errors import ResourceError, brief
from prefillcli.models.law import MIN_CHUNK_TOKENS
from prefillcli.plan.pack import Key, Pack
from prefillcli.plan.refills import alone, refills_of, without_idle
from prefillcli.plan.splitting import split_pack
from prefillcli.prefill.walk import LayerWalk
from prefillcli.runtime import log

AnswerPack = Callable[[Pack, Callable[[float], None]], list[Answer]]
KeepLess = Callable[[Pack], bool]
"""Keeps less than at the last try of a pack; says whether anything was kept of it."""


class MemoryRecovery:
    """Answers packs through a walk. One that does not fit is tried again, smaller, and so is all that follows.

    `before` is what an earlier attempt at the job had to do with. K,V that a walk has let go of before it failed are
    computed again, from the packs that they came from.
    """

    def __init__(self, walk: LayerWalk, before: Mapping[str, Any] | None = None) -> None:
        self._walk = walk
        self._sources: dict[Key, Pack] = {}  # what computes each node that may be held
        self._pack_tokens: int | None = None
        self._failures = 0
        self._halve_chunk = True  # next
        if before:
            self._pack_tokens, self._failures = before["pack_tokens"], before["failures"]
            walk.chunk_tokens = min(walk.chunk_tokens, before["chunk_tokens"])

    @property
    def pack_tokens(self) -> int | None:
        """Packs of more tokens are split; None before any was too large."""
        return self._pack_tokens

    def reduced(self) -> ReducedPacks | None:
        """What it does with since memory has run out; None if it has not."""
        if not self._failures:
            return None
        return ReducedPacks(self._failures, self._walk.chunk_tokens, self._pack_tokens)

    def answer(
        self,
        pack: Pack,
        tick: Callable[[float], None],
        answer: AnswerPack,
        keep_less: KeepLess = lambda pack: False,
    ) -> list[Answer]:
        """The answers of a pack by `answer`. What that keeps for texts becomes less before chunks and packs do. Raises
        ResourceError where not even a smaller one fits."""
        self._remember(pack)
        stays = pack.keep | {node.key for node in pack.held}
        todo = self._smaller([pack])
        ticks = _Ticks(len(pack.tokens), tick)
        ticks.begin(todo)
        answers: list[Answer] = []
        uncounted = 0  # tokens of packs without answers
        while todo:
            try:
                found = answer(todo[0], ticks)
            except torch.OutOfMemoryError as error:
                reason = brief(error)  # the frames that it holds are gone below
            else:
                done = todo.pop(0)
                if not done.reads and done.block != pack.block:
                    uncounted += len(done.tokens)
                elif found:
                    found[0] = replace(found[0], computed_tokens=found[0].computed_tokens + uncounted)
                    uncounted = 0
                answers += found
                continue
            self._reduce(todo[0], reason, keep_less)
            todo = [replace(without_idle(each), keep=each.keep | stays) for each in self._smaller(todo)]
            todo = [*self._lost(todo, stays, reason), *todo]
            ticks.begin(todo)
        return answers

    def _smaller(self, packs: Sequence[Pack]) -> list[Pack]:
        most = self._pack_tokens
        return list(packs) if most is None else [part for pack in packs for part in split_pack(pack, most)]

    def _reduce(self, pack: Pack, reason: str, keep_less: KeepLess) -> None:
        """Let go of memory, and halve what may help."""
        gc.collect()
        device, chunk = self._walk.device, self._walk.chunk_tokens
        if device.type == "cuda":
            torch.cuda.empty_cache()
        half = max(len(pack.tokens) // 2, 1)
        splits = len(split_pack(pack, half)) > 1
        if keep_less(pack):
            pass
        elif chunk > MIN_CHUNK_TOKENS and (self._halve_chunk or not splits):
            self._walk.chunk_tokens = max(chunk // 2, MIN_CHUNK_TOKENS)
            self._halve_chunk = False
        elif splits:
            self._pack_tokens = half
            self._halve_chunk = True
        else:
            raise ResourceError(
                f"{device}: memory ran out on a pack of {len(pack.tokens):,} tokens that cannot be made smaller, with "
                f"chunks of {chunk:,} tokens: {reason}\n"
                "end other programs on the device, or give a lower --memory"
            )
        if not self._failures:
            log.warning(
                f"memory ran out on {device}; going on with smaller chunks, and smaller packs where "
                f"that is not enough\nrun.json has their sizes; a lower --memory avoids the work that was lost"
            )
        self._failures += 1

    def _remember(self, pack: Pack) -> None:
        """How to compute what later packs hold of this one; what they do not hold is forgotten."""
        stays = pack.keep | {node.key for node in pack.held}
        self._sources = {key: source for key, source in self._sources.items() if key in stays}
        if pack.block is not None:
            self._sources[pack.block] = pack
        else:
            self._sources |= {key: alone(key, {pack.index: pack}) for key in pack.kept_nodes.values()}

    def _lost(self, todo: Sequence[Pack], stays: frozenset[Key], reason: str) -> list[Pack]:
        """The packs that compute what `todo` holds and is not there any more, nor made by one of them."""
        there = {each.block for each in todo}

        def source(key: Key) -> Pack | None:
            if key in there or self._walk.holds(key):
                return None
            if key not in self._sources:
                raise ResourceError(f"{self._walk.device}: memory ran out: {reason}")
            return self._sources[key]

        lost = []
        for each in todo:
            for refill in refills_of(each, source):
                lost.append(replace(refill, keep=stays))
                there.add(refill.block)
        return lost


class _Ticks:
    """Ticks of several tries at a pack, which add up to its tokens."""

    def __init__(self, tokens: int, tick: Callable[[float], None]) -> None:
        self._left = float(tokens)
        self._tick = tick
        self._scale = 1.0

    def begin(self, todo: Sequence[Pack]) -> None:
        """These packs are what is left."""
        self._scale = max(self._left, 0.0) / sum(len(pack.tokens) for pack in todo)

    def __call__(self, tokens: float) -> None:
        self._left -= tokens * self._scale
        self._tick(tokens * self._scale)

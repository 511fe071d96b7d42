"""Going on when a device's memory runs out: with smaller chunks and packs, at last without a prompt."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from prefillcli.engines.base import Answer, ReducedPacks
from prefillcli.errors import ResourceError, brief, out_of_memory
from prefillcli.models.law import MIN_CHUNK_TOKENS
from prefillcli.plan.pack import (
    NO_INDEX,
    Key,
    Pack,
    alone,
    isolated_reads,
    refills_of,
    split_pack,
    with_own_prefix,
    without_idle,
)
from prefillcli.runtime import log
from prefillcli.runtime.memory import trim_heap
from prefillcli.walk.walk import LayerWalk

AnswerPack = Callable[[Pack, Callable[[float], None]], list[Answer]]
Unanswered = Callable[[int, str], Answer]  # the answer of a prompt that cannot be answered, for this reason
# Keeps less than at the last try of a pack; returns whether that try kept anything.
KeepLess = Callable[[Pack], bool]


class MemoryRecovery:
    """Answers packs through a walk. A pack that does not fit is tried again, smaller, and later packs are smaller too.

    A prompt that does not even fit by itself, in the smallest chunks, is left without an answer. A pack that was taken
    apart for such a prompt does not make later packs smaller. `before` are the sizes that fitted an earlier attempt at
    the job. K,V that a walk released before it failed are computed again, from the packs that they came from.
    """

    def __init__(self, walk: LayerWalk, before: Mapping[str, Any] | None = None) -> None:
        self._walk = walk
        self._sources: dict[Key, Pack] = {}  # how to compute each node that may be held
        self._unheld: set[Key] = set()  # nodes that do not fit
        self.pack_tokens: int | None = None  # packs of more tokens are split; None before any was too large
        self._failures = 0
        self._halve_chunk = True  # next
        if before:
            self.pack_tokens, self._failures = before["pack_tokens"], before["failures"]
            walk.chunk_tokens = min(walk.chunk_tokens, before["chunk_tokens"])

    def reduced(self) -> ReducedPacks | None:
        """Return how it has gone on since memory ran out; None if it has not."""
        if not self._failures:
            return None
        return ReducedPacks(self._failures, self._walk.chunk_tokens, self.pack_tokens)

    def answer(
        self,
        pack: Pack,
        tick: Callable[[float], None],
        answer: AnswerPack,
        unanswered: Unanswered,
        keep_less: KeepLess = lambda pack: False,
    ) -> list[Answer]:
        """The answers of a pack by `answer`, and `unanswered` for prompts that do not fit. It reduces the K,V kept for
        texts before chunks and packs. Raises ResourceError where not even a short prompt fits."""
        self._remember(pack)
        stays = pack.keep | {node.key for node in pack.held}
        sizes = self._walk.chunk_tokens, self.pack_tokens
        todo = self._smaller(self._fitting([pack]))
        ticks = _Ticks(len(pack.tokens), tick)
        ticks.begin(todo)
        answers: list[Answer] = []
        uncounted = 0  # tokens of packs without answers
        apart = False
        while todo:
            try:
                found = answer(todo[0], ticks)
            except Exception as error:
                if not out_of_memory(error):
                    raise
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
            self._let_go(reason)
            if not self._reduce(todo[0], keep_less):
                apart = True
                first = todo.pop(0)
                if len(first.reads) > 1:
                    todo = [*isolated_reads(first), *todo]
                else:
                    self._require_room(first, answer, stays, reason)
                    answers += self._give_up(first, reason, unanswered)
                    todo = self._fitting(todo)
            todo = [replace(without_idle(each), keep=each.keep | stays) for each in self._smaller(todo)]
            todo = [*self._lost(todo, stays, reason), *todo]
            ticks.begin(todo)
        ticks.end()
        if apart:  # smaller chunks were of no help
            self._walk.chunk_tokens, self.pack_tokens = sizes
        return answers

    def _smaller(self, packs: Sequence[Pack]) -> list[Pack]:
        most = self.pack_tokens
        return list(packs) if most is None else [part for pack in packs for part in split_pack(pack, most)]

    def _let_go(self, reason: str) -> None:
        # Give unused memory back; say once that memory has run out.
        gc.collect()
        device = self._walk.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
        elif device.type == "cpu":
            trim_heap()
        if not self._failures:
            log.warning(
                f"memory ran out on {device}; going on with smaller chunks, and smaller packs where "
                f"that is not enough\nrun.json has their sizes; a lower --memory avoids the work that was lost"
            )
        self._failures += 1

    def _reduce(self, pack: Pack, keep_less: KeepLess) -> bool:
        chunk = self._walk.chunk_tokens
        half = max(len(pack.tokens) // 2, 1)
        splits = len(split_pack(pack, half)) > 1
        if keep_less(pack):
            pass
        elif chunk > MIN_CHUNK_TOKENS and (self._halve_chunk or not splits):
            self._walk.chunk_tokens = max(chunk // 2, MIN_CHUNK_TOKENS)
            self._halve_chunk = False
        elif splits:
            self.pack_tokens = half
            self._halve_chunk = True
        else:
            return False
        return True

    def _require_room(self, pack: Pack, answer: AnswerPack, stays: frozenset[Key], reason: str) -> None:
        # Raise ResourceError where not even a short prompt fits: then this prompt is not too large, memory is too
        # small.
        device, chunk = self._walk.device, self._walk.chunk_tokens
        if not pack.reads:  # prompts can be read without it
            return
        try:
            if pack.held_tokens + len(pack.tokens) <= MIN_CHUNK_TOKENS:
                raise MemoryError(reason)
            answer(_beginning(pack, stays), lambda tokens: None)
        except Exception as error:
            if not out_of_memory(error):
                raise
        else:
            return
        raise ResourceError(
            f"{device}: memory ran out on a pack of {len(pack.tokens):,} tokens that cannot be made smaller, with "
            f"chunks of {chunk:,} tokens: {reason}\n"
            "end other programs on the device, or give a lower --memory"
        )

    def _give_up(self, pack: Pack, reason: str, unanswered: Unanswered) -> list[Answer]:
        # The answers of a pack that does not fit. If it has no prompts, nothing holds its node any more.
        if not pack.reads:
            self._unheld.add(_key(pack))
        why = f"memory ran out on this prompt alone, with {len(pack.tokens):,} tokens to compute: {reason}"
        return [unanswered(prompt, why) for prompt in pack.prompts]

    def _fitting(self, packs: Sequence[Pack]) -> list[Pack]:
        # The packs, without nodes that cannot be held: prompts after them are read by themselves, from the root.
        fitting: list[Pack] = []
        for pack in packs:
            if self._unheld.isdisjoint(node.key for node in pack.held):
                fitting.append(pack)
            elif pack.reads:
                if missing := {node.key for node in pack.held} - self._sources.keys():
                    raise ResourceError(f"{self._walk.device}: memory ran out, and {len(missing)} prefixes are gone")
                parts = isolated_reads(pack)
                fitting += self._fitting([part for part in parts if not part.reads])
                fitting += [with_own_prefix(part, self._unheld, self._sources) for part in parts if part.reads]
            else:
                self._unheld.add(_key(pack))  # it comes after a prompt that does not fit
        return fitting

    def _remember(self, pack: Pack) -> None:
        # Remember how to compute the nodes of this pack that later packs hold; forget the others.
        stays = pack.keep | {node.key for node in pack.held}
        self._sources = {key: source for key, source in self._sources.items() if key in stays}
        self._unheld &= stays
        if pack.block is not None:
            self._sources[pack.block] = pack
        else:
            self._sources |= {key: alone(key, {pack.index: pack}) for key in pack.kept_nodes.values()}

    def _lost(self, todo: Sequence[Pack], stays: frozenset[Key], reason: str) -> list[Pack]:
        # The packs that compute the nodes that `todo` holds, unless they are still there or one of these packs makes
        # them.
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


def _key(pack: Pack) -> Key:
    # The key by which the node of a pack without reads is held.
    if pack.block is None:
        raise ValueError("a pack that neither answers nor is held")
    return pack.block


def _beginning(pack: Pack, stays: frozenset[Key]) -> Pack:
    # A prompt of the pack's first tokens, whose answer nobody needs.
    tokens = pack.tokens[:MIN_CHUNK_TOKENS]
    return Pack(
        index=NO_INDEX,
        tokens=tokens,
        positions=np.arange(len(tokens), dtype=np.int32),
        offsets=[0, len(tokens)],
        starts=[0],
        parents=[-1],
        attach=[()],
        reads=[],
        keep=stays,
        variant=pack.variant,
        images=pack.images,
    )


class _Ticks:
    """Ticks of several tries at a pack, which add up to its tokens."""

    def __init__(self, tokens: int, tick: Callable[[float], None]) -> None:
        self._left = float(tokens)
        self._tick = tick
        self._scale = 1.0

    def begin(self, todo: Sequence[Pack]) -> None:
        # These packs are still to do.
        self._scale = max(self._left, 0.0) / max(sum(len(pack.tokens) for pack in todo), 1)

    def __call__(self, tokens: float) -> None:
        self._left -= tokens * self._scale
        self._tick(tokens * self._scale)

    def end(self) -> None:
        if self._left > 1e-6:
            self(self._left / self._scale if self._scale else 0.0)

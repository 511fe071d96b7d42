"""The pool of one: an engine in this process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from prefillcli.engines.base import PLAIN, Answer, Engine, LabelTokens, PoolUse, Treatment
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import packs_to_run

if TYPE_CHECKING:
    from prefillcli.jobs.loop import Asked


class LocalPool:
    """A `ScoringPool` that answers packs one after the other, in the order of their plans.

    `adjust_threads` is called often while something is computed. `answered` is called after each of the engine's
    answers, and when it fails.
    """

    ahead = 1

    def __init__(
        self, engine: Engine, adjust_threads: Callable[[], None], answered: Callable[[], None] = lambda: None
    ) -> None:
        self.engine = engine
        self.whole_packs = engine.whole_packs
        self._adjust_threads = adjust_threads
        self._answered = answered
        self._packs: deque[tuple[Pack, Asked]] = deque()

    @property
    def limits(self) -> Limits:
        """Those of the engine, which change when memory runs out."""
        return self.engine.limits

    @property
    def waiting(self) -> int:
        return len(self._packs)

    @property
    def idle(self) -> bool:
        return not self._packs

    def fit(self, longest: int) -> None:
        """One engine has no reason for packs smaller than its limits."""

    def ask(self, asked: Asked) -> None:
        """K,V that packs hold for others stay in the engine, so a plan's packs run in its order."""
        plan = asked.work.plan
        at_hand = {pack.block for pack in plan.given if pack.block is not None and self.engine.holds(pack.block)}
        packs = packs_to_run(plan, asked.work.done_prompts, at_hand)
        asked.planned(packs)
        self._packs += [(pack, asked) for pack in packs]

    def pump(self, seconds: float, phase: Callable[..., AbstractContextManager[None]]) -> None:
        """Answer the next pack, however long that takes."""
        pack, asked = self._packs.popleft()
        requests = asked.work.requests

        def tick(tokens: float) -> None:
            asked.advanced(pack, tokens)
            self._adjust_threads()

        self._adjust_threads()
        asked.begun(pack)
        # Tokens of a block are counted here, whether or not they are charged to a row of another pack.
        beside = len(pack.tokens) if pack.block is not None else -pack.charged_tokens
        answers = iter(
            self.engine.answer(
                pack, lambda i: asked.label_sets[requests[i].prompt.labels], tick, asked.work.treatment(pack)
            )
        )
        try:
            while True:
                with phase("model", waits=self.engine.waits):
                    found = next(answers, None)
                if found is None:
                    break
                self._answered()
                asked.answered(pack, found, beside)
                beside = 0
        finally:
            self._answered()
        asked.ended(pack)

    def ask_for_reports(self) -> None:
        """The engine can report at any time."""

    def used(self) -> PoolUse:
        """The work of the engine so far."""
        engine = self.engine
        return PoolUse(engine.weights_report(), engine.reduced(), engine.decoded())

    def answer_all(
        self,
        packs: Sequence[Pack],
        labels: Callable[[int], LabelTokens],
        tick: Callable[[float], None],
        treatment: Treatment = PLAIN,
    ) -> Iterator[list[Answer]]:
        """As `PlanEngine`."""
        return self.engine.answer_all(packs, labels, tick, treatment)

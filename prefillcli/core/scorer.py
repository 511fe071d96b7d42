"""A scorer: inputs, and the models at work on their prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.core.inputs import Inputs
from prefillcli.core.request import Request, Tick
from prefillcli.core.windows import MAX_ROWS
from prefillcli.engines.base import PlanEngine, PoolUse
from prefillcli.options.settings import JobSettings
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.plan.plan import Plan
from prefillcli.rows.input.selection import BATCH_ROWS
from prefillcli.rows.records import Prompt, Window

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DTYPES = "dtypes"
"""The entry of a plan with the number formats of the models, in which every attempt at a job computes."""
KEPT = (DTYPES, "keep", "keep_auto", "content_free", "exits", "heads")
"""The entries of a plan that stay when the models of a job are loaded again."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """The amounts of a job that are read, scored and written together."""

    batch_rows: int = BATCH_ROWS
    window_rows: int = MAX_ROWS
    flush_seconds: float = 10.0
    """Finished rows are written this long after the last ones, at the next answer of the engine. A job that is killed
    loses what it has computed since then: this, and the time of a pack (`PACK_SECONDS`)."""
    first_flush_seconds: float = 5.0
    """The same for the first rows of a run."""
    block_tokens: int = BLOCK_TOKENS
    """The fewest tokens of a prefix that is handed from one window to the next."""


USUAL = Granularity()


class Remote(Protocol):
    """Workers, and what they have loaded beside the model."""

    @property
    def settled(self) -> Mapping[str, Any]:
        """What was settled as they loaded the models."""

    def ask_beside(
        self, name: str, tasks: Sequence[tuple[Any, Plan]], took: Callable[[int, Any, Exception | None], None]
    ) -> None:
        """Ask what is loaded under this name. A task is an object with `answer(beside, tick)`, and the plan of what it
        computes. `took` gets the number of each task with its result, or with the reason why workers are lost on it.
        """


class ScoringPool(PlanEngine, Protocol):
    """Answers packs, and reports progress to the loop's `Asked`: an engine in this process, or workers."""

    ahead: int
    """The fewest packs that wait for an engine while there are more windows."""

    @property
    def remote(self) -> Remote | None:
        """The workers, where other processes have the models."""

    @property
    def waiting(self) -> int:
        """Packs that no engine has begun."""

    @property
    def idle(self) -> bool:
        """True if there is nothing to do."""

    def fit(self, longest: int) -> None:
        """Limit the packs that are planned next, of prompts with at most `longest` tokens."""

    def ask(self, asked: Any) -> None:
        """Answer the packs of a plan, after those that were asked for before."""

    def pump(self, seconds: float, phase: Callable[..., AbstractContextManager[None]]) -> object:
        """Compute until there is news; where other processes compute, wait at most `seconds` for them.

        The time goes to a `phase` (`Listener.phase`). Raises Interrupted after a signal.
        """

    def ask_for_reports(self) -> None:
        """Let workers report their work."""

    def used(self) -> PoolUse:
        """Return the work so far."""


class Ledger(Protocol):
    """The store of what a job has settled for all attempts at it, like the sizes of packs and what was learnt before
    the first window."""

    @property
    def settled(self) -> Mapping[str, Any]:
        """What is settled so far; empty at first."""

    def settle(self, settled: Mapping[str, Any]) -> None:
        """Store this instead of what was settled before."""


class LedgerInMemory:
    """A `Ledger` that ends with the process."""

    def __init__(self, settled: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.settled = settled

    def settle(self, settled: Mapping[str, Any]) -> None:
        self.settled = settled


def settle_models(models: LoadedModels, ledger: Ledger) -> None:
    """Store what the models that are loaded now have settled, with the entries of `KEPT` from before."""
    ledger.settle({**models.settled, **{name: value for name, value in ledger.settled.items() if name in KEPT}})


@dataclass(frozen=True)
class LoadedModels:
    """Models at work, here or in workers. `scoring/scorer.py` loads them. Close them."""

    pool: ScoringPool
    """Answers packs."""
    settled: Mapping[str, Any]
    """What another attempt at the job needs to load the same."""
    close: Callable[[], None]
    beside: Mapping[str, Any] = field(default_factory=dict)
    """The things loaded beside the model in this process: `draft`, `first`."""
    pack_seconds: float = 0.0
    """The fewest seconds of a pack: those of reading the weights for it."""


@dataclass(frozen=True)
class ModelScorer:
    """Models at work on the prompts of `inputs`. `scoring/loop.py` is their loop."""

    inputs: Inputs
    models: LoadedModels
    ledger: Ledger
    read: Callable[..., tuple[list[Request], int]] | None = None
    """Decides how prompts are read, where that is not in full: see `requests`."""

    @property
    def pool(self) -> ScoringPool:
        """Answers packs."""
        return self.models.pool

    @property
    def settings(self) -> JobSettings:
        """The settings of the command."""
        return self.inputs.settings

    def requests(
        self, prompts: Sequence[Prompt], tick: Tick, *, window: Window | None = None, done: Collection[int] = ()
    ) -> tuple[list[Request], int]:
        """Return how the model reads prompts that are planned together, and the tokens that another model has computed
        to decide that. The prompts may be those of a `window`, of which some rows are `done`."""
        if self.read is not None:
            return self.read(self, prompts, tick, window, done)
        return [Request(prompt) for prompt in prompts], 0

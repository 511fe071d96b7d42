"""A scorer: inputs, and the models at work on their prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from prefillcli.core.inputs import Inputs
from prefillcli.core.request import Request, Tick
from prefillcli.core.windows import MAX_ROWS
from prefillcli.engines.base import REDUCED, Engine, PlanEngine, PoolUse
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.plan.plan import Plan
from prefillcli.rows.input.selection import BATCH_ROWS
from prefillcli.rows.records import Prompt, Window

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

DTYPES = "dtypes"
"""The entry of a plan with the number formats of the models, in which every attempt at a job computes."""
KEPT = (DTYPES, "keep", "keep_auto", "content_free", "exits")
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
    def plan(self) -> Mapping[str, Any]:
        """The plan with which they loaded the models."""

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


class Plans(Protocol):
    """The store of a job's plan, which all attempts at the job share."""

    plan: dict[str, Any]


class _Plans:
    """A plan that ends with the process."""

    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}


class ModelScorer:
    """Models at work on the prompts of `inputs`. `scoring/loading.py` loads them, `scoring/loop.py` is their loop.

    Close `loaded` and the builder of the inputs.
    """

    pool: ScoringPool
    """Answers packs."""
    beside: Mapping[str, Any] = MappingProxyType({})
    """The things loaded beside the model in this process: `draft`, `first`."""
    pack_seconds = 0.0
    """The fewest seconds of a pack: those of reading the weights for it."""

    def __init__(self, inputs: Inputs, granularity: Granularity = USUAL) -> None:
        self.inputs = inputs
        self.granularity = granularity
        self.loaded = ExitStack()
        """Resources to close when all rows are scored, including the models."""
        self.plans: Plans = _Plans()
        self.earlier: Mapping[str, Any] = {}
        """The plan of an earlier attempt, or of the rows before."""
        self.read: Callable[..., tuple[list[Request], int]] | None = None
        """Decides how prompts are read, where that is not in full: see `requests`."""

    @property
    def settings(self) -> Any:
        """The settings of the command."""
        return self.inputs.settings

    @property
    def plan(self) -> Mapping[str, Any]:
        """Everything that attempts at a job must share, like the sizes of packs and findings from before the first
        window."""
        return self.plans.plan

    @plan.setter
    def plan(self, plan: Mapping[str, Any]) -> None:
        self.plans.plan = dict(plan)

    @property
    def engine(self) -> Engine | None:
        """The engine, if it is loaded in this process."""
        return getattr(getattr(self, "pool", None), "engine", None)

    def take_plan(self, plan: Mapping[str, Any]) -> None:
        """Take the plan of models that are loaded now, and keep the entries of `KEPT`."""
        self.earlier = self.plan
        self.plan = {**plan, **{name: value for name, value in self.plan.items() if name in KEPT}}

    def note_memory(self) -> None:
        """Keep in the plan the sizes that the engine fell back to when memory ran out, so that no other attempt runs
        out in the same way."""
        found = None if self.engine is None else self.engine.reduced()
        if found is not None and self.plan.get(REDUCED) != asdict(found):
            self.plan = {**self.plan, REDUCED: asdict(found)}

    def use_models_of(self, other: ModelScorer) -> None:
        """Score with the loaded models of another scorer, and with its plan."""
        self.pool, self.beside, self.plan, self.earlier = other.pool, other.beside, other.plan, other.earlier

    def requests(
        self, prompts: Sequence[Prompt], tick: Tick, *, window: Window | None = None, done: Collection[int] = ()
    ) -> tuple[list[Request], int]:
        """Return how the model reads prompts that are planned together, and the tokens that another model has computed
        to decide that. The prompts may be those of a `window`, of which some rows are `done`."""
        if self.read is not None:
            return self.read(self, prompts, tick, window, done)
        return [Request(prompt) for prompt in prompts], 0

    def adjust_threads(self) -> None:
        """Compute with as many threads as this machine has cores free."""
        threads = self.inputs.opened.threads
        if threads is not None:
            threads.adjust()

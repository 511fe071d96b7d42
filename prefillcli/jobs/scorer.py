"""A scorer: the models, the prompts and the features of a job, opened once. Rows in, scored rows out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature
from prefillcli.core.further import Condition, FurtherQuestions, condition_of
from prefillcli.core.question import AuditDraw, Question, Tick
from prefillcli.data.rows import Prompt, Window
from prefillcli.data.windows import Prefetcher, ShardRows, WindowSize
from prefillcli.engines.base import REDUCED, Engine
from prefillcli.jobs.load import load_models
from prefillcli.jobs.loop import USUAL as USUAL
from prefillcli.jobs.loop import Granularity as Granularity
from prefillcli.jobs.loop import LocalPool, Receiver, ScoringLoop, ScoringOptions
from prefillcli.jobs.opening import Opening, require_label_uses
from prefillcli.jobs.path_table import refuse_unlike_partitions
from prefillcli.options.commands import ScoreSettings

if TYPE_CHECKING:  # these take torch along
    from prefillcli.forecast.profile import Profile
    from prefillcli.jobs.runners.pool import Pool
    from prefillcli.runtime.signals import Stop


DTYPES = "dtypes"
"""The entry of a plan with the number formats of the models, in which every attempt at a job computes."""


class Scorer(Opening):
    """An `Opening` whose models are loaded: in this process, or in workers of its own.

    Close `loaded` and the builder.
    """

    pool: LocalPool | Pool
    """Answers packs."""
    beside: Mapping[type[Feature], Any] = MappingProxyType({})
    """The models and tables that features have loaded in this process: see `Feature.load`."""
    pack_seconds = 0.0
    """The fewest seconds of a pack: those of reading the weights for it."""
    plan: Mapping[str, Any] = MappingProxyType({})
    """Everything that attempts at a job must share, like the sizes of packs and findings from before the first
    window."""

    condition: Condition | None
    """The scored rows with further questions; None: all."""

    settings: ScoreSettings

    def __init__(self, settings: ScoreSettings, granularity: Granularity = USUAL) -> None:
        super().__init__(settings, (settings.id_column, *filter(None, settings.keep_columns)))
        self.granularity = granularity
        self.loaded = ExitStack()
        """Resources to close when all rows are scored, including the models."""
        self.earlier: Mapping[str, Any] = {}
        """The plan of an earlier attempt, or of the rows before."""

    @property
    def carried(self) -> list[str]:
        keys = self.source.partition_keys if self.settings.partition and hasattr(self, "source") else ()
        return list(dict.fromkeys((*super().carried, *keys)))

    def open_source(self) -> None:
        super().open_source()
        refuse_unlike_partitions(self.settings, self.source.partition_keys)
        for each in self.features:
            each.columns_known(self.source.available)

    def open_rows(self) -> None:
        super().open_rows()
        self.condition = condition_of(self.features, self.schema())

    def labels_known(self) -> None:
        require_label_uses(self)
        super().labels_known()
        if hasattr(self, "source"):
            self.schema().require_distinct()

    def windows(self, cancel: Callable[[], None] | None = None, **choice: Any) -> Prefetcher[Window]:
        """As in every `Opening`, but with the rows of the shard alone."""
        shard = self.settings.shard_of
        choice |= {
            "size": WindowSize(self.granularity.window_rows, batch_rows=self.granularity.batch_rows),
            "only": None if shard is None else ShardRows(shard, self.builder),
        }
        return super().windows(cancel, **choice)

    @property
    def engine(self) -> Engine | None:
        """The engine, if it is loaded in this process."""
        return getattr(getattr(self, "pool", None), "engine", None)

    def load(self, *, profile: Profile | None = None, share: float = 1.0) -> None:
        """Load the models in this process. `profile` and `share` as in `LoadRequest`. Raises as `load_models`."""
        settings, opened, before = self.settings, self.opened, self.plan
        models = load_models(
            opened,
            settings,
            before=before,
            measured=profile,
            share=share,
            names=self.labels.names,
        )
        self.loaded.callback(models.close)
        self.pool = LocalPool(models.engine, self.adjust_threads, self._note_memory)
        self.beside, self.pack_seconds = models.beside, models.pack_seconds
        self._take_plan(models.plan)

    def start_workers(self, stop: Stop, digests: Mapping[str, str], profile: Profile | None = None) -> None:
        """Have workers load the models. `digests` are those of the models' contents. Raises as `start_pool`."""
        from prefillcli.jobs.runners.parallel import start_pool

        settings, opened, before = self.settings, self.opened, self.plan
        pool = start_pool(settings, opened, stop, before=before, profile=profile, digests=digests)
        self.loaded.callback(pool.close)
        self.pool = pool
        self._take_plan(pool.plan)

    def _take_plan(self, plan: Mapping[str, Any]) -> None:
        self.earlier = self.plan
        kept = {DTYPES, *(name for each in self.features for name in each.plan_keys)}
        self.plan = {**plan, **{name: value for name, value in self.plan.items() if name in kept}}

    def _note_memory(self) -> None:
        """Keep in the plan the sizes to which the engine went down when memory ran out, so that no other attempt runs
        out of it the same way."""
        found = None if self.engine is None else self.engine.reduced()
        if found is not None and self.plan.get(REDUCED) != asdict(found):
            self.plan = {**self.plan, REDUCED: asdict(found)}

    def learn(self, tick: Callable[[float], None]) -> None:
        """Let the features learn from answers of the models, before the first window."""
        before = self.earlier
        for each in self.features:
            learnt = each.learn(self, self.pool, before, tick)  # features may change the plan themselves
            self.plan = {**self.plan, **learnt}
        self.earlier = self.plan

    @property
    def known_rows(self) -> set[int]:
        """Numbers of the rows that are scored before the first window, to learn from them."""
        return {row for each in self.features for row in each.known()}

    def use_models_of(self, other: Scorer) -> None:
        """Score with the loaded models of another scorer, and with its plan."""
        self.use_models(other.opened, other.labels)
        self._said = other._said
        self.pool, self.beside, self.plan, self.earlier = other.pool, other.beside, other.plan, other.earlier

    def questions(
        self, prompts: Sequence[Prompt], tick: Tick, *, window: Window | None = None, done: Collection[int] = ()
    ) -> tuple[list[Question], int]:
        """Return how the model reads prompts that are planned together, and the tokens that another model has computed
        to decide that. The prompts may be those of a `window`, of which some rows are `done`."""
        for each in self.features:
            if each.rewrites:
                return each.questions(self, prompts, tick, window, done)
        return [Question(prompt) for prompt in prompts], 0

    def score(
        self,
        windows: Iterator[Window],
        receiver: Receiver,
        *,
        ready: Callable[[], bool] = lambda: True,
        chosen: Callable[[], int] = lambda: 0,
        written: Callable[[int], None] = lambda window: None,
    ) -> None:
        """Score windows, and give their rows to a receiver.

        `ready` tells whether the next window is available at once. `chosen` counts the rows with further questions
        that are written so far. `written` as in `ScoringLoop`. Raises ResourceError if the models cannot go on.
        """
        rewritten = any(each.rewrites for each in self.features)
        further = FurtherQuestions.of(self, chosen)
        options = ScoringOptions(
            schedule=self.settings.schedule,
            block_tokens=0 if rewritten else self.granularity.block_tokens,
            questions=self.questions if rewritten else None,
            audit=None
            if not self.settings.audit
            else AuditDraw(self.settings.audit, self.source.selection(), self.source.count()),
            features=self.features,
            further=further,
            adjust_threads=self.adjust_threads,
        )
        try:
            ScoringLoop(self.pool, options, receiver, written).score(windows, ready)
        finally:
            if further is not None:
                further.close()

    def adjust_threads(self) -> None:
        """Compute with as many threads as this machine has cores free."""
        threads = self.opened.threads
        if threads is not None:
            threads.adjust()

"""Loading the models of a scorer, letting its parts learn from their answers, and scoring windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prefillcli.core.further import FurtherQuestions
from prefillcli.core.inputs import Inputs
from prefillcli.core.request import AuditDraw
from prefillcli.core.scorer import USUAL, Granularity, ModelScorer
from prefillcli.rows.records import Window
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.loading import load_models
from prefillcli.scoring.loop import LocalPool, Receiver, ScoringLoop, ScoringOptions

if TYPE_CHECKING:  # these take torch along
    from prefillcli.forecast.profile import Profile
    from prefillcli.runtime.signals import Stop


def make_scorer(inputs: Inputs, parts: Parts, granularity: Granularity = USUAL) -> ModelScorer:
    """Make a scorer of these inputs, which reads prompts as the parts define. Its models are not loaded."""
    scorer = ModelScorer(inputs, granularity)
    if parts.compression is not None:
        scorer.read = parts.compression.requests
    return scorer


def load_here(scorer: ModelScorer, *, profile: Profile | None = None, share: float = 1.0) -> None:
    """Load the models in this process. `profile` and `share` as in `LoadRequest`. Raises as `load_models`."""
    inputs = scorer.inputs
    models = load_models(
        inputs.opened,
        inputs.settings,
        before=scorer.plan,
        measured=profile,
        share=share,
        names=inputs.labels.names,
    )
    scorer.loaded.callback(models.close)
    scorer.pool = LocalPool(models.engine, scorer.adjust_threads, scorer.note_memory)
    scorer.beside, scorer.pack_seconds = models.beside, models.pack_seconds
    scorer.take_plan(models.plan)


def start_workers(scorer: ModelScorer, stop: Stop, digests: Mapping[str, str], profile: Profile | None = None) -> None:
    """Have workers load the models. `digests` are those of the models' contents. Raises as `start_pool`."""
    from prefillcli.scoring.runners.parallel import start_pool

    inputs = scorer.inputs
    pool = start_pool(inputs.settings, inputs.opened, stop, before=scorer.plan, profile=profile, digests=digests)
    scorer.loaded.callback(pool.close)
    scorer.pool = pool
    scorer.take_plan(pool.plan)


def score(
    scorer: ModelScorer,
    parts: Parts,
    windows: Iterator[Window],
    receiver: Receiver,
    *,
    ready: Callable[[], bool] = lambda: True,
    chosen: Callable[[], int] = lambda: 0,
    written: Callable[[int], None] = lambda window: None,
) -> None:
    """Score windows, and give their rows to a receiver.

    `ready` returns whether the next window is available at once. `chosen` counts the rows with further questions that
    are written so far. `written` as in `ScoringLoop`. Raises ResourceError if the models cannot go on.
    """
    inputs, rewritten = scorer.inputs, scorer.read is not None
    further = further_questions(inputs, parts, chosen)
    audit = inputs.settings.flips.audit
    options = ScoringOptions(
        block_tokens=0 if rewritten else scorer.granularity.block_tokens,
        questions=scorer.requests if rewritten else None,
        audit=AuditDraw(audit, inputs.source.selection(), inputs.source.count()) if audit else None,
        exits=parts.exits,
        further=further,
        adjust_threads=scorer.adjust_threads,
    )
    try:
        ScoringLoop(scorer.pool, options, receiver, written).score(windows, ready)
    finally:
        if further is not None:
            further.close()


def further_questions(inputs: Inputs, parts: Parts, chosen: Callable[[], int] = lambda: 0) -> FurtherQuestions | None:
    """Return the questions of a job about scored rows; None if it has none. Raises UsageError."""
    schema = inputs.schema()
    return FurtherQuestions.of(inputs, schema, parts.condition(schema), parts.follow_ups, chosen)

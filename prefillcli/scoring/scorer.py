"""Loading the models of a scorer, letting its parts learn from their answers, and scoring windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from prefillcli.core.further import FurtherQuestions
from prefillcli.core.inputs import Inputs
from prefillcli.core.request import AuditDraw
from prefillcli.core.scorer import Ledger, LedgerInMemory, LoadedModels, ModelScorer
from prefillcli.engines.base import REDUCED, Engine
from prefillcli.options.settings import JobSettings
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.rows.records import Window
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.loading import load_models
from prefillcli.scoring.loop import LocalPool, Receiver, ScoringLoop, ScoringOptions

if TYPE_CHECKING:  # these take torch along
    from prefillcli.forecast.profile import Profile
    from prefillcli.models.open import Opened
    from prefillcli.prompts.labels import Labels
    from prefillcli.runtime.signals import Stop


def make_scorer(inputs: Inputs, parts: Parts, models: LoadedModels, ledger: Ledger | None = None) -> ModelScorer:
    """Make a scorer of these inputs, which reads prompts as the parts define. By default its ledger is the models'
    own, and ends with the process. Raises NotImplementedError for a reading that neither it nor the loop asks."""
    for each in parts.readings:
        if each not in (parts.compression, parts.exits, parts.heads):
            raise NotImplementedError(
                f"{type(each).__name__}: nothing asks it how prompts are read, so they would be read in full\n"
                "call it in make_scorer, or in the loop over windows"
            )
    read = None if parts.compression is None else parts.compression.requests
    if parts.heads is not None:
        read = parts.heads.reading(read)
    return ModelScorer(inputs, models, ledger or LedgerInMemory(models.settled), read)


def load_here(
    opened: Opened,
    settings: JobSettings,
    labels: Labels,
    ledger: Ledger | None = None,
    *,
    profile: Profile | None = None,
    share: float = 1.0,
) -> LoadedModels:
    """Load the models in this process. `ledger` has what an earlier attempt has settled; `profile` and `share` as in
    `LoadRequest`. Raises as `load_models`."""
    kept = ledger or LedgerInMemory()
    models = load_models(opened, settings, before=kept.settled, measured=profile, share=share, names=labels.names)
    pool = LocalPool(models.engine, adjusting(opened), partial(_save_reduced, models.engine, kept))
    return LoadedModels(pool, models.settled, models.close, models.beside, models.pack_seconds)


def start_workers(
    inputs: Inputs, ledger: Ledger, stop: Stop, digests: Mapping[str, str], profile: Profile | None = None
) -> LoadedModels:
    """Have workers load the models. `digests` are those of the models' contents. Raises as `start_pool`."""
    from prefillcli.scoring.runners.parallel import start_pool

    pool = start_pool(inputs.settings, inputs.opened, stop, before=ledger.settled, profile=profile, digests=digests)
    return LoadedModels(pool, pool.settled, pool.close)


def adjusting(opened: Opened) -> Callable[[], None]:
    """Return what lets these models compute with as many threads as this machine has cores free."""
    return (lambda: None) if opened.threads is None else opened.threads.adjust


def _save_reduced(engine: Engine, ledger: Ledger) -> None:
    # Save in the ledger the sizes that the engine fell back to when memory ran out, so that no other attempt runs out
    # in the same way.
    found = engine.reduced()
    if found is not None and ledger.settled.get(REDUCED) != asdict(found):
        ledger.settle({**ledger.settled, REDUCED: asdict(found)})


def score(
    scorer: ModelScorer,
    parts: Parts,
    windows: Iterator[Window],
    receiver: Receiver,
    *,
    block_tokens: int = BLOCK_TOKENS,
    ready: Callable[[], bool] = lambda: True,
    chosen: Callable[[], int] = lambda: 0,
    written: Callable[[int], None] = lambda window: None,
) -> None:
    """Score windows, and give their rows to a receiver.

    `block_tokens` as in `Granularity`. `ready` returns whether the next window is available at once. `chosen` counts
    the rows with further questions that are written so far. `written` as in `ScoringLoop`. Raises ResourceError if the
    models cannot go on.
    """
    inputs, rewritten = scorer.inputs, parts.compression is not None
    further = further_questions(inputs, parts, chosen)
    audit = inputs.settings.flips.audit
    options = ScoringOptions(
        block_tokens=0 if rewritten else block_tokens,
        requests=scorer.requests if scorer.read is not None else None,
        audit=AuditDraw(audit, inputs.source.selection(), inputs.source.count()) if audit else None,
        leaving=parts.exits or parts.heads,
        further=further,
        adjust_threads=adjusting(inputs.opened),
    )
    try:
        ScoringLoop(scorer.pool, options, receiver, written).score(windows, ready)
    finally:
        if further is not None:
            further.close()


def further_questions(inputs: Inputs, parts: Parts, chosen: Callable[[], int] = lambda: 0) -> FurtherQuestions | None:
    """Return the questions of a job about scored rows; None if it has none. Raises UsageError."""
    condition = parts.condition(inputs.schema)
    return FurtherQuestions.of(inputs, condition, parts.follow_ups, parts.probabilities, chosen)

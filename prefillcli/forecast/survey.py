"""What an input looks like, and what scoring it will take, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from prefillcli.compress.settings import Compression
from prefillcli.data.dealing import ShardRows
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.reading.selection import BATCH_ROWS
from prefillcli.data.reading.source import Source
from prefillcli.data.windows import MAX_ROWS, Prefetcher, windows
from prefillcli.forecast.alternatives import Alternatives
from prefillcli.forecast.input_statistics import InputStatistics, lengths_of
from prefillcli.forecast.profile import Profile
from prefillcli.models.open import Opened, answer_labels
from prefillcli.options.groups import ScheduledOptions
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.report.survey import (
    Survey,
    SurveySeconds,
)
from prefillcli.runtime.clock import Clock

if TYPE_CHECKING:  # takes torch along
    from prefillcli.models.law import TextsOf


def survey(
    settings: ScheduledOptions,
    opened: Opened,
    source: Source,
    builder: PromptBuilder,
    compression: Compression,
    *,
    free: int | None,
    id_column: str | None = None,
    batch_rows: int = BATCH_ROWS,
    window_rows: int = MAX_ROWS,
    block_tokens: int = BLOCK_TOKENS,
    profile: Profile | None = None,
    price_per_hour: float | None = None,
    only: ShardRows | None = None,
    text_tokens: int = 0,
    texts_of: TextsOf = "all",
    tick: Callable[[int, int], None] = lambda rows, tokens: None,
) -> Survey:
    """Read the rows of `source`, make prompts of them with the `builder`, and plan them as a job with these `settings`
    would.

    `free` bytes are what the loaded weights will leave, where `--memory` does not say what may be used. `profile`
    sizes packs and predicts their time, as in the job. `window_rows` and `block_tokens` are the job's, and `only` are
    the rows of its shard. `text_tokens` and
    `texts_of` are as in `plan_packs`. `tick` is called with the rows and prompt tokens of each window, and may raise.
    Raises what the job raises before it loads weights.
    """
    labels = answer_labels(opened, settings)
    plans = Alternatives(
        settings,
        opened,
        compression,
        free=free,
        profile=profile,
        block_tokens=block_tokens,
        text_tokens=text_tokens,
        texts_of=texts_of,
    )
    found = InputStatistics()
    clock = Clock()
    cut = windows(source, builder, labels, id_column=id_column, max_rows=window_rows, batch_rows=batch_rows, only=only)
    with Prefetcher(cut, cancel=builder.close) as coming:
        for number, window in enumerate(coming):
            if number == 0:
                labels.check(window)
            with clock.phase("plan"):
                found.add(window)
                plans.add(window.prompts)
            tick(len(window.rows), sum(len(prompt.tokens) for prompt in window.prompts))
    if price_per_hour is not None:
        plans.price(price_per_hour)
    return _survey_of(found, plans, source, builder, clock)


def _survey_of(
    found: InputStatistics, plans: Alternatives, source: Source, builder: PromptBuilder, clock: Clock
) -> Survey:
    """What was found, once all windows are planned."""
    return Survey(
        rows=found.rows(plans.errors),
        prompt_tokens=found.tokens,
        lengths=lengths_of(found.lengths) if found.lengths else None,
        duplicates=found.duplicates(),
        sharing=found.sharing(given=plans.given_tokens),
        limits=plans.limits,
        plans=plans.plans,
        keeps=plans.keeps,
        texts=plans.texts,
        seconds=SurveySeconds(
            read=source.seconds,
            render=builder.render_seconds,
            tokenize=builder.tokenize_seconds,
            plan=clock.seconds["plan"],
        ),
    )

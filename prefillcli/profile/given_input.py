"""What `prefill profile` makes of INPUT."""

from __future__ import annotations

from dataclasses import dataclass

from prefillcli.data.reading.source import Source
from prefillcli.data.windows import windows
from prefillcli.forecast.profile import Profile
from prefillcli.forecast.survey import survey
from prefillcli.jobs.inputs import open_source, prompt_builder
from prefillcli.jobs.load import compression_of
from prefillcli.models.open import Opened, answer_labels, open_models
from prefillcli.options.profile import ProfileSettings
from prefillcli.report.survey import Survey
from prefillcli.runtime.progress import Progress


@dataclass(frozen=True, slots=True)
class Input:
    """The rows, and the model whose prompts they become."""

    source: Source
    opened: Opened


def open_input(settings: ProfileSettings) -> Input:
    """Open INPUT and make prompts of its first rows, so that errors in it are found before the measurements.

    Raises what a survey would raise for columns, template and labels.
    """
    source = open_source(settings, ())
    opened = open_models(settings)
    builder = prompt_builder(settings, opened, source, ())
    labels = answer_labels(opened, settings)
    first = next(windows(source, builder, labels, id_column=None, max_rows=1), None)
    if first is not None:
        labels.check(first)
    return Input(source, opened)


def survey_input(settings: ProfileSettings, given: Input, profile: Profile) -> Survey:
    """Survey the rows, with times by the fresh `profile` and in the budget that it found. Raises as `survey` does."""
    from prefillcli.models.law import FREE_SHARE
    from prefillcli.models.weights import weight_bytes

    source, opened = given.source, given.opened
    free = None
    if settings.memory is None:
        draft = weight_bytes(opened.draft, opened.device) if opened.draft is not None else 0
        free = max(round(profile.budget_bytes / FREE_SHARE) - draft, 0)
    with Progress(source.selected_rows, interval=settings.progress_interval, quiet=settings.quiet) as progress:
        return survey(
            settings,
            opened,
            source,
            prompt_builder(settings, opened, source, ()),
            compression_of(settings),
            free=free,
            profile=profile if profile.completion is not None else None,
            price_per_hour=settings.price_per_hour,
            tick=progress.advance,
        )

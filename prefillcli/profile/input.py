"""What `prefill profile` makes of INPUT."""

from __future__ import annotations

from prefillcli.data.labels import Labels, parse_labels
from prefillcli.data.source import Source
from prefillcli.data.windows import windows
from prefillcli.inputs import prompt_builder
from prefillcli.loading import Opened
from prefillcli.profile.store import Profile
from prefillcli.progress import Progress
from prefillcli.report.survey import Survey
from prefillcli.settings import ProfileSettings
from prefillcli.survey import survey


def check_rows(settings: ProfileSettings, opened: Opened, source: Source) -> None:
    """Make prompts of the first rows, so that what is wrong with columns, template or labels is told at once.

    Raises what the survey would raise for it.
    """
    builder = prompt_builder(settings, opened, source, ())
    labels = Labels(opened.tokenizer, parse_labels(settings.labels))
    first = next(windows(source, builder, labels, id_column=None, max_rows=1), None)
    if first is not None:
        labels.check(first)


def survey_rows(settings: ProfileSettings, opened: Opened, source: Source, profile: Profile) -> Survey:
    """Survey the rows, with times by the fresh `profile` and in the budget that it found. Raises as `survey` does."""
    from prefillcli.prefill.memory import FREE_SHARE
    from prefillcli.prefill.weights import weight_bytes

    free = None
    if settings.memory is None:
        draft = weight_bytes(opened.draft, opened.device) if opened.draft is not None else 0
        free = max(round(profile.budget_bytes / FREE_SHARE) - draft, 0)
    with Progress(source.selected_rows, interval=settings.progress_interval, quiet=settings.quiet) as progress:
        return survey(
            settings,
            opened,
            source,
            free=free,
            predict=profile.seconds,
            price_per_hour=settings.price_per_hour,
            tick=progress.advance,
        )

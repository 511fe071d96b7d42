"""The commands that take options."""

from __future__ import annotations

from prefillcli.core.feature import features, option_groups
from prefillcli.options.bench import BenchSettings
from prefillcli.options.groups import BudgetOptions, EndingOptions, LogOptions, ModelOptions
from prefillcli.options.inspect import InspectSettings
from prefillcli.options.option import MODEL, RUN, Settings, argument, option
from prefillcli.options.profile import ProfileSettings
from prefillcli.options.score import ScoreSettings

# Everything `prefill doctor` can be told.


class DoctorSettings(BudgetOptions, ModelOptions):
    """Everything `prefill doctor` can be told."""

    model: str | None = option(
        None,
        "Also say what a run would do with this model: a directory, a GGUF file or a hub name.",
        MODEL, changes="scores", short="-m", metavar="MODEL", path="model",
    )  # fmt: skip
    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")


# Everything `prefill merge` can be told.


class MergeSettings(
    *option_groups("merge"),  # type: ignore[misc]  # which features there are is known when it runs
    EndingOptions,
    LogOptions,
):
    """Everything `prefill merge` can be told."""

    output: str = argument(
        ...,
        "The --output that the shards were given: their folders lie beside it.",
        changes="files",
        path="output",
        min_length=1,
    )
    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")


COMMANDS: dict[str, type[Settings]] = {
    "score": ScoreSettings,
    "profile": ProfileSettings,
    "bench": BenchSettings,
    "inspect": InspectSettings,
    "merge": MergeSettings,
    "doctor": DoctorSettings,
    **{name: each.settings for feature in features() for name, each in feature.commands.items()},
}
"""The commands that take options, by name."""

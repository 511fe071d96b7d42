"""Everything `prefill doctor` can be told."""

from __future__ import annotations

from prefillcli.options.groups import BudgetOptions, ModelOptions
from prefillcli.options.option import MODEL, RUN, option


class DoctorSettings(BudgetOptions, ModelOptions):
    """Everything `prefill doctor` can be told."""

    model: str | None = option(
        None,
        "Also say what a run would do with this model: a directory, a GGUF file or a hub name.",
        MODEL, changes="scores", short="-m", metavar="MODEL", path="model",
    )  # fmt: skip
    quiet: bool = option(False, "Warnings and errors only.", RUN, changes="report", short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN, changes="report")

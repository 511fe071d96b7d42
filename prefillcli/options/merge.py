"""Everything `prefill merge` can be told."""

from __future__ import annotations

from prefillcli.options.gates import GateOptions
from prefillcli.options.groups import EndingOptions, LogOptions
from prefillcli.options.option import RUN, argument, option


class MergeSettings(EndingOptions, GateOptions, LogOptions):
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

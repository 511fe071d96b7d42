"""Everything `prefill inspect` can be told."""

from __future__ import annotations

from prefillcli.errors import UsageError
from prefillcli.options.groups import JobOptions, RunOptions, check_keep
from prefillcli.options.option import COMPRESSION, FILES, option
from prefillcli.options.values import Rate


class InspectSettings(RunOptions, JobOptions):
    """Everything `prefill inspect` can be told."""

    keep: Rate = option(
        1.0,
        "Share of the prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION,
        changes="scores",
        metavar="RATE",
    )
    row: str | None = option(
        None, "Id of the row (with --id-column), else its number, from 0.", FILES, changes="rows", metavar="ID"
    )
    id_column: str | None = option(
        None, "Column that names a row. (default: the row number)", FILES, changes="columns", metavar="NAME"
    )
    html: str | None = option(None, "Write a page to this file as well.", FILES, changes="files", metavar="PATH")

    def check(self) -> None:
        super().check()
        if self.row is None:
            raise UsageError("no --row given: name the row to look at, by its number or its --id-column")
        if self.keep == "auto":
            raise UsageError("--keep auto is for a whole job; give the rate to look at")
        check_keep(self.keep, self.draft)

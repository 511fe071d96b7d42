"""Everything `prefill inspect` can be told."""

from __future__ import annotations

from prefillcli.core.feature import features_of, option_groups
from prefillcli.errors import UsageError
from prefillcli.options.compression import check_keep
from prefillcli.options.groups import AdapterOptions, JobOptions, RunOptions, WeightsOptions
from prefillcli.options.option import COMPRESSION, FILES, option
from prefillcli.options.rationale import WritingOptions, check_writing
from prefillcli.options.values import KeepRate


class InspectSettings(
    *option_groups("inspect"),  # type: ignore[misc]  # which features there are is known when it runs
    WritingOptions,
    RunOptions,
    WeightsOptions,
    AdapterOptions,
    JobOptions,
):
    """Everything `prefill inspect` can be told."""

    keep: KeepRate = option(
        1.0,
        "Share of the prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip
    row: str | None = option(
        None, "Id of the row with --id-column, else its number from 0.", FILES, changes="rows", metavar="ID"
    )
    id_column: str | None = option(
        None, "Column that names a row. (default: the row number)", FILES, changes="columns", metavar="NAME"
    )
    html: str | None = option(
        None, "Also write an HTML page to this file.", FILES, changes="files", metavar="PATH", path="page"
    )

    def check(self) -> None:
        super().check()
        if self.row is None:
            raise UsageError("no --row given: name the row to show, by its number, or by its id with --id-column")
        if self.keep == "auto":
            raise UsageError("--keep auto is for a whole job: give a rate")
        check_keep(self.keep, compresses=self.compresses)
        self.check_adapters(streamed=self.weights == "stream")
        for each in features_of(self):
            each.check()
        check_writing(self, head=self.head, draft=self.draft, own_tokenizer=self.draft_tokenizer == "translate")

"""Everything `prefill inspect` can be told."""

from __future__ import annotations

from prefillcli.errors import UsageError
from prefillcli.options.compression import check_keep
from prefillcli.options.groups import AdapterOptions, JobOptions, RunOptions, WeightsOptions
from prefillcli.options.option import COMPRESSION, EARLY_EXIT, FILES, option
from prefillcli.options.rationale import WritingOptions, check_writing
from prefillcli.options.values import KeepRate


class InspectSettings(WritingOptions, RunOptions, WeightsOptions, AdapterOptions, JobOptions):
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
    exit_profile: str | None = option(
        None,
        "What a job has learnt about early exits (its OUTPUT.exit.json): show where the row would leave.",
        EARLY_EXIT, changes="files", metavar="FILE", path="file",
    )  # fmt: skip
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
        self.check_adapters(streamed=self.weights == "stream", exits=False, content_free=False)
        check_writing(self, head=self.head, draft=self.draft, own_tokenizer=self.draft_tokenizer == "translate")
        if self.adapter and self.exit_profile is not None:
            raise UsageError("--exit-profile: it does not say which adapters it is of\nleave it or --adapter out")

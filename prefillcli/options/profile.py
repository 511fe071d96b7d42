"""Everything `prefill profile` can be told."""

from __future__ import annotations

from typing import Any

from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.compression import CompressionOptions, check_keep
from prefillcli.options.groups import (
    InputOptions,
    MeasuringOptions,
    MemoryOptions,
    PriceOptions,
    PromptOptions,
    ScheduledOptions,
)
from prefillcli.options.option import COMPRESSION, FILES, PROFILE, argument, option, require
from prefillcli.options.requirements import Requirement
from prefillcli.options.values import KeepRate, NameList


class ProfileSettings(PriceOptions, MeasuringOptions, ScheduledOptions):
    """Everything `prefill profile` can be told."""

    inputs: tuple[str, ...] = argument(
        (),
        "Parquet or JSONL: files, directories, globs or URLs. Shows what is in it and what scoring it takes.",
        changes="scores", path="rows",
    )  # fmt: skip
    full: bool = option(
        False,
        "All modes, longer measurements: tens of minutes; hours for a large model.",
        PROFILE, changes="report",
    )  # fmt: skip
    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip
    mode: NameList = option(
        (),
        "Mode to find the longest prompt of: full, chunked or hybrid; repeatable. (default: full and hybrid, with "
        "--full all)",
        PROFILE, changes="report", metavar="NAME", repeatable=True,
    )  # fmt: skip
    confirm_seconds: float | None = option(
        None,
        "Longest run, as estimated, that may confirm a length; 0: confirm none. (default: 20, with --full 120)",
        PROFILE, changes="report", metavar="SECONDS", ge=0, allow_inf_nan=False,
    )  # fmt: skip
    fit_seconds: float | None = option(
        None,
        "Approximate time for the runs that completion times are fitted to. (default: 10, with --full 60)",
        PROFILE, changes="report", metavar="SECONDS", gt=0, allow_inf_nan=False,
    )  # fmt: skip
    output: str = option(
        "profile.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        FILES, changes="files", short="-o", metavar="PATH", path="profile",
    )  # fmt: skip

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        of_input = (PriceOptions, InputOptions, PromptOptions, CompressionOptions, MemoryOptions)
        names = ["schedule", *(name for kind in of_input for name in kind.model_fields)]
        without = {"inputs", "memory", "chunk_tokens"}  # these are for the measurements too
        require(found, [name for name in names if name not in without], requirements.INPUT)
        return found

    def with_defaults(self) -> ProfileSettings:
        """These settings with defaults for what was not given, larger ones with `full`."""
        left: dict[str, Any] = {}
        if not self.mode:
            left["mode"] = ("full", "chunked", "hybrid") if self.full else ("full", "hybrid")
        if self.confirm_seconds is None:
            left["confirm_seconds"] = 120.0 if self.full else 20.0
        if self.fit_seconds is None:
            left["fit_seconds"] = 60.0 if self.full else 10.0
        return self.model_copy(update=left)

    def check(self) -> None:
        super().check()
        if self.inputs:
            if self.keep == "auto":
                raise UsageError(
                    "--keep auto is for a whole job; with --draft, prefill profile predicts several rates anyway"
                )
            check_keep(self.keep, compresses=self.compresses)

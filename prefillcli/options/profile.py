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
from prefillcli.options.option import COMPRESSION, FILES, PROFILE, REPLAY, argument, option, require
from prefillcli.options.requirements import Requirement
from prefillcli.options.values import Fairness, KeepRate, NameList


class ProfileSettings(PriceOptions, MeasuringOptions, ScheduledOptions):
    """Everything `prefill profile` can be told."""

    inputs: tuple[str, ...] = argument(
        (),
        "Parquet or JSONL: files, directories, globs or URLs. Shows what is in it and what scoring it takes.",
        changes="scores", path="rows",
    )  # fmt: skip
    full: bool = option(
        False,
        "All modes and replays, longer measurements: tens of minutes; hours for a large model.",
        PROFILE, changes="report",
    )  # fmt: skip
    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip
    mode: NameList = option(
        (),
        "Mode to find the longest prompt of: full, chunked, drop, hybrid-copy or hybrid; repeatable. (default: full "
        "and hybrid, with --full all)",
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
    replay: NameList = option(
        (),
        "A workload for a simulated server: post-recommendation, post-recommendation-mixed, credit-verification, or "
        "none; repeatable. (default: post-recommendation, with --full all)",
        REPLAY, changes="report", metavar="NAME", repeatable=True,
    )  # fmt: skip
    replay_scale: float = option(
        1.0,
        "Multiplies the lengths of its requests.",
        REPLAY, changes="report", metavar="FACTOR", requires=requirements.REPLAY, gt=0, allow_inf_nan=False,
    )  # fmt: skip
    cache_tokens: int | None = option(
        None,
        "Tokens that its prefix cache holds. (default: as many as fit the budget with the K,V of all layers)",
        REPLAY, changes="report", metavar="N", requires=requirements.REPLAY, ge=0,
    )  # fmt: skip
    fairness: Fairness = option(
        (0.05, 0.0, 0.5),
        "Lambda of srjf-calibrated, as a share of the tokens the machine computes per second; repeatable; the first "
        "is compared with other policies.",
        REPLAY, changes="report", metavar="SHARE", repeatable=True, requires=requirements.REPLAY,
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
            left["mode"] = ("full", "chunked", "drop", "hybrid-copy", "hybrid") if self.full else ("full", "hybrid")
        if not self.replay:
            every = ("post-recommendation", "post-recommendation-mixed", "credit-verification")
            left["replay"] = every if self.full else every[:1]
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
        if not self.fairness:
            raise UsageError("--fairness: give a share of 0 or more")
        if "none" in self.replay and len(self.replay) > 1:
            raise UsageError("--replay none: give no other workload with it")

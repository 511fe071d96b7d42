"""Rows that leave the model before its last layer."""

from __future__ import annotations

from prefillcli.options import requirements
from prefillcli.options.option import EARLY_EXIT, Settings, option


class ExitOptions(Settings):
    """Whether rows leave early, and what decides when they may."""

    exit: bool = option(
        False,
        "Let rows leave the model once their answer is decided. What that may change is bounded by --max-flips.",
        EARLY_EXIT, changes="scores", needs="exits",
    )  # fmt: skip
    max_flips: float = option(
        0.01,
        "Share of answers that --exit, or --keep auto, may flip, at 95 % confidence; with --exit of each answer.",
        EARLY_EXIT, changes="scores", metavar="RATE", requires=requirements.BOUNDED_FLIPS, gt=0, lt=1,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows that are read in full first, to learn when rows are decided. (default: what --max-flips takes, at most "
        "half of the job's rows; with --exit-profile 300)",
        EARLY_EXIT, changes="scores", metavar="N", requires=requirements.EXIT, ge=20,
    )  # fmt: skip
    exit_profile: str | None = option(
        None,
        "What an earlier job has learnt (its OUTPUT.exit.json), used again after a check on fresh rows.",
        EARLY_EXIT, changes="scores", metavar="FILE", path="file", requires=requirements.EXIT,
    )  # fmt: skip

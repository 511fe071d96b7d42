"""What a job takes over of earlier ones."""

from __future__ import annotations

from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.option import FILES, Settings, option


class EarlierOptions(Settings):
    """Rows that need not be scored again."""

    since: str | None = option(
        None,
        "An earlier output of this job, last night's: rows with the same id and prompt are taken over from it.",
        FILES, changes="speed", metavar="OUTPUT", path="scores", same_as="output", requires=requirements.SCORES,
    )  # fmt: skip
    retry_errors: bool = option(
        False,
        "Score the error rows of this job again; all other rows stay as they are. Implies --resume.",
        FILES, changes="files", requires=requirements.SCORES,
    )  # fmt: skip

    @property
    def taking_over(self) -> str | None:
        """The option that takes rows over, if one does."""
        return "--retry-errors" if self.retry_errors else None if self.since is None else "--since"


def check_since(
    option: str, *, keep: float | str, shares_tokens: bool, exits: bool, audit: int, limit: int | None
) -> None:
    """Raise UsageError for what is decided from many rows of a job, some of which `option` takes over.

    `shares_tokens`: which tokens of a row are kept depends on rows beside it. `limit` is that of rationales.
    """
    if keep == "auto":
        raise UsageError(
            f"{option}: --keep auto chooses a rate for each job, and rows that are taken over may have another\n"
            "choose it in a run over a sample, then give that rate"
        )
    if shares_tokens:
        raise UsageError(
            f"{option}: rows that share a prefix keep the same tokens of it, and rows taken over are not read\n"
            "give --compress-per-row --no-keep-private, so that a row's tokens follow from the row alone"
        )
    if exits:
        raise UsageError(
            f"{option}: what --exit may flip is bounded for all rows of a job, and rows that are taken over are not "
            "read\nleave one of them out"
        )
    if audit:
        raise UsageError(
            f"{option}: --audit draws from all rows, and those that are taken over are not read\n"
            "audit a sample of the rows in a job of its own"
        )
    if limit is not None:
        raise UsageError(
            f"{option}: --rationale-limit counts chosen rows in the order of the input, and rows that are taken over "
            "come first\nleave it out, and choose fewer rows with --rationale-when"
        )

"""The options of compression: which tokens of a prompt the model reads."""

from __future__ import annotations

from typing import Literal

from prefillcli.compress.settings import PAPER, SELF
from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.option import COMPRESSION, Settings, option
from prefillcli.options.values import KeepRate, OddNumber, TokenThreshold


class CompressionOptions(Settings):
    """Which tokens of a prompt the model reads."""

    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft. auto: the smallest that "
        "--max-flips allows.",
        COMPRESSION, changes="scores", metavar="RATE|auto",
    )  # fmt: skip
    draft: str | None = option(
        None,
        "Small model with the same tokenizer, which picks the tokens; self: the model's own first layers.",
        COMPRESSION, changes="scores", metavar="DIR|NAME|self", path="model",
    )  # fmt: skip
    draft_tokenizer: Literal["same", "translate"] = option(
        "same",
        "translate: the draft may have another tokenizer, and reads the text of the prompts in its own tokens.",
        COMPRESSION, changes="scores", requires=requirements.DRAFT,
    )  # fmt: skip
    self_layer: int | None = option(
        None,
        "After N of its layers, a model that is its own draft goes on with the tokens that it keeps. (default: 0.45 "
        "of its layers)",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.SELF_DRAFT, ge=1,
    )  # fmt: skip
    paper: bool = option(
        False,
        "SpecPrefill as in its paper: --lookahead 8 --query-window 0 --query-reduce mean --pool 13 --select-chunk 32 "
        "--no-keep-private.",
        COMPRESSION, changes="scores", requires=requirements.COMPRESSION,
    )  # fmt: skip
    lookahead: int = option(
        8,
        "Tokens whose attention votes on what to keep: the prompt's last one, and N - 1 that the draft decodes.",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.DRAFT, ge=1,
    )  # fmt: skip
    query_window: int = option(
        8,
        "The prompt's last N tokens vote too.",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.COMPRESSION, off=0, ge=0,
    )  # fmt: skip
    query_reduce: Literal["rank", "mean", "max"] = option(
        "rank",
        "How the votes of several tokens are combined: best rank, mean or maximum.",
        COMPRESSION, changes="scores", requires=requirements.VOTES,
    )  # fmt: skip
    pool: OddNumber = option(
        13,
        "Neighbouring tokens over which importance is averaged; odd, 1 for none.",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.VOTES, ge=1,
    )  # fmt: skip
    select_chunk: int = option(
        16,
        "Tokens kept or dropped together; 1 selects single tokens.",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.COMPRESSION, ge=1,
    )  # fmt: skip
    compress_above: TokenThreshold = option(
        "auto",
        "Prompts up to this many tokens are read in full; auto: those that compression would not make faster.",
        COMPRESSION, changes="scores", metavar="N|auto", requires=requirements.COMPRESSION,
    )  # fmt: skip
    keep_first: int = option(
        4,
        "First tokens that are always kept.",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.COMPRESSION, ge=0,
    )  # fmt: skip
    keep_last: int = option(
        64,
        "Last tokens that are always kept: the question.",
        COMPRESSION, changes="scores", metavar="N", requires=requirements.COMPRESSION, ge=1,
    )  # fmt: skip
    keep_private: bool = option(
        True,
        "Keep all that a row has after its shared prefix, if --keep leaves room for it. (default: on)",
        COMPRESSION, changes="scores", negative="no-keep-private", requires=requirements.COMPRESSION,
    )  # fmt: skip
    compress_per_row: bool = option(
        False,
        "Select tokens for each row on its own; prefixes are then no longer shared.",
        COMPRESSION, changes="scores", requires=requirements.VOTES,
    )  # fmt: skip

    @property
    def uses_draft(self) -> bool:
        """Whether a draft model picks tokens."""
        return self.draft is not None and not self.drafts_itself

    @property
    def drafts_itself(self) -> bool:
        """Whether the model's own first layers pick tokens."""
        return self.draft == SELF

    @property
    def picks_itself(self) -> bool:
        """Whether any way to pick tokens asks the model's own first layers."""
        return self.drafts_itself

    @property
    def counts_votes(self) -> bool:
        """Whether tokens are picked by votes: a draft's or the model's own."""
        return self.draft is not None

    @property
    def compresses(self) -> bool:
        """Whether anything picks tokens."""
        return self.draft is not None

    def check(self) -> None:
        super().check()
        if self.paper and (given := [name for name in PAPER if name in self.model_fields_set]):
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"--paper already sets {flags}: leave out one or the other")
        if self.paper and self.drafts_itself:
            raise UsageError(
                "--paper is for a draft that decodes, and with --draft self nothing is decoded\n"
                "leave --paper out, or name a small model as --draft"
            )


def check_keep(keep: float | Literal["auto"], *, compresses: bool) -> None:
    """Raise UsageError for a wrong rate, or for one that needs a draft where nothing picks tokens."""
    if keep != "auto" and not 0 < keep <= 1:
        raise UsageError(f"--keep {keep:g}: must be a rate above 0 and up to 1, or auto")
    if keep != 1 and not compresses:
        raise UsageError(f"--keep {keep} needs --draft: a small model with the same tokenizer, which picks the tokens")

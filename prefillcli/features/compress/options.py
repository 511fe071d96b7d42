"""The options of compression, by command."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.errors import UsageError
from prefillcli.features.compress.pickers import PICKERS
from prefillcli.features.compress.settings import PAPER
from prefillcli.options.groups import DraftOptions, count_or_auto
from prefillcli.options.option import BENCH, COMPRESSION, Settings, option
from prefillcli.options.requirements import DRAFT, Requirement

VOTES = Requirement(
    lambda s: s.counts_votes, "is for the votes of a draft, but none picks tokens", "give --draft and --keep"
)
SELF_DRAFT = Requirement(
    lambda s: s.picks_itself,
    "is for a model that is its own draft, but it is not",
    "give --draft self and --keep",
)
COMPRESSED = Requirement(
    lambda s: s.compresses, "is for compression, but nothing is compressed", "give --draft and --keep"
)
SPECPREFILL = Requirement(
    lambda s: s.compares("self-draft" if s.drafts_itself else "specprefill"),
    "is for a method that picks tokens with it, but only others are compared",
    "give --method specprefill, or self-draft for --draft self",
)


def _check_odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("must be odd, to be centred on a token")
    return number


def _split_numbers(value: object) -> object:
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(rate for part in parts for rate in str(part).split(",") if rate)


def _number_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return float(str(value))
    except ValueError:
        raise ValueError("must be a rate above 0 and up to 1, or auto") from None


KeepRate = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
TokenThreshold = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(count_or_auto)]
KeepRates = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(_split_numbers)]
OddNumber = Annotated[int, AfterValidator(_check_odd)]


class KeepOptions(Settings):
    """How much of a prompt the model reads."""

    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft. auto: the smallest that "
        "--max-flips allows.",
        COMPRESSION, changes="scores", metavar="RATE|auto",
    )  # fmt: skip


class CompressionOptions(DraftOptions, KeepOptions):
    """Which tokens of a prompt the model reads."""

    self_layer: int | None = option(
        None,
        "After N of its layers, a model that is its own draft goes on with the tokens that it keeps. (default: 0.45 "
        "of its layers)",
        COMPRESSION, changes="scores", metavar="N", requires=SELF_DRAFT, ge=1,
    )  # fmt: skip
    paper: bool = option(
        False,
        "SpecPrefill as in its paper: --lookahead 8 --query-window 0 --query-reduce mean --pool 13 --select-chunk 32 "
        "--no-keep-private.",
        COMPRESSION, changes="scores", requires=COMPRESSED,
    )  # fmt: skip
    lookahead: int = option(
        8,
        "Tokens whose attention votes on what to keep: the prompt's last one, and N - 1 that the draft decodes.",
        COMPRESSION, changes="scores", metavar="N", requires=DRAFT, ge=1,
    )  # fmt: skip
    query_window: int = option(
        8,
        "The prompt's last N tokens vote too.",
        COMPRESSION, changes="scores", metavar="N", requires=COMPRESSED, off=0, ge=0,
    )  # fmt: skip
    query_reduce: Literal["rank", "mean", "max"] = option(
        "rank",
        "How the votes of several tokens are combined: best rank, mean or maximum.",
        COMPRESSION, changes="scores", requires=VOTES,
    )  # fmt: skip
    pool: OddNumber = option(
        13,
        "Neighbouring tokens over which importance is averaged; odd, 1 for none.",
        COMPRESSION, changes="scores", metavar="N", requires=VOTES, ge=1,
    )  # fmt: skip
    select_chunk: int = option(
        16,
        "Tokens kept or dropped together; 1 selects single tokens.",
        COMPRESSION, changes="scores", metavar="N", requires=COMPRESSED, ge=1,
    )  # fmt: skip
    compress_above: TokenThreshold = option(
        "auto",
        "Prompts up to this many tokens are read in full; auto: those that compression would not make faster.",
        COMPRESSION, changes="scores", metavar="N|auto", requires=COMPRESSED,
    )  # fmt: skip
    keep_first: int = option(
        4,
        "First tokens that are always kept.",
        COMPRESSION, changes="scores", metavar="N", requires=COMPRESSED, ge=0,
    )  # fmt: skip
    keep_last: int = option(
        64,
        "Last tokens that are always kept: the question.",
        COMPRESSION, changes="scores", metavar="N", requires=COMPRESSED, ge=1,
    )  # fmt: skip
    keep_private: bool = option(
        True,
        "Keep all that a row has after its shared prefix, if --keep leaves room for it. (default: on)",
        COMPRESSION, changes="scores", negative="no-keep-private", requires=COMPRESSED,
    )  # fmt: skip
    compress_per_row: bool = option(
        False,
        "Select tokens for each row on its own; prefixes are then no longer shared.",
        COMPRESSION, changes="scores", requires=VOTES,
    )  # fmt: skip

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

    def check_keep(self) -> None:
        """Raise UsageError for a wrong rate, or for one that needs a draft where nothing picks tokens."""
        if self.keep != "auto" and not 0 < self.keep <= 1:
            raise UsageError(f"--keep {self.keep:g}: must be a rate above 0 and up to 1, or auto")
        if self.keep != 1 and not self.compresses:
            raise UsageError(
                f"--keep {self.keep} needs --draft: a small model with the same tokenizer, which picks the tokens"
            )


class InspectOptions(CompressionOptions):
    """Those of `prefill inspect`."""

    keep: KeepRate = option(
        1.0,
        "Share of the prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip


class ProfileOptions(CompressionOptions):
    """Those of `prefill profile`."""

    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip


class BenchOptions(CompressionOptions):
    """Those of `prefill bench`, which is a base of its settings."""

    if TYPE_CHECKING:
        model: str | None
        full: bool
        method: tuple[str, ...]
        rationale: int

    draft: str | None = option(
        None,
        "Small model with the same tokenizer, which picks the tokens; self: the model's own first layers. (default: "
        "with the sample model, its draft)",
        COMPRESSION, changes="scores", metavar="DIR|NAME|self", path="model", requires=SPECPREFILL,
    )  # fmt: skip
    keep: KeepRates = option(  # type: ignore[assignment]  # several rates side by side
        (0.2,),
        "Share of the tokens that compressing methods keep; repeatable.",
        BENCH, changes="scores", metavar="RATE", repeatable=True, requires=COMPRESSED,
    )  # fmt: skip
    compress_above: TokenThreshold = option(
        0,
        "Prompts up to this many tokens are read in full; auto: those that compression would not make faster.",
        COMPRESSION, changes="scores", metavar="N|auto", requires=COMPRESSED,
    )  # fmt: skip

    @property
    def uses_draft(self) -> bool:
        opened = self.model is None if self.draft is None else not self.drafts_itself
        return opened and any(self.compares(kind.name) for kind in PICKERS.values() if kind.needs == "draft")

    @property
    def counts_votes(self) -> bool:
        return self.uses_draft or self.compares("self-draft")

    @property
    def picks_itself(self) -> bool:
        return any(self.compares(kind.name) for kind in PICKERS.values() if kind.needs == "self")

    @property
    def compresses(self) -> bool:
        return self.uses_draft or any(self.compares(kind.name) for kind in PICKERS.values() if kind.needs != "draft")

    @property
    def is_random(self) -> bool:
        return super().is_random or any(  # type: ignore[misc]
            self.compares(kind.name) for kind in PICKERS.values() if kind.random
        )

    def compares(self, method: str) -> bool:
        """Whether a method that drops tokens is compared: if it was named, or by default where there is a draft.

        With `rationale` none is, but a draft that guesses tokens is loaded as if it would pick them.
        """
        if self.rationale:
            return method == "specprefill" and (not self.method or bool({"draft", "hierarchy"} & {*self.method}))
        if self.method:
            return method in self.method
        if self.drafts_itself and method in PICKERS and PICKERS[method].needs == "draft":
            return False
        quick = ("self-draft" if self.drafts_itself else "specprefill", "random")
        return (self.draft is not None or self.model is None) and (self.full or method in quick)

    def check(self) -> None:
        super().check()
        if not self.keep:
            raise UsageError("--keep: give a rate above 0 and up to 1")
        for name in self.method:
            if name in PICKERS and PICKERS[name].needs == "draft" and not self.uses_draft:
                raise UsageError(f"--method {name} needs --draft: a small model with the same tokenizer")

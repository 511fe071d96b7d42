"""The options of compression by command, the settings that follow from them, and the ways to pick tokens by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.errors import UsageError
from prefillcli.options.groups import CONTROLS, DraftOptions, count_or_auto
from prefillcli.options.option import BENCH, COMPRESSION, Settings, as_typed, option
from prefillcli.options.requirements import DRAFT, Requirement
from prefillcli.runtime.extras import require_extra

Reduce = Literal["rank", "mean", "max"]
# The settings of SpecPrefill's published code.
PAPER: dict[str, Any] = {
    "lookahead": 8,
    "query_window": 0,
    "query_reduce": "mean",
    "pool": 13,
    "select_chunk": 32,
    "keep_private": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """How prompts are compressed. docs/compression.md says why the defaults are what they are."""

    # Queries are the prompt's last token and `lookahead - 1` tokens that the draft decodes greedily behind it.
    lookahead: int = 8
    query_window: int = 8  # this many of the prompt's last tokens are queries too
    query_reduce: Reduce = "rank"  # the way to combine the queries' votes: see `importance`
    pool: int = 13  # odd number of tokens over which importance is averaged; 1 for none
    select_chunk: int = 16  # tokens of a chunk, which are kept or dropped together
    # Prompts of at most this many tokens are read in full; auto: those for which the cost model predicts no gain.
    compress_above: int | Literal["auto"] = "auto"
    keep_first: int = 4  # tokens at the start that are always kept: attention sinks
    keep_last: int = 64  # tokens at the end that are always kept: the question
    # Keep all tokens behind the prefix that a prompt shares, unless they are more than its keep rate leaves of it.
    keep_private: bool = True
    per_row: bool = False  # select for each row separately, as in the paper, not once for a shared prefix
    # The number of layers that read whole prompts, in a model that is its own draft; None: by its depth.
    self_layer: int | None = None

    @property
    def window(self) -> int:
        """The prompt's last tokens that are queries."""
        return max(self.query_window, 1)

    @property
    def decoded(self) -> int:
        """Tokens decoded behind the prompt that are queries."""
        return self.lookahead - 1

    @property
    def queries(self) -> int:
        """Queries of one prompt."""
        return self.window + self.decoded

    @property
    def tail(self) -> int:
        """Tokens at the end that are always kept: the question, and the prompt's queries."""
        return max(self.keep_last, self.window)

    def for_target(self, sliding_window: int | None) -> Compression:
        """These settings for a target with a sliding window of this many tokens, or with none.

        The last window of a prompt is always kept, so that the target's sliding layers see the same tokens before the
        answer as in the whole prompt.
        """
        return replace(self, keep_last=max(self.keep_last, sliding_window or 0))


def compression_of(settings: Any) -> Compression:
    """The options of compression, in the form for the draft and the selection."""
    names = {"per_row": "compress_per_row"}
    found = Compression(
        **{each.name: getattr(settings, names.get(each.name, each.name)) for each in fields(Compression)}
    )
    if settings.drafts_itself:
        found = replace(found, lookahead=1)  # it decodes nothing
    return replace(found, **PAPER) if settings.paper else found


def keep_rate(settings: Any, plan: Mapping[str, Any]) -> float:
    """A job's keep rate: the given one or the one that its plan has chosen; 1 until then."""
    return float(plan.get("keep", 1.0 if settings.keep == "auto" else settings.keep))


# The ways to pick tokens, known by name before anything is imported or loaded.


class PickerKind(NamedTuple):
    """A way to pick tokens. `name` is also the value in the output's column `method` for a prompt that it
    compressed."""

    name: str
    needs: Literal["draft", "self", "text"] | None  # what it needs: a draft, the model's own layers, the text


PICKERS = {
    kind.name: kind
    for kind in (
        PickerKind("specprefill", "draft"),
        PickerKind("self-draft", "self"),
        PickerKind("random", None),
        PickerKind("bm25", "text"),
    )
}


# The options.


VOTES = Requirement(lambda s: s.counts_votes, "needs a draft that picks tokens", "give --draft and --keep")
SELF_DRAFT = Requirement(
    lambda s: s.picks_itself,
    "needs --draft self",
    "give --draft self and --keep",
)
COMPRESSED = Requirement(lambda s: s.compresses, "needs compression", "give --draft and --keep")
SPECPREFILL = Requirement(
    lambda s: s.compares("self-draft" if s.drafts_itself else "specprefill"),
    "needs a method that picks tokens with it",
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
        "Share of each prompt's tokens that the model reads; below 1 needs --draft. auto: the smallest share that "
        "--max-flips allows.",
        COMPRESSION, changes="scores", metavar="RATE|auto",
    )  # fmt: skip


class CompressionOptions(DraftOptions, KeepOptions):
    """Which tokens of a prompt the model reads."""

    self_layer: int | None = option(
        None,
        "Number of layers after which a model that is its own draft reads only what it keeps. (default: 0.45 of "
        "its layers)",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=SELF_DRAFT, ge=1,
    )  # fmt: skip
    paper: bool = option(
        False,
        "SpecPrefill as in its paper: lookahead 8, query_window 0, query_reduce mean, pool 13, select_chunk 32, "
        "keep_private false.",
        COMPRESSION, changes="scores", requires=COMPRESSED,
    )  # fmt: skip
    lookahead: int = option(
        8,
        "Tokens whose attention votes on what to keep: the prompt's last one, and N - 1 that the draft decodes.",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=DRAFT, ge=1,
    )  # fmt: skip
    query_window: int = option(
        8,
        "The prompt's last N tokens vote too.",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=COMPRESSED, off=0, ge=0,
    )  # fmt: skip
    query_reduce: Literal["rank", "mean", "max"] = option(
        "rank",
        "How the votes of several tokens are combined: best rank, mean or maximum.",
        COMPRESSION, level="settled", changes="scores", requires=VOTES,
    )  # fmt: skip
    pool: OddNumber = option(
        13,
        "Neighbouring tokens over which importance is averaged; odd, 1 for none.",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=VOTES, ge=1,
    )  # fmt: skip
    select_chunk: int = option(
        16,
        "Tokens kept or dropped together; 1 selects single tokens.",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=COMPRESSED, ge=1,
    )  # fmt: skip
    compress_above: TokenThreshold = option(
        "auto",
        "Prompts up to this many tokens are read in full; auto: those that compression would not make faster.",
        COMPRESSION, changes="scores", metavar="N|auto", requires=COMPRESSED,
    )  # fmt: skip
    keep_first: int = option(
        4,
        "First tokens that are always kept.",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=COMPRESSED, ge=0,
    )  # fmt: skip
    keep_last: int = option(
        64,
        "Last tokens that are always kept: the question.",
        COMPRESSION, level="settled", changes="scores", metavar="N", requires=COMPRESSED, ge=1,
    )  # fmt: skip
    keep_private: bool = option(
        True,
        "Keep everything after a row's shared prefix, if --keep leaves room for it. (default: on)",
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
        return self.uses_draft or self.drafts_itself

    @property
    def is_random(self) -> bool:
        """Whether anything is drawn at random."""
        return self.draft == "random" or super().is_random  # type: ignore[misc]  # of the rows' options

    @property
    def compresses(self) -> bool:
        """Whether anything picks tokens."""
        return self.draft is not None

    def check(self) -> None:
        super().check()
        if self.paper and (given := [name for name in PAPER if name in self.model_fields_set]):
            flags = ", ".join(as_typed(type(self), name) for name in given)
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

    draft: str | None = option(
        None,
        "Small model with the same tokenizer that picks the tokens; self: the model's own first layers. (default: "
        "with the sample model, its draft)",
        COMPRESSION, level="first", changes="scores", metavar="DIR|NAME|self", path="model", requires=SPECPREFILL,
    )  # fmt: skip
    keep: KeepRates = option(  # type: ignore[assignment]  # several rates side by side
        (0.2,),
        "Share of the tokens that compressing methods keep; repeatable.",
        BENCH, level="first", changes="scores", metavar="RATE", repeatable=True, requires=COMPRESSED,
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
        return self.compares("random") or super().is_random

    def compares(self, method: str) -> bool:
        """Return whether a method that drops tokens is compared: if one was named, or by default where there is a
        draft."""
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
        if self.draft in CONTROLS:
            raise UsageError(f"--draft {self.draft}: give --method {self.draft}, beside the draft to compare")
        for name in self.method:
            if name in PICKERS and PICKERS[name].needs == "draft" and not self.uses_draft:
                raise UsageError(f"--method {name} needs --draft: a small model with the same tokenizer")
            if name == "bm25":
                require_extra("bm25", "--method bm25")

"""The options of how the model reads a prompt: fewer tokens, fewer layers, a cheaper model first."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.errors import UsageError
from prefillcli.options.groups import CONTROLS, SELF, count_or_auto, read_mapping, split_repeated
from prefillcli.options.option import (
    BENCH,
    COMPRESSION,
    EARLY_EXIT,
    GATES,
    MODEL,
    OUTPUT,
    Options,
    as_typed,
    option,
)
from prefillcli.options.requirements import AUDITABLE, BOUNDED_FLIPS, DRAFT, SCORES, Requirement, leaves_early
from prefillcli.runtime.extras import require_extra

# The settings of SpecPrefill's published code.
PAPER: dict[str, Any] = {
    "lookahead": 8,
    "query_window": 0,
    "query_reduce": "mean",
    "pool": 13,
    "select_chunk": 32,
    "keep_private": False,
}


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


VOTES = Requirement(lambda s: s.counts_votes, "needs a draft that picks tokens", "give --draft and --keep")


SELF_DRAFT = Requirement(
    lambda s: s.picks_itself,
    "needs --draft self",
    "give --draft self and --keep",
)


COMPRESSED = Requirement(lambda s: s.compresses, "needs compression", "give --draft and --keep")


SPECPREFILL = Requirement(
    lambda s: s.compares("self-draft" if s.compression.drafts_itself else "specprefill"),
    "needs a method that picks tokens with it",
    "give --method specprefill, or self-draft for --draft self",
)


def _check_odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("must be odd, to be centred on a token")
    return number


def _number_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return float(str(value))
    except ValueError:
        raise ValueError("must be a rate above 0 and up to 1, or auto") from None


KeepRate = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]


TokenThreshold = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(count_or_auto)]


KeepRates = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(split_repeated)]


OddNumber = Annotated[int, AfterValidator(_check_odd)]


class CompressionOptions(Options):
    """The tokens of a prompt that the model reads, and the small model that picks or guesses tokens."""

    draft: str | None = option(
        None,
        "Small model with the same tokenizer that picks the tokens to read; self: the model's own first layers. "
        "random and bm25 pick chunks or sentences without a model, for comparison.",
        COMPRESSION, changes="scores", metavar="DIR|NAME|self|random|bm25", path="model",
    )  # fmt: skip
    draft_tokenizer: Literal["same", "translate"] = option(
        "same",
        "translate: accept a draft with another tokenizer, which reads each prompt's text in its own tokens.",
        COMPRESSION, changes="scores", requires=DRAFT,
    )  # fmt: skip
    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft. auto: the smallest share that "
        "--max-flips allows.",
        COMPRESSION, changes="scores", metavar="RATE|auto",
    )  # fmt: skip
    self_layer: int | None = option(
        None,
        "With --draft self: the layer after which the model reads only the tokens that it keeps. (default: 0.45 "
        "of its layers)",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=SELF_DRAFT, ge=1,
    )  # fmt: skip
    paper: bool = option(
        False,
        "SpecPrefill as published: lookahead 8, query_window 0, query_reduce mean, pool 13, select_chunk 32, "
        "keep_private false.",
        COMPRESSION, level="rare", changes="scores", requires=COMPRESSED,
    )  # fmt: skip
    lookahead: int = option(
        8,
        "Tokens whose attention votes: the prompt's last one, and N - 1 that the draft decodes.",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=DRAFT, ge=1,
    )  # fmt: skip
    query_window: int = option(
        8,
        "The prompt's last N tokens vote too.",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=COMPRESSED, off=0, ge=0,
    )  # fmt: skip
    query_reduce: Literal["rank", "mean", "max"] = option(
        "rank",
        "How the votes of several tokens are combined: rank (the best one), mean or max.",
        COMPRESSION, level="rare", changes="scores", requires=VOTES,
    )  # fmt: skip
    pool: OddNumber = option(
        13,
        "Average importance over N neighbouring tokens; odd, 1 for no averaging.",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=VOTES, ge=1,
    )  # fmt: skip
    select_chunk: int = option(
        16,
        "Keep or drop tokens in chunks of N; 1 selects single tokens.",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=COMPRESSED, ge=1,
    )  # fmt: skip
    compress_above: TokenThreshold = option(
        "auto",
        "Read prompts of up to N tokens in full. auto: those that compression would not speed up.",
        COMPRESSION, level="rare", changes="scores", metavar="N|auto", requires=COMPRESSED,
    )  # fmt: skip
    keep_first: int = option(
        4,
        "Always keep the first N tokens.",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=COMPRESSED, ge=0,
    )  # fmt: skip
    keep_last: int = option(
        64,
        "Always keep the last N tokens: the question.",
        COMPRESSION, level="rare", changes="scores", metavar="N", requires=COMPRESSED, ge=1,
    )  # fmt: skip
    keep_private: bool = option(
        True,
        "Keep everything after a row's shared prefix, if --keep leaves room for it. (default: on)",
        COMPRESSION, level="rare", changes="scores", requires=COMPRESSED,
    )  # fmt: skip
    compress_per_row: bool = option(
        False,
        "Select tokens for each row alone; prefixes are then not shared.",
        COMPRESSION, level="rare", changes="scores", requires=VOTES,
    )  # fmt: skip

    @property
    def drafts_itself(self) -> bool:
        """True if the model is its own draft."""
        return self.draft == SELF

    @property
    def uses_draft(self) -> bool:
        """True if another model is the draft."""
        return self.draft not in (None, SELF, *CONTROLS)

    @property
    def picks_itself(self) -> bool:
        """True if any way to pick tokens asks the model's own first layers."""
        return self.drafts_itself

    @property
    def counts_votes(self) -> bool:
        """True if tokens are picked by votes: a draft's or the model's own."""
        return self.uses_draft or self.drafts_itself

    @property
    def compresses(self) -> bool:
        """True if anything picks tokens."""
        return self.draft is not None

    def check(self) -> None:
        super().check()
        if self.paper and (given := [name for name in PAPER if self.is_given(name)]):
            flags = ", ".join(as_typed(type(self), name) for name in given)
            raise UsageError(f"--set paper already sets {flags}: leave out one or the other")

        if self.draft == "bm25":
            require_extra("bm25", "--draft bm25")

    def check_rate(self) -> None:
        """Raise UsageError for a wrong rate, and for one that needs a draft where nothing picks tokens."""
        if self.keep != "auto" and not 0 < self.keep <= 1:
            raise UsageError(f"--keep {self.keep:g}: must be a rate above 0 and up to 1, or auto")
        if self.keep != 1 and not self.compresses:
            raise UsageError(
                f"--keep {self.keep} needs --draft: a small model with the same tokenizer, which picks the tokens"
            )


class RateOptions(CompressionOptions):
    """Those of a command that takes one rate."""

    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip


class RatesOptions(CompressionOptions):
    """Those of `prefill bench`, which compares rates and methods."""

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
        "Read prompts of up to N tokens in full. auto: those that compression would not speed up.",
        COMPRESSION, level="rare", changes="scores", metavar="N|auto", requires=COMPRESSED,
    )  # fmt: skip


EXIT = Requirement(
    leaves_early, "needs --exit, --first, --compute or --max-flips", "give --max-flips, or one of the others"
)


METHODS = ("early-exit", "first", "first-exit", "int8")  # of `prefill bench`, that let rows leave


FIRST = Requirement(lambda s: s.exits.first, "needs --first", "give --first")


EXIT_METHOD = Requirement(
    lambda s: any(name in METHODS for name in s.contest.method),
    "needs one of the methods early-exit, first, first-exit and int8",
    "give --method early-exit or int8, or --first and --method first",
)


FIRST_METHOD = Requirement(
    lambda s: "first" in s.contest.method or "first-exit" in s.contest.method,
    "needs the method first or first-exit",
    "give --method first",
)


class ExitOptions(Options):
    """Early exits of rows, and the rule that allows them."""

    exit: bool = option(
        False,
        "Let rows leave the model as soon as their answer is decided, within --max-flips.",
        EARLY_EXIT, changes="scores", needs="exits",
    )  # fmt: skip
    first: str | None = option(
        None,
        "Small model that reads every row first: a directory, a GGUF file, a hub name, or words, which needs no "
        "model. --model reads only the rows whose answer it cannot predict, within --max-flips.",
        EARLY_EXIT, changes="scores", metavar="MODEL|words", path="model", needs="exits",
    )  # fmt: skip
    compute: Literal["int8", "fp8"] | None = option(
        None,
        "Score every row in low precision first, and again in --dtype where that does not predict the answer, "
        "within --max-flips. fp8 needs CUDA.",
        EARLY_EXIT, changes="scores", metavar="int8|fp8", needs="exits",
    )  # fmt: skip
    flips_of: Literal["each", "all"] = option(
        "each",
        "What --max-flips bounds with --exit, --first or --compute: the flips of each answer, or of all rows "
        "together (all).",
        EARLY_EXIT, level="rare", changes="scores", requires=EXIT,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows to read in full first, to learn from. (default: as many as --max-flips takes, at most half of the "
        "job's rows; with --exit-profile 300)",
        EARLY_EXIT, level="rare", changes="scores", metavar="N", requires=EXIT, ge=20,
    )  # fmt: skip
    exit_profile: str | None = option(
        None,
        "Exit profile of an earlier job (its OUTPUT.exit.json), reused after a check on fresh rows.",
        EARLY_EXIT, changes="scores", metavar="FILE", path="file", requires=EXIT,
    )  # fmt: skip

    recall: float | None = option(
        None,
        "For a rare answer, instead of --max-flips: of the rows to which --model would give the first label, the "
        "least share that must get it, at 95 % confidence. The first model decides rows that surely lack it.",
        EARLY_EXIT, changes="scores", metavar="SHARE", requires=FIRST, gt=0, lt=1,
    )  # fmt: skip
    precision: float | None = option(
        None,
        "For a rare answer, instead of --max-flips: of the rows that get the first label, the least share to "
        "which --model would give it too, at 95 % confidence. The first model decides rows that surely have it.",
        EARLY_EXIT, changes="scores", metavar="SHARE", requires=FIRST, gt=0, lt=1,
    )  # fmt: skip

    @property
    def exit_option(self) -> str:
        """The option that lets rows leave: where it is all three or none, the bound that they share."""
        named = {"--exit": self.exit, "--first": self.first, "--compute": self.compute}
        found = [option for option, given in named.items() if given]
        return self.rare_option or (found[0] if 0 < len(found) < len(named) else "--max-flips")

    @property
    def chain(self) -> tuple[str, ...]:
        """The readers of rows before the model, in this order: a first model, and the model in low precision."""
        return tuple(name for name in (self.first, self.narrow) if name)

    @property
    def narrow(self) -> Literal["int8", "fp8"] | None:
        """The low precision in which the model reads rows first."""
        return self.compute

    @property
    def rare_option(self) -> str | None:
        """--recall or --precision, if one is given."""
        return "--recall" if self.recall is not None else "--precision" if self.precision is not None else None


class ExitProfileOptions(Options):
    """The exits that a row is held against."""

    exit_profile: str | None = option(
        None,
        "Exit profile of a job (its OUTPUT.exit.json): show where the row would leave.",
        EARLY_EXIT, changes="files", metavar="FILE", path="file",
    )  # fmt: skip


class ExitMethodOptions(Options):
    """The learning of the methods that let rows leave."""

    first: str | None = option(
        None,
        "The model that decides rows in the methods first and first-exit, as in prefill score --first.",
        BENCH, changes="scores", metavar="MODEL|words", path="model", requires=FIRST_METHOD,
    )  # fmt: skip
    max_flips: float = option(
        0.01,
        "Largest share of each answer that the methods early-exit, first, first-exit and int8 may change, at 95 % "
        "confidence.",
        BENCH, changes="scores", metavar="RATE", requires=EXIT_METHOD, gt=0, lt=1,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows that these methods learn from; they are not compared. (default: as many as --max-flips takes, at "
        "most half of the rows)",
        BENCH, level="rare", changes="scores", metavar="N", requires=EXIT_METHOD, ge=20,
    )  # fmt: skip


HEAD = Requirement(lambda s: s.lm.head_file is not None, "needs --head FILE", "give --head FILE, made by prefill fit")


class HeadOptions(Options):
    """How the heads of `--head FILE` are taken."""

    adapt: bool = option(
        False,
        "With --head FILE: take the mean and the scale of the features that heads read from rows of this job, "
        "without right answers, where it asks or looks differently than the rows that the heads were fitted to.",
        MODEL, changes="scores", requires=HEAD,
    )  # fmt: skip
    any_wording: bool = option(
        False,
        "Take heads that were fitted with other words around a row's text, or in another number format.",
        MODEL, level="rare", changes="report", requires=HEAD,
    )  # fmt: skip
    max_shift: float | None = option(
        None,
        "Largest distance of the mean features that heads read from those of their fit, in standard deviations. "
        "Above it the exit code is 3.",
        GATES, level="rare", changes="report", metavar="DISTANCE", requires=HEAD, gt=0,
    )  # fmt: skip


class FlipOptions(Options):
    """The answers that may flip, and those that are counted."""

    max_flips: float = option(
        0.01,
        "Largest share of answers that may change, at 95 % confidence: of each answer with --exit, --first and "
        "--compute, of all rows with --keep auto. Given alone, the job tries words, int8 and exits, and uses those "
        "that pay on this machine.",
        EARLY_EXIT, changes="scores", metavar="RATE", requires=BOUNDED_FLIPS, gt=0, lt=1,
    )  # fmt: skip
    audit: int = option(
        0,
        "Rescore N random rows in full, of those that were compressed or could leave early, and report how many "
        "answers change.",
        EARLY_EXIT, changes="columns", metavar="N", needs="compression", requires=AUDITABLE, off=0, ge=0,
    )  # fmt: skip


class EarlierOptions(Options):
    """Rows that need not be scored again."""

    since: str | None = option(
        None,
        "Earlier output of this job, such as last night's. Rows with the same id and prompt are copied from it, "
        "not scored.",
        OUTPUT, changes="speed", metavar="OUTPUT", path="scores", same_as="output", requires=SCORES,
    )  # fmt: skip
    retry_errors: bool = option(
        False,
        "Score this job's error rows again; all other rows stay as they are. Implies --resume.",
        OUTPUT, changes="files", requires=SCORES,
    )  # fmt: skip


MOST_ADAPTERS = 255  # an adapter's number takes eight bits of the key that prompts are sorted by
ADAPTERS = Requirement(
    lambda s: bool(s.adapters.adapter),
    "needs --adapter, which names the adapters",
    "give --adapter NAME=DIR for each name",
)


def _read_adapters(value: object) -> object:
    # Folders by adapter name, from texts like `DIR` and `NAME=DIR`, or from a recipe's mapping. An adapter without a
    # name takes that of its folder.
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = read_mapping(value)
    if isinstance(value, dict):
        return {str(name): str(folder) for name, folder in value.items()}
    found: dict[str, str] = {}
    for text in map(str, value if isinstance(value, list | tuple) else [value]):
        name, equals, folder = text.partition("=")
        if not equals or "/" in name:
            name, folder = os.path.basename(os.path.abspath(os.path.expanduser(text))), text
        if not name or not folder:
            raise ValueError("must be a folder, or NAME=FOLDER")
        if name in found:
            raise ValueError(f"two adapters are called {name!r}: name them, NAME=FOLDER")
        found[name] = folder
    return found


class AdapterOptions(Options):
    """The adapters, and the one that reads a row."""

    adapter: Annotated[dict[str, str], BeforeValidator(_read_adapters)] = option(
        {},
        "LoRA adapter (PEFT) to merge into the model: a folder or a hub name; repeatable with --adapter-column; a "
        "mapping in a recipe.",
        MODEL, changes="scores", metavar="[NAME=]DIR", path="model", repeatable=True, needs="adapters",
    )  # fmt: skip
    adapter_column: str | None = option(
        None,
        "Column with the name of each row's adapter; rows where it is empty use none.",
        MODEL, changes="scores", metavar="COLUMN", requires=ADAPTERS,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        names = list(self.adapter)
        if len(names) > MOST_ADAPTERS:
            raise UsageError(f"--adapter: {len(names)} adapters; one job takes at most {MOST_ADAPTERS}")
        if len(names) > 1 and self.adapter_column is None:
            raise UsageError(
                f"--adapter: {len(names)} adapters, and nothing assigns rows to them\n"
                "name the column that does with --adapter-column, or give one adapter"
            )

"""The options of how the model reads a prompt: fewer tokens, fewer layers, a cheaper model first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.errors import UsageError
from prefillcli.options.groups import CONTROLS, ByteSize, DraftOptions, count_or_auto, read_mapping, split_repeated
from prefillcli.options.option import (
    BENCH,
    COMPRESSION,
    EARLY_EXIT,
    FILES,
    MEMORY,
    MODEL,
    RUN,
    Settings,
    as_typed,
    option,
)
from prefillcli.options.requirements import DRAFT, SCORES, Requirement
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
    lambda s: s.compares("self-draft" if s.drafts_itself else "specprefill"),
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


class KeepOptions(Settings):
    """The part of a prompt that the model reads."""

    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft. auto: the smallest share that "
        "--max-flips allows.",
        COMPRESSION, changes="scores", metavar="RATE|auto",
    )  # fmt: skip


class CompressionOptions(DraftOptions, KeepOptions):
    """The tokens of a prompt that the model reads."""

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
        """True if any way to pick tokens asks the model's own first layers."""
        return self.drafts_itself

    @property
    def counts_votes(self) -> bool:
        """True if tokens are picked by votes: a draft's or the model's own."""
        return self.uses_draft or self.drafts_itself

    @property
    def is_random(self) -> bool:
        """True if anything is drawn at random."""
        return self.draft == "random" or super().is_random  # type: ignore[misc]  # of the rows' options

    @property
    def compresses(self) -> bool:
        """True if anything picks tokens."""
        return self.draft is not None

    def check(self) -> None:
        super().check()
        if self.paper and (given := [name for name in PAPER if name in self.model_fields_set]):
            flags = ", ".join(as_typed(type(self), name) for name in given)
            raise UsageError(f"--paper already sets {flags}: leave out one or the other")

        if self.draft == "bm25":
            require_extra("bm25", "--draft bm25")
        self._check_keep()

    def _check_keep(self) -> None:
        # A wrong rate, or one that needs a draft where nothing picks tokens.
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

    def _check_keep(self) -> None:
        if self.keep == "auto":
            raise UsageError("--keep auto is for a whole job: give a rate")
        super()._check_keep()


class ProfileOptions(CompressionOptions):
    """Those of `prefill profile`."""

    keep: KeepRate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft.",
        COMPRESSION, changes="scores", metavar="RATE",
    )  # fmt: skip

    def _check_keep(self) -> None:
        if not getattr(self, "inputs", ()):  # without rows nothing is compressed, and the option is refused for that
            return
        if self.keep == "auto":
            raise UsageError(
                "--keep auto is for a whole job; with --draft, prefill profile predicts several rates anyway"
            )
        super()._check_keep()


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

    def _check_keep(self) -> None:
        if self.draft in CONTROLS:
            raise UsageError(f"--draft {self.draft}: give --method {self.draft}, beside the draft to compare")
        if not self.keep:
            raise UsageError("--keep: give a rate above 0 and up to 1")
        for name in self.method:
            if name in PICKERS and PICKERS[name].needs == "draft" and not self.uses_draft:
                raise UsageError(f"--method {name} needs --draft: a small model with the same tokenizer")
            if name == "bm25":
                require_extra("bm25", "--method bm25")


EXIT = Requirement(
    lambda s: s.exit or s.chain, "needs --exit, --first or --compute", "give --exit, --first or --compute"
)


METHODS = ("early-exit", "first", "first-exit", "int8")  # of `prefill bench`, that let rows leave


FIRST = Requirement(lambda s: s.first, "needs --first", "give --first")


EXIT_METHOD = Requirement(
    lambda s: any(name in METHODS for name in s.method),
    "needs one of the methods early-exit, first, first-exit and int8",
    "give --method early-exit or int8, or --first and --method first",
)


FIRST_METHOD = Requirement(
    lambda s: "first" in s.method or "first-exit" in s.method,
    "needs the method first or first-exit",
    "give --method first",
)


class ExitOptions(Settings):
    """Early exits of rows, and the rule that allows them."""

    exit: bool = option(
        False,
        "Let rows leave the model once their answer is decided. --max-flips bounds how many answers that flips.",
        EARLY_EXIT, changes="scores", needs="exits",
    )  # fmt: skip
    first: str | None = option(
        None,
        "A small model that reads every row first: a directory, a GGUF file, the name of a hub model, or words, which "
        "needs no model. --model reads the rows whose answer it cannot predict; --max-flips bounds how many answers "
        "that flips.",
        EARLY_EXIT, changes="scores", metavar="MODEL|words", path="model", needs="exits",
    )  # fmt: skip
    compute: Literal["int8", "fp8"] | None = option(
        None,
        "Let the model read every row in smaller numbers first. Rows whose answer this does not foretell are read "
        "again in --dtype; --max-flips bounds how many answers that flips. fp8 is for CUDA.",
        EARLY_EXIT, changes="scores", metavar="int8|fp8", needs="exits",
    )  # fmt: skip
    flips_of: Literal["each", "all"] = option(
        "each",
        "What --max-flips bounds with --exit, --first or --compute: the flips of each answer's rows, or of all rows "
        "together.",
        EARLY_EXIT, changes="scores", requires=EXIT,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows to read in full first, to learn when rows are decided. (default: as many as --max-flips takes, at "
        "most half of the job's rows; with --exit-profile 300)",
        EARLY_EXIT, changes="scores", metavar="N", requires=EXIT, ge=20,
    )  # fmt: skip
    exit_profile: str | None = option(
        None,
        "Exit profile of an earlier job (its OUTPUT.exit.json), used again after a check on fresh rows.",
        EARLY_EXIT, changes="scores", metavar="FILE", path="file", requires=EXIT,
    )  # fmt: skip

    recall: float | None = option(
        None,
        "Instead of --max-flips, for a rare answer: of the rows that --model would give the first label, the least "
        "share that must get it, at 95 % confidence. The first model decides rows that surely do not have it.",
        EARLY_EXIT, changes="scores", metavar="SHARE", requires=FIRST, gt=0, lt=1,
    )  # fmt: skip
    precision: float | None = option(
        None,
        "Instead of --max-flips: of the rows that get the first label, the least share that --model would give it "
        "too, at 95 % confidence. The first model decides rows that surely have it.",
        EARLY_EXIT, changes="scores", metavar="SHARE", requires=FIRST, gt=0, lt=1,
    )  # fmt: skip

    @property
    def exit_option(self) -> str:
        """The option that lets rows leave."""
        return self.rare_option or ("--exit" if self.exit else "--first" if self.first else "--compute")

    @property
    def chain(self) -> tuple[str, ...]:
        """The readers of rows before the model, in this order: a first model, and the model in smaller numbers."""
        return tuple(name for name in (self.first, self.narrow) if name)

    @property
    def narrow(self) -> Literal["int8", "fp8"] | None:
        """The smaller numbers in which the model reads rows first."""
        return self.compute

    @property
    def rare_option(self) -> str | None:
        """--recall or --precision, if one is given."""
        return "--recall" if self.recall is not None else "--precision" if self.precision is not None else None

    def check(self) -> None:
        super().check()
        if self.rare_option is None:
            return
        from prefillcli.prompts.labels import parse_labels

        if len(parse_labels(getattr(self, "labels", ""))) != 2:
            raise UsageError(
                f"{self.rare_option}: a row that does not have the first label must have the other one\n"
                "name two --labels"
            )


class ExitProfileOptions(Settings):
    """The exits that a row is held against."""

    exit_profile: str | None = option(
        None,
        "Exit profile of a job (its OUTPUT.exit.json): show where the row would leave.",
        EARLY_EXIT, changes="files", metavar="FILE", path="file",
    )  # fmt: skip


class ExitMethodOptions(Settings):
    """The learning of the methods that let rows leave."""

    first: str | None = option(
        None,
        "The model that decides rows in the methods first and first-exit, as of prefill score --first.",
        BENCH, changes="scores", metavar="MODEL|words", path="model", requires=FIRST_METHOD,
    )  # fmt: skip
    max_flips: float = option(
        0.01,
        "Share of each answer that the methods early-exit, first, first-exit and int8 may flip, at 95 % confidence.",
        BENCH, changes="scores", metavar="RATE", requires=EXIT_METHOD, gt=0, lt=1,
    )  # fmt: skip
    exit_rows: int | None = option(
        None,
        "Rows that these methods learn from, on which none is compared. (default: as many as --max-flips takes, at "
        "most half of the rows)",
        BENCH, changes="scores", metavar="N", requires=EXIT_METHOD, ge=20,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if FIRST_METHOD.met(self) and not self.first:
            raise UsageError("--method first needs --first: a small model that reads every row first, or words")


class EarlierOptions(Settings):
    """Rows that need not be scored again."""

    since: str | None = option(
        None,
        "Earlier output of this job, such as last night's. Rows with the same id and prompt are copied from it, "
        "not scored.",
        FILES, changes="speed", metavar="OUTPUT", path="scores", same_as="output", requires=SCORES,
    )  # fmt: skip
    retry_errors: bool = option(
        False,
        "Score the error rows of this job again; all other rows stay as they are. Implies --resume.",
        FILES, changes="files", requires=SCORES,
    )  # fmt: skip


class DeterminismOptions(Settings):
    """Scores that keep their bits beside any other rows."""

    deterministic: bool = option(
        False,
        "Give each row's score the same bits, whatever its neighbours, their order, the packs, threads and workers.",
        RUN, changes="scores", needs="determinism",
    )  # fmt: skip


STREAMABLE = Requirement(
    lambda s: s.weights != "resident",
    "has no effect with --weights resident",
    "give --weights stream or auto",
)


class StreamingOptions(Settings):
    """The place of the layers' weights, and the memory that all weights may take."""

    weights: Literal["auto", "resident", "stream"] = option(
        "auto",
        "Where the layers' weights are: resident in memory, or streamed from the files while others compute. auto: "
        "streamed if they do not fit, and on CPUs if files have them packed.",
        MEMORY, changes="speed", needs="streaming",
    )  # fmt: skip
    weights_memory: ByteSize | None = option(
        None,
        "Most memory for weights; those that do not fit are streamed, e.g. 12GiB. (default: what is free, a quarter "
        "of it for streamed weights, 512MiB for packed ones)",
        MEMORY, changes="speed", metavar="SIZE", needs="streaming", requires=STREAMABLE,
    )  # fmt: skip


MOST_ADAPTERS = 255  # an adapter's number takes eight bits of the key that prompts are sorted by
ADAPTERS = Requirement(
    lambda s: bool(s.adapter), "needs --adapter, which names the adapters", "give --adapter NAME=DIR for each name"
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


class AdapterOptions(Settings):
    """The adapters, and the one that reads a row."""

    adapter: Annotated[dict[str, str], BeforeValidator(_read_adapters)] = option(
        {},
        "LoRA adapter (PEFT) to merge into the model: a folder or a hub name; repeatable with --adapter-column; a "
        "mapping in a recipe.",
        MODEL, changes="scores", metavar="[NAME=]DIR", path="model", repeatable=True, needs="adapters",
    )  # fmt: skip
    adapter_column: str | None = option(
        None,
        "Column that names each row's adapter; rows where it is empty are read without one.",
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

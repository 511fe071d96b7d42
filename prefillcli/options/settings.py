"""What jobs can be told.

The fields of these classes are the options of the commands: name, default, help text and help panel are written here
once, and the command line is made from them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from prefillcli.compress.settings import PAPER
from prefillcli.engines.kinds import ENGINES, Capability, refuse
from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.option import (
    ANSWERS,
    BENCH,
    COMPRESSION,
    FILES,
    MEMORY,
    MODEL,
    PROFILE,
    PROMPTS,
    REPLAY,
    RUN,
    Settings,
    extra_of,
    option,
    require,
)
from prefillcli.options.requirements import Requirement
from prefillcli.options.values import (
    EngineName,
    Fairness,
    KeyValues,
    Labels,
    Names,
    Odd,
    Rate,
    Rates,
    Size,
    ThreadCount,
    Threshold,
)


class InputOptions(Settings):
    """Which rows."""

    inputs: tuple[str, ...] = Field(description="Parquet or JSONL: files, directories, globs or URLs.", min_length=1)
    limit: int | None = option(None, "Take the first N rows only.", FILES, metavar="N", ge=1)
    sample: int | None = option(None, "Take N rows drawn at random.", FILES, metavar="N", ge=1)
    seed: int = option(0, "Seed of --sample.", FILES, metavar="N", requires=requirements.RANDOM)

    @property
    def draws(self) -> bool:
        """Whether anything is drawn at random."""
        return self.sample is not None

    def check(self) -> None:
        super().check()
        if self.limit is not None and self.sample is not None:
            raise UsageError("--limit takes the first rows, --sample random ones: give one of them")


class ModelOptions(Settings):
    """Which model, and where it runs."""

    model: str | None = option(
        None,
        "A model directory or a hub name. (default: the shipped sample model)",
        MODEL,
        short="-m",
        metavar="MODEL",
    )
    revision: str | None = option(
        None, "Revision of a hub model.", MODEL, metavar="NAME", requires=requirements.HUB_MODEL
    )
    trust_remote_code: bool = option(False, "Run Python code that comes with the model.", MODEL)
    device: str = option("auto", "cpu, cuda, cuda:1, ... or auto.", MODEL, metavar="DEVICE")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Number format of weights and activations; auto: as the model is saved.", MODEL
    )
    threads: ThreadCount = option(
        "auto",
        "Processor threads that compute; auto: one for each core that it may use, fewer while others use them.",
        MODEL, metavar="N|auto", needs="threads",
    )  # fmt: skip


class PromptOptions(Settings):
    """How a row becomes a prompt with answers."""

    prompt_column: str = option(
        "prompt",
        "Column with the text, the chat messages or the token ids.",
        PROMPTS, metavar="NAME", requires=requirements.NO_TEMPLATE,
    )  # fmt: skip
    template: str | None = option(
        None, "Jinja text, or a file with it, rendered from the row's columns.", PROMPTS, metavar="JINJA"
    )
    chat: bool | None = option(None, "Apply the tokenizer's chat template. (default: if it has one)", PROMPTS)
    system: str | None = option(None, "System message before each chat.", PROMPTS, metavar="TEXT")
    max_length: int | None = option(
        None, "Longest prompt in tokens. (default: the model's limit)", PROMPTS, metavar="N", ge=1
    )
    on_long: Literal["error", "truncate-left", "truncate-middle", "skip"] = option(
        "error", "What happens to a longer prompt.", PROMPTS
    )

    literal: bool = option(
        True,
        "Encode the data's text as text: only templates and the tokenizer put control tokens into a prompt. (default: "
        "--literal)",
        PROMPTS, negative="allow-special",
    )  # fmt: skip
    max_row_bytes: Size | None = option(
        None,
        "Longer rows are error rows, before they are tokenised, e.g. 32MiB. (default: what --max-length tokens can "
        "hold, at least 8MiB and at most 64MiB; 64MiB with --on-long truncate-*)",
        PROMPTS, metavar="SIZE",
    )  # fmt: skip

    labels: Labels = option(
        "Yes,No",
        "Answers, the positive one first; 'Yes= Yes|yes|YES' sums variants.",
        ANSWERS, metavar="LABELS",
    )  # fmt: skip
    temperature: float = option(1.0, "Divides the label logits.", ANSWERS, metavar="T", gt=0, allow_inf_nan=False)


class MemoryOptions(Settings):
    """How much is computed at a time, and in which order."""

    memory: Size | None = option(
        None,
        "Budget for activations and K,V, e.g. 8GiB. (default: what is free)",
        MEMORY, metavar="SIZE", needs="memory",
    )  # fmt: skip
    pack_tokens: int | None = option(
        None,
        "Most tokens in one pass over the model. (default: from --memory)",
        MEMORY, metavar="N", needs="packs", ge=1,
    )  # fmt: skip
    chunk_tokens: int | None = option(
        None,
        "Tokens that go through a layer at a time. (default: from the model)",
        MEMORY,
        metavar="N",
        needs="packs",
        ge=1,
    )
    prefix_kv: Literal["auto", "discard", "keep", "offload"] = option(
        "auto",
        "K,V of prefixes that later packs need: discard and compute again, keep on the device, or offload to host "
        "memory.",
        MEMORY,
        needs="packs",
    )


class CompressionOptions(Settings):
    """Which tokens a draft model leaves to the model."""

    keep: Rate = option(
        1.0,
        "Share of each prompt's tokens that the model reads; below 1 needs --draft. auto: the smallest that "
        "--max-flips allows.",
        COMPRESSION, metavar="RATE|auto",
    )  # fmt: skip
    draft: str | None = option(
        None, "Small model with the same tokenizer that picks the tokens.", COMPRESSION, metavar="DIR|NAME"
    )
    paper: bool = option(
        False,
        "SpecPrefill as in its paper: --lookahead 8 --query-window 0 --query-reduce mean --pool 13 --select-chunk 32 "
        "--no-keep-private.",
        COMPRESSION, requires=requirements.COMPRESSION,
    )  # fmt: skip
    lookahead: int = option(
        8, "Tokens whose attention votes on what to keep: the prompt's last one, and N - 1 that the draft decodes.",
        COMPRESSION, metavar="N", requires=requirements.DRAFT, ge=1,
    )  # fmt: skip
    query_window: int = option(
        8, "The prompt's last N tokens vote too.",
        COMPRESSION, metavar="N", requires=requirements.COMPRESSION, off=0, ge=0,
    )  # fmt: skip
    query_reduce: Literal["rank", "mean", "max"] = option(
        "rank", "How the votes of several tokens are combined: the best rank that any gives, mean, or maximum.",
        COMPRESSION, requires=requirements.DRAFT,
    )  # fmt: skip
    pool: Odd = option(
        13, "Neighbouring tokens over which importance is averaged; odd, 1 for none.",
        COMPRESSION, metavar="N", requires=requirements.DRAFT, ge=1,
    )  # fmt: skip
    select_chunk: int = option(
        16, "Tokens kept or dropped together; 1 for each by itself.",
        COMPRESSION, metavar="N", requires=requirements.COMPRESSION, ge=1,
    )  # fmt: skip
    compress_above: Threshold = option(
        "auto", "Prompts up to this many tokens are read in full; auto: those that it would not make faster.",
        COMPRESSION, metavar="N|auto", requires=requirements.COMPRESSION,
    )  # fmt: skip
    keep_first: int = option(
        4, "First tokens that are always kept.", COMPRESSION, metavar="N", requires=requirements.COMPRESSION, ge=0
    )
    keep_last: int = option(
        64, "Last tokens that are always kept: the question.",
        COMPRESSION, metavar="N", requires=requirements.COMPRESSION, ge=1,
    )  # fmt: skip
    keep_private: bool = option(
        True,
        "Keep all that a row has behind the prefix it shares, where --keep leaves as much of the row. (default: on)",
        COMPRESSION, negative="no-keep-private", requires=requirements.COMPRESSION,
    )  # fmt: skip
    compress_per_row: bool = option(
        False, "Select tokens for each row by itself; its prefix is then no longer shared.",
        COMPRESSION, requires=requirements.DRAFT,
    )  # fmt: skip

    @property
    def drafts(self) -> bool:
        """Whether a draft model picks tokens."""
        return self.draft is not None

    @property
    def compresses(self) -> bool:
        """Whether anything picks tokens."""
        return self.drafts

    def check(self) -> None:
        super().check()
        if self.paper and (given := [name for name in PAPER if name in self.model_fields_set]):
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UsageError(f"--paper sets {flags} itself: leave one of them out")


class LoadingOptions(CompressionOptions, MemoryOptions, ModelOptions):
    """The options that decide what is loaded, and how much of it is used at a time."""


class JobOptions(LoadingOptions, PromptOptions, InputOptions):
    """The options of a job that makes prompts of rows and plans them for a model."""


class ScheduledOptions(JobOptions):
    """The options of a job of many rows, which are computed in some order."""

    schedule: Literal["prefix-tree", "fifo", "srjf", "srjf-calibrated"] = option(
        "prefix-tree",
        "Order in which rows are computed: by shared prefixes, as they come, the shortest first, or the one with the "
        "fewest tokens that are not cached.",
        MEMORY,
    )


class RunOptions(Settings):
    """What is said on the way."""

    progress_interval: float = option(
        30.0, "Seconds between progress lines off a terminal; each has the local time with its offset from UTC.",
        RUN, metavar="SECONDS", requires=requirements.PROGRESS, gt=0,
    )  # fmt: skip
    quiet: bool = option(False, "Warnings and errors only.", RUN, short="-q")
    debug: bool = option(False, "Show tracebacks.", RUN)


class MeasuringOptions(RunOptions):
    """What is said on the way where one measurement can take long."""

    progress_interval: float = option(
        10.0, "Seconds between lines that say what is measured.",
        RUN, metavar="SECONDS", requires=requirements.PROGRESS, gt=0,
    )  # fmt: skip


class PriceOptions(Settings):
    """What a machine costs."""

    price_per_hour: float | None = option(
        None, "What an hour of this machine costs, for predicted costs.",
        RUN, metavar="PRICE", needs="forecast", ge=0, allow_inf_nan=False,
    )  # fmt: skip


class ScoreSettings(PriceOptions, RunOptions, ScheduledOptions):
    """Everything `prefill score` can be told."""

    output: str | None = option(
        None,
        "Where the scores go: .parquet, .jsonl, or a directory (ending in /). (default: INPUT.scores.parquet)",
        FILES, short="-o", metavar="PATH",
    )  # fmt: skip
    report: str | None = option(
        None,
        "Where run.json goes; its page goes beside it, as .html. (default: OUTPUT.run.json beside the output)",
        FILES, metavar="PATH",
    )  # fmt: skip
    metrics_file: str | None = option(
        None, "Write metrics for Prometheus' textfile collector here too, e.g. prefill.prom.", FILES, metavar="PATH"
    )
    id_column: str | None = option(
        None, "Column that names a row in the output. (default: the row number)", FILES, metavar="NAME"
    )
    keep_columns: Names = option((), "Input columns to copy to the output, comma-separated.", FILES, metavar="NAMES")
    partition: bool = option(
        False, "Write the scores into folders named like those of the input: day=2026-01-01/.", FILES
    )
    resume: bool = option(False, "Go on with this job where it was stopped.", FILES)
    overwrite: bool = option(False, "Replace an output that exists.", FILES)

    engine: EngineName = option(
        "torch", "What runs the model: the layer walk, a plain transformers loop, or vLLM.",
        MODEL, metavar="|".join(ENGINES),
    )  # fmt: skip
    engine_options: KeyValues = option(
        {}, "An option passed on to the engine unchanged; repeatable, in a recipe a mapping.",
        MODEL, metavar="KEY=VALUE", repeatable=True, needs="options",
    )  # fmt: skip

    audit: int = option(
        0, "Read N random compressed rows in full as well, and report how many answers flip.",
        COMPRESSION, metavar="N", requires=requirements.DRAFT, off=0, ge=0,
    )  # fmt: skip
    max_flips: float = option(
        0.01, "Share of flipped answers that --keep auto may cause, at 95 % confidence.",
        COMPRESSION, metavar="RATE", requires=requirements.KEEP_AUTO, gt=0, lt=1,
    )  # fmt: skip
    truth: str | None = option(
        None, "Column with the right answer, for the audit; kept in the output.",
        COMPRESSION, metavar="COLUMN", requires=requirements.AUDIT,
    )  # fmt: skip

    max_error_rate: float = option(
        0.0, "Share of error rows above which the exit code is 3.", RUN, metavar="RATE", ge=0, le=1
    )
    skip_empty: bool = option(False, "Exit 99 if the input has no rows.", RUN)
    dry_run: bool = option(
        False,
        "Read, tokenise and plan only: lengths, sharing, packs, predicted time. No weights are loaded.",
        RUN,
        needs="forecast",
    )
    profile: str | None = option(
        None, "Profile that prefill profile wrote, to predict times. (default: profile.json, if it exists and fits)",
        RUN, metavar="PATH", needs="forecast",
    )  # fmt: skip

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        require(found, ("price_per_hour",), requirements.FORECAST)
        return found

    def check(self) -> None:
        super().check()
        if self.resume and self.overwrite:
            raise UsageError("--resume goes on with the output, --overwrite replaces it: give one of them")
        refuse(self.engine, self._needs())
        check_keep(self.keep, self.draft)

    def _needs(self) -> dict[str, Capability]:
        """What the options that are not at their defaults ask of the engine."""
        found: dict[str, Capability] = {}
        for name, field in type(self).model_fields.items():
            needed = extra_of(type(self), name).get("needs")
            if needed and getattr(self, name) != field.default:
                found[name] = needed
        return found


def check_keep(keep: float | Literal["auto"], draft: str | None) -> None:
    """Raise UsageError for a rate that is none, or one that lacks a draft."""
    if keep != "auto" and not 0 < keep <= 1:
        raise UsageError(f"--keep {keep:g}: must be a rate above 0 and up to 1, or auto")
    if keep != 1 and draft is None:
        raise UsageError(f"--keep {keep} needs --draft: a small model with the same tokenizer that picks the tokens")


class InspectSettings(RunOptions, JobOptions):
    """Everything `prefill inspect` can be told."""

    keep: Rate = option(
        1.0, "Share of the prompt's tokens that the model reads; below 1 needs --draft.", COMPRESSION, metavar="RATE"
    )
    row: str | None = option(None, "Id of the row (with --id-column), else its number, from 0.", FILES, metavar="ID")
    id_column: str | None = option(None, "Column that names a row. (default: the row number)", FILES, metavar="NAME")
    html: str | None = option(None, "Write a page to this file as well.", FILES, metavar="PATH")

    def check(self) -> None:
        super().check()
        if self.row is None:
            raise UsageError("no --row given: name the row to look at, by its number or its --id-column")
        if self.keep == "auto":
            raise UsageError("--keep auto is for a whole job; give the rate to look at")
        check_keep(self.keep, self.draft)


QUICK_ROWS = 60
"""Rows of INPUT that `prefill bench` compares unless it is told otherwise."""


class BenchSettings(MeasuringOptions, ScheduledOptions):
    """Everything `prefill bench` can be told."""

    full: bool = option(
        False, "All methods, both usual workloads, long prompts, all rows of INPUT: minutes to hours.", BENCH
    )
    inputs: tuple[str, ...] = Field(
        default=(), description="Parquet or JSONL: files, directories, globs or URLs. Without: made workloads."
    )
    seed: int = option(
        0, "Seed of --sample, of made workloads and of random selections.",
        FILES, metavar="N", requires=requirements.RANDOM,
    )  # fmt: skip
    draft: str | None = option(
        None,
        "Small model with the same tokenizer that picks the tokens. (default: with the sample model, its draft)",
        COMPRESSION, metavar="DIR|NAME", requires=requirements.SPECPREFILL,
    )  # fmt: skip
    keep: Rates = option(  # type: ignore[assignment]  # several rates side by side
        (0.2,),
        "Share of the tokens that a compressing method keeps; repeatable.",
        BENCH, metavar="RATE", repeatable=True, requires=requirements.COMPRESSION,
    )  # fmt: skip
    compress_above: Threshold = option(
        0, "Prompts up to this many tokens are read in full; auto: those that it would not make faster.",
        COMPRESSION, metavar="N|auto", requires=requirements.COMPRESSION,
    )  # fmt: skip
    workload: Names = option(
        (),
        "A made workload: post-recommendation, credit-verification, needle, multi-needle, variable-tracking, "
        "common-words, frequent-words or qa; repeatable. (default: needle, with --full post-recommendation too)",
        BENCH, metavar="NAME", repeatable=True,
    )  # fmt: skip
    method: Names = option(
        (),
        "A method to compare: hf, full, hybrid (always), specprefill, random, ends or bm25; repeatable. (default: hf, "
        "hybrid and, where there is a draft, specprefill and random; with --full all)",
        BENCH, metavar="NAME", repeatable=True,
    )  # fmt: skip
    rows: int = option(60, "Rows of a made workload.", BENCH, metavar="N", ge=2)
    tokens: int | None = option(
        None,
        "Most tokens in a prompt of a made workload. (default: 1000, with --full 4000)",
        BENCH,
        metavar="N",
        ge=64,
    )
    scale: float = option(1.0, "Multiplies --rows and --tokens.", BENCH, metavar="FACTOR", gt=0)
    rounds: int = option(
        3, "Timed rounds, after one to warm up; 0: the times are those of that one.", BENCH, metavar="N", ge=0
    )
    truth: str | None = option(
        None, "Column of INPUT with the right answer, for accuracy and AUC.", BENCH, metavar="COLUMN"
    )
    output: str = option(
        "bench.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        FILES,
        short="-o",
        metavar="PATH",
    )

    @property
    def drafts(self) -> bool:
        return (self.draft is not None or self.model is None) and self.compares("specprefill")

    @property
    def compresses(self) -> bool:
        return self.drafts or any(self.compares(name) for name in ("random", "ends", "bm25"))

    @property
    def draws(self) -> bool:
        return not self.inputs or super().draws or self.compares("random")

    def compares(self, method: str) -> bool:
        """Whether the method is among those that are compared; without a draft only those named drop tokens."""
        if self.method:
            return method in self.method
        return (self.draft is not None or self.model is None) and (self.full or method in ("specprefill", "random"))

    def complete(self) -> BenchSettings:
        """These settings with what was not given, as `full` says."""
        left: dict[str, Any] = {}
        if self.tokens is None:
            left["tokens"] = 4000 if self.full else 1000
        if not self.inputs and not self.workload:
            left["workload"] = ("post-recommendation", "needle") if self.full else ("needle",)
        if self.inputs and self.limit is None and self.sample is None and not self.full:
            left["limit"] = QUICK_ROWS
        return self.model_copy(update=left)

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        require(found, ("workload", "rows", "tokens", "scale"), requirements.MADE_WORKLOADS)
        for_input = ("limit", "sample", "template", "truth", "prompt_column", "literal", "max_row_bytes")
        require(found, for_input, requirements.INPUT)
        return found

    def check(self) -> None:
        super().check()
        if not self.keep:
            raise UsageError("--keep: give a rate above 0 and up to 1")


class ProfileSettings(PriceOptions, MeasuringOptions, ScheduledOptions):
    """Everything `prefill profile` can be told."""

    inputs: tuple[str, ...] = Field(
        default=(),
        description="Parquet or JSONL: files, directories, globs or URLs. What is in it, and what scoring it takes.",
    )
    full: bool = option(
        False, "All modes and replays, longer measurements: tens of minutes, hours for a large model.", PROFILE
    )
    keep: Rate = option(
        1.0, "Share of each prompt's tokens that the model reads; below 1 needs --draft.", COMPRESSION, metavar="RATE"
    )
    mode: Names = option(
        (),
        "A mode to find the longest prompt of: full, chunked, drop, hybrid-copy or hybrid; repeatable. (default: full "
        "and hybrid, with --full all)",
        PROFILE, metavar="NAME", repeatable=True,
    )  # fmt: skip
    confirm_seconds: float | None = option(
        None,
        "Longest run, by its estimate, to confirm a length with; 0: confirm none. (default: 20, with --full 120)",
        PROFILE, metavar="SECONDS", ge=0, allow_inf_nan=False,
    )  # fmt: skip
    fit_seconds: float | None = option(
        None, "Approximate time for the runs that completion times are fitted to. (default: 10, with --full 60)",
        PROFILE, metavar="SECONDS", gt=0, allow_inf_nan=False,
    )  # fmt: skip
    replay: Names = option(
        (),
        "A workload for a simulated server: post-recommendation, post-recommendation-mixed, credit-verification, or "
        "none; repeatable. (default: post-recommendation, with --full all)",
        REPLAY, metavar="NAME", repeatable=True,
    )  # fmt: skip
    replay_scale: float = option(
        1.0, "Multiplies the lengths of its requests.",
        REPLAY, metavar="FACTOR", requires=requirements.REPLAY, gt=0, allow_inf_nan=False,
    )  # fmt: skip
    cache_tokens: int | None = option(
        None, "Tokens that its prefix cache holds. (default: as many as fit the budget with the K,V of all layers)",
        REPLAY, metavar="N", requires=requirements.REPLAY, ge=0,
    )  # fmt: skip
    fairness: Fairness = option(
        (0.05, 0.0, 0.5),
        "Lambda of srjf-calibrated, as a share of the tokens that the machine computes in a second; repeatable, the "
        "first is compared with other policies.",
        REPLAY, metavar="SHARE", repeatable=True, requires=requirements.REPLAY,
    )  # fmt: skip
    output: str = option(
        "profile.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        FILES,
        short="-o",
        metavar="PATH",
    )

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        of_input = (PriceOptions, InputOptions, PromptOptions, CompressionOptions, MemoryOptions)
        names = ["schedule", *(name for kind in of_input for name in kind.model_fields)]
        without = {"inputs", "memory", "chunk_tokens"}  # these are for the measurements too
        require(found, [name for name in names if name not in without], requirements.INPUT)
        return found

    def complete(self) -> ProfileSettings:
        """These settings with what was not given, as `full` says."""
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
            check_keep(self.keep, self.draft)
        if not self.fairness:
            raise UsageError("--fairness: give a share of 0 or more")
        if "none" in self.replay and len(self.replay) > 1:
            raise UsageError("--replay none goes with no other workload")


COMMANDS: dict[str, type[Settings]] = {
    "score": ScoreSettings,
    "profile": ProfileSettings,
    "bench": BenchSettings,
    "inspect": InspectSettings,
}
"""The commands that take options, by name."""

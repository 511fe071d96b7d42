"""Everything `prefill bench` can be told."""

from __future__ import annotations

from typing import Any, Literal

from prefillcli.compress.pickers.registry import PICKERS
from prefillcli.core.feature import features, option_groups
from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.groups import MeasuringOptions, ScheduledOptions
from prefillcli.options.option import BENCH, COMPRESSION, FILES, argument, option, require
from prefillcli.options.requirements import Requirement
from prefillcli.options.values import KeepRates, NameList, TokenThreshold

QUICK_ROWS = 60
"""Rows of INPUT that `prefill bench` compares by default."""


class BenchSettings(
    *option_groups("bench"),  # type: ignore[misc]  # which features there are is known when it runs
    MeasuringOptions,
    ScheduledOptions,
):
    """Everything `prefill bench` can be told."""

    full: bool = option(
        False,
        "All methods, long prompts, all rows of INPUT: minutes to hours.",
        BENCH, changes="report",
    )  # fmt: skip
    inputs: tuple[str, ...] = argument(
        (),
        "Parquet or JSONL: files, directories, globs or URLs. Without: made prompts.",
        changes="scores",
        path="rows",
    )
    seed: int = option(
        0,
        "Seed for --sample, made prompts and random selections.",
        FILES, changes="rows", metavar="N", requires=requirements.RANDOM,
    )  # fmt: skip
    draft: str | None = option(
        None,
        "Small model with the same tokenizer, which picks the tokens; self: the model's own first layers. (default: "
        "with the sample model, its draft)",
        COMPRESSION, changes="scores", metavar="DIR|NAME|self", path="model", requires=requirements.SPECPREFILL,
    )  # fmt: skip
    keep: KeepRates = option(  # type: ignore[assignment]  # several rates side by side
        (0.2,),
        "Share of the tokens that compressing methods keep; repeatable.",
        BENCH, changes="scores", metavar="RATE", repeatable=True, requires=requirements.COMPRESSION,
    )  # fmt: skip
    compress_above: TokenThreshold = option(
        0,
        "Prompts up to this many tokens are read in full; auto: those that compression would not make faster.",
        COMPRESSION, changes="scores", metavar="N|auto", requires=requirements.COMPRESSION,
    )  # fmt: skip
    workload: Literal["needle"] = option(
        "needle",
        "What is made without INPUT: needle, questions about one line of a long history.",
        BENCH, changes="rows",
    )  # fmt: skip
    method: NameList = option(
        (),
        "A method to compare: hf, full, hybrid (always), specprefill, self-draft, gemfilter, random, ends, bm25, "
        "early-exit or vllm; repeatable. (default: hf, hybrid and, where there is a draft, specprefill, or with "
        "--draft self self-draft, and random; with --full all but early-exit and vllm). With --rationale: plain "
        "(always), lookup, suffix, retrieval, draft, hierarchy, auto, generate, generate-padded or vllm. (default: "
        "all but vllm)",
        BENCH, changes="report", metavar="NAME", repeatable=True,
    )  # fmt: skip
    rationale: int = option(
        0,
        "Compare ways to write up to N tokens behind each row's answer, in the place of ways to score.",
        BENCH, changes="scores", metavar="N", off=0, ge=0,
    )  # fmt: skip
    rows: int = option(60, "Rows that are made without INPUT.", BENCH, changes="rows", metavar="N", ge=2)
    tokens: int | None = option(
        None,
        "Most tokens in a made prompt. (default: 1000, with --full 4000)",
        BENCH, changes="rows", metavar="N", ge=64,
    )  # fmt: skip
    scale: float = option(1.0, "Multiplies --rows and --tokens.", BENCH, changes="rows", metavar="FACTOR", gt=0)
    rounds: int = option(
        3,
        "Timed rounds after one warm-up round; 0: take the times of the warm-up.",
        BENCH, changes="report", metavar="N", ge=0,
    )  # fmt: skip
    truth: str | None = option(
        None,
        "Column of INPUT with the right answer, for accuracy and AUC.",
        BENCH, changes="report", metavar="COLUMN",
    )  # fmt: skip
    output: str = option(
        "bench.json",
        "JSON file for the numbers; the page goes beside it, as .html.",
        FILES, changes="files", short="-o", metavar="PATH", path="bench",
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
        return (
            not self.inputs
            or super().is_random
            or any(self.compares(kind.name) for kind in PICKERS.values() if kind.random)
        )

    def compares(self, method: str) -> bool:
        """Whether a method that drops tokens is compared: if it was named, or by default where there is a draft.

        With `rationale` none is, but a draft that guesses tokens is loaded as if it would pick them.
        """
        if self.rationale:
            return method == "specprefill" and (not self.method or bool({"draft", "hierarchy"} & {*self.method}))
        if self.method or method == "vllm" or any(method in each.methods for each in features()):
            return method in self.method
        if self.drafts_itself and method in PICKERS and PICKERS[method].needs == "draft":
            return False
        quick = ("self-draft" if self.drafts_itself else "specprefill", "random")
        return (self.draft is not None or self.model is None) and (self.full or method in quick)

    def with_defaults(self) -> BenchSettings:
        """These settings with defaults for what was not given, larger ones with `full`."""
        left: dict[str, Any] = {}
        if self.tokens is None:
            left["tokens"] = 4000 if self.full else 1000
        if self.inputs and self.limit is None and self.sample is None and not self.full:
            left["limit"] = QUICK_ROWS
        return self.model_copy(update=left)

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        require(found, ("workload", "rows", "tokens", "scale"), requirements.MADE_PROMPTS)
        for_input = ("limit", "sample", "template", "truth", "prompt_column", "literal", "max_row_bytes")
        require(found, for_input, requirements.INPUT)
        return found

    def check(self) -> None:
        super().check()
        if not self.keep:
            raise UsageError("--keep: give a rate above 0 and up to 1")

"""Everything `prefill score` can be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prefillcli.core.feature import Objection, features_of, option_groups
from prefillcli.data.output.formats import FILE_ENDINGS
from prefillcli.data.shard import Shard
from prefillcli.engines.registry import ENGINES, Capability, refuse
from prefillcli.errors import UsageError
from prefillcli.options import requirements
from prefillcli.options.compression import check_keep
from prefillcli.options.groups import (
    AdapterOptions,
    EndingOptions,
    LogOptions,
    PriceOptions,
    RunOptions,
    ScheduledOptions,
    WeightsOptions,
    WorkerOptions,
)
from prefillcli.options.option import EARLY_EXIT, FILES, MODEL, RUN, details_of, option, require
from prefillcli.options.rationale import RationaleOptions, check_writing
from prefillcli.options.requirements import Requirement
from prefillcli.options.values import EngineName, KeyValues, NameList, ShardName

# What `--deterministic` is not promised for, and why.


@dataclass(frozen=True, slots=True)
class _Limit:
    """Other options with which a row's score would depend on more than the row, or may."""

    given: Callable[[Any], bool]
    reason: str
    remedy: str


_LIMITS = (
    _Limit(
        lambda s: s.compile,
        "compiled layers have kernels of their own for each size of chunk",
        "leave --compile out",
    ),
    _Limit(
        lambda s: s.compresses,
        "which tokens of a prompt are kept is not the same to the last bit with other neighbours",
        "leave --draft and --keep out",
    ),
    _Limit(
        lambda s: s.rationale > 0,
        "texts are written for several rows at a time, and a near tie may fall otherwise with others",
        "leave --rationale out; --evidence is covered",
    ),
)


def check_deterministic(settings: Any) -> None:
    """Raise UsageError for options of `prefill score` that `--deterministic`, if it is given, does not cover."""
    for limit in _LIMITS:
        if settings.deterministic and limit.given(settings):
            raise UsageError(f"--deterministic: {limit.reason}\n{limit.remedy}, or leave --deterministic out")


class ScoreSettings(
    *option_groups("score"),  # type: ignore[misc]  # which features there are is known when it runs
    RationaleOptions,
    EndingOptions,
    WorkerOptions,
    PriceOptions,
    LogOptions,
    RunOptions,
    WeightsOptions,
    AdapterOptions,
    ScheduledOptions,
):
    """Everything `prefill score` can be told."""

    output: str | None = option(
        None,
        f"Where the scores go: {', '.join(FILE_ENDINGS)}, or a folder (ending in /). (default: INPUT.scores.parquet)",
        FILES, changes="files", short="-o", metavar="PATH", path="output",
    )  # fmt: skip
    id_column: str | None = option(
        None,
        "Column that names a row in the output. (default: the row number)",
        FILES, changes="columns", metavar="NAME",
    )  # fmt: skip
    keep_columns: NameList = option(
        (), "Input columns to copy to the output, comma-separated.", FILES, changes="columns", metavar="NAMES"
    )
    partition: bool = option(
        False, "Write the scores into folders named like the input's: day=2026-01-01/.", FILES, changes="columns"
    )
    shard: ShardName | None = option(
        None,
        "Score the I-th of N shares of the rows, on one of N machines; prefill merge makes the output of all.",
        FILES, changes="files", metavar="I/N",
    )  # fmt: skip
    resume: bool = option(False, "Continue this job where it stopped.", FILES, changes="files")

    engine: EngineName = option(
        "torch",
        "What runs the model: the layer walk, a plain transformers loop, or vLLM.",
        MODEL, changes="scores", metavar="|".join(ENGINES),
    )  # fmt: skip
    engine_options: KeyValues = option(
        {},
        "Option passed to the engine unchanged; repeatable; a mapping in a recipe.",
        MODEL, changes="scores", metavar="KEY=VALUE", repeatable=True, needs="options",
    )  # fmt: skip

    show_text: bool = option(
        False,
        "Put the text of rows that the report names into it, and a few rationales; without it, none is.",
        "Evaluation", changes="report", requires=requirements.SHOWN_TEXT,
    )  # fmt: skip

    max_flips: float = option(
        0.01,
        "Share of answers that --exit, or --keep auto, may flip, at 95 % confidence; with --exit of each answer.",
        EARLY_EXIT, changes="scores", metavar="RATE", requires=requirements.BOUNDED_FLIPS, gt=0, lt=1,
    )  # fmt: skip
    audit: int = option(
        0,
        "Also read N random rows in full that are compressed or may leave early, and report how many answers flip.",
        EARLY_EXIT, changes="columns", metavar="N", needs="compression", requires=requirements.AUDITABLE, off=0, ge=0,
    )  # fmt: skip

    dry_run: bool = option(
        False,
        "Read, tokenise and plan only: lengths, sharing, packs, predicted time. No weights are loaded.",
        RUN, changes="report", needs="forecast",
    )  # fmt: skip
    profile: str | None = option(
        None,
        "Profile written by prefill profile, to predict times. (default: profile.json, if it exists and fits)",
        RUN, changes="speed", metavar="PATH", path="file", needs="forecast",
    )  # fmt: skip

    @property
    def computes_here(self) -> bool:
        return "threads" in ENGINES[self.engine].can

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        found = super().required()
        require(found, ("price_per_hour",), requirements.FORECAST)
        return found

    def check(self) -> None:
        super().check()
        if self.resume and self.overwrite:
            raise UsageError("--resume continues the output, --overwrite replaces it: give only one of them")
        refuse(self.engine, self._engine_needs())
        check_keep(self.keep, compresses=self.compresses)
        for each in features_of(self):
            each.check()
        self.check_adapters(streamed=self.weights == "stream")
        translated = self.draft_tokenizer == "translate"
        check_writing(self, head=self.head, draft=self.draft, own_tokenizer=translated)
        if self.shard is not None:
            self.refuse_joint("--shard")
        check_deterministic(self)

    def refuse_joint(self, option: str) -> None:
        """Raise UsageError for other options with which rows cannot be scored apart from one another."""
        for objection in self._joint(option):
            raise UsageError(f"{option}: {objection.reason}\n{objection.remedy}")

    def _joint(self, option: str) -> Iterator[Objection]:
        """Why rows cannot be scored apart from the others of their job, as `option` would do."""
        found = [each.joint(option) for each in features_of(self)]
        yield from (objection for objection in found if objection is not None)
        if self.keep == "auto":
            yield Objection(
                "--keep auto chooses one rate for all rows of a job",
                "choose it in a run over a sample, then give that rate",
            )
        if self.audit:
            yield Objection("--audit draws from all rows", "audit a sample of the rows in a job of its own")
        if self.compresses and not self._row_by_row:
            yield Objection(
                "rows that share a prefix keep the same tokens of it, and some of these rows are not read",
                "give --compress-per-row --no-keep-private, so that a row's tokens follow from the row alone",
            )
        if self.rationale_limit is not None:
            yield Objection(
                "--rationale-limit counts the chosen rows of the whole input in their order",
                "leave it out, and choose fewer rows with --rationale-when",
            )

    @property
    def _row_by_row(self) -> bool:
        """Whether the tokens that are kept of a row follow from the row alone."""
        return self.compress_per_row and (self.paper or not self.keep_private)

    @property
    def shard_of(self) -> Shard | None:
        """The share of the rows that this run scores; None for all."""
        return None if self.shard is None else Shard.parse(self.shard)

    def _engine_needs(self) -> dict[str, Capability]:
        """What the engine must be able to do, by the option that needs it: those that are not at their default."""
        found: dict[str, Capability] = {}
        for name, field in type(self).model_fields.items():
            needed = details_of(type(self), name).needs
            if needed and getattr(self, name) != field.default:
                found[name] = needed
        return found

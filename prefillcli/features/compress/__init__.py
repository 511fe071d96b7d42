"""Compression: the model reads the tokens of a prompt that a draft, or its own first layers, find important."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature, Foresight, Objection, features_of
from prefillcli.errors import UsageError, counted
from prefillcli.features.compress.options import (
    BenchOptions,
    CompressionOptions,
    InspectOptions,
    ProfileOptions,
    compression_of,
    keep_rate,
)
from prefillcli.options.option import COMPRESSION, details_of
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    from prefillcli.core.feature import (
        Counts,
        Job,
        Labels,
        LocalModels,
        Models,
        Opened,
        Opening,
        Prompt,
        Question,
        ReadPrompt,
        RowColumns,
        RunReport,
        Scorer,
        Section,
        Tick,
        Window,
    )
    from prefillcli.features.compress.compressor import Compressor, WindowCompressor

# The options whose values are always in the digest of compression, in this order.
HASHED = (
    *("keep", "paper", "lookahead", "query_window", "query_reduce", "pool", "select_chunk", "compress_above"),
    *("keep_first", "keep_last", "keep_private", "compress_per_row", "max_flips", "audit", "truth"),
)


class Compress(Feature):
    """Compression in a job. The plan of the job has the keep rate that `--keep auto` has chosen."""

    order = 20
    options = {
        "score": CompressionOptions,
        "inspect": InspectOptions,
        "profile": ProfileOptions,
        "bench": BenchOptions,
    }
    flips = True
    rewrites = True
    plan_keys = ("keep", "keep_auto")
    keys = {"keep": None, "keep_auto": None}
    _methods: Mapping[str, int] = {}
    _windows: WindowCompressor | None = None

    @classmethod
    def asked(cls, settings: Any) -> bool:
        return settings.draft is not None or (settings.keep != 1 and not isinstance(settings, BenchOptions))

    def check(self) -> None:
        settings = self.settings
        if isinstance(settings, BenchOptions):
            return
        if settings.keep == "auto" and isinstance(settings, InspectOptions):
            raise UsageError("--keep auto is for a whole job: give a rate")
        if settings.keep == "auto" and isinstance(settings, ProfileOptions):
            raise UsageError(
                "--keep auto is for a whole job; with --draft, prefill profile predicts several rates anyway"
            )
        settings.check_keep()
        if settings.draft == "bm25":
            require_extra("bm25", "--draft bm25")

    def joint(self, option: str) -> Objection | None:
        settings = self.settings
        if settings.keep == "auto":
            return Objection(
                "--keep auto chooses one rate for all rows of a job",
                "choose it in a run over a sample, then give that rate",
            )
        if settings.compress_per_row and (settings.paper or not settings.keep_private):
            return None
        return Objection(
            "rows that share a prefix keep the same tokens of it, and some of these rows are not read",
            "give --compress-per-row --no-keep-private, so that a row's tokens follow from the row alone",
        )

    def uneven(self) -> Objection:
        return Objection(
            "which tokens of a prompt are kept is not the same to the last bit with other neighbours",
            "leave --draft and --keep out",
        )

    def bounds_flips(self) -> bool:
        return bool(self.settings.keep == "auto")

    def between_layers(self) -> bool:
        return bool(self.settings.drafts_itself)

    def meaningless(self, labels: Labels) -> list[str]:
        from prefillcli.stats.evaluation import Measure

        return ["keep auto"] if self.settings.keep == "auto" and labels.measure is Measure.VALUES else []

    def columns_known(self, columns: Collection[str]) -> None:
        settings = self.settings
        if settings.uses_draft and any(each.needs_draft() for each in features_of(settings)):
            return
        if "keep" not in settings.model_fields_set and "keep" not in columns:
            advice = [each.draft_advice for each in features_of(settings) if each.asks() and each.draft_advice]
            guessing = "".join(f"{each}, " for each in advice)
            raise UsageError(
                "--draft has nothing to compress: there is no --keep, and the input has no column keep\n"
                f"give the share of the tokens to keep, --keep 0.2 for example, {guessing}or leave --draft out"
            )

    def starting(self) -> None:
        settings = self.settings
        if settings.draft is not None and not settings.uses_draft and isinstance(settings, InspectOptions):
            raise UsageError(
                f"--draft {settings.draft}: prefill inspect shows the tokens that a draft model picks\n"
                "score the row with prefill score, which says how many tokens it kept"
            )

    def row_columns(self) -> RowColumns:
        from prefillcli.features.compress.compressor import COMPRESSION_COLUMNS

        return COMPRESSION_COLUMNS

    def identity(self, opening: Opening, values: dict[str, Any], models: LocalModels) -> Mapping[str, str]:
        from prefillcli.data.proof import hash_value
        from prefillcli.jobs.identity import added

        own = {name: values.pop(name, None) for name in HASHED}
        rest = [name for name in values if details_of(type(self.settings), name).panel == COMPRESSION]
        rest_values = {name: values.pop(name) for name in rest}
        found = {"compression": hash_value([*map(list, own.items()), *added(rest_values, ())])}
        draft = self.settings.draft
        if self.settings.uses_draft:  # it goes by the contents of its files
            return found
        return found | {"draft": hash_value([draft, self.settings.seed] if draft == "random" else draft)}

    def foresee(self, opened: Opened, budget: int) -> Foresight | None:
        if self.settings.draft is None:
            return None
        from prefillcli.features.compress.compressor import KeptTokens

        return KeptTokens(self.settings, opened, budget)

    def read_as(self) -> list[Any]:
        return [self.settings.keep, asdict(compression_of(self.settings))]

    def first_window(self, job: Job, window: Window) -> None:
        self._methods = job.sink.counts.tallies.methods

    def load(self, models: Models[Any]) -> Any:
        from prefillcli.features.compress.load import load_draft

        return load_draft(models)

    @classmethod
    def work(cls, beside: Any, asked: Any, tick: Tick) -> Any:
        return asked.answer(beside, tick)

    def questions(
        self, scorer: Scorer, prompts: Sequence[Prompt], tick: Tick, window: Window | None, done: Collection[int]
    ) -> tuple[list[Question], int]:
        from prefillcli.features.compress.compressor import WindowCompressor

        if self._windows is None:
            self._windows = WindowCompressor(scorer, self.compressor(scorer), methods=self._methods)
        compressor = self._windows.compressor
        before = compressor.picker.tokens
        found = compressor.compress(prompts, tick) if window is None else self._windows(window, done, tick)
        return found, compressor.picker.tokens - before

    def compressor(self, scorer: Scorer) -> Compressor:
        """The compressor of a scorer's prompts: with the draft beside the model, or with the drafts of workers."""
        from prefillcli.features.compress.compressor import compressor_of
        from prefillcli.features.compress.load import RemoteDraft
        from prefillcli.jobs.runners.pool import Pool

        pool = scorer.pool
        draft = RemoteDraft(pool, type(self)) if isinstance(pool, Pool) else scorer.beside.get(type(self))
        return compressor_of(self.settings, scorer.opened, draft, scorer.plan)

    def inspected(
        self, models: Models[Any], prompts: Sequence[Prompt], number: int, shared: Sequence[int], tick: Tick
    ) -> ReadPrompt | None:
        from prefillcli.features.compress.compressor import compressor_of, inspected

        draft = models.beside.get(type(self))
        if draft is None:
            return None
        return inspected(compressor_of(self.settings, models.opened, draft), prompts, shared, number, tick)

    def reported(self, job: Job, counts: Counts | None) -> None:
        if counts is not None and hasattr(job, "builder"):
            job.report.blocks["keep"] = keep_rate(self.settings, job.sink.plan)
            job.report.blocks["keep_auto"] = job.sink.plan.get("keep_auto")

    @classmethod
    def section(cls, report: RunReport) -> Section | None:
        from prefillcli.report.section import Part, Section

        keep, auto, tokens = report.blocks["keep"], report.blocks["keep_auto"], report.tokens
        if keep is None:
            return None
        found = Section(title="Compression", parts=[Part(note=f"Chosen by --keep auto: {keep:g}.")] if auto else [])
        if tokens.prompt:
            kept = f"{counted(tokens.kept, 'token')} kept ({tokens.kept / tokens.prompt:.1%}, keep rate {keep:g})"
            found.lines.append(("compression", f"{kept}, {tokens.draft:,} computed by the draft"))
        if trials := (auto or {}).get("trials"):
            table = [["tried rate", "rows", "flips", "at most (95 %)"]] + [
                [f"{each['keep']:g}", f"{each['rows']:,}", f"{each['flips']:,}", f"{100 * each['bound']:.2f} %"]
                for each in trials
            ]
            found.parts.append(Part(title="Keep rates that were tried", table=table))
        return found

    @classmethod
    def failure(cls, counts: Counts) -> str | None:
        from prefillcli.features.compress.selection import fallbacks_of_useless_draft

        fallbacks = fallbacks_of_useless_draft(counts.tallies.methods)
        if not fallbacks:
            return None
        reasons = ", ".join(f"{method} {rows:,}" for method, rows in fallbacks.items())
        return (
            f"none of the {counted(sum(fallbacks.values()), 'row')} that were to be compressed was ({reasons})\n"
            "they were read in full and their scores are there; take another --draft, or leave it out"
        )


FEATURE = Compress

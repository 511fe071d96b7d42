"""Compression: the model reads the tokens of a prompt that a draft, or its own first layers, find important."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import RootModel

from prefillcli.core.roles import Judge, Reading
from prefillcli.errors import UsageError, counted
from prefillcli.options.followup import WritingOptions
from prefillcli.options.option import changed
from prefillcli.options.reading import CompressionOptions, FlipOptions
from prefillcli.reading.compress.compressor import KeepChoice, WindowCompressor, compressor_of
from prefillcli.reading.compress.load import RemoteDraft
from prefillcli.reading.compress.selection import fallbacks_of_useless_draft
from prefillcli.reading.compress.settings import compression_of, keep_rate
from prefillcli.report.finding import Finding
from prefillcli.report.section import Part, Section
from prefillcli.rows.output.columns import added
from prefillcli.rows.proof import hash_value

if TYPE_CHECKING:
    from prefillcli.core.request import Request, Tick
    from prefillcli.core.run import Reached, Run
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.reading.compress.compressor import Compressor
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.tallies import Counts
    from prefillcli.rows.records import Prompt, Window

# The options whose values are always in the digest of compression, in this order.
HASHED = (
    *("keep", "paper", "lookahead", "query_window", "query_reduce", "pool", "select_chunk", "compress_above"),
    *("keep_first", "keep_last", "keep_private", "compress_per_row", "max_flips", "audit", "truth"),
)


class KeepTrials(Finding, RootModel[KeepChoice]):
    """The keep rates that `--keep auto` has tried, and the chosen one."""

    key: ClassVar[str] = "keep_auto"


class KeepRate(Finding, RootModel[float]):
    """The share of the tokens that compression keeps."""

    key: ClassVar[str] = "keep"
    place: ClassVar[int] = 9

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on compression."""
        keep, auto, tokens = self.root, KeepTrials.from_report(report), report.tokens
        found = Section(title="Compression", parts=[Part(note=f"Chosen by --keep auto: {keep:g}.")] if auto else [])
        if tokens.prompt:
            kept = f"{counted(tokens.kept, 'token')} kept ({tokens.kept / tokens.prompt:.1%}, keep rate {keep:g})"
            found.lines.append(("compression", f"{kept}, {tokens.draft:,} computed by the draft"))
        if auto is not None and auto.root.trials:
            table = [["tried rate", "rows", "flips", "at most (95 %)"]] + [
                [f"{each.keep:g}", f"{each.rows:,}", f"{each.flips:,}", f"{100 * each.bound:.2f} %"]
                for each in auto.root.trials
            ]
            found.parts.append(Part(title="Keep rates that were tried", table=table))
        return [found]


class Compress(Reading, Judge):
    """Compression in a job. The ledger of the job has the keep rate that `--keep auto` has chosen."""

    def __init__(self, options: CompressionOptions, flips: FlipOptions, seed: int) -> None:
        self._options, self._seed = options, seed
        self.groups = added({"audit": flips.audit})
        self._methods: Mapping[str, int] = {}
        self._windows: WindowCompressor | None = None

    def require_use(self, texts: WritingOptions, columns: Collection[str]) -> None:
        """Raise UsageError if nothing of rows with these columns would be compressed, and the draft guesses no
        tokens of `texts` either."""
        if self._options.uses_draft and texts.speculates_by_draft:
            return
        if not self._options.is_given("keep") and "keep" not in columns:
            guessing = "--speculation draft if it is to guess tokens of rationales, "
            guessing = guessing if texts.rationale else ""
            raise UsageError(
                "--draft has nothing to compress: there is no --keep, and the input has no column keep\n"
                f"give the share of the tokens to keep, --keep 0.2 for example, {guessing}or leave --draft out"
            )

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        own = {name: values.pop(name, None) for name in HASHED}
        rest = {name: values.pop(name) for name in [*values] if name in CompressionOptions.model_fields}
        found = {"compression": hash_value([*map(list, own.items()), *changed(CompressionOptions, rest)])}
        draft = self._options.draft
        if self._options.uses_draft:  # it is identified by the contents of its files
            return found
        return found | {"draft": hash_value([draft, self._seed] if draft == "random" else draft)}

    def read_as(self) -> list[Any]:
        """Return how prompts are read, as a value to hash: exits learn from the answers and are used again later."""
        return [self._options.keep, asdict(compression_of(self._options))]

    def begin(self, run: Run) -> None:
        """Count on from the rows that earlier attempts have written."""
        self._methods = run.sink.counts.tallies.methods

    def requests(
        self, scorer: ModelScorer, prompts: Sequence[Prompt], tick: Tick, window: Window | None, done: Collection[int]
    ) -> tuple[list[Request], int]:
        """Return how the model reads these prompts, and the tokens of the draft; see `ModelScorer.requests`."""
        if self._windows is None:
            self._windows = WindowCompressor(scorer, self.compressor(scorer), methods=self._methods)
        compressor = self._windows.compressor
        before = compressor.picker.tokens
        found = compressor.compress(prompts, tick) if window is None else self._windows(window, done, tick)
        return found, compressor.picker.tokens - before

    def compressor(self, scorer: ModelScorer) -> Compressor:
        """Return the compressor of a scorer's prompts: with the draft beside the model, or with the drafts of
        workers."""
        remote = scorer.pool.remote
        draft = scorer.models.beside.get("draft") if remote is None else RemoteDraft(remote)
        return compressor_of(scorer.settings, scorer.inputs.opened, draft, scorer.ledger.settled)

    def reported(self, report: RunReport, reached: Reached) -> None:
        if reached.sink is not None:
            plan = reached.sink.settled
            report.add(KeepRate(keep_rate(self._options, plan)))
            report.add(KeepTrials.model_validate(plan["keep_auto"]) if "keep_auto" in plan else None)


def failure(counts: Counts) -> str | None:
    """Return why a finished output with these counts failed: nothing was compressed although it should have been. Else
    None."""
    fallbacks = fallbacks_of_useless_draft(counts.tallies.methods)
    if not fallbacks:
        return None
    reasons = ", ".join(f"{method} {rows:,}" for method, rows in fallbacks.items())
    return (
        f"none of the {counted(sum(fallbacks.values()), 'row')} that were to be compressed was ({reasons})\n"
        "they were read in full and their scores are there; take another --draft, or leave it out"
    )

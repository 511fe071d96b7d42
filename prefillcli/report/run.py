"""The report of a run: `run.json`, and its last line on stdout."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from copy import copy
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticSerializationError

from prefillcli.core.feature import features
from prefillcli.data.output.columns import LENGTH_EDGES, SCORE_BINS, Counts
from prefillcli.engines.base import PoolUse, ReducedPacks, WeightsReport, WorkerReport
from prefillcli.redaction import shown_report
from prefillcli.report.section import Section
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.memory import peak_memory
from prefillcli.stats.audit import Audit

SCHEMA_VERSION = 1


class Rows(BaseModel):
    """Rows of the input. `total` = `scored` + `errors` + `skipped`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)


class Tokens(BaseModel):
    """Tokens of this run (a resumed run counts what it did itself)."""

    prompt: int = 0
    shared: int = 0  # prompt tokens that were computed once for several rows
    unique: int = 0  # of the trie of each window's prompts, without what the window before hands on: the least
    computed: int = 0
    kept: int = 0
    draft: int = 0  # computed by the draft
    audit: int = 0  # part of `computed`: for compressed rows that were read in full as well
    follow_up: int = 0  # part of `computed`: of rows that were read once more, to be written about or for evidence
    skipped: float = 0.0  # layers of computed tokens that early exits spared

    def add(self, other: Tokens) -> None:
        """Count those of another part of the run too."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Seconds(BaseModel):
    """Wall time by phase. Read, render and tokenize run beside the model, ahead of it; `waiting` is what the model
    waited for them. A phase that this version does not know is kept under its name."""

    model_config = ConfigDict(extra="allow")

    total: float = 0.0
    read: float = 0.0
    render: float = 0.0
    tokenize: float = 0.0
    waiting: float = 0.0
    plan: float = 0.0
    load: float = 0.0
    exits: float = 0.0
    draft: float = 0.0
    model: float = 0.0
    write: float = 0.0
    evaluate: float = 0.0


class PeakMemory(BaseModel):
    """Largest use in bytes."""

    host: int = 0
    device: int = 0


class ThreadCounts(BaseModel):
    """Processor threads that computed: the fewest and the most at a time."""

    min: int
    max: int


class Histogram(BaseModel):
    """Rows in each bin, by series: bin i goes from edges[i] up to, not including, edges[i + 1]."""

    edges: list[float] = Field(default_factory=list)
    counts: dict[str, list[int]] = Field(default_factory=dict)


class Histograms(BaseModel):
    """Of all rows of the output, those of earlier attempts included."""

    score: Histogram = Field(default_factory=Histogram)  # by prediction; the last bin holds 1.0 too
    prompt_tokens: Histogram = Field(default_factory=Histogram)  # scored, truncated, error; edges grow by 2^(1/16)


class SlowRow(BaseModel):
    """A row that took long; `seconds` is its share of the models' time."""

    row: int | None
    id: str | None
    seconds: float
    prompt_tokens: int
    computed_tokens: int
    method: str


class FailedRow(BaseModel):
    """A row without a score, and why. Id and detail are untrusted text."""

    row: int | None
    id: str | None
    code: str
    detail: str | None


class MemoryTrace(BaseModel):
    """Memory in use over the run, in bytes, thinned out over long runs."""

    seconds: list[float] = Field(default_factory=list)  # since the start
    host: list[int] = Field(default_factory=list)
    device: list[int] = Field(default_factory=list)

    @classmethod
    def of(cls, samples: Sequence[tuple[float, int, int]]) -> MemoryTrace:
        """From (seconds, host, device)."""
        seconds, host, device = ([sample[at] for sample in samples] for at in range(3))
        return cls(seconds=seconds, host=host, device=device)


class RunReport(BaseModel):
    """What `run.json` holds. Features have keys of their own in it, which are in `blocks`."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = SCHEMA_VERSION
    run_id: str = ""
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None
    report: str | None = None
    page: str | None = None
    resumed: bool = False
    shard: str | None = None  # of a run with --shard, like 2/4: all counts are of its rows
    shards: int | None = None  # of a merge: how many it joined
    rows: Rows = Field(default_factory=Rows)
    mean_score: float | None = None
    mean_label_mass: float | None = None  # of the scored rows that have one
    tokens: Tokens = Field(default_factory=Tokens)
    seconds: Seconds = Field(default_factory=Seconds)
    predicted_seconds: float | None = None  # of the model, for the packs that ran, by a profile
    no_prediction: str | None = None  # why no profile predicted
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    peak_memory_bytes: PeakMemory = Field(default_factory=PeakMemory)
    packs: int = 0
    workers: list[WorkerReport] = Field(default_factory=list)  # of the run's last ones, where there are several
    threads: ThreadCounts | None = None  # None where another process computes, or nothing was computed
    weights: WeightsReport | None = None  # None where the engine does not say, or nothing was loaded
    reduced: ReducedPacks | None = None  # None where memory did not run out, or did in workers alone
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    fingerprint: dict[str, str] = Field(default_factory=dict)
    audit: Audit | None = None
    methods: dict[str, int] = Field(default_factory=dict)  # scored rows by method
    histograms: Histograms = Field(default_factory=Histograms)
    slowest: list[SlowRow] = Field(default_factory=list)
    failed: list[FailedRow] = Field(default_factory=list)
    memory_trace: MemoryTrace = Field(default_factory=MemoryTrace)

    @classmethod
    def new(cls, **given: Any) -> RunReport:
        """A report with the keys of all features."""
        return cls(**{name: copy(value) for each in features() for name, value in each.keys.items()}, **given)

    @property
    def blocks(self) -> dict[str, Any]:
        """The keys of features."""
        return self.model_extra  # type: ignore[return-value]  # it is there, as extra keys are allowed

    def sections(self) -> list[Section]:
        """What features say of the run."""
        found = [each.section(self) for each in features() if each.keys.keys() <= self.blocks.keys()]
        return [each for each in found if each is not None]

    def end(self, clock: Clock) -> None:
        """Take over what the run has taken, and what has computed it."""
        for name, value in clock.seconds.items():
            setattr(self.seconds, name, value)
        self.seconds.total = clock.total
        self.peak_memory_bytes, self.versions = PeakMemory(**peak_memory()), versions()

    def take_use(self, use: PoolUse) -> None:
        """Take over what engines have done."""
        self.weights, self.reduced, self.workers = use.weights, use.reduced, list(use.workers)

    def take(self, counts: Counts) -> None:
        """Take over what is known of the output's rows."""
        rows, tallies = self.rows, counts.tallies
        rows.total, rows.scored = counts.total, counts.scored
        rows.errors, rows.skipped = counts.errors, counts.skipped
        rows.errors_by_code = dict(counts.errors_by_code)
        self.mean_score, self.mean_label_mass = counts.mean_score, tallies.mean_label_mass
        self.methods = dict(tallies.methods)
        if tallies.scores:
            edges = [at / SCORE_BINS for at in range(SCORE_BINS + 1)]
            self.histograms.score = Histogram(edges=edges, counts=tallies.scores)
        self.histograms.prompt_tokens = _length_histogram(tallies.lengths)
        self.slowest = [SlowRow(**row) for row in tallies.slowest]
        self.failed = [FailedRow(**row) for row in tallies.failed]

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        safe = shown_report(self)
        line = {
            "run_id": self.run_id,
            "status": self.status,
            "exit_code": self.exit_code,
            "rows": self.rows.model_dump(),
            "mean_score": self.mean_score,
            "seconds": round(self.seconds.total, 3),
            "output": safe.output,
            "report": safe.report,
            "page": safe.page,
        }
        for section in self.sections():
            line |= section.summary
        return line | ({"error": self.error} if self.error else {})


def _length_histogram(lengths: dict[str, dict[str, int]]) -> Histogram:
    # From the shortest to the longest prompt, every bin between them.
    found = [int(low) for bins in lengths.values() for low in bins]
    if not found:
        return Histogram()
    first, last = bisect_left(LENGTH_EDGES, min(found)), bisect_left(LENGTH_EDGES, max(found))
    lows = LENGTH_EDGES[first : last + 1]
    end = LENGTH_EDGES[last + 1] if last + 1 < len(LENGTH_EDGES) else 2 * LENGTH_EDGES[last]
    counts = {kind: [bins.get(str(low), 0) for low in lows] for kind, bins in sorted(lengths.items())}
    return Histogram(edges=[*lows, end], counts=counts)


def versions() -> dict[str, str]:
    """Versions of what a score depends on."""
    import platform
    import sys
    from importlib.metadata import version

    from prefillcli import __version__

    vllm = sys.modules.get("vllm")

    packages = ("torch", "transformers", "tokenizers", "pyarrow")
    return {
        "prefillcli": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        **({} if vllm is None else {"vllm": str(vllm.__version__)}),
    }


def to_json(report: RunReport) -> str:
    """The text of `run.json`, with lists of numbers on one line."""
    try:
        text = report.model_dump_json(indent=2)
    except PydanticSerializationError:  # the name of a file is not UTF-8
        text = json.dumps(report.model_dump(mode="json"), indent=2)
    # a line break is in no JSON string, so only lists of numbers match
    return re.sub(r"\[\n[-+.\dEe,\s]+\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"

"""The report of a run of `prefill score`: `run.json`, and the contents of its page, the terminal and Prometheus
metrics."""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr
from pydantic_core import PydanticSerializationError

from prefillcli.engines.base import PoolUse, ReducedPacks, WeightsReport, WorkerReport
from prefillcli.errors import (
    NOTHING_TO_DO,
    Interrupted,
    PrefillError,
    ResourceError,
    counted,
    shown,
    shown_report,
    without_secrets,
)
from prefillcli.images.thumbnails import Thumbnail
from prefillcli.prompts.thinking import Way
from prefillcli.report.finding import Finding
from prefillcli.report.section import (
    Bar,
    Cell,
    Part,
    Section,
    Strip,
    bars,
    length_plot,
    mebibytes,
    memory_plot,
    metrics_text,
    minutes_and_seconds,
    page_html,
    page_of,
    pairs_table,
    percent,
    percent_interval,
    quoted_token,
    row_name,
    score_plot,
    settings_section,
    stderr_console,
    three_digits,
)
from prefillcli.report.verdict import (
    Verdict,
    evaluated,
    mass_text,
    share,
    truth_text,
    verdict_of,
)
from prefillcli.rows.output import ANSWER
from prefillcli.rows.output.destination import FORMAT
from prefillcli.rows.output.store import put_text
from prefillcli.rows.output.tallies import LENGTH_EDGES, SCORE_BINS, AnswerTally, Counts
from prefillcli.rows.records import FULL, ErrorCode, is_fallback
from prefillcli.runtime import log
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.memory import peak_memory
from prefillcli.stats.flips import Audit, audit_of

SCHEMA_VERSION = 1


class Rows(BaseModel):
    """Rows of the input. `total` = `scored` + `errors` + `skipped` + `empty`."""

    total: int = 0
    scored: int = 0
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    empty: int = 0  # rows without text under --empty-text skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)


class Tokens(BaseModel):
    """Tokens of this run. A resumed run counts only its own work."""

    prompt: int = 0
    shared: int = 0  # prompt tokens that were computed once for several rows
    unique: int = 0  # of the trie of each window's prompts, without blocks from the window before: the least possible
    computed: int = 0
    kept: int = 0
    draft: int = 0  # computed by the draft
    audit: int = 0  # part of `computed`: for compressed rows that were read in full as well
    follow_up: int = 0  # part of `computed`: of rows that were read once more, to be written about or for evidence
    skipped: float = 0.0  # layers of computed tokens that early exits spared

    def add(self, other: Tokens) -> None:
        """Add those of another part of the run."""
        for name in type(self).model_fields:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Seconds(BaseModel):
    """Wall time by phase. Read, render and tokenize run beside the model, ahead of it; `waiting` is the time that the
    model waited for them. An unknown phase is kept under its name."""

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
    """Processor threads that computed: the fewest and the most at the same time."""

    min: int
    max: int


class ChatUse(BaseModel):
    """The way from chats to the answer, where a chat template makes prompts."""

    said: str | None  # what was done, in one sentence; None if the template is rendered as it is
    variables: dict[str, Any]  # given to the template for that
    closings: dict[str, str]  # what follows its text, by what the text ends in
    date: str | None  # the day that the template prints, if it prints one


class ComputedIn(BaseModel):
    """The number format that the model computes in."""

    name: str  # "float32", ...
    why: str


class Histogram(BaseModel):
    """Rows in each bin, by series: bin i goes from edges[i] up to, not including, edges[i + 1]."""

    edges: list[float] = Field(default_factory=list)
    counts: dict[str, list[int]] = Field(default_factory=dict)


class Histograms(BaseModel):
    """Histograms of all rows of the output, those of earlier attempts included."""

    score: Histogram = Field(default_factory=Histogram)  # by prediction; the last bin holds 1.0 too
    prompt_tokens: Histogram = Field(default_factory=Histogram)  # scored, truncated, error; edges grow by 2^(1/16)


class SlowRow(BaseModel):
    """A slow row; `seconds` is its share of the models' time."""

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


class UnsureRow(BaseModel):
    """A row whose answer is among the least probable ones. The id is untrusted text."""

    row: int | None
    id: str | None
    answer: str
    probability: float  # of this answer, among all


class QuestionAnswers(BaseModel):
    """The answers to a question, or the labels of a job's rows."""

    rows: int  # with an answer
    answers: dict[str, int]  # rows by their answer
    label_mass: float | None  # mean probability of all answers together; None where they are classes of a head
    close: int  # rows whose two likeliest answers differ in odds by a factor of 3 at most
    least_sure: list[UnsureRow]

    @classmethod
    def of(cls, tally: AnswerTally) -> QuestionAnswers:
        """Return the answers that were counted."""
        return cls(
            rows=sum(tally.answers.values()),
            answers=tally.answers,
            label_mass=tally.mass / tally.mass_rows if tally.mass_rows else None,
            close=tally.close,
            least_sure=[UnsureRow(**row) for row in tally.least_sure],
        )

    @property
    def shares(self) -> list[tuple[str, int]]:
        """The answers and their rows, the most frequent first."""
        return sorted(self.answers.items(), key=lambda pair: -pair[1])


class LikelyToken(BaseModel):
    """A token that the model may write next."""

    id: int
    text: str  # untrusted
    share: float  # its probability; of several prompts, on average

    @property
    def name(self) -> str:
        """Its text, safe to show, or its id if it is not a whole character."""
        return quoted_token(self.text) if self.text and "\ufffd" not in self.text else f"token {self.id}"

    @property
    def percent(self) -> str:
        """`97 %`, `0.21 %`."""
        return f"{100 * self.share:.2g} %"


class FirstAnswers(BaseModel):
    """The model's likeliest tokens after the prompts of the first window, for each question: averages over its
    rows."""

    question: str | None  # None where there is only one
    rows: int
    label_mass: float | None  # probability of all labels together; None where rows have no labels in common
    begins: float  # probability that the next token is the first one of a label, choice or target
    tokens: list[LikelyToken]  # the likeliest ones
    # A prompt as the model read it, and its answer: text of the data, which is shown on the page alone.
    prompt: str = Field("", exclude=True)
    answer: str = Field("", exclude=True)


class MemoryTrace(BaseModel):
    """Memory in use over the run, in bytes, thinned out over long runs."""

    seconds: list[float] = Field(default_factory=list)  # since the start
    host: list[int] = Field(default_factory=list)
    device: list[int] = Field(default_factory=list)

    @classmethod
    def of(cls, samples: Sequence[tuple[float, int, int]]) -> MemoryTrace:
        """Return the trace of samples (seconds, host, device)."""
        seconds, host, device = ([sample[at] for sample in samples] for at in range(3))
        return cls(seconds=seconds, host=host, device=device)


class CommandReport(BaseModel):
    """The common fields of other commands' reports."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None
    seconds: float = 0.0  # of the whole run
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def new(cls, settings: Mapping[str, Any]) -> Self:
        """Return the report of a command that begins now, with the values of these options by name."""
        return cls(started=datetime.now(UTC).isoformat(timespec="seconds"), settings=shown(dict(settings)))

    def safe(self) -> Self:
        """Return the report without secrets."""
        return shown_report(self)

    def write(self, path: str, page: Callable[[Self], str] | None = None) -> None:
        """Write it to `path` as JSON, and its page beside it. Raises PrefillError."""
        self.versions = versions()
        safe = self.safe()
        write_with_page(path, safe.model_dump_json(indent=2) + "\n", None if page is None else page(safe))


class RunReport(BaseModel):
    """The content of `run.json`: the run's own facts, and beside them what the parts of its job have found."""

    model_config = ConfigDict(extra="allow")

    schema_version: int = SCHEMA_VERSION
    run_id: str = ""
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    verdict: Verdict | None = None
    warnings: list[str] = Field(default_factory=list)  # those of stderr, but for those that the verdict replaces
    started: str = ""  # ISO 8601, UTC
    output: str | None = None
    report: str | None = None
    page: str | None = None
    resumed: bool = False
    shard: str | None = None  # of a run with --shard, like 2/4: all counts concern its rows
    shards: int | None = None  # of a merge: the number of shards that it joined
    rows: Rows = Field(default_factory=Rows)
    mean_score: float | None = None  # None where questions are asked
    mean_label_mass: float | None = None  # of the scored rows, where `answers` has none
    # By question, here and below; one without a name, asked by labels, is called `answer`.
    answers: dict[str, QuestionAnswers] = Field(default_factory=dict)
    model: str | None = None  # as it was named, or the folder of the sample model
    first_answers: list[FirstAnswers] = Field(default_factory=list)  # by question
    means: dict[str, float] = Field(default_factory=dict)  # of each column with means of ordered labels
    tokens: Tokens = Field(default_factory=Tokens)
    seconds: Seconds = Field(default_factory=Seconds)
    predicted_seconds: float | None = None  # of the model, for the packs that ran, predicted by a profile
    no_prediction: str | None = None  # why there is no prediction
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    peak_memory_bytes: PeakMemory = Field(default_factory=PeakMemory)
    packs: int = 0
    workers: list[WorkerReport] = Field(default_factory=list)  # of the run's last ones, if there are several
    threads: ThreadCounts | None = None  # None if another process computes, or nothing was computed
    dtype: ComputedIn | None = None  # None if no model was opened
    weights: WeightsReport | None = None  # None if the engine does not report it, or nothing was loaded
    reduced: ReducedPacks | None = None  # None if memory did not run out, or only in workers
    chat: ChatUse | None = None  # None if no chat template makes prompts
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    fingerprint: dict[str, str] = Field(default_factory=dict)
    audits: dict[str, Audit] = Field(default_factory=dict)  # by question
    methods: dict[str, int] = Field(default_factory=dict)  # scored rows by method
    histograms: Histograms = Field(default_factory=Histograms)
    slowest: list[SlowRow] = Field(default_factory=list)
    failed: list[FailedRow] = Field(default_factory=list)
    memory_trace: MemoryTrace = Field(default_factory=MemoryTrace)
    # By a row's id, or its number where rows have no ids: for the page alone.
    _thumbnails: dict[int | str | None, tuple[Thumbnail, ...]] = PrivateAttr(default_factory=dict)

    @property
    def findings(self) -> dict[str, Any]:
        """What the parts of the job have found, by key: `Finding`, or what a file has in its stead."""
        return self.__pydantic_extra__ or {}

    def add(self, finding: Finding | None) -> None:
        """Take over what a part has found, instead of what it found before."""
        if finding is not None:
            setattr(self, finding.key, finding)

    def sections(self) -> list[Section]:
        """Return the sections on what the parts of the job have found."""
        found = [each for each in self.findings.values() if isinstance(each, Finding)]
        found.sort(key=lambda each: each.place)
        return [section for each in found for section in each.sections(self)]

    @property
    def asks_questions(self) -> bool:
        """Whether the score of a row is the first answer to a question, among any number of questions."""
        return "questions" in self.fingerprint or self.fingerprint.get(FORMAT) == "decisions"

    def told_apart(self, question: str) -> str:
        """Return the name of a question for a title, if there are others."""
        return question if len(self.answers) > 1 else ""

    def end(self, clock: Clock) -> None:
        """Take over the run's times, and add its peak memory and versions."""
        for name, value in clock.seconds.items():
            setattr(self.seconds, name, value)
        self.seconds.total = clock.total
        self.peak_memory_bytes, self.versions = PeakMemory(**peak_memory()), versions()

    def take_use(self, use: PoolUse) -> None:
        """Take over the work of engines."""
        self.weights, self.reduced, self.workers = use.weights, use.reduced, list(use.workers)

    def take_thumbnails(self, found: Mapping[int | str | None, tuple[Thumbnail, ...]]) -> None:
        """Take small copies of the images of some rows, by id or number, for the page."""
        self._thumbnails = dict(found)

    def name_cell(self, row: int | None, own: str | None) -> Cell:
        """Return a table's cell with a row's name, and on the page small copies of its images."""
        return Cell(row_name(row, own), "name", self._thumbnails.get(row if own is None else own, ()))

    def take_memory(self, samples: Sequence[tuple[float, int, int]]) -> None:
        """Take over the memory in use: seconds, bytes of the host, bytes of the device."""
        self.memory_trace = MemoryTrace.of(samples)

    def take_chat(self, way: Way | None) -> None:
        """Take over the way from chats to the answer."""
        if way is not None:
            self.chat = ChatUse(
                said=way.said or None, variables=dict(way.variables), closings=dict(way.closings), date=way.day
            )

    def take_threads(self, fewest: int, most: int) -> None:
        """Take over the numbers of threads that computed."""
        self.threads = ThreadCounts(min=fewest, max=most)

    def take_audits(self, counts: Counts, is_positive: Mapping[str, Callable[[Any], bool | None]] = {}) -> None:
        """Take over the results of the rows that were read both ways. `is_positive` returns, by question, whether a
        right answer is the first label; None: it is not a label."""
        for name, rows in counts.audits.items():
            first = is_positive.get(name, lambda answer: None)
            pairs = [(score, full, first(answer)) for score, full, _, answer in rows]
            self.audits[name] = audit_of(pairs, [flipped for _, _, flipped, _ in rows])

    def take(self, counts: Counts) -> None:
        """Take over the counts of the output's rows."""
        rows, tallies = self.rows, counts.tallies
        rows.total, rows.scored = counts.total, counts.scored
        rows.errors, rows.skipped, rows.empty = counts.errors, counts.skipped, counts.empty
        rows.errors_by_code = dict(counts.errors_by_code)
        self.mean_score = None if self.asks_questions else counts.mean_score
        self.answers = {name: QuestionAnswers.of(own) for name, own in tallies.answers.items()}
        known = any(own.label_mass is not None for own in self.answers.values())
        self.mean_label_mass = None if known else tallies.mean_label_mass
        self.means = {name: own.total / own.rows for name, own in tallies.means.items() if own.rows}
        self.methods = dict(tallies.methods)
        if tallies.scores:
            edges = [at / SCORE_BINS for at in range(SCORE_BINS + 1)]
            self.histograms.score = Histogram(
                edges=edges, counts={name: list(rows) for name, rows in tallies.scores.items()}
            )
        self.histograms.prompt_tokens = _length_histogram(tallies.lengths)
        self.slowest = [SlowRow(**row) for row in tallies.slowest]
        self.failed = [FailedRow(**row) for row in tallies.failed]

    def summary(self) -> dict[str, Any]:
        """Return the last line on stdout."""
        safe = shown_report(self)
        line = {
            "run_id": self.run_id,
            "status": self.status,
            "exit_code": self.exit_code,
            "verdict": verdict_of(safe).model_dump(),
            "rows": self.rows.model_dump(),
            **self._answered(),
            **({"means": self.means} if self.means else {}),
            "seconds": round(self.seconds.total, 3),
            "output": safe.output,
            "report": safe.report,
            "page": safe.page,
        }
        for section in self.sections():
            line |= section.summary
        return line | ({"error": self.error} if self.error else {})

    def _answered(self) -> dict[str, Any]:
        # The distribution of the answers to questions; of labels the mean score.
        if not self.asks_questions:
            return {"mean_score": self.mean_score}
        return {"answers": {name: own.answers for name, own in self.answers.items()}}


def weights_section(report: RunReport) -> Section | None:
    """Return the section on weights that were streamed; None where they were not."""
    used = report.weights
    if used is None or used.mode != "stream":
        return None
    line = (
        f"{mebibytes(used.bytes)} MiB streamed in {mebibytes(used.memory_bytes)} MiB; "
        f"{mebibytes(used.bytes_read)} MiB read, {used.seconds_waited:.1f} seconds waited for them"
    )
    return Section(lines=[("weights", line)])


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
    """Return the versions of the software that a score depends on."""
    import platform
    import sys

    from prefillcli.runtime.version import __version__, version_of

    vllm, attention = sys.modules.get("vllm"), sys.modules.get("torch.nn.attention")
    flash: str | None = getattr(attention, "current_flash_attention_impl", lambda: None)()
    packages = ("torch", "transformers", "tokenizers", "pyarrow")
    return {
        "prefillcli": __version__,
        "python": platform.python_version(),
        **{name: version_of(name) for name in packages},
        **({} if vllm is None else {"vllm": str(vllm.__version__)}),
        **({} if flash is None else {"flash attention": flash}),
    }


def to_json(report: RunReport) -> str:
    """Return the text of `run.json`, with lists of numbers on one line."""
    try:
        text = report.model_dump_json(indent=2)
    except PydanticSerializationError:  # the name of a file is not UTF-8
        text = json.dumps(report.model_dump(mode="json"), indent=2)
    # a line break is in no JSON string, so only lists of numbers match
    return re.sub(r"\[\n[-+.\dEe,\s]+\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text) + "\n"


# The sections about a run, for its page, the terminal and Prometheus.


_MOST_IMAGES = 100  # on a page
_BESIDE = ("read", "render", "tokenize")
_PHASES = {
    "load": "load the models",
    "waiting": "wait for prompts",
    "plan": "plan",
    "exits": "learn the exits",
    "draft": "draft",
    "model": "model",
    "write": "write",
    "evaluate": "evaluate",
    "read": "read",
    "render": "render",
    "tokenize": "tokenise",
}
_TOKENS = {
    "prompt": "in prompts",
    "kept": "kept",
    "unique": "unique",
    "computed": "computed",
    "draft": "by the draft",
    "audit": "for the audit",
}


def run_html(report: RunReport) -> str:
    """Return the page of a run."""
    started = report.started.replace("T", " ").replace("+00:00", " UTC")
    notes = [f"{report.output or 'no output'} \u00b7 {started}"]
    if report.resumed:
        notes.append(
            "The job was resumed: rows, scores and lengths are those of all attempts; tokens, time, speed and memory "
            "those of this one."
        )
    if report.chat is not None and report.chat.said:
        notes.append(f"{report.chat.said[0].upper()}{report.chat.said[1:]} (--thinking).")
    verdict = verdict_of(report)
    *sections, prompts = run_sections(report)
    _leave_few_images(sections)
    settings = Section(
        title="Settings, versions, fingerprint",
        folded=True,
        parts=[
            Part(title="Settings", lines=settings_section(report.settings).lines),
            Part(title="Versions", lines=list(report.versions.items())),
            Part(title="Fingerprint", lines=list(report.fingerprint.items())),
        ],
    )
    return page_html(
        Section(title="prefill score", parts=[Part(note=note) for note in notes], alarms=verdict.reasons),
        [*sections, settings, prompts],
        title=f"{verdict.text} - prefill score {report.output or ''}",
        verdict=(verdict.text, verdict.kind),
    )


def _leave_few_images(sections: Sequence[Section]) -> None:
    # A row may be named several times: a page has few images however often.
    left = _MOST_IMAGES
    tables = [part.table for section in sections for part in section.parts if part.table]
    for cell in (cell for table in tables for row in table for cell in row if isinstance(cell, Cell)):
        cell.images = cell.images[:left]
        left -= len(cell.images)


def run_sections(report: RunReport) -> Iterator[Section]:
    """Yield all sections about a run, in the order of its page, the prompts last. Those without a title are for
    terminal and metrics."""
    found = [*report.sections(), *filter(None, [weights_section(report)])]
    yield _end(report)
    yield from (section for section in found if section.first)
    yield _rows(report)
    yield _failed(report)
    yield _answers(report)
    yield _least_sure(report)
    yield _means(report)
    if report.histograms.score.counts:
        yield Section(title=_scores_title(report), parts=[Part(plot=score_plot(report.histograms.score))])
    yield from (section for section in found if not section.first)
    yield Section(
        tiles=[
            (" ".join(filter(None, (report.told_apart(name), "audited flips"))), f"{audit.flip_rate:.1%}")
            for name, audit in report.audits.items()
            if audit.flip_rate is not None
        ]
    )
    yield Section(title="Rows", parts=[Part(bars=_results(report))])
    yield _lengths(report)
    yield _tokens(report)
    yield _methods(report)
    yield _audits(report)
    yield _time(report)
    yield _memory(report)
    yield _slowest(report)
    yield _asked(report)


def _end(report: RunReport) -> Section:
    # The end of the run. An error is on stderr just above.
    verdict = verdict_of(report)
    reasons = [("", reason) for reason in verdict.reasons if reason != report.error]
    section = Section(lines=[("verdict", verdict.text), *reasons])
    success = float(report.exit_code in (0, NOTHING_TO_DO))
    section.metric("run_success", "1 if the last run was done or had nothing to do, else 0.", success)
    section.metric("run_exit_code", "Exit code of the last run.", report.exit_code)
    return section


def _rows(report: RunReport) -> Section:
    rows = report.rows
    counts = f"{rows.scored:,} scored of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {counted(rows.errors, 'error')} ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    if rows.empty:
        counts += f", {rows.empty:,} empty"
    section = Section(lines=[("rows", counts)], tiles=[("errors", f"{rows.errors:,}"), ("scored", f"{rows.scored:,}")])
    if rows.skipped:
        section.tiles.append(("skipped", f"{rows.skipped:,}"))
    if rows.empty:
        section.tiles.append(("empty", f"{rows.empty:,}"))
    results = {"scored": rows.scored, "error": rows.errors, "skipped": rows.skipped, "empty": rows.empty}
    section.metric("rows_total", "Rows of the output by result.", results, "result")
    section.metric("rows_errors", "Error rows of the output by code.", rows.errors_by_code, "code")
    return section


_SHOWN_ANSWERS = 8  # of a question
_SHOWN_ROWS = 3  # of a question, in the terminal


def _answers(report: RunReport) -> Section:
    # For each question its label mass, the distribution of its answers, those in doubt, and how often they are right.
    section = Section(title="Answers" if report.answers else "")
    section.terminal = [(name, "; ".join(_answer_texts(report, name))) for name in report.answers]
    for name, own in report.answers.items():
        facts = [] if own.label_mass is None else [("label mass", mass_text(own.label_mass))]
        facts.append(("in doubt", _doubt(report, name)))
        if (found := evaluated(report, name)) is not None:
            facts.append(("right", truth_text(found)))
        section.parts.append(Part(title=name, bars=_distribution(own), lines=[each for each in facts if each[1]]))
    masses = {name: own.label_mass for name, own in report.answers.items() if own.label_mass is not None}
    if masses and report.asks_questions:
        section.metric("label_mass_mean", "Mean label mass of the answers to each question.", masses, "question")
    elif masses:
        section.metric("label_mass_mean", "Mean label mass of the output.", masses[ANSWER])
    counts = [
        ({"question": name, "answer": answer}, float(rows))
        for name, own in report.answers.items()
        for answer, rows in own.answers.items()
    ]
    if counts:
        section.metrics.append(("answer_rows", "Rows of the output by answer.", counts))
    return section


def _answer_texts(report: RunReport, name: str) -> Iterator[str]:
    own = report.answers[name]
    if own.label_mass is not None:
        yield f"label mass {mass_text(own.label_mass)}"
    said = [f"{answer} {share(rows, own.rows)}" for answer, rows in own.shares[:_SHOWN_ANSWERS]]
    yield ", ".join([*said, *(["..."] if len(own.shares) > len(said) else [])]) or "no answer"
    if own.rows:
        yield f"in doubt {_doubt(report, name)}"


def _distribution(own: QuestionAnswers) -> list[Bar]:
    shown = own.shares[:_SHOWN_ANSWERS]
    rest = own.rows - sum(rows for _, rows in shown)
    values = [*shown, *([("others", rest)] if rest else [])]
    return [Bar(name, 100 * rows / max(own.rows, 1), share(rows, own.rows)) for name, rows in values]


def _doubt(report: RunReport, name: str) -> str:
    # The answers that a person should look at: below the floor, or close calls.
    own = report.answers[name]
    if (review := report.findings.get("review")) is not None:
        return f"{share(review.questions.get(name, 0), own.rows)}, below the floor"
    return f"{share(own.close, own.rows)}, at odds up to 3 to 1"


def _least_sure(report: RunReport) -> Section:
    section, shown = Section(title="Least sure, by question"), []
    for name, own in report.answers.items():
        rows = [[report.name_cell(row.row, row.id), row.answer, f"{row.probability:.3f}"] for row in own.least_sure]
        if rows:
            table = [["row", "answer", "probability"], *rows]
            section.parts.append(Part(title=name, table=table, words=(0, 1)))
            named = ", ".join(row[0] for row in rows[:_SHOWN_ROWS])
            shown.append(named if len(report.answers) == 1 else f"{name} {named}")
    if shown:
        section.terminal = [("least sure", "; ".join(shown))]
    return section


def _means(report: RunReport) -> Section:
    section = Section()
    if report.mean_score is not None:
        section.lines.append(("mean score", f"{report.mean_score:.4f}"))
        section.tiles.append(("mean score", f"{report.mean_score:.4f}"))
        section.metric("score_mean", "Mean score of the output.", report.mean_score)
    for name, value in report.means.items():
        section.lines.append((name, f"{value:.4f} on average"))
        section.tiles.append((name, f"{value:.4f}"))
    if report.means:
        section.metric("answer_mean", "Mean of each column with means of ordered labels.", report.means, "column")
    if report.mean_label_mass is not None and not report.answers:  # one of classes says nothing
        section.lines.append(("label mass", f"{report.mean_label_mass:.4g} on average"))
    if report.rows_per_second:
        section.tiles.append(("rows/s", three_digits(report.rows_per_second)))
    if report.tokens_per_second:
        section.tiles.append(("tokens/s", f"{report.tokens_per_second:,.0f}"))
    section.tiles.append(("wall time", minutes_and_seconds(report.seconds.total)))
    return section


def _scores_title(report: RunReport) -> str:
    # A histogram is of the probability of the first answer to the first question.
    return f"Scores of {next(iter(report.answers))}" if report.asks_questions and report.answers else "Scores"


def _asked(report: RunReport) -> Section:
    # The questions to the model, and its answers.
    names = ("template", "prompt_column", "system", "questions", "labels", "choices_column", "target_column")
    given = {name: report.settings.get(name) for name in names}
    if given["template"] or given["questions"]:
        del given["prompt_column"]
    if given["questions"] or given["choices_column"] or given["target_column"]:
        del given["labels"]
    asked = [("model", report.model), *settings_section(given).lines]
    section = Section(title="Prompt and answer", parts=[Part(lines=[(name, text) for name, text in asked if text])])
    for own in report.first_answers:
        mass = [] if own.label_mass is None else [("label mass", f"{own.label_mass:.4g}")]
        section.parts += [
            Part(
                title=f"A prompt of {own.question}" if own.question else "A prompt, as the model read it",
                text=own.prompt,
            ),
            Part(
                lines=[("answer", own.answer), *mass, ("begins like an answer", f"{own.begins:.4g}")],
                bars=[Bar(each.name, 100 * each.share, each.percent) for each in own.tokens],
                note=f"The likeliest tokens after a prompt, with their mean probability, over the "
                f"first rows ({own.rows:,}).",
            ),
        ]
    return section


def _results(report: RunReport) -> list[Bar]:
    # The outcomes of the rows: each prediction, each error.
    values = {}
    if len(report.answers) > 1:
        values = {"scored": report.rows.scored}
    elif report.histograms.score.counts:
        plot = score_plot(report.histograms.score)
        sums = {name: sum(bins) for name, bins in report.histograms.score.counts.items()}
        rest = report.rows.scored - sum(sums.get(name, 0) for name, _ in plot.series)
        values = {name: sums.get(name, rest) for name, _ in plot.series}
    kinds = {name: f"s{at}" for at, name in enumerate(values)}
    failed = dict(sorted(report.rows.errors_by_code.items(), key=lambda pair: -pair[1]))
    if report.rows.skipped:
        failed[ErrorCode.SKIPPED_TOO_LONG] = report.rows.skipped
    if report.rows.empty:
        failed[ErrorCode.SKIPPED_EMPTY] = report.rows.empty
    return [
        *_counted(values, report.rows.total, kinds),
        *_counted(failed, report.rows.total, dict.fromkeys(failed, "alarm")),
    ]


def _counted(values: dict[str, int], total: int, kinds: dict[str, str]) -> list[Bar]:
    return [
        Bar(name, 100 * value / max(total, 1), f"{value:,} ({value / max(total, 1):.1%})", kinds[name])
        for name, value in values.items()
    ]


def _failed(report: RunReport) -> Section:
    table = [["row", "code", "detail"]] + [
        [Cell(row_name(row.row, row.id), "name"), Cell(row.code, "code"), Cell(row.detail or "", "prose")]
        for row in report.failed
    ]
    more = report.rows.errors > len(report.failed)
    note = f"{len(report.failed)} of {report.rows.errors:,}, the first ones of every code." if more else ""
    part = Part(table=table if report.failed else None, words=range(3), layout="failed", note=note)
    return Section(title="Rows without a score", parts=[part])


def _lengths(report: RunReport) -> Section:
    histogram = report.histograms.prompt_tokens
    too_long = {
        ErrorCode.PROMPT_TOO_LONG: report.rows.errors_by_code.get(ErrorCode.PROMPT_TOO_LONG, 0),
        ErrorCode.SKIPPED_TOO_LONG: report.rows.skipped,
    }
    notes = [f"{number:,} rows are not in it: {code.meaning}." for code, number in too_long.items() if number]
    if not histogram.counts:
        return Section(title="Tokens of a prompt", parts=[Part(text=" ".join(notes))])
    low, high = _quartile(histogram, 0.5)
    half = f"Half of the prompts have fewer than about {(low + high) / 2:,.0f} tokens. The scale is logarithmic."
    part = Part(plot=length_plot(histogram), note=" ".join([half, *notes]))
    return Section(title="Tokens of a prompt", parts=[part])


def _quartile(histogram: Histogram, share: float) -> tuple[float, float]:
    # The edges of the bin that reaches this share of the rows.
    totals = [sum(column) for column in zip(*histogram.counts.values(), strict=True)]
    below, wanted = 0, share * sum(totals)
    for at, number in enumerate(totals):
        below += number
        if below >= wanted:
            return histogram.edges[at], histogram.edges[at + 1]
    return histogram.edges[-2], histogram.edges[-1]


def _tokens(report: RunReport) -> Section:
    tokens = report.tokens
    section = Section(title="Tokens of the run" if tokens.prompt else "")
    section.metric("tokens_total", "Tokens of the last run by kind.", tokens.model_dump(), "kind")
    if not tokens.prompt:
        return section
    own = tokens.computed - tokens.audit - tokens.follow_up
    section.lines.append(
        (
            "tokens",
            f"{tokens.prompt:,} in prompts, {tokens.computed:,} computed "
            f"({tokens.kept / max(own, 1):.2f}x shared), {tokens.unique:,} unique",
        )
    )
    counts = tokens.model_dump()
    values = {text: counts[name] for name, text in _TOKENS.items() if counts[name]}
    if tokens.kept == tokens.prompt:
        values.pop(_TOKENS["kept"], None)
    texts = {name: f"{value:,} ({value / tokens.prompt:.1%})" for name, value in values.items()}
    left = "prompts" if tokens.kept == tokens.prompt else "kept tokens"
    note = f"Unique: what is left of the {left} when every shared beginning counts once; less cannot be computed."
    kinds = {_TOKENS["draft"]: "s1", _TOKENS["audit"]: "s3"}
    section.parts.append(Part(bars=bars(values, texts, kinds), note=note))
    return section


def _methods(report: RunReport) -> Section:
    # Rows by how their prompts were read.
    order = sorted(report.methods, key=lambda name: (is_fallback(name), -report.methods[name]))
    if order in ([], [FULL]):
        return Section()
    kinds = {name: "alarm" if is_fallback(name) else "s0" if name == FULL else "s2" for name in order}
    found = _counted({name: report.methods[name] for name in order}, report.rows.scored, kinds)
    return Section(title="Methods", parts=[Part(bars=found)])


def audit_lines(audit: Audit, of: str = "") -> list[tuple[str, str]]:
    """Return the lines that an audit adds to the table of a run: name, with what it is `of`, and text."""
    if audit.flip_rate is None or audit.interval is None:
        return [(f"audit{of}", "no row was scored in full as well")]
    lines = [
        (
            f"audit{of}",
            f"{counted(audit.rows, 'row')} also in full: {counted(audit.flips, 'flip')} "
            f"({percent(audit.flip_rate)}, {100 * audit.confidence:g} % interval {percent_interval(audit.interval)}), "
            f"score difference {audit.mean_difference:.2g} mean, {audit.max_difference:.2g} largest",
        )
    ]
    if audit.auc_compressed is not None and audit.auc_full is not None:
        known = f"{counted(audit.truth_rows, 'row')} with a known answer"
        lines.append(
            (f"audit AUC{of}", f"{audit.auc_compressed:.3f} as scored, {audit.auc_full:.3f} in full ({known})")
        )
    elif audit.truth_rows:
        lines.append((f"audit AUC{of}", f"none: the known answers ({audit.truth_rows:,}) are all the same"))
    return lines


def _audits(report: RunReport) -> Section:
    section, rates = Section(title="Audit" if report.audits else ""), dict[str, float]()
    for name, audit in report.audits.items():
        own = report.told_apart(name)
        section.lines += audit_lines(audit, f" of {own}" if own else "")
        if audit.flip_rate is None or audit.interval is None:
            continue
        rates[name] = audit.flip_rate
        low, high = audit.interval
        end = min(2 * high, 1.0)  # of the track
        sure = Strip("sure", 100 * low / end, 100 * (high - low) / end)
        bar = Bar("flips", 100 * audit.flip_rate / end, f"{100 * end:.3g} %", "alarm", more=(sure,))
        note = "Bar: share of flipped answers. Line: its interval."
        section.parts.append(Part(title=own, bars=[bar], note=note))
    text = "Share of audited rows that compression or early exits flip."
    if len(report.answers) > 1 and rates:
        section.metric("audit_flip_rate", text, rates, "question")
    elif rates:
        section.metric("audit_flip_rate", text, next(iter(rates.values())))
    return section


def _time(report: RunReport) -> Section:
    seconds = report.seconds.model_dump()
    total = seconds.pop("total")
    detail = ", ".join(f"{name} {value:.1f}" for name, value in seconds.items() if value >= 0.05)
    values = {text: seconds[name] for name, text in _PHASES.items() if name not in _BESIDE}
    values["other"] = max(total - sum(value for name, value in seconds.items() if name not in _BESIDE), 0.0)
    values |= {_PHASES[name]: seconds[name] for name in _BESIDE}
    values = {name: value for name, value in values.items() if value >= 0.0005}
    kinds = {_PHASES[name]: "s6" for name in _BESIDE} | {"other": "s7"}
    texts = {name: f"{minutes_and_seconds(value)} ({value / max(total, 1e-9):.0%})" for name, value in values.items()}
    note = (
        "Reading, rendering and tokenising go on beside the model, a window ahead of it. Other: start, fingerprints, "
        "and what lies between."
    )
    section = Section(
        title="Time" if values else "", lines=[("seconds", f"{total:.1f}" + (f" ({detail})" if detail else ""))]
    )
    if report.predicted_seconds is not None:
        predicted = f"{report.seconds.model:.1f} seconds, {report.predicted_seconds:.1f} predicted by the profile"
        section.lines.append(("model", predicted))
        note += f" The profile predicted {minutes_and_seconds(report.predicted_seconds)} for the model."
    speed = f"{report.rows_per_second:,.1f} rows/s, {report.tokens_per_second:,.0f} prompt tokens/s"
    section.lines.append(("speed", speed))
    section.parts.append(Part(bars=bars(values, texts, kinds), note=note))
    section.metric("phase_seconds", "Wall time of the last run by phase.", seconds, "phase")
    section.metric("run_seconds", "Wall time of the last run.", total)
    section.metric("rows_per_second", "Rows scored per second by the last run.", report.rows_per_second)
    return section


def _memory(report: RunReport) -> Section:
    plot, peak = memory_plot(report.memory_trace), report.peak_memory_bytes
    device = f", {mebibytes(peak.device)} MiB device" if peak.device else ""
    section = Section(
        title="" if plot is None else "Memory",
        lines=[("peak memory", f"{mebibytes(peak.host)} MiB host{device}")],
        parts=[Part(plot=plot)],
    )
    section.metric("peak_memory_bytes", "Largest memory used by the last run.", peak.model_dump(), "where")
    return section


def _slowest(report: RunReport) -> Section:
    table = [["row", "ms", "prompt", "computed", "method"]] + [
        [
            Cell(row_name(row.row, row.id), "name"),
            f"{1000 * row.seconds:,.1f}",
            f"{row.prompt_tokens:,}",
            f"{row.computed_tokens:,}",
            row.method,
        ]
        for row in report.slowest
    ]
    note = "A row's share of the models' time. A shared prefix counts with the first row that reads it."
    part = Part(table=table if report.slowest else None, words=(0, 4), note=note)
    return Section(title="Slowest rows", parts=[part])


# A run of `prefill score` in the terminal, and as metrics.


def print_table(report: RunReport) -> None:
    """Print the run in a few lines, on stderr."""
    stderr_console().print(pairs_table(run_lines(report)))


def run_lines(report: RunReport) -> Iterator[tuple[str, str]]:
    """Yield the lines of the table: a name and a text each."""
    for section in run_sections(report):
        yield from (*section.terminal, *section.lines)
    yield "output", report.output or "none"
    yield "report", ", ".join(filter(None, (report.report, report.page))) or "none"


def to_metrics(report: RunReport, now: float) -> str:
    """Return all metrics of a run that ended at `now`, in seconds since 1970. All are gauges, about the last run."""
    ended = Section()
    ended.metric("last_run_timestamp_seconds", "When the last run ended, in Unix time.", now)
    return metrics_text([*run_sections(report), ended])


def write_with_page(path: str, report: str, page: str | None) -> None:
    """Write a report as JSON, and its page beside it, if any; a reader sees an old file or a whole new one.

    Raises PrefillError.
    """
    for name, text in ((path, report), (page_of(path), page)):
        try:
            if text is not None:
                put_text(name, text)
        except OSError as error:
            raise ResourceError(f"{name}: cannot write: {error.strerror or error}") from None


def write_files(report: RunReport, metrics_file: str | None = None) -> None:
    """Write the files of a run; a reader sees an old one or a whole new one. Failures are reported on stderr.

    Without `report.report` there is neither `run.json` nor page. A run that cannot write `run.json` has failed; page
    and metrics only serve to watch it, so failing to write them does not change how it ends.
    """
    safe = shown_report(report)
    report.verdict = verdict_of(safe)
    if report.report is not None:
        report.page = page_of(report.report)
        try:
            put_text(report.page, run_html(safe))
        except Exception as error:  # whatever fails here, the scores are written already
            report.page = None
            _warn("page", error)
        except Interrupted:  # a store hangs, and a signal has come
            report.report = report.page = None
            raise
        try:
            put_text(report.report, to_json(shown_report(report)))
        except (OSError, PrefillError) as error:
            log.error(f"cannot write the report: {error}")
            report.report = None
            report.exit_code = report.exit_code or ResourceError.exit_code
        except Interrupted:
            report.report = None
            raise
    if metrics_file is not None:
        try:
            put_text(metrics_file, to_metrics(shown_report(report), time.time()))
        except Exception as error:
            _warn("metrics", error)


def _warn(what: str, error: Exception) -> None:
    why = without_secrets(str(error)) or type(error).__name__
    log.warning(f"cannot write the {what}: {why}")

"""The numbers of `prefill bench`, which are the content of `bench.json`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from prefillcli.errors import counted
from prefillcli.report.run import CommandReport
from prefillcli.report.section import (
    Bar,
    Part,
    Section,
    Strip,
    TableRows,
    mebibytes,
    page_html,
    percent_interval,
    percent_or_nothing,
    settings_section,
    three_digits,
)
from prefillcli.stats.flips import Audit
from prefillcli.tools.bench.methods import METHODS, REFERENCE


class Range(BaseModel):
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(median=statistics.median(values), low=min(values), high=max(values))

    def __str__(self) -> str:
        digits = 2 if self.median >= 1 else 3
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


class Answers(BaseModel):
    """The answers of a method, compared with the reference and the truth."""

    audit: Audit | None = None  # None for the reference itself
    accuracy: float | None = None  # share of rows whose likeliest label is right, if known
    accuracy_interval: tuple[float, float] | None = None  # 95 %, Clopper-Pearson
    auc: float | None = None


class ClassFlips(BaseModel):
    """Rows that the reference answers with a label, and the number of them that a method answers with another."""

    label: str
    rows: int
    flips: int
    interval: tuple[float, float] | None  # 95 %, Clopper-Pearson; None without rows


class ExitResult(BaseModel):
    """The layers where rows left the model."""

    max_flips: float
    rows_read: int  # from which the exits were learnt
    left: dict[str, int]  # rows by the layers they went through, 0 and less for those decided before, then "full"
    layers_saved: float  # share of the layers of computed tokens
    classes: list[ClassFlips]


class MethodResult(BaseModel):
    """A method on a workload."""

    method: str
    keep: float | None = None
    seconds: Range
    rows_per_second: float
    tokens_per_second: float  # prompt tokens, whether they were read or not
    target_tokens: int  # computed
    draft_tokens: int
    kept: float  # share of the prompt tokens that the target read or shared
    peak_bytes: int | None = None  # above the memory in use before, which includes the weights
    speedup: Range  # seconds of the reference over the method's, within a round
    fallbacks: dict[str, int] = Field(
        default_factory=dict
    )  # rows read in full although they were to be compressed, by reason
    answers: Answers
    exits: ExitResult | None = None  # of a method with early exits


class WorkloadResult(BaseModel):
    """All methods on a workload."""

    workload: str = ""
    rows: int = 0
    answers: int = 0  # of which each row has as many as questions
    truth_rows: int = 0  # answers whose right ones are known
    prompt_tokens: int = 0
    unique_tokens: int = 0  # of the trie of all prompts
    rounds: int = 0  # timed
    reference_able: bool | None = None  # whether the reference is better than chance, if the truth is known
    notes: list[str] = Field(default_factory=list)
    methods: list[MethodResult] = Field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures for the last line on stdout."""
        return {
            each.method: {
                "seconds": round(each.seconds.median, 4),
                "speedup": round(each.speedup.median, 3),
                "flips": None if each.answers.audit is None else each.answers.audit.flips,
            }
            for each in self.methods
        }

    def _headline(self) -> str:
        return (
            f"{self.workload}: {counted(self.rows, 'row')}, {self.prompt_tokens:,} prompt tokens "
            f"({self.prompt_tokens / self.rows:,.0f} a row), {self.unique_tokens:,} unique"
        )

    def in_short(self, machine: Mapping[str, str | int], *, whole: bool) -> Section:
        """Return a workload's results for the terminal; `whole` with intervals."""
        names = dict.fromkeys(each.method.partition("@")[0] for each in self.methods)
        parts = [Part(above=facts_text(machine), table=quick_table(self))]
        if whole:
            answers = [[row[column] for column in (0, 1, 2, 3, 5, 7)] for row in answer_table(self)]
            parts.append(Part(table=answers))
        explained = [(name, METHODS[name].summary) for name in names if name in METHODS]
        parts += [Part(lines=explained, note=legend(self)), Part(text="\n".join(verdicts(self)))]
        return Section(title=self._headline(), parts=parts, alarms=workload_remarks(self))

    def section(self) -> Section:
        """Return the results for the page."""
        speedups = [(each.method, each.speedup) for each in self.methods if each.method != REFERENCE]
        return Section(
            title=self._headline(),
            alarms=workload_remarks(self),
            parts=[
                Part(
                    title=f"Speedup over {REFERENCE}",
                    bars=_speedup_bars(speedups),
                    note=f"The upright line is {REFERENCE} itself.",
                ),
                Part(
                    title=f"Answers that flip against {REFERENCE}, with 95 % interval",
                    bars=_flip_bars(self) if self.reference_able is not False else [],
                ),
                Part(title="Speed", table=_cost_table(self)),
                Part(title=f"Answers against {REFERENCE}", table=answer_table(self)),
            ],
        )


class BenchReport(CommandReport):
    """The content of `bench.json`."""

    page: str | None = None
    machine: dict[str, str | int] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    workloads: list[WorkloadResult] = Field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the last line on stdout."""
        line: dict[str, Any] = {
            "status": self.status,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "output": self.output,
            "page": self.page,
            "workloads": {each.workload: each.summary() for each in self.workloads},
        }
        return line | ({"error": self.error} if self.error else {})


# The sentences about a workload.


def legend(workload: WorkloadResult) -> str:
    """Return the meaning of the columns of `quick_table`."""
    rounds = "one round" if workload.rounds < 2 else f"median of {workload.rounds} rounds (smallest-largest)"
    return (
        f"speedup: {REFERENCE}'s seconds over the method's, {rounds}; kept: share of the tokens that the model reads; "
        f"MiB: memory above the weights; flips: answers other than {REFERENCE}'s; AUC: 1 is perfect, "
        "0.5 chance"
    )


def verdicts(workload: WorkloadResult) -> list[str]:
    """Return the conclusions from the measurements, and their limits: they claim only what spread or interval
    support."""
    methods = {each.method: each for each in workload.methods}
    reference = methods[REFERENCE]
    found = [_of_speed(each, reference, workload.rounds) for each in methods.values() if each is not reference]
    if workload.reference_able is False:
        return found
    for name, each in methods.items():
        chance = methods.get(name.replace("specprefill@", "random@"))
        if chance is not None and chance is not each and not _dropped_nothing(each):
            found += _of_flips(each, chance)
    return found


def _of_speed(method: MethodResult, reference: MethodResult, rounds: int) -> str:
    # Two methods differ if the slowest round of one is faster than the fastest round of the other.
    name, own, other = method.method, method.seconds, reference.seconds
    times = f"{three_digits(method.speedup.median)} times {REFERENCE}'s speed"
    if rounds < 2:
        return f"{name}: {times} in the one timed round, no more"
    if own.high < other.low or own.low > other.high:
        return (
            f"{name}: {'faster' if own.high < other.low else 'slower'} than {REFERENCE}, {times} over {rounds} rounds"
        )
    return f"{name}: no difference in speed shown, its rounds and those of {REFERENCE} overlap"


def _of_flips(method: MethodResult, chance: MethodResult) -> list[str]:
    ours, theirs = method.answers.audit, chance.answers.audit
    if ours is None or theirs is None or ours.interval is None or theirs.interval is None:
        return []
    flips = (
        f"flips {percent_interval(ours.interval)} of the answers, {chance.method} {percent_interval(theirs.interval)}"
    )
    better = ours.interval[1] < theirs.interval[0]
    return [f"{method.method}: {flips} (95 %){'' if better else ': not shown to be better than random chunks'}"]


def workload_remarks(workload: WorkloadResult) -> list[str]:
    """Return notes that a reader of the tables needs."""
    found = list(workload.notes)
    for each in workload.methods:
        for reason, count in sorted(each.fallbacks.items()):
            found.append(f"{each.method}: {count:,} rows were read in full ({reason})")
        if each.exits is not None:
            found.append(_of_exits(each.method, each.exits, workload.answers))
    if undropped := [each.method for each in workload.methods if _dropped_nothing(each)]:
        found.append(
            f"{', '.join(undropped)}: nothing was dropped, so this shows nothing: the prompts are short, and their "
            "first and last tokens always stay (keep_first, keep_last), or no text gives their tokens again (bm25)"
        )
    if workload.reference_able is False:
        found.append("the model cannot do this task: it is not better than chance, so flips mean nothing")
    return found


def _of_exits(method: str, exits: ExitResult, answers: int) -> str:
    # The layers where answers left, and the effects of that.
    early = {name: count for name, count in exits.left.items() if name != "full"}
    places = {name: f"after layer {name}" if int(name) > 0 else "before layer 1" for name in early}
    where = ", ".join(f"{count / answers:.0%} {places[name]}" for name, count in early.items())
    flips = ", ".join(
        f"{each.flips:,} of {each.rows:,} {each.label!r}"
        + (f" ({percent_interval(each.interval)})" if each.interval is not None else "")
        for each in exits.classes
    )
    return (
        f"{method}: {sum(early.values()) / answers:.0%} of answers left{f' ({where})' if early else ''} and spared "
        f"{exits.layers_saved:.0%} of the layers; flips by {REFERENCE}'s answer, for --max-flips {exits.max_flips:g}: "
        f"{flips}"
    )


def _dropped_nothing(method: MethodResult) -> bool:
    # Whether a method that drops tokens had none to drop.
    return method.keep is not None and method.keep < 1 and method.kept == 1 and not method.fallbacks


# The tables of a workload's results: for the terminal, and for the page.


def _cost_table(workload: WorkloadResult) -> TableRows:
    # Header and one row for each method: its cost.
    return [
        ["method", "seconds", "rows/s", "tokens/s", "computed", "by draft", "kept", "peak MiB"],
        *(
            [
                each.method,
                str(each.seconds),
                f"{each.rows_per_second:,.{1 if each.rows_per_second >= 1 else 3}f}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.target_tokens:,}",
                f"{each.draft_tokens:,}" if each.draft_tokens else "",
                f"{each.kept:.1%}",
                "" if each.peak_bytes is None else mebibytes(each.peak_bytes),
            ]
            for each in workload.methods
        ),
    ]


def answer_table(workload: WorkloadResult) -> TableRows:
    """Return header and one row for each method: flips against the reference, and the share of right answers."""
    rows = [["method", "flips", "95 % interval", "mean diff.", "largest", "accuracy", "95 % interval", "AUC"]]
    for each in workload.methods:
        found, audit = each.answers, each.answers.audit
        flips = [""] * 4
        if audit is not None and audit.interval is not None and audit.flip_rate is not None:
            flips = [
                f"{audit.flips:,} ({audit.flip_rate:.1%})",
                percent_interval(audit.interval),
                f"{audit.mean_difference:.2g}",
                f"{audit.max_difference:.2g}",
            ]
        right = [
            percent_or_nothing(found.accuracy),
            "" if found.accuracy_interval is None else percent_interval(found.accuracy_interval),
            "" if found.auc is None else f"{found.auc:.3f}",
        ]
        rows.append([each.method, *flips, *right])
    return rows


def quick_table(workload: WorkloadResult) -> TableRows:
    """Return header and one row for each method: as much as fits a terminal."""
    rows = [["method", "seconds", "speedup", "rows/s", "kept", "MiB", "flips", "AUC"]]
    for each in workload.methods:
        audit, auc = each.answers.audit, each.answers.auc
        rows.append(
            [
                each.method,
                three_digits(each.seconds.median),
                _speedup(each, workload.rounds),
                three_digits(each.rows_per_second),
                f"{each.kept:.0%}",
                "" if each.peak_bytes is None else mebibytes(each.peak_bytes),
                "" if audit is None or audit.flip_rate is None else f"{audit.flip_rate:.1%}",
                "" if auc is None else f"{auc:.3f}",
            ]
        )
    return rows


def _speedup(method: MethodResult, rounds: int) -> str:
    value = method.speedup
    if method.method == REFERENCE:
        return "1"
    spread = f" ({three_digits(value.low)}-{three_digits(value.high)})" if rounds > 1 else ""
    return three_digits(value.median) + spread


def facts_text(machine: Mapping[str, str | int]) -> str:
    """Return the names and values in a line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def bench_html(report: BenchReport) -> str:
    """Return the page of a report."""
    head = Section(
        title="prefill bench",
        lines=[
            ("started", f"{report.started} (UTC), {report.seconds:.0f} seconds, {report.status}"),
            ("on", facts_text(report.machine)),
            ("with", facts_text(report.versions)),
        ],
        alarms=[*report.notes, *([report.error] if report.error else [])],
    )
    return page_html(head, [*(each.section() for each in report.workloads), settings_section(report.settings)])


def _speedup_bars(speedups: Sequence[tuple[str, Range]]) -> list[Bar]:
    # A bar for each method, and a line at the reference's speed.
    longest = max([1.0, *(speedup.median for _, speedup in speedups)])
    return [
        Bar(
            name,
            100 * speedup.median / longest,
            f"{speedup.median:.2f}x",
            "measured",
            more=(Strip("one", 100 / longest, 0.1),),
        )
        for name, speedup in speedups
    ]


def _flip_bars(workload: WorkloadResult) -> list[Bar]:
    # Bars of the flip rates with their intervals, in percent of the largest upper bound.
    known = [
        (each.method, audit.flip_rate, audit.interval)
        for each in workload.methods
        if (audit := each.answers.audit) is not None
    ]
    longest = max((interval[1] for _, _, interval in known if interval is not None), default=1.0)
    return [
        Bar(
            name,
            100 * rate / longest,
            f"{rate:.1%} ({percent_interval(interval)})",
            "alarm",
            more=(Strip("sure", 100 * interval[0] / longest, 100 * (interval[1] - interval[0]) / longest),),
        )
        for name, rate, interval in known
        if rate is not None and interval is not None
    ]

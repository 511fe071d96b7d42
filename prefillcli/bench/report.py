"""The numbers of `prefill bench`: `bench.json`, the page made of it, and the tables in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any, Literal

from jinja2 import Environment, StrictUndefined
from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from prefillcli.data.output.store import put_text
from prefillcli.redaction import shown_report
from prefillcli.report.numbers import three_digits
from prefillcli.stats.audit import Audit

SCHEMA_VERSION = 1
REFERENCE = "hybrid"
WIDTH = 80  # columns of the tables in the terminal

#: What the methods are, for who reads the tables.
EXPLAINED = {
    "hf": "transformers, one prompt after the other",
    "full": "the layer walk, each prompt by itself",
    "hybrid": "what prefill score does; the others are compared with it",
    "specprefill": "the draft picks the tokens that the model reads",
    "random": "random chunks instead: what a draft must beat",
    "ends": "the first and last tokens instead",
    "bm25": "the sentences most like the question instead",
}


class Range(BaseModel):
    """Median, smallest and largest of some rounds."""

    median: float
    low: float
    high: float


class Predicted(BaseModel):
    """Speedups over the reference that cost models promise; None where they say nothing of the method."""

    flops: float | None = None  # FLOPs of the reference's plan over those of the method's
    ratio: float | None = None  # 1 / (r + keep) at the mean length, r the draft's share of the FLOPs
    table5: float | None = None  # table 5 of SpecPrefill to the letter, each prompt by itself


class Answers(BaseModel):
    """What a method answers, beside the reference and the truth."""

    audit: Audit | None = None  # None for the reference itself
    accuracy: float | None = None  # share of rows whose likeliest label is right, where that is known
    accuracy_interval: tuple[float, float] | None = None  # 95 %, Clopper-Pearson
    auc: float | None = None


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
    flops: float | None = None  # of both models
    peak_bytes: int | None = None  # above what was in use before, weights among it
    speedup: Range  # seconds of the reference over the method's, within a round
    predicted: Predicted
    measured_over_predicted: float | None = None  # by FLOPs
    fallbacks: dict[str, int] = Field(default_factory=dict)  # rows read in full against the wish, by reason
    answers: Answers


class WorkloadResult(BaseModel):
    """All methods on a workload."""

    workload: str
    made: bool
    rows: int
    truth_rows: int
    prompt_tokens: int
    unique_tokens: int  # of the trie of all prompts
    rounds: int = 0  # timed
    reference_able: bool | None = None  # better than chance, where the truth is known
    notes: list[str] = Field(default_factory=list)
    methods: list[MethodResult] = Field(default_factory=list)


class BenchReport(BaseModel):
    """What `bench.json` holds."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None
    page: str | None = None
    seconds: float = 0.0  # of the whole run
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    machine: dict[str, str | int] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    workloads: list[WorkloadResult] = Field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        line: dict[str, Any] = {
            "status": self.status,
            "exit_code": self.exit_code,
            "seconds": round(self.seconds, 3),
            "output": self.output,
            "page": self.page,
            "workloads": {each.workload: _sum_up(each) for each in self.workloads},
        }
        return line | ({"error": self.error} if self.error else {})


def _sum_up(workload: WorkloadResult) -> dict[str, Any]:
    return {
        each.method: {
            "seconds": round(each.seconds.median, 4),
            "speedup": round(each.speedup.median, 3),
            "flips": None if each.answers.audit is None else each.answers.audit.flips,
        }
        for each in workload.methods
    }


TableRows = list[list[str]]


def speed_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method: what it took."""
    rows = [["method", "seconds", "rows/s", "tokens/s", "computed", "by draft", "kept", "peak MiB"]]
    for each in workload.methods:
        peak = "" if each.peak_bytes is None else f"{each.peak_bytes / 2**20:,.0f}"
        rows.append(
            [
                each.method,
                _range(each.seconds),
                f"{each.rows_per_second:,.{1 if each.rows_per_second >= 1 else 3}f}",
                f"{each.tokens_per_second:,.0f}",
                f"{each.target_tokens:,}",
                f"{each.draft_tokens:,}" if each.draft_tokens else "",
                f"{each.kept:.1%}",
                peak,
            ]
        )
    return rows


def speedup_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method but the reference: how much faster, and how much was promised."""
    rows = [["method", "speedup", "by FLOPs", "1/(r+k)", "table 5", "measured/FLOPs"]]
    for each in workload.methods:
        if each.method != REFERENCE:
            promised = [each.predicted.flops, each.predicted.ratio, each.predicted.table5]
            cells = ["" if value is None else f"{value:.2f}" for value in [*promised, each.measured_over_predicted]]
            rows.append([each.method, _range(each.speedup), *cells])
    return rows


def answer_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method: flips against the reference, and what is right."""
    rows = [["method", "flips", "95 % interval", "mean diff.", "largest", "accuracy", "95 % interval", "AUC"]]
    for each in workload.methods:
        found, audit = each.answers, each.answers.audit
        cells = [""] * 4
        if audit is not None and audit.interval is not None and audit.flip_rate is not None:
            cells = [
                f"{audit.flips:,} ({audit.flip_rate:.1%})",
                _interval(audit.interval),
                f"{audit.mean_difference:.2g}",
                f"{audit.max_difference:.2g}",
            ]
        cells += [
            "" if found.accuracy is None else f"{found.accuracy:.1%}",
            "" if found.accuracy_interval is None else _interval(found.accuracy_interval),
            "" if found.auc is None else f"{found.auc:.3f}",
        ]
        rows.append([each.method, *cells])
    return rows


def remarks(workload: WorkloadResult) -> list[str]:
    """What a reader of the tables must know."""
    found = list(workload.notes)
    for each in workload.methods:
        for reason, count in sorted(each.fallbacks.items()):
            found.append(f"{each.method}: {count:,} rows were read in full ({reason})")
    if undropped := [each.method for each in workload.methods if _drops_nothing(each)]:
        found.append(
            f"{', '.join(undropped)}: nothing was dropped, so this shows nothing: the prompts are short, and their "
            "first and last tokens always stay (--keep-first, --keep-last)"
        )
    if workload.reference_able is False:
        found.append("the model cannot do this task: it is not better than chance, so flips say nothing")
    return found


def headline(workload: WorkloadResult) -> str:
    """Name and size in a line."""
    return (
        f"{workload.workload}: {workload.rows:,} rows, {workload.prompt_tokens:,} prompt tokens "
        f"({workload.prompt_tokens / workload.rows:,.0f} a row), {workload.unique_tokens:,} unique"
    )


def _range(value: Range) -> str:
    digits = 2 if value.median >= 1 else 3
    return f"{value.median:.{digits}f} ({value.low:.{digits}f}-{value.high:.{digits}f})"


def _interval(bounds: tuple[float, float]) -> str:
    return f"{100 * bounds[0]:.1f}-{100 * bounds[1]:.1f} %"


def quick_table(workload: WorkloadResult) -> TableRows:
    """Header and one row for each method: what a terminal has room for."""
    rows = [["method", "seconds", "speedup", "rows/s", "kept", "MiB", "flips", "AUC"]]
    for each in workload.methods:
        audit, peak = each.answers.audit, each.peak_bytes
        flips = "" if audit is None or audit.flip_rate is None else f"{audit.flip_rate:.1%}"
        rows.append(
            [
                each.method,
                three_digits(each.seconds.median),
                _speedup(each, workload.rounds),
                three_digits(each.rows_per_second),
                f"{each.kept:.0%}",
                "" if peak is None else f"{peak / 2**20:,.0f}",
                flips,
                "" if each.answers.auc is None else f"{each.answers.auc:.3f}",
            ]
        )
    return rows


def verdicts(workload: WorkloadResult) -> list[str]:
    """What the measurements show, and what they do not: a claim where the spread or the interval bears it."""
    methods = {each.method: each for each in workload.methods}
    reference = methods[REFERENCE]
    found = [_of_speed(each, reference, workload.rounds) for each in methods.values() if each is not reference]
    if workload.reference_able is False:
        return found
    for name, each in methods.items():
        chance = methods.get(name.replace("specprefill@", "random@"))
        if chance is not None and chance is not each and not _drops_nothing(each):
            found += _of_flips(each, chance)
    return found


def _drops_nothing(method: MethodResult) -> bool:
    return method.keep is not None and method.keep < 1 and method.kept == 1 and not method.fallbacks


def _of_speed(method: MethodResult, reference: MethodResult, rounds: int) -> str:
    """A difference is one where the slowest round of the one is faster than the fastest of the other."""
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
    told = f"flips {_interval(ours.interval)} of the answers, {chance.method} {_interval(theirs.interval)}"
    better = ours.interval[1] < theirs.interval[0]
    return [f"{method.method}: {told} (95 %){'' if better else ': not shown to be better than random chunks'}"]


def legend(workload: WorkloadResult) -> str:
    """What the columns of `quick_table` are."""
    rounds = "one round" if workload.rounds < 2 else f"median of {workload.rounds} rounds (smallest-largest)"
    return (
        f"speedup: {REFERENCE}'s seconds over the method's, {rounds}; kept: share of the tokens that the model reads; "
        f"MiB: memory above the weights; flips: rows with another answer than {REFERENCE}'s; AUC: 1 is perfect, "
        "0.5 chance"
    )


def print_workload(workload: WorkloadResult, machine: Mapping[str, str | int], *, whole: bool) -> None:
    """The tables of a workload on stderr; `whole` with predictions and intervals."""
    console = Console(stderr=True, highlight=False, markup=False, width=WIDTH)
    console.print(f"\n{headline(workload)}", style="bold")
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()), style="dim")
    console.print()
    tables = [quick_table(workload)]
    if whole:
        answers = [[row[column] for column in (0, 1, 2, 3, 5, 7)] for row in answer_table(workload)]
        tables += [speedup_table(workload), answers]
    for rows in tables:
        _print_table(console, rows)
    for name in dict.fromkeys(each.method.partition("@")[0] for each in workload.methods):
        console.print(f"  {name}: {EXPLAINED[name]}", style="dim")
    console.print(f"  {legend(workload)}", style="dim")
    console.print()
    for text in verdicts(workload):
        console.print(text)
    for text in remarks(workload):
        console.print(f"note: {text}")


def _print_table(console: Console, rows: TableRows) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left", no_wrap=number == 0)
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    console.print()


def _speedup(method: MethodResult, rounds: int) -> str:
    if method.method == REFERENCE:
        return "1"
    return three_digits(method.speedup.median) if rounds < 2 else _short(method.speedup)


def _short(value: Range) -> str:
    return f"{three_digits(value.median)} ({three_digits(value.low)}-{three_digits(value.high)})"


def page_of(output: str) -> str:
    """Where the page goes: `bench.json` -> `bench.html`."""
    return output.removesuffix(".json") + ".html"


def to_html(report: BenchReport) -> str:
    """One page that needs nothing else: no network, no script, inline CSS for light and dark screens."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("prefillcli.bench").joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        workloads=[
            {
                "headline": headline(each),
                "tables": [
                    ("Speed", speed_table(each)),
                    (f"Speedup over {REFERENCE}", speedup_table(each)),
                    (f"Answers against {REFERENCE}", answer_table(each)),
                ],
                "remarks": remarks(each),
                "able": each.reference_able is not False,
                "speedups": _speedup_bars(each),
                "flips": _flip_bars(each),
            }
            for each in report.workloads
        ],
        settings={name: value for name, value in report.settings.items() if value not in (None, [], False)},
    )


def _speedup_bars(workload: WorkloadResult) -> list[dict[str, Any]]:
    """For each method the lengths of its bars in percent of the longest, and what stands behind them."""
    methods = [each for each in workload.methods if each.method != REFERENCE]
    longest = max([1.0, *(max(each.speedup.median, each.predicted.flops or 0) for each in methods)])
    return [
        {
            "method": each.method,
            "measured": 100 * each.speedup.median / longest,
            "predicted": None if each.predicted.flops is None else 100 * each.predicted.flops / longest,
            "one": 100 / longest,
            "text": f"{each.speedup.median:.2f}x"
            + ("" if each.predicted.flops is None else f", {each.predicted.flops:.2f}x by FLOPs"),
        }
        for each in methods
    ]


def _flip_bars(workload: WorkloadResult) -> list[dict[str, Any]]:
    """Bars of the flip rates with their intervals, in percent of the largest upper bound."""
    audits = [(each.method, each.answers.audit) for each in workload.methods if each.answers.audit is not None]
    known = [(name, each.flip_rate, each.interval) for name, each in audits]
    longest = max((interval[1] for _, _, interval in known if interval is not None), default=1.0)
    return [
        {
            "method": name,
            "rate": 100 * rate / longest,
            "low": 100 * interval[0] / longest,
            "width": 100 * (interval[1] - interval[0]) / longest,
            "text": f"{rate:.1%} ({_interval(interval)})",
        }
        for name, rate, interval in known
        if rate is not None and interval is not None
    ]


def save_report(report: BenchReport) -> None:
    """Write `bench.json` and its page; a reader sees an old file or a whole new one. Raises PrefillError."""
    safe = shown_report(report)
    texts = {report.output: safe.model_dump_json(indent=2) + "\n", report.page: to_html(safe)}
    for path, text in texts.items():
        if path is not None:
            put_text(path, text)

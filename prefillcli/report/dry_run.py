"""What an input looks like and what scoring it will take: `*.dry-run.json`, and its tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from rich.console import Console
from rich.table import Table

from prefillcli.redaction import shown_report

SCHEMA_VERSION = 1
ESTIMATE = "An estimate, as if the draft chose the first chunks; its own work is not counted"
_BAR = 40  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


class SurveyRows(BaseModel):
    """Rows of the input. `total` = `prompts` + `errors` + `skipped`."""

    total: int = 0
    prompts: int = 0  # that will be scored
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)
    too_long: int = 0  # longer than --max-length, whatever --on-long makes of them
    truncated: int = 0  # of these, shortened


class Bin(BaseModel):
    """Rows whose prompts have at least `low` and less than `high` tokens."""

    low: int
    high: int
    rows: int


class Lengths(BaseModel):
    """Lengths of the prompts in tokens, after --on-long."""

    least: int
    mean: float
    most: int
    percentiles: dict[str, int]  # of so many percent of the prompts no one is longer
    histogram: list[Bin]  # edges grow by a constant factor


class Duplicates(BaseModel):
    """Rows whose prompt, token by token, is that of another row."""

    rows: int = 0
    prompts: int = 0  # different ones among these rows


class SharedLevel(BaseModel):
    """Prompt tokens in prefixes that at least `rows` rows of a window share."""

    rows: int
    tokens: int
    share: float  # of all prompt tokens


class SharedPrefix(BaseModel):
    """A prefix that rows of a window share."""

    rows: int
    tokens: int  # its length
    saved: int  # tokens that need not be computed because of its last part, the one behind a larger prefix
    first_row: int


class Sharing(BaseModel):
    """What prompts have in common at their start; windows of rows are looked at one by one, as they are scored."""

    windows: int = 0
    unique_tokens: int = 0  # of the windows' tries
    levels: list[SharedLevel] = Field(default_factory=list)
    largest: list[SharedPrefix] = Field(default_factory=list)  # those that save most


class PlanCost(BaseModel):
    """What a schedule takes. Seconds and price are of the model alone, and null without a profile."""

    schedule: str
    prefix_kv: str
    chosen: bool = False  # what the settings ask for
    packs: int = 0
    computed_tokens: int = 0
    seconds: float | None = None
    price: float | None = None


class KeepCost(BaseModel):
    """What a keep rate leaves, under the chosen schedule. An estimate: no draft was asked."""

    keep: float
    chosen: bool = False
    compressed_rows: int = 0
    kept_tokens: int = 0
    computed_tokens: int = 0
    seconds: float | None = None  # of the model, not of the draft
    price: float | None = None


class PackLimits(BaseModel):
    """What follows from --memory."""

    pack_tokens: int
    max_tokens: int  # of a prompt
    chunk_tokens: int


class SurveySeconds(BaseModel):
    """Seconds that the survey itself took: what a run will read, render and tokenise with."""

    read: float = 0.0
    render: float = 0.0
    tokenize: float = 0.0
    plan: float = 0.0


class Survey(BaseModel):
    """Rows, prompts, sharing and plans of an input."""

    rows: SurveyRows = Field(default_factory=SurveyRows)
    prompt_tokens: int = 0
    lengths: Lengths | None = None  # None without prompts
    duplicates: Duplicates = Field(default_factory=Duplicates)
    sharing: Sharing = Field(default_factory=Sharing)
    limits: PackLimits
    plans: list[PlanCost] = Field(default_factory=list)
    keeps: list[KeepCost] = Field(default_factory=list)  # with a draft
    seconds: SurveySeconds = Field(default_factory=SurveySeconds)

    @property
    def plan(self) -> PlanCost:
        """The plan that the settings ask for."""
        return next(plan for plan in self.plans if plan.chosen)


class DryRunReport(BaseModel):
    """What `*.dry-run.json` holds."""

    schema_version: int = SCHEMA_VERSION
    status: Literal["complete", "failed", "interrupted"] = "failed"
    exit_code: int = 1
    error: str | None = None
    started: str = ""  # ISO 8601, UTC
    output: str | None = None  # where the scores would go
    report: str | None = None
    survey: Survey | None = None
    profile: str | None = None  # the profile that predicted
    no_prediction: str | None = None  # why there is none
    seconds: float = 0.0
    peak_memory_bytes: int = 0  # of the host
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The last line on stdout."""
        line: dict[str, Any] = {"status": self.status, "exit_code": self.exit_code, "dry_run": True}
        if self.survey is not None:
            survey, plan = self.survey, self.survey.plan
            line |= {
                "rows": survey.rows.model_dump(),
                "prompt_tokens": survey.prompt_tokens,
                "unique_tokens": survey.sharing.unique_tokens,
                "computed_tokens": plan.computed_tokens,
                "packs": plan.packs,
                "predicted_seconds": plan.seconds,
                "predicted_price": plan.price,
            }
        safe = shown_report(self)
        line |= {"seconds": round(self.seconds, 3), "output": safe.output, "report": safe.report}
        return line | ({"error": self.error} if self.error else {})


def print_dry_run(report: DryRunReport) -> None:
    """The whole report, on stderr."""
    if report.survey is not None:
        print_survey(report.survey)
    table = _plain()
    table.add_row("prediction", f"by {report.profile}" if report.profile else f"none: {report.no_prediction}")
    table.add_row("dry run", f"{duration(report.seconds)}, {report.peak_memory_bytes / 2**20:,.0f} MiB; none scored")
    table.add_row("output", f"{report.output} (not written)")
    table.add_row("report", report.report or "none")
    _console().print(table)


def print_survey(survey: Survey) -> None:
    """The survey in a few tables, on stderr."""
    table = _plain()
    for name, text in survey_lines(survey):
        table.add_row(name, text)
    console = _console()
    console.print(table)
    if survey.sharing.largest:
        console.print(_prefix_table(survey.sharing.largest))
    console.print(_filled(plan_rows(survey.plans), text=2))
    if survey.keeps:
        console.print(_filled(keep_rows(survey.keeps), caption=ESTIMATE))


def survey_lines(survey: Survey) -> Iterable[tuple[str, str]]:
    """What a survey found, by name; the histogram of lengths has none."""
    rows, sharing, limits = survey.rows, survey.sharing, survey.limits
    counts = f"{rows.prompts:,} to score of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {rows.errors:,} errors ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    yield "rows", counts
    if rows.too_long:
        yield "too long", f"{rows.too_long:,} rows" + (f", {rows.truncated:,} shortened" if rows.truncated else "")
    if survey.lengths is not None:
        lengths = survey.lengths
        shares = ", ".join(f"{name} % {tokens:,}" for name, tokens in lengths.percentiles.items())
        yield "tokens", f"{survey.prompt_tokens:,} in prompts, {sharing.unique_tokens:,} unique"
        yield "lengths", f"{lengths.least:,} to {lengths.most:,}, mean {lengths.mean:,.0f}; {shares}"
        yield "", "\n".join(histogram_lines(lengths.histogram))
    twice = survey.duplicates
    if twice.rows:
        yield "duplicates", f"{twice.rows:,} rows share their whole prompt ({twice.prompts:,} prompts) with others"
    shared = ", ".join(f"{level.share:.1%} by >= {level.rows}" for level in sharing.levels)
    yield "shared", f"of the prompt tokens {shared} rows" if shared else "nothing"
    yield "packs", f"of {limits.pack_tokens:,} tokens; a prompt has at most {limits.max_tokens:,}"


def _prefix_table(prefixes: Iterable[SharedPrefix]) -> Table:
    table = _headed("shared by rows", "prefix tokens", "tokens saved", "first row")
    for prefix in prefixes:
        table.add_row(f"{prefix.rows:,}", f"{prefix.tokens:,}", f"{prefix.saved:,}", f"{prefix.first_row}")
    return table


def plan_rows(plans: Sequence[PlanCost]) -> list[list[str]]:
    """Header and one row for each plan, the asked one with a star."""
    rows = [["schedule", "prefix K,V", "packs", "computed tokens", *_predictions(plans)]]
    for plan in plans:
        name = plan.schedule + (" *" if plan.chosen else "")
        rows.append([name, plan.prefix_kv, f"{plan.packs:,}", f"{plan.computed_tokens:,}", *_predicted(plan)])
    return rows


def keep_rows(keeps: Sequence[KeepCost]) -> list[list[str]]:
    """Header and one row for each keep rate, the asked one with a star."""
    rows = [["keep rate", "compressed rows", "kept tokens", "computed tokens", *_predictions(keeps)]]
    for each in keeps:
        name, compressed = f"{each.keep:g}" + (" *" if each.chosen else ""), f"{each.compressed_rows:,}"
        rows.append([name, compressed, f"{each.kept_tokens:,}", f"{each.computed_tokens:,}", *_predicted(each)])
    return rows


def _predictions(costs: Sequence[PlanCost | KeepCost]) -> list[str]:
    """Heads of the columns with predictions, where there are any."""
    first = costs[0]
    known = {"predicted": first.seconds, "price": first.price}
    return [name for name, value in known.items() if value is not None]


def _predicted(cost: PlanCost | KeepCost) -> list[str]:
    texts = [duration(cost.seconds)] if cost.seconds is not None else []
    return texts + (
        [f"{cost.price:,.2f}" if cost.price >= 1 else f"{cost.price:.2g}"] if cost.price is not None else []
    )


def histogram_lines(bins: list[Bin]) -> list[str]:
    """One line with a bar for each bin."""
    most = max((each.rows for each in bins), default=0)
    edges = [f"{each.low:,} - {each.high - 1:,}" for each in bins]
    width = max(map(len, edges), default=0)
    return [f"{edge:>{width}} {bar(each.rows, most)} {each.rows:,}" for edge, each in zip(edges, bins, strict=True)]


def bar(value: float, most: float, width: int = _BAR) -> str:
    """A bar of up to `width` characters, in eighths of one; what is not nothing shows."""
    eighths = round(8 * width * value / most) if most else 0
    eighths = max(eighths, 1 if value > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def duration(seconds: float) -> str:
    """Seconds as one would say them."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _plain() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", min_width=10)
    table.add_column(overflow="fold")
    return table


def _headed(*names: str, text: int = 0) -> Table:
    """A table of numbers behind `text` columns of text."""
    table = Table(box=None, pad_edge=False, header_style="bold", caption_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < text else "right")
    return table


def _filled(rows: list[list[str]], *, text: int = 0, caption: str | None = None) -> Table:
    """A table of a header and rows."""
    table = _headed(*rows[0], text=text)
    for row in rows[1:]:
        table.add_row(*row)
    table.caption = caption
    return table


def _console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)

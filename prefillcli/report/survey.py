"""What an input looks like and what scoring it will take: models for `*.dry-run.json` and `profile.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, Field

from prefillcli.report.section import Bar, Part, Section, TableRows, bars, price
from prefillcli.runtime.clock import duration


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
    percentiles: dict[str, int]  # keys are percent of the prompts, values the tokens that none of those exceeds
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
    unique_tokens: int = 0  # of the windows' tries, without what the window before hands on
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


class TextCost(BaseModel):
    """Whether K,V survive scoring where texts are written behind prompts, or wanted prompts are read again."""

    kv: str  # kept or again
    reason: str
    kept_tokens: int  # of a pack whose K,V of all layers can be kept
    bytes: int  # of these
    small_tokens: int = 0  # computed for all prompts in packs that can be kept
    large_tokens: int = 0  # in packs as large as without texts; what is wanted is read again


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
    texts: TextCost | None = None  # with --rationale
    seconds: SurveySeconds = Field(default_factory=SurveySeconds)

    @property
    def plan(self) -> PlanCost:
        """The plan that the settings ask for."""
        return next(plan for plan in self.plans if plan.chosen)


# The tables of a survey: for the terminal, and for pages.


ESTIMATE = "An estimate, as if the draft chose the first chunks; its own work is not counted"


def survey_section(survey: Survey) -> Section:
    """What terminal and page show of an input."""
    bins = survey.lengths.histogram if survey.lengths is not None else []
    edges = {f"{each.low:,} - {each.high - 1:,}": each.rows for each in bins}
    shares = [
        Bar(f"by {each.rows} rows or more", 100 * each.share, f"{each.share:.1%}") for each in survey.sharing.levels
    ]
    prefixes = survey.sharing.largest
    return Section(
        title="Input",
        lines=list(_lines(survey)),
        parts=[
            Part(
                title="Rows by tokens of their prompt",
                bars=bars(edges, {name: f"{rows:,}" for name, rows in edges.items()}),
            ),
            Part(
                title="Share of the prompt tokens in prefixes that are shared",
                bars=shares,
                text="" if shares else "None.",
            ),
            Part(title="Largest shared prefixes", table=_prefix_rows(prefixes) if prefixes else None, words=()),
            Part(
                title="Plans",
                table=_plan_rows(survey.plans),
                words=range(2),
                note="The star is what the settings ask for.",
            ),
            Part(title="Keep rates", table=_keep_rows(survey.keeps) if survey.keeps else None, note=f"{ESTIMATE}."),
        ],
    )


def _lines(survey: Survey) -> Iterable[tuple[str, str]]:
    rows, limits = survey.rows, survey.limits
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
        yield "tokens", f"{survey.prompt_tokens:,} in prompts, {survey.sharing.unique_tokens:,} unique"
        yield "lengths", f"{lengths.least:,} to {lengths.most:,}, mean {lengths.mean:,.0f}; {shares}"
    twice = survey.duplicates
    if twice.rows:
        yield "duplicates", f"{twice.rows:,} rows share their whole prompt ({twice.prompts:,} prompts) with others"
    yield "packs", f"of {limits.pack_tokens:,} tokens; a prompt has at most {limits.max_tokens:,}"
    texts = survey.texts
    if texts is not None:
        more = texts.small_tokens - texts.large_tokens
        yield (
            "rationales",
            (
                f"K,V {'are kept' if texts.kv == 'kept' else 'are not kept, wanted prompts are read again'}: "
                f"{texts.reason}\npacks that can be kept compute {more:,} tokens more than larger ones, "
                f"which compute {texts.large_tokens:,}"
            ),
        )


def _prefix_rows(prefixes: Iterable[SharedPrefix]) -> TableRows:
    rows = [["shared by rows", "prefix tokens", "tokens saved", "first row"]]
    return rows + [[f"{p.rows:,}", f"{p.tokens:,}", f"{p.saved:,}", f"{p.first_row}"] for p in prefixes]


def _plan_rows(plans: Sequence[PlanCost]) -> TableRows:
    rows = [["schedule", "prefix K,V", "packs", "computed tokens", *_predictions(plans)]]
    for plan in plans:
        name = plan.schedule + (" *" if plan.chosen else "")
        rows.append([name, plan.prefix_kv, f"{plan.packs:,}", f"{plan.computed_tokens:,}", *_predicted(plan)])
    return rows


def _keep_rows(keeps: Sequence[KeepCost]) -> TableRows:
    rows = [["keep rate", "compressed rows", "kept tokens", "computed tokens", *_predictions(keeps)]]
    for each in keeps:
        name, compressed = f"{each.keep:g}" + (" *" if each.chosen else ""), f"{each.compressed_rows:,}"
        rows.append([name, compressed, f"{each.kept_tokens:,}", f"{each.computed_tokens:,}", *_predicted(each)])
    return rows


def _predictions(costs: Sequence[PlanCost | KeepCost]) -> list[str]:
    # Heads of the columns with predictions, where there are any.
    first = costs[0]
    known = {"predicted": first.seconds, "price": first.price}
    return [name for name, value in known.items() if value is not None]


def _predicted(cost: PlanCost | KeepCost) -> list[str]:
    texts = [duration(cost.seconds)] if cost.seconds is not None else []
    return texts + ([price(cost.price)] if cost.price is not None else [])

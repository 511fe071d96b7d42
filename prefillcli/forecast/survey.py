"""The content of an input and the cost of scoring it, found without weights."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from hashlib import blake2b
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from prefillcli.core.question import Question, plan_questions, planned_variants
from prefillcli.data.output.columns import MOST, Counts
from prefillcli.data.rows import SKIPPED_CODES, ErrorCode, Int32Array, Prompt, Window
from prefillcli.engines.memory_plan import TEXTS, budget_of, plan_packs
from prefillcli.errors import ResourceError, counted
from prefillcli.followup.rationale import text_room
from prefillcli.models.open import Opened
from prefillcli.plan import SCHEDULES
from prefillcli.plan.blocks import BLOCK_TOKENS, CarriedBlock
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan, make_plans
from prefillcli.plan.trie import build_forest, shared_nodes, token_order
from prefillcli.reading.compress.compressor import KeptTokens
from prefillcli.report.section import Bar, Part, Section, TableRows, bars, price
from prefillcli.runtime.clock import duration

if TYPE_CHECKING:
    from prefillcli.forecast.profile import Profile


class SurveyRows(BaseModel):
    """Rows of the input. `total` = `prompts` + `errors` + `skipped`."""

    total: int = 0
    prompts: int = 0  # that will be scored
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)
    too_long: int = 0  # longer than --max-length, whatever --on-long does with them
    truncated: int = 0  # of these, shortened
    failed: list[dict[str, Any]] = Field(default_factory=list)  # the first error rows: row, id, code, detail

    @property
    def counts(self) -> Counts:
        """The counts of the rows if the prompts were scored."""
        counts = Counts(self.total, self.prompts, self.errors, self.skipped, self.errors_by_code)
        counts.tallies.failed = self.failed
        return counts


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
    percentiles: dict[str, int]  # keys are percent of the prompts, values the most tokens among these
    histogram: list[Bin]  # edges grow by a constant factor


class Duplicates(BaseModel):
    """Rows whose prompt, token by token, is that of another row."""

    rows: int = 0
    prompts: int = 0  # different ones among these rows


class SharedLevel(BaseModel):
    """Prompt tokens in prefixes shared by at least `rows` rows of a window."""

    rows: int
    tokens: int
    share: float  # of all prompt tokens


class SharedPrefix(BaseModel):
    """A prefix that rows of a window share."""

    rows: int
    tokens: int  # its length
    saved: int  # tokens saved by its last part, the one after a prefix shared by more rows
    first_row: int


class Sharing(BaseModel):
    """The common beginnings of prompts; each window of rows counts by itself, as in scoring."""

    windows: int = 0
    unique_tokens: int = 0  # of the windows' tries, without blocks from the window before
    levels: list[SharedLevel] = Field(default_factory=list)
    largest: list[SharedPrefix] = Field(default_factory=list)  # those that save most


class PlanCost(BaseModel):
    """The cost of a schedule. Seconds and price concern only the model, and are null without a profile."""

    schedule: str
    prefix_kv: str
    chosen: bool = False  # what the settings ask for
    packs: int = 0
    computed_tokens: int = 0
    seconds: float | None = None
    price: float | None = None


class KeepCost(BaseModel):
    """The cost at a keep rate, under the chosen schedule. It is an estimate without a draft."""

    keep: float
    chosen: bool = False
    compressed_rows: int = 0
    kept_tokens: int = 0
    computed_tokens: int = 0
    seconds: float | None = None  # of the model, not of the draft
    price: float | None = None


class PackLimits(BaseModel):
    """The bounds of packs, which follow from --memory, and of a prompt."""

    pack_tokens: int
    max_tokens: int  # of a prompt, in memory
    max_length: int | None = None  # of a prompt, by the model and --max-length; files of earlier versions have none
    chunk_tokens: int


class TextCost(BaseModel):
    """Where texts are written after prompts: whether K,V survive scoring, or wanted prompts are read again."""

    kv: str  # kept or again
    reason: str
    kept_tokens: int  # of a pack whose K,V of all layers can be kept
    bytes: int  # of these
    small_tokens: int = 0  # tokens computed for all prompts in packs that can be kept
    large_tokens: int = 0  # the same in packs as large as without texts; wanted prompts are read again


class SurveySeconds(BaseModel):
    """Seconds that the survey itself took: a run will need them too, to read, render and tokenise."""

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
    """The sections about an input for terminal and page."""
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
                note="The stars are what the settings ask for. Plans of the same cost are in one line.",
            ),
            Part(title="Keep rates", table=_keep_rows(survey.keeps) if survey.keeps else None, note=f"{ESTIMATE}."),
        ],
    )


def _lines(survey: Survey) -> Iterable[tuple[str, str]]:
    rows, limits = survey.rows, survey.limits
    counts = f"{rows.prompts:,} to score of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {counted(rows.errors, 'error')} ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    yield "rows", counts
    if rows.too_long:
        yield (
            "too long",
            f"{counted(rows.too_long, 'row')}" + (f", {rows.truncated:,} shortened" if rows.truncated else ""),
        )
    if survey.lengths is not None:
        lengths = survey.lengths
        shares = ", ".join(f"{name} % {tokens:,}" for name, tokens in lengths.percentiles.items())
        yield "tokens", f"{survey.prompt_tokens:,} in prompts, {survey.sharing.unique_tokens:,} unique"
        yield "lengths", f"{lengths.least:,} to {lengths.most:,}, mean {lengths.mean:,.0f}; {shares}"
    twice = survey.duplicates
    if twice.rows:
        yield (
            "duplicates",
            f"{counted(twice.rows, 'row')} with the whole prompt of another ({counted(twice.prompts, 'prompt')})",
        )
    most = min(limits.max_tokens, limits.max_length or limits.max_tokens)
    yield "packs", f"of {counted(limits.pack_tokens, 'token')}; a prompt has at most {most:,}"
    texts = survey.texts
    if texts is not None:
        more = texts.small_tokens - texts.large_tokens
        yield (
            "rationales",
            (
                f"K,V {'are kept' if texts.kv == 'kept' else 'are not kept, wanted prompts are read again'}: "
                f"{texts.reason}\npacks that can be kept compute {counted(more, 'token')} more than larger ones, "
                f"which compute {texts.large_tokens:,}"
            ),
        )


def _prefix_rows(prefixes: Iterable[SharedPrefix]) -> TableRows:
    rows = [["shared by rows", "prefix tokens", "tokens saved", "first row"]]
    return rows + [[f"{p.rows:,}", f"{p.tokens:,}", f"{p.saved:,}", f"{p.first_row}"] for p in prefixes]


def _plan_rows(plans: Sequence[PlanCost]) -> TableRows:
    # Plans of the same cost have one line: first those of a schedule, then schedules whose lines are the same.
    stars = {name for plan in plans if plan.chosen for name in (plan.schedule, plan.prefix_kv)}
    lines: dict[tuple[str, ...], list[str]] = {}
    for schedule, own in itertools.groupby(plans, key=lambda plan: plan.schedule):
        kept: dict[tuple[str, ...], list[str]] = {}
        for plan in own:
            cost = (f"{plan.packs:,}", f"{plan.computed_tokens:,}", *_predicted(plan))
            kept.setdefault(cost, []).append(_starred(plan.prefix_kv, stars))
        for cost, names in kept.items():
            lines.setdefault((", ".join(names), *cost), []).append(_starred(schedule, stars))
    heads = ["schedule", "prefix K,V", "packs", "computed tokens", *_predictions(plans)]
    return [heads, *([", ".join(schedules), *cells] for cells, schedules in lines.items())]


def _starred(name: str, stars: Set[str]) -> str:
    return f"{name} *" if name in stars else name


def _keep_rows(keeps: Sequence[KeepCost]) -> TableRows:
    rows = [["keep rate", "compressed rows", "kept tokens", "computed tokens", *_predictions(keeps)]]
    for each in keeps:
        name, compressed = f"{each.keep:g}" + (" *" if each.chosen else ""), f"{each.compressed_rows:,}"
        rows.append([name, compressed, f"{each.kept_tokens:,}", f"{each.computed_tokens:,}", *_predicted(each)])
    return rows


def _predictions(costs: Sequence[PlanCost | KeepCost]) -> list[str]:
    # Heads of the columns with predictions, if there are any.
    first = costs[0]
    known = {"predicted": first.seconds, "price": first.price}
    return [name for name, value in known.items() if value is not None]


def _predicted(cost: PlanCost | KeepCost) -> list[str]:
    texts = [duration(cost.seconds)] if cost.seconds is not None else []
    return texts + ([price(cost.price)] if cost.price is not None else [])


# The statistics of an input: lengths of its prompts, and prefixes that they share.


LEVELS = (2, 10, 100)  # rows that share a prefix
PERCENTILES = (10, 50, 90, 95, 99)
LARGEST = 10
_REMEMBERED = 2000  # prefixes that may still turn out to be among the largest


class InputStatistics:
    """Adds up the statistics of windows, in about eight bytes a row."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()  # number of prompts by their tokens
        self._rows = self._truncated = 0
        self._codes: Counter[str] = Counter()
        self._failed: list[dict[str, Any]] = []
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._windows = 0
        self._unique = 0
        self._shared = dict.fromkeys(LEVELS, 0)
        self._largest: dict[bytes, SharedPrefix] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(length * rows for length, rows in self.lengths.items())

    def add(self, window: Window) -> None:
        """Count a window."""
        self._windows += 1
        self._rows += len(window.rows)
        self._codes.update(error.code for error in window.errors.values())
        found = sorted((row, error) for row, error in window.errors.items() if error.code not in SKIPPED_CODES)
        self._failed += [
            {"row": row, "id": None, "code": str(error.code), "detail": error.detail}
            for row, error in found[: MOST - len(self._failed)]
        ]
        self._truncated += sum(prompt.truncated for prompt in window.prompts)
        tokens = [prompt.tokens for prompt in window.prompts]
        self.lengths.update(map(len, tokens))
        digests = (int.from_bytes(_digest(each), "little") for each in tokens)
        self._digests.append(np.fromiter(digests, np.uint64, len(tokens)))
        self._share(window.prompts, tokens)

    def _share(self, prompts: Sequence[Prompt], tokens: Sequence[Int32Array]) -> None:
        nodes = shared_nodes(build_forest(tokens, token_order(tokens)))
        self._unique += sum(node.length for node, _ in nodes)
        for level in LEVELS:
            self._shared[level] += sum(node.length * rows for node, rows in nodes if rows >= level)
        candidates = [(node.length * (rows - 1), at) for at, (node, rows) in enumerate(nodes) if rows > 1]
        for saved, at in heapq.nlargest(_REMEMBERED // 10, candidates):
            node, rows = nodes[at]
            key = _digest(tokens[node.prompt][: node.end])
            known = self._largest.get(key)
            if known is None:
                first = prompts[node.prompt].row
                self._largest[key] = SharedPrefix(rows=rows, tokens=node.end, saved=saved, first_row=first)
            else:
                known.rows, known.saved = known.rows + rows, known.saved + saved
        if len(self._largest) > _REMEMBERED:
            ranked = sorted(self._largest.items(), key=lambda item: -item[1].saved)
            self._largest = dict(ranked[: _REMEMBERED // 2])

    def rows(self, more_errors: Counter[str]) -> SurveyRows:
        """Rows by their outcome, with errors that were found elsewhere."""
        codes = self._codes + more_errors
        skipped = sum(codes.pop(code, 0) for code in SKIPPED_CODES)
        errors = codes.total()
        return SurveyRows(
            total=self._rows,
            prompts=self._rows - errors - skipped,
            errors=errors,
            skipped=skipped,
            errors_by_code=dict(sorted(codes.items())),
            too_long=self._truncated + skipped + codes[ErrorCode.PROMPT_TOO_LONG],
            truncated=self._truncated,
            failed=self._failed,
        )

    def duplicates(self) -> Duplicates:
        """Rows with equal prompts, over all windows."""
        digests = np.concatenate(self._digests) if self._digests else np.empty(0, dtype=np.uint64)
        counts = np.unique(digests, return_counts=True)[1]
        repeated = counts[counts > 1]
        return Duplicates(rows=int(repeated.sum()), prompts=len(repeated))

    def sharing(self, given: int = 0) -> Sharing:
        """The common beginnings of prompts within their windows; earlier windows computed the `given` tokens."""
        levels = [
            SharedLevel(rows=level, tokens=shared, share=shared / self.tokens)
            for level, shared in self._shared.items()
            if shared
        ]
        largest = sorted(self._largest.values(), key=lambda prefix: -prefix.saved)[:LARGEST]
        return Sharing(windows=self._windows, unique_tokens=self._unique - given, levels=levels, largest=largest)


def lengths_of(counts: Counter[int]) -> Lengths:
    """The lengths of prompts, from the number of prompts of each length. There is at least one prompt."""
    lengths = sorted(counts)
    ends = np.cumsum([counts[length] for length in lengths])
    rows = int(ends[-1])
    nearest = {share: int(np.searchsorted(ends, math.ceil(share / 100 * rows))) for share in PERCENTILES}
    return Lengths(
        least=lengths[0],
        mean=sum(length * number for length, number in counts.items()) / rows,
        most=lengths[-1],
        percentiles={str(share): lengths[at] for share, at in nearest.items()},
        histogram=histogram_of(counts),
    )


def histogram_of(counts: Counter[int]) -> list[Bin]:
    """Bins whose edges grow by a factor of 2, or by a root of 2 if lengths differ little."""
    least, most = min(counts), max(counts)
    steps = next((n for n in (1, 2, 4) if n * math.log2((most + 1) / least) >= 6), 8)  # to a factor of 2
    at = math.floor(steps * math.log2(least))
    edges = [round(2 ** (at / steps))]
    while edges[-1] <= most:
        at += 1
        edge = round(2 ** (at / steps))
        if edge > edges[-1]:
            edges.append(edge)
    first = max(bisect.bisect_right(edges, least) - 1, 0)
    edges = [min(edges[first], least), *edges[first + 1 :]]
    bins = [Bin(low=low, high=high, rows=0) for low, high in itertools.pairwise(edges)]
    for length, rows in counts.items():
        bins[bisect.bisect_right(edges, length) - 1].rows += rows
    return bins


def _digest(tokens: Int32Array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=8).digest()


# The cost of a job under each schedule, with each way to keep K,V between packs, and at each keep rate.


PREFIX_KV = ("auto", "discard", "offload")  # keep is the same as auto


class Alternatives:
    """Adds up the cost of plans over windows. The job's own plan is among them, cut as the job cuts it.

    Without `--memory`, the loaded weights will leave `free` bytes. `profile` sizes packs and predicts their time;
    `names` are those of the labels; `block_tokens` as in `make_plan`. Raises ResourceError if not even a small prompt
    fits.
    """

    def __init__(
        self,
        settings: Any,
        opened: Opened,
        names: Sequence[str],
        *,
        free: int | None,
        profile: Profile | None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.given_tokens = 0  # tokens of the job's own plan that an earlier window has computed
        self.errors: Counter[str] = Counter()  # rows that only planning finds to be errors, by code
        budget, (tokens, texts_of) = budget_of(settings, free), text_room(settings, opened, names)
        plan = plan_packs(opened, settings, budget, profile, text_tokens=tokens, texts_of=texts_of)
        self.texts = TextCost(**plan[TEXTS]) if TEXTS in plan else None
        self._own = Limits(**plan["limits"])
        self.limits = PackLimits(
            pack_tokens=self._own.tokens,
            max_tokens=self._own.max_tokens,
            max_length=min(getattr(settings, "max_length", None) or opened.max_length, opened.max_length),
            chunk_tokens=plan["chunk_tokens"],
        )
        self._schedule, self._profile = settings.schedule, profile
        self._foresight = None if settings.draft is None else KeptTokens(settings, opened, budget)
        self._price_per_hour: float | None = getattr(settings, "price_per_hour", None)
        self._block_tokens = block_tokens if self._foresight is None else 0
        self._limits: dict[str, Limits] = {settings.prefix_kv: self._own}
        for other in PREFIX_KV:
            if other not in self._limits and not (other == "auto" and settings.prefix_kv == "keep"):
                try:
                    changed = settings.model_copy(update={"prefix_kv": other})
                    self._limits[other] = Limits(
                        **plan_packs(opened, changed, budget, profile, text_tokens=tokens, texts_of=texts_of)["limits"]
                    )
                except ResourceError:
                    continue  # the host memory that is free for offloading is unknown on this system
        self.plans = [
            PlanCost(
                schedule=schedule, prefix_kv=kept, chosen=(schedule, kept) == (self._schedule, settings.prefix_kv)
            )
            for schedule in SCHEDULES
            for kept in self._limits
        ]
        without_texts = plan_packs(opened, settings, budget, profile)["limits"]
        self._large = replace(self._own, tokens=without_texts["tokens"], kept_packs=False)
        self._carried: list[tuple[CarriedBlock, ...]] = [() for _ in self.plans]  # into the next window
        self.keeps: list[KeepCost] = []
        if self._foresight is not None:
            rates, chosen = self._foresight.rates, self._foresight.chosen
            self.keeps = [KeepCost(keep=rate, chosen=rate == chosen) for rate in rates]
        self._keep = 1.0 if self._foresight is None or self._foresight.chosen is None else self._foresight.chosen

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Plan the prompts of a window."""
        questions = self._questions(prompts, self._keep)
        fitting = self._fitting(questions)
        if len(fitting) < len(questions):
            self.errors[ErrorCode.EXCEEDS_MEMORY] += len(questions) - len(fitting)
        own: Plan | None = None
        cases = [(cost.schedule, self._limits[cost.prefix_kv]) for cost in self.plans]
        plans = self._plans(fitting, cases, tuple(self._carried))
        share = self._layers(fitting)
        for number, (cost, plan) in enumerate(zip(self.plans, plans, strict=True)):
            self._charge(cost, plan, share, fitting)
            self._carried[number] = plan.carried
            own = plan if cost.chosen else own
        if self.texts is not None:
            cases = [(self._schedule, self._own.for_texts()), (self._schedule, self._large)]
            small, large = (each.computed_tokens for each in self._plans(fitting, cases))
            self.texts.small_tokens += small
            self.texts.large_tokens += large
        if own is not None:
            self.given_tokens += sum(len(pack.tokens) for pack in own.given)
        for keep in self.keeps:
            self._add_keep(keep, prompts, own if keep.keep == self._keep else None)

    def _add_keep(self, cost: KeepCost, prompts: Sequence[Prompt], plan: Plan | None) -> None:
        fitting = self._fitting(self._questions(prompts, cost.keep))
        cost.compressed_rows += sum(question.compressed for question in fitting)
        cost.kept_tokens += sum(question.most_kept for question in fitting)
        plan = plan or next(self._plans(fitting, [(self._schedule, self._own)]))
        self._charge(cost, plan, self._layers(fitting), fitting)

    def _questions(self, prompts: Sequence[Prompt], keep: float) -> list[Question]:
        if self._foresight is None:
            return [Question(prompt) for prompt in prompts]
        return self._foresight.questions(prompts, keep)

    def _fitting(self, questions: Sequence[Question]) -> list[Question]:
        return [question for question in questions if question.size <= self._own.max_tokens]

    def _plans(
        self,
        questions: Sequence[Question],
        cases: Sequence[tuple[str, Limits]],
        carried: Iterable[Sequence[CarriedBlock]] = repeat(()),
    ) -> Iterator[Plan]:
        if any(question.thinning is not None for question in questions):
            yield from (plan_questions(questions, limits, schedule) for schedule, limits in cases)
            return
        yield from make_plans(
            [each.tokens for each in questions],
            cases,
            [each.positions for each in questions],
            variants=planned_variants(questions),
            labels=[each.prompt.labels for each in questions],
            carried=carried,
            block_tokens=self._block_tokens,
        )

    def _layers(self, questions: Sequence[Question]) -> float:
        return 1.0 if self._foresight is None else self._foresight.layers(questions)

    def _charge(self, cost: PlanCost | KeepCost, plan: Plan, share: float, questions: Sequence[Question]) -> None:
        if isinstance(cost, PlanCost):
            cost.packs += len(plan.packs)
        cost.computed_tokens += plan.computed_tokens
        if self._profile is not None:
            whole = plan.with_labels(lambda prompt: questions[prompt].prompt.labels)
            cost.seconds = (cost.seconds or 0.0) + share * self._profile.seconds(whole)
            if self._price_per_hour is not None:
                cost.price = cost.seconds / 3600 * self._price_per_hour

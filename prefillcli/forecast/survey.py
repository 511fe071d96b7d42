"""The content of an input and the cost of scoring it, found without weights."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, Field

from prefillcli.core.request import Request, plan_requests
from prefillcli.engines.memory_plan import TEXTS, budget_of, plan_packs
from prefillcli.errors import counted
from prefillcli.followup.rationale import text_room
from prefillcli.models.open import Opened
from prefillcli.options.settings import JobSettings
from prefillcli.plan.blocks import BLOCK_TOKENS, CarriedBlock
from prefillcli.plan.pack import Limits
from prefillcli.plan.plan import Plan
from prefillcli.reading.compress.compressor import KeptTokens
from prefillcli.report.section import Part, Section, TableRows, bars, price
from prefillcli.rows.output.tallies import MOST, Counts, shown_ids
from prefillcli.rows.records import SKIPPED_CODES, ErrorCode, Prompt, Window
from prefillcli.runtime.clock import duration

if TYPE_CHECKING:
    from prefillcli.forecast.profile import Profile


class SurveyRows(BaseModel):
    """Rows of the input. `total` = `prompts` + `errors` + `skipped` + `empty`."""

    total: int = 0
    prompts: int = 0  # that will be scored
    errors: int = 0
    skipped: int = 0  # over-long rows under --on-long skip
    empty: int = 0  # rows without text under --empty-text skip
    errors_by_code: dict[str, int] = Field(default_factory=dict)
    too_long: int = 0  # longer than --max-length, whatever --on-long does with them
    truncated: int = 0  # of these, shortened
    failed: list[dict[str, Any]] = Field(default_factory=list)  # the first error rows: row, id, code, detail

    @property
    def counts(self) -> Counts:
        """The counts of the rows if the prompts were scored."""
        counts = Counts(self.total, self.prompts, self.errors, self.skipped, self.empty, self.errors_by_code)
        counts.tallies.failed = self.failed
        return counts


class Lengths(BaseModel):
    """Lengths of the prompts in tokens, after --on-long."""

    least: int
    mean: float
    most: int
    percentiles: dict[str, int]  # keys are percent of the prompts, values the most tokens among these
    # `rows` whose prompts have at least `low` and less than `high` tokens; edges grow by a constant factor.
    histogram: list[dict[str, int]]


class SurveyImages(BaseModel):
    """The images of the rows. The vision tower reads equal ones once, as far as they are scored together."""

    images: int  # of all rows with a prompt
    distinct: int  # by their content
    tokens: int  # that stand for them in the prompts
    share: float  # of all tokens in the prompts
    errors: int  # rows with an image that cannot be read


class Cost(BaseModel):
    """The work of a way to score. Seconds and price concern only the model, and are null without a profile."""

    packs: int = 0
    computed_tokens: int = 0
    seconds: float | None = None
    price: float | None = None


class KeepCost(Cost):
    """The cost at a keep rate. It is an estimate without a draft, whose own time is left out."""

    keep: float
    chosen: bool = False  # the one that the settings ask for
    compressed_rows: int = 0
    kept_tokens: int = 0


class Survey(BaseModel):
    """Rows, prompts, sharing and plans of an input."""

    rows: SurveyRows = Field(default_factory=SurveyRows)
    prompt_tokens: int = 0
    lengths: Lengths | None = None  # None without prompts
    images: SurveyImages | None = None  # None where no row has any
    duplicates: int = 0  # rows whose prompt, token by token, is that of an earlier row
    windows: int = 0
    unique_tokens: int = 0  # least that the windows must compute: what their prompts share counts once
    # For a pack: pack_tokens and chunk_tokens. For a prompt: max_tokens, by memory, and max_length, by the model and
    # --max-length.
    limits: dict[str, int]
    plan: Cost = Field(default_factory=Cost)
    keeps: list[KeepCost] = Field(default_factory=list)  # with a draft
    # With --rationale: whether K,V survive scoring (kv: kept or again), the reason, the kept_tokens of a pack that can
    # be kept, and their bytes.
    texts: dict[str, Any] | None = None
    seconds: dict[str, float] = Field(default_factory=dict)  # of the survey itself: read, render, tokenize, plan


# The tables of a survey: for the terminal, and for pages.


ESTIMATE = "An estimate, as if the draft chose the first chunks; its own work is not counted"


def survey_section(survey: Survey) -> Section:
    """Return the section about an input for terminal and page."""
    bins = survey.lengths.histogram if survey.lengths is not None else []
    edges = {f"{each['low']:,} - {each['high'] - 1:,}": each["rows"] for each in bins}
    plan = _cost_table("", [("in full" if survey.keeps else "this job", survey.plan)], "packs", "computed_tokens")
    keeps = [(f"{each.keep:g}{' *' if each.chosen else ''}", each) for each in survey.keeps]
    rates = _cost_table("keep rate", keeps, "compressed_rows", "kept_tokens", "computed_tokens")
    return Section(
        title="Input",
        lines=list(_lines(survey)),
        parts=[
            Part(
                title="Rows by tokens of their prompt",
                bars=bars(edges, {name: f"{rows:,}" for name, rows in edges.items()}),
            ),
            Part(title="Plan", table=plan),
            Part(title="Keep rates", table=rates if keeps else None, note=f"{ESTIMATE}. The star is --keep."),
        ],
    )


def _lines(survey: Survey) -> Iterator[tuple[str, str]]:
    rows, limits, lengths = survey.rows, survey.limits, survey.lengths
    counts = f"{rows.prompts:,} to score of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {counted(rows.errors, 'error')} ({codes})"
    apart = {"skipped": rows.skipped, "empty": rows.empty}
    yield "rows", ", ".join([counts, *(f"{number:,} {name}" for name, number in apart.items() if number)])
    if rows.too_long:
        shortened = f", {rows.truncated:,} shortened" if rows.truncated else ""
        yield "too long", counted(rows.too_long, "row") + shortened
    if lengths is not None:
        shares = ", ".join(f"{name} % {tokens:,}" for name, tokens in lengths.percentiles.items())
        yield "tokens", f"{survey.prompt_tokens:,} in prompts, {survey.unique_tokens:,} unique"
        yield "lengths", f"{lengths.least:,} to {lengths.most:,}, mean {lengths.mean:,.0f}; {shares}"
    if (images := survey.images) is not None:
        invalid = f"; {counted(images.errors, 'row')} with one that cannot be read" if images.errors else ""
        tokens = f"{images.tokens:,} tokens ({images.share:.1%} of those in prompts)"
        yield "images", f"{images.images:,}, {images.distinct:,} distinct: {tokens}{invalid}"
    if survey.duplicates:
        yield "duplicates", f"{counted(survey.duplicates, 'row')} with the whole prompt of an earlier one"
    most = min(limits["max_tokens"], limits["max_length"])
    yield "packs", f"of {counted(limits['pack_tokens'], 'token')}; a prompt has at most {most:,}"
    if survey.texts is not None:
        way = "are kept" if survey.texts["kv"] == "kept" else "are not kept, wanted prompts are read again"
        yield "rationales", f"K,V {way}: {survey.texts['reason']}"


def _cost_table(head: str, costs: Sequence[tuple[str, Cost]], *counts: str) -> TableRows:
    # A header and one line for each of the named costs; predictions where there are any.
    predictions = {"seconds": ("predicted", duration), "price": ("price", price)}
    known = [name for name in predictions if any(getattr(cost, name) is not None for _, cost in costs)]
    rows = [[head, *(name.replace("_", " ") for name in counts), *(predictions[name][0] for name in known)]]
    for name, cost in costs:
        numbers = [f"{getattr(cost, count):,}" for count in counts]
        numbers += [predictions[each][1](getattr(cost, each)) for each in known]
        rows.append([name, *numbers])
    return rows


# The statistics of an input: its rows, and the lengths of its prompts.


PERCENTILES = (10, 50, 90, 95, 99)
_BINS = 16


class InputStatistics:
    """Adds up the statistics of windows, in about eight bytes a row. Error rows are named by the `id_column`, which
    may be JSON text."""

    def __init__(self, id_column: str | None = None, *, json_text: bool = False) -> None:
        self._id_column, self._json_text = id_column, json_text
        self.lengths: Counter[int] = Counter()  # number of prompts by their tokens
        self._rows = SurveyRows()
        self._codes: Counter[str] = Counter()
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._images: list[npt.NDArray[np.uint64]] = []  # the images of each row, by their digests
        self._image_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(length * rows for length, rows in self.lengths.items())

    def add(self, window: Window) -> None:
        """Count a window."""
        rows, tokens = self._rows, [prompt.whole for prompt in window.prompts]
        rows.total += len(window.rows)
        rows.truncated += sum(prompt.truncated for prompt in window.prompts)
        self._codes.update(error.code for error in window.errors.values())
        found = sorted((row, error) for row, error in window.errors.items() if error.code not in SKIPPED_CODES)
        found = found[: MOST - len(rows.failed)]
        ids: Sequence[str | None] = [None] * len(found)
        if self._id_column is not None and found:
            places = pa.array([window.place(row) for row, _ in found])
            ids = shown_ids(window.carried[self._id_column].take(places), self._json_text)
        rows.failed += [
            {"row": row, "id": own, "code": str(error.code), "detail": error.detail}
            for own, (row, error) in zip(ids, found, strict=True)
        ]
        self.lengths.update(map(len, tokens))
        digests = (int.from_bytes(blake2b(each.tobytes(), digest_size=8).digest(), "little") for each in tokens)
        self._digests.append(np.fromiter(digests, np.uint64, len(tokens)))
        self._image_tokens += sum(image.tokens for prompt in window.prompts for image in prompt.images)
        shown = {prompt.row: prompt.images for prompt in window.prompts if prompt.images}
        keys = [int.from_bytes(image.image.key[:8], "little") for images in shown.values() for image in images]
        self._images.append(np.array(keys, np.uint64))

    def rows(self, more_errors: Counter[str]) -> SurveyRows:
        """Return rows by their outcome, with errors that were found elsewhere."""
        codes, rows = self._codes + more_errors, self._rows.model_copy()
        rows.skipped, rows.empty = codes.pop(ErrorCode.SKIPPED_TOO_LONG, 0), codes.pop(ErrorCode.SKIPPED_EMPTY, 0)
        rows.errors, rows.errors_by_code = codes.total(), dict(sorted(codes.items()))
        rows.prompts = rows.total - rows.errors - rows.skipped - rows.empty
        rows.too_long = rows.truncated + rows.skipped + codes[ErrorCode.PROMPT_TOO_LONG]
        return rows

    @property
    def images(self) -> SurveyImages | None:
        """The images of all windows; None without any, and without rows whose images cannot be read."""
        keys, errors = np.concatenate([np.empty(0, np.uint64), *self._images]), self._codes[ErrorCode.INVALID_IMAGE]
        if not len(keys) and not errors:
            return None
        return SurveyImages(
            images=len(keys),
            distinct=len(np.unique(keys)),
            tokens=self._image_tokens,
            share=self._image_tokens / max(self.tokens, 1),
            errors=errors,
        )

    @property
    def duplicates(self) -> int:
        """Rows with the prompt of an earlier row, of any window."""
        digests = np.concatenate([np.empty(0, np.uint64), *self._digests])
        return len(digests) - len(np.unique(digests))


def lengths_of(counts: Counter[int]) -> Lengths | None:
    """Return the lengths of prompts, from the number of prompts of each length; None without prompts."""
    if not counts:
        return None
    lengths = sorted(counts)
    rows = [counts[length] for length in lengths]
    ends = np.cumsum(rows)
    nearest = {share: int(np.searchsorted(ends, math.ceil(share / 100 * ends[-1]))) for share in PERCENTILES}
    edges = np.unique(np.geomspace(lengths[0], lengths[-1] + 1, _BINS + 1).round().astype(int))
    binned = np.histogram(lengths, edges, weights=rows)[0].astype(int)
    return Lengths(
        least=lengths[0],
        mean=float(np.average(lengths, weights=rows)),
        most=lengths[-1],
        percentiles={str(share): lengths[at] for share, at in nearest.items()},
        histogram=[
            {"low": low, "high": high, "rows": number}
            for low, high, number in zip(edges[:-1].tolist(), edges[1:].tolist(), binned.tolist(), strict=True)
        ],
    )


# The cost of a job, and at each keep rate.


class Costs:
    """Adds up the cost of the job's plan, cut as the job cuts it, and of others over windows.

    Without `--memory`, the loaded weights will leave `free` bytes. `profile` sizes packs and predicts their time;
    `names` are those of the labels; `block_tokens` as in `make_plan`. Raises ResourceError if not even a small prompt
    fits.
    """

    def __init__(
        self,
        settings: JobSettings,
        opened: Opened,
        names: Sequence[str],
        *,
        free: int | None,
        profile: Profile | None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.windows = self.unique_tokens = 0  # of the job's own plan
        self.errors: Counter[str] = Counter()  # rows that only planning finds to be errors, by code
        budget = budget_of(settings.packs, free)
        tokens, texts_of = text_room(settings, opened, names)
        plan = plan_packs(opened, settings.packs, budget, profile, text_tokens=tokens, texts_of=texts_of)
        self.texts: dict[str, Any] | None = plan.get(TEXTS)
        self._limits = Limits(**plan["limits"])
        self.limits = {
            "pack_tokens": self._limits.tokens,
            "max_tokens": self._limits.max_tokens,
            "max_length": min(settings.prompts.max_length or opened.max_length, opened.max_length),
            "chunk_tokens": plan["chunk_tokens"],
        }
        self._settings, self._profile = settings, profile
        self._foresight = None if settings.compression.draft is None else KeptTokens(settings, opened, budget)
        self._block_tokens = block_tokens if self._foresight is None else 0
        self.plan = Cost()
        self._carried: tuple[CarriedBlock, ...] = ()  # into the next window
        rates, chosen = ((), None) if self._foresight is None else (self._foresight.rates, self._foresight.chosen)
        self.keeps = [KeepCost(keep=rate, chosen=rate == chosen) for rate in rates]
        self._keep = 1.0 if chosen is None else chosen

    def add(self, prompts: Sequence[Prompt]) -> None:
        """Plan the prompts of a window."""
        self.windows += 1
        fitting = self._requests(prompts, self._keep)
        self.errors[ErrorCode.EXCEEDS_MEMORY] += len(prompts) - len(fitting)
        plan = plan_requests(fitting, self._limits, carried=self._carried, block_tokens=self._block_tokens)
        self._carried = plan.carried
        self._charge(self.plan, plan, fitting)
        self.unique_tokens += plan.unique_tokens
        for keep in self.keeps:
            requests = self._requests(prompts, keep.keep)
            keep.compressed_rows += sum(request.compressed for request in requests)
            keep.kept_tokens += sum(request.most_kept for request in requests)
            self._charge(keep, plan_requests(requests, self._limits, block_tokens=self._block_tokens), requests)

    def _requests(self, prompts: Sequence[Prompt], keep: float) -> list[Request]:
        # The requests for the prompts that fit in memory.
        foresight = self._foresight
        found = list(map(Request, prompts)) if foresight is None else foresight.requests(prompts, keep)
        return [request for request in found if request.size <= self._limits.max_tokens]

    def _charge(self, cost: Cost, plan: Plan, requests: Sequence[Request]) -> None:
        cost.packs += len(plan.packs)
        cost.computed_tokens += plan.computed_tokens
        if self._profile is not None:
            whole = plan.with_labels(lambda prompt: requests[prompt].prompt.labels)
            share = 1.0 if self._foresight is None else self._foresight.layers(requests)
            cost.seconds = (cost.seconds or 0.0) + share * self._profile.seconds(whole)
            if (rate := self._settings.price.price_per_hour) is not None:
                cost.price = cost.seconds / 3600 * rate

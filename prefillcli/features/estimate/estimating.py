"""The estimate of a job: the rows that the model has read, a cheaper reading of all rows, and the report of both."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from prefillcli.data.rows import Int64Array, Prompt
from prefillcli.engines.base import Readings
from prefillcli.features.estimate.shares import (
    CONFIDENCE,
    Share,
    corrected_share,
    fit_guesser,
    guided_share,
    indicators,
    plain_share,
)
from prefillcli.jobs.opening import Opening
from prefillcli.report.section import Part, Section, counted, minutes_and_seconds, visible
from prefillcli.runtime import log
from prefillcli.stats.evaluation import Float64Array, Interval, Measure

if TYPE_CHECKING:
    from prefillcli.core.feature import Job

PLAN = "estimate"  # in the plan of a job
_LEAST = -1e3  # the least label log-probability: a fit takes no infinite ones
_SHOWN = 6  # labels on the line of the terminal


class LabelShare(BaseModel):
    """The share of an answer in the input."""

    label: str
    share: float
    interval: Interval
    plain_share: float  # by the rows that the model has read alone
    plain_interval: Interval
    weight: float  # of the guesses, from 0 to 1; at 0 the share is the plain one
    # The plain interval, had the seconds of the cheaper reading gone to more rows by the model.
    equal_cost_interval: Interval | None = None


class EstimateUse(BaseModel):
    """An estimate. Rows that cannot be scored are left out of the shares."""

    rows: int  # of the input that can be scored; without a cheaper reading by the share among those that were read
    read_rows: int  # that the model has read in full
    audited_rows: int = 0  # those of them that exits would have decided, in a job with exits
    confidence: float = CONFIDENCE
    seconds: float | None = None  # of the model for its rows; None in a job with exits
    guessed_rows: int = 0  # read by the cheaper reader too, or alone
    guess_seconds: float = 0.0
    guessed_by: Literal["hidden", "labels", "exits"] | None = None  # what guesses are made of; None: there are none
    shares: list[LabelShare]


def is_known(job: Job) -> bool:
    """Whether the job has its estimate."""
    return PLAN in job.sink.plan


def stored(job: Job) -> EstimateUse | None:
    """The estimate of a job, from its plan."""
    sink = getattr(job, "sink", None)
    found = None if sink is None else sink.plan.get(PLAN)
    return None if found is None else EstimateUse.model_validate(found)


def estimate(job: Job) -> None:
    """Make the estimate of a job whose output is finished, and keep it in the plan."""
    names, drawn = job.labels.names, job.source.selection().within(0, job.source.count())
    numbers, final, seconds = _answers(job, drawn)
    if not len(numbers):
        log.warning("--estimate: no row was scored, so nothing is known of the others")
        return
    truth, read = indicators(final), len(numbers)
    rows = max(round(job.source.count() * read / len(drawn)), read)
    guesses = _guesses(job, numbers, final, drawn) if len(drawn) < job.source.count() else None
    if guesses is None:
        shares = [plain_share(float(hits), read, rows) for hits in truth.sum(axis=0)]
    else:
        rows = read + guesses.others
        shares = [
            guided_share(truth[:, at], guesses.held_out[:, at], guesses.mean[at], rows) for at in range(len(names))
        ]
    more = read * guesses.seconds / seconds if guesses is not None and seconds else 0.0
    use = EstimateUse(
        rows=rows,
        read_rows=read,
        seconds=seconds,
        guessed_rows=0 if guesses is None else rows,
        guess_seconds=0.0 if guesses is None else guesses.seconds,
        guessed_by=None if guesses is None else guesses.by,
        shares=[
            _label_share(name, float(truth[:, at].sum()), read, rows, shares[at], more)
            for at, name in enumerate(names)
        ],
    )
    job.sink.plan = job.sink.plan | {PLAN: use.model_dump(mode="json")}


def estimate_audited(job: Job) -> None:
    """Make the estimate of a job with exits, from its finished output."""
    schema = job.schema()
    if schema.measure is not Measure.SHARES or not {"prediction", "exit_layer", "audit_prediction"} <= {
        *schema.results.names
    }:
        return
    table = pa.concat_tables(job.sink.tables(["prediction", "exit_layer", "audit_prediction", "error"]))
    table = table.filter(pc.is_null(table["error"]))
    said, full = (np.array(table[name].to_pylist(), object) for name in ("prediction", "audit_prediction"))
    left, audited = np.asarray(pc.is_valid(table["exit_layer"])), np.asarray(pc.is_valid(table["audit_prediction"]))
    both, rows = left & audited, len(table)
    if not both.any():
        return
    shares = []
    for label in job.labels.names:
        out, into = (
            int(((one == label) & (other != label))[both].sum()) for one, other in ((full, said), (said, full))
        )
        found = corrected_share(int((said == label).sum()), int(left.sum()), rows, int(both.sum()), out, into)
        shares.append(_label_share(label, float((full == label).sum()), int(audited.sum()), rows, found, 0.0))
    use = EstimateUse(
        rows=rows,
        read_rows=rows - int((left & ~audited).sum()),
        audited_rows=int(both.sum()),
        guessed_rows=int(left.sum()),
        guessed_by="exits",
        shares=shares,
    )
    job.sink.plan = job.sink.plan | {PLAN: use.model_dump(mode="json")}


def _label_share(label: str, hits: float, read: int, rows: int, found: Share, more: float) -> LabelShare:
    plain = plain_share(hits, read, rows)
    equal = plain_share(hits * (1 + more / read), read + more, rows) if more else None
    return LabelShare(
        label=label,
        share=found.value,
        interval=found.interval,
        plain_share=plain.value,
        plain_interval=plain.interval,
        weight=found.weight,
        equal_cost_interval=None if equal is None else equal.interval,
    )


def _answers(job: Job, drawn: Int64Array) -> tuple[Int64Array, Float64Array, float]:
    # The numbers of the scored rows, their label log-probabilities [rows, labels], and the seconds that they took. The
    # output has the drawn rows in their order.
    columns = [f"logprob_{name}" for name in job.labels.names]
    table = pa.concat_tables(job.sink.tables([*columns, "seconds", "error"]))
    scored = np.array([code is None for code in table["error"].to_pylist()], np.bool_)
    final = np.stack([np.asarray(table[name].to_pylist(), np.float64) for name in columns], axis=1)[scored]
    seconds = float(np.asarray(table["seconds"].to_pylist(), np.float64)[scored].sum())
    return drawn[scored], np.maximum(final, _LEAST), seconds


@dataclass(slots=True)
class _Guesses:
    held_out: Float64Array  # for the rows that the model has scored [rows, labels]
    mean: Float64Array  # over the others [labels]
    others: int
    seconds: float
    by: Literal["hidden", "labels"]


def _guesses(job: Job, numbers: Int64Array, final: Float64Array, drawn: Int64Array) -> _Guesses | None:
    # The guesses about all rows; None where nothing is cheaper than the model. First the rows with these numbers are
    # read, to which the guesser is fitted, then all that were not drawn.
    seconds = 0.0

    def read(prompts: Sequence[Prompt]) -> Sequence[Readings]:
        nonlocal seconds
        begun = time.monotonic()
        found = next(filter(None, (each.glance(job, prompts, job.tick) for each in job.features)), ())
        seconds += time.monotonic() - begun
        return found

    again = Opening(job.settings.model_copy(update={"sample": None}))  # the job's own source has the drawn rows alone
    again.open_source()
    again.use_models(job.opened)
    source, builder = again.source, again.new_builder()
    try:
        own = [prompt for batch in source.rows(numbers) for prompt in builder.build(batch, job.labels)[0]]
        if not (labelled := read(own)):
            return None
        guesser = fit_guesser(labelled, final)
        if not job.settings.quiet:
            log.info(f"--estimate: {counted(source.count() - len(drawn), 'row')} more, by --first alone")
        total, others = np.zeros(final.shape[1]), 0
        for batch in source.batches():
            rest = batch.only(np.flatnonzero(~np.isin(batch.rows, drawn)))
            prompts = builder.build(rest, job.labels)[0] if len(rest.rows) else []
            if prompts:
                total += guesser.guess(read(prompts)).sum(axis=0)
                others += len(prompts)
    finally:
        builder.close()
    return _Guesses(guesser.held_out, total / max(others, 1), others, seconds, "labels" if guesser.own else "hidden")


# What a run reports.


def section(use: EstimateUse) -> Section:
    """The estimate in terminal, page, metrics and summary."""
    found = Section(title="Estimate", lines=[("estimate", _shares(use)), ("estimate, cost", _cost(use))])
    table = [["answer", "share", "95 % interval", "rows that were read alone", "weight of guesses"]]
    for each in use.shares:
        plain = f"{_percent(each.plain_share)} %, {_between(each.plain_interval)}"
        table.append([each.label, f"{_percent(each.share)} %", _between(each.interval), plain, f"{each.weight:.2f}"])
    found.parts = [Part(table=table, note=NOTE)]
    found.tiles = [(visible(each.label, line=True), f"{_percent(each.share)} %") for each in use.shares[:1]]
    for name, text, values in (
        ("estimate_share", "Share of the answer in the input.", [each.share for each in use.shares]),
        ("estimate_low", "Lower end of the 95 % interval.", [each.interval[0] for each in use.shares]),
        ("estimate_high", "Upper end of the 95 % interval.", [each.interval[1] for each in use.shares]),
    ):
        found.metric(name, text, {each.label: value for each, value in zip(use.shares, values, strict=True)}, "label")
    found.summary = {"estimate": {each.label: [each.share, *each.interval] for each in use.shares}}
    return found


NOTE = (
    "Shares of the rows of the input that can be scored, by the model's own answers. They do not say that the model "
    "is right. Each interval holds with 95 % probability, not all together."
)


def _shares(use: EstimateUse) -> str:
    order = sorted(use.shares, key=lambda each: -each.share)
    texts = [
        f"{visible(each.label, line=True)} {_percent(each.share)} %, {_between(each.interval)}"
        for each in order[:_SHOWN]
    ]
    return "; ".join([*texts, *(["..."] if len(order) > _SHOWN else [])])


def _cost(use: EstimateUse) -> str:
    text = f"the model read {use.read_rows:,} of {counted(use.rows, 'row')} in full"
    if use.seconds is None:
        return f"{text}, {use.audited_rows:,} of which exits would have decided"
    text += f", in {minutes_and_seconds(use.seconds)}"
    if use.guessed_by is None:
        return text
    text += f"; the cheaper reading took {minutes_and_seconds(use.guess_seconds)} for all"
    first = use.shares[0]
    plain = f"; without it the interval of {visible(first.label, line=True)} is {_between(first.plain_interval)}"
    if first.equal_cost_interval is None:
        return text + plain
    return f"{text}{plain}, and with as many seconds of the model instead {_between(first.equal_cost_interval)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _between(interval: Interval) -> str:
    return f"{_percent(interval[0])}-{_percent(interval[1])} %"

"""The exits of a job: learning them before its first window, the work between layers, and their end.

Some rows are read in full first, with readings between layers. The learnt exits stay in the work folder in case the
job is resumed, and are written beside the report for later jobs. In the report of a run, layers are numbered as users
count them: a row that left after layer 16 went through 16 layers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from prefillcli.core.request import Request, plan_requests, scored_row, thinning_of
from prefillcli.core.request import Tick as TickTokens
from prefillcli.engines.base import PLAIN, Answer, EarlyExits, Treatment
from prefillcli.errors import PrefillError
from prefillcli.plan.pack import carried_by_few, in_full
from prefillcli.reading.exits.first import FirstReader, FirstReading, Reader, readings_of
from prefillcli.reading.exits.judging import (
    CalibrationRows,
    calibrate_exits,
    calibration_rows,
    drifted_classes,
    exit_costs,
    observed_layers,
    reading_cost,
    recheck_exits,
    rows_for_rarest,
    rows_to_learn,
)
from prefillcli.reading.exits.policy import (
    ExitPolicy,
    ExitProfile,
    FlipsOf,
    GainPoint,
    JudgedLabel,
    LearntExits,
    exits_path,
    identity_of,
    job_of_exits,
)
from prefillcli.report.section import (
    Bar,
    Part,
    Plot,
    Section,
    Tick,
    abbreviated,
    bars,
    counted,
    percent,
    percent_interval,
    percent_or_nothing,
    round_ticks,
    visible,
)
from prefillcli.rows.output.store import write_sealed
from prefillcli.rows.output.tallies import TO_THE_END, AuditedExits, Counts, LayerRows
from prefillcli.rows.records import BEFORE, FIRST, Prompt, ScoredRow, joined_row
from prefillcli.runtime import log
from prefillcli.runtime.clock import step
from prefillcli.stats.arrays import Int64Array
from prefillcli.stats.flips import flip_bound, rows_for
from prefillcli.stats.intervals import exact_interval

if TYPE_CHECKING:
    from prefillcli.core.run import Run
    from prefillcli.engines.base import PlanEngine
    from prefillcli.models.open import Opened
    from prefillcli.plan.pack import Pack
    from prefillcli.prompts.labels import Labels
    from prefillcli.report.run import RunReport


# The report of early exits: rows that they were learnt from, rows that left, layers spared and answers flipped.


# Learnt by this job; taken from an earlier one; none, for a `reason`; ended before the job did, for a `reason`.
ExitStatus = Literal["calibrated", "reused", "none", "stopped"]
KEPT_ALIVE = ("1", "2", "3-5", "6-10", ">10")  # the number of rows for which a shared prefix went on


class ProvableFlips(BaseModel):
    """The best that calibration rows could prove. It is known before any of them is read."""

    rows: int  # rows that are to be read in full; half of them judge
    judged: int  # judged rows for each proof: all, or those of each answer if all are equally frequent
    max_flips: float  # the smallest rate that this many rows prove without a flip, at the report's confidence
    rows_needed: int  # judged rows that a proof of --max-flips takes without a flip


def provable_flips(rows: int, max_flips: float, classes: int) -> ProvableFlips:
    """Return the best that this many calibration rows can prove, if all `classes` are equally frequent and no row
    flips."""
    judged = rows // (2 * classes)
    return ProvableFlips(
        rows=rows,
        judged=judged,
        max_flips=flip_bound(0, judged),
        rows_needed=rows_for(max_flips),
    )


def provable_text(found: ProvableFlips, classes: int, max_flips: float, option: str = "--exit") -> str:
    """Return it as one line, with the number of rows that would suffice if that is too little."""
    each = f" of each of {classes} answers, if these are equally frequent" if classes > 1 else ""
    text = (
        f"{option} reads {found.rows:,} rows in full first, and half of them judge: {found.judged:,}{each}. Without a "
        f"flip, that many prove at most {found.max_flips:.2%} flips"
    )
    if found.judged >= found.rows_needed:
        return text
    rows, of_each = 2 * classes * found.rows_needed, " of each" if classes > 1 else ""
    text += (
        f". --max-flips {max_flips:g} takes {found.rows_needed:,}{of_each}, {rows:,} rows of a job of twice as many"
    )
    smallest = math.ceil(found.max_flips * 1e4) / 1e4  # rounded up, as no smaller rate is proven
    return text if smallest >= 1 else f"{text}; the smallest --max-flips that may be proven here is {smallest:g}"


class AuditedLabel(BaseModel):
    """Audited rows that get this label when they are read in full. Counts are of all attempts at the job."""

    label: str
    rows: int
    left: int  # that would leave early
    flips: int  # that leave with another label
    flip_rate: float  # of the rows
    interval: tuple[float, float]  # of the flip rate, exact and two-sided
    bound: float  # one-sided


class UsedExit(BaseModel):
    """A layer after which rows may leave."""

    layer: int
    probe: str  # the kind of predictor
    peek: bool  # whether only the last tokens go through the layer before the rows that leave are chosen
    thresholds: dict[str, float | None]  # by label: the lead that it needs; None where rows with it stay
    expected: float  # share of the rows that leave here, by the calibration
    rows: int = 0  # rows of the output that left here
    share: float | None = None  # share of the scored rows, without those that exits were learnt from


class FirstUse(BaseModel):
    """One of the first models of a run, or words."""

    model: str
    layer: int = 0  # the exit layer of the rows that it decides: 0 for the last one, -1 for the one before, and so on
    cost: float  # of its reading of a token, over that of the model
    token_seconds: float  # of the model for a token of a prompt, by the rows that were read in full first
    rows: int = 0  # of the output that it decided
    share: float | None = None  # of the scored rows, without those that exits were learnt from
    read_rows: int = 0  # by it in this run
    read_tokens: int = 0  # in its own tokens
    seconds: float = 0.0


class RareUse(BaseModel):
    """The proof of `--recall` and `--precision` for the first label, and the rows that it decides."""

    label: str
    recall: float | None  # least share of the rows with the label, by the full read, that have it in the output
    precision: float | None  # least share of the rows with the label in the output that have it by the full read
    # The label's foretold lead below which a row is decided not to have it, and the lead from which on it is decided
    # to have it.
    below: float | None
    above: float | None
    sampled: int  # rows that were read in full because of their scores
    refused: int  # rows decided not to have the label
    accepted: int  # rows decided to have it
    digest: str  # of the decisions in the work folder


class LayerCount(BaseModel):
    """Rows of the output that went through the same number of layers."""

    rows: int
    prompt_tokens: int


class ExitUse(BaseModel):
    """The exits of a run. Of several questions, each has its own; counts of rows are then of their answers."""

    status: ExitStatus
    reason: str | None = None  # why there are no exits, or no longer
    reused: bool = False  # whether an earlier job has learnt the exits
    stopped_window: int | None = None  # the first window without exits
    max_flips: float | None  # None where recall and precision are bounded
    flips_of: FlipsOf = "each"  # whose flips are bounded: the rows' of each label, or all rows'
    confidence: float = 0.95
    model_layers: int
    provable: ProvableFlips | None = None  # None where an earlier job has learnt the exits
    calibration_rows: int = 0  # read in full before the first window
    learnt_rows: int = 0  # those of them whose scores in the output are from that read
    classes: list[JudgedLabel] = Field(default_factory=list)
    first: list[FirstUse] = Field(default_factory=list)
    rare: RareUse | None = None  # with --recall and --precision
    layers: list[UsedExit] = Field(default_factory=list)
    by_layer: dict[str, LayerCount] = Field(default_factory=dict)  # the layers that rows went through, then "full"
    layers_saved: float | None = None  # share of the layers of computed tokens that exits spared this run
    predicted_gain: float | None = None  # by the calibration, for tokens that no two rows share
    layers_gain: float | None = None  # by the layers that exits saved in the packs of this run
    measured_gain: float | None = None  # of the same packs, in seconds
    kept_alive: dict[str, float] = Field(default_factory=dict)  # layers of shared tokens, by the rows they served
    audited: list[AuditedLabel] = Field(default_factory=list)
    curve: list[GainPoint] = Field(default_factory=list)
    questions: dict[str, ExitUse] = Field(default_factory=dict)  # by name; empty for a job of one without a name

    @property
    def each(self) -> Mapping[str, ExitUse]:
        """The exits of each question, by its name."""
        return self.questions or {"": self}

    def take(self, counts: Counts) -> None:
        """Take over the counts of the output's rows, including those of earlier attempts."""
        layers, audited = counts.tallies.exit_layers, counts.audited_exits
        for name, own in self.each.items():
            own._take(layers.get(name, {}), audited.get(name, {}))
        if self.questions:
            together: dict[str, LayerRows] = {}
            for found in layers.values():
                for name, rows in found.items():
                    together[name] = LayerRows(*map(sum, zip(together.get(name, (0, 0)), rows, strict=True)))
            self._take(together, {})

    def _take(self, found: Mapping[str, LayerRows], audited: Mapping[str, AuditedExits]) -> None:
        order = sorted(found, key=lambda name: (name == TO_THE_END, int(name) if name != TO_THE_END else 0))
        self.by_layer = {
            name: LayerCount(rows=found[name].rows, prompt_tokens=found[name].prompt_tokens) for name in order
        }
        places: list[UsedExit | FirstUse] = [*self.layers, *self.first]
        for each in places:
            own = self.by_layer.get(str(each.layer))
            each.rows = own.rows if own is not None else 0
            each.share = each.rows / self.free_rows if self.free_rows else None
        self.audited = [
            AuditedLabel(
                label=label,
                rows=own.rows,
                left=own.left,
                flips=own.flips,
                flip_rate=own.flips / own.rows,
                interval=exact_interval(own.flips, own.rows, self.confidence),
                bound=flip_bound(own.flips, own.rows, self.confidence),
            )
            for label, own in sorted(audited.items())
        ]

    @property
    def left_early(self) -> int:
        """Rows of the output that left before the last layer."""
        return sum(each.rows for name, each in self.by_layer.items() if name != TO_THE_END)

    @property
    def free_rows(self) -> int:
        """Scored rows of the output that were not read to learn exits from."""
        full = self.by_layer.get(TO_THE_END)
        return self.rows - min(self.learnt_rows * len(self.each), full.rows if full is not None else 0)

    @property
    def rows(self) -> int:
        """Scored rows of the output."""
        return sum(each.rows for each in self.by_layer.values())


# The exits of a run in a few lines, for the terminal and the page.


def exit_lines(use: ExitUse) -> Iterator[tuple[str, str]]:
    """Yield the lines that exits add to the table of a run: name and text."""
    yield "exits", _status(use)
    for each in use.first:
        yield (
            "first model",
            f"{visible(each.model, line=True)}, {each.cost:.1%} of the cost of a token; it read "
            f"{counted(each.read_rows, 'row')} in {each.seconds:.1f} s",
        )
    for name, own in use.questions.items():
        if own.reason is not None:
            yield f"exits of {visible(name, line=True)}", _status(own)
    for name, own in use.each.items():
        if own.classes:
            yield f"exits, judged{_of(name)}", "; ".join(_judged(each) for each in own.classes)
    if use.left_early:
        yield "exit layers", _layers(use)
        if (saved := _saved(use)) is not None:
            yield "exit gain", saved
    for name, own in use.each.items():
        if any(each.left for each in own.audited):
            texts = [
                f"{visible(each.label, line=True)} {counted(each.flips, 'flip')} of {each.rows:,} "
                f"({percent_interval(each.interval)}), {each.left:,} would leave"
                for each in own.audited
            ]
            yield f"exits, audited{_of(name)}", "; ".join(texts)


def _of(question: str) -> str:
    return f", {visible(question, line=True)}" if question else ""


def _status(use: ExitUse) -> str:
    if use.status == "none":
        return f"none: {visible(use.reason or '', line=True)}"
    rows, sure = counted(use.calibration_rows, "row"), f"({100 * use.confidence:g} % confidence)"
    if use.rare is not None:
        return f"learnt from {rows} in full; {_rare(use.rare)} {sure}"
    most = percent(use.max_flips or 0)
    each = use.flips_of == "each"
    whose = "the rows of each label" if each else "all rows"
    whose += ", for each question," if use.questions else ""
    text = f"learnt from {rows} in full; of {whose} at most {most} flip {sure}"
    if use.reused:
        text = (
            f"from --exit-profile, checked on {rows} in full; of the rows that it was learnt from at most {most}"
            f"{' of each label' if each else ''} flip {sure}"
        )
    if use.status == "stopped":
        at = "" if use.stopped_window is None else f" at window {use.stopped_window:,}"
        return f"stopped{at}: {visible(use.reason or '', line=True)}; {text}"
    return text


def _rare(use: RareUse) -> str:
    label, texts = visible(use.label, line=True), []
    if use.recall is not None:
        texts.append(f"at least {percent(use.recall)} of the rows that are {label} in full are so here")
    if use.precision is not None:
        texts.append(f"at least {percent(use.precision)} of the rows that are {label} here are so in full")
    return f"{' and '.join(texts)}; decided before: {use.refused:,} not {label}, {use.accepted:,} {label}"


def _judged(each: JudgedLabel) -> str:
    label = visible(each.label, line=True)
    if each.judged < each.rows_needed:
        return f"{label} {counted(each.judged, 'row')}, too few: it takes {each.rows_needed:,}"
    if not each.proven:
        return f"{label} {counted(each.judged, 'row')}, nothing proven"
    return f"{label} {counted(each.flips, 'flip')} of {each.judged:,}, at most {percent(each.bound)}"


def _layers(use: ExitUse) -> str:
    expected = {str(each.layer): each.expected for each in use.layers}
    texts = []
    for name, own in use.by_layer.items():
        learnt = use.rows - use.free_rows if name == TO_THE_END else 0
        share = f"{(own.rows - learnt) / use.free_rows:.1%}"
        wanted = f", {expected[name]:.1%} expected" if name in expected else ""
        texts.append(f"{_place(use, name)} {share}{wanted}")
    others = f"; without {counted(use.rows - use.free_rows, 'row')} to learn from" if use.free_rows < use.rows else ""
    return f"of {use.model_layers}: " + "; ".join(texts) + others


def _place(use: ExitUse, name: str) -> str:
    # The places where rows left, by the name of their layer in a report.
    if name == TO_THE_END:
        return "to the end"
    by = next((first.model for first in use.first if first.layer == int(name)), None)
    return f"after {name}" if by is None else f"by {visible(by, line=True)}"


def _saved(use: ExitUse) -> str | None:
    texts, inside = [], any(each.layer > 0 for each in use.layers)
    if use.layers_saved is not None and inside:
        texts.append(f"{use.layers_saved:.1%} of the tokens' layers spared")
    if use.measured_gain is not None:
        texts.append(f"{use.measured_gain:.2f}x measured")
    if use.layers_gain is not None and inside:
        texts.append(f"{use.layers_gain:.2f}x by these layers")
    if texts and use.predicted_gain is not None:
        texts.append(f"{use.predicted_gain:.2f}x predicted for tokens that no two rows share")
    return ", ".join(texts) or None


# Charts and tables of exits, for the page of a run.


BOUND_NOTE = (
    "The bound is of the rows that the model answers with that label when it reads all layers, and it does not say "
    "that the model is right."
)
ALL_BOUND_NOTE = (
    "The bound is of all rows together: of the rows of a rare answer more may flip. It does not say that the model is "
    "right."
)
RARE_NOTE = "Recall and precision are against the model's own answers, and do not say that the model is right."
OWN_ROWS_NOTE = (
    "It holds for rows like those that were judged, which are drawn from the whole job. If others come it is void."
)
OTHER_ROWS_NOTE = (
    "It holds for rows like those of the job that made the exit profile. If tonight's are others, it is void: only "
    "the audit shows that."
)
CURVE_NOTE = (
    "Across: share of the judged rows that flip. Up: how much less is computed, for tokens that no two rows share. "
    "Each point is another level for all thresholds: an estimate, which proves nothing."
)
ALIVE_NOTE = (
    "A shared beginning goes on as long as one row below it does. These are layers of shared tokens, by the number of "
    "rows that they still went on for."
)


def section(report: RunReport) -> Section | None:
    """Return the exits in terminal, page, metrics and summary; None where rows cannot leave."""
    use: ExitUse | None = report.exits
    if use is None:
        return None
    bound = BOUND_NOTE if use.flips_of == "each" else ALL_BOUND_NOTE
    bound = bound if use.rare is None else RARE_NOTE
    found = Section(
        title="Early exit",
        lines=list(exit_lines(use)),
        parts=[
            Part(note=f"{bound} {OTHER_ROWS_NOTE if use.reused else OWN_ROWS_NOTE}"),
            Part(title="Answers by layer" if use.questions else "Rows by layer", bars=_by_layer(use)),
            *(part for name, own in use.each.items() for part in _question_parts(name, own, use)),
            Part(title="Shared beginnings kept alive", bars=_kept_alive(use.kept_alive), note=ALIVE_NOTE),
            *(
                Part(title=f"Gain over flips{_of(name)}", plot=gain_plot(own), note=CURVE_NOTE)
                for name, own in use.each.items()
            ),
        ],
        summary={"exits": {"status": use.status, "left": use.left_early, "layers_saved": use.layers_saved}},
    )
    if use.free_rows:
        found.tiles.append(("left early", f"{use.left_early / use.free_rows:.1%}"))
    layers = {name: float(own.rows) for name, own in use.by_layer.items()}
    found.metric("exit_rows", "Scored rows of the output by the layers that they went through.", layers, "layer")
    if use.layers_saved is not None:
        found.metric("exit_layers_saved", "Share of the tokens' layers that exits spared.", use.layers_saved)
    audited = {
        f"{name}.{each.label}" if name else each.label: each for name, own in use.each.items() for each in own.audited
    }
    rows = {label: float(each.rows) for label, each in audited.items()}
    flips = {label: float(each.flips) for label, each in audited.items()}
    found.metric("exit_audited_rows", "Audited rows by label in full.", rows, "label")
    found.metric("exit_audited_flips", "Audited rows that exits flip, by label in full.", flips, "label")
    active = float(use.status in ("calibrated", "reused"))
    found.metric("exit_active", "1 if rows may leave early, 0 if exits were refused or stopped.", active)
    return found


def _question_parts(name: str, use: ExitUse, job: ExitUse) -> list[Part]:
    # The tables of one question's exits; the first models are the job's.
    labels = [f"ahead for {label}" for label in use.layers[0].thresholds] if use.layers else []
    layer_rows = [
        [
            f"{each.layer}" if each.layer > 0 else f"{each.layer} ({_place(job, str(each.layer))})",
            each.probe,
            "yes" if each.peek else "no",
            *("stays" if ahead is None else f"{ahead:.2f}" for ahead in each.thresholds.values()),
            f"{each.expected:.1%}",
            percent_or_nothing(each.share),
        ]
        for each in use.layers
    ]
    classes = [[each.label, f"{each.fitted:,}", f"{each.judged:,}", *_proven(each)] for each in use.classes]
    audited = [
        [each.label, f"{each.rows:,}", f"{each.left:,}", f"{each.flips:,}", percent_interval(each.interval)]
        for each in use.audited
    ]
    sure = f"{100 * use.confidence:g} %"
    header = ["after layer", "probe", "peek", *labels, "expected", "left"]
    judged = ["label in full", "fitted", "judged", "flips", f"at most ({sure})"]
    left = ["label in full", "audited", "would leave", "flips", f"{sure} interval"]
    return [
        Part(title=f"Exit layers{_of(name)}", table=_table(header, layer_rows)),
        Part(title=f"Calibration rows{_of(name)}", table=_table(judged, classes)),
        Part(title=f"Audited rows{_of(name)}", table=_table(left, audited)),
    ]


def gain_plot(use: ExitUse) -> Plot | None:
    """Return the gain over the flip rate of the judged rows, from 1 up; None unless there are two points."""
    points = sorted({(each.flip_rate, each.gain) for each in use.curve})
    if len(points) < 2:
        return None
    best = max(gain for _, gain in points)
    allowed = use.max_flips or 0.0
    x = round_ticks(100 * max(allowed, *(flips for flips, _ in points)))
    y = round_ticks(max(best - 1, 0.05))
    wide, high = x[-1] / 100, y[-1]
    limit = f"{100 * allowed / wide:.2f}"
    return Plot(
        x=[Tick(100 * at / x[-1], f"{at:g} %") for at in x],
        y=[Tick(100 * at / high, f"{1 + at:g}x") for at in y],
        series=[("gain", f"up to {best:.2f}x"), ("--max-flips", f"{100 * allowed:g} %")],
        lines=[
            " ".join(f"{100 * flips / wide:.2f},{100 - 100 * max(gain - 1, 0) / high:.2f}" for flips, gain in points),
            f"{limit},0 {limit},100",
        ],
    )


def _by_layer(use: ExitUse) -> list[Bar]:
    values = {name: float(own.rows) for name, own in use.by_layer.items()}
    names = {name: _place(use, name).replace("after", "after layer") for name in values}
    texts = {
        names[name]: f"{own.rows:,} ({own.rows / max(use.rows, 1):.1%}), {abbreviated(own.prompt_tokens)} tokens"
        for name, own in use.by_layer.items()
    }
    kinds = {names[name]: "s0" if name == TO_THE_END else "s2" for name in values}
    if use.free_rows < use.rows:
        texts[names[TO_THE_END]] += f"; {use.rows - use.free_rows:,} rows to learn from"
    return bars({names[name]: value for name, value in values.items()}, texts, kinds)


def _table(header: list[str], rows: list[list[str]]) -> list[list[str]]:
    return [header, *rows] if rows else []


def _proven(each: JudgedLabel) -> list[str]:
    if each.judged < each.rows_needed:
        return [f"{each.flips:,}", f"takes {counted(each.rows_needed, 'row')}"]
    return [f"{each.flips:,}", f"{each.bound:.2%}" if each.proven else "nothing proven"]


def _kept_alive(found: Mapping[str, float]) -> list[Bar]:
    total = sum(found.values())
    if not total:
        return []
    order = [name for name in KEPT_ALIVE if name in found]
    names = {name: "1 row" if name == "1" else f"{name} rows" for name in order}
    values = {names[name]: found[name] for name in order}
    return bars(values, {name: f"{abbreviated(value)} ({value / total:.1%})" for name, value in values.items()})


# Exits are learnt, acted upon and watched in a job.


EXITS = "exits"  # in the plan of a job
ENDED = "ended"  # there, by question, what a report says once drift has ended its exits
FILE = "exits.json"  # in the work folder
CHECKED_ROWS = 300
MOST_BYTES = 1 << 30  # bytes of readings in memory, unless the user sets the number of rows
SEED = 20_262


@dataclass(eq=False, slots=True)
class JobExits:
    """The exits of a job at work."""

    # By the prompt of a row (`Prompt.part`). Without one no answer leaves: nothing could be proven, or the exits have
    # ended.
    policies: dict[int, ExitPolicy]
    use: ExitUse  # the exits in the run's report
    known: Mapping[int, ScoredRow] = field(default_factory=dict)  # rows by number that need not be read again
    # The packs of this run: the seconds that they took and would have taken without exits; token-layers in full, and
    # those saved.
    seconds: float = 0.0
    full_seconds: float = 0.0
    layers: float = 0.0
    skipped: float = 0.0
    kept_alive: Counter[str] = field(default_factory=Counter)  # token-layers of shared prefixes, by number of rows
    # The first models by layer with their names; their rows and seconds in this run, and the tokens of the prompts
    # that they decided.
    first: Mapping[int, tuple[str, Reader]] = field(default_factory=dict)
    first_rows: Counter[int] = field(default_factory=Counter)
    first_seconds: dict[int, float] = field(default_factory=dict)
    spared: int = 0

    def treatment(self, questions: Mapping[int, Request], in_full: frozenset[int]) -> Treatment:
        """Return the treatment between layers of the prompts with these `questions`. Those `in_full` go through all
        layers."""
        inside = {part: own for part, policy in self.policies.items() if (own := policy.inside) is not None}
        rules = {
            number: inside[question.prompt.part]
            for number, question in questions.items()
            if question.prompt.part in inside
        }
        return Treatment(EarlyExits(rules, in_full)) if rules else PLAIN

    def ahead(self, questions: Sequence[Request], tick: TickTokens) -> tuple[dict[int, ScoredRow], int]:
        """Return the answers that the first models give, by the places of the questions, and the tokens that they
        computed."""
        rows: dict[int, ScoredRow] = {}
        computed = 0
        for layer in sorted({layer for each in self.policies.values() for layer in each.layers if layer <= BEFORE}):
            asked = {part for part, policy in self.policies.items() if layer in policy.layers}
            reader = self.first[layer][1]
            tokens, seconds = reader.tokens, reader.seconds
            left = [
                number
                for number, question in enumerate(questions)
                if number not in rows and question.prompt.part in asked
            ]
            for at in range(0, len(left), reader.block):
                rows |= self._decided(layer, reader, questions, left[at : at + reader.block], tick)
            self.first_rows[layer] += len(left)
            self.first_seconds[layer] = self.first_seconds.get(layer, 0.0) + reader.seconds - seconds
            computed += reader.tokens - tokens
        self.spared += sum(len(questions[number].tokens) for number in rows)
        return rows, computed

    def _decided(
        self, layer: int, reader: Reader, questions: Sequence[Request], numbers: Sequence[int], tick: TickTokens
    ) -> dict[int, ScoredRow]:
        # The answers to the questions with these `numbers` that a first model decides.
        found = reader.read([questions[number].prompt for number in numbers], tick)
        read: dict[int, list[tuple[int, FirstReading]]] = {}
        for number, each in zip(numbers, found, strict=True):
            if each is not None:
                read.setdefault(questions[number].prompt.part, []).append((number, each))
        rows = {}
        for part, pairs in read.items():
            decided, logprobs = self.policies[part].decide(layer, readings_of([each for _, each in pairs]))
            for (number, each), leaves, own in zip(pairs, decided.tolist(), logprobs, strict=True):
                if leaves:
                    rows[number] = decided_row(questions[number], own, layer, each.seconds)
        return rows

    def add(self, pack: Pack, answers: Sequence[Answer]) -> None:
        """Count the layers that exits saved in a pack, by all of its answers."""
        if not self.policies or not answers:
            return
        left = {answer.prompt: answer.exit_layer for answer in answers}
        through = [_layers_through([left[prompt] for prompt in prompts]) for _, prompts in pack.reads]
        self.seconds += sum(answer.seconds for answer in answers)
        self.full_seconds += sum(answer.full_seconds or answer.seconds for answer in answers)
        self.layers += in_full(self.use.model_layers) * len(pack.tokens)
        self.skipped += sum(answer.skipped for answer in answers)
        self.kept_alive.update(carried_by_few(pack, through, self.use.model_layers))

    def watch(self, run: Run, window: int) -> None:
        """End the exits of a question after a `window` if the written audited rows show that too many answers
        flip."""
        sink, allowed = run.sink, self.use.max_flips
        for part, (name, use) in enumerate(self.use.each.items()):
            if part not in self.policies or allowed is None:
                continue
            audited = sink.counts.audited_exits.get(name, {})
            counts = {
                f"audited rows that are {label!r} in full": (own.flips, own.rows) for label, own in audited.items()
            }
            if use.flips_of == "all" and counts:
                counts = {
                    "audited rows": (sum(own[0] for own in counts.values()), sum(own[1] for own in counts.values()))
                }
            drifted = drifted_classes(list(counts.values()), allowed)
            if not drifted:
                continue
            of, (flips, rows) = list(counts.items())[drifted[0]]
            del self.policies[part]
            ended = {
                "status": "stopped",
                "stopped_window": window + 1,
                "reason": f"{flips:,} of {rows:,} {of} have flipped, more than --max-flips {allowed:g} explains: the "
                "rows are not like those that the exits were learnt on",
            }
            before = sink.plan[EXITS]
            sink.plan = sink.plan | {EXITS: before | {ENDED: before.get(ENDED, {}) | {name: ended}}}
            self.use = _with_ends(self.use, {name: ended})
            option = "--first" if self.use.first else "--exit"
            log.warning(f"{option}{_question(name)}: {ended['reason']}; all further rows are read in full")

    def report(self, tokens: Any) -> ExitUse:
        """Return the exits for the run's report, with the savings in its packs; `tokens` (`report.run.Tokens`) are
        those of the run.

        The counts of the output are still missing: see `ExitUse.take`.
        """
        computed = tokens.computed * self.use.model_layers
        spared = self.spared * self.use.first[0].token_seconds if self.use.first else 0.0
        taken = self.seconds + sum(self.first_seconds.values())
        gains = {
            "layers_saved": tokens.skipped / computed if computed else None,
            "layers_gain": self.layers / (self.layers - self.skipped) if self.layers else None,
            "measured_gain": (self.full_seconds + spared) / taken if taken else None,
            "kept_alive": dict(self.kept_alive),
        }
        if self.first:
            gains["first"] = [
                each.model_copy(
                    update={
                        "read_rows": self.first_rows[each.layer - 1],
                        "read_tokens": self.first[each.layer - 1][1].tokens,
                        "seconds": self.first_seconds.get(each.layer - 1, 0.0),
                    }
                )
                for each in self.use.first
            ]
        return self.use.model_copy(update=gains)


def decided_row(question: Request, logprobs: Any, layer: int, seconds: float) -> ScoredRow:
    """Return a row that a first model has decided; the model itself computes nothing of it."""
    return ScoredRow(question.prompt.row, logprobs, 0, 0, 0, seconds, method=FIRST, exit_layer=layer + 1)


def _layers_through(exit_layers: Sequence[int | None]) -> int | None:
    # The number of layers that a read goes through, by the layers after which its prompts leave. None means all: a
    # read ends with its last prompt.
    numbers = [layer for layer in exit_layers if layer is not None]
    return max(numbers) + 1 if len(numbers) == len(exit_layers) else None


def stored_exit_use(plan: Mapping[str, Any]) -> ExitUse | None:
    """Return the exits of a job by its plan, without the gain, which each run has for itself."""
    stored = plan.get(EXITS, {})
    return _use_of(stored) if "use" in stored else None


def _use_of(stored: Mapping[str, Any]) -> ExitUse:
    return _with_ends(ExitUse.model_validate(stored["use"]), stored.get(ENDED, {}))


def _with_ends(use: ExitUse, ended: Mapping[str, Mapping[str, Any]]) -> ExitUse:
    """Return the exits with those of some questions ended."""
    if not use.questions:
        return use.model_copy(update=dict(ended.get("", {})))
    questions = {name: own.model_copy(update=dict(ended.get(name, {}))) for name, own in use.questions.items()}
    return _joined(use, questions)


def _joined(use: ExitUse, questions: dict[str, ExitUse]) -> ExitUse:
    """Return the exits of a job with those of its `questions`. As long as one question has exits, so has the job; they
    have stopped if those of any question have."""
    order = ("calibrated", "reused", "stopped", "none")
    best = min(questions.values(), key=lambda own: order.index(own.status))
    reason = {"stopped": "no question has any left", "none": "no question has any"}.get(best.status)
    update = {"status": best.status, "reason": reason, "stopped_window": best.stopped_window}
    return use.model_copy(update=update | {"questions": questions})


def _question(name: str) -> str:
    return f": question {name}" if name else ""


@dataclass(slots=True)
class ReadRows:
    """Questions that were answered in full, with readings after these `layers` and, by layer, those of the `first`
    models. `unique` is the size of their trie, in tokens."""

    questions: list[Request]
    answers: list[Answer]
    unique: int
    layers: Sequence[int]
    first: dict[int, list[FirstReading | None]]

    def add(self, other: ReadRows) -> None:
        """Add more questions, with readings of the same layers."""
        self.questions += other.questions
        self.answers += other.answers
        self.unique += other.unique
        for layer, found in other.first.items():
            self.first.setdefault(layer, []).extend(found)

    def of_part(self, part: int, labels: int) -> CalibrationRows:
        """Return the rows of the questions with this number among those about a row, which have so many labels. Each
        question has the same share of its row's tokens."""
        asked = Counter(question.prompt.row for question in self.questions)
        own = [number for number, each in enumerate(self.questions) if each.prompt.part == part]
        questions, answers = [self.questions[number] for number in own], [self.answers[number] for number in own]
        rows = calibration_rows(questions, answers, self.layers, labels)
        first = {layer: readings_of([found[number] for number in own]) for layer, found in self.first.items()}
        shares = np.array([asked[each.prompt.row] for each in questions], np.float64)
        return replace(rows, readings=first | dict(rows.readings), weights=rows.weights / shares)

    def first_use(self, opened: Opened, readers: Mapping[int, tuple[str, Reader]]) -> list[FirstUse]:
        """Return what a token costs each of the first models' `readers`.

        The seconds of a token, a median because the first packs take longer than others, are for the report alone.
        """
        used = []
        for layer, found in self.first.items():
            able, reader = [number for number, each in enumerate(found) if each is not None], readers[layer][1]
            lengths = [
                (own.length, len(asked.tokens)) for own, asked in zip(found, self.questions, strict=True) if own
            ]
            # Words cost next to nothing
            cost = reading_cost(reader.small, opened, lengths) if able and isinstance(reader, FirstReader) else 0.0
            token = [self.answers[number].seconds / len(self.questions[number].tokens) for number in able]
            seconds = float(np.median(token)) if able else 0.0
            used.append(FirstUse(model=readers[layer][0], layer=layer + 1, cost=cost, token_seconds=seconds))
        return used

    def scored(self, prompts: int) -> list[ScoredRow]:
        """Return the rows of which all their `prompts` are answered."""
        found: dict[int, list[ScoredRow]] = {}
        for question, answer in zip(self.questions, self.answers, strict=True):
            found.setdefault(question.prompt.row, []).append(scored_row(question, answer))
        return [own[0] if prompts == 1 else joined_row(own) for own in found.values() if len(own) == prompts]


def _written(row: ScoredRow) -> dict[str, Any]:
    """Return a row as `_row_of` reads it."""
    return {**asdict(row), "logprobs": row.logprobs.tolist(), "parts": [_written(each) for each in row.parts]}


def _row_of(written: Mapping[str, Any]) -> ScoredRow:
    arrays = {"logprobs": np.array(written["logprobs"], np.float64)}
    return ScoredRow(**{**written, **arrays, "parts": tuple(map(_row_of, written["parts"]))})


@dataclass(frozen=True, slots=True)
class ExitLearning:
    """Learns the exits of a job, once. They stay in the work folder in case the job is resumed."""

    run: Run
    given: ExitProfile | None  # the profile that `--exit-profile` names
    first: Mapping[int, tuple[str, Reader]] = field(default_factory=dict)
    read_as: Sequence[Any] = ()

    @property
    def engine(self) -> PlanEngine:
        """The engine that answers packs."""
        return self.run.scorer.pool

    def exits(self) -> JobExits:
        """Return the exits. The job's recorder counts the tokens that learning them took in this run."""
        sink, found = self.run.sink, self._stored()
        if found is None:
            profile, known, use = self._learn()
            rows = list(map(_written, known))
            data = json.dumps({"profile": profile.model_dump(mode="json"), "rows": rows}).encode()
            sink.work.put_bytes(FILE, data)
            before = sink.plan.get(EXITS, {})
            ended = {ENDED: before[ENDED]} if ENDED in before else {}  # ended by drift, and learnt again since
            learnt = {"digest": hashlib.sha256(data).hexdigest(), "use": use.model_dump(mode="json")}
            sink.plan = sink.plan | {EXITS: learnt | ended}
            if self.run.report.report is not None and self.run.settings.exit_profile is None and use.rare is None:
                path = exits_path(self.run.report.report)
                try:
                    write_sealed(path, profile.to_json())
                except (OSError, PrefillError) as error:
                    log.warning(f"cannot write {path}: {error}")
            for name, own in use.each.items():
                if own.reason is not None:
                    option = self.run.settings.exit_option
                    log.warning(f"{option}{_question(name)}: {own.reason}; all rows are read in full")
        else:
            profile, known = found
        use = _use_of(sink.plan[EXITS])
        return JobExits(
            policies={
                part: learnt.policy
                for part, (learnt, own) in enumerate(zip(profile.questions, use.each.values(), strict=True))
                if learnt.policy is not None and own.reason is None
            },
            use=use,
            known={row.row: row for row in known},
            first=self.first,
        )

    def _stored(self) -> tuple[ExitProfile, list[ScoredRow]] | None:
        # The profile that an earlier attempt at the job learnt, and the rows that it scored.
        if "use" not in self.run.sink.plan.get(EXITS, {}):
            return None
        try:
            data = self.run.sink.work.read_bytes(FILE)
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() == self.run.sink.plan[EXITS]["digest"]:
            content = json.loads(data)
            return ExitProfile.model_validate(content["profile"]), list(map(_row_of, content["rows"]))
        place = f"{self.run.sink.work.location}/{FILE}"
        log.warning(f"{place} is gone or damaged: the exits are learnt again, from the same rows")
        return None

    def _learn(self) -> tuple[ExitProfile, list[ScoredRow], ExitUse]:
        # Read some rows in full and learn from them, or test whether a given profile still holds. Returns the rows
        # that need not be read again.
        settings, given = self.run.settings, self.given
        depth: int = self.run.inputs.opened.files.config.get_text_config().num_hidden_layers
        layers = observed_layers(depth) if settings.exit else ()
        policies = [] if given is None else [each.policy for each in given.questions if each.policy is not None]
        if policies:
            own = (layer for each in policies if each.inside is not None for layer in each.inside.layers)
            layers = tuple(sorted(set(own)))
        # The best that the rows could prove. They only check a given profile.
        provable = None
        if given is None:
            provable = provable_flips(min(self._count, len(self._rows()) // 2), settings.max_flips, self._classes)
        read = self._read_rows(layers, provable)
        first = read.first_use(self.run.inputs.opened, self.first)
        found = [
            self._learnt(part, labels, read, first, given.questions[part] if given is not None and policies else None)
            for part, labels in enumerate(self.run.inputs.labels.asked)
        ]
        profile = given
        if profile is None or not policies:
            profile = ExitProfile(**job_of_exits(self.run, self.read_as) | {"questions": [each for each, _ in found]})
        known = self._counted(read)
        whole = ExitUse(
            status="none",
            reused=given is not None,
            max_flips=settings.max_flips,
            flips_of=settings.flips_of,
            confidence=profile.questions[0].findings.confidence,
            model_layers=depth,
            provable=provable,
            calibration_rows=len({question.prompt.row for question in read.questions}),
            learnt_rows=len(known),
            first=first,
        )
        uses = {each.question: self._use(each, reason, whole) for each, reason in found}
        if not self.run.inputs.labels.each:
            return profile, known, uses[""]
        without = {name: own.model_copy(update={"first": [], "provable": None}) for name, own in uses.items()}
        return profile, known, _joined(whole, without)

    def _learnt(
        self, part: int, labels: Labels, read: ReadRows, first: Sequence[FirstUse], given: LearntExits | None
    ) -> tuple[LearntExits, str | None]:
        # What the rows teach of a question, or whether what is `given` still holds for them, and why it has no exits.
        settings, config, names = self.run.settings, self.run.inputs.opened.files.config, labels.names
        rows = read.of_part(part, len(names))
        if given is not None:
            if (policy := given.policy) is None:
                return given, given.findings.reason
            check = recheck_exits(policy, rows, settings.max_flips, names, settings.flips_of)
            if not settings.quiet:
                log.info(f"--exit-profile{_question(given.question)}: {check.text}")
            return given, check.reason
        depth: int = config.get_text_config().num_hidden_layers
        found = calibrate_exits(
            rows,
            layers=depth,
            max_flips=settings.max_flips,
            labels=names,
            costs=replace(exit_costs(config), first={each.layer - 1: each.cost * in_full(depth) for each in first}),
            flips_of=settings.flips_of,
            of=self._drawn_from,
        )
        findings = found.findings
        if read.questions and not len(rows):
            findings = findings.model_copy(update={"reason": "whether it is asked depends on other answers"})
        exits = None if found.policy is None else found.policy.to_json()
        return LearntExits(**identity_of(labels), exits=exits, findings=findings), findings.reason

    def _use(self, learnt: LearntExits, reason: str | None, whole: ExitUse) -> ExitUse:
        # The exits of one question, in a job that is otherwise as the `whole`.
        findings = learnt.findings
        return whole.model_copy(
            update={
                "status": "none" if reason is not None else "reused" if whole.reused else "calibrated",
                "reason": reason,
                "classes": list(findings.classes),
                "layers": [
                    UsedExit(
                        layer=each.layer + 1,
                        probe=each.probe,
                        peek=each.peek,
                        thresholds=dict(zip(learnt.labels, each.thresholds, strict=True)),
                        expected=each.leaving,
                    )
                    for each in findings.exits
                ],
                "predicted_gain": findings.gain,
                "curve": list(findings.curve),
            }
        )

    def _counted(self, read: ReadRows) -> list[ScoredRow]:
        # The rows that need not be read again. Counts their tokens.
        self.run.tokens.computed += sum(answer.computed_tokens for answer in read.answers)
        self.run.tokens.unique += read.unique
        # A compressed prompt may keep other tokens beside those that it shares a prefix with.
        return [] if self.run.scorer.read is not None else read.scored(len(self.run.inputs.labels.asked))

    def _read_rows(self, layers: Sequence[int], provable: ProvableFlips | None) -> ReadRows:
        # Random rows of the job, read in full: as many as the user asks for, but no more than half of its rows.
        settings, classes, count = self.run.settings, self._classes, self._count
        rows = self._rows()
        drawn = rows[np.random.default_rng(SEED).permutation(len(rows))[: len(rows) // 2]]
        if provable is not None and not settings.quiet:
            log.info(provable_text(provable, classes, settings.max_flips, settings.exit_option))
        read = self._read(drawn[:count], layers, f"for {settings.exit_option}")
        if settings.exit_rows is None and provable is not None and classes > 1 and read.answers:
            asked = self.run.inputs.labels.asked
            bytes_of_row = 4 * max(len(layers), 1) * self.run.inputs.opened.files.config.get_text_config().hidden_size
            bytes_of_row += sum(
                next((each.hidden.nbytes for each in own if each is not None), 0) for own in read.first.values()
            )
            most = min(len(drawn), MOST_BYTES // (bytes_of_row * len(asked)))
            best: list[list[int]] = [[] for _ in asked]
            for question, answer in zip(read.questions, read.answers, strict=True):
                best[question.prompt.part].append(int(answer.logprobs.argmax()))
            total = max(
                rows_for_rarest(np.bincount(own, minlength=len(each.names)), settings.max_flips, most)
                for each, own in zip(asked, best, strict=True)
                if own
            )
            read.add(self._read(drawn[count:total], layers, "too, because one of the answers is rare"))
        return read

    def _read(self, numbers: Int64Array, layers: Sequence[int], why: str) -> ReadRows:
        # The rows with these numbers that fit the memory, read in full, with readings after these layers.
        questions = self._questions(np.sort(numbers))
        if not questions:
            return ReadRows([], [], 0, layers, {})
        if not self.run.settings.quiet:
            rows = len({question.prompt.row for question in questions})
            log.info(f"{rows:,} rows are read in full first, {why}")
        step("reading rows in full")
        plan = plan_requests(questions, self.engine.limits, self.run.settings.schedule)
        exits = EarlyExits(observed=tuple(layers)) if layers else None
        treatment = Treatment(exits, thinning=thinning_of(dict(enumerate(questions))))
        found: dict[int, Answer] = {}
        for answers in self.engine.answer_all(
            plan.packs, lambda i: questions[i].prompt.labels, self.run.tick, treatment
        ):
            found |= {answer.prompt: answer for answer in answers if answer.failure is None}
        answered = sorted(found)
        own = [questions[number] for number in answered]
        prompts = [each.prompt for each in own]
        first = {layer: reader.read(prompts, self.run.tick) for layer, (_, reader) in self.first.items()}
        return ReadRows(own, [found[number] for number in answered], plan.unique_tokens, layers, first)

    @property
    def _count(self) -> int:
        # The number of rows to read at first, if half of the job has that many.
        if self.run.settings.exit_rows is not None:
            return int(self.run.settings.exit_rows)
        if self.given is not None:
            return CHECKED_ROWS
        return rows_to_learn(self.run.settings.max_flips, self._classes)

    @property
    def _drawn_from(self) -> int | None:
        # The number of rows from which those read in full are drawn. None if it is their labels that decide how many,
        # or if the job is a part of a file: its exits may be meant for the rest.
        settings, total = self.run.settings, len(self._rows())
        fixed = settings.exit_rows is not None or self._classes == 1 or self._count >= total // 2
        return total if fixed and settings.limit is None and settings.sample is None else None

    @property
    def _classes(self) -> int:
        # The most classes of a question's answers whose flips are bounded.
        names = max(len(each.names) for each in self.run.inputs.labels.asked)
        return names if self.run.settings.flips_of == "each" else 1

    def _rows(self) -> Int64Array:
        source = self.run.inputs.source
        return source.selection().within(0, source.count())

    def _questions(self, numbers: Int64Array) -> list[Request]:
        # The requests for the rows with these numbers, ascending. What depends on other answers is not asked here.
        prompts = [prompt for batch in self._prompts(numbers) for prompt in batch if not prompt.conditional]
        questions, _ = self.run.scorer.requests(prompts, self.run.tick)
        return [question for question in questions if len(question.tokens) <= self.engine.limits.max_tokens]

    def _prompts(self, numbers: Int64Array) -> Iterator[list[Prompt]]:
        # The prompts of the rows with these numbers, ascending.
        again = self.run.reopen(self.run.settings)  # the job's own source is being read
        source, builder = again.source, again.new_builder()
        try:
            for batch in source.rows(numbers) if len(numbers) else ():
                yield builder.build(batch, self.run.inputs.labels)[0]
                self.run.tick(0.0)
        finally:
            builder.close()

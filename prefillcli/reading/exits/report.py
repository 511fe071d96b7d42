"""The report of early exits: rows that they were learnt from, rows that left, layers spared and answers flipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from prefillcli.errors import counted
from prefillcli.reading.exits.findings import FlipsOf, GainPoint, JudgedLabel
from prefillcli.report.finding import Finding
from prefillcli.report.run import RunReport
from prefillcli.report.section import (
    Bar,
    Part,
    Plot,
    Section,
    Tick,
    abbreviated,
    bars,
    percent,
    percent_interval,
    percent_or_nothing,
    round_ticks,
    visible,
)
from prefillcli.rows.output.tallies import TO_THE_END, AuditedExits, Counts, LayerRows, summed
from prefillcli.stats.flips import flip_bound, rows_for
from prefillcli.stats.intervals import exact_interval

# Learnt by this job; taken from an earlier one; none, for a `reason`; ended before the job did, for a `reason`.
ExitStatus = Literal["learnt", "reused", "none", "stopped"]
KEPT_ALIVE = ("1", "2", "3-5", "6-10", ">10")  # the number of rows for which a shared prefix went on


class ProvableFlips(BaseModel):
    """The best that learning rows could prove. It is known before any of them is read."""

    rows: int  # rows that are to be read in full; half of them judge
    judged: int  # judged rows for each proof: all, or those of each answer if all are equally frequent
    max_flips: float  # the smallest rate that this many rows prove without a flip, at the report's confidence
    rows_needed: int  # judged rows that a proof of --max-flips takes without a flip


def provable_flips(rows: int, max_flips: float, classes: int) -> ProvableFlips:
    """Return the best that this many learning rows can prove, if all `classes` are equally frequent and no row
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
    return text if found.judged >= found.rows_needed else f"{text}. {_enough_text(found, classes, max_flips)}"


def futile_text(found: ProvableFlips, classes: int, max_flips: float) -> str:
    """Return why learning rows are not read: they could not prove `max_flips`."""
    each = f" of each of {classes} answers" if classes > 1 else ""
    return (
        f"{found.rows:,} rows read in full, {found.judged:,} to judge{each}, would prove at most "
        f"{found.max_flips:.2%} flips. {_enough_text(found, classes, max_flips)}"
    )


def _enough_text(found: ProvableFlips, classes: int, max_flips: float) -> str:
    rows, of_each = 2 * classes * found.rows_needed, " of each" if classes > 1 else ""
    text = f"--max-flips {max_flips:g} takes {found.rows_needed:,}{of_each}, {rows:,} rows of a job of twice as many"
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
    expected: float  # share of the rows that leave here, by the learning rows
    saves: float | None = None  # share of the work in full that it saves beside the others, by the learning rows
    rows: int = 0  # rows of the output that left here
    share: float | None = None  # share of the scored rows, without those that exits were learnt from


class FirstUse(BaseModel):
    """One of the first models of a run, or words."""

    model: str
    layer: int = 0  # the exit layer of the rows that it decides: 0 for the last one, -1 for the one before, and so on
    inner: list[int] = Field(default_factory=list)  # of rows that it decides after layers inside it
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
    # The label's predicted lead below which a row is decided not to have it, and the lead from which on it is decided
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


class QuestionExits(BaseModel):
    """The exits of a question, by its answers."""

    status: ExitStatus
    reason: str | None = None  # why there are no exits, or no longer
    stopped_window: int | None = None  # the first window without exits
    classes: list[JudgedLabel] = Field(default_factory=list)
    layers: list[UsedExit] = Field(default_factory=list)
    by_layer: dict[str, LayerCount] = Field(default_factory=dict)  # the layers that rows went through, then "full"
    predicted_gain: float | None = None  # by the learning rows, for tokens that no two rows share
    audited: list[AuditedLabel] = Field(default_factory=list)
    curve: list[GainPoint] = Field(default_factory=list)

    def take(self, found: Mapping[str, LayerRows], audited: Mapping[str, AuditedExits], use: ExitUse) -> None:
        """Take over the counts of the answers, in a job with these exits."""
        self.by_layer = _in_order(found)
        _take_rows(self.layers, self.by_layer, use.learnt_rows)
        self.audited = [
            AuditedLabel(
                label=label,
                rows=own.rows,
                left=own.left,
                flips=own.flips,
                flip_rate=own.flips / own.rows,
                interval=exact_interval(own.flips, own.rows, use.confidence),
                bound=flip_bound(own.flips, own.rows, use.confidence),
            )
            for label, own in sorted(audited.items())
        ]


def _in_order(found: Mapping[str, LayerRows]) -> dict[str, LayerCount]:
    order = sorted(found, key=lambda name: (name == TO_THE_END, int(name) if name != TO_THE_END else 0))
    return {name: LayerCount(rows=found[name].rows, prompt_tokens=found[name].prompt_tokens) for name in order}


def _free_rows(by_layer: Mapping[str, LayerCount], learnt: int) -> int:
    # Rows that were not read to learn exits from.
    full = by_layer.get(TO_THE_END)
    return sum(each.rows for each in by_layer.values()) - min(learnt, full.rows if full is not None else 0)


def _take_rows(places: Sequence[UsedExit | FirstUse], by_layer: Mapping[str, LayerCount], learnt: int) -> None:
    free = _free_rows(by_layer, learnt)
    for each in places:
        own = [by_layer[str(layer)] for layer in _layers_of(each) if str(layer) in by_layer]
        each.rows = sum(found.rows for found in own)
        each.share = each.rows / free if free else None


def _layers_of(place: UsedExit | FirstUse) -> list[int]:
    return [*(place.inner if isinstance(place, FirstUse) else ()), place.layer]


class ExitUse(Finding):
    """The exits of a run, for each of its questions. Counts of rows are of their answers."""

    key: ClassVar[str] = "exits"
    place: ClassVar[int] = 10

    status: ExitStatus
    reason: str | None = None  # why there are no exits, or no longer
    reused: bool = False  # whether an earlier job has learnt the exits
    stopped_window: int | None = None  # the first window without exits
    max_flips: float | None  # None where recall and precision are bounded
    flips_of: FlipsOf = "each"  # whose flips are bounded: the rows' of each label, or all rows'
    confidence: float = 0.95
    model_layers: int
    provable: ProvableFlips | None = None  # None where an earlier job has learnt the exits
    rows_in_full: int = 0  # read in full before the first window
    learnt_rows: int = 0  # those of them whose scores in the output are from that read
    first: list[FirstUse] = Field(default_factory=list)
    tried: list[str] = Field(default_factory=list)  # the ways that --max-flips stood for, where it was given alone
    left_out: dict[str, str] = Field(default_factory=dict)  # those that were not tried, and why
    rare: RareUse | None = None  # with --recall and --precision
    by_layer: dict[str, LayerCount] = Field(default_factory=dict)  # the layers that rows went through, then "full"
    layers_saved: float | None = None  # share of the layers of computed tokens that exits spared this run
    layers_gain: float | None = None  # by the layers that exits saved in the packs of this run
    measured_gain: float | None = None  # of the same packs, in seconds
    kept_alive: dict[str, float] = Field(default_factory=dict)  # layers of shared tokens, by the rows they served
    questions: dict[str, QuestionExits]  # by name

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the exits in terminal, page, metrics and summary."""
        return [_section(self)]

    def take(self, counts: Counts) -> None:
        """Take over the counts of the output's rows, including those of earlier attempts."""
        layers, together = counts.tallies.exit_layers, dict[str, LayerRows]()
        for name, own in self.questions.items():
            found = layers.get(name, {})
            own.take(found, counts.audited_exits.get(name, {}), self)
            together = summed(together, found)
        self.by_layer = _in_order(together)
        _take_rows(self.first, self.by_layer, self.learnt_rows * len(self.questions))

    @property
    def left_early(self) -> int:
        """Rows of the output that left before the last layer."""
        return sum(each.rows for name, each in self.by_layer.items() if name != TO_THE_END)

    @property
    def free_rows(self) -> int:
        """Scored rows of the output that were not read to learn exits from."""
        return _free_rows(self.by_layer, self.learnt_rows * len(self.questions))

    @property
    def rows(self) -> int:
        """Scored rows of the output."""
        return sum(each.rows for each in self.by_layer.values())

    def told_apart(self, question: str) -> str:
        """Return the name of a question for a message, if there are others."""
        return question if len(self.questions) > 1 else ""


def exit_lines(use: ExitUse) -> Iterator[tuple[str, str]]:
    """Yield the lines that exits add to the table of a run: name and text."""
    yield "exits", _status(use)
    if use.tried:
        yield "tried", _tried(use)
    for each in use.first:
        yield (
            "first model",
            f"{visible(each.model, line=True)}, {each.cost:.1%} of the cost of a token; it read "
            f"{counted(each.read_rows, 'row')} in {each.seconds:.1f} s",
        )
    for name, own in use.questions.items():
        if own.reason is not None and use.told_apart(name):
            yield f"exits of {visible(name, line=True)}", _ended(own)
    for name, own in use.questions.items():
        if own.classes:
            yield f"exits, judged{_of(name, use)}", "; ".join(_judged(each) for each in own.classes)
    if use.left_early:
        yield "exit layers", _layers(use)
        if (saved := _saved(use)) is not None:
            yield "exit gain", saved
    for name, own in use.questions.items():
        if any(each.left for each in own.audited):
            texts = [
                f"{visible(each.label, line=True)} {counted(each.flips, 'flip')} of {each.rows:,} "
                f"({percent_interval(each.interval)}), {each.left:,} would leave"
                for each in own.audited
            ]
            yield f"exits, audited{_of(name, use)}", "; ".join(texts)


def _tried(use: ExitUse) -> str:
    used = {_way(use, each.layer) for own in use.questions.values() for each in own.layers}
    texts = [name if name in used or use.status == "none" else f"{name} (does not pay)" for name in use.tried]
    return "; ".join([", ".join(texts), *(f"{name} is left out: {why}" for name, why in use.left_out.items())])


def _way(use: ExitUse, layer: int) -> str:
    return next((first.model for first in use.first if layer in _layers_of(first)), "exits")


def _of(question: str, use: ExitUse) -> str:
    return f", {visible(question, line=True)}" if use.told_apart(question) else ""


def _status(use: ExitUse) -> str:
    if use.status == "none":
        return _ended(use)
    rows, sure = counted(use.rows_in_full, "row"), f"({100 * use.confidence:g} % confidence)"
    if use.rare is not None:
        return f"learnt from {rows} in full; {_rare(use.rare)} {sure}"
    most = percent(use.max_flips or 0)
    each = use.flips_of == "each"
    whose = "the rows of each label" if each else "all rows"
    whose += ", for each question," if len(use.questions) > 1 else ""
    text = f"learnt from {rows} in full; of {whose} at most {most} flip {sure}"
    if use.reused:
        text = (
            f"from --exit-profile, checked on {rows} in full; of the rows that it was learnt from at most {most}"
            f"{' of each label' if each else ''} flip {sure}"
        )
    if use.status == "stopped":
        return f"{_ended(use)}; {text}"
    return text


def _ended(use: ExitUse | QuestionExits) -> str:
    at = "" if use.stopped_window is None else f" at window {use.stopped_window:,}"
    return f"{use.status}{at}: {visible(use.reason or '', line=True)}"


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
    expected: dict[str, float] = {}
    for each in (each for own in use.questions.values() for each in own.layers):
        expected[str(each.layer)] = expected.get(str(each.layer), 0.0) + each.expected / len(use.questions)
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
    layer = int(name)
    by = next((first for first in use.first if layer in _layers_of(first)), None)
    if by is None:
        return f"after {name}"
    said = f"by {visible(by.model, line=True)}"
    return said if layer == by.layer else f"{said} after {layer - by.layer + use.model_layers}"


def _saved(use: ExitUse) -> str | None:
    questions = use.questions.values()
    texts, inside = [], any(each.layer > 0 for own in questions for each in own.layers)
    if use.layers_saved is not None and inside:
        texts.append(f"{use.layers_saved:.1%} of the tokens' layers spared")
    if use.measured_gain is not None:
        texts.append(f"{use.measured_gain:.2f}x measured")
    if use.layers_gain is not None and inside:
        texts.append(f"{use.layers_gain:.2f}x by these layers")
    predicted = [own.predicted_gain for own in questions if own.predicted_gain is not None]
    if texts and len(predicted) == 1:
        texts.append(f"{predicted[0]:.2f}x predicted for tokens that no two rows share")
    return ", ".join(texts) or None


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
    "Each point is another caution for all thresholds: an estimate, which proves nothing."
)
ALIVE_NOTE = (
    "A shared beginning goes on as long as one row below it does. These are layers of shared tokens, by the number of "
    "rows that they still went on for."
)


def _section(use: ExitUse) -> Section:
    bound = BOUND_NOTE if use.flips_of == "each" else ALL_BOUND_NOTE
    bound, allowed = bound if use.rare is None else RARE_NOTE, use.max_flips or 0.0
    found = Section(
        title="Early exit",
        lines=list(exit_lines(use)),
        parts=[
            Part(note=f"{bound} {OTHER_ROWS_NOTE if use.reused else OWN_ROWS_NOTE}"),
            Part(title="Answers by layer" if len(use.questions) > 1 else "Rows by layer", bars=_by_layer(use)),
            *(part for name, own in use.questions.items() for part in _question_parts(name, own, use)),
            Part(title="Shared beginnings kept alive", bars=_kept_alive(use.kept_alive), note=ALIVE_NOTE),
            *(
                Part(title=f"Gain over flips{_of(name, use)}", plot=gain_plot(own, allowed), note=CURVE_NOTE)
                for name, own in use.questions.items()
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
        ".".join(filter(None, (use.told_apart(name), each.label))): each
        for name, own in use.questions.items()
        for each in own.audited
    }
    rows = {label: float(each.rows) for label, each in audited.items()}
    flips = {label: float(each.flips) for label, each in audited.items()}
    found.metric("exit_audited_rows", "Audited rows by label in full.", rows, "label")
    found.metric("exit_audited_flips", "Audited rows that exits flip, by label in full.", flips, "label")
    active = float(use.status in ("learnt", "reused"))
    found.metric("exit_active", "1 if rows may leave early, 0 if exits were refused or stopped.", active)
    return found


def _question_parts(name: str, use: QuestionExits, job: ExitUse) -> list[Part]:
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
            percent_or_nothing(each.saves),
        ]
        for each in use.layers
    ]
    classes = [[each.label, f"{each.fitted:,}", f"{each.judged:,}", *_proven(each)] for each in use.classes]
    audited = [
        [each.label, f"{each.rows:,}", f"{each.left:,}", f"{each.flips:,}", percent_interval(each.interval)]
        for each in use.audited
    ]
    sure = f"{100 * job.confidence:g} %"
    header = ["after layer", "probe", "peek", *labels, "expected", "left", "saves"]
    judged = ["label in full", "fitted", "judged", "flips", f"at most ({sure})"]
    left = ["label in full", "audited", "would leave", "flips", f"{sure} interval"]
    return [
        Part(title=f"Exit layers{_of(name, job)}", table=_table(header, layer_rows)),
        Part(title=f"Learning rows{_of(name, job)}", table=_table(judged, classes)),
        Part(title=f"Audited rows{_of(name, job)}", table=_table(left, audited)),
    ]


def gain_plot(use: QuestionExits, allowed: float) -> Plot | None:
    """Return the gain over the flip rate of the judged rows, from 1 up; None unless there are two points."""
    points = sorted({(each.flip_rate, each.gain) for each in use.curve})
    if len(points) < 2:
        return None
    best = max(gain for _, gain in points)
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


def with_ends(use: ExitUse, ended: Mapping[str, Mapping[str, Any]]) -> ExitUse:
    """Return the exits with those of some questions ended."""
    questions = {name: own.model_copy(update=dict(ended.get(name, {}))) for name, own in use.questions.items()}
    return use.model_copy(update=state_of(questions) | {"questions": questions})


def state_of(questions: Mapping[str, QuestionExits]) -> dict[str, Any]:
    """Return the state of a job's exits by those of its questions. As long as one question has exits, so has the job;
    they have stopped if those of any question have."""
    order = ("learnt", "reused", "stopped", "none")
    best = min(questions.values(), key=lambda own: order.index(own.status))
    reason = best.reason
    if len(questions) > 1:
        reason = {"stopped": "no question has any left", "none": "no question has any"}.get(best.status)
    return {"status": best.status, "reason": reason, "stopped_window": best.stopped_window}


def of_question_text(name: str) -> str:
    """Return what a message says of a question with this name, if it has one."""
    return f": question {name}" if name else ""

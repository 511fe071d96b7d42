"""What a run reports of early exits: what they were learnt from, who left where, and what that spared and flipped.

Layers are numbered as users count them: a row that left after layer 16 went through 16 layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, Field

from prefillcli.data.output.columns import TO_THE_END, Counts
from prefillcli.features.exits.policy import FlipsOf, GainPoint, JudgedLabel
from prefillcli.report.section import (
    Bar,
    Part,
    Plot,
    Section,
    Tick,
    abbreviated,
    bars,
    counted,
    percent_interval,
    percent_or_nothing,
    round_ticks,
    visible,
)
from prefillcli.stats.evaluation import exact_interval, flip_bound, rows_for

# Learnt by this job; taken from an earlier one; not there, for a `reason`; ended before the job, for a `reason`.
ExitStatus = Literal["calibrated", "reused", "none", "stopped"]
KEPT_ALIVE = ("1", "2", "3-5", "6-10", ">10")  # how many rows a shared prefix went on for


class ProvableFlips(BaseModel):
    """What the calibration rows could prove at best: this is known before any of them is read."""

    rows: int  # that are to be read in full; half of them judge
    judged: int  # judged rows behind each proof: those of each answer, if all are as frequent, or all
    max_flips: float  # the smallest rate that so many prove without a flip, at the report's confidence
    rows_needed: int  # judged rows behind each proof that --max-flips takes without a flip


def provable_flips(rows: int, max_flips: float, classes: int) -> ProvableFlips:
    """What so many calibration rows prove at best, if all `classes` are as frequent and none of their rows flips."""
    judged = rows // (2 * classes)
    return ProvableFlips(
        rows=rows,
        judged=judged,
        max_flips=flip_bound(0, judged),
        rows_needed=rows_for(max_flips),
    )


def provable_text(found: ProvableFlips, classes: int, max_flips: float) -> str:
    """One line that says it, and where that is too little, what would do."""
    each = f" of each of {classes} answers, if these are equally frequent" if classes > 1 else ""
    text = (
        f"--exit reads {found.rows:,} rows in full first, and half of them judge: {found.judged:,}{each}. Without a "
        f"flip, so many prove at most {found.max_flips:.2%} flips"
    )
    if found.judged >= found.rows_needed:
        return text
    rows, of_each = 2 * classes * found.rows_needed, " of each" if classes > 1 else ""
    text += (
        f". --max-flips {max_flips:g} takes {found.rows_needed:,}{of_each}, {rows:,} rows of a job of twice as many"
    )
    smallest = math.ceil(found.max_flips * 1e4) / 1e4  # rounded up, as no smaller one is proven
    return text if smallest >= 1 else f"{text}; the smallest --max-flips that may be proven here is {smallest:g}"


class AuditedLabel(BaseModel):
    """Audited rows that the model, read in full, answers with a label. Of all attempts at the job."""

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
    peek: bool  # whether only the last tokens went through the layer before it was decided who leaves
    thresholds: dict[str, float | None]  # by label: how far it must be ahead; None where rows with it stay
    expected: float  # share of the rows that leave here, as the calibration has it
    rows: int = 0  # of the output, that left here
    share: float | None = None  # of the scored rows, without those that exits were learnt from


class LayerCount(BaseModel):
    """Rows of the output that went through the same number of layers."""

    rows: int
    prompt_tokens: int


class ExitUse(BaseModel):
    """The exits of a run."""

    status: ExitStatus
    reason: str | None = None  # why there are none, or none any more
    reused: bool = False  # whether an earlier job has learnt them
    stopped_window: int | None = None  # the first window without them
    max_flips: float
    flips_of: FlipsOf = "each"  # whose flips are bounded: the rows' of each label, or all rows'
    confidence: float = 0.95
    model_layers: int
    provable: ProvableFlips | None = None  # None where an earlier job has learnt the exits
    calibration_rows: int = 0  # read in full before the first window
    learnt_rows: int = 0  # those of them that are rows of the output as they were read then
    classes: list[JudgedLabel] = Field(default_factory=list)
    layers: list[UsedExit] = Field(default_factory=list)
    by_layer: dict[str, LayerCount] = Field(default_factory=dict)  # the layers that rows went through, then "full"
    layers_saved: float | None = None  # share of the layers of computed tokens that exits spared this run
    predicted_gain: float | None = None  # by the calibration, for tokens that no two rows share
    layers_gain: float | None = None  # by the layers that exits spared the packs of this run
    measured_gain: float | None = None  # of the same packs, in seconds
    kept_alive: dict[str, float] = Field(default_factory=dict)  # layers of shared tokens, by rows they went on for
    audited: list[AuditedLabel] = Field(default_factory=list)
    curve: list[GainPoint] = Field(default_factory=list)

    def take(self, counts: Counts) -> None:
        """Take over what is known of the output's rows, those of earlier attempts included."""
        found = counts.tallies.exit_layers
        order = sorted(found, key=lambda name: (name == TO_THE_END, int(name) if name != TO_THE_END else 0))
        self.by_layer = {
            name: LayerCount(rows=found[name].rows, prompt_tokens=found[name].prompt_tokens) for name in order
        }
        for each in self.layers:
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
            for label, own in sorted(counts.audited_exits.items())
        ]

    @property
    def left_early(self) -> int:
        """Rows of the output that left before the last layer."""
        return sum(each.rows for name, each in self.by_layer.items() if name != TO_THE_END)

    @property
    def free_rows(self) -> int:
        """Scored rows of the output that were not read to learn exits from."""
        full = self.by_layer.get(TO_THE_END)
        return self.rows - min(self.learnt_rows, full.rows if full is not None else 0)

    @property
    def rows(self) -> int:
        """Scored rows of the output."""
        return sum(each.rows for each in self.by_layer.values())


# The exits of a run in a few lines, for the terminal and the page.


def exit_lines(use: ExitUse) -> Iterator[tuple[str, str]]:
    """The lines that exits add to the table of a run: name and text."""
    yield "exits", _status(use)
    if use.classes:
        yield "exits, judged", "; ".join(_judged(each) for each in use.classes)
    if use.left_early:
        yield "exit layers", _layers(use)
        if (saved := _saved(use)) is not None:
            yield "exit gain", saved
    if any(each.left for each in use.audited):
        yield "exits, audited", "; ".join(_audited(each) for each in use.audited)


def threshold_text(ahead: float | None) -> str:
    """A threshold, or that rows with the label stay."""
    return "stays" if ahead is None else f"{ahead:.2f}"


def _status(use: ExitUse) -> str:
    if use.status == "none":
        return f"none: {visible(use.reason or '', line=True)}"
    rows, most = counted(use.calibration_rows, "row"), _percent(use.max_flips)
    sure = f"({100 * use.confidence:g} % confidence)"
    each = use.flips_of == "each"
    whose = "the rows of each label" if each else "all rows"
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


def _judged(each: JudgedLabel) -> str:
    label = visible(each.label, line=True)
    if each.judged < each.rows_needed:
        return f"{label} {counted(each.judged, 'row')}, too few: it takes {each.rows_needed:,}"
    if not each.proven:
        return f"{label} {counted(each.judged, 'row')}, nothing proven"
    return f"{label} {counted(each.flips, 'flip')} of {each.judged:,}, at most {_percent(each.bound)}"


def _layers(use: ExitUse) -> str:
    expected = {str(each.layer): each.expected for each in use.layers}
    texts = []
    for name, own in use.by_layer.items():
        learnt = use.rows - use.free_rows if name == TO_THE_END else 0
        share = f"{(own.rows - learnt) / use.free_rows:.1%}"
        wanted = f", {expected[name]:.1%} expected" if name in expected else ""
        texts.append(f"to the end {share}" if name == TO_THE_END else f"after {name} {share}{wanted}")
    others = f"; without {counted(use.rows - use.free_rows, 'row')} to learn from" if use.free_rows < use.rows else ""
    return f"of {use.model_layers}: " + "; ".join(texts) + others


def _saved(use: ExitUse) -> str | None:
    texts = []
    if use.layers_saved is not None:
        texts.append(f"{use.layers_saved:.1%} of the tokens' layers spared")
    if use.measured_gain is not None:
        texts.append(f"{use.measured_gain:.2f}x measured")
    if use.layers_gain is not None:
        texts.append(f"{use.layers_gain:.2f}x by these layers")
    if texts and use.predicted_gain is not None:
        texts.append(f"{use.predicted_gain:.2f}x predicted for tokens that no two rows share")
    return ", ".join(texts) or None


def _audited(each: AuditedLabel) -> str:
    return (
        f"{visible(each.label, line=True)} {counted(each.flips, 'flip')} of {each.rows:,} "
        f"({percent_interval(each.interval)}), {each.left:,} would leave"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


# What the page of a run shows of its exits: charts and tables.


BOUND_NOTE = (
    "The bound is of the rows that the model answers with that label when it reads all layers, and it does not say "
    "that the model is right."
)
ALL_BOUND_NOTE = (
    "The bound is of all rows together: of the rows of a rare answer more may flip. It does not say that the model is "
    "right."
)
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


def section(use: ExitUse) -> Section:
    """The exits in terminal, page, metrics and summary."""
    bound = BOUND_NOTE if use.flips_of == "each" else ALL_BOUND_NOTE
    found = Section(
        title="Early exit",
        lines=list(exit_lines(use)),
        parts=[
            Part(note=f"{bound} {OTHER_ROWS_NOTE if use.reused else OWN_ROWS_NOTE}"),
            Part(title="Rows by layer", bars=_by_layer(use)),
            Part(title="Exit layers", table=_layer_rows(use)),
            Part(title="Calibration rows", table=_classes(use)),
            Part(title="Audited rows", table=_audited_paragraph(use)),
            Part(title="Shared beginnings kept alive", bars=_kept_alive(use.kept_alive), note=ALIVE_NOTE),
            Part(title="Gain over flips", plot=gain_plot(use), note=CURVE_NOTE),
        ],
        summary={"exits": {"status": use.status, "left": use.left_early, "layers_saved": use.layers_saved}},
    )
    if use.free_rows:
        found.tiles.append(("left early", f"{use.left_early / use.free_rows:.1%}"))
    layers = {name: float(own.rows) for name, own in use.by_layer.items()}
    found.metric("exit_rows", "Scored rows of the output by the layers that they went through.", layers, "layer")
    if use.layers_saved is not None:
        found.metric("exit_layers_saved", "Share of the tokens' layers that exits spared.", use.layers_saved)
    audited = {each.label: each for each in use.audited}
    rows = {label: float(each.rows) for label, each in audited.items()}
    flips = {label: float(each.flips) for label, each in audited.items()}
    found.metric("exit_audited_rows", "Audited rows by label in full.", rows, "label")
    found.metric("exit_audited_flips", "Audited rows that exits flip, by label in full.", flips, "label")
    active = float(use.status in ("calibrated", "reused"))
    found.metric("exit_active", "1 if rows may leave early, 0 if exits were refused or stopped.", active)
    return found


def gain_plot(use: ExitUse) -> Plot | None:
    """The gain over the flip rate of the judged rows, from 1 up; None unless there are two points."""
    points = sorted({(each.flip_rate, each.gain) for each in use.curve})
    if len(points) < 2:
        return None
    best = max(gain for _, gain in points)
    x = round_ticks(100 * max(use.max_flips, *(flips for flips, _ in points)))
    y = round_ticks(max(best - 1, 0.05))
    wide, high = x[-1] / 100, y[-1]
    limit = f"{100 * use.max_flips / wide:.2f}"
    return Plot(
        x=[Tick(100 * at / x[-1], f"{at:g} %") for at in x],
        y=[Tick(100 * at / high, f"{1 + at:g}x") for at in y],
        series=[("gain", f"up to {best:.2f}x"), ("--max-flips", f"{100 * use.max_flips:g} %")],
        lines=[
            " ".join(f"{100 * flips / wide:.2f},{100 - 100 * max(gain - 1, 0) / high:.2f}" for flips, gain in points),
            f"{limit},0 {limit},100",
        ],
    )


def _by_layer(use: ExitUse) -> list[Bar]:
    values = {name: float(own.rows) for name, own in use.by_layer.items()}
    names = {name: "to the end" if name == TO_THE_END else f"after layer {name}" for name in values}
    texts = {
        names[name]: f"{own.rows:,} ({own.rows / max(use.rows, 1):.1%}), {abbreviated(own.prompt_tokens)} tokens"
        for name, own in use.by_layer.items()
    }
    kinds = {names[name]: "s0" if name == TO_THE_END else "s2" for name in values}
    if use.free_rows < use.rows:
        texts[names[TO_THE_END]] += f"; {use.rows - use.free_rows:,} rows to learn from"
    return bars({names[name]: value for name, value in values.items()}, texts, kinds)


def _layer_rows(use: ExitUse) -> list[list[str]]:
    if not use.layers:
        return []
    labels = list(use.layers[0].thresholds)
    header = ["after layer", "probe", "peek", *(f"ahead for {label}" for label in labels), "expected", "left"]
    return [
        header,
        *(
            [
                f"{each.layer}",
                each.probe,
                "yes" if each.peek else "no",
                *(threshold_text(each.thresholds[label]) for label in labels),
                f"{each.expected:.1%}",
                percent_or_nothing(each.share),
            ]
            for each in use.layers
        ),
    ]


def _classes(use: ExitUse) -> list[list[str]]:
    if not use.classes:
        return []
    header = ["label in full", "fitted", "judged", "flips", f"at most ({100 * use.confidence:g} %)"]
    return [header, *([each.label, f"{each.fitted:,}", f"{each.judged:,}", *_proven(each)] for each in use.classes)]


def _proven(each: JudgedLabel) -> list[str]:
    if each.judged < each.rows_needed:
        return [f"{each.flips:,}", f"takes {counted(each.rows_needed, 'row')}"]
    return [f"{each.flips:,}", f"{each.bound:.2%}" if each.proven else "nothing proven"]


def _audited_paragraph(use: ExitUse) -> list[list[str]]:
    if not use.audited:
        return []
    header = ["label in full", "audited", "would leave", "flips", f"{100 * use.confidence:g} % interval"]
    rows = (
        [each.label, f"{each.rows:,}", f"{each.left:,}", f"{each.flips:,}", percent_interval(each.interval)]
        for each in use.audited
    )
    return [header, *rows]


def _kept_alive(found: Mapping[str, float]) -> list[Bar]:
    total = sum(found.values())
    if not total:
        return []
    order = [name for name in KEPT_ALIVE if name in found]
    names = {name: "1 row" if name == "1" else f"{name} rows" for name in order}
    values = {names[name]: found[name] for name in order}
    return bars(values, {name: f"{abbreviated(value)} ({value / total:.1%})" for name, value in values.items()})

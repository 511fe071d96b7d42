"""Exits for a job: fitted on one half of its calibration rows, judged on the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from prefillcli.exits.calibration_report import ClassFinding, ExitFinding, ExitFindings, TradePoint
from prefillcli.exits.calibration_rows import BoolArray, CalibrationRows, IntArray, halves
from prefillcli.exits.costs import ExitCosts, Work, work_of
from prefillcli.exits.layer_choice import Candidate, candidate_of, choose_layers, without_useless, work_at
from prefillcli.exits.layer_readings import Float64Array
from prefillcli.exits.levels import Level, judge_classes, levels_of_labels, short_of_rows
from prefillcli.exits.policy import ExitLayer, ExitPolicy, lead_of
from prefillcli.stats.audit import rows_for

LEAST_SAVED: Final = 0.01
"""Share of the full read's work that exits must save in each half of the rows, by the cost model."""
_FEWEST = 20  # rows that probes are fitted to
_CURVE: Final = tuple(float(level) for level in np.geomspace(8, 0.25, 21))


@dataclass(frozen=True, eq=False, slots=True)
class ExitCalibration:
    """The exits of a job, None if there are none, and what was found."""

    policy: ExitPolicy | None
    findings: ExitFindings

    @property
    def reason(self) -> str | None:
        """Why there are no exits."""
        return self.findings.reason


class _Judged(NamedTuple):
    """What exits say of the judging half: predicted labels, and the levels at and below which rows leave, both [exits,
    rows]."""

    label: IntArray
    reach: Float64Array


class _Task(NamedTuple):
    """What a calibration is asked."""

    names: tuple[str, ...]
    layers: int
    max_flips: float
    confidence: float
    costs: ExitCosts


def calibrate_exits(
    rows: CalibrationRows,
    *,
    layers: int,
    max_flips: float,
    labels: Sequence[str] = (),
    confidence: float = 0.95,
    seed: int = 0,
    costs: ExitCosts = ExitCosts(),  # noqa: B008 - frozen
) -> ExitCalibration:
    """Fit probes and choose exit layers on one half of the rows, and prove on the other how low thresholds may be.

    The model has so many `layers`. For each class, the rows that the full read answers with one of the `labels`, the
    probability that more than `max_flips` (a share) of the class leave with another label is at most 1 - `confidence`
    (`prefillcli.exits.levels` says why). The halves are drawn with `seed`, each with half of every class. Readings of
    the last layer are not looked at. Raises ValueError unless 0 < max_flips < 1 and 0 < confidence < 1.
    """
    rows_for(max_flips, confidence=confidence)
    task = _Task(
        tuple(labels) or tuple(f"label {number}" for number in range(rows.labels)),
        layers,
        max_flips,
        confidence,
        costs,
    )
    sound = rows.sound()
    fit, judge = halves(rows if sound.all() else rows.chosen(sound), seed)
    candidates = tuple(sorted(layer for layer in rows.readings if layer < layers - 1))
    findings = ExitFindings(
        max_flips=max_flips,
        confidence=confidence,
        seed=seed,
        fitted=len(fit),
        judged=len(judge),
        dropped=int((~sound).sum()),
        candidates=candidates,
        classes=_classes(task, fit, judge, ()),
    )
    short = _short(task, judge)
    if not candidates:
        return _none(findings, "no layer before the last was observed")
    if len(fit) < _FEWEST or len(short) > 1:
        return _none(findings, short[0] if short else f"{len(fit):,} rows are too few to fit probes to")
    found = [candidate_of(fit, layer, seed) for layer in candidates]
    chosen = choose_layers(found, fit, layers, max_flips, confidence, costs)
    if not chosen:
        best = max(found, key=lambda each: each.correlation)
        return _none(findings, short[0] if short else _nothing_saved(best, task))
    return _proven(findings, task, chosen, fit, judge, short)


def _proven(
    findings: ExitFindings,
    task: _Task,
    chosen: list[Candidate],
    fit: CalibrationRows,
    judge: CalibrationRows,
    short: list[str],
) -> ExitCalibration:
    """The calibration with the levels that the judging half proves for the chosen exits."""
    seen = _seen(chosen, judge)
    tested = judge_classes(
        seen.reach, seen.label != judge.truth, judge.truth, judge.labels, task.max_flips, task.confidence
    )
    levels = levels_of_labels(tested)
    findings = findings.model_copy(
        update={"classes": _classes(task, fit, judge, tested), "curve": _curve(task, chosen, seen, judge)}
    )
    kept = without_useless(chosen, levels, fit, task.layers, task.costs)
    expected = work_at(kept, levels, fit, task.layers, task.costs) if kept else None
    work = _work(kept, levels, judge, task) if kept else None
    if expected is None or work is None or max(expected.share, work.share) > 1 - LEAST_SAVED:
        return _none(findings, short[0] if short else _not_proven(task, tested))
    exits = tuple(
        ExitLayer(each.layer, each.probe, tuple(level * each.spread for level in levels), peek)
        for each, peek in zip(kept, expected.peeks, strict=True)
    )
    update = {
        "exits": tuple(
            _exit(each, own, leaving) for each, own, leaving in zip(kept, exits, work.leaving, strict=True)
        ),
        "layers": work.layers,
        "gain": 1 / work.share,
    }
    return ExitCalibration(ExitPolicy(exits), findings.model_copy(update=update))


def _none(findings: ExitFindings, reason: str) -> ExitCalibration:
    return ExitCalibration(None, findings.model_copy(update={"reason": reason}))


def _short(task: _Task, judge: CalibrationRows) -> list[str]:
    """What to say of each class with too few rows."""
    counts = np.bincount(judge.truth, minlength=judge.labels).tolist()
    said = [
        short_of_rows(name, count, len(judge), task.max_flips, task.confidence)
        for name, count in zip(task.names, counts, strict=True)
    ]
    return [each for each in said if each is not None]


def _nothing_saved(best: Candidate, task: _Task) -> str:
    return (
        f"no exit would save work at {task.max_flips:.2%} flips: the best probe, after layer {best.layer + 1} of "
        f"{task.layers}, is off by {best.spread:.2g} in a margin (correlation {best.correlation:.2f})"
    )


def _not_proven(task: _Task, tested: Sequence[Level]) -> str:
    said = ", ".join(
        f"{name!r} {each.flips:,} of {each.rows:,}" for name, each in zip(task.names, tested, strict=True)
    )
    return (
        f"the judged rows prove at most {task.max_flips:.2%} flips only where too few rows leave to save work "
        f"(flips there: {said})"
    )


def _seen(exits: Sequence[Candidate], rows: CalibrationRows) -> _Judged:
    leads = [lead_of(each.probe.logits(rows.readings[each.layer])) for each in exits]
    reach = [lead.ahead / each.spread for lead, each in zip(leads, exits, strict=True)]
    return _Judged(np.stack([lead.label for lead in leads]), np.stack(reach))


def _work(exits: Sequence[Candidate], levels: Sequence[float], judge: CalibrationRows, task: _Task) -> Work:
    """What the judged rows cost at these levels [labels]: rows that nothing was chosen on but the levels."""
    seen = _seen(exits, judge)
    decided = seen.reach >= np.asarray(levels)[seen.label]
    return work_of(decided, [each.layer for each in exits], judge.weights, task.layers, task.costs)


def _classes(
    task: _Task, fit: CalibrationRows, judge: CalibrationRows, tested: Sequence[Level]
) -> tuple[ClassFinding, ...]:
    needed = rows_for(task.max_flips, confidence=task.confidence)
    found = []
    for number, name in enumerate(task.names):
        rows = int((judge.truth == number).sum())
        level = tested[number] if tested else None
        found.append(
            ClassFinding(
                label=name,
                fitted=int((fit.truth == number).sum()),
                judged=rows,
                flips=level.flips if level else 0,
                bound=level.bound if level else 1.0,
                level=level.level if level and math.isfinite(level.level) else None,
                levels_passed=level.passed if level else 0,
                rows_needed=needed,
            )
        )
    return tuple(found)


def _exit(candidate: Candidate, own: ExitLayer, leaving: float) -> ExitFinding:
    return ExitFinding(
        layer=own.layer,
        probe=own.probe.kind,
        correlation=candidate.correlation,
        errors=candidate.errors,
        thresholds=tuple(value if math.isfinite(value) else None for value in own.thresholds),
        peek=own.peek,
        leaving=leaving,
    )


def _curve(task: _Task, exits: Sequence[Candidate], seen: _Judged, judge: CalibrationRows) -> tuple[TradePoint, ...]:
    """What all exits do to the judged rows, level by level."""
    found = []
    for level in _CURVE:
        work = work_of(seen.reach >= level, [each.layer for each in exits], judge.weights, task.layers, task.costs)
        flipped = _flipped(seen, work, judge.truth)
        of_class = [flipped[judge.truth == number] for number in range(judge.labels)]
        found.append(
            TradePoint(
                level=level,
                leaving=float(np.mean(work.left >= 0)),
                gain=1 / work.share,
                flip_rate=float(np.mean(flipped)),
                flip_rates=tuple(float(np.mean(each)) if len(each) else None for each in of_class),
            )
        )
    return tuple(found)


def _flipped(seen: _Judged, work: Work, truth: IntArray) -> BoolArray:
    """Which rows have left with another label than the full read's."""
    answered = seen.label[work.left, np.arange(len(truth))]
    flipped: BoolArray = (work.left >= 0) & (answered != truth)
    return flipped

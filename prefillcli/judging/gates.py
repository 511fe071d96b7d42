"""Gates: a job whose finished output differs from the expected one ends with exit code 3."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, Field, RootModel, ValidationError

from prefillcli.errors import PrefillError, UsageError, counted, without_secrets
from prefillcli.reading.heads.use import HeadUse
from prefillcli.report.finding import Finding
from prefillcli.report.run import RunReport
from prefillcli.report.section import Section
from prefillcli.runtime import log

if TYPE_CHECKING:
    from prefillcli.options.judging import GateOptions


# The comparison of a finished output with expectations: its rows, its label mass, the distribution of its scores.


class Gate(BaseModel):
    """An expectation of the output, and whether it holds."""

    name: Literal["expect_rows", "min_label_mass", "max_drift", "max_shift"]
    limit: str  # as it was given
    value: float | None  # null where there is nothing to judge: the gate then passes
    passed: bool
    text: str


class GateUses(Finding, RootModel[list[Gate]]):
    """The gates of a run."""

    key: ClassVar[str] = "gates"
    place: ClassVar[int] = 7

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on the gates."""
        said = [("gate", f"{'passed' if gate.passed else 'FAILED'}: {gate.text}") for gate in self.root]
        found, drift = Section(lines=said), DriftUse.from_report(report)
        if drift is not None and drift.distance is not None:
            found.metric("score_drift", "Distance of the scores from those of an earlier run.", drift.distance)
        passed: dict[str, float] = {gate.name: float(gate.passed) for gate in self.root}
        if passed:
            found.metric("gate_passed", "1 if the output was as expected, else 0, by gate.", passed, "gate")
        return [found]


class DriftUse(Finding):
    """The scores of an earlier run, with which those of this one are compared.

    The report of this run keeps them: should it fail, the next attempt compares with them, not with the failed scores.
    """

    key: ClassVar[str] = "drift"

    report: str  # where that run's report was
    started: str
    fingerprint: dict[str, str] = Field(default_factory=dict)
    scores: list[int]  # its rows in each bin of `histograms.score`, over all predictions
    distance: float | None = None  # Kolmogorov-Smirnov; null until it is known
    by_chance: float | None = None  # the distance stays below this 19 times out of 20 if nothing has changed
    before: DriftUse | None = None  # the run with which that one was compared


_CRITICAL = 1.358  # the 95 % point of Kolmogorov's distribution


def score_distance(counts: Sequence[int], others: Sequence[int]) -> float | None:
    """Return the two-sample Kolmogorov-Smirnov statistic of binned scores, from 0 to 1.

    That is the largest difference between the two shares of scores below any edge of the bins, which are the same.
    None where a histogram is empty.
    """
    import numpy as np

    rows, other_rows = sum(counts), sum(others)
    if not rows or not other_rows:
        return None
    return float(np.abs(np.cumsum(counts) / rows - np.cumsum(others) / other_rows).max())


def chance_distance(rows: int, other_rows: int) -> float:
    """Return the distance that two samples of one distribution stay below 19 times out of 20, by Kolmogorov's limit.

    Both need many rows; for scores in bins it is an upper bound.
    """
    return min(_CRITICAL * math.sqrt((rows + other_rows) / (rows * other_rows)), 1.0)


def earlier_scores(given: str | None, replaced: str | None) -> DriftUse | None:
    """Return the scores to compare with: those of the report that `--drift-from` names, else of the one that is
    replaced.

    None where there are none. Raises UsageError for a --drift-from that is not the report of a run with scores.
    """
    from prefillcli.report.run import RunReport
    from prefillcli.rows.filesystems import MissingFileError, read_given

    if given is not None:
        again = "name the run.json of an earlier run"
        try:
            found = drift_reference(RunReport.model_validate_json(read_given("--drift-from", given, again)), given)
        except ValidationError:
            raise UsageError(f"--drift-from {given}: it is not the report of a run\n{again}") from None
        if found is None:
            raise UsageError(
                f"--drift-from {given}: its run has no scores that passed its gates\nname another run.json"
            )
        return found
    if replaced is None:
        return None
    try:
        return drift_reference(RunReport.model_validate_json(read_given("--report", replaced)), replaced)
    except MissingFileError:
        return None
    except (PrefillError, ValidationError):
        log.warning(f"--max-drift: {without_secrets(replaced)} is not the report of a run, and is not compared with")
        return None


def drift_reference(report: RunReport, path: str) -> DriftUse | None:
    """Return the scores that a run is compared with, from the report of an earlier one.

    These are its own scores if it was complete and passed its gates, and else those that it was compared with.
    """
    scores = score_histogram(report.histograms.score.counts)
    before, gates = DriftUse.from_report(report), GateUses.from_report(report)
    failed = gates is not None and not all(gate.passed for gate in gates.root)
    if report.status != "complete" or failed or not sum(scores):
        return before
    return DriftUse(
        report=without_secrets(path),
        started=report.started,
        fingerprint=report.fingerprint,
        scores=scores,
        before=None if before is None else before.model_copy(update={"before": None}),
    )


def score_histogram(by_prediction: dict[str, list[int]]) -> list[int]:
    """Return the number of rows in each of the bins of equal width from 0 to 1, over all predictions."""
    from prefillcli.rows.output.tallies import SCORE_BINS

    return [sum(bins) for bins in zip(*by_prediction.values(), strict=True)] or [0] * SCORE_BINS


def judge(options: GateOptions, report: RunReport, max_shift: float | None = None) -> Iterator[Gate]:
    """Yield the verdict of each gate on the rows of a whole output."""
    drift = DriftUse.from_report(report)
    if drift is not None and drift.fingerprint == report.fingerprint and drift.before is not None:
        drift = drift.before  # the report that is replaced is of this very job
        report.add(drift)
    rows, wanted = report.rows.total, options.row_range
    if wanted is not None:
        passed = rows >= wanted[0] and (wanted[1] is None or rows <= wanted[1])
        text = f"the input has {counted(rows, 'row')}; --expect-rows is {options.expect_rows}"
        yield Gate(name="expect_rows", limit=str(options.expect_rows), value=rows, passed=passed, text=text)
    name, mass = _least_mass(report)
    least = options.min_label_mass
    if least is not None:
        text = "no scored row has a label mass"
        if mass is not None:
            text = f"the mean label mass{name} is {mass:.4g}; --min-label-mass is {least:g}"
        yield Gate(
            name="min_label_mass", limit=f"{least:g}", value=mass, passed=mass is None or mass >= least, text=text
        )
    if options.max_drift is not None:
        yield _drift_gate(report, drift, options.max_drift)
    if max_shift is not None:
        yield _shift_gate(HeadUse.from_report(report), max_shift)


def _shift_gate(heads: HeadUse | None, most: float) -> Gate:
    shifts = {} if heads is None else {name: own.shift for name, own in heads.questions.items()}
    known = {name: shift for name, shift in shifts.items() if shift is not None}
    if not known:
        text, value = "no row was read whose features could be compared with those of the heads", None
    else:
        name, value = max(known.items(), key=lambda each: each[1])
        text = (
            f"the mean features{f' of {name}' if name else ''} are {value:.3f} standard deviations from those of the "
            f"head's fit; max_shift is {most:g}"
        )
    return Gate(name="max_shift", limit=f"{most:g}", value=value, passed=value is None or value <= most, text=text)


def _least_mass(report: RunReport) -> tuple[str, float | None]:
    # The lowest mean label mass of a question, and its name, if there are several, for a message.
    masses = {name: own.label_mass for name, own in report.answers.items() if own.label_mass is not None}
    if not masses:
        return "", report.mean_label_mass
    name = min(masses, key=masses.__getitem__)
    return f" of {name}" if len(masses) > 1 else "", masses[name]


def _drift_gate(report: RunReport, drift: DriftUse | None, most: float) -> Gate:
    own = score_histogram(report.histograms.score.counts)
    value = None if drift is None else score_distance(own, drift.scores)
    if drift is None:
        text = "there is no earlier report to compare the scores with"
        log.warning(f"--max-drift: {text}; the next run compares with this one")
    elif value is None:
        text = f"there are no scores to compare with those of {drift.report}"
    else:
        drift.distance, drift.by_chance = value, chance_distance(sum(own), sum(drift.scores))
        text = (
            f"the scores are {value:.4f} from those of {drift.report} ({drift.started}); --max-drift is {most:g}, "
            f"and chance alone makes up to {drift.by_chance:.4f}"
        )
    return Gate(name="max_drift", limit=f"{most:g}", value=value, passed=value is None or value <= most, text=text)


class Gates:
    """The gates of a run, or of a merge."""

    def __init__(self, options: GateOptions, max_shift: float | None = None) -> None:
        self.options, self._max_shift = options, max_shift

    def begin(self, report: RunReport) -> None:
        """Begin a run, whose report knows the path where it will replace that of an earlier run."""
        if self.options.max_drift is not None:
            report.add(earlier_scores(self.options.drift_from, report.report))

    def judge(self, report: RunReport) -> list[str]:
        """Return sentences on how a finished output differs from the expected one; any makes the exit code 3."""
        found = GateUses([*judge(self.options, report, self._max_shift)])
        report.add(found)
        return [gate.text for gate in found.root if not gate.passed]

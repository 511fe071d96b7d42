"""Whether a finished output is what was expected: its rows, its label mass, the distribution of its scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pydantic import ValidationError

from prefillcli.data.given_file import MissingFileError, read_given
from prefillcli.data.output.counts import SCORE_BINS, Counts
from prefillcli.errors import PrefillError, UsageError
from prefillcli.options.groups import GateOptions
from prefillcli.redaction import without_secrets
from prefillcli.report.run import DriftUse, Gate, RunReport
from prefillcli.runtime import log

# How far two distributions of scores are apart, from their histograms.


_CRITICAL = 1.358
"""The 95 % point of Kolmogorov's distribution."""


def score_distance(counts: Sequence[int], others: Sequence[int]) -> float | None:
    """The two-sample Kolmogorov-Smirnov statistic of binned scores, from 0 to 1.

    That is the largest difference between the two shares of scores below any edge of the bins, which are the same.
    None where a histogram is empty.
    """
    rows, other_rows = sum(counts), sum(others)
    if not rows or not other_rows:
        return None
    largest, below, others_below = 0.0, 0, 0
    for count, other in zip(counts, others, strict=True):
        below, others_below = below + count, others_below + other
        largest = max(largest, abs(below / rows - others_below / other_rows))
    return largest


def chance_distance(rows: int, other_rows: int) -> float:
    """The distance that two samples of one distribution stay below 19 times out of 20, by Kolmogorov's limit.

    Both need many rows; for scores in bins it is an upper bound.
    """
    return min(_CRITICAL * math.sqrt((rows + other_rows) / (rows * other_rows)), 1.0)


class GateKeeper:
    """The gates of a run. `path` is where its report goes, over that of an earlier run perhaps.

    The earlier run's scores are remembered in the report of this one: should it fail, the next attempt compares with
    them, not with what has failed. Raises UsageError for a --drift-from that is not the report of a run with scores.
    """

    def __init__(self, options: GateOptions, report: RunReport, path: str | None) -> None:
        self._options = options
        self._report = report
        if options.max_drift is not None:
            report.drift = self._given(options.drift_from) if options.drift_from else _replaced(path)

    def judge(self, counts: Counts, fingerprint: dict[str, str]) -> list[Gate]:
        """What each gate says of the rows of the whole output."""
        drift = self._report.drift
        if drift is not None and drift.fingerprint == fingerprint and drift.before is not None:
            self._report.drift = drift.before  # the report that is replaced is of this very job
        return list(self._judge(counts))

    def _judge(self, counts: Counts) -> Iterator[Gate]:
        options, wanted = self._options, self._options.row_range
        if wanted is not None:
            most = wanted[1]
            passed = counts.total >= wanted[0] and (most is None or counts.total <= most)
            text = f"the input has {counts.total:,} rows; --expect-rows is {options.expect_rows}"
            yield Gate(
                name="expect_rows", limit=str(options.expect_rows), value=counts.total, passed=passed, text=text
            )
        mass, least = counts.tallies.mean_label_mass, options.min_label_mass
        if least is not None:
            text = "no scored row has a label mass"
            if mass is not None:
                text = f"the mean label mass is {mass:.4g}; --min-label-mass is {least:g}"
            yield Gate(
                name="min_label_mass", limit=f"{least:g}", value=mass, passed=mass is None or mass >= least, text=text
            )
        if options.max_drift is not None:
            yield self._drift_gate(counts, options.max_drift)

    def _drift_gate(self, counts: Counts, most: float) -> Gate:
        drift = self._report.drift
        own = score_histogram(counts.tallies.scores)
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

    @staticmethod
    def _given(path: str) -> DriftUse:
        again = "name the run.json of an earlier run"
        try:
            found = drift_reference(RunReport.model_validate_json(read_given("--drift-from", path, again)), path)
        except ValidationError:
            raise UsageError(f"--drift-from {path}: it is not the report of a run\n{again}") from None
        if found is None:
            raise UsageError(
                f"--drift-from {path}: its run has no scores that passed its gates\nname another run.json"
            )
        return found


def _replaced(path: str | None) -> DriftUse | None:
    """The scores to compare with, by the report that a run replaces; None where there are none."""
    if path is None:
        return None
    try:
        return drift_reference(RunReport.model_validate_json(read_given("--report", path)), path)
    except MissingFileError:
        return None
    except (PrefillError, ValidationError):
        log.warning(f"--max-drift: {without_secrets(path)} is not the report of a run, and is not compared with")
        return None


def drift_reference(report: RunReport, path: str) -> DriftUse | None:
    """What a run's scores are compared with, by the report of an earlier one.

    These are its own scores if it was complete and passed its gates, and else those that it was compared with.
    """
    scores = score_histogram(report.histograms.score.counts)
    if report.status != "complete" or not all(gate.passed for gate in report.gates) or not sum(scores):
        return report.drift
    return DriftUse(
        report=without_secrets(path),
        started=report.started,
        fingerprint=report.fingerprint,
        scores=scores,
        before=None if report.drift is None else report.drift.model_copy(update={"before": None}),
    )


def score_histogram(by_prediction: dict[str, list[int]]) -> list[int]:
    """Rows in each of the bins of equal width from 0 to 1, whatever they are predicted to be."""
    return [sum(bins) for bins in zip(*by_prediction.values(), strict=True)] or [0] * SCORE_BINS

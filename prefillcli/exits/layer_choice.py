"""Which layers rows may leave after: two-level scheduling (SpecEE, section 5) for rows that are all known before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from prefillcli.exits.calibration_rows import CalibrationRows, IntArray
from prefillcli.exits.costs import ExitCosts, Work, work_of
from prefillcli.exits.layer_readings import Float64Array
from prefillcli.exits.levels import judge_classes, levels_of_labels
from prefillcli.exits.policy import lead_of
from prefillcli.exits.probe_fits import KNOWS, fit_best, margin_error
from prefillcli.exits.probes import Probe, relative

MOST_EXITS: Final = 6
WORTH: Final = 0.003  # share of the full read's work that one more exit must save


class Candidate(NamedTuple):
    """A layer that may become an exit: its probe, and what rows show of it that were left out when it was fitted.

    `errors` are those of `fit_best`, `correlation` is that of predicted and final margins. It `knows` something if its
    error is small enough beside what the mean answer is off by. `spread` is the root of the
    mean square of what a predicted lead is off by. `label` [rows] is what each row is predicted to be, and `reach`
    [rows] the lead in units of the spread: a row leaves at this level and below.
    """

    layer: int
    probe: Probe
    errors: dict[str, float]
    correlation: float
    knows: bool
    spread: float
    label: IntArray
    reach: Float64Array


def candidate_of(fit: CalibrationRows, layer: int, seed: int) -> Candidate:
    """The best probe for a layer. `fit` are rows to fit it to."""
    (probe, held_out), errors = fit_best(fit.readings[layer], fit.final, seed)
    final, lead = relative(fit.final), lead_of(held_out)
    two = np.take_along_axis(final, np.argsort(held_out, axis=1)[:, -2:], axis=1)
    spread = max(float(np.sqrt(np.mean((lead.ahead - two[:, 1] + two[:, 0]) ** 2))), 1e-9)
    knows = errors[probe.kind] <= KNOWS * margin_error(final - final.mean(axis=0))
    correlation = _correlation(held_out, final)
    return Candidate(layer, probe, errors, correlation, knows, spread, lead.label, lead.ahead / spread)


def work_at(
    exits: Sequence[Candidate], levels: Sequence[float], fit: CalibrationRows, layers: int, costs: ExitCosts
) -> Work:
    """What the rows cost that the exits were fitted to, each predicted as if it had been left out, at `levels`
    [labels]."""
    at = np.asarray(levels)
    decided = np.stack([each.reach >= at[each.label] for each in exits])
    return work_of(decided, [each.layer for each in exits], fit.weights, layers, costs)


def choose_layers(
    found: Sequence[Candidate],
    fit: CalibrationRows,
    layers: int,
    max_flips: float,
    confidence: float,
    costs: ExitCosts,
) -> list[Candidate]:
    """The exits that save most after their own cost, in the order of the layers; none if nothing saves enough.

    The levels are those that left-out rows of the fitting half allow, by the test that will judge the other half. A
    layer whose probe knows nothing is no exit: a few rows could leave it by tossing a coin, and not flip too many.
    Greedy: the best layer to add, until none saves enough more.
    """
    chosen: list[Candidate] = []
    least = 1.0
    while len(chosen) < MOST_EXITS:
        taken = {each.layer for each in chosen}
        tries = [_in_order([*chosen, each]) for each in found if each.knows and each.layer not in taken]
        shares = [
            work_at(exits, _allowed(exits, fit, max_flips, confidence), fit, layers, costs).share for exits in tries
        ]
        if not shares or min(shares) > least - WORTH:
            break
        least = min(shares)
        chosen = tries[shares.index(least)]
    return chosen


def without_useless(
    chosen: Sequence[Candidate], levels: Sequence[float], fit: CalibrationRows, layers: int, costs: ExitCosts
) -> list[Candidate]:
    """The exits without those that cost more than they save at these levels: fewer exits never flip more rows."""
    kept = list(chosen)
    least = work_at(kept, levels, fit, layers, costs).share
    while kept:
        tries = [[other for other in kept if other is not each] for each in kept]
        shares = [work_at(exits, levels, fit, layers, costs).share if exits else 1.0 for exits in tries]
        if min(shares) > least:
            break
        least = min(shares)
        kept = tries[shares.index(least)]
    return kept


def _in_order(exits: Sequence[Candidate]) -> list[Candidate]:
    return sorted(exits, key=lambda each: each.layer)


def _allowed(
    exits: Sequence[Candidate], fit: CalibrationRows, max_flips: float, confidence: float
) -> tuple[float, ...]:
    reach, wrong = np.stack([each.reach for each in exits]), np.stack([each.label != fit.truth for each in exits])
    return levels_of_labels(judge_classes(reach, wrong, fit.truth, fit.labels, max_flips, confidence))


def _correlation(predicted: Float64Array, final: Float64Array) -> float:
    """Of the margins between the two labels that are likeliest over all rows; 0 where one of them does not vary."""
    two = np.argsort(final.mean(axis=0))[-2:]
    margins = [each[:, two[1]] - each[:, two[0]] for each in (predicted, final)]
    if min(float(np.std(each)) for each in margins) == 0:
        return 0.0
    return float(np.corrcoef(margins[0], margins[1])[0, 1])

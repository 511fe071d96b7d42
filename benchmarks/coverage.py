"""`python -m benchmarks.coverage [TIMES]`: how often the intervals of an evaluation hold the true value.

The true values are those of two million rows; each time a few of such rows are evaluated. Scores are as sure as they
should be (1) or by these factors too sure of themselves, on the logit's scale.
"""

from __future__ import annotations

import sys

import numpy as np
from scipy.special import expit

from prefillcli.stats.evaluation import Estimate, Evaluation, evaluate

FACTORS = (1.0, 1.2, 2.0)
ROWS = (100, 400)
FIGURES = (
    *("accuracy", "auc", "average_precision", "brier", "log_loss"),
    *("calibration_error", "calibration_error_equal_mass"),
)
WHOLE = 2_000_000


def simulated(rows: int, seed: int, factor: float) -> Evaluation:
    """The evaluation of so many rows."""
    draws = np.random.default_rng(seed)
    logits = 1.5 * draws.normal(size=rows)
    truth = draws.random(rows) < expit(logits)
    return evaluate(expit(factor * logits), truth)


def holds(estimate: Estimate, true: float) -> bool:
    """Whether the interval has the true value in it."""
    return estimate.interval is not None and estimate.interval[0] <= true <= estimate.interval[1]


def main() -> None:
    """Print a table, a row for each factor and number of rows."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    print(f"| factor | rows | true ECE | {' | '.join(FIGURES)} |\n| --- | --- | --- |{' --- |' * len(FIGURES)}")
    for factor in FACTORS:
        whole = simulated(WHOLE, 0, factor)
        true = {name: getattr(whole, name).value for name in FIGURES}
        for rows in ROWS:
            found = [simulated(rows, seed, factor) for seed in range(1, times + 1)]
            shares = [np.mean([holds(getattr(each, name), true[name]) for each in found]) for name in FIGURES]
            texts = " | ".join(f"{100 * share:.0f} %" for share in shares)
            print(f"| {factor:g} | {rows} | {true['calibration_error']:.4f} | {texts} |", flush=True)


if __name__ == "__main__":
    main()

"""Rows scored both for less and in full: how often compression or an early exit flips an answer, and how certainly.

Intervals and bounds are exact (Clopper and Pearson, Biometrika 26, 1934): they hold for any number of rows, even
without a flip. All probabilities and rates are shares (0 to 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from prefillcli.stats.evaluation import auc, check_confidence, exact_interval, exact_upper

_THRESHOLD = 0.5  # of two labels, the one above it is the answer


class Audit(BaseModel):
    """What the audited rows show. None is a number that they do not tell."""

    model_config = ConfigDict(frozen=True)

    rows: int = 0
    flips: int = 0  # rows whose answer differs
    flip_rate: float | None = None
    interval: tuple[float, float] | None = None  # of the flip rate, two-sided
    confidence: float = 0.95
    mean_difference: float | None = None  # of the scores, absolute
    max_difference: float | None = None
    auc_compressed: float | None = None
    auc_full: float | None = None
    truth_rows: int = 0  # rows with a known right answer


def audit_of(
    pairs: Sequence[tuple[float, float, bool | None]],
    flipped: Sequence[bool] | None = None,
    *,
    confidence: float = 0.95,
) -> Audit:
    """The audit of rows, each (compressed score, full score, whether the positive label is right or None if unknown).

    `flipped` says which rows flip. Without it those flip whose scores lie on different sides of 0.5, as for two
    labels. Raises ValueError if `flipped` and `pairs` differ in length.
    """
    if flipped is None:
        flipped = [(compressed >= _THRESHOLD) != (full >= _THRESHOLD) for compressed, full, _ in pairs]
    elif len(flipped) != len(pairs):
        raise ValueError(f"{len(flipped)} flips for {len(pairs)} rows")
    if not pairs:
        return Audit(confidence=confidence)
    rows, flips = len(pairs), sum(map(bool, flipped))
    differences = [abs(compressed - full) for compressed, full, _ in pairs]
    known = [(compressed, full, truth) for compressed, full, truth in pairs if truth is not None]
    truths = [truth for _, _, truth in known]
    return Audit(
        rows=rows,
        flips=flips,
        flip_rate=flips / rows,
        interval=flip_interval(flips, rows, confidence),
        confidence=confidence,
        mean_difference=math.fsum(differences) / rows,
        max_difference=max(differences),
        auc_compressed=auc([compressed for compressed, _, _ in known], truths),
        auc_full=auc([full for _, full, _ in known], truths),
        truth_rows=len(known),
    )


def audit_lines(audit: Audit) -> list[tuple[str, str]]:
    """The lines that an audit adds to the table of a run: name and text."""
    if audit.flip_rate is None or audit.interval is None:
        return [("audit", "no row was scored in full as well")]
    low, high = (_percent(bound) for bound in audit.interval)
    lines = [
        (
            "audit",
            f"{_counted(audit.rows, 'row')} also in full: {_counted(audit.flips, 'flip')} "
            f"({_percent(audit.flip_rate)} %, {100 * audit.confidence:g} % interval {low}-{high} %), "
            f"score difference {audit.mean_difference:.2g} mean, {audit.max_difference:.2g} largest",
        )
    ]
    if audit.auc_compressed is not None and audit.auc_full is not None:
        known = f"{_counted(audit.truth_rows, 'row')} with a known answer"
        lines.append(("audit AUC", f"{audit.auc_compressed:.3f} as scored, {audit.auc_full:.3f} in full ({known})"))
    elif audit.truth_rows:
        lines.append(("audit AUC", f"none: the known answers ({audit.truth_rows:,}) are all the same"))
    return lines


def flip_interval(flips: int, rows: int, confidence: float = 0.95) -> tuple[float, float]:
    """The two-sided Clopper-Pearson interval of the flip rate; each tail has half of 1 - `confidence`.

    Raises ValueError unless 0 <= flips <= rows and 0 < confidence < 1.
    """
    _check(flips, rows, confidence)
    return exact_interval(flips, rows, confidence)


def flip_bound(flips: int, rows: int, confidence: float = 0.95) -> float:
    """The one-sided exact upper bound of the flip rate; 1 without rows. Raises ValueError like `flip_interval`."""
    _check(flips, rows, confidence)
    return exact_upper(flips, rows, 1 - confidence)


def rows_for(max_flips: float, flips: int = 0, confidence: float = 0.95) -> int:
    """The fewest rows among which `flips` flips still prove a flip rate of at most `max_flips` (a share).

    Raises ValueError unless 0 < max_flips < 1, flips >= 0 and 0 < confidence < 1.
    """
    if not 0 < max_flips < 1:
        raise ValueError(f"a flip rate between 0 and 1 can be proven, not {max_flips}")
    _check(flips, flips, confidence)
    short, enough = flips, max(2 * flips, 1)  # if all rows flip they prove nothing
    while flip_bound(flips, enough, confidence) > max_flips:
        short, enough = enough, 2 * enough
    while enough - short > 1:  # the bound falls with every row
        middle = (short + enough) // 2
        if flip_bound(flips, middle, confidence) > max_flips:
            short = middle
        else:
            enough = middle
    return enough


def _check(flips: int, rows: int, confidence: float) -> None:
    if not 0 <= flips <= rows:
        raise ValueError(f"{flips} flips of {rows} rows")
    check_confidence(confidence)


def _percent(share: float) -> str:
    # A share in percent with one decimal, or more where that would show 0.0.
    percent = 100 * share
    return f"{percent:.{max(1, -math.floor(math.log10(percent)))}f}" if percent > 0 else "0.0"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

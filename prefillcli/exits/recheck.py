"""Whether exits that were proven on an earlier night still hold: a test of some hundred fresh rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prefillcli.exits.calibration_rows import BoolArray, CalibrationRows
from prefillcli.exits.policy import ExitPolicy, lead_of
from prefillcli.stats.drift import FALSE_ALARMS, chance_of, detectable_rate

_POWER = 0.8


@dataclass(frozen=True, slots=True)
class ClassRecheck:
    """The fresh rows that the full read answers with `label`.

    `chance` is the probability of as many flips or more if the flip rate is the one that was allowed. A flip rate of
    `detectable` is found in four of five checks with so many rows; None without rows.
    """

    label: str
    rows: int
    flips: int
    chance: float
    detectable: float | None


@dataclass(frozen=True, slots=True)
class ExitRecheck:
    """Whether fresh rows contradict what was proven, and what they could have found.

    `reason` says what contradicts it, None if nothing does. `leaving` is the share of the rows that leave.
    """

    ok: bool
    reason: str | None
    leaving: float
    classes: tuple[ClassRecheck, ...]
    text: str
    """What the check can and cannot find: a sentence."""


def recheck_exits(
    policy: ExitPolicy, rows: CalibrationRows, max_flips: float, labels: Sequence[str] = ()
) -> ExitRecheck:
    """Apply a policy to fresh rows that were read in full, with readings of its layers.

    Some hundred rows cannot prove again that at most `max_flips` flip. So this is a test of the contrary: in each
    class, whether there are more flips than that rate explains, by an exact binomial test. The probability that it
    refuses exits which hold in all classes is at most 5 %; the classes share it. Raises KeyError if a layer of the
    policy was not observed.
    """
    names = tuple(labels) or tuple(f"label {number}" for number in range(rows.labels))
    left, flipped = _outcome(policy, rows)
    alarm = FALSE_ALARMS / len(names)
    found = []
    for number, name in enumerate(names):
        own = rows.truth == number
        count, flips = int(own.sum()), int(flipped[own].sum())
        detectable = detectable_rate(count, max_flips, alarm, _POWER) if count else None
        found.append(ClassRecheck(name, count, flips, chance_of(flips, count, max_flips), detectable))
    bad = [each for each in found if each.chance < alarm]
    said = ", ".join(
        f"{each.flips:,} of {each.rows:,} rows of {each.label!r} flip (chance {each.chance:.1g})" for each in bad
    )
    reason = f"{said}: more than a flip rate of {max_flips:.2%} explains" if bad else None
    return ExitRecheck(not bad, reason, float(np.mean(left)) if len(left) else 0.0, tuple(found), _power(found))


def _outcome(policy: ExitPolicy, rows: CalibrationRows) -> tuple[BoolArray, BoolArray]:
    """Which rows leave, and which of these with another label than the full read's."""
    left = np.zeros(len(rows), dtype=np.bool_)
    flipped = np.zeros(len(rows), dtype=np.bool_)
    for layer in policy.layers:
        found = policy.decide(layer, rows.readings[layer])
        going = found.decided & ~left
        flipped |= going & (lead_of(found.logprobs).label != rows.truth)
        left |= going
    return left, flipped


def _power(found: Sequence[ClassRecheck]) -> str:
    can = ", ".join(
        f"{each.detectable:.1%} among {each.rows:,} rows of {each.label!r}" for each in found if each.detectable
    )
    none = ", ".join(repr(each.label) for each in found if not each.rows)
    text = f"four of five such checks would find a flip rate of {can}" if can else "there are no rows to check"
    return f"{text}; nothing is known of {none}" if none and can else text

"""Whether flips have become more than was proven: tests that may be asked again and again, and tests of a few rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

FALSE_ALARMS = 0.05
_WIDTH = 2  # the rates that drift is looked for at spread over so many times the allowed one


def drift_alarm(flips: int, rows: int, max_flips: float, false_alarms: float = FALSE_ALARMS) -> bool:
    """Whether `flips` of the `rows` seen so far show a flip rate above `max_flips`.

    It may be asked after every row of a job: if the rate is never above `max_flips`, the probability that it ever says
    yes is at most `false_alarms`. It depends on nothing but the counts. Raises as `drift_evidence`.
    """
    return drift_evidence(flips, rows, max_flips) >= -math.log(false_alarms)


def drifted_classes(
    counts: Sequence[tuple[int, int]], max_flips: float, false_alarms: float = FALSE_ALARMS
) -> tuple[int, ...]:
    """The numbers of the classes whose (flips, rows) so far raise the alarm.

    `false_alarms` is shared among the classes: it is the probability that any of them ever does in a job without
    drift.
    """
    own = false_alarms / max(len(counts), 1)
    return tuple(number for number, (flips, rows) in enumerate(counts) if drift_alarm(flips, rows, max_flips, own))


def drift_evidence(flips: int, rows: int, max_flips: float) -> float:
    """The logarithm of a test martingale against flip rates of at most `max_flips`.

    It is the mixture of the likelihood ratios of all higher rates to `max_flips`, weighted by a beta distribution that
    is cut off there (Robbins, Annals of Mathematical Statistics 41, 1970). Each ratio, and so their mixture, is a
    supermartingale for every rate that is allowed, and starts at 1. So by Ville's inequality (1939) the probability
    that it ever reaches 1 / a is at most a. It also holds where the rate changes from row to row, as long as it stays
    below `max_flips`. Raises ValueError unless 0 <= flips <= rows and 0 < max_flips < 1.
    """
    from scipy.special import betaln

    if not 0 <= flips <= rows:
        raise ValueError(f"{flips} flips of {rows} rows")
    if not 0 < max_flips < 1:
        raise ValueError(f"a flip rate is between 0 and 1, not {max_flips}")
    first, second = 1.0, max((1 - max_flips) / (_WIDTH * max_flips), 1.0)
    after = (first + flips, second + rows - flips)
    mixed = float(betaln(*after) - betaln(first, second)) + _log_above(*after, max_flips)
    fixed = flips * math.log(max_flips) + (rows - flips) * math.log1p(-max_flips)
    return mixed - _log_above(first, second, max_flips) - fixed


def chance_of(flips: int, rows: int, rate: float) -> float:
    """The probability that as many of the `rows` flip, or more, at a flip `rate`: an exact binomial test."""
    from scipy.special import betainc

    return 1.0 if flips == 0 else float(betainc(flips, rows - flips + 1, rate))


def detectable_rate(rows: int, rate: float, false_alarms: float, power: float) -> float:
    """The smallest flip rate that so many rows tell from `rate` with the probability `power`.

    They do if `chance_of` their flips is below `false_alarms`.
    """
    from scipy.special import betaincinv

    flips = next((flips for flips in range(rows + 1) if chance_of(flips, rows, rate) < false_alarms), None)
    return 1.0 if flips is None else float(betaincinv(flips, rows - flips + 1, power))


def _log_above(first: float, second: float, rate: float) -> float:
    """The logarithm of the probability that a beta distribution gives to rates above `rate`."""
    from scipy.special import betaincc

    above = float(betaincc(first, second, rate))
    return math.log(above) if above > 0 else -math.inf

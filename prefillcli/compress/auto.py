"""`--keep auto`: the smallest keep rate that a sample of the rows allows.

The rates are tested from the safest, the largest, down to the first that fails: fixed-sequence testing (Angelopoulos
et al., Learn then Test, 2021, arXiv 2110.01052, section 4.2). So the probability that the chosen rate flips more
answers than allowed is at most 5 %, although up to five rates are tested on the same rows at 5 % each: to err, the
first rate in this order that is too small must pass, and that is one test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefillcli.compress.answers import answer
from prefillcli.compress.base import ImportanceEstimate, Tick
from prefillcli.compress.compressor import Compressor
from prefillcli.compress.request import Request
from prefillcli.data.rows import Prompt
from prefillcli.engines.base import LabelTokens, PlanEngine
from prefillcli.stats.audit import flip_bound, rows_for

RATES = (0.7, 0.5, 0.3, 0.2, 0.1)
"""The keep rates that are tested, in this order, until one fails."""
ALLOWED_FLIPS = 1  # the sample is so large that a rate with one flip passes


@dataclass(frozen=True, slots=True)
class Trial:
    """A keep rate, tried on the sample. `bound`: with 95 % confidence the flip rate is lower (one-sided, exact)."""

    keep: float
    rows: int
    flips: int
    bound: float


@dataclass(frozen=True, slots=True)
class KeepChoice:
    """The chosen rate, 1 if the first one tested failed, and the trials."""

    keep: float
    trials: tuple[Trial, ...]
    rows_needed: int
    """The fewest rows that can prove a rate: without any flip."""


def sample_rows(max_flips: float) -> int:
    """How many rows the sample has, to prove a flip rate of at most `max_flips`."""
    return rows_for(max_flips, ALLOWED_FLIPS)


def choose_keep(
    compressor: Compressor,
    engine: PlanEngine,
    prompts: Sequence[Prompt],
    estimates: Sequence[ImportanceEstimate],
    chosen: Sequence[int],
    labels: Sequence[LabelTokens],
    max_flips: float,
    tick: Tick = lambda tokens: None,
) -> KeepChoice:
    """Try keep rates on the `chosen` ones of the `prompts`, compressed together with all the others.

    A row flips if its likeliest label is not that of the prompt in full. A rate passes if its flips are so few that
    they prove a flip rate of at most `max_flips`. The last rate that passes before the first that fails is chosen;
    one that compresses too few of these rows to fail or pass is left out.
    """
    needed = rows_for(max_flips)
    trials: list[Trial] = []
    passed = 1.0
    if len(chosen) < needed:
        return KeepChoice(1.0, (), needed)
    full = answer(engine, [Request(prompts[number]) for number in chosen], labels, tick).argmax(axis=1)
    for keep in RATES:
        requests = compressor.select(prompts, compressor.keeps(prompts, keep), estimates)
        tried = [number for number in chosen if requests[number].compressed]
        own = dict(zip(chosen, full.tolist(), strict=True))
        found = answer(engine, [requests[number] for number in tried], labels, tick).argmax(axis=1) if tried else []
        flips = sum(int(label != own[number]) for label, number in zip(found, tried, strict=True))
        trials.append(Trial(keep, len(tried), flips, flip_bound(flips, len(tried))))
        if len(tried) < needed:
            continue  # too few rows are worth compressing so little: this shows nothing
        if trials[-1].bound > max_flips:
            break
        passed = keep
    return KeepChoice(passed, tuple(trials), needed)

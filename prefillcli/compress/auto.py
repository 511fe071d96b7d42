"""`--keep auto`: the smallest keep rate that a sample of the rows allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prefillcli.compress.answers import answer
from prefillcli.compress.compressor import Compressor
from prefillcli.compress.draft import Estimate
from prefillcli.compress.request import SPECPREFILL, Request
from prefillcli.data.rows import Prompt
from prefillcli.engines.base import Engine, LabelTokens
from prefillcli.stats.audit import flip_bound, rows_for

RATES = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Keep rates that are tried, in this order."""
ALLOWED_FLIPS = 1  # the sample is large enough for a rate to pass with so many


@dataclass(frozen=True, slots=True)
class Trial:
    """A keep rate on the sample. `bound`: the flip rate is below it with 95 % confidence (one-sided, exact)."""

    keep: float
    rows: int
    flips: int
    bound: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen rate, 1 if none passed, and what was tried."""

    keep: float
    trials: tuple[Trial, ...]
    rows_needed: int
    """Fewest rows that can prove the rate at all."""


def sample_rows(max_flips: float) -> int:
    """Rows of the sample."""
    return rows_for(max_flips, ALLOWED_FLIPS)


def choose_keep(
    compressor: Compressor,
    engine: Engine,
    prompts: Sequence[Prompt],
    estimates: Sequence[Estimate],
    chosen: Sequence[int],
    labels: Sequence[LabelTokens],
    max_flips: float,
    tick: Callable[[float], None] = lambda tokens: None,
) -> Choice:
    """Try keep rates on the `chosen` of the `prompts`, which are compressed together with all the others.

    A row flips if its likeliest label is another one than in full. The first rate whose flips are few enough to prove
    a flip rate of at most `max_flips` is taken.
    """
    needed = rows_for(max_flips)
    trials: list[Trial] = []
    if len(chosen) < needed:
        return Choice(1.0, (), needed)
    full = answer(engine, [Request(prompts[number]) for number in chosen], labels, tick).argmax(axis=1)
    for keep in RATES:
        requests = compressor.select(prompts, compressor.keeps(prompts, keep), estimates)
        tried = [number for number in chosen if requests[number].method == SPECPREFILL]
        own = dict(zip(chosen, full.tolist(), strict=True))
        found = answer(engine, [requests[number] for number in tried], labels, tick).argmax(axis=1) if tried else []
        flips = sum(int(label != own[number]) for label, number in zip(found, tried, strict=True))
        trials.append(Trial(keep, len(tried), flips, flip_bound(flips, len(tried))))
        if trials[-1].bound <= max_flips:
            return Choice(keep, tuple(trials), needed)
    return Choice(1.0, tuple(trials), needed)

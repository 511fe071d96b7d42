"""How long prefills take: a model fitted to measured packs."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import BaseModel, Field

from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan

#: What a fit of completion times must reach before it predicts anything; docs/profile.md gives the reasons.
LEAST_PEARSON = 0.9
MOST_MEAN_ERROR = 0.25
MOST_ERROR = 0.75


class CompletionPoint(BaseModel):
    """A prompt of `input_tokens`, of which the K,V of `cached_tokens` were held from the pack before."""

    input_tokens: int
    cached_tokens: int
    seconds: float  # least of the rounds
    predicted: float  # by the linear fit
    heldout: bool = False  # not used for the fits


class CompletionModel(BaseModel):
    """Seconds of prefills.

    Of one prompt, linear as in PrefillOnly 6.3: `base + per_input * input + per_cached * cached`, and its proxy, which
    takes seconds to be proportional to `input - cached` but for a constant. Of a whole plan: `per_pack`, `per_token`
    and `per_read` (a prompt's own last layer, head and calls) and `per_pair` (a query that sees a key in one layer).
    """

    base: float
    per_input: float
    per_cached: float
    pearson: float  # of the linear fit with the measured seconds
    pearson_proxy: float  # of input - cached with the measured seconds
    heldout_error: float | None = None  # mean relative error of the linear fit on points it has not seen
    heldout_error_proxy: float | None = None
    heldout_error_plan: float | None = None
    heldout_worst_plan: float | None = None  # the largest such error; None in older files
    rounds: int | None = None  # in which every pack was timed; None in older files
    disturbance: float | None = None  # median over the packs of the slowest round over the fastest

    per_pack: float
    per_token: float
    per_read: float
    per_pair: float
    windows: list[tuple[int | None, int]]  # sliding window (or none), and how many layers attend through it
    points: list[CompletionPoint] = Field(default_factory=list)

    def weakness(self) -> str | None:
        """Why nothing may be predicted with this fit; None for one that may be used."""
        found = []
        if not self.pearson >= LEAST_PEARSON:
            found.append(f"the linear fit has Pearson r {self.pearson:.2f}, and {LEAST_PEARSON} is the least")
        for error, most, kind in (
            (self.heldout_error_plan, MOST_MEAN_ERROR, "mean"),
            (self.heldout_worst_plan, MOST_ERROR, "largest"),
        ):
            if error is not None and not error <= most:
                found.append(f"on packs left out its {kind} error is {error:.0%}, and {most:.0%} is the most")
        return "; ".join(found) or None

    def seconds(self, plan: Plan) -> float:
        """Predicted seconds of the model over `plan`, reading and writing not counted."""
        return sum(self.pack_seconds(pack) for pack in plan.packs)

    def pack_seconds(self, pack: Pack) -> float:
        """Predicted seconds of one pack."""
        one, tokens, reads, pairs = features(pack, self.windows)
        return self.per_pack * one + self.per_token * tokens + self.per_read * reads + self.per_pair * pairs

    def request_seconds(self, input_tokens: int, cached_tokens: int = 0) -> float:
        """Predicted seconds of a pack of one prompt, of which `cached_tokens` need not be computed."""
        new = input_tokens - cached_tokens
        pairs = sum(layers * _pairs(cached_tokens, new, window) for window, layers in self.windows)
        return self.per_pack + self.per_token * new + self.per_read + self.per_pair * pairs


def features(pack: Pack, windows: Iterable[tuple[int | None, int]]) -> tuple[float, float, float, float]:
    """What a pack's seconds are made of: 1, tokens computed, prompts' ends, and (query, key) pairs over all layers."""
    nodes = [
        (start, end - begin)
        for start, begin, end in zip(pack.starts, pack.offsets[:-1], pack.offsets[1:], strict=True)
    ]
    pairs = sum(layers * sum(_pairs(start, length, window) for start, length in nodes) for window, layers in windows)
    return 1.0, float(len(pack.tokens)), float(len(pack.reads)), pairs


def _pairs(start: int, length: int, window: int | None) -> float:
    """Keys seen by `length` queries behind `start` other tokens of their path, themselves included."""
    return _triangle(start + length, window) - _triangle(start, window)


def _triangle(tokens: int, window: int | None) -> float:
    ramp = min(tokens, window) if window else tokens
    return ramp * (ramp + 1) / 2 + (tokens - ramp) * ramp

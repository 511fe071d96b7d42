"""What is proven about exits, as exit profiles and reports hold it."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import BaseModel, ConfigDict

# The rows whose flips are bounded: those of each label, or all rows together.
FlipsOf = Literal["each", "all"]
ALL_ROWS: Final = "all rows"  # the name of the only class where the flips of all rows are bounded together


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class JudgedLabel(_Finding):
    """Learning rows that get one label when they are read in full, or all rows, in the form of reports."""

    label: str
    fitted: int  # rows that the probes were fitted to
    judged: int  # other rows, which the thresholds were tested on
    flips: int  # of the judged ones, at the thresholds in use
    bound: float  # exact upper bound of the flip rate, at the report's confidence; 1 where nothing is proven
    rows_needed: int  # judged rows that prove the bound if none flips

    @property
    def proven(self) -> bool:
        """True if anything is proven of the label."""
        return self.judged >= self.rows_needed and self.bound < 1


class ClassFinding(JudgedLabel):
    """The same rows with the test of their cautions."""

    caution: float | None  # the least caution that passed; None: none did, and no other label may leave early
    cautions_passed: int  # of those that were tried


class ExitFinding(_Finding):
    """An exit layer, numbered from 0, and the quality of its probe.

    `correlation` is that of predicted and final margins of left-out rows, and `errors` are the roots of the mean
    squared error of a margin by kind of probe. `thresholds` are by label, None where rows with that label stay.
    `leaving` is the share of the judged rows that leave here. Without this exit, the others would save less by a share
    of the work in full that `saves` has.
    """

    layer: int
    probe: str
    correlation: float
    errors: dict[str, float]
    thresholds: tuple[float | None, ...]
    peek: bool
    leaving: float
    saves: float | None = None


class GainPoint(_Finding):
    """An estimate of the judged rows' exits at one caution for all labels. It proves nothing."""

    leaving: float  # share of the rows
    flip_rate: float
    gain: float


class TradePoint(GainPoint):
    """The same with the caution, and the flip rates by label that the full read gives; None without such rows."""

    caution: float
    flip_rates: tuple[float | None, ...]


class ExitFindings(_Finding):
    """All that was proven about exits.

    `reason` explains why there are no exits. `layers` is the mean number of layers that a token of a judged row goes
    through, and `gain` the cost of reading in full divided by the cost with exits, for tokens that a row does not
    share.
    """

    max_flips: float
    confidence: float
    seed: int
    fitted: int
    judged: int
    dropped: int = 0  # rows with values that are not finite
    classes: tuple[ClassFinding, ...] = ()
    candidates: tuple[int, ...] = ()  # layers from which exits were chosen
    exits: tuple[ExitFinding, ...] = ()
    layers: float | None = None
    gain: float | None = None
    curve: tuple[TradePoint, ...] = ()
    reason: str | None = None

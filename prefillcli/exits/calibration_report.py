"""What a calibration of exits found, as reports and profiles hold it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Finding(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ClassFinding(_Finding):
    """The rows that the model, read in full, answers with one label, and how often exits answer them otherwise.

    `flips` of the `judged` rows flip at the tested `level`, and `bound` is the exact upper bound of the flip rate.
    `level` is None if no level passed: then no other label may leave early. `levels_passed` of those that were tried
    passed. It takes `rows_needed` judged rows to prove anything.
    """

    label: str
    fitted: int
    judged: int
    flips: int
    bound: float
    level: float | None
    levels_passed: int
    rows_needed: int


class ExitFinding(_Finding):
    """An exit layer, numbered from 0, and what its probe is worth.

    `correlation` is that of predicted and final margins of left-out rows, and `errors` are the roots of the mean
    squared error of a margin by kind of probe. `thresholds` are by label, None where rows with that label stay.
    `leaving` is the share of the judged rows that leave here.
    """

    layer: int
    probe: str
    correlation: float
    errors: dict[str, float]
    thresholds: tuple[float | None, ...]
    peek: bool
    leaving: float


class TradePoint(_Finding):
    """What the judged rows would have done at one level for all labels: this is an estimate and proves nothing.

    `flip_rates` are by label that the full read gives, None without such rows.
    """

    level: float
    leaving: float
    gain: float
    flip_rate: float
    flip_rates: tuple[float | None, ...]


class ExitFindings(_Finding):
    """All that a calibration of exits found.

    `reason` says why there are no exits. `layers` is the mean number of layers that a token of a judged row goes
    through, and `gain` what reading in full costs over what exits cost, for tokens that a row does not share.
    """

    max_flips: float
    confidence: float
    seed: int
    fitted: int
    judged: int
    dropped: int = 0  # rows with values that are not finite
    classes: tuple[ClassFinding, ...] = ()
    candidates: tuple[int, ...] = ()  # layers that exits were chosen among
    exits: tuple[ExitFinding, ...] = ()
    layers: float | None = None
    gain: float | None = None
    curve: tuple[TradePoint, ...] = ()
    reason: str | None = None

"""The evaluation of a run, as `run.json` holds it: the figures, what the truth column holds, and rows to look at."""

from __future__ import annotations

from pydantic import BaseModel, Field

from prefillcli.stats.evaluation import Evaluation
from prefillcli.stats.intervals import Estimate
from prefillcli.stats.reliability import ReliabilityBin


class TruthValue(BaseModel):
    """A value of the truth column, and what it was taken for."""

    value: str  # as JSON; untrusted
    label: str | None  # None: for no label
    rows: int


class EvaluatedRow(BaseModel):
    """A row with a right answer. Id and text are untrusted."""

    row: int | None  # None where rows have ids
    id: str | None
    score: float
    truth: str  # a label
    prediction: str
    probability: float  # of the prediction
    text: str | None = None  # the end of what the model read, where it was asked for


class CalibratedFigures(BaseModel):
    """The figures that a calibration changes, of the calibrated probabilities."""

    accuracy: Estimate
    brier: Estimate
    log_loss: Estimate
    calibration_error: Estimate
    calibration_error_equal_mass: Estimate
    reliability: list[ReliabilityBin]

    @classmethod
    def of(cls, found: Evaluation) -> CalibratedFigures:
        """Those of an evaluation of calibrated probabilities."""
        return cls(**{name: getattr(found, name) for name in cls.model_fields})


class RunEvaluation(Evaluation):
    """An evaluation with the rows behind it."""

    truth: str  # the column
    calibrated: CalibratedFigures | None = None  # with --calibration or --calibrate-with; all else is of the scores
    truth_values: list[TruthValue] = Field(default_factory=list)  # the most frequent ones
    surest_wrong: list[EvaluatedRow] = Field(default_factory=list)  # the most probable predictions that are wrong
    near_threshold: list[EvaluatedRow] = Field(default_factory=list)  # the closest calls
    threshold: float | None = None  # to which those are near; None where there are more than two labels

"""A calibration: from label log-probabilities to probabilities that hold as often as they say. It needs numpy alone.

It reads the log-probabilities as the model gives them, so `--temperature` has no part in it. Within two labels no
calibration changes the order of rows: a row with a higher score never gets a lower probability.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from prefillcli.stats.probabilities import LEAST_LOG, Float64Array, log_shares_of

SCHEMA_VERSION: Final = 1

Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rising = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TemperatureScaling(_Frozen):
    """The label log-probabilities are divided by `temperature`."""

    method: Literal["temperature"] = "temperature"
    temperature: Positive

    def apply(self, log_shares: Float64Array) -> Float64Array:
        """Probabilities [rows, labels] of `log_shares_of` [rows, labels]."""
        return softmax(log_shares / self.temperature)


class PlattScaling(_Frozen):
    """The label log-probabilities are multiplied by `slope`, and each label's `biases` [labels] is added.

    Of two labels it is the logistic function of the score's logit, as in Platt (1999).
    """

    method: Literal["platt"] = "platt"
    slope: Rising
    biases: tuple[Finite, ...]

    def apply(self, log_shares: Float64Array) -> Float64Array:
        """Probabilities [rows, labels] of `log_shares_of` [rows, labels]."""
        return softmax(self.slope * log_shares + np.array(self.biases))


class ContentFreeScaling(_Frozen):
    """Each label's probability is divided by what it is after a prompt without content: W = diag(p_cf)^-1.

    `content_free` [labels] are the logarithms of these (Zhao et al., Calibrate Before Use, 2021).
    """

    method: Literal["contextual"] = "contextual"
    content_free: tuple[Finite, ...]

    def apply(self, log_shares: Float64Array) -> Float64Array:
        """Probabilities [rows, labels] of `log_shares_of` [rows, labels]."""
        return softmax(log_shares - np.array(self.content_free))


class IsotonicSteps(_Frozen):
    """The score is looked up among `scores`, ascending, and `probabilities`, which never fall; linear in between.

    For two labels.
    """

    method: Literal["isotonic"] = "isotonic"
    scores: tuple[Share, ...] = Field(min_length=1)
    probabilities: tuple[Share, ...]

    @model_validator(mode="after")
    def _check(self) -> IsotonicSteps:
        if len(self.scores) != len(self.probabilities):
            raise ValueError("as many scores as probabilities are needed")
        if np.any(np.diff(self.scores) <= 0) or np.any(np.diff(self.probabilities) < 0):
            raise ValueError("scores must rise, and probabilities must not fall")
        return self

    def apply(self, log_shares: Float64Array) -> Float64Array:
        """Probabilities [rows, 2] of `log_shares_of` [rows, 2]."""
        between = np.interp(np.exp(log_shares[..., 0]), self.scores, self.probabilities)
        # Between two scores that are hardly apart the slope overflows.
        first = np.clip(between, self.probabilities[0], self.probabilities[-1])
        return np.stack([first, 1 - first], axis=-1)


Scaling = Annotated[
    TemperatureScaling | PlattScaling | ContentFreeScaling | IsotonicSteps, Field(discriminator="method")
]


class HeldOut(_Frozen):
    """How good probabilities are on rows that they were not fitted on: the mean over the folds."""

    log_loss: float
    log_loss_spread: float
    """Standard deviation of the log loss over the folds."""
    brier: float
    ece: float
    """Expected calibration error, of all held-out rows together."""
    accuracy: float
    auc: float | None


class FittedOn(_Frozen):
    """What a calibration was fitted on."""

    scores: str
    """The output of `prefill score`, as it was named."""
    truth: str
    """The column with the right answers."""
    rows: int
    rows_by_label: dict[str, int]
    left_out: dict[str, int] = {}
    """Rows that were not used, by reason."""
    job: dict[str, str] = {}
    """The fingerprint of the scoring job; empty where the scores do not say it."""


class CalibrationUse(_Frozen):
    """How a run has made its probabilities."""

    method: str
    rows: int | None = None
    """That the calibration was fitted on; None where it needs no right answers."""
    content_free: dict[str, float] | None = None
    """Of each label, the probability after the prompts without content; None for other methods."""

    def sentence(self) -> str:
        """It in a line."""
        if self.content_free is None:
            return self.method if self.rows is None else f"{self.method}, fitted on {self.rows:,} rows"
        shares = ", ".join(f"{label} {share:.4f}" for label, share in self.content_free.items())
        return f"{self.method}; without content: {shares}"


class Calibration(_Frozen):
    """The content of `calibration.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    labels: tuple[str, ...] = Field(min_length=2)
    """The positive one first."""
    scaling: Scaling
    fitted_on: FittedOn | None = None
    """None where it needs no right answers."""
    held_out: dict[str, HeldOut] = {}
    """By method, what cross-validation found; `none` are the scores as they are."""
    folds: int | None = None
    seed: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        scaling, labels = self.scaling, len(self.labels)
        counts = {"biases": labels, "content_free": labels}
        for name, count in counts.items():
            if len(getattr(scaling, name, range(count))) != count:
                raise ValueError(f"{count} {name} are needed, one for each label")
        if isinstance(scaling, IsotonicSteps) and labels != 2:
            raise ValueError("isotonic is for two labels")
        return self

    def probabilities(self, logprobs: Float64Array) -> Float64Array:
        """Probability of each label among the labels, float64 [rows, labels]; `logprobs` [rows, labels] are finite or
        -inf, and not all of a row are -inf."""
        return self.scaling.apply(log_shares_of(logprobs))

    def use(self) -> CalibrationUse:
        """What a run tells of it."""
        scaling, fitted = self.scaling, self.fitted_on
        free = None
        if isinstance(scaling, ContentFreeScaling):
            free = dict(zip(self.labels, np.exp(scaling.content_free).tolist(), strict=True))
        return CalibrationUse(method=scaling.method, rows=fitted and fitted.rows, content_free=free)

    def digest(self) -> str:
        """Digest of what decides on the probabilities."""
        text = json.dumps([list(self.labels), self.scaling.model_dump(mode="json")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def softmax(logits: Float64Array) -> Float64Array:
    """Probabilities that are proportional to exp(logits), float64 [..., labels]."""
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: Float64Array = weights / weights.sum(axis=-1, keepdims=True)
    return shares


def content_free_calibration(labels: Sequence[str], logprobs: Float64Array) -> Calibration:
    """The contextual calibration of prompts without content, whose label log-probabilities are `logprobs`
    [prompts, labels]: the mean of their probabilities counts."""
    mean = np.exp(log_shares_of(logprobs)).mean(axis=0)
    logarithms = np.log(np.maximum(mean, np.exp(LEAST_LOG)))
    return Calibration(labels=tuple(labels), scaling=ContentFreeScaling(content_free=tuple(logarithms.tolist())))

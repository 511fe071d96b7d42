"""A calibration: from label log-probabilities to probabilities that hold as often as they say. It needs numpy alone.

It reads the log-probabilities as the model gives them, so `--temperature` has no part in it. Within two labels no
calibration changes the order of rows: a row with a higher score never gets a lower probability."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from prefillcli.stats.evaluation import evaluate, evaluate_labels, log_losses
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
    log_loss_spread: float  # standard deviation of the log loss over the folds
    brier: float
    ece: float  # expected calibration error, of all held-out rows together
    accuracy: float
    auc: float | None


class FittedOn(_Frozen):
    """What a calibration was fitted on."""

    scores: str  # the output of `prefill score`, as it was named
    truth: str  # the column with the right answers
    rows: int
    rows_by_label: dict[str, int]
    left_out: dict[str, int] = {}  # rows that were not used, by reason
    job: dict[str, str] = {}  # the fingerprint of the scoring job; empty where the scores do not say it


class CalibrationUse(_Frozen):
    """How a run has made its probabilities."""

    method: str
    rows: int | None = None  # that the calibration was fitted on; None where it needs no right answers
    # Of each label, the probability after the prompts without content; None for other methods.
    content_free: dict[str, float] | None = None

    def sentence(self) -> str:
        """It in a line."""
        if self.content_free is None:
            return self.method if self.rows is None else f"{self.method}, fitted on {self.rows:,} rows"
        shares = ", ".join(f"{label} {share:.4f}" for label, share in self.content_free.items())
        return f"{self.method}; without content: {shares}"


class Calibration(_Frozen):
    """The content of `calibration.json`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    labels: tuple[str, ...] = Field(min_length=2)  # the positive one first
    scaling: Scaling
    fitted_on: FittedOn | None = None  # none where it needs no right answers
    # By method, what cross-validation found; `none` are the scores as they are.
    held_out: dict[str, HeldOut] = {}
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


Method = Literal["temperature", "platt", "isotonic"]
METHODS: tuple[Method, ...] = ("temperature", "platt", "isotonic")
_TEMPERATURES = (0.01, 100.0)

IntArray = npt.NDArray[np.int64]


def methods_for(labels: int) -> tuple[Method, ...]:
    """The methods that so many labels have."""
    return METHODS if labels == 2 else METHODS[:2]


def fit_scaling(method: Method, log_shares: Float64Array, truth: IntArray) -> Scaling:
    """The calibration of rows with `log_shares_of` [rows, labels], whose right labels are `truth` [rows]."""
    if method == "temperature":
        return fit_temperature(log_shares, truth)
    return fit_platt(log_shares, truth) if method == "platt" else fit_isotonic(log_shares, truth)


def fit_temperature(log_shares: Float64Array, truth: IntArray) -> TemperatureScaling:
    """The temperature with the smallest log loss, between 0.01 and 100 (Guo et al. 2017)."""
    from scipy.optimize import minimize_scalar

    rows = np.arange(len(truth))

    def loss(log_temperature: float) -> float:
        scaled = log_shares / np.exp(log_temperature)
        top = scaled.max(axis=1)
        sums = top + np.log(np.exp(scaled - top[:, None]).sum(axis=1))
        return float(np.mean(sums - scaled[rows, truth]))

    low, high = np.log(_TEMPERATURES)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return TemperatureScaling(temperature=float(np.exp(found.x)))


def fit_platt(log_shares: Float64Array, truth: IntArray) -> PlattScaling:
    """A slope of 0 or more and a bias for each label with the smallest log loss.

    The right answers are smoothed as Platt (1999) does: of n rows of a label, n + 1 of n + labels have it. So
    no answer is certain, and the fit of labels that the scores tell apart is finite.
    """
    from scipy.optimize import minimize

    labels = log_shares.shape[1]
    wanted = _smoothed(truth, labels)
    width = max(float(log_shares.std()), 1e-6)  # the search goes better where slope and biases are of one size
    shares = log_shares / width

    def loss(parameters: Float64Array) -> tuple[float, Float64Array]:
        logits = parameters[0] * shares + np.append(parameters[1:], 0.0)
        found = softmax(logits)
        top = logits.max(axis=1, keepdims=True)
        sums = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
        gap = found - wanted
        gradient = np.concatenate([[(gap * shares).sum(axis=1).mean()], gap.mean(axis=0)[:-1]])
        return float(np.mean(sums - (wanted * logits).sum(axis=1))), gradient

    bounds = [(0.0, None)] + [(None, None)] * (labels - 1)
    options: dict[str, Any] = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 1000}
    start = np.zeros(labels)
    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return PlattScaling(slope=float(found.x[0]) / width, biases=(*found.x[1:].tolist(), 0.0))


def fit_isotonic(log_shares: Float64Array, truth: IntArray) -> IsotonicSteps:
    """The probabilities that rise with the score and have the smallest squared error.

    None is nearer to 0 or 1 than 1 / (rows + 2): so many rows show no more. Raises ValueError for other than two
    labels.
    """
    from sklearn.isotonic import IsotonicRegression

    if log_shares.shape[1] != 2:
        raise ValueError("isotonic is for two labels")
    margin = 1 / (len(truth) + 2)
    regression = IsotonicRegression(y_min=margin, y_max=1 - margin, out_of_bounds="clip")
    regression.fit(np.exp(log_shares[:, 0]), truth == 0)
    return IsotonicSteps(
        scores=tuple(map(float, regression.X_thresholds_)),
        probabilities=tuple(map(float, np.maximum.accumulate(regression.y_thresholds_))),
    )


def _smoothed(truth: IntArray, labels: int) -> Float64Array:
    # What each row is to have of each label [rows, labels].
    counts = np.bincount(truth, minlength=labels)
    wanted = np.repeat(1 / (counts[truth] + labels)[:, None], labels, axis=1)
    wanted[np.arange(len(truth)), truth] = (counts[truth] + 1) / (counts[truth] + labels)
    return wanted


def cross_validate(
    log_shares: Float64Array,
    truth: IntArray,
    before: Float64Array,
    labels: Sequence[str],
    *,
    folds: int,
    seed: int,
) -> dict[str, HeldOut]:
    """What each method makes of rows that it was not fitted on; `none` are the probabilities `before` [rows, labels].

    The folds have equal shares of every label. Raises ValueError if a label is right in fewer rows than there are
    folds.
    """
    from sklearn.model_selection import StratifiedKFold

    splitter = StratifiedKFold(n_splits=folds, shuffle=True, random_state=seed)
    parts = list(splitter.split(log_shares, truth))
    held = [rest for _, rest in parts]
    found = {"none": _held_out(before, truth, labels, held)}
    for method in methods_for(len(labels)):
        probabilities = np.empty_like(log_shares)
        for fitted, rest in parts:
            scaling = fit_scaling(method, log_shares[fitted], truth[fitted])
            probabilities[rest] = scaling.apply(log_shares[rest])
        found[method] = _held_out(probabilities, truth, labels, held)
    return found


def best_method(found: Mapping[str, HeldOut]) -> Method:
    """The method with the smallest log loss on held-out rows; of equal ones the first."""
    return min((method for method in METHODS if method in found), key=lambda method: found[method].log_loss)


def _held_out(
    probabilities: Float64Array, truth: IntArray, labels: Sequence[str], held: Sequence[IntArray]
) -> HeldOut:
    said = probabilities[np.arange(len(truth)), truth]
    losses = [float(log_losses(said[rest], np.ones(len(rest), np.bool_)).mean()) for rest in held]
    figures = figures_of(probabilities, truth, labels)
    return HeldOut(log_loss=float(np.mean(losses)), log_loss_spread=float(np.std(losses, ddof=1)), **figures)


def figures_of(probabilities: Float64Array, truth: IntArray, labels: Sequence[str]) -> dict[str, Any]:
    """Brier score, expected calibration error, accuracy and AUC of probabilities [rows, labels]."""
    if len(labels) == 2:
        found = evaluate(np.ascontiguousarray(probabilities[:, 0]), truth == 0, labels)
    else:
        found = evaluate_labels(probabilities, truth, labels)
    return {
        "brier": found.brier.value,
        "ece": found.calibration_error.value,
        "accuracy": found.accuracy.value,
        "auc": found.auc.value,
    }

"""A calibration: it turns label log-probabilities into probabilities that match how often the labels are right.

It reads the log-probabilities as the model gives them, so `--temperature` has no part in it. With two labels no
calibration reverses the order of rows: a row with a higher score never gets a lower probability."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError, model_validator

from prefillcli.core.request import Request, Tick, answer_requests
from prefillcli.core.roles import Judge
from prefillcli.errors import PrefillError, UsageError, counted, without_secrets
from prefillcli.judging.truth import Mistakes
from prefillcli.models.files import names_classifier, read_json, sample_model
from prefillcli.options.judging import ProbabilityOptions
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.labels import parse_labels
from prefillcli.report.finding import Finding
from prefillcli.report.section import Section
from prefillcli.rows.output import ANSWER
from prefillcli.rows.output.columns import Probabilities, added
from prefillcli.rows.output.store import read_sealed
from prefillcli.rows.records import Prompt, RowBatch
from prefillcli.runtime import log
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.evaluation import evaluate, evaluate_labels, log_losses
from prefillcli.stats.labels import LEAST_LOG, label_probabilities, log_shares_of, mean_log_shares

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.core.run import Reached
    from prefillcli.core.scorer import ModelScorer
    from prefillcli.engines.base import PlanEngine
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.schema import OutputSchema

SCHEMA_VERSION: Final = 1

Share = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rising = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


# Each scaling has `apply`: from `log_shares_of` [rows, labels] to probabilities [rows, labels].


class TemperatureScaling(_Frozen):
    """The label log-probabilities are divided by `temperature`."""

    method: Literal["temperature"] = "temperature"
    temperature: Positive

    def apply(self, log_shares: Float64Array) -> Float64Array:
        return label_probabilities(log_shares, self.temperature)


class PlattScaling(_Frozen):
    """The label log-probabilities are multiplied by `slope`, and each label's `biases` [labels] is added.

    With two labels it is a logistic function of the score's logit, as in Platt (1999).
    """

    method: Literal["platt"] = "platt"
    slope: Rising
    biases: tuple[Finite, ...]

    def apply(self, log_shares: Float64Array) -> Float64Array:
        return label_probabilities(self.slope * log_shares + np.array(self.biases))


class PriorScaling(_Frozen):
    """Each label's probability is divided by the one that the model gives it whatever the row says.

    `prior` [labels] are the logarithms of these. `contextual`: after prompts without content, W = diag(p_cf)^-1 (Zhao
    et al., Calibrate Before Use, 2021). `batch`: by the mean of the rows' log-probabilities (Zhou et al., Batch
    Calibration, 2023).
    """

    method: Literal["contextual", "batch"]
    prior: tuple[Finite, ...]

    def apply(self, log_shares: Float64Array) -> Float64Array:
        return label_probabilities(log_shares - np.array(self.prior))


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
        between = np.interp(np.exp(log_shares[..., 0]), self.scores, self.probabilities)
        # Between two scores that hardly differ the slope overflows.
        first = np.clip(between, self.probabilities[0], self.probabilities[-1])
        return np.stack([first, 1 - first], axis=-1)


Scaling = Annotated[TemperatureScaling | PlattScaling | PriorScaling | IsotonicSteps, Field(discriminator="method")]


class HeldOut(_Frozen):
    """The quality of probabilities on rows that they were not fitted on: the mean over the folds."""

    log_loss: float
    log_loss_spread: float  # standard deviation of the log loss over the folds
    brier: float
    ece: float  # expected calibration error, of all held-out rows together
    accuracy: float
    auc: float | None
    rows: int = 0


class FittedOn(_Frozen):
    """The rows that a calibration was fitted on."""

    scores: str  # the output of `prefill score`, as the user named it
    truth: str | None  # the column with the right answers; None where there are none
    rows: int
    rows_by_label: dict[str, int]  # by their right answer; for a prior by the model's own
    left_out: dict[str, int] = {}  # rows that were not used, by reason
    mistakes: Mistakes | None = None  # right answers that are no label
    unknown_ids: Mistakes | None = None  # ids in the file with the right answers that are of no row
    job: dict[str, str] = {}  # the fingerprint of the scoring job; empty where it is unknown


class CalibrationUse(_Frozen):
    """The calibration that the probabilities of a question come from."""

    method: str
    rows: int | None = None  # rows that the calibration was fitted on; None for prompts without content
    # The probability of each label that is divided out: after prompts without content, or in the mean of the rows;
    # None for other methods.
    prior: dict[str, float] | None = None

    def sentence(self, question: str) -> str:
        """Its description in one line, with the name of its question if it has one."""
        text = self.method if self.rows is None else f"{self.method}, fitted on {counted(self.rows, 'row')}"
        text += f", of the question {question}" if question else ""
        if self.prior is None:
            return text
        shares = ", ".join(f"{label} {share:.4f}" for label, share in self.prior.items())
        return f"{text}; {'without content' if self.method == 'contextual' else 'prior'}: {shares}"


class CalibrationUses(Finding, RootModel[dict[str, CalibrationUse]]):
    """The calibrations of a job, by question."""

    key: ClassVar[str] = "calibrations"
    place: ClassVar[int] = 8

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the section on the probabilities of a run."""
        lines = [("probability", use.sentence(report.told_apart(name))) for name, use in self.root.items()]
        return [Section(lines=lines)] if lines else []


class Calibration(_Frozen):
    """A calibration of one question: the content of `calibration.json`, or of `CalibrationSet`."""

    schema_version: Literal[1] = SCHEMA_VERSION
    labels: tuple[str, ...] = Field(min_length=2)  # the positive one first
    question: str = ""  # the question that it is for, if there are several
    scaling: Scaling
    fitted_on: FittedOn | None = None  # None for prompts without content
    # The findings of cross-validation by method; `none` are the scores as they are.
    held_out: dict[str, HeldOut] = {}
    folds: int | None = None
    seed: int | None = None

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        scaling, labels = self.scaling, len(self.labels)
        for name in ("biases", "prior"):
            if len(getattr(scaling, name, self.labels)) != labels:
                raise ValueError(f"{labels} {name} are needed, one for each label")
        if isinstance(scaling, IsotonicSteps) and labels != 2:
            raise ValueError("isotonic is for two labels")
        return self

    def probabilities(self, logprobs: Float64Array) -> Float64Array:
        """Return the probability of each label among the labels, float64 [rows, labels]; `logprobs` [rows, labels] are
        finite or -inf, and not all of a row are -inf."""
        return self.scaling.apply(log_shares_of(logprobs))

    def use(self) -> CalibrationUse:
        """Return its entry in the report of a run."""
        fitted = self.fitted_on
        return CalibrationUse(method=self.scaling.method, rows=fitted and fitted.rows, prior=self.prior)

    @property
    def prior(self) -> dict[str, float] | None:
        """The probability of each label that is divided out; None for other methods."""
        if not isinstance(self.scaling, PriorScaling):
            return None
        return dict(zip(self.labels, np.exp(self.scaling.prior).tolist(), strict=True))

    def digest(self) -> str:
        """Return the digest of everything that changes the probabilities."""
        named = [self.question] if self.question else []
        text = json.dumps([list(self.labels), self.scaling.model_dump(mode="json"), *named], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class CalibrationSet(_Frozen):
    """The content of a `calibration.json` of several questions."""

    schema_version: Literal[1] = SCHEMA_VERSION
    calibrations: tuple[Calibration, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> CalibrationSet:
        if len({each.question for each in self.calibrations}) < len(self.calibrations):
            raise ValueError("a question has two calibrations")
        return self


def content_free_calibration(labels: Sequence[str], logprobs: Float64Array, question: str = "") -> Calibration:
    """Return the contextual calibration by prompts without content, with label log-probabilities `logprobs` [prompts,
    labels]. It takes the mean of their probabilities."""
    mean = np.exp(log_shares_of(logprobs)).mean(axis=0)
    logarithms = np.log(np.maximum(mean, np.exp(LEAST_LOG)))
    scaling = PriorScaling(method="contextual", prior=tuple(logarithms.tolist()))
    return Calibration(labels=tuple(labels), question=question, scaling=scaling)


Method = Literal["temperature", "platt", "isotonic", "batch"]
METHODS: tuple[Method, ...] = ("temperature", "platt", "isotonic")  # that need right answers
_TEMPERATURES = (0.01, 100.0)


def methods_for(labels: int) -> tuple[Method, ...]:
    """Return the methods that fit right answers among this number of labels."""
    return METHODS if labels == 2 else METHODS[:2]


def fit_scaling(method: Method, log_shares: Float64Array, truth: Int64Array) -> Scaling:
    """Fit a calibration to rows with `log_shares_of` [rows, labels], whose right labels are `truth` [rows]."""
    if method == "batch":
        return fit_prior(log_shares)
    if method == "temperature":
        return fit_temperature(log_shares, truth)
    return fit_platt(log_shares, truth) if method == "platt" else fit_isotonic(log_shares, truth)


# The logarithm of the smallest share that a column with the probability of one of two labels tells from 0. A row whose
# share is smaller, or 0, would otherwise weigh more in a mean than hundreds of others.
_LEAST_TOLD = float(np.log(np.finfo(np.float64).epsneg))


def fit_prior(log_shares: Float64Array) -> PriorScaling:
    """Return the prior that labels have in rows with `log_shares_of` [rows, labels]: the mean of these (Zhou et al.
    2023), which is scaled to probabilities that add up to 1. It needs no right answers."""
    means = np.maximum(log_shares, _LEAST_TOLD).mean(axis=0)
    return PriorScaling(method="batch", prior=tuple(log_shares_of(means).tolist()))


def fit_temperature(log_shares: Float64Array, truth: Int64Array) -> TemperatureScaling:
    """Fit the temperature with the smallest log loss, between 0.01 and 100 (Guo et al. 2017)."""
    from scipy.optimize import minimize_scalar
    from scipy.special import logsumexp

    rows = np.arange(len(truth))

    def loss(log_temperature: float) -> float:
        scaled = log_shares / np.exp(log_temperature)
        return float(np.mean(logsumexp(scaled, axis=1) - scaled[rows, truth]))

    low, high = np.log(_TEMPERATURES)
    found = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-9})
    return TemperatureScaling(temperature=float(np.exp(found.x)))


def fit_platt(log_shares: Float64Array, truth: Int64Array) -> PlattScaling:
    """Fit a slope of 0 or more and a bias for each label with the smallest log loss.

    The right answers are smoothed as in Platt (1999): of n rows with a label, each has it with probability (n + 1) /
    (n + labels), and every other label with 1 / (n + labels). So no answer is certain, and the fit stays finite even
    if the scores separate the labels.
    """
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    labels = log_shares.shape[1]
    counts = np.bincount(truth, minlength=labels)[truth]  # rows with the label of each row
    wanted = np.repeat(1 / (counts + labels)[:, None], labels, axis=1)  # of each label [rows, labels]
    wanted[np.arange(len(truth)), truth] = (counts + 1) / (counts + labels)
    width = max(float(log_shares.std()), 1e-6)  # the search converges better if slope and biases are of one size
    shares = log_shares / width

    def loss(parameters: Float64Array) -> tuple[float, Float64Array]:
        logits = parameters[0] * shares + np.append(parameters[1:], 0.0)
        gap = (
            label_probabilities(logits) - wanted
        )  # the gradient of the loss by the logits, as the targets of a row add up to 1
        gradient = np.concatenate([[(gap * shares).sum(axis=1).mean()], gap.mean(axis=0)[:-1]])
        return float(np.mean(logsumexp(logits, axis=1) - (wanted * logits).sum(axis=1))), gradient

    bounds = [(0.0, None)] + [(None, None)] * (labels - 1)
    options: dict[str, Any] = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 1000}
    found = minimize(loss, np.zeros(labels), jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return PlattScaling(slope=float(found.x[0]) / width, biases=(*found.x[1:].tolist(), 0.0))


def fit_isotonic(log_shares: Float64Array, truth: Int64Array) -> IsotonicSteps:
    """Fit the probabilities that rise with the score and have the smallest squared error.

    None is nearer to 0 or 1 than 1 / (rows + 2): this many rows prove no more. Raises ValueError for other than two
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


def cross_validate(
    log_shares: Float64Array,
    truth: Int64Array,
    before: Float64Array,
    labels: Sequence[str],
    *,
    methods: Sequence[Method],
    folds: int,
    seed: int,
) -> dict[str, HeldOut]:
    """Measure the quality of each method on rows that it was not fitted on; `none` is that of `before` [rows, labels].

    The folds have equal shares of every label that is right in as many rows as there are folds. Raises ValueError if
    there are fewer rows than folds.
    """
    from sklearn.model_selection import KFold, StratifiedKFold

    kind = StratifiedKFold if np.bincount(truth, minlength=len(labels)).min() >= folds else KFold
    parts = list(kind(n_splits=folds, shuffle=True, random_state=seed).split(log_shares, truth))
    held = [rest for _, rest in parts]
    found = {"none": _held_out(before, truth, labels, held)}
    for method in methods:
        probabilities = np.empty_like(log_shares)
        for fitted, rest in parts:
            probabilities[rest] = fit_scaling(method, log_shares[fitted], truth[fitted]).apply(log_shares[rest])
        found[method] = _held_out(probabilities, truth, labels, held)
    return found


def best_method(found: Mapping[str, HeldOut]) -> Method:
    """Return the method with the smallest log loss on held-out rows; the first of equal ones."""
    return min((method for method in METHODS if method in found), key=lambda method: found[method].log_loss)


def _held_out(
    probabilities: Float64Array, truth: Int64Array, labels: Sequence[str], held: Sequence[Int64Array]
) -> HeldOut:
    said = probabilities[np.arange(len(truth)), truth]
    losses = [float(log_losses(said[rest], np.ones(len(rest), np.bool_)).mean()) for rest in held]
    if len(labels) == 2:
        found = evaluate(np.ascontiguousarray(probabilities[:, 0]), truth == 0, labels)
    else:
        found = evaluate_labels(probabilities, truth, labels)
    return HeldOut(
        log_loss=float(np.mean(losses)),
        log_loss_spread=float(np.std(losses, ddof=1)),
        brier=found.brier.value,
        ece=found.calibration_error.value,
        accuracy=found.accuracy.value,
        auc=found.auc.value,
        rows=len(truth),
    )


# The file of a calibration: read before anything loads, and checked against the job that uses it.


# Parts of a fingerprint in which a job must equal the one whose scores the calibration was fitted on, by their names
# in messages.
REFUSED = {
    "model": "model",
    "adapters": "set of adapters",
    "tokenizer": "tokenizer",
    "prompt": "prompt settings",
    "labels": "label spellings",
    "questions": "set of questions",
    "head": "head",
}
# Parts that change scores less; a warning names those that differ.
WARNED = {"draft": "draft", "compression": "compression", "engine": "engine"}


def read_calibrations(path: str, labels: Mapping[str, Sequence[str]] | None) -> tuple[Calibration, ...]:
    """Read the calibration at a local path or URL, or those of several questions, for a job with these labels of each
    question, whose name is empty if there is only one; None if they are not known yet.

    Raises UsageError for any other file.
    """
    again = "make it with prefill calibrate"
    content, _ = read_sealed("--calibration", path, again)  # a calibration written by hand has no seal
    try:
        if _has_several(content):
            found = CalibrationSet.model_validate_json(content).calibrations
        else:
            found = (Calibration.model_validate_json(content),)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["loc"] == ("schema_version",):
            reason = f"it is of another version of prefill (schema_version is not {SCHEMA_VERSION})"
        else:
            reason = f"it is not a calibration: {where + ': ' if where else ''}{first['msg']}"
        raise UsageError(f"--calibration {path}: {reason}\n{again}") from None
    if labels is not None:
        for calibration in found:
            _require_asked(path, calibration, labels)
    return found


def _has_several(content: bytes) -> bool:
    # Whether this JSON, or something else, is that of calibrations of several questions.
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(given, dict) and "calibrations" in given


def _require_asked(path: str, calibration: Calibration, labels: Mapping[str, Sequence[str]]) -> None:
    # Raise UsageError for a calibration of other questions than those with these labels, or of other labels.
    if (own := labels.get(calibration.question)) is None:
        what = f"the question {calibration.question}" if calibration.question else "scores of one question about a row"
        raise UsageError(
            f"--calibration {path}: it is for {what}, which this job does not ask\n"
            "fit one with prefill calibrate, where --truth NAME=COLUMN names one of several"
        )
    if calibration.labels != tuple(own):
        raise UsageError(
            f"--calibration {path}: it is for the labels {', '.join(calibration.labels)}, not {', '.join(own)}\n"
            "give the --labels that it was fitted with, in their order, or fit one for these"
        )


def check_calibration(settings: JobSettings) -> None:
    """Raise UsageError, before a model is opened, where the labels and the file of `--calibration` certainly do not
    fit.

    A model with a classification head may bring its own labels.
    """
    typed = [label.name for label in parse_labels(settings.answers.labels, least=1)]
    if settings.probabilities.calibration is not None:
        own = settings.lm.model_head != "vocabulary" and not settings.answers.labels_given and _may_classify(settings)
        several = settings.asking.questions is not None
        read_calibrations(settings.probabilities.calibration, None if own or several else {"": typed})


def _may_classify(settings: JobSettings) -> bool:
    # Whether a model may have a classification head, as far as that is known before it is opened.
    folder = Path(settings.lm.model or sample_model()).expanduser()
    if settings.lm.model_head != "auto" or not folder.is_dir():
        return settings.lm.model_head != "auto" or not folder.exists()  # a name on the hub
    config = folder / "config.json"
    return config.is_file() and names_classifier(read_json(config))


def require_fitting(option: str, path: str, job: Mapping[str, str], fingerprint: Mapping[str, str]) -> None:
    """Raise UsageError if the file of an option was fitted on scores of a `job` with another model, prompt or labels.

    Warns on stderr if those scores were compressed in another way, or if the file does not name their job.
    """
    shown = without_secrets(path)
    if not job:
        log.warning(
            f"{option} {shown}: it does not name the model whose scores it was fitted on; "
            "calibrate what prefill score wrote, not a copy of its rows"
        )
        return
    other = [name for part, name in REFUSED.items() if job.get(part) != fingerprint.get(part)]
    if other:
        raise UsageError(
            f"{option} {shown}: it was fitted on scores with another {' and another '.join(other)}\n"
            "score labelled rows with the options of this job, and fit one on them with prefill calibrate"
        )
    doubtful = [name for part, name in WARNED.items() if job.get(part) != fingerprint.get(part)]
    if doubtful:
        log.warning(
            f"{option} {shown}: it was fitted on scores with another "
            f"{' and another '.join(doubtful)}; the probabilities may be off"
        )


# Contextual calibration: the job's questions about meaningless text instead of the row's own.


OPTION = "--calibrate-with"


def content_free_prompts(inputs: Inputs) -> list[Prompt]:
    """Return the prompts of each text of `--calibrate-with`, as of a row.

    The text takes the place of the columns that hold text, among those that prompts are made of, or of those in
    `calibrate_columns`. All other columns must have one value in the first rows, up to 2,048; it stays. Raises
    UsageError if that is not so, or if no prompt can be made.
    """
    settings, builder, asked = inputs.settings, inputs.builder, inputs.schema.asked
    texts = settings.probabilities.calibrate_with
    used = {part: builder.of_part(part, inputs.labels)[0].columns for part in range(len(asked))}
    names = tuple(dict.fromkeys(name for own in used.values() for name in own))
    what = "template" if settings.prompts.template is not None else "prompt"
    for name in settings.probabilities.calibrate_columns:
        if name not in names:
            listed = ", ".join(names) or "none"
            raise UsageError(f"--set calibrate_columns={name}: the {what} has no such column\nit has: {listed}")
    columns = _first_rows(inputs, names)
    content = set(settings.probabilities.calibrate_columns or filter(lambda name: _is_content(columns[name]), names))
    for part, own in used.items():
        if content.isdisjoint(own):
            which = f"the prompt of the question {asked[part].name}" if asked[part].name else f"the {what}"
            raise UsageError(f"{OPTION}: no column of {which} holds text\nname it with --set calibrate_columns")
    fixed = {name: _one_value(name, columns[name]) for name in names if name not in content}
    batch = RowBatch(
        first_row=0,
        rows=np.arange(len(texts), dtype=np.int64),
        columns={name: list(texts) if name in content else [fixed[name]] * len(texts) for name in names},
        carried=pa.table({}),
        errors={},
        nbytes=0,
    )
    prompts, errors = builder.build(batch, inputs.labels)
    errors |= {prompt.row: error for prompt in prompts for error in (prompt.failed or {}).values()}
    for row, error in errors.items():
        raise UsageError(f"{OPTION} {texts[row]!r}: no prompt can be made of it: {error.detail}")
    return prompts


def contextual_calibrations(inputs: Inputs, engine: PlanEngine, tick: Tick) -> list[Calibration]:
    """Return the calibration of each question, which divides out the engine's answers to prompts without content.

    A question in several orders has the mean of their answers, as in a row. Raises PrefillError if one is not a
    number.
    """
    schema = inputs.schema
    requests = [Request(prompt) for prompt in inputs.common]
    too_long = max(request.size for request in requests)
    if too_long > engine.limits.max_tokens:
        raise UsageError(
            f"{OPTION}: the prompt without content has {counted(too_long, 'token')}; the memory budget holds "
            f"{engine.limits.max_tokens:,}\ngive more --memory"
        )
    # Divided by `--label-norm`, as those that it is applied to.
    parts: dict[int, list[Float64Array]] = {}
    for request, found in zip(requests, answer_requests(engine, requests, tick), strict=True):
        if not np.isfinite(found.logprobs.max()) or np.isnan(found.logprobs).any():
            raise PrefillError(f"{OPTION}: the model's answer is not a finite number: {found.logprobs.tolist()}")
        labels = request.prompt.labels
        with np.errstate(divide="ignore"):
            own = np.log(labels.shares(found.logprobs, 1.0)) if labels.weights else found.logprobs
        parts.setdefault(request.prompt.part, []).append(own)
    return [
        content_free_calibration(
            own.labels,
            mean_log_shares([np.stack(parts[part]) for part in (number, *own.others)], apart=own.apart),
            own.name,
        )
        for number, own in enumerate(schema.questions)
    ]


def _first_rows(inputs: Inputs, names: Sequence[str]) -> dict[str, list[Any]]:
    # The values of these columns in the first readable rows.
    for batch in inputs.source.batches():
        good = [at for at, row in enumerate(batch.rows.tolist()) if row not in batch.errors]
        return {name: [batch.columns[name][at] for at in good] for name in names}
    return {name: [] for name in names}


def _is_content(values: Sequence[Any]) -> bool:
    # Whether a column holds text; an empty one may.
    return any(isinstance(value, str) for value in values) or all(value is None for value in values)


def _one_value(name: str, values: Sequence[Any]) -> Any:
    # The value that all rows have. Raises UsageError if they differ.
    for value in values[1:]:
        if _shown(value) != _shown(values[0]):
            raise UsageError(
                f"{OPTION}: column {name} keeps its value, but it differs from row to row\n"
                "only text that is the same in all rows may stay: name the others with --set calibrate_columns"
            )
    return values[0] if values else None


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)


# The key in a job's ledger of the calibrations that are learnt from prompts without content.
CONTENT_FREE = "content_free"


class Calibrating(Judge):
    """The probabilities of a job: from a file, or from prompts without content. Raises UsageError for options that are
    wrong whatever the input holds."""

    def __init__(self, options: ProbabilityOptions) -> None:
        self._file = options.calibration
        self.groups = added({"calibrated": True})
        self.calibrations: list[Calibration] = []

    def open(self, schema: OutputSchema) -> Collection[str]:
        """Read the file, for an output with this schema. Return the names of the questions that have calibrated
        probabilities. Raises UsageError."""
        asked = {own.name: own for own in schema.questions}
        if self._file is None:
            return tuple(asked)
        self.calibrations = [*read_calibrations(self._file, {name: own.labels for name, own in asked.items()})]
        for each in self.calibrations:
            if "orders" in asked[each.question].groups and not isinstance(each.scaling, PriorScaling):
                raise UsageError(
                    f"--calibration: the question {each.question} is asked in both orders, and a mean of two answers "
                    "is not calibrated\nleave it or swap out, or take its prior out with prefill calibrate --prior "
                    f"rows or {OPTION}"
                )
        return tuple(each.question for each in self.calibrations)

    def identity(self) -> Mapping[str, str]:
        """Return its part of the job's fingerprint."""
        return {"calibration": " ".join(each.digest() for each in self.calibrations)} if self.calibrations else {}

    def require_fitting(self, fingerprint: Mapping[str, str]) -> None:
        """Raise UsageError for a calibration of another job."""
        jobs = [each.fitted_on.job for each in self.calibrations if each.fitted_on is not None]
        for at, job in enumerate(jobs):
            if job not in jobs[:at]:
                require_fitting("--calibration", self._file or "", job, fingerprint)

    def learn(self, scorer: ModelScorer, tick: Tick) -> None:
        """Learn what the model answers to prompts without content, if there is no file; the ledger keeps it."""
        if self._file is not None:
            return
        ledger = scorer.ledger
        if CONTENT_FREE in ledger.settled:
            self.calibrations = [Calibration.model_validate(each) for each in ledger.settled[CONTENT_FREE]]
        else:
            self.calibrations = contextual_calibrations(scorer.inputs, scorer.pool, tick)
        ledger.settle({**ledger.settled, CONTENT_FREE: [each.model_dump(mode="json") for each in self.calibrations]})

    @property
    def probabilities(self) -> Mapping[str, Probabilities]:
        """What makes the calibrated probabilities of the rows, by the name of the question."""
        return {each.question: each.probabilities for each in self.calibrations}

    def reported(self, report: RunReport, reached: Reached) -> None:
        report.add(CalibrationUses({each.question or ANSWER: each.use() for each in self.calibrations}))

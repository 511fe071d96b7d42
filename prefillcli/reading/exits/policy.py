"""Exits: probes that predict a row's final answer from its readings at one layer, the rule for leaving, and its file.

Three kinds are tried for each layer; cross-validation chooses:

- `ridge` reads the hidden state, brought to unit length. It finds an answer before the model's own head can read it.
- `affine` reads the label logits of the model's own norm and head: they need another scale and another offset at each
  layer ("tuned lens", Belrose et al. 2023, arXiv 2303.08112, in its smallest form). Those of a first model with a
  classification head are the outputs of its classes.
- `mlp` reads the features of SpecEE's predictor (arXiv 2504.08850, section 4.3): the label logits, their softmax among
  the labels, and how the layer has changed that softmax; 512 hidden units with ReLU. SpecEE predicts whether to exit;
  this probe predicts the final label logits."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from prefillcli.engines.base import Readings
from prefillcli.errors import UsageError, without_secrets
from prefillcli.models.open import WORDS
from prefillcli.options.requirements import spelled_out
from prefillcli.reading.exits.findings import ExitFindings, FlipsOf
from prefillcli.rows.output.store import read_sealed
from prefillcli.rows.proof import ModelContents, hash_value
from prefillcli.rows.records import BEFORE
from prefillcli.stats.arrays import BoolArray, Float32Array, Float64Array, Int64Array
from prefillcli.stats.labels import label_probabilities
from prefillcli.stats.ridge import ridge

if TYPE_CHECKING:
    from prefillcli.core.inputs import Inputs
    from prefillcli.models.open import Opened
    from prefillcli.prompts.labels import Labels


class Probe:
    """A small predictor of final answers, fitted for one layer and one set of labels. Its fields are arrays."""

    kind: ClassVar[str]  # its name in `PROBES`

    @property
    def labels(self) -> int:
        """The number of labels that it predicts."""
        last = fields(self)[-1].name  # type: ignore[arg-type]  # the bias of the labels
        return int(getattr(self, last).size)

    def logits(self, readings: Readings) -> Float64Array:
        """Return the predicted final label logits, float64 [rows, labels], up to a constant for each row."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return its arrays, from which `probe_of` restores the same probe bit for bit."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {"kind": self.kind} | {
            name: {
                "shape": list(array.shape),
                "float32": base64.b64encode(np.ascontiguousarray(array, dtype="<f4").tobytes()).decode(),
            }
            for name, array in arrays.items()
        }


@dataclass(frozen=True, eq=False)
class RidgeProbe(Probe):
    """A linear map of the hidden state of unit length: `weights` [hidden, labels] and `bias` [labels]."""

    weights: Float32Array
    bias: Float32Array
    kind: ClassVar[str] = "ridge"

    def logits(self, readings: Readings) -> Float64Array:
        return np.asarray(unit_length(readings.hidden) @ self.weights.astype(np.float64) + self.bias, np.float64)


@dataclass(frozen=True, eq=False)
class AffineProbe(Probe):
    """A linear map of the logits, less their mean: `weights` [logits, labels] and `bias` [labels]."""

    weights: Float32Array
    bias: Float32Array
    kind: ClassVar[str] = "affine"

    def logits(self, readings: Readings) -> Float64Array:
        return np.asarray(relative(readings.logits) @ self.weights.astype(np.float64) + self.bias, np.float64)


@dataclass(frozen=True, eq=False)
class MlpProbe(Probe):
    """Two linear maps of `lens_features` with a ReLU between them.

    `inner` [3 * logits, units] and `inner_bias` [units], `outer` [units, labels] and `outer_bias` [labels].
    """

    inner: Float32Array
    inner_bias: Float32Array
    outer: Float32Array
    outer_bias: Float32Array
    kind: ClassVar[str] = "mlp"

    def logits(self, readings: Readings) -> Float64Array:
        active = np.maximum(lens_features(readings) @ self.inner.astype(np.float64) + self.inner_bias, 0)
        return np.asarray(active @ self.outer.astype(np.float64) + self.outer_bias, np.float64)


PROBES: Final[Mapping[str, Callable[..., Probe]]] = {each.kind: each for each in (RidgeProbe, AffineProbe, MlpProbe)}


def probe_of(written: Mapping[str, Any]) -> Probe:
    """Return the probe that `to_json` wrote. Raises ValueError if it did not write this."""
    kind = written.get("kind")
    if not isinstance(kind, str) or kind not in PROBES:
        raise ValueError(f"{kind!r} is not a kind of probe")
    arrays = {name: _array(value) for name, value in written.items() if name != "kind"}
    try:
        probe = PROBES[kind](**arrays)
    except TypeError:
        raise ValueError(f"a probe {kind} does not consist of {', '.join(arrays) or 'nothing'}") from None
    _check_shapes(probe)
    return probe


def unit_length(hidden: Float32Array) -> Float64Array:
    """Return hidden states [rows, hidden] scaled to length 1; those of length 0 stay 0."""
    wide = hidden.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    return np.asarray(wide / np.where(lengths > 0, lengths, 1), np.float64)


def relative(logits: Float64Array) -> Float64Array:
    """Return label logits [rows, labels] less their mean over the labels."""
    return np.asarray(logits - logits.mean(axis=1, keepdims=True), np.float64)


def lens_features(readings: Readings) -> Float64Array:
    """Return SpecEE's features [rows, 3 * labels]: label logits, softmax among the labels, and its change in the
    layer."""
    shares = label_probabilities(readings.logits)
    return np.concatenate([readings.logits, shares, shares - label_probabilities(readings.before)], axis=1)


def _array(written: Any) -> Float32Array:
    # An array that `Probe.to_json` wrote. Raises ValueError if it is damaged.
    try:
        shape = tuple(int(size) for size in written["shape"])
        values = np.frombuffer(base64.b64decode(written["float32"], validate=True), dtype="<f4")
        array = values.astype(np.float32).reshape(shape)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise ValueError(f"an array of the probe is damaged: {error}") from None
    if not np.isfinite(array).all():
        raise ValueError("an array of the probe is damaged: it has values that are not finite")
    return array


def _check_shapes(probe: Probe) -> None:
    # Raise ValueError unless the arrays of a probe fit together.
    if isinstance(probe, MlpProbe):
        maps = [(probe.inner, probe.inner_bias), (probe.outer, probe.outer_bias)]
        fits = len(probe.inner) % 3 == 0 and probe.outer.shape[:1] == probe.inner_bias.shape
    elif isinstance(probe, RidgeProbe | AffineProbe):
        maps = [(probe.weights, probe.bias)]
        fits = True
    else:
        return
    if not fits or probe.labels < 2 or any(map.ndim != 2 or map.shape[1:] != bias.shape for map, bias in maps):
        raise ValueError(f"the arrays of a probe {probe.kind} do not fit together")


# Fitting probes to rows with final answers, and their predictions for rows that they were not fitted to.


FOLDS = 5  # folds of the probes without a formula for leaving one out
UNITS = 512  # as in SpecEE
_NEAR = 1.25
# A probe knows something if its error is at most this share of the mean answer's.
KNOWS: Final = 0.95
_DECAY = 1e-3  # of the network's weights
_STEPS = 60  # of L-BFGS


class FittedProbe(NamedTuple):
    """A probe, and the label logits that probes of its kind predict for left-out rows, less their mean [rows,
    labels]."""

    probe: Probe
    held_out: Float64Array


def fit_best(readings: Readings, final: Float64Array, seed: int) -> tuple[FittedProbe, dict[str, float]]:
    """Fit the kind of probe with the smallest squared error on left-out rows; return it with the error of each kind.

    `final` [rows, labels] are the final label log-probabilities. An error is the root mean square error of a margin
    between two labels. The network takes longest. It is left out where the label logits that it reads show little,
    alone or compared with the hidden state: where the affine probe does not know the answer, or its error is more than
    1.25 times that of the ridge.
    """
    target = relative(final)
    fits: dict[str, FittedProbe] = {}
    errors: dict[str, float] = {}
    for kind, fit in FITS.items():
        if kind == MlpProbe.kind and errors[AffineProbe.kind] > min(
            _NEAR * errors[RidgeProbe.kind], KNOWS * margin_error(target - target.mean(axis=0))
        ):
            continue
        fits[kind] = fit(readings, target, seed)
        errors[kind] = margin_error(fits[kind].held_out - target)
    return fits[min(errors, key=lambda kind: errors[kind])], errors


def fit_ridge(readings: Readings, target: Float64Array, seed: int = 0) -> FittedProbe:
    """Fit relative logits `target` [rows, labels] to hidden states by `stats.ridge.ridge`."""
    found = ridge(unit_length(readings.hidden), target)
    return FittedProbe(RidgeProbe(_single(found.weights), _single(found.bias)), found.held_out)


def fit_affine(readings: Readings, target: Float64Array, seed: int = 0) -> FittedProbe:
    """Fit relative logits `target` [rows, labels] to relative label logits by least squares."""
    lens = np.column_stack([relative(readings.logits), np.ones(len(target))])

    def solve(rows: Int64Array) -> Float64Array:
        return np.asarray(np.linalg.lstsq(lens[rows], target[rows], rcond=1e-9)[0], dtype=np.float64)

    held_out = _folded(target, seed, lambda rows, rest: lens[rest] @ solve(rows))
    found = solve(np.arange(len(target)))
    return FittedProbe(AffineProbe(_single(found[:-1]), _single(found[-1])), held_out)


def fit_mlp(readings: Readings, target: Float64Array, seed: int = 0) -> FittedProbe:
    """Fit a network of SpecEE's size from its features to relative logits `target` [rows, labels], by L-BFGS."""
    features = lens_features(readings)

    def predict(rows: Int64Array, rest: Int64Array) -> Float64Array:
        held = Readings(readings.hidden[rest], readings.logits[rest], readings.before[rest])
        return _trained(features[rows], target[rows], seed).logits(held)

    return FittedProbe(_trained(features, target, seed), _folded(target, seed, predict))


# The fit of each kind of `prefillcli.reading.exits.policy.PROBES`.
FITS: Final[Mapping[str, Callable[[Readings, Float64Array, int], FittedProbe]]] = {
    RidgeProbe.kind: fit_ridge,
    AffineProbe.kind: fit_affine,
    MlpProbe.kind: fit_mlp,
}


def margin_error(off: Float64Array) -> float:
    """Return the error of a margin between two labels, where relative logits are `off` [rows, labels]: root mean
    square."""
    labels = off.shape[1]
    return float(np.sqrt(2 * np.mean(off**2) * labels / (labels - 1)))  # the errors of a row's labels add up to 0


def _folded(
    target: Float64Array, seed: int, predict: Callable[[Int64Array, Int64Array], Float64Array]
) -> Float64Array:
    # Predictions for all rows by `predict(rows to fit, rows left out)`; each row is left out once.
    order = np.random.default_rng(seed).permutation(len(target))
    found = np.zeros_like(target)
    for fold in range(min(FOLDS, len(target))):
        rest = order[fold::FOLDS]
        rows = np.setdiff1d(order, rest)
        found[rest] = predict(rows, rest)
    return found


def _trained(features: Float64Array, target: Float64Array, seed: int) -> MlpProbe:
    from scipy.optimize import minimize

    centre, width = features.mean(axis=0), np.maximum(features.std(axis=0), 1e-6)
    mean, scale = target.mean(axis=0), max(float(target.std()), 1e-6)
    points, aims = ((features - centre) / width).astype(np.float32), ((target - mean) / scale).astype(np.float32)
    inputs, labels = points.shape[1], aims.shape[1]
    sizes = np.cumsum([inputs * UNITS, UNITS, UNITS * labels])

    def parts(flat: Any) -> list[Any]:
        inner, inner_bias, outer, outer_bias = np.split(flat, sizes)
        return [inner.reshape(inputs, UNITS), inner_bias, outer.reshape(UNITS, labels), outer_bias]

    def loss(flat: Float64Array) -> tuple[float, Float64Array]:
        inner, inner_bias, outer, outer_bias = parts(flat.astype(np.float32))
        active = np.maximum(points @ inner + inner_bias, 0)
        off = active @ outer + outer_bias - aims
        back = off * np.float32(2 / off.size)
        down = (back @ outer.T) * (active > 0)
        slopes = [points.T @ down, down.sum(axis=0), active.T @ back, back.sum(axis=0)]
        gradient = np.concatenate([each.ravel() for each in slopes]).astype(np.float64)
        return float(np.mean(off**2)) + _DECAY * float(flat @ flat) / 2, gradient + _DECAY * flat

    draws = np.random.default_rng(seed)
    start = np.concatenate(
        [
            draws.normal(0, np.sqrt(2 / inputs), inputs * UNITS),
            np.zeros(UNITS),
            draws.normal(0, np.sqrt(1 / UNITS), UNITS * labels) * 0.1,
            np.zeros(labels),
        ]
    )
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": _STEPS})
    inner, inner_bias, outer, outer_bias = parts(found.x)
    inner = inner / width[:, None]
    return MlpProbe(
        _single(inner),
        _single(inner_bias - centre @ inner),
        _single(outer * scale),
        _single(outer_bias * scale + mean),
    )


def _single(values: Float64Array) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(values, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class ExitLayer:
    """A layer after which rows may leave.

    Layers are numbered from 0. A row leaves if the predicted logit of its likeliest label is ahead of the next one by
    `thresholds` of that label or more; infinity: never. With `peek` only the last tokens go through the layer before
    the decision.
    """

    layer: int
    probe: Probe
    thresholds: tuple[float, ...]
    peek: bool = True


class Decisions(NamedTuple):
    """A mask of the decided rows [rows], and the log-probabilities, among the labels alone, with which they leave
    [rows, labels]."""

    decided: npt.NDArray[np.bool_]
    logprobs: Float64Array


class Lead(NamedTuple):
    """The likeliest label of each row, int64 [rows], and the lead of its logit over the next one [rows]."""

    label: npt.NDArray[np.int64]
    ahead: Float64Array


def lead_of(logits: Float64Array) -> Lead:
    """Return the lead of label logits [rows, labels]."""
    two = np.partition(logits, -2, axis=1)[:, -2:]
    return Lead(logits.argmax(axis=1), two[:, 1] - two[:, 0])


@dataclass(frozen=True, slots=True)
class ExitPolicy:
    """The exits of a job, in the order of the layers."""

    exits: tuple[ExitLayer, ...]

    reads_logits: ClassVar[bool] = True

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(each.layer for each in self.exits)

    @property
    def inside(self) -> ExitPolicy | None:
        """The exits after layers of the model itself; None if there are none."""
        own = tuple(each for each in self.exits if each.layer > BEFORE)
        return ExitPolicy(own) if own else None

    def with_readers(self, layers: Collection[int]) -> ExitPolicy:
        """Return the exits that are inside the model, or before it after one of these `layers`: fewer never flip more
        rows."""
        return ExitPolicy(tuple(each for each in self.exits if each.layer > BEFORE or each.layer in layers))

    def among(self, layers: Collection[int], shift: int = 0) -> ExitPolicy:
        """Return the exits after these `layers`, whose numbers change by `shift`."""
        own = (each for each in self.exits if each.layer in layers)
        return ExitPolicy(tuple(replace(each, layer=each.layer + shift) for each in own))

    def at(self, layer: int) -> ExitLayer:
        """Return the exit after a layer. Raises KeyError if there is none."""
        for each in self.exits:
            if each.layer == layer:
                return each
        raise KeyError(layer)

    def peeks(self, layer: int) -> bool:
        """See `LeavingRule`."""
        return self.at(layer).peek

    def guess(self, layer: int, readings: Readings) -> tuple[Float64Array, Sequence[float]]:
        """Return the final label logits that a layer predicts [rows, labels], and for each label the lead that it
        needs for a row to leave; infinity: never."""
        own = self.at(layer)
        return own.probe.logits(readings), own.thresholds

    def decide(self, layer: int, readings: Readings) -> Decisions:
        """Return the rows that leave after this layer."""
        predicted = self.at(layer).probe.logits(readings)
        highest = predicted.max(axis=1, keepdims=True)
        total = highest + np.log(np.exp(predicted - highest).sum(axis=1, keepdims=True))
        return Decisions(self.suffices(layer, predicted), predicted - total)

    def suffices(self, layer: int, predicted: Float64Array) -> BoolArray:
        """Return a mask of the rows [rows] whose `predicted` label logits [rows, labels] decide them after a layer."""
        lead = lead_of(predicted)
        return np.asarray(lead.ahead >= np.asarray(self.at(layer).thresholds)[lead.label], np.bool_)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the form from which `policy_of` restores the same policy. A threshold of infinity is null."""
        return [
            {
                "layer": each.layer,
                "peek": each.peek,
                "thresholds": [None if math.isinf(value) else value for value in each.thresholds],
                "probe": each.probe.to_json(),
            }
            for each in self.exits
        ]


def policy_of(written: Sequence[Mapping[str, Any]]) -> ExitPolicy:
    """Return the policy that `ExitPolicy.to_json` wrote. Raises ValueError if it did not write this."""
    try:
        exits = tuple(
            ExitLayer(
                layer=int(each["layer"]),
                probe=probe_of(each["probe"]),
                thresholds=tuple(math.inf if value is None else float(value) for value in each["thresholds"]),
                peek=bool(each["peek"]),
            )
            for each in written
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"an exit layer is damaged: {error}") from None
    layers = [each.layer for each in exits]
    if layers != sorted(set(layers)):
        raise ValueError(f"the exit layers {layers} do not rise")
    if any(not value >= 0 for each in exits for value in each.thresholds):
        raise ValueError("a threshold is not a number of 0 or more")
    return ExitPolicy(exits)


# The file of a job's exits, which a later job with the same model, labels and prompts may use again.


SCHEMA_VERSION: Final = 2
_AGAIN = "make one with prefill score --exit: it is written beside the report"


class LearntExits(BaseModel):
    """The exits of one question, or why it has none.

    `question` is its name, empty in a job of labels, `labels` are the labels' names in their order, and `label_tokens`
    a digest of their spellings. `exits` is a policy as `ExitPolicy.to_json` writes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    question: str = ""
    labels: tuple[str, ...] = Field(min_length=2)
    label_tokens: str = ""
    exits: list[dict[str, Any]] | None
    findings: ExitFindings

    @field_validator("exits")
    @classmethod
    def _is_a_policy(cls, exits: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if exits is not None:
            policy_of(exits)
        return exits

    @property
    def policy(self) -> ExitPolicy | None:
        """The exits; None if there are none."""
        return None if self.exits is None else policy_of(self.exits)


class ExitProfile(BaseModel):
    """The exits of a job's questions, and the identity of that job. It has no date: the same rows make the same file.

    `model` and `prompt` are digests. `layers` is the number of the model's layers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["prefill exit profile"] = "prefill exit profile"
    schema_version: Literal[2] = SCHEMA_VERSION
    model: str
    prompt: str
    layers: int = Field(ge=2)
    max_flips: float = Field(gt=0, lt=1)
    flips_of: FlipsOf = "each"
    questions: tuple[LearntExits, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits_together(self) -> ExitProfile:
        for learnt in self.questions:
            for each in learnt.policy.exits if learnt.policy else ():
                if each.layer >= self.layers - 1:
                    raise ValueError(f"layer {each.layer + 1} of {self.layers} is not an exit layer")
                if not len(each.thresholds) == each.probe.labels == len(learnt.labels):
                    raise ValueError(f"the exit after layer {each.layer + 1} is not for {len(learnt.labels)} labels")
        return self

    def to_json(self) -> str:
        """Return the content of the file: text that ends with a line feed."""
        return self.model_dump_json(indent=1) + "\n"


def exit_profile_of(content: bytes | str, path: str) -> ExitProfile:
    """Return the profile in a file's `content`. Raises UsageError, which names the `path`, if it is not a profile or
    is damaged."""
    try:
        return ExitProfile.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["loc"] == ("schema_version",):
            reason = f"it is of another version of prefill (schema_version is not {SCHEMA_VERSION})"
        elif first["type"] == "missing" or (first["loc"] in {(), ("kind",)} and first["type"] != "value_error"):
            reason = "it is not an exit profile, or it is damaged"
        else:
            reason = f"it is damaged: {where + ': ' if where else ''}{first['msg']}"
        raise UsageError(f"--exit-profile {path}: {reason}\n{_AGAIN}") from None


def require_same_job(profile: ExitProfile, path: str | None, job: Mapping[str, Any]) -> None:
    """Raise UsageError if a profile is of another model, prompt or labels than a `job`, or proves less than it asks.

    The job has `model`, `prompt`, `layers`, `max_flips` and `flips_of`, as profiles do, and the identities of its
    `questions` (`identity_of`).
    """
    shown = without_secrets(path or "")
    own = [
        {name: getattr(each, name) for name in ("question", "labels", "label_tokens")} for each in profile.questions
    ]

    def same(name: str) -> bool:
        return [each[name] for each in own] == [each[name] for each in job["questions"]]

    given = {
        "model": profile.model == job["model"] and profile.layers == job["layers"],
        "prompt settings": profile.prompt == job["prompt"],
        "questions": same("question"),
        "labels": same("labels"),
        "label spellings": same("label_tokens"),
    }
    other = [name for name, same in given.items() if not same]
    if other:
        raise UsageError(
            f"--exit-profile {shown}: it was made for another job: different {', '.join(other)}\n"
            "leave it out: exits are then learnt from rows of this job"
        )
    if profile.flips_of != job["flips_of"]:
        raise UsageError(
            f"--exit-profile {shown}: it was learnt with flips_of={profile.flips_of}, not {job['flips_of']}\n"
            f"give --set flips_of={profile.flips_of}, or leave the profile out"
        )
    if profile.max_flips > job["max_flips"]:
        raise UsageError(
            f"--exit-profile {shown}: it proves at most {profile.max_flips:.2%} flips, --max-flips asks for "
            f"{job['max_flips']:.2%}\ngive --max-flips {profile.max_flips:g}, or leave the profile out"
        )


# The file of `--exit-profile`: read before anything loads, and checked against the job that uses it.


AGAIN = "leave it out: the exits are then learnt on rows of this job"


def exit_profile_at(path: str) -> ExitProfile:
    """Return the profile at a local path or URL. Raises UsageError for any other file, or one that was changed after a
    job wrote it."""
    content, sealed = read_sealed("--exit-profile", path, AGAIN)
    profile = exit_profile_of(content, without_secrets(path))
    if not sealed:  # the bound on flips rests on it
        raise UsageError(
            f"--exit-profile {without_secrets(path)}: it has no checksum: another program wrote it\n{AGAIN}"
        )
    return profile


def job_of_exits(inputs: Inputs, digests: Mapping[str, str], read_as: Sequence[Any]) -> dict[str, Any]:
    """Return the identity of a job for the exits that it learns, by the `digests` of its fingerprint: a job that uses
    them again must have the same. `read_as` states how prompts are read otherwise."""
    settings = spelled_out(inputs.settings)
    # Not the digest of all options of compression: an audit changes nothing that a model reads.
    kept = list(read_as)
    named = (WORDS, settings.exits.narrow)  # a first model is identified by its contents
    first = [name if name in named else "first" for name in settings.exits.chain]
    if "adapters" in digests:
        kept.append(digests["adapters"])
    return {
        "model": digests["model"],
        "prompt": hash_value([*(digests.get(part) for part in ("tokenizer", "prompt", "draft")), *kept, *first]),
        "layers": inputs.opened.files.config.get_text_config().num_hidden_layers,
        "max_flips": settings.flips.max_flips,
        "flips_of": settings.exits.flips_of,
        "questions": [identity_of(each) for each in inputs.labels.asked],
    }


def identity_of(labels: Labels) -> dict[str, Any]:
    """Return the identity of a question, by its `labels`."""
    return {
        "question": labels.question.name,
        "labels": labels.names,
        "label_tokens": hash_value([[label.name, label.variants] for label in labels.labels]),
    }


def inspected_policies(path: str | None, opened: Opened, labels: Labels) -> dict[str, ExitPolicy]:
    """Return the exits of a profile by question, for a row whose job may have other prompts; none without a path.

    Raises UsageError for a file that is not a profile, or a profile of another model or other labels.
    """
    if path is None:
        return {}
    profile = exit_profile_at(path)
    own = {
        "model": ModelContents(opened.files.origin).model(),
        "layers": opened.files.config.get_text_config().num_hidden_layers,
        "questions": [identity_of(each) for each in labels.asked],
    }
    given = {name: getattr(profile, name) for name in ("prompt", "max_flips", "flips_of")}
    require_same_job(profile, path, own | given)
    return {each.question: each.policy for each in profile.questions if each.policy is not None}


def exits_path(report: str) -> str:
    """Return the path of a job's exit profile: `data.scores.run.json` -> `data.scores.exit.json`."""
    return report.removesuffix(".json").removesuffix(".run") + ".exit.json"

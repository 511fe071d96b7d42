"""Ridge heads in closed form: one for each layer, of which cross-validation chooses one, and how good their answers
are on rows that chose nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np

from prefillcli.errors import UsageError
from prefillcli.judging.calibration import Scaling, fit_platt, fit_temperature
from prefillcli.reading.heads.head import Quality, moments
from prefillcli.stats.arrays import Float32Array, Float64Array, Int64Array
from prefillcli.stats.evaluation import expected_calibration_error, log_losses
from prefillcli.stats.labels import label_probabilities, log_shares_of
from prefillcli.stats.ridge import Ridge, ridge

FOLDS = 5
WITHIN = 1.0


class Solution(NamedTuple):
    """A head for the hidden states after a layer, counted from 1: its logits are `features @ weights + bias`, where
    features are hidden states less the mean of all rows, over their standard deviation. `held_out` [rows, answers] are
    the probabilities that heads of other rows give."""

    layer: int
    weights: Float64Array
    bias: Float64Array
    strength: float
    held_out: Float64Array


def solve(
    hidden: Mapping[int, Float32Array],
    truth: Int64Array,
    answers: int,
    seed: int = 0,
    prompts: Int64Array | None = None,
) -> Solution:
    """Return the head for `hidden` states [rows, hidden] by layer, fitted to the right answers `truth` [rows]. Rows
    with the same number among `prompts` [rows] are in one fold: a head that has seen a prompt knows its answer.

    The ridge's strength has the least squared error when each row is left out in turn. The layer is the lowest whose
    error is within `WITHIN` standard errors of the least. Both are chosen anew without each fold, for the rows of that
    fold, and so is the temperature that makes probabilities of scores: biases, too, cost right answers where rows are
    few (docs/log.md). Raises UsageError where the hidden states do not differ.
    """
    folds = list(folds_of(truth, seed, prompts))
    held = np.empty((len(truth), answers))
    for rows, rest in folds:
        layer, found = _best({layer: each[rows] for layer, each in hidden.items()}, truth[rows], answers)
        held[rest] = _predicted(found, hidden[layer][rows], hidden[layer][rest])
    layer, found = _best(hidden, truth, answers)
    temperature = fit_temperature(held, truth).temperature
    return Solution(
        layer=layer,
        weights=found.weights / temperature,
        bias=found.bias / temperature,
        strength=found.strength,
        held_out=_cross_scaled(held, truth, folds, fit_temperature),
    )


def _best(hidden: Mapping[int, Float32Array], truth: Int64Array, answers: int) -> tuple[int, Ridge]:
    # The layer, by its squared error on left-out rows, and its ridge.
    wanted = np.eye(answers)[truth]
    found: dict[int, Ridge] = {}
    errors: dict[int, Float64Array] = {}  # of each row
    for layer, states in hidden.items():
        mean, scale = moments(states)
        points = (states.astype(np.float64) - mean) / scale
        if not points.any():
            continue
        found[layer] = ridge(points, wanted)
        errors[layer] = np.square(found[layer].held_out - wanted).sum(axis=1)
    if not found:
        raise UsageError(
            "the model's hidden states are the same for all rows, so no head can tell them apart\n"
            "check that the rows differ, and that the prompt has their text"
        )
    least = min(errors.values(), key=np.mean)
    layer = next(layer for layer in sorted(errors) if _is_near(errors[layer] - least))
    return layer, found[layer]


def _is_near(gaps: Float64Array) -> bool:
    return bool(gaps.mean() <= WITHIN * gaps.std() / np.sqrt(len(gaps)))


def _predicted(fitted: Ridge, states: Float32Array, others: Float32Array) -> Float64Array:
    mean, scale = moments(states)
    return np.asarray((others.astype(np.float64) - mean) / scale @ fitted.weights + fitted.bias, np.float64)


def folds_of(
    truth: Int64Array, seed: int = 0, prompts: Int64Array | None = None
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """Yield the rows to fit and those left out, with equal shares of each answer as far as that is possible. Rows with
    the same number among `prompts` [rows] stay together."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    with catch_warnings():
        simplefilter("ignore", UserWarning)  # some answers are of fewer rows than there are folds
        count = min(FOLDS, int(np.bincount(truth).max()))
        kind = StratifiedKFold
        if prompts is not None and (distinct := len(np.unique(prompts))) < len(prompts):
            kind, count = StratifiedGroupKFold, min(count, distinct)
        yield from kind(n_splits=count, shuffle=True, random_state=seed).split(truth, truth, prompts)


def _cross_scaled(
    scores: Float64Array,
    truth: Int64Array,
    folds: Sequence[tuple[Int64Array, Int64Array]],
    fit: Callable[[Float64Array, Int64Array], Scaling],
) -> Float64Array:
    # Probabilities of left-out rows' scores [rows, answers], each fold's by the others.
    found = np.empty_like(scores)
    for rows, rest in folds:
        found[rest] = fit(scores[rows], truth[rows]).apply(scores[rest])
    return found


# What a head must beat, on the same held-out rows.


class Rival(NamedTuple):
    """Who else could answer: the probabilities that it gives to held-out rows [rows, answers]."""

    name: str
    probabilities: Float64Array


COMMONEST, WORDS = "the commonest answer", "words alone"
OWN, CALIBRATED = "the model's own answer", "the same, calibrated"


def rivals(
    own: Float64Array,
    words: Float32Array,
    truth: Int64Array,
    answers: int,
    seed: int = 0,
    prompts: Int64Array | None = None,
) -> list[Rival]:
    """Return the rivals of a head: always the commonest answer; the model's `own` one, by log-probabilities [rows,
    answers], as it is and calibrated; and a ridge of hashed `words` [rows, numbers], without any model. `prompts` as
    in `solve`."""
    folds = list(folds_of(truth, seed, prompts))
    counted, said = np.empty((len(truth), answers)), np.empty((len(truth), answers))
    lengths = np.linalg.norm(words, axis=1, keepdims=True)
    points = words / np.where(lengths > 0, lengths, 1)
    for rows, rest in folds:
        counts = np.bincount(truth[rows], minlength=answers) + 1.0
        counted[rest] = counts / counts.sum()
        fitted = ridge(points[rows].astype(np.float64), np.eye(answers)[truth[rows]])
        said[rest] = points[rest] @ fitted.weights + fitted.bias
    shares = log_shares_of(own)
    return [
        Rival(COMMONEST, counted),
        Rival(OWN, label_probabilities(own)),
        Rival(CALIBRATED, _cross_scaled(shares, truth, folds, fit_platt)),
        Rival(WORDS, _cross_scaled(said, truth, folds, fit_temperature)),
    ]


def quality(probabilities: Float64Array, truth: Int64Array) -> Quality:
    """Return how good probabilities [rows, answers] are, by the right answers [rows]."""
    rows = np.arange(len(truth))
    right = probabilities.argmax(axis=1) == truth
    said = probabilities[rows, truth]
    return Quality(
        accuracy=float(right.mean()),
        log_loss=float(log_losses(said, np.ones(len(truth), np.bool_)).mean()),
        brier=float(np.square(np.eye(probabilities.shape[1])[truth] - probabilities).sum(axis=1).mean()),
        ece=float(expected_calibration_error(probabilities.max(axis=1), right)),
    )


def chance_of(one: Float64Array, other: Float64Array, truth: Int64Array) -> float:
    """Return the probability that two equally good ways to answer would differ so much on these rows, in how many they
    get right: McNemar's exact test, two-sided."""
    from scipy.stats import binomtest

    first, second = (each.argmax(axis=1) == truth for each in (one, other))
    gains, losses = int((first & ~second).sum()), int((second & ~first).sum())
    return float(binomtest(gains, gains + losses).pvalue) if gains + losses else 1.0

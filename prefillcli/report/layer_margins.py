"""What a model says of a row after each of its layers: by how much one label is ahead, and where rows would leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefillcli.exits.policy import ExitPolicy
from prefillcli.exits.probes import Readings
from prefillcli.report.charts import Plot, Tick, round_ticks
from prefillcli.report.rendering import signed_bar, visible
from prefillcli.stats.calibration import log_shares_of

NUMBERS = ("after", "margin", "entropy")
"""Columns of `margin_rows` that hold numbers."""
_WIDE, _NARROW = 16, 6  # characters of the longest bar to either side, without and with exits
_LEAST_GAP = 6.0  # percent between two ticks


@dataclass(frozen=True, slots=True)
class ExitGuess:
    """What the probe of an exit layer makes of the row.

    `margin` is what it predicts the final one to be, `ahead` by how much its likeliest label leads, and `threshold`
    the least lead that this label leaves with (infinity: never). The row `leaves` here if it reaches that first.
    """

    margin: float
    prediction: str
    ahead: float
    threshold: float
    leaves: bool


@dataclass(frozen=True, slots=True)
class LayerMargin:
    """What the model's own norm and head read after some layers; after 0, from the embedding.

    `margin` is in logits, `entropy` that of the labels' shares in bits. `changes`: the layer before says something
    else.
    """

    layers: int
    margin: float
    entropy: float
    prediction: str
    changes: bool
    guess: ExitGuess | None = None


@dataclass(frozen=True, slots=True)
class MarginCurve:
    """The margins of a row over the layers, from the embedding to the final answer, and what they are margins of."""

    what: str
    layers: list[LayerMargin]

    @property
    def settled(self) -> int:
        """The layers after which the prediction is the final one, and stays so."""
        return max((each.layers for each in self.layers if each.changes), default=0)

    @property
    def left(self) -> int | None:
        """The layers after which the row would leave; None if it goes on to the end."""
        return next((each.layers for each in self.layers if each.guess is not None and each.guess.leaves), None)


def margin_curve(
    readings: Sequence[Readings],
    final: npt.NDArray[np.float64],
    labels: Sequence[str],
    policy: ExitPolicy | None = None,
) -> MarginCurve:
    """The margins of one row.

    `readings` are of every layer but the last, in their order, with one row each; `final` [labels] are the label
    log-probabilities of the answer. Of two labels the margin is the first over the second; of more, that of the final
    answer over the best other. With a `policy`, exit layers have what their probes say.
    """
    logits = [readings[0].before[0], *(each.logits[0] for each in readings)] if readings else []
    logits = [*logits, final]
    best = 0 if len(labels) == 2 else int(final.argmax())
    found: list[LayerMargin] = []
    left = False
    for layers, own in enumerate(logits):
        guess = None
        if policy is not None and layers - 1 in policy.layers and layers <= len(readings):
            guess = _guess(policy, layers - 1, readings[layers - 1], labels, best, left)
            left = left or guess.leaves
        shares = log_shares_of(own)
        prediction = labels[int(own.argmax())]
        found.append(
            LayerMargin(
                layers=layers,
                margin=_margin(own, best),
                entropy=float(-(np.exp(shares) * shares).sum() / np.log(2)),
                prediction=prediction,
                changes=bool(found) and found[-1].prediction != prediction,
                guess=guess,
            )
        )
    other = labels[1] if len(labels) == 2 else "the best other label"
    return MarginCurve(f"{labels[best]} over {other}", found)


def margin_rows(curve: MarginCurve) -> list[list[str]]:
    """A header and a line for each layer, safe to show."""
    guesses = any(each.guess is not None for each in curve.layers)
    most = max((abs(each.margin) for each in curve.layers if np.isfinite(each.margin)), default=0.0)
    side = _NARROW if guesses else _WIDE
    rows = [["after", "margin", "", "entropy", "prediction", *(["exit"] if guesses else [])]]
    for each in curve.layers:
        said = visible(each.prediction, line=True) + (" ←" if each.changes else "")
        cells = [f"{each.layers}", f"{each.margin:+.3f}", signed_bar(each.margin, most, side), f"{each.entropy:.3f}"]
        rows.append([*cells, said, *([_guess_text(each.guess)] if guesses else [])])
    return rows


def margin_notes(curve: MarginCurve) -> list[str]:
    """What the numbers are, in sentences, safe to show."""
    last = curve.layers[-1]
    notes = [
        f"Margin: logits of {visible(curve.what, line=True)}, read after each layer by the model's own norm and head; "
        "after 0, from the embedding. Entropy in bits, of the labels alone.",
        f"After {curve.settled} of {last.layers} layers the prediction is {visible(last.prediction, line=True)} for "
        "good; ← marks where it changes.",
    ]
    if any(each.guess is not None for each in curve.layers):
        where = "goes on to the end" if curve.left is None else f"would leave after layer {curve.left}"
        notes.append(
            "Exit: the label that its probe predicts, how far that is ahead of the next one, and how far it must be. "
            f"The row {where}."
        )
    return notes


def margin_plot(curve: MarginCurve) -> Plot | None:
    """The margin over the layers, a line at 0, and the probes' predictions; None for numbers that are not finite."""
    points = [(each.layers, each.margin) for each in curve.layers]
    guesses = [(each.layers, each.guess.margin) for each in curve.layers if each.guess is not None]
    values = [margin for _, margin in points + guesses]
    if len(points) < 2 or not np.isfinite(values).all():
        return None
    last = points[-1][0]
    ticks = round_ticks(max(*map(abs, values), 1e-3))
    top = ticks[-1]
    signed = [*(-at for at in reversed(ticks[1:])), *ticks]
    step = max(1, math.ceil(last * _LEAST_GAP / 100))

    def line(drawn: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{100 * at / last:.2f},{50 - 50 * value / top:.2f}" for at, value in drawn)

    series = [(curve.what, f"{points[-1][1]:+.2f}")]
    if guesses:
        series.append(("as the probes predict it", f"{guesses[-1][1]:+.2f}"))
    return Plot(
        x=[Tick(100 * at / last, f"{at}") for at in range(0, last + 1, step)],
        y=[Tick(50 + 50 * at / top, f"{at:+g}" if at else "0") for at in signed],
        series=series,
        lines=[line(points), *([line(guesses)] if guesses else [])],
    )


def _guess(
    policy: ExitPolicy, layer: int, readings: Readings, labels: Sequence[str], best: int, left: bool
) -> ExitGuess:
    own = policy.at(layer)
    predicted = own.probe.logits(readings)[0]
    likeliest = int(predicted.argmax())
    return ExitGuess(
        margin=_margin(predicted, best),
        prediction=labels[likeliest],
        ahead=_margin(predicted, likeliest),
        threshold=own.thresholds[likeliest],
        leaves=not left and bool(policy.decide(layer, readings).decided[0]),
    )


def _margin(logits: npt.NDArray[np.float64], best: int) -> float:
    return float(logits[best] - np.delete(logits, best).max())


def _guess_text(guess: ExitGuess | None) -> str:
    if guess is None:
        return ""
    needed = f"of {guess.threshold:.2f}" if np.isfinite(guess.threshold) else "never leaves"
    said = f"{visible(guess.prediction, line=True)} {guess.ahead:.2f} {needed}"
    return f"{said}, leaves" if guess.leaves else said

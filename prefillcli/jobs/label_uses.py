"""What the labels of a model's head allow: options that have no meaning for them are refused before weights load."""

from __future__ import annotations

from prefillcli.data.prompts.labels import ClassLabels, Labels
from prefillcli.errors import UsageError
from prefillcli.options.score import ScoreSettings
from prefillcli.stats.probabilities import Measure


def require_label_uses(settings: ScoreSettings, labels: Labels) -> None:
    """Raise UsageError for the first option that has no meaning for what the labels' numbers are."""
    if settings.rationale and isinstance(labels, ClassLabels):
        raise UsageError(
            "--rationale: the model's classification head is read, which writes nothing\n"
            "leave it out, or read the next token with --head vocabulary; --evidence works with a head"
        )
    if labels.measure is Measure.SHARES:
        return
    asked = {
        "temperature": settings.temperature != 1.0,
        "calibration": settings.calibration is not None,
        "calibrate-with": bool(settings.calibrate_with),
        "truth": settings.truth is not None,
        "exit": settings.exit,
        "keep auto": settings.keep == "auto",
    }
    if labels.measure is Measure.CHANCES:
        del asked["keep auto"]
        why = "the classes of this model do not exclude one another: each has a probability of its own"
        advice = f"name one of them, --labels {labels.names[0]} for example, which is scored against its absence"
    else:
        del asked["truth"]
        asked["audit"] = settings.audit > 0 and len(labels.names) == 1  # no prediction could flip
        why = "the model's head gives values, which are no probabilities"
        advice = "leave it out, or give --head probability"
    for option, is_asked in asked.items():
        if is_asked:
            raise UsageError(f"--{option}: {why}\n{advice}")


def require_shares(labels: Labels, command: str) -> None:
    """Raise UsageError in a command that compares the probabilities of labels that exclude one another, for others."""
    if labels.measure is Measure.SHARES:
        return
    if labels.measure is Measure.CHANCES:
        why, advice = "classes that do not exclude one another", f"--labels {labels.names[0]}, one of them"
    else:
        why, advice = "values", "--head probability"
    raise UsageError(f"prefill {command} compares probabilities, and the model's head gives {why}\ngive {advice}")

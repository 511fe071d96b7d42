"""The file of a calibration: read before anything loads, and held against the job that it is used in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from prefillcli.data.prompts.labels import Label, parse_labels
from prefillcli.errors import UsageError
from prefillcli.jobs.sealed_file import read_sealed
from prefillcli.models.files import names_classifier, read_json
from prefillcli.models.samples import sample_model
from prefillcli.options.calibrate import ProbabilityOptions
from prefillcli.options.score import ScoreSettings
from prefillcli.redaction import without_secrets
from prefillcli.runtime import log
from prefillcli.stats.calibration import SCHEMA_VERSION, Calibration

REFUSED = {
    "model": "model",
    "adapters": "set of adapters",
    "tokenizer": "tokenizer",
    "prompt": "prompt settings",
    "labels": "label spellings",
}
"""Parts of a fingerprint that must be those of the scores a calibration was fitted on, as messages call them."""
WARNED = {"draft": "draft", "compression": "compression", "engine": "engine"}
"""Parts that change scores less; where they differ there is a warning."""


def read_calibration(path: str, labels: Sequence[str] | None) -> Calibration:
    """The calibration at a local path or URL, for a job with these labels; None if they are not known yet.

    Raises UsageError if it is none.
    """
    again = "make it with prefill calibrate"
    content, _ = read_sealed("--calibration", path, again)  # one that was written by hand has no seal
    try:
        calibration = Calibration.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["loc"] == ("schema_version",):
            reason = f"it is of another version of prefill (schema_version is not {SCHEMA_VERSION})"
        else:
            reason = f"it is no calibration: {where + ': ' if where else ''}{first['msg']}"
        raise UsageError(f"--calibration {path}: {reason}\n{again}") from None
    if labels is not None and calibration.labels != tuple(labels):
        raise UsageError(
            f"--calibration {path}: it is for the labels {', '.join(calibration.labels)}, not {', '.join(labels)}\n"
            "give the --labels that it was fitted with, in their order, or fit one for these"
        )
    return calibration


def check_calibration(settings: ScoreSettings) -> None:
    """Before a model is opened: raise UsageError where the labels and what `--calibration` names are certainly wrong.

    A model with a classification head may bring labels of its own.
    """
    typed = [label.name for label in parse_labels(settings.labels, least=1)]
    if settings.calibration is not None:
        own = settings.head != "vocabulary" and not settings.labels_given and _may_classify(settings)
        read_calibration(settings.calibration, None if own else typed)


def _may_classify(settings: ScoreSettings) -> bool:
    """Whether a model may have a classification head, as far as is known before it is opened."""
    folder = Path(settings.model or sample_model()).expanduser()
    if settings.head != "auto" or not folder.is_dir():
        return settings.head != "auto" or not folder.exists()  # a name on the hub
    config = folder / "config.json"
    return config.is_file() and names_classifier(read_json(config))


def calibration_of(settings: ProbabilityOptions, labels: Sequence[Label]) -> Calibration | None:
    """The calibration that `--calibration` names, if any does. Raises as `read_calibration`."""
    if settings.calibration is None:
        return None
    return read_calibration(settings.calibration, [label.name for label in labels])


def require_fitting(calibration: Calibration, path: str, fingerprint: Mapping[str, str]) -> None:
    """Raise UsageError if the calibration was fitted on scores of another model, prompt or labels than a job's.

    Warns on stderr if the scores were compressed in another way, or if the calibration does not say whose they were.
    """
    if calibration.fitted_on is None:
        return
    job, shown = calibration.fitted_on.job, without_secrets(path)
    if not job:
        log.warning(
            f"--calibration {shown}: it does not say which model's scores it was fitted on; "
            "calibrate what prefill score wrote, not a copy of its rows"
        )
        return
    other = [name for part, name in REFUSED.items() if job.get(part) != fingerprint.get(part)]
    if other:
        raise UsageError(
            f"--calibration {shown}: it was fitted on scores with another {' and another '.join(other)}\n"
            "score labelled rows with the options of this job, and fit one on them with prefill calibrate"
        )
    doubtful = [name for part, name in WARNED.items() if job.get(part) != fingerprint.get(part)]
    if doubtful:
        log.warning(
            f"--calibration {shown}: it was fitted on scores with another "
            f"{' and another '.join(doubtful)}; the probabilities may be off"
        )

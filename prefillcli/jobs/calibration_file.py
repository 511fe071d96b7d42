"""The file of a calibration: read before anything loads, and held against the job that it is used in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from prefillcli.data.prompts.labels import Label
from prefillcli.errors import UsageError
from prefillcli.jobs.given_file import read_given
from prefillcli.options.calibrate import ProbabilityOptions
from prefillcli.redaction import without_secrets
from prefillcli.stats.calibration import SCHEMA_VERSION, Calibration

REFUSED = {"model": "model", "tokenizer": "tokenizer", "prompt": "prompt settings", "labels": "label spellings"}
"""Parts of a fingerprint that must be those of the scores a calibration was fitted on, as messages call them."""
WARNED = {"draft": "draft", "compression": "compression", "engine": "engine"}
"""Parts that change scores less; where they differ there is a warning."""


def read_calibration(path: str, labels: Sequence[str]) -> Calibration:
    """The calibration at a local path or URL, for a job with these labels. Raises UsageError if it is none."""
    again = "make it with prefill calibrate"
    content = read_given("--calibration", path, again)
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
    if calibration.labels != tuple(labels):
        raise UsageError(
            f"--calibration {path}: it is for the labels {', '.join(calibration.labels)}, not {', '.join(labels)}\n"
            "give the --labels that it was fitted with, in their order, or fit one for these"
        )
    return calibration


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
        print(
            f"prefill: warning: --calibration {shown}: it does not say which model's scores it was fitted on; "
            "calibrate what prefill score wrote, not a copy of its rows",
            file=sys.stderr,
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
        print(
            f"prefill: warning: --calibration {shown}: it was fitted on scores with another "
            f"{' and another '.join(doubtful)}; the probabilities may be off",
            file=sys.stderr,
        )

"""The file of a calibration: read before anything loads, and held against the job that it is used in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from prefillcli.core.request import Request, Tick, answer
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import Label, Labels, parse_labels
from prefillcli.data.reading.record_batches import TableRows
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Prompt, RowBatch
from prefillcli.engines.base import PlanEngine
from prefillcli.errors import PrefillError, UsageError
from prefillcli.features.calibration.calibration import SCHEMA_VERSION, Calibration, content_free_calibration
from prefillcli.features.calibration.options import ProbabilityOptions
from prefillcli.jobs.sealed_file import read_sealed
from prefillcli.models.files import names_classifier, read_json, sample_model
from prefillcli.options.commands import ScoreSettings
from prefillcli.redaction import without_secrets
from prefillcli.runtime import log

# Parts of a fingerprint that must be those of the scores a calibration was fitted on, as messages call them.
REFUSED = {
    "model": "model",
    "adapters": "set of adapters",
    "tokenizer": "tokenizer",
    "prompt": "prompt settings",
    "labels": "label spellings",
}
# Parts that change scores less; where they differ there is a warning.
WARNED = {"draft": "draft", "compression": "compression", "engine": "engine"}


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
    # Whether a model may have a classification head, as far as is known before it is opened.
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


# Contextual calibration: the job's template with text that says nothing in the place of the row's own.


OPTION = "--calibrate-with"


def content_free_prompts(
    settings: ProbabilityOptions, source: Source | TableRows, builder: PromptBuilder, labels: Labels
) -> list[Prompt]:
    """A prompt for each text of `--calibrate-with`; none without any.

    The text takes the place of the template's columns that hold text, or of those in `--calibrate-columns`. All other
    columns must have one value in the first rows, up to 2,048; it stays. Raises UsageError if that is not so, or if no
    prompt can be made.
    """
    texts = settings.calibrate_with
    if not texts:
        return []
    for name in settings.calibrate_columns:
        if name not in builder.columns:
            listed = ", ".join(builder.columns) or "none"
            raise UsageError(f"--calibrate-columns {name}: the template has no such column\nit has: {listed}")
    columns = _first_rows(source, builder.columns)
    content = set(settings.calibrate_columns or filter(lambda name: _is_content(columns[name]), builder.columns))
    if not content:
        raise UsageError(f"{OPTION}: no column of the template holds text\nname the content with --calibrate-columns")
    fixed = {name: _one_value(name, columns[name]) for name in builder.columns if name not in content}
    batch = RowBatch(
        first_row=0,
        rows=np.arange(len(texts), dtype=np.int64),
        columns={name: list(texts) if name in content else [fixed[name]] * len(texts) for name in builder.columns},
        carried=pa.table({}),
        errors={},
        nbytes=0,
    )
    prompts, errors = builder.build(batch, labels)
    for row, error in errors.items():
        raise UsageError(
            f"{OPTION} {texts[row]!r}: no prompt can be made of the template: {error.code}: {error.detail}"
        )
    return prompts


def contextual_calibration(
    prompts: Sequence[Prompt], labels: Labels, engine: PlanEngine, tick: Tick = lambda tokens: None
) -> Calibration:
    """What the engine answers to prompts without content, divided out. Raises PrefillError if that is no number."""
    requests = [Request(prompt) for prompt in prompts]
    too_long = max(len(request.tokens) for request in requests)
    if too_long > engine.limits.max_tokens:
        raise UsageError(
            f"{OPTION}: the prompt without content has {too_long:,} tokens; the memory budget holds "
            f"{engine.limits.max_tokens:,}\ngive more --memory"
        )
    logprobs = answer(engine, requests, labels.sets, tick)
    if not np.isfinite(logprobs.max(axis=1)).all() or np.isnan(logprobs).any():
        raise PrefillError(f"{OPTION}: the model's answer is not a finite number: {logprobs.tolist()}")
    return content_free_calibration(labels.names, logprobs)


def _first_rows(source: Source | TableRows, names: Sequence[str]) -> dict[str, list[Any]]:
    # The values of these columns in the first rows that could be read.
    batches = source.batches()
    for batch in islice(batches, 1):
        good = [at for at, row in enumerate(batch.rows.tolist()) if row not in batch.errors]
        return {name: [batch.columns[name][at] for at in good] for name in names}
    return {name: [] for name in names}


def _is_content(values: Sequence[Any]) -> bool:
    # Whether a column holds text; one that holds nothing may.
    return any(isinstance(value, str) for value in values) or all(value is None for value in values)


def _one_value(name: str, values: Sequence[Any]) -> Any:
    # The value that all rows have. Raises UsageError if they differ.
    for value in values[1:]:
        if _shown(value) != _shown(values[0]):
            raise UsageError(
                f"{OPTION}: column {name} keeps its value, but it differs from row to row\n"
                "only text that is the same in all rows is no content: name all other columns with --calibrate-columns"
            )
    return values[0] if values else None


def _shown(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, np.ndarray) else value)

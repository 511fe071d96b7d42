"""The identity of a job: everything that changes a score, another column of a row, or the choice of rows.

Each option declares what it changes. The fingerprint has all options that change one of these: some by the contents
that they name, like a model's, all others by their value. So a new option joins it automatically.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefillcli.core.inputs import Inputs, OpenRows
from prefillcli.models import adapters
from prefillcli.models.files import brings_code
from prefillcli.models.open import Opened, dtype_name
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.engines import ENGINES
from prefillcli.options.judging import truth_text
from prefillcli.options.option import changed
from prefillcli.options.settings import JobSettings
from prefillcli.rows.output.destination import MEASURE, Job
from prefillcli.rows.proof import ModelContents, hash_value
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.opening import local_models
from prefillcli.stats.labels import Measure

STANDS_FOR = {
    "input": ("inputs", "limit", "sample", "seed", "csv_separator", "csv_quoting"),
    "model": ("model", "revision"),
    "draft": ("draft",),
    "prompt": (
        "prompt_column",
        "template",
        "chat",
        "system",
        "thinking",
        "chat_option",
        "answer_prefix",
        "max_length",
        "on_long",
        "empty_text",
        "literal",
        "max_row_bytes",
        "pair_column",
    ),
    "labels": ("labels",),
    "label_norm": ("label_norm",),
    "engine": ("engine", "engine_options"),
    "calibration": ("calibration",),
    "exit_profile": ("exit_profile",),
    "review": ("review_below",),
}
"""Parts of the fingerprint that are not made of the values of options, and the options that they stand for."""


class LocalModels:
    """The contents of the models' folders, taken before anything is read from them.

    Hashing begins at once. A name on the hub gets its folder only when it is opened, in `of`. Raises UsageError as
    `local_models`.
    """

    def __init__(self, settings: JobSettings) -> None:
        self._contents = {path: ModelContents(path) for path in local_models(settings)}
        for contents in self._contents.values():
            contents.begin()

    def of(self, path: Path) -> ModelContents:
        """Return the contents of an opened model's folder or GGUF file."""
        if path not in self._contents:
            self._contents[path] = ModelContents(path)
        return self._contents[path]

    @property
    def digests(self) -> dict[str, str]:
        """Digests of the contents of each folder that change a score, by its path."""
        return {str(path): contents.model() for path, contents in self._contents.items()}

    def require_unchanged(self) -> None:
        """Raise ContentChangedError unless every folder is as it was."""
        for contents in self._contents.values():
            contents.require_unchanged()


def fingerprint(inputs: Inputs, parts: Parts, models: LocalModels) -> dict[str, str]:
    """Return the digests of all parts of the job's identity, by part. Waits until the contents of the files are
    hashed.

    Raises ContentChangedError if a file has changed meanwhile; errors of reading pass through.
    """
    settings, opened, labels = inputs.settings, inputs.opened, inputs.labels
    values = _values(settings, opened)
    found = {
        "input": inputs.source.fingerprint(),
        **_of_models(settings, opened, models, values),
        "prompt": inputs.builder.fingerprint(),
        "labels": hash_value([[label.name, label.variants] for label in labels.labels]),
        "settings": "",
    }
    if labels.measure is not Measure.SHARES:
        found[MEASURE] = labels.measure.value
    if settings.answers.label_norm != "none":
        found["label_norm"] = settings.answers.label_norm
    if settings.engine.engine != "torch":
        found["engine"] = hash_engine(settings)
    small = [models.of(each.files.origin) for each in opened.small]
    if any(each.files.dtype_why and each.narrow is None for each in opened.small):
        found["draft_dtype"] = ",".join(dtype_name(each.files) for each in opened.small)
    own = [each.tokenizer() if opened.small[at].tokenizer is not None else "" for at, each in enumerate(small)]
    if any(own):
        found["draft_tokenizer"] = _one_or_hash(own)
    if opened.temperatures and parts.asking.typed:
        found["temperatures"] = hash_value(dict(opened.temperatures))
    found |= parts.asking.identity(values)
    if parts.calibration is not None:
        found |= parts.calibration.identity()
    if parts.review is not None:
        found |= parts.review.identity()
    for each in parts.readings:
        found |= each.identity(values)
    found["settings"] = hash_value(changed(ScoreSettings, values))
    return found


def _of_models(settings: JobSettings, opened: Opened, models: LocalModels, values: dict[str, Any]) -> dict[str, str]:
    # The digests of the files of all models, by part of the identity. Options that name some go out of the `values`.
    model = models.of(opened.files.origin)
    found = {"model": model.model(), "tokenizer": model.tokenizer()}
    if opened.small:
        found["draft"] = _one_or_hash([models.of(each.files.origin).model() for each in opened.small])
    if settings.adapters.adapter:
        found["adapters"] = adapters.identity(settings.adapters, opened, values, models.of)
    return found


def require_model_of_heads(settings: JobSettings, opened: Opened, parts: Parts) -> None:
    """Raise UsageError if the heads of a job without a fingerprint are for another model. Waits until the files of the
    models are hashed."""
    if parts.heads is not None:
        found = _of_models(settings, opened, LocalModels(settings), _values(settings, opened))
        parts.heads.require_model(opened, found)


def _one_or_hash(digests: Sequence[str]) -> str:
    return digests[0] if len(digests) == 1 else hash_value(digests)


def output_job(fingerprint: Mapping[str, str], settings: JobSettings) -> Job:
    """Return the job as its output records it, with the options that choose its rows: `prefill verify` reads them."""
    selection = {name: settings.value(name) for name in settings.changing("rows")}
    return Job(dict(fingerprint), selection, settings.ids.id_column, asked(settings))


def asked(settings: JobSettings) -> str:
    """Return the digest of the options that may change an output."""
    names = settings.changing("scores", "columns", "rows")
    return hash_value([[name, str(settings.value(name))] for name in names])


def is_same(rows: OpenRows, models: LocalModels, job: Job) -> bool:
    """Return whether the job of an output is surely that of an opening whose models are not open yet, because its
    options, input and model are the same. Errors of reading pass through."""
    known = job.fingerprint
    return (
        job.asked == asked(rows.settings)
        and known.get("model") in models.digests.values()
        and known.get("input") == rows.source.fingerprint()
    )


def hash_engine(settings: JobSettings) -> str:
    """Return the digest of the engine and those of its options that may change a score."""
    sizes = ENGINES[settings.engine.engine].sizes
    return hash_value(
        [
            settings.engine.engine,
            {key: value for key, value in settings.engine.engine_options.items() if key not in sizes},
        ]
    )


def _values(settings: JobSettings, opened: Opened) -> dict[str, Any]:
    """Return the options that the fingerprint has by their value."""
    elsewhere = {name for names in STANDS_FOR.values() for name in names}
    names = [name for name in settings.changing("scores", "columns", "rows") if name not in elsewhere]
    return {name: settings.value(name) for name in names} | {
        "dtype": str(opened.files.dtype),
        "truth": truth_text(settings.truth.truth),
        "trust_remote_code": settings.lm.trust_remote_code and _replaces_code(opened),
    }


def _replaces_code(opened: Opened) -> bool:
    """Return whether the model or its draft brings code for a family that transformers could run without it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = [opened.files, *(each.files for each in opened.small)]
    return any(files.family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and brings_code(files.path) for files in models)

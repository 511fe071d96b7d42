"""The opening of every command: its rows, the models' files, and how rows become prompts, in the order in which
mistakes are cheapest to find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefillcli.asking.batch_files import is_batch_file, require_batch_file
from prefillcli.asking.decisions import for_requests
from prefillcli.asking.labels import LabelAsking
from prefillcli.asking.questions import QuestionAsking
from prefillcli.asking.requests import is_request_file
from prefillcli.core.inputs import Inputs
from prefillcli.errors import UsageError, did_you_mean, without_secrets
from prefillcli.judging.calibration import content_free_prompts
from prefillcli.models.files import sample_model
from prefillcli.models.open import Opened, asks_typed, local_model, small_models
from prefillcli.options.combinations import given
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.engines import require_engine
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.templates import RowTemplate
from prefillcli.reading.compress.compressor import COMPRESSION_COLUMNS
from prefillcli.rows.input.source import Source
from prefillcli.runtime import clock, log
from prefillcli.scoring.compose import Parts, compose
from prefillcli.scoring.loading import open_models
from prefillcli.scoring.path_table import refuse_unlike_partitions
from prefillcli.stats.labels import Measure


class Opening:
    """Opens the inputs of a command, and composes the parts of its job.

    `open_source`, then `open_models`. `carried` are the input columns that are read besides those of the prompts: by
    default those of the output, including the id.
    """

    parts: Parts

    def __init__(self, settings: JobSettings, carried: Sequence[str | None] = ()) -> None:
        self.inputs = Inputs(settings, carried)
        self._scores = isinstance(settings, ScoreSettings)  # whether options for whole outputs are checked

    def compose(self, available: Sequence[str] = (), first: Mapping[str, Any] = {}) -> None:
        """Compose the parts for rows with these columns, of which this is the first. Raises UsageError."""
        inputs = self.inputs
        self.parts = compose(inputs.settings, available, first)
        inputs.asking, inputs.groups = self.parts.asking, self.parts.groups
        inputs.carry(self.parts.carried)
        if self.parts.compression is not None:
            inputs.row_columns = COMPRESSION_COLUMNS

    def open_source(self) -> None:
        """Open the rows, and the template that makes prompts of them.

        A wrong file, column, template or model folder is reported here, before the import of torch, which takes
        seconds. Raises UsageError or PrefillError as `Source` does.
        """
        inputs, settings = self.inputs, self.inputs.settings
        clock.step("looking at the input")
        self.compose()  # raises UsageError for options that are wrong whatever the input holds
        inputs.source = source = Source.open(
            settings.input.inputs,
            limit=settings.input.limit,
            sample=settings.input.sample,
            seed=settings.input.seed,
            **settings.input.csv,
        )
        if (found := for_requests(settings, source.available, source.first)) is not settings:
            settings = inputs.settings = found
            inputs.carry([settings.ids.id_column])
        if is_batch_file(settings, source.available) or is_request_file(settings, source.available):
            self.compose(source.available, source.first)
        template = settings.prompts.template
        if template is not None and not isinstance(inputs.asking, QuestionAsking):  # which compiles its own
            inputs.template = RowTemplate(template)
        columns = inputs.asking.columns(source.available, inputs.template)
        source.select(columns=tuple(columns), carried=inputs.carried)
        if (column := settings.adapters.adapter_column) is not None and column not in source.available:
            raise UsageError(
                f"--adapter-column {column}: the input has no such column{did_you_mean(column, source.available)}"
            )
        models = local_models(settings)
        require_engine(settings.engine.engine)
        for path in source.left_out:
            log.warning(f"{without_secrets(path)}: not read: by its name no Parquet, JSON Lines or CSV")
        if self.parts.rejects is not None:
            self.parts.rejects.check_source(source)
        labels = inputs.asking.named_labels(models[0]) if models else None
        if labels is not None:
            inputs.labels = labels
            if self._scores:
                require_label_uses(inputs)
            self._check_labels()
        if self._scores:
            refuse_unlike_partitions(settings, source.partition_keys)
        self.require_uses(source.available)

    def open_models(self, dtypes: Sequence[str] = ()) -> None:
        """Open the models' folders, and make prompts possible. No weights are loaded. `dtypes` are the number formats
        that are chosen already. Raises UsageError."""
        settings = self.inputs.settings
        if not hasattr(self, "parts"):
            self.compose()
        if not hasattr(self.inputs, "source"):
            local_models(settings)
        clock.step("starting torch and transformers")
        self.use_models(open_models(settings, dtypes))
        if hasattr(self.inputs, "source"):
            self.open_rows()

    def use_models(self, opened: Opened, labels: Labels | None = None) -> None:
        """Take these models, with their `labels` if these are known already."""
        inputs, parts = self.inputs, self.parts
        inputs.opened = opened
        if opened.files.encoder:
            inputs.settings.take_encoder(opened.files.origin)
            log.info(f"{opened.files.origin}: an encoder, scored in padded batches by transformers (--engine hf)")
        inputs.labels = inputs.asking.labels(opened) if labels is None else labels
        if self._scores:
            require_label_uses(inputs)
        if isinstance(parts.asking, LabelAsking):
            parts.asking.warn(opened)
        if parts.rationale is not None:
            parts.rationale.require_labels(inputs.labels)
        if parts.calibration is not None:
            parts.calibration.open(inputs)
        if parts.exits is not None:
            parts.exits.require_models(opened)
        self._check_labels()

    def _check_labels(self) -> None:
        # First by their names alone, before torch is imported, and then as they are.
        if not hasattr(self.inputs, "source"):
            return
        for each in self.parts.judges:
            each.check(self.inputs)
        if self._scores:
            self.inputs.schema().require_distinct(self.inputs.settings.truth_columns.values())

    def open_rows(self) -> None:
        """Make prompts possible. Raises UsageError."""
        self.inputs.open_rows()
        self.make_common_prompts()
        if self._scores:
            self.parts.condition(self.inputs.schema())  # raises UsageError for columns that the output lacks

    def make_common_prompts(self) -> None:
        """Make the prompts, besides those of the rows, on which all results depend. Raises UsageError."""
        if self.parts.calibration is not None:
            self.inputs.common = content_free_prompts(self.inputs.settings, self.inputs)

    def require_uses(self, available: Sequence[str]) -> None:
        """Raise UsageError for an option of `prefill score` that has no effect on rows with these columns, or that
        names another one."""
        if not self._scores:
            return
        require_batch_file(self.inputs.settings, available)
        if self.parts.compression is not None:
            self.parts.compression.require_use(available)


def open_inputs(settings: JobSettings, carried: Sequence[str | None] = ()) -> Opening:
    """Open the rows of a command, then the models' folders. Raises as `Opening`."""
    opening = Opening(settings, carried)
    opening.open_source()
    opening.open_models()
    return opening


def local_models(settings: JobSettings) -> list[Path]:
    """Return the folders and GGUF files on this machine of the model, the draft, first models and adapters."""
    found = [
        sample_model(asks_typed(settings)) if settings.lm.model is None else local_model(settings.lm.model, "--model")
    ]
    option, names = small_models(settings)
    found += [local_model(name, f"--{option}") for name in names]
    adapters = settings.adapters.adapter
    if adapters:
        from prefillcli.models.adapters import local_adapter

        found += map(local_adapter, adapters.values())
    return [*filter(None, found)]


def require_shares(labels: Labels, command: str) -> None:
    """Raise UsageError unless labels exclude one another, in a command that compares their probabilities."""
    if labels.measure in (Measure.SHARES, Measure.DECISIONS):
        return
    if labels.measure is Measure.CHANCES:
        why, advice = "classes that do not exclude one another", f"--labels {labels.names[0]}, one of them"
    else:
        why, advice = "values", "--head probability"
    raise UsageError(f"prefill {command} compares probabilities, and the model's head gives {why}\ngive {advice}")


_BOTH = Measure.CHANCES, Measure.VALUES
# Options that mean nothing for labels with these measures.
_MEANINGLESS: dict[str, tuple[Measure, ...]] = {
    **dict.fromkeys(("--label-values", "--calibration", "--calibrate-with", "--review-below"), _BOTH),
    "--keep auto": (Measure.VALUES,),
    **dict.fromkeys(("--exit", "--first", "--compute", "--estimate"), _BOTH),
    "--truth": (Measure.CHANCES,),
    "--temperature": _BOTH,
}


def require_label_uses(inputs: Inputs) -> None:
    """Raise UsageError for the first option that has no meaning for numbers of the labels' kind."""
    settings, labels = inputs.settings, inputs.labels
    if labels.measure in (
        Measure.SHARES,
        Measure.CHOICES,
        Measure.DECISIONS,
        Measure.LIKELIHOOD,
        Measure.TOKENS,
    ):  # what the latter cannot is refused already
        return
    asked = [text for text, measures in _MEANINGLESS.items() if labels.measure in measures and given(settings, text)]
    if labels.measure is Measure.CHANCES:
        why = "the classes of this model do not exclude one another: each has its own probability"
        advice = f"name one of them, --labels {labels.names[0]} for example, which is scored against its absence"
    else:
        if settings.flips.audit and len(labels.names) == 1:  # no prediction could flip
            asked += ["--audit"]
        why = "the model's head gives values, which are not probabilities"
        advice = "leave it out, or give --head probability"
    for option in asked:
        raise UsageError(f"{option}: {why}\n{advice}")

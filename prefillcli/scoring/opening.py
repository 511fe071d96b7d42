"""The opening of every command: its rows, the models' files, and how rows become prompts, in the order in which
mistakes are cheapest to find."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from prefillcli.asking.batch_files import require_batch_file
from prefillcli.asking.decisions import DecisionAsking, for_requests
from prefillcli.asking.labels import LabelAsking
from prefillcli.asking.questions import QuestionAsking
from prefillcli.core.inputs import ALL_COLUMNS, Inputs, OpenRows, open_source, require_image_folder
from prefillcli.errors import UsageError, did_you_mean, without_secrets
from prefillcli.judging.calibration import content_free_prompts
from prefillcli.models.decision_models import layout_form, require_layout
from prefillcli.models.files import sample_model
from prefillcli.models.open import Opened, asks_typed, local_model, small_models
from prefillcli.options.combinations import given
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.engines import require_engine
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.layouts import LayoutForm
from prefillcli.prompts.templates import RowTemplate
from prefillcli.reading.compress.compressor import COMPRESSION_COLUMNS
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.runtime import clock, log
from prefillcli.scoring.compose import Parts, compose
from prefillcli.scoring.loading import open_models
from prefillcli.scoring.path_table import refuse_unlike_partitions
from prefillcli.stats.labels import Measure


def open_rows(settings: JobSettings, carried: Sequence[str | None] = ()) -> tuple[OpenRows, Parts]:
    """Open the rows of a command and the template that makes prompts of them, and compose the parts of its job.

    `carried` are input columns that go to the output. A wrong file, column, template or model folder is reported here,
    before the import of torch, which takes seconds. Raises UsageError or PrefillError as `Source` does.
    """
    clock.step("looking at the input")
    source = open_source(settings)
    given, settings = settings, for_requests(settings, source.available, source.first)
    parts = compose(settings, source.available, source.first)
    asking, template = parts.asking, settings.prompts.template
    # Questions of a file compile their own
    compiled = None if template is None or isinstance(asking, QuestionAsking) else RowTemplate(template)
    names = [*carried, *parts.carried, *([] if settings is given else [settings.ids.id_column])]
    rows = rows_of(settings, parts, source, _carried(settings, names, source), compiled)
    columns = tuple(asking.columns(source.available, compiled))
    if parts.rejects is not None:
        parts.rejects.check_source(source)  # which reads other columns from then on
    source.select(columns=(*columns, *settings.images.image_column), carried=rows.carried)
    require_image_folder(settings)
    if (column := settings.adapters.adapter_column) is not None and column not in source.available:
        raise UsageError(
            f"--adapter-column {column}: the input has no such column{did_you_mean(column, source.available)}"
        )
    models = local_models(settings)
    if (form := _form_of(settings, models)) is not None:
        asking.take_layout(form)
    require_engine(settings.engine.engine)
    for path in source.left_out:
        log.warning(f"{without_secrets(path)}: not read: by its name no Parquet, JSON Lines or CSV")
    if isinstance(asking, DecisionAsking):
        asking.require_lines(source)
    labels = asking.named_labels(models[0]) if models else None
    if labels is not None:
        if checks_outputs(settings):
            require_label_uses(settings, labels)
        _checked(rows, parts, labels)
    if checks_outputs(settings):
        refuse_unlike_partitions(settings, source.partition_keys)
        require_uses(settings, parts, source.available)
    return rows, parts


def _form_of(settings: JobSettings, models: Sequence[Path]) -> LayoutForm | None:
    # How the model is asked, by its own files or an adapter's, as far as they are on this machine.
    folders = [*models[:1]]
    if settings.adapters.adapter:
        from prefillcli.models.adapters import local_adapter

        folders += filter(None, map(local_adapter, settings.adapters.adapter.values()))
    return next(filter(None, (layout_form(each, settings.lm.layout) for each in folders)), None)


def rows_of(
    settings: JobSettings,
    parts: Parts,
    source: Source,
    carried: Sequence[str] = (),
    template: RowTemplate | None = None,
) -> OpenRows:
    """Return the rows of a source for a job with these parts."""
    asking = parts.asking
    return OpenRows(
        settings,
        source,
        asking,
        parts.groups,
        carried,
        row_columns=None if parts.compression is None else COMPRESSION_COLUMNS,
        template=template,
    )


def _carried(settings: JobSettings, names: Sequence[str | None], source: Source) -> Sequence[str]:
    # The columns of the input that go to the output, where `ALL_COLUMNS` stands for all of them.
    found = [name for name in names if name is not None]
    if ALL_COLUMNS in found and ALL_COLUMNS not in source.available:
        found = [name for name in found if name != ALL_COLUMNS] + list(source.available)
    keys = source.partition_keys if settings.files.partition else ()
    return tuple(dict.fromkeys((*found, *keys)))


def checks_outputs(settings: JobSettings) -> bool:
    """Return whether options for whole outputs are checked."""
    return isinstance(settings, ScoreSettings)


def open_inputs(rows: OpenRows, parts: Parts, dtypes: Sequence[str] = ()) -> Inputs:
    """Open the models' folders, and make prompts possible. No weights are loaded. `dtypes` are the number formats that
    are chosen already. Raises UsageError."""
    clock.step("starting torch and transformers")
    return use_models(rows, parts, open_models(rows.settings, dtypes))


def use_models(rows: OpenRows, parts: Parts, opened: Opened, labels: Labels | None = None) -> Inputs:
    """Read the rows by models that are open, with their `labels` if these are known already. Raises UsageError."""
    labels, schema = answers_of(rows, parts, opened, labels)
    opened = with_heads(parts, opened, labels)
    builder = rows.make_builder(opened, labels, rows.source.available, rows.template)
    rows.select(rows.source, builder)
    tell_way(rows.settings, builder)
    inputs = with_common_prompts(Inputs(rows, opened, labels, schema, builder))
    if checks_outputs(rows.settings):
        parts.condition(schema)  # raises UsageError for columns that the output lacks
    return inputs


def with_heads(parts: Parts, opened: Opened, labels: Labels) -> Opened:
    """Let the heads of a job answer the questions with these labels, if it has some; return the model as far as it is
    read then. Raises UsageError."""
    return opened if parts.heads is None else parts.heads.take(opened, labels)


def answers_of(
    rows: OpenRows, parts: Parts, opened: Opened, labels: Labels | None = None
) -> tuple[Labels, OutputSchema]:
    """Return the labels after each prompt, and the columns of the output. Raises UsageError for options that do not
    fit them."""
    settings = rows.settings
    labels = labels_of(settings, parts, opened, labels)
    calibrated = () if parts.calibration is None else parts.calibration.open(rows.schema(labels, opened))
    if parts.exits is not None:
        parts.exits.require_models(opened)
    return labels, _checked(rows, parts, labels, opened, calibrated)


def labels_of(settings: JobSettings, parts: Parts, opened: Opened, labels: Labels | None = None) -> Labels:
    """Return the labels after each prompt; `labels`, if they are known already. Raises UsageError for models that do
    not fit the settings."""
    if opened.files.encoder:
        settings.take_encoder(opened.files.origin)
        log.info(f"{opened.files.origin}: an encoder, scored in padded batches by transformers (--engine hf)")
    if opened.layout is not None:  # of a name on the hub; else it is known already
        parts.asking.take_layout(opened.layout.form)
    found = parts.asking.labels(opened) if labels is None else labels
    if checks_outputs(settings):
        require_label_uses(settings, found)
    if isinstance(parts.asking, LabelAsking):
        parts.asking.warn(opened)
    if parts.rationale is not None:
        parts.rationale.require_labels(found)
    return found


def _checked(
    rows: OpenRows, parts: Parts, labels: Labels, opened: Opened | None = None, calibrated: Collection[str] = ()
) -> OutputSchema:
    # The columns of the output, once the judges have checked the labels: by their names alone, before torch is
    # imported, and then as they are.
    schema = rows.schema(labels, opened, calibrated)
    for each in parts.judges:
        each.check(rows, labels, schema)
    if parts.review is not None:
        schema = rows.schema(labels, opened, calibrated, parts.review.floors(schema))
    if checks_outputs(rows.settings):
        schema.require_distinct(rows.settings.truth.columns.values())
    return schema


def open_without_rows(settings: JobSettings) -> tuple[Opened, Labels]:
    """Open the models' folders of a command, whatever its rows, and their labels. Raises UsageError."""
    parts = compose(settings)
    local_models(settings)
    clock.step("starting torch and transformers")
    opened = open_models(settings)
    labels = labels_of(settings, parts, opened)
    return with_heads(parts, opened, labels), labels


def with_common_prompts(inputs: Inputs) -> Inputs:
    """Add the prompts, besides those of the rows, on which all results depend. Raises UsageError."""
    texts = inputs.settings.probabilities.calibrate_with
    found = content_free_prompts(inputs) if texts and not isinstance(inputs.rows.asking, DecisionAsking) else ()
    return replace(inputs, common=found) if found else inputs


def tell_way(settings: JobSettings, builder: PromptBuilder, told: str = "") -> str:
    """Log how the chats of a builder get to the answer, unless that is `told` already; return it."""
    said = builder.way.said if builder.way else ""
    if said and said != told and not settings.run.quiet:
        ends = "the model thinks first" if settings.prompts.thinking == "on" else "the answer comes next"
        log.info(f"{said}, so that {ends} (--thinking)")
    return said


def require_uses(settings: JobSettings, parts: Parts, available: Sequence[str]) -> None:
    """Raise UsageError for an option of `prefill score` that has no effect on rows with these columns, or that names
    another one."""
    require_batch_file(settings, available)
    if parts.compression is not None:
        parts.compression.require_use(settings.rationales, available)


def local_models(settings: JobSettings) -> list[Path]:
    """Return the folders and GGUF files on this machine of the model, the draft, first models and adapters."""
    found = [
        sample_model(asks_typed(settings)) if settings.lm.model is None else local_model(settings.lm.model, "--model")
    ]
    option, names = small_models(settings)
    found += [local_model(name, f"--{option}") for name in names]
    for model, said in zip(found, ("--model", *(f"--{option}" for _ in names)), strict=True):
        if model is not None and said != "--draft":  # a draft's answers are not read
            require_layout(model, said, settings.lm.layout, found[0] if said == "--first" else None)
    adapters = settings.adapters.adapter
    if adapters:
        from prefillcli.models.adapters import local_adapter

        for adapter in map(local_adapter, adapters.values()):
            if adapter is not None:
                require_layout(adapter, "--adapter", settings.lm.layout)
            found.append(adapter)
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


def require_label_uses(settings: JobSettings, labels: Labels) -> None:
    """Raise UsageError for the first option that has no meaning for numbers of the labels' kind."""
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

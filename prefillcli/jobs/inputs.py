"""What a job reads: the rows, and how they become prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature, features_of
from prefillcli.data.output.columns import ColumnGroups, OutputSchema, Probabilities
from prefillcli.data.output.target import Target
from prefillcli.data.prompts.builder import PromptBuilder, PromptSettings, prompt_column
from prefillcli.data.prompts.labels import ClassLabels, Labels
from prefillcli.data.prompts.templates import RowTemplate
from prefillcli.data.proof import ModelContents
from prefillcli.data.reading.record_batches import BATCH_ROWS, TableRows
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Prompt
from prefillcli.data.windows import MAX_ROWS
from prefillcli.engines.registry import loader_of
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.jobs.path_table import output_of
from prefillcli.models.adapters import local_adapter
from prefillcli.models.files import sample_model
from prefillcli.models.open import Opened, answer_labels, local_model
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.groups import AdapterOptions, JobOptions
from prefillcli.options.rationale import EvidenceOptions
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.redaction import without_secrets
from prefillcli.runtime import log
from prefillcli.runtime.memory import parse_size
from prefillcli.stats.probabilities import Measure

if TYPE_CHECKING:  # this takes torch along
    from prefillcli.compress.compressor import Compressor


@dataclass(frozen=True, slots=True)
class Granularity:
    """How much of a job is read, scored and written together."""

    batch_rows: int = BATCH_ROWS
    window_rows: int = MAX_ROWS
    flush_seconds: float = 15.0
    """Finished rows are written at least this often, between two answers of the engine."""
    block_tokens: int = BLOCK_TOKENS
    """A prefix of so many tokens and more is handed from one window to the next."""


USUAL = Granularity()


class LocalModels:
    """The contents of the model, the draft and the adapters, from before anything of them is read.

    Their hashing begins at once. A name on the hub has a folder only when it is opened, in `of`. Raises UsageError as
    `local_model` and `local_adapter`.
    """

    def __init__(self, settings: ScoreSettings) -> None:
        self._contents = {path: ModelContents(path) for path in _local_models(settings)}
        for contents in self._contents.values():
            contents.begin()

    def of(self, path: Path) -> ModelContents:
        """Those of an opened model's folder or GGUF file."""
        if path not in self._contents:
            self._contents[path] = ModelContents(path)
        return self._contents[path]

    @property
    def digests(self) -> dict[str, str]:
        """Digests of what each folder computes, by its path."""
        return {str(path): contents.model() for path, contents in self._contents.items()}

    def require_unchanged(self) -> None:
        """Raise ContentChangedError unless every folder is what it was."""
        for contents in self._contents.values():
            contents.require_unchanged()


class Opening:
    """What a job reads, opened in the order in which mistakes are cheapest to tell: the rows, how they become prompts,
    the models' files, and the features that the settings ask for.

    `source_opened`, then `models_opened`. Close the builder.
    """

    source: Source
    opened: Opened
    labels: Labels
    builder: PromptBuilder

    def __init__(self, settings: ScoreSettings) -> None:
        self.settings = settings
        self.features = features_of(settings)
        self.common: Sequence[Prompt] = ()
        """Prompts beside those of the rows, on which the results of all rows depend."""
        self.compressor: Compressor | None = None
        """What compresses prompts, once the models are loaded."""
        self.probabilities: Probabilities | None = None
        """What makes the calibrated probabilities of the rows."""

    @property
    def carried(self) -> list[str]:
        """Input columns that go to the output, those among them that are to name its folders."""
        source: Source | None = getattr(self, "source", None)
        keys = source.partition_keys if source is not None and self.settings.partition else ()
        extra = [name for each in self.features for name in each.carried()]
        named = [self.settings.id_column, *filter(None, self.settings.keep_columns), *extra, *keys]
        return list(dict.fromkeys(name for name in named if name is not None))

    @property
    def groups(self) -> ColumnGroups:
        """The columns that the output has beside those of every output."""
        settings = self.settings
        return ColumnGroups(
            audit=settings.audit > 0,
            adapters=settings.adapter_column is not None,
            rationales=settings.rationale > 0,
            evidence=settings.evidence,
            **{name: True for each in self.features for name in each.columns},
        )

    def open_source(self) -> None:
        """Open the rows. Torch is not imported. Raises UsageError or PrefillError as `open_source` does."""
        self.source, self._template = open_source(self.settings, self.carried)
        refuse_unlike_partitions(self.settings, self.source)
        refuse_idle_draft(self.settings, self.source)
        for each in self.features:
            each.source_opened(self)

    def open_models(self) -> None:
        """Open the models' folders, and make prompts possible. No weights are loaded. Raises UsageError."""
        self.use_models(loader_of(self.settings.engine).open_models(self.settings))
        self.open_rows()

    def open_rows(self) -> None:
        """Make prompts possible. Raises UsageError."""
        self.builder = self.new_builder(self._template)
        for each in self.features:
            each.rows_opened(self)

    def use_models(self, opened: Opened, labels: Labels | None = None) -> None:
        """Take these models, with `labels` that are known of them already. Raises UsageError for options that have no
        meaning for these labels."""
        self.opened = opened
        self.labels = answer_labels(opened, self.settings) if labels is None else labels
        require_label_uses(self.settings, self.labels, self.features)
        for each in self.features:
            each.models_opened(self)

    def new_builder(self, template: RowTemplate | None = None) -> PromptBuilder:
        """What makes prompts of the rows; without a `template` it is read and compiled again. Raises UsageError."""
        return prompt_builder(self.settings, self.opened, self.source, self.carried, template)

    def schema(self, *, json_text: bool = False) -> OutputSchema:
        """The columns of the output; with `json_text`, its format holds carried JSON as text."""
        truths = [each.truth_column() for each in self.features]
        return OutputSchema(
            labels=self.labels.names,
            id_name=self.settings.id_column,
            carried=self.source.carried_schema,
            json_carried=self.source.kind == "jsonl",
            json_text=json_text,
            truth=next(filter(None, truths), None),
            groups=self.groups,
            measure=self.labels.measure,
        )


def _local_models(settings: JobOptions) -> list[Path]:
    """The folders and GGUF files of the model, the draft and the adapters, where they are on this machine."""
    found = [sample_model() if settings.model is None else local_model(settings.model, "--model")]
    if settings.draft is not None and not settings.drafts_itself:
        found.append(local_model(settings.draft, "--draft"))
    if isinstance(settings, AdapterOptions):
        found += map(local_adapter, settings.adapter.values())
    return [path for path in found if path is not None]


def refuse_unlike_partitions(settings: ScoreSettings, source: Source) -> None:
    """Raise UsageError if --partition is given and the output cannot have folders like those of the input."""
    keys = source.partition_keys
    if not settings.partition:
        return
    if not keys:
        raise UsageError("--partition: no folder of the input is named like day=2026-01-01\nleave --partition out")
    output = output_of(settings)
    if not Target.parse(output).directory:
        raise UsageError(f"--partition: --output {output} is one file\nend it in / for a folder")
    for option, column in (("--id-column", settings.id_column), ("--truth", getattr(settings, "truth", None))):
        if column in keys:
            raise UsageError(f"{option} {column}: with --partition it names folders\nchoose another column")


def open_source(settings: JobOptions, carried: Sequence[str]) -> tuple[Source, RowTemplate | None]:
    """The rows, and the template that makes prompts of them.

    A wrong file, column, template or model folder is told here, before torch is imported, which takes seconds.
    `carried` are the columns that are taken along, like the id. Raises UsageError or PrefillError as `Source` does.
    """
    source = Source.open(settings.inputs, limit=settings.limit, sample=settings.sample, seed=settings.seed)
    template = None if settings.template is None else RowTemplate(settings.template)
    columns = template.columns if template else [prompt_column(settings.prompt_column, source.available)]
    source.select(columns=columns, carried=carried)
    if isinstance(settings, AdapterOptions):
        refuse_missing_adapters(settings.adapter_column, source)
    _local_models(settings)
    for path in source.left_out:
        log.warning(f"{without_secrets(path)}: not read: its name says neither Parquet nor JSON Lines")
    return source, template


def prompt_builder(
    settings: JobOptions,
    opened: Opened,
    source: Source,
    carried: Sequence[str],
    template: RowTemplate | None = None,
) -> PromptBuilder:
    """What makes prompts of the rows of `source`, which will read the columns for it. Raises UsageError.

    `template` is that of `open_source`, for one builder; without, it is read and compiled again.
    """
    builder = make_builder(settings, opened, source.available, template)
    source.select(
        columns=builder.columns, carried=carried, optional=builder.optional, max_row_bytes=builder.max_row_bytes
    )
    return builder


def make_builder(
    settings: JobOptions, opened: Opened, available: Sequence[str], template: RowTemplate | None = None
) -> PromptBuilder:
    """What makes prompts of rows with these columns. Raises UsageError."""
    files = opened.files
    return PromptBuilder(
        opened.tokenizer,
        PromptSettings(
            prompt_column=settings.prompt_column,
            template=settings.template,
            chat=settings.chat,
            system=settings.system,
            max_length=min(settings.max_length or opened.max_length, opened.max_length),
            on_long=settings.on_long,
            vocab_size=files.config.vocab_size,
            literal=settings.literal,
            max_row_bytes=parse_size(settings.max_row_bytes) if settings.max_row_bytes else None,
            compression=opened.compresses,
            classifies=files.head is not None,
            padding=None if files.head is None else files.head.padding,
            adapter_column=opened.adapter_column,
            adapters=tuple(each.name for each in opened.adapters),
            sections=isinstance(settings, EvidenceOptions) and settings.evidence,
        ),
        available,
        template=template,
    )


def refuse_missing_adapters(column: str | None, source: Source | TableRows) -> None:
    """Raise UsageError if no row can name an adapter in this column."""
    if column is not None and column not in source.available:
        raise UsageError(
            f"--adapter-column {column}: the input has no such column{did_you_mean(column, source.available)}"
        )


def refuse_idle_draft(settings: ScoreSettings, source: Source | TableRows) -> None:
    """Raise UsageError if neither the job nor a row says how much a draft is to keep, and it guesses no tokens."""
    if settings.speculates_with_draft and settings.uses_draft:
        return
    if settings.draft is not None and "keep" not in settings.model_fields_set and "keep" not in source.available:
        guessing = "--speculation draft if it is to guess tokens of rationales, " if settings.rationale else ""
        raise UsageError(
            "--draft has nothing to compress: there is no --keep, and the input has no column keep\n"
            f"give the share of the tokens to keep, --keep 0.2 for example, {guessing}or leave --draft out"
        )


# What the labels of a model's head allow: options that have no meaning for them are refused before weights load.


def require_label_uses(settings: ScoreSettings, labels: Labels, features: Sequence[Feature]) -> None:
    """Raise UsageError for the first option that has no meaning for what the labels' numbers are."""
    if settings.rationale and isinstance(labels, ClassLabels):
        raise UsageError(
            "--rationale: the model's classification head is read, which writes nothing\n"
            "leave it out, or read the next token with --head vocabulary; --evidence works with a head"
        )
    if labels.measure is Measure.SHARES:
        return
    asked = [name for each in features for name in each.meaningless(labels)]
    if settings.temperature != 1.0:
        asked.append("temperature")
    if labels.measure is Measure.CHANCES:
        why = "the classes of this model do not exclude one another: each has a probability of its own"
        advice = f"name one of them, --labels {labels.names[0]} for example, which is scored against its absence"
    else:
        if settings.keep == "auto":
            asked.append("keep auto")
        if settings.audit and len(labels.names) == 1:  # no prediction could flip
            asked.append("audit")
        why = "the model's head gives values, which are no probabilities"
        advice = "leave it out, or give --head probability"
    for option in asked:
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

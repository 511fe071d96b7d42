"""What a job reads: the rows, and how they become prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prefillcli.data.output.target import Target
from prefillcli.data.prompts.builder import PromptBuilder
from prefillcli.data.prompts.labels import ClassLabels, Labels
from prefillcli.data.prompts.settings import PromptSettings, prompt_column
from prefillcli.data.prompts.templates import RowTemplate
from prefillcli.data.proof.fingerprints import ModelContents
from prefillcli.data.reading.record_batches import TableRows
from prefillcli.data.reading.selection import BATCH_ROWS
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Int64Array, Prompt
from prefillcli.data.windows import MAX_ROWS
from prefillcli.errors import UsageError, did_you_mean
from prefillcli.exits.profile_file import ExitProfile
from prefillcli.jobs.row_choice import RowChoice
from prefillcli.models.adapters import local_adapter
from prefillcli.models.files import sample_model
from prefillcli.models.open import Opened, local_model
from prefillcli.options.groups import AdapterOptions, JobOptions
from prefillcli.options.rationale import EvidenceOptions
from prefillcli.options.score import ScoreSettings
from prefillcli.plan.blocks import BLOCK_TOKENS
from prefillcli.redaction import without_secrets
from prefillcli.runtime import log
from prefillcli.runtime.memory import parse_size
from prefillcli.stats.calibration import Calibration
from prefillcli.stats.probabilities import Measure


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


@dataclass(frozen=True, slots=True)
class JobInputs:
    """What a job reads, opened: rows and how they become prompts, the models' files, and what all of that held."""

    source: Source
    builder: PromptBuilder
    labels: Labels
    opened: Opened
    models: LocalModels
    calibration: Calibration | None = None
    """What `--calibration` names."""
    content_free: Sequence[Prompt] = ()
    """The prompts of `--calibrate-with`."""
    exit_profile: ExitProfile | None = None
    """What `--exit-profile` names."""
    choice: RowChoice | None = None
    """Which rows something more is done with, if with any."""

    def require_unchanged(self, rows: Int64Array | None) -> None:
        """Raise ContentChangedError unless the models and the sources of these rows (None: of all) are unchanged."""
        self.models.require_unchanged()
        self.source.require_unchanged(rows)


def _local_models(settings: JobOptions) -> list[Path]:
    """The folders and GGUF files of the model, the draft and the adapters, where they are on this machine."""
    found = [sample_model() if settings.model is None else local_model(settings.model, "--model")]
    if settings.draft is not None and not settings.drafts_itself:
        found.append(local_model(settings.draft, "--draft"))
    if isinstance(settings, AdapterOptions):
        found += map(local_adapter, settings.adapter.values())
    return [path for path in found if path is not None]


def carried_columns(settings: ScoreSettings, source: Source | None = None) -> list[str]:
    """Input columns that go to the output, with a `source` also those that are to name its folders."""
    keys = source.partition_keys if source is not None and settings.partition else ()
    named = [settings.id_column, *filter(None, settings.keep_columns), settings.truth, *keys]
    return list(dict.fromkeys(name for name in named if name is not None))


def refuse_unlike_partitions(settings: ScoreSettings, source: Source, output: str) -> None:
    """Raise UsageError if --partition is given and the output cannot have folders like those of the input."""
    keys = source.partition_keys
    if not settings.partition:
        return
    if not keys:
        raise UsageError("--partition: no folder of the input is named like day=2026-01-01\nleave --partition out")
    if not Target.parse(output).directory:
        raise UsageError(f"--partition: --output {output} is one file\nend it in / for a folder")
    for option, column in (("--id-column", settings.id_column), ("--truth", settings.truth)):
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

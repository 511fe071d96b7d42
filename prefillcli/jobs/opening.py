"""The opening of every command: the rows, the models' files, and how rows become prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefillcli.core.feature import features_of, open_models
from prefillcli.data.output.columns import Groups, OutputSchema, Probabilities
from prefillcli.data.prompts.builder import PromptBuilder, PromptSettings, chat_choices, prompt_builder, prompt_column
from prefillcli.data.prompts.labels import Labels
from prefillcli.data.prompts.templates import RowTemplate
from prefillcli.data.reading.source import Source
from prefillcli.data.rows import Prompt, Window
from prefillcli.data.windows import Prefetcher, WindowSize, windows
from prefillcli.engines.registry import require_engine
from prefillcli.errors import UsageError, without_secrets
from prefillcli.models.files import sample_model
from prefillcli.models.open import Opened, answer_labels, local_model, named_labels, small_models
from prefillcli.options.groups import JobOptions
from prefillcli.runtime import clock, log, memory
from prefillcli.stats.evaluation import Measure


class Opening:
    """The input of a command, opened in the order in which mistakes are cheapest to find: the rows, the models' files,
    how rows become prompts, and the features that the settings ask for.

    `open_source`, then `open_models`. Close the builder. `carried` are the input columns that are read besides those
    of the prompts: by default those of the output, including the id.
    """

    source: Source
    opened: Opened
    labels: Labels
    builder: PromptBuilder

    def __init__(self, settings: Any, carried: Sequence[str | None] = ()) -> None:
        self.settings = settings
        """`JobOptions` of a command."""
        self.features = features_of(settings)
        self.dtypes: Sequence[str] = ()
        """The number formats of the models, where they are chosen already."""
        self.common: Sequence[Prompt] = ()
        """Prompts besides those of the rows, on which the results of all rows depend."""
        self.probabilities: Probabilities | None = None
        """Makes the calibrated probabilities of the rows."""
        self.calibrated = ""
        """Of several questions, the one that it makes them for."""
        self._carried = carried
        self._pair_column = getattr(settings, "pair_column", None)
        self._template: RowTemplate | None = None
        self._said = ""  # of the way of chats to the answer

    @property
    def carried(self) -> list[str]:
        """Input columns that go to the output, including those that name its folders."""
        extra = [name for each in self.features for name in each.carried()]
        return list(dict.fromkeys(name for name in (*self._carried, *extra) if name is not None))

    def open_source(self) -> None:
        """Open the rows, and the template that makes prompts of them.

        A wrong file, column, template or model folder is reported here, before the import of torch, which takes
        seconds. Raises UsageError or PrefillError as `Source` does.
        """
        settings = self.settings
        clock.step("looking at the input")
        for each in self.features:
            each.starting()
        source = Source.open(settings.inputs, limit=settings.limit, sample=settings.sample, seed=settings.seed)
        self.source = source
        self._take_id_column()
        template = self._template = None if settings.template is None else RowTemplate(settings.template)
        own = template.columns if template else (prompt_column(settings.prompt_column, source.available),)
        own += () if self._pair_column is None else (self._pair_column,)
        named = (each.prompt_columns(source.available) for each in self.features)
        source.select(columns=next(filter(None, named), own), carried=self.carried)
        for each in self.features:
            each.check_columns(source.available)
        models = local_models(settings)
        require_engine(getattr(settings, "engine", "torch"))
        for path in source.left_out:
            log.warning(f"{without_secrets(path)}: not read: its name says neither Parquet nor JSON Lines")
        for each in self.features:
            each.source_opened(self)
        if (labels := self._labels_of_options(models[0] if models else None)) is not None:
            self.labels = labels
            self.labels_known()

    def _labels_of_options(self, model: Path | None) -> Labels | None:
        # The labels by their names alone; None where the model at this path may have others, or is not here yet.
        if model is None or any(each.own_labels(model) for each in self.features):
            return None
        return named_labels(model, self.settings)

    def _take_id_column(self) -> None:
        # Where the settings name no column with ids, the input may be of a kind that has one.
        if getattr(self.settings, "id_column", "") is None:
            named = filter(None, (each.id_column(self.source.available) for each in self.features))
            if (found := next(named, None)) is not None:
                self.settings = self.settings.model_copy(update={"id_column": found})
                self._carried = (found, *self._carried)
                for each in self.features:
                    each.settings = self.settings

    def open_models(self) -> None:
        """Open the models' folders, and make prompts possible. No weights are loaded. Raises UsageError."""
        if not hasattr(self, "source"):
            local_models(self.settings)
        clock.step("starting torch and transformers")
        self.use_models(open_models(self.settings, self.dtypes))
        if hasattr(self, "source"):
            self.open_rows()

    def use_models(self, opened: Opened, labels: Labels | None = None) -> None:
        """Take these models, with their `labels` if these are known already."""
        self.opened = opened
        if opened.files.encoder:
            self.settings.take_encoder(opened.files.origin)
            log.info(f"{opened.files.origin}: an encoder, scored in padded batches by transformers (--engine hf)")
        if labels is None:
            asked = (each.labels(opened) for each in self.features)
            labels = next(filter(None, asked), None) or answer_labels(opened, self.settings)
        self.labels = labels
        self.labels_known()
        for each in self.features:
            each.models_opened(self)

    def labels_known(self) -> None:
        """The labels are known: by their names, before torch is imported, and then as they are. Raise UsageError if
        the command cannot use them."""
        for each in self.features if hasattr(self, "source") else ():
            each.labels_named(self)

    def open_rows(self) -> None:
        """Make prompts possible. Raises UsageError."""
        self.builder = self.new_builder(self._template)
        for each in self.features:
            each.rows_opened(self)

    def new_builder(self, template: RowTemplate | None = None) -> PromptBuilder:
        """A builder of prompts for the rows of the source, which will read the columns for it. Raises UsageError.

        Without a compiled `template`, that of the settings is read.
        """
        builder = self.make_builder(self.source.available, template)
        self.source.select(
            columns=builder.needed,
            carried=self.carried,
            optional=builder.optional,
            max_row_bytes=builder.max_row_bytes,
        )
        return builder

    def make_builder(self, available: Sequence[str], template: RowTemplate | None = None) -> PromptBuilder:
        """A builder of prompts for rows with these columns. Raises UsageError."""
        settings, opened = self.settings, self.opened
        files = opened.files
        named = (each.row_columns() for each in self.features)
        made = PromptSettings(
            prompt_column=settings.prompt_column,
            template=settings.template,
            chat=settings.chat,
            system=settings.system,
            choices=chat_choices(settings),
            max_length=min(settings.max_length or opened.max_length, opened.max_length),
            on_long=settings.on_long,
            vocab_size=files.config.vocab_size,
            literal=settings.literal,
            max_row_bytes=memory.parse_size(settings.max_row_bytes) if settings.max_row_bytes else None,
            row_columns=tuple(filter(None, (*named, opened.variants.row_columns if opened.variants else None))),
            classifies=files.head is not None,
            label_columns=self.labels.columns,
            padding=None if files.head is None else files.head.padding,
            encoder=files.encoder,
            pair_column=self._pair_column,
            sections=any(each.takes_prompts_apart for each in self.features),
        )
        own = (each.prompt_builder(self, made, available) for each in self.features)
        found = next(filter(None, own), None) or prompt_builder(opened.tokenizer, made, available, template=template)
        self._tell(found)
        return found

    def _tell(self, builder: PromptBuilder) -> None:
        # Say, once, how chats come to the answer.
        said = builder.way.said if builder.way else ""
        if said and said != self._said and not getattr(self.settings, "quiet", False):
            ends = "the model thinks first" if self.settings.thinking == "on" else "the answer comes next"
            log.info(f"{said}, so that {ends} (--thinking)")
        self._said = said

    def windows(
        self,
        cancel: Callable[[], None] | None = None,
        *,
        change: Callable[[Window], Window] | None = None,
        **choice: Any,
    ) -> Prefetcher[Window]:
        """The windows of the rows, made and changed ahead of the model in a thread. `cancel` is that of `Prefetcher`;
        the other arguments are those of `data.windows.windows`."""
        choice.setdefault("id_column", getattr(self.settings, "id_column", None))
        coming = windows(self.source, self.builder, self.labels, **choice)
        return Prefetcher(coming if change is None else map(change, coming), cancel=cancel)

    def check_first_rows(self) -> None:
        """Raise the errors of the input's first rows, before anything takes time."""
        with self.windows(size=WindowSize(rows=1)) as first:
            for window in first:
                self.labels.check(window)
                break

    def schema(self) -> OutputSchema:
        """The columns of the output."""
        truths = [each.truth_column() for each in self.features]
        return OutputSchema(
            labels=self.labels.names,
            id_name=self.settings.id_column,
            carried=self.source.carried_schema,
            json_carried=self.source.kind == "jsonl",
            truth=next(filter(None, truths), None),
            groups=self.groups,
            measure=self.labels.measure,
            values=self.labels.values,
            token_text=self.labels.token_text,
            questions=tuple(answer for each in self.features for answer in each.answers(self)),
        )

    @property
    def groups(self) -> Groups:
        """The columns that the output has besides those of every output."""
        named = frozenset(name for each in self.features for name in each.columns)
        named |= {"audit"} if getattr(self.settings, "audit", 0) else set()
        return named if self.settings.label_norm == "none" else named | {"label_scores"}


def local_models(settings: JobOptions) -> list[Path]:
    """The folders and GGUF files on this machine of the model, the draft and the features."""
    found = [sample_model() if settings.model is None else local_model(settings.model, "--model")]
    option, names = small_models(settings)
    found += [local_model(name, f"--{option}") for name in names]
    return [*filter(None, found), *(path for each in features_of(settings) for path in each.folders())]


def require_shares(labels: Labels, command: str) -> None:
    """Raise UsageError unless labels exclude one another, in a command that compares their probabilities."""
    if labels.measure is Measure.SHARES:
        return
    if labels.measure is Measure.CHANCES:
        why, advice = "classes that do not exclude one another", f"--labels {labels.names[0]}, one of them"
    else:
        why, advice = "values", "--head probability"
    raise UsageError(f"prefill {command} compares probabilities, and the model's head gives {why}\ngive {advice}")


def require_label_uses(opening: Opening) -> None:
    """Raise UsageError for the first option that has no meaning for numbers of the labels' kind."""
    settings, labels = opening.settings, opening.labels
    if labels.measure in (
        Measure.SHARES,
        Measure.CHOICES,
        Measure.LIKELIHOOD,
        Measure.TOKENS,
    ):  # features of the latter have refused what they cannot
        return
    asked = [name for each in opening.features for name in each.meaningless(labels)]
    if settings.temperature != 1.0:
        asked.append("temperature")
    if labels.measure is Measure.CHANCES:
        why = "the classes of this model do not exclude one another: each has a probability of its own"
        advice = f"name one of them, --labels {labels.names[0]} for example, which is scored against its absence"
    else:
        if settings.audit and len(labels.names) == 1:  # no prediction could flip
            asked.append("audit")
        why = "the model's head gives values, which are no probabilities"
        advice = "leave it out, or give --head probability"
    for option in asked:
        raise UsageError(f"--{option}: {why}\n{advice}")

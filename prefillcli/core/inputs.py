"""The inputs of a command: its rows, the models' files, and how rows become prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prefillcli.core.asking import Asking, by_labels
from prefillcli.core.windows import USUAL_SIZE, Prefetcher, ShardRows, WindowSize, windows
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.settings import PromptSettings, RowColumns
from prefillcli.prompts.templates import RowTemplate
from prefillcli.prompts.thinking import ChatChoices
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import Group, Probabilities
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import Prompt, Window
from prefillcli.runtime import log, memory

if TYPE_CHECKING:
    from prefillcli.models.open import Opened


ALL_COLUMNS = "*"  # of the input, among those that go to the output


class Inputs:
    """The rows of a command with these `settings` (`JobSettings`), and the prompts with answers made of them.

    `scoring/opening.py` opens them, in the order in which mistakes are cheapest to find. Close the builder.
    """

    source: Source
    opened: Opened
    """The folders of the models. No weights are loaded."""
    labels: Labels
    """The answers after each prompt."""
    builder: PromptBuilder
    asking: Asking

    def __init__(self, settings: JobSettings, carried: Sequence[str | None] = ()) -> None:
        self.settings = settings
        self.groups: frozenset[Group] = frozenset()
        """The columns that the output has besides those of every output."""
        self.row_columns: RowColumns | None = None
        """The columns by which rows change how their own prompts are read."""
        self.common: Sequence[Prompt] = ()
        """Prompts besides those of the rows, on which the results of all rows depend."""
        self.probabilities: Mapping[str, Probabilities] = {}
        """Make the calibrated probabilities of the rows, by the name of the question."""
        self.calibrated: Collection[str] = ()
        """The names of the questions that have calibrated probabilities."""
        self.floors: Mapping[str, tuple[float | None, ...]] = {}
        """The floors of the labels of each question, below which answers are reviewed."""
        self.template: RowTemplate | None = None
        """The compiled template of the settings, until a builder takes it."""
        self._carried = [name for name in carried if name is not None]
        self._said = ""  # how chats get to the answer

    @property
    def carried(self) -> list[str]:
        """Columns of the input that go to the output, including those that name its folders."""
        keys: Collection[str] = ()
        if self.settings.files.partition and hasattr(self, "source"):
            keys = self.source.partition_keys
        names = self._carried
        if ALL_COLUMNS in names and hasattr(self, "source") and ALL_COLUMNS not in self.source.available:
            names = [name for name in names if name != ALL_COLUMNS] + list(self.source.available)
        return list(dict.fromkeys((*names, *keys)))

    def carry(self, names: Sequence[str | None]) -> None:
        """Let these columns of the input go to the output too."""
        self._carried += [name for name in names if name is not None]

    def open_rows(self) -> None:
        """Make prompts possible. Raises UsageError."""
        self.builder = self.new_builder(self.template)
        self.template = None

    def new_builder(self, template: RowTemplate | None = None) -> PromptBuilder:
        """Return a builder of prompts for the rows of the source, which will read the columns for it. Raises
        UsageError.

        Without a compiled `template`, that of the settings is read.
        """
        builder = self.make_builder(self.source.available, template)
        self.source.select(
            columns=builder.needed,
            carried=self.carried,
            optional=builder.optional,
            requests=self.asking.requests,
            max_row_bytes=builder.max_row_bytes,
        )
        return builder

    def make_builder(self, available: Sequence[str], template: RowTemplate | None = None) -> PromptBuilder:
        """Return a builder of prompts for rows with these columns. Raises UsageError."""
        found = self.asking.builder(self, self.prompt_settings(), available, template)
        self._tell(found)
        return found

    def prompt_settings(self) -> PromptSettings:
        """Return how rows become prompts, by the settings and the model."""
        settings, opened = self.settings, self.opened
        own, files = settings.prompts, opened.files
        variants = None if opened.variants is None else opened.variants.row_columns
        return PromptSettings(
            prompt_column=own.prompt_column,
            template=own.template,
            chat=own.chat,
            system=own.system,
            choices=ChatChoices(thinking=own.thinking, options=own.chat_option, answer_prefix=own.answer_prefix or ""),
            max_length=min(own.max_length or opened.max_length, opened.max_length),
            on_long=own.on_long,
            empty_text=own.empty_text,
            vocab_size=files.config.vocab_size,
            literal=own.literal,
            max_row_bytes=memory.parse_size(settings.prompts.max_row_bytes)
            if settings.prompts.max_row_bytes
            else None,
            row_columns=tuple(filter(None, (self.row_columns, variants))),
            classifies=files.head is not None,
            label_columns=self.labels.columns,
            padding=None if files.head is None else files.head.padding,
            encoder=files.encoder,
            pair_column=settings.pairs.pair_column,
            sections=settings.rationales.evidence,
        )

    def _tell(self, builder: PromptBuilder) -> None:
        # Log, once, how chats get to the answer.
        said = builder.way.said if builder.way else ""
        if said and said != self._said and not self.settings.run.quiet:
            ends = "the model thinks first" if self.settings.prompts.thinking == "on" else "the answer comes next"
            log.info(f"{said}, so that {ends} (--thinking)")
        self._said = said

    def windows(
        self,
        cancel: Callable[[], None] | None = None,
        *,
        change: Callable[[Window], Window] | None = None,
        size: WindowSize = USUAL_SIZE,
        **choice: Any,
    ) -> Prefetcher[Window]:
        """Return the windows of the rows, with those of the shard alone, made and changed ahead of the model in a
        thread. `cancel` is that of `Prefetcher`; the other arguments are those of `data.windows.windows`."""
        shard = self.settings.files.shard_of
        coming = windows(
            self.source,
            self.builder,
            self.labels,
            id_column=self.settings.ids.id_column,
            size=size,
            only=None if shard is None else ShardRows(shard, self.builder),
            **choice,
        )
        return Prefetcher(coming if change is None else map(change, coming), cancel=cancel)

    def check_first_rows(self) -> None:
        """Raise the errors of the input's first rows, before anything takes time."""
        with self.windows(size=WindowSize(rows=1)) as first:
            for window in first:
                self.labels.check(window)
                break

    def schema(self) -> OutputSchema:
        """Return the columns of the output."""
        responses = self.asking.responses(self)
        truths, temperature = self.settings.truth_columns, self.settings.answers.temperature

        def used(own: AnswerColumns) -> AnswerColumns:
            left = frozenset[Group]() if own.name in self.calibrated else frozenset[Group](["calibrated"])
            return replace(
                own,
                groups=own.groups | self.groups - left,
                temperature=temperature,
                truth=truths.get(own.name),
                floors=self.floors.get(own.key, ()),
                token_text=None if responses is None else responses.text_of,
            )

        return OutputSchema(
            questions=tuple(map(used, self.asking.named or (by_labels(self.labels),))),
            id_name=self.settings.ids.id_column,
            carried=self.source.carried_schema,
            json_carried=self.source.kind == "jsonl",
            groups=self.groups,
            responses=responses,
        )

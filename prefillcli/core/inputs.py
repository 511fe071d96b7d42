"""The inputs of a command: its rows, the models' files, and how rows become prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prefillcli.core.asking import Asking, by_labels
from prefillcli.core.windows import USUAL_SIZE, Prefetcher, ShardRows, WindowSize, windows
from prefillcli.errors import UsageError
from prefillcli.images.fetching import fetch
from prefillcli.images.image import ImageError, RowImage
from prefillcli.images.reading import read_images
from prefillcli.options.combinations import reads_images
from prefillcli.options.judging import truth_by_question
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.images import ImagePlaces, PromptImages
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.settings import PromptSettings, RowColumns
from prefillcli.prompts.templates import RowTemplate
from prefillcli.prompts.thinking import ChatChoices
from prefillcli.rows.filesystems import is_url, split_path
from prefillcli.rows.input.image_files import read_image_file
from prefillcli.rows.input.source import Source
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import Group
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.records import Prompt, Window
from prefillcli.runtime import memory
from prefillcli.runtime.extras import require_extra

if TYPE_CHECKING:
    from prefillcli.models.open import Opened


ALL_COLUMNS = "*"  # of the input, among those that go to the output


def open_source(settings: JobSettings, *, whole: bool = False) -> Source:
    """Open the rows of these settings; `whole`: not only a sample of them. Raises as `Source.open`."""
    own = settings.input
    sample = None if whole else own.sample
    return Source.open(own.inputs, limit=own.limit, sample=sample, seed=own.seed, **own.csv)


@dataclass(frozen=True)
class OpenRows:
    """The rows of a command with these `settings`, and what is asked of them, whatever the model.

    `scoring/opening.py` opens them, in the order in which mistakes are cheapest to find.
    """

    settings: JobSettings
    source: Source
    asking: Asking
    groups: frozenset[Group]
    """The columns that the output has besides those of every output."""
    carried: Sequence[str]
    """Columns of the input that go to the output, including those that name its folders."""
    row_columns: RowColumns | None
    """The columns by which rows change how their own prompts are read."""
    template: RowTemplate | None
    """The compiled template of the settings, which the first builder takes."""

    def schema(
        self,
        labels: Labels,
        opened: Opened | None = None,
        calibrated: Collection[str] = (),
        floors: Mapping[str, tuple[float | None, ...]] = MappingProxyType({}),
    ) -> OutputSchema:
        """Return the columns of the output for these labels, by these models once they are open. The questions with
        these names are `calibrated`; `floors` are those of the labels of each question, below which answers are
        reviewed."""
        responses = None if opened is None else self.asking.responses(opened, labels)
        questions = self.asking.named or (by_labels(labels),)
        truths = truth_by_question(self.settings.truth.columns, [own.key for own in questions])
        temperature = self.settings.answers.temperature

        def used(own: AnswerColumns) -> AnswerColumns:
            left = frozenset[Group]() if own.name in calibrated else frozenset[Group](["calibrated"])
            return replace(
                own,
                groups=own.groups | self.groups - left,
                temperature=temperature,
                truth=truths.get(own.key),
                floors=floors.get(own.key, ()),
                token_text=None if responses is None else responses.text_of,
            )

        return OutputSchema(
            questions=tuple(map(used, questions)),
            id_name=self.settings.ids.id_column,
            carried=self.source.carried_schema,
            json_carried=self.source.kind == "jsonl",
            groups=self.groups,
            responses=responses,
        )

    def make_builder(
        self, opened: Opened, labels: Labels, available: Sequence[str], template: RowTemplate | None = None
    ) -> PromptBuilder:
        """Return a builder of prompts for rows with these columns. Without a compiled `template`, that of the settings
        is read. Raises UsageError."""
        return self.asking.builder(opened, labels, self._prompt_settings(opened, labels), available, template)

    def select(self, source: Source, builder: PromptBuilder) -> None:
        """Let a source of these rows read the columns for a builder. Raises UsageError for missing ones."""
        source.select(
            columns=builder.needed,
            carried=self.carried,
            optional=builder.optional,
            requests=self.asking.requests,
            files=builder.image_columns,
            max_row_bytes=builder.max_row_bytes,
        )

    def _prompt_settings(self, opened: Opened, labels: Labels) -> PromptSettings:
        # How rows become prompts, by the settings and the model.
        own, files = self.settings.prompts, opened.files
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
            max_row_bytes=memory.parse_size(own.max_row_bytes) if own.max_row_bytes else None,
            row_columns=tuple(filter(None, (self.row_columns, variants))),
            classifies=files.head is not None,
            label_columns=labels.columns,
            padding=None if files.head is None else files.head.padding,
            encoder=files.encoder,
            pair_column=self.settings.pairs.pair_column,
            sections=self.settings.rationales.evidence,
            images=self._images(opened),
        )

    def _images(self, opened: Opened) -> PromptImages | None:
        # What reads the images of rows: those of columns, or those in chats and requests where the model sees any.
        # Raises UsageError for a column of images that the model cannot read.
        given = self.settings.images
        if given.image_column:
            _require_sight(opened)
        elif not reads_images(self.settings) or not opened.images.sees or _blindness(opened):
            return None
        model = opened.images
        from_outside = bool(self.asking.requests)
        read = partial(
            _read_images,
            root="" if from_outside else given.image_root or _folder_of(self.source.paths),
            max_pixels=given.max_image_pixels,
            fetch=lru_cache(8)(fetch) if given.allow_urls else None,  # for rows after one another about one image
            read_file=_no_file if from_outside else read_image_file,
        )
        places = ImagePlaces(lambda: model.processing, opened.image_numbers)
        return PromptImages(given.image_column, read, places)


def _read_images(value: Any, **how: Any) -> list[RowImage]:
    # As `read_images`, and UsageError where the package for that is missing.
    _require_pillow()
    return read_images(value, **how)


@cache
def _require_pillow() -> None:
    require_extra("images", "images in rows")


def _require_sight(opened: Opened) -> None:
    # Raise UsageError for a model without sight, and one that is asked in a way which has no place for images.
    if why := _blindness(opened):
        raise UsageError(f"--image-column: the model {why}\nleave it out, or take another model")
    try:
        opened.images.processing  # noqa: B018 - before any row is read
    except UsageError as error:
        raise UsageError(f"--image-column: {error}") from None


def _blindness(opened: Opened) -> str:
    # Why a model is asked in a way that has no place for images; empty where it has one.
    blind = {
        "is an encoder, which reads texts": opened.files.encoder,
        "is read by its classification head, of texts": opened.files.head is not None,
        "is asked in a layout of its own, about texts (--layout generic asks like any other)": opened.layout,
    }
    return next((why for why, holds in blind.items() if holds), "")


def _no_file(root: str, path: str) -> bytes:
    # Requests come from others, who name no files of this machine.
    raise ImageError("a request names a file: it may have data URLs, and with --allow-urls others")


def require_image_folder(settings: JobSettings) -> None:
    """Raise UsageError where the folder of images is not there."""
    root = settings.images.image_root
    if root is not None and not is_url(root) and not os.path.isdir(os.path.expanduser(root)):
        raise UsageError(f"--image-root {root}: no such folder")


def _folder_of(paths: Sequence[str]) -> str | None:
    # The folder from which paths in rows start; None for rows from a pipe or a web server.
    return split_path(paths[0])[0] if paths and not paths[0].startswith(("http://", "https://")) else None


@dataclass(frozen=True)
class Inputs:
    """The rows of a command, and the prompts with answers that are made of them. Close the builder."""

    rows: OpenRows
    opened: Opened
    """The folders of the models. No weights are loaded."""
    labels: Labels
    """The answers after each prompt."""
    schema: OutputSchema
    """The columns of the output."""
    builder: PromptBuilder
    common: Sequence[Prompt] = ()
    """Prompts besides those of the rows, on which the results of all rows depend."""

    @property
    def settings(self) -> JobSettings:
        """The settings of the command."""
        return self.rows.settings

    @property
    def source(self) -> Source:
        """The files of the rows."""
        return self.rows.source

    def again(self, *, whole: bool = False) -> tuple[Source, PromptBuilder]:
        """Open the rows once more, to be read beside those of `source`; `whole`: not only a sample of them. Close the
        builder."""
        source = open_source(self.settings, whole=whole)
        builder = self.rows.make_builder(self.opened, self.labels, source.available)
        self.rows.select(source, builder)
        return source, builder

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

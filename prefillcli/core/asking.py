"""The role that defines what is asked of a row; `core/roles.py` has the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prefillcli.errors import UsageError
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.labels import ClassLabels, Labels
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.columns import Group, added

if TYPE_CHECKING:
    from pathlib import Path

    from prefillcli.models.open import Opened
    from prefillcli.prompts.builder import PromptBuilder
    from prefillcli.prompts.layouts import LayoutForm
    from prefillcli.prompts.settings import PromptSettings
    from prefillcli.prompts.templates import RowTemplate
    from prefillcli.rows.output.batches import Responses


def by_labels(labels: Labels) -> AnswerColumns:
    """Return the columns of the answers to a question without a name."""
    return AnswerColumns(
        labels=labels.names,
        values=labels.question.values,
        measure=labels.measure,
        classes=isinstance(labels, ClassLabels),
    )


class Asking(ABC):
    """The question to a row: prompts, and the answers whose log-probabilities are read after them. A job has one.

    `groups` of columns are added to the output. `carried` columns of the input go there, because what is written is
    made of them. Those in `requests` hold requests of an API. `named` has the columns of the answers to questions with
    names; without any, the only question is asked by labels.
    """

    groups: frozenset[Group]
    carried: Sequence[str] = ()
    requests: Sequence[str] = ()
    named: tuple[AnswerColumns, ...] = ()
    typed: ClassVar[bool] = False  # whether it asks typed questions alone

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.groups = added(
            {"label_scores": settings.answers.label_norm != "none", "ordered": settings.choices.label_values}
        )

    @abstractmethod
    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        """Return the columns that prompts of rows with the `available` ones are made of. Raise UsageError if the
        input lacks a column that an option names."""

    def named_labels(self, model: Path) -> Labels | None:
        """Return the labels for the model in this folder or file by their names alone, before torch is imported; None
        where they are not known yet."""
        return None

    def take_layout(self, form: LayoutForm) -> None:
        """Ask in the layout of a model that was trained for typed decisions. Raise UsageError unless what it asks can
        be asked so."""
        raise UsageError(
            f"the model is a decision model of the type {form.type}, which answers typed questions alone\n"
            "ask it with --ask, --questions or requests; --layout generic asks it like any other"
        )

    @abstractmethod
    def labels(self, opened: Opened) -> Labels:
        """Return the answers after each prompt. Raise UsageError where the model cannot give them."""

    @abstractmethod
    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        """Return the builder of prompts for rows with the `available` columns, with these answers after them. It takes
        the compiled `template`."""

    def responses(self, opened: Opened, labels: Labels) -> Responses | None:
        """Return how answers are written in the form of an API; None where rows are no requests that ask for it."""
        return None

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        """Return its parts of the job's fingerprint. `values` are those of options that change the output. A value
        that it takes out, for a part that it makes, is not in the part `settings`."""
        return {}

"""Asking with the labels of the options, or with those of a reranker, whose files name them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prefillcli.core.asking import Asking
from prefillcli.models.files import read_reranker
from prefillcli.models.open import answer_labels, named_labels
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.builder import PromptBuilder, prompt_builder
from prefillcli.prompts.labels import Labels, require_values
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings, prompt_column
from prefillcli.prompts.templates import RowTemplate
from prefillcli.stats.labels import Measure

if TYPE_CHECKING:
    from prefillcli.models.open import Opened

PAIR = QUERY, DOCUMENT = "query", "document"  # the columns of a pair of texts


class LabelAsking(Asking):
    """The same labels after every prompt. They may stand for numbers. A reranker makes its own prompts and labels,
    unless the user gives others; a warning then names the difference."""

    def __init__(self, settings: JobSettings) -> None:
        super().__init__(settings)
        self._values = settings.choices.label_values
        self._said: set[str] = set()

    @property
    def _own_prompt(self) -> bool:
        # Whether the user has set how prompts are made.
        return bool(self.settings.given & {"template", "prompt_column", "pair_column", "chat"})

    def columns(self, available: Sequence[str], template: RowTemplate | None) -> Sequence[str]:
        usual = prompt_column(self.settings.prompts.prompt_column, available)
        if not self._own_prompt and usual not in available and set(PAIR) <= set(available):
            return PAIR
        pair = self.settings.pairs.pair_column
        return (*(template.columns if template else (usual,)), *(() if pair is None else (pair,)))

    def named_labels(self, model: Path) -> Labels | None:
        if not self.settings.answers.labels_given and read_reranker(model) is not None:
            return None
        found = named_labels(model, self.settings.answers, self.settings.lm.model_head)
        return None if found is None else self._with_values(found)

    def labels(self, opened: Opened) -> Labels:
        reranker, found = read_reranker(opened.files.path), None
        if reranker is not None and not self.settings.answers.labels_given:
            from prefillcli.asking.reranking import own_labels

            found = own_labels(reranker, opened)
        return self._with_values(found or answer_labels(opened, self.settings.answers))

    def _with_values(self, labels: Labels) -> Labels:
        # The values of labels that are not shares are refused by `require_label_uses`.
        if self._values and labels.measure is Measure.SHARES:
            require_values(self._values, labels.names)
            labels.question = typed(labels.labels, self._values)
        return labels

    def builder(
        self,
        opened: Opened,
        labels: Labels,
        settings: PromptSettings,
        available: Sequence[str],
        template: RowTemplate | None,
    ) -> PromptBuilder:
        if (reranker := read_reranker(opened.files.path)) is not None:  # its prompts are made of pairs of columns
            from prefillcli.asking.reranking import own_builder

            own = own_builder(
                reranker, opened, settings, self.settings, available, asked=self._own_prompt, said=self._said
            )
            if own is not None:
                return own
        return prompt_builder(opened.tokenizer, settings, available, template=template)

    def warn(self, opened: Opened) -> None:
        """Warn of labels or prompts that are not those of a reranker."""
        from prefillcli.asking.reranking import warn_of_labels, warn_of_name

        if (reranker := read_reranker(opened.files.path)) is None:
            if not self._own_prompt:
                warn_of_name(opened)
        elif self.settings.answers.labels_given:
            warn_of_labels(reranker, opened, self.settings.answers.labels)

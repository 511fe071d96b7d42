"""Pairs of texts: `--pair-column` for cross-encoders; rerankers whose files say so make prompts and labels by
themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature
from prefillcli.options.option import PROMPTS, Settings, option

if TYPE_CHECKING:
    from pathlib import Path

    from prefillcli.core.feature import Labels, Opened, Opening, PromptBuilder, PromptSettings
    from prefillcli.models.files import Reranker

PAIR = QUERY, DOCUMENT = "query", "document"
_OTHER_PROMPTS = ("questions", "target_column", "choices_column")  # options that make prompts and labels of their own




class RerankOptions(Settings):
    """Other commands make the prompts of a reranker too."""


class Pairs(Feature):
    """The prompts and labels of a reranker, where nobody asks for others; a warning, where somebody does."""

    order = 90  # prompts and labels that other features make come first
    options = {"score": PairOptions, **dict.fromkeys(("inspect", "profile", "bench"), RerankOptions)}

    @classmethod
    def asked(cls, settings: Any) -> bool:
        return not any(getattr(settings, name, None) for name in _OTHER_PROMPTS)

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._said: set[str] = set()
        self._reranker: Reranker | None = None  # one whose prompts are made here, of pairs of columns

    @property
    def _own_prompt(self) -> bool:
        # Whether the user says how prompts are made.
        given = self.settings.model_fields_set
        return bool(given & {"template", "prompt_column", "pair_column", "chat"})

    def prompt_columns(self, available: Sequence[str]) -> Sequence[str] | None:
        from prefillcli.data.prompts.builder import prompt_column

        usual = prompt_column(self.settings.prompt_column, available)
        pairs = not self._own_prompt and usual not in available and set(PAIR) <= set(available)
        return PAIR if pairs else None

    def own_labels(self, model: Path) -> bool:
        from prefillcli.models.files import read_reranker

        return not self.settings.labels_given and read_reranker(model) is not None

    def labels(self, opened: Opened) -> Labels | None:
        from prefillcli.asking.reranking import own_labels
        from prefillcli.models.files import read_reranker

        found = self._reranker = read_reranker(opened.files.path)
        return None if found is None or self.settings.labels_given else own_labels(found, opened)

    def models_opened(self, opening: Opening) -> None:
        from prefillcli.asking.reranking import warn_of_labels, warn_of_name

        if self._reranker is None:
            if not self._own_prompt:
                warn_of_name(opening.opened)
        elif self.settings.labels_given:
            warn_of_labels(self._reranker, opening.opened, self.settings.labels)

    def prompt_builder(
        self, opening: Opening, settings: PromptSettings, available: Sequence[str]
    ) -> PromptBuilder | None:
        from prefillcli.asking.reranking import own_builder

        if self._reranker is None:
            return None
        opened, asked = opening.opened, self._own_prompt
        return own_builder(self._reranker, opened, settings, self.settings, available, asked=asked, said=self._said)


FEATURE = Pairs

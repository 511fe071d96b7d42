"""A draft with another tokenizer than the target's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prefillcli.compress.base import Estimator, ImportanceEstimate, Tick
from prefillcli.compress.fallbacks import FAILED
from prefillcli.compress.overlap import Overlap
from prefillcli.compress.translation import Translation, Translator
from prefillcli.plan.trie import TokenArray


class TranslatedDraft:
    """Lets `draft` read prompts in its own tokens, and says what it finds important in the target's.

    A prompt that cannot be translated has the reason in its estimate.
    """

    def __init__(self, draft: Estimator, translator: Translator) -> None:
        self._draft = draft
        self._translator = translator
        self._failure: BaseException | None = None

    @property
    def tokens(self) -> int:
        return self._draft.tokens

    @property
    def failure(self) -> BaseException | None:
        return self._draft.failure or self._failure

    def close(self) -> None:
        self._draft.close()

    def estimate(
        self, prompts: Sequence[TokenArray], tick: Tick, overlaps: Sequence[Overlap] | None = None
    ) -> list[ImportanceEstimate]:
        """As `Draft.estimate`; a prompt's seconds have its share of the translation."""
        begun = time.monotonic()
        translations = self._translated(prompts)
        seconds = (time.monotonic() - begun) / max(1, sum(len(tokens) for tokens in prompts))
        able = [each for each in translations if isinstance(each, Translation)]
        found = iter(self._draft.estimate([each.tokens for each in able], tick, [each.overlap for each in able]))
        estimates = []
        for tokens, translation in zip(prompts, translations, strict=True):
            estimate = ImportanceEstimate(reason=translation) if isinstance(translation, str) else next(found)
            estimate.seconds += seconds * len(tokens)
            estimates.append(estimate)
        return estimates

    def _translated(self, prompts: Sequence[TokenArray]) -> list[Translation | str]:
        """The prompts in the draft's tokens; where one fails, only that one does."""
        try:
            return self._translator.translate(prompts)
        except Exception as error:  # whatever a tokenizer raises, the rows can be read in full
            self._failure = error
            if len(prompts) == 1:
                return [FAILED]
            return [self._translated([tokens])[0] for tokens in prompts]

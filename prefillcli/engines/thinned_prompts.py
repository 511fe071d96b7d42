"""What goes on of the prompts of one pack."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from prefillcli.engines.base import Answer, ThinnedPrompt, Treatment
from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.thinning import Thinned, ThinningRule


class PackThinning:
    """A thinning rule at work on one pack. `found` has what goes on of each prompt, once the rule was asked."""

    def __init__(self, rule: ThinningRule) -> None:
        self.found: dict[int, ThinnedPrompt] = {}
        self._rule = rule

    @classmethod
    def of_treatment(cls, treatment: Treatment) -> PackThinning | None:
        """That of a pack; None where nothing is left behind."""
        return None if treatment.thinning is None else cls(treatment.thinning)

    def of_answers(self, answers: Sequence[Answer]) -> list[Answer]:
        """The answers with what went on of their prompts."""
        return [replace(each, thinned=self.found.get(each.prompt)) for each in answers]

    @property
    def layer(self) -> int:
        return self._rule.layer

    def of(self, prompts: Collection[int]) -> ThinningRule:
        return self._rule.of(prompts)

    def watched(self, pack: Pack, tree: Tree) -> Sequence[int]:
        return self._rule.watched(pack, tree)

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> Sequence[Thinned]:
        thinned = self._rule(pack, tree, layer)
        for (_, prompts), own in zip(pack.reads, thinned, strict=True):
            kept = ThinnedPrompt(tree.depths[own.tokens].astype(np.int32), own.reason)
            self.found |= dict.fromkeys(prompts, kept)
        return thinned

"""The model as its own draft: what its first layers attend to goes on to the others (FastKV, arXiv 2502.01068).

The first layers compute all tokens. In the last of them, the last tokens of each prompt vote on its keys, as those of
a draft do in all its layers; the other layers compute the tokens that are kept, at their original positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefillcli.core.request import Thinning, Tick
from prefillcli.data.rows import Prompt
from prefillcli.features.compress.base import NO_VOTE, NOT_FINITE, Float32Array, ImportanceEstimate
from prefillcli.features.compress.draft import PromptQueries, add_votes, importance, last_queries, last_tokens
from prefillcli.features.compress.selection import budget, chunk_count, select_all, tails
from prefillcli.features.compress.settings import Compression
from prefillcli.plan.pack import Pack
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.walk import Thinned


@dataclass(frozen=True, slots=True)
class SelfDraftRule:
    """A `ThinningRule`: what each prompt's last tokens look at in its layer, and both ends.

    `rates` has the keep rate of each prompt, and how many of its last tokens are always kept. The other prompts go on
    whole, and with them what they share. Prompts of a read go on together, at the highest of their rates.
    """

    layer: int
    settings: Compression
    rates: Mapping[int, tuple[float, int]]

    def of(self, prompts: Collection[int]) -> SelfDraftRule:
        rates = {prompt: self.rates[prompt] for prompt in prompts if prompt in self.rates}
        return SelfDraftRule(self.layer, self.settings, rates)

    def watched(self, pack: Pack, tree: Tree) -> list[int]:
        found: set[int] = set()
        for read, (node, _) in enumerate(pack.reads):
            if self._rate(pack, read) is not None:
                found.update(last_tokens(tree.path(node), self.settings.window))
        return sorted(found)

    def __call__(self, pack: Pack, tree: Tree, layer: WatchedLayer) -> list[Thinned]:
        paths = [tree.path(node) for node, _ in pack.reads]
        tokens = [np.concatenate([np.arange(*run) for run in path]) for path in paths]
        rates = [self._rate(pack, read) for read in range(len(paths))]
        row = {token: number for number, token in enumerate(self.watched(pack, tree))}
        found: list[Float32Array | None] = []
        reasons: list[str | None] = []
        for path, rate in zip(paths, rates, strict=True):
            votes, reason = (None, None) if rate is None else self._votes(path, row, layer)
            found.append(votes)
            reasons.append(reason)
        kept = select_all(
            [pack.tokens[own] for own in tokens],
            found,
            [None if rate is None else rate[0] for rate in rates],
            self.settings,
            lasts=[1 if rate is None else rate[1] for rate in rates],
        )
        return [
            Thinned(whole if own is None else whole[own], reason)
            for whole, own, reason in zip(tokens, kept, reasons, strict=True)
        ]

    def _rate(self, pack: Pack, read: int) -> tuple[float, int] | None:
        """The rate of a read and its last tokens that are always kept; None if it goes on whole."""
        rates = [self.rates.get(prompt) for prompt in pack.reads[read][1]]
        able = [rate for rate in rates if rate is not None]
        if len(able) < len(rates):
            return None
        return max(rate for rate, _ in able), max(last for _, last in able)

    def _votes(
        self, path: list[tuple[int, int]], row: Mapping[int, int], layer: WatchedLayer
    ) -> tuple[Float32Array | None, str | None]:
        """The importance of a prompt's tokens, float32 [tokens], or why it has none."""
        prompt: PromptQueries = last_queries(path, [row[token] for token in last_tokens(path, self.settings.window)])
        add_votes(layer, [prompt], self.settings.pool)
        votes = importance(prompt, self.settings.query_reduce, self.settings.select_chunk)
        if votes is None:
            return None, NO_VOTE
        return (votes, None) if bool(np.isfinite(votes).all()) else (None, NOT_FINITE)


@dataclass(frozen=True, slots=True)
class SelfThinning(Thinning):
    """After `layer`, by its number, the share `keep` of the tokens goes on, and always the `last` ones."""

    layer: int
    keep: float
    last: int
    settings: Compression

    @property
    def alone(self) -> bool:  # type: ignore[override]
        return self.settings.per_row

    def most_kept(self, tokens: int) -> int:
        # What is chosen may be among the tokens that are kept anyway.
        chosen = budget(self.keep, chunk_count(tokens, self.settings.select_chunk)) * self.settings.select_chunk
        return min(tokens, chosen + self.settings.keep_first + self.last)

    def rule(self, thinnings: Mapping[int, Thinning]) -> SelfDraftRule:
        own = {number: each for number, each in thinnings.items() if isinstance(each, SelfThinning)}
        rates = {number: (each.keep, each.last) for number, each in own.items()}
        return SelfDraftRule(self.layer, self.settings, rates)


# The model's own first layers: what they attend to goes on to the others.


class SelfDraft:
    """Leaves the choice to the model, which makes it after `layer` . Estimates are empty."""

    method = "self-draft"
    tokens = 0
    failure: BaseException | None = None

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        return [ImportanceEstimate() for _ in prompts]

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[SelfThinning | None]:
        lasts = tails([prompt.tokens for prompt in prompts], keeps, settings) if any(keeps) else [0] * len(prompts)
        return [
            None if keep is None else SelfThinning(self.layer, keep, last, settings)
            for keep, last in zip(keeps, lasts, strict=True)
        ]

    def close(self) -> None:
        pass

"""The draft model: a walk over prompts that finds the importance of their tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
from transformers import PreTrainedModel

from prefillcli.compress.base import Float32Array, ImportanceEstimate, Tick
from prefillcli.compress.fallbacks import FAILED, NO_MEMORY, NO_VOTE, NOT_FINITE, TOO_LONG, VOCABULARY
from prefillcli.compress.importance import PromptQueries, add_votes, importance, last_queries, last_tokens
from prefillcli.compress.overlap import Overlap
from prefillcli.compress.settings import Compression
from prefillcli.decode.lookahead import look_ahead
from prefillcli.errors import UsageError
from prefillcli.models.stop_tokens import stop_tokens_of
from prefillcli.plan.account import account
from prefillcli.plan.pack import Limits, Pack
from prefillcli.plan.plan import make_plan
from prefillcli.plan.trie import TokenArray
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.walk import LayerWalk

Found = tuple[Float32Array | None, str | None, tuple[int, ...]]
"""The importance of a prompt's tokens, float32 [tokens], or why there is none; and the layers that voted."""


class Draft:
    """A small model with the target's tokenizer. Raises UsageError if none of its layers could vote.

    `limits` come from `models.law.draft_limits`. `max_length` is the longest prompt that its position encoding takes.
    `on_failure` is called with what a pack failed with.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Compression,
        *,
        limits: Limits,
        chunk_tokens: int,
        max_length: int,
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.tokens = 0
        """Tokens computed so far."""
        self.failure: BaseException | None = None
        """What it failed with last."""
        self.walk = LayerWalk(model, chunk_tokens=chunk_tokens)
        """It may also be used for something else, between two estimates."""
        self._settings = settings
        self._limits = limits
        self._max_length = max_length - settings.decoded
        self._vocabulary = int(model.get_input_embeddings().weight.shape[0])
        self._stop_tokens = stop_tokens_of(model)
        self._on_failure = on_failure
        self.walk.check_queries()
        if not self._attends():
            self.close()
            raise UsageError(
                f"--draft: none of its {len(self.walk.layers)} layers attends to tokens, so none can vote on them\n"
                "name a small model that has attention layers"
            )

    def close(self) -> None:
        self.walk.close()

    def estimate(
        self,
        prompts: Sequence[TokenArray],
        tick: Tick = lambda tokens: None,
        overlaps: Sequence[Overlap] | None = None,
    ) -> list[ImportanceEstimate]:
        """One estimate for each prompt, int32 [tokens] each. A common prefix is computed once.

        With `overlaps`, one for each prompt, the estimates are of the tokens of another tokenizer.
        A failure concerns the prompts of one pack: they get it as their reason.
        """
        estimates = [ImportanceEstimate(reason=self._refusal(tokens)) for tokens in prompts]
        able = [number for number, found in enumerate(estimates) if found.reason is None]
        for pack in make_plan([prompts[number] for number in able], self._limits).packs:
            begun = time.monotonic()
            try:
                votes = self._votes(pack, tick)
                found = {n: self._importance(own, overlaps[able[n]] if overlaps else None) for n, own in votes.items()}
            except Exception as error:  # whatever it is, the rows can be read in full
                self.failure = error
                self._on_failure(error)
                found = dict.fromkeys(pack.prompts, (None, FAILED, ()))
            seconds = time.monotonic() - begun
            for part in account(pack):
                own = estimates[able[part.prompt]]
                own.seconds = seconds * part.share
                own.importance, own.reason, own.voters = found[part.prompt]
        return estimates

    def _attends(self) -> bool:
        """Whether any layer attends, found out with a prompt of one token."""
        (pack,) = make_plan([np.zeros(1, dtype=np.int32)], Limits(1, 1)).packs
        try:
            with closing(self.walk.watch(pack, [0])) as layers:
                return next(layers, None) is not None
        except Exception:  # it will fail on the rows too, which say so
            return True

    def _refusal(self, tokens: TokenArray) -> str | None:
        if len(tokens) > self._max_length:
            return TOO_LONG
        if int(tokens.max()) >= self._vocabulary:
            return VOCABULARY
        most = self._limits.max_tokens
        if len(tokens) > (most if self._limits.read_tokens is None else min(most, self._limits.read_tokens)):
            return NO_MEMORY
        return None

    def _importance(self, prompt: PromptQueries, overlap: Overlap | None) -> Found:
        settings = self._settings
        found = importance(prompt, settings.query_reduce, settings.select_chunk, overlap)
        return (*_checked(found), tuple(prompt.voters))

    def _votes(self, pack: Pack, tick: Tick) -> dict[int, PromptQueries]:
        """How the queries of each prompt of a pack have voted."""
        settings = self._settings
        tree = Tree(pack)
        paths = [tree.path(node) for node, _ in pack.reads]
        windows = [last_tokens(path, settings.window) for path in paths]
        watched = sorted({token for window in windows for token in window})
        row = {token: number for number, token in enumerate(watched)}
        queries = [
            last_queries(path, [row[token] for token in window]) for path, window in zip(paths, windows, strict=True)
        ]
        if settings.decoded:
            ahead = look_ahead(self.walk, pack, watched, settings.decoded, self._stop_tokens, tick)
            for read, (prompt, count) in enumerate(zip(queries, ahead.counts, strict=True)):
                _add_decoded(prompt, [len(watched) + step * len(paths) + read for step in range(count)])
            for layer in ahead.layers:
                add_votes(layer, queries, settings.pool)
        else:
            with closing(self.walk.watch(pack, watched, tick)) as layers:
                for layer in layers:
                    add_votes(layer, queries, settings.pool)
        self.tokens += len(pack.tokens)
        return {number: own for own, (_, numbers) in zip(queries, pack.reads, strict=True) for number in numbers}


def _add_decoded(prompt: PromptQueries, queries: list[int]) -> None:
    """Add the queries of tokens that were decoded behind the prompt: each sees the whole prompt."""
    tokens = prompt.tokens
    prompt.queries += queries
    prompt.sees += [tokens] * len(queries)
    prompt.depths += range(tokens, tokens + len(queries))


def _checked(found: Float32Array | None) -> tuple[Float32Array | None, str | None]:
    if found is None:
        return None, NO_VOTE
    return (found, None) if np.isfinite(found).all() else (None, NOT_FINITE)

"""The choice of a drafter, which guesses tokens, and prompt lookup, the default."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefillcli.plan.trie import TokenArray
from prefillcli.walk.continuations import DecodingReport, Writing
from prefillcli.walk.decoding import KeptForward
from prefillcli.walk.draft_model import DraftModel, StreamingDrafter
from prefillcli.walk.lockstep import Chooser, Drafter, RowText
from prefillcli.walk.triforce import FIRST_LEVEL_TOKENS, HierarchyDrafter, RetrievalDrafter

# Prompt lookup: the tokens that followed an earlier occurrence of the latest ones, in the row's own prompt and text.
# It guesses text that quotes its input well, for next to nothing (transformers: prompt lookup decoding).

SHORTEST_MATCH = 2
LONGEST_MATCH = 16


class PromptLookup(Drafter):
    """Finds the most recent of the longest matches of a text's end, of `SHORTEST_MATCH` to `LONGEST_MATCH` tokens.

    Each guess compares the last token with the whole text at once: 16,000 tokens take some microseconds, less than an
    index would take to build.
    """

    name = "lookup"

    def __init__(self) -> None:
        self._texts: dict[int, _RowTokens] = {}

    def begin(self, rows: Sequence[RowText]) -> None:
        self._texts = {row.number: _RowTokens(row) for row in rows}

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        return [
            continuation(self._texts[row.number].upto(row), tokens) if tokens else []
            for row, tokens in zip(rows, most, strict=True)
        ]

    def end(self, row: RowText) -> None:
        del self._texts[row.number]


class _RowTokens:
    def __init__(self, row: RowText) -> None:
        certain = [row.beginning.prompt, np.asarray(row.beginning.tokens, dtype=np.int32)]
        self._text = len(row.beginning.prompt) + len(row.beginning.tokens)
        self._tokens = np.concatenate([*certain, np.empty(256, dtype=np.int32)])

    def upto(self, row: RowText) -> TokenArray:
        # All tokens, int32 [tokens]: taken from the text anew, since guesses in it may have been taken back.
        end = self._text + len(row.written)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(row.written), dtype=np.int32)])
        self._tokens[self._text : end] = row.written
        return self._tokens[:end]


def continuation(tokens: TokenArray, most: int) -> list[int]:
    """At most this many tokens that may follow `tokens`: those after an earlier place with the same ending."""
    end = len(tokens)
    matches = np.flatnonzero(tokens[: end - 1] == tokens[-1])
    length = 1
    while length < min(LONGEST_MATCH, end - 1) and len(matches):
        longer = matches[matches >= length]
        longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
        if not len(longer):
            break
        matches, length = longer, length + 1
    if length < SHORTEST_MATCH or not len(matches):
        return []
    start = int(matches[-1]) + 1
    guessed: list[int] = tokens[start : start + most].tolist()
    for at in range(len(guessed), most):  # the match reaches the end: the repetition goes on
        guessed.append(guessed[at - (end - start)])
    return guessed


def drafter_of(
    forward: KeptForward, writing: Writing, report: DecodingReport, draft_model: DraftModel | None
) -> Drafter | None:
    """Return the drafter of the rows of `forward`; None with "off", for a model with recurrent layers, which cannot
    forget a wrong guess, and where a required draft model is missing: the text is the same without."""
    speculation, chooser = writing.speculation, Chooser(writing.temperature, writing.seed)

    def over_cache(inner: Drafter | None = None) -> RetrievalDrafter:
        return RetrievalDrafter(
            forward,
            chooser,
            budget=speculation.budget,
            chunk=speculation.chunk,
            report=report,
            inner=inner,
            inner_tokens=FIRST_LEVEL_TOKENS,
        )

    def draft(model: DraftModel) -> StreamingDrafter:
        return StreamingDrafter(
            model,
            chooser,
            vocabulary=int(forward.walk.model.config.get_text_config().vocab_size),
            sinks=speculation.sinks,
            recent=speculation.recent,
        )

    if speculation.drafter == "off" or not forward.can_forget:
        return None
    if speculation.drafter == "lookup":
        return PromptLookup()
    if speculation.drafter == "retrieval":
        return over_cache()
    if draft_model is None:
        return None
    if speculation.drafter == "draft":
        return draft(draft_model)
    # It also guesses alone, where prompts are too short for retrieval.
    return HierarchyDrafter(over_cache(draft(draft_model)), draft(draft_model))

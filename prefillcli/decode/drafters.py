"""Drafters that need no model: prompt lookup, and the earlier texts of a job."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence

import numpy as np

from prefillcli.decode.continuations import DecodingReport, Writing
from prefillcli.decode.draft_model import DraftModel, StreamingDrafter
from prefillcli.decode.forward import KeptForward
from prefillcli.decode.lockstep import Chooser, Drafter, RowText
from prefillcli.decode.retrieval import RetrievalDrafter
from prefillcli.plan.trie import TokenArray

# Prompt lookup: the tokens that followed the latest ones where they stood before, in the row's own prompt and text.
# Text that quotes its input is guessed well, for next to nothing (transformers calls it prompt lookup decoding).

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
    """The tokens of a row's prompt, and room for its text."""

    def __init__(self, row: RowText) -> None:
        certain = [row.beginning.prompt, np.asarray(row.beginning.tokens, dtype=np.int32)]
        self._text = len(row.beginning.prompt) + len(row.beginning.tokens)
        self._tokens = np.concatenate([*certain, np.empty(256, dtype=np.int32)])

    def upto(self, row: RowText) -> TokenArray:
        """All tokens, int32 [tokens]: the text is taken as it is now, since guesses in it may have been taken back."""
        end = self._text + len(row.written)
        if end > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(len(row.written), dtype=np.int32)])
        self._tokens[self._text : end] = row.written
        return self._tokens[:end]


def continuation(tokens: TokenArray, most: int) -> list[int]:
    """At most so many tokens that may follow `tokens`: those behind an earlier place that ends like them."""
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
    for at in range(len(guessed), most):  # the match reaches the end: what repeats goes on
        guessed.append(guessed[at - (end - start)])
    return guessed


# Earlier texts of a job as a drafter: the tokens that most often followed the latest ones in them.
#
# After SuffixDecoding (arXiv 2411.04975): the longest end of the text that occurs in earlier texts, and from there
# the most frequent continuation, as far as it is likely. In place of a suffix tree, the places of each pair of
# tokens are indexed, and longer matches are found among them.


MOST_TOKENS = 1 << 18
"""Tokens of earlier texts that are kept: about 30 MB with their index. Then the older half is forgotten."""
MOST_PLACES = 128
"""Places of a pair of tokens that are looked at, the latest ones."""
LONGEST_SUFFIX = 32
LEAST_SHARE = 0.3
"""A continuation ends where fewer than this share of the matching places go on with it."""
LENGTH_PER_MATCH = 2
"""A continuation has at most so many tokens for each one that matches."""
_END = -1


class EarlierTexts:
    """Texts of a job, the latest ones of at most `most_tokens` tokens, and the places of each two tokens in them."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._texts: OrderedDict[str, list[int]] = OrderedDict()
        self._clear()

    def _clear(self) -> None:
        self.tokens = np.empty(1024, dtype=np.int32)
        self._length = 0
        self._places: defaultdict[tuple[int, int], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        """Tokens and ends that are kept."""
        return self._length

    def add(self, key: str, tokens: Sequence[int]) -> None:
        """Keep a text, once for its key."""
        if key in self._texts or len(tokens) >= self._most_tokens // 2:
            return
        self._texts[key] = list(tokens)
        if self._length + len(tokens) + 1 > self._most_tokens:
            self._forget_half()
        else:
            self._append(tokens)

    def _forget_half(self) -> None:
        kept = sum(len(text) + 1 for text in self._texts.values())
        while kept > self._most_tokens // 2:
            kept -= len(self._texts.popitem(last=False)[1]) + 1
        self._clear()
        for text in self._texts.values():
            self._append(text)

    def _append(self, tokens: Sequence[int]) -> None:
        start, end = self._length, self._length + len(tokens)
        if end + 1 > len(self.tokens):
            self.tokens = np.concatenate([self.tokens, np.empty(max(end, len(self.tokens)), dtype=np.int32)])
        self.tokens[start:end] = tokens
        self.tokens[end] = _END
        for at in range(2, len(tokens) + 1):
            self._places[tokens[at - 2], tokens[at - 1]].append(start + at)
        self._length = end + 1

    def continuation(self, text: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow the text."""
        if len(text) < 2:
            return []
        places = np.asarray(self._places.get((text[-2], text[-1]), ())[-MOST_PLACES:], dtype=np.int64)
        matched = 2
        while len(places) and matched < min(LONGEST_SUFFIX, len(text)):
            longer = places[places > matched]
            longer = longer[self.tokens[longer - matched - 1] == text[-matched - 1]]
            if not len(longer):
                break
            places, matched = longer, matched + 1
        return self._most_frequent(places, min(most, LENGTH_PER_MATCH * matched)) if len(places) else []

    def _most_frequent(self, places: np.ndarray, most: int) -> list[int]:
        """The continuation of the most of these places, token by token; the latest one of equals."""
        guessed: list[int] = []
        first = len(places)
        while len(guessed) < most:
            following = self.tokens[places]
            token, count = Counter(following[::-1].tolist()).most_common(1)[0]
            if token == _END or count < LEAST_SHARE * first:
                break
            guessed.append(token)
            places = places[following == token] + 1
        return guessed


class SuffixDrafter(Drafter):
    """Guesses by the texts that ended before, of this group of rows and of earlier ones."""

    name = "suffix"

    def __init__(self, earlier: EarlierTexts) -> None:
        self._earlier = earlier

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        return [
            self._earlier.continuation([*row.beginning.tokens, *row.written][-LONGEST_SUFFIX:], tokens)
            for row, tokens in zip(rows, most, strict=True)
        ]

    def end(self, row: RowText) -> None:
        self._earlier.add(row.beginning.key, [*row.beginning.tokens, *row.written])


# TriForce's hierarchy (arXiv 2404.11912, algorithm 1): three levels.
#
# A cheap drafter guesses for the model over its retrieval cache, and what comes together there is checked by the
# model over all K,V. All levels choose by the same noise, so each checks by comparing, and the text is that of the
# last one.


FIRST_LEVEL_TOKENS = 3  # that are guessed for one pass over the retrieval cache


class HierarchyDrafter(Drafter):
    """Guesses by `retrieval`, which has a drafter of its own, and by `beside` for the rows that retrieval leaves out:
    their prompts are too short for it."""

    name = "hierarchy"

    def __init__(self, retrieval: RetrievalDrafter, beside: Drafter) -> None:
        self._retrieval, self._beside = retrieval, beside
        self._long: set[int] = set()  # the rows that retrieval has begun with

    def begin(self, rows: Sequence[RowText]) -> None:
        self._retrieval.begin(rows)
        self._long = {row.number for row in rows if self._retrieval.reaches(row)}
        self._beside.begin([row for row in rows if row.number not in self._long])

    def propose(self, rows: Sequence[RowText], most: Sequence[int]) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for drafter in (self._retrieval, self._beside):
            own = [(row, tokens) for row, tokens in zip(rows, most, strict=True) if self._of(row) is drafter]
            if own:
                guessed = drafter.propose([row for row, _ in own], [tokens for _, tokens in own])
                found |= {row.number: guess for (row, _), guess in zip(own, guessed, strict=True)}
        return [found[row.number] for row in rows]

    def checked(self, row: RowText, proposed: Sequence[int], accepted: int) -> None:
        self._of(row).checked(row, proposed, accepted)

    def end(self, row: RowText) -> None:
        self._of(row).end(row)

    def _of(self, row: RowText) -> Drafter:
        return self._retrieval if row.number in self._long else self._beside


class JobDrafters:
    """Makes drafters, and remembers the texts of the job. `draft` is the draft model, if there is one."""

    def __init__(self) -> None:
        self.draft: DraftModel | None = None
        self._earlier = EarlierTexts()

    def of(self, forward: KeptForward, writing: Writing, report: DecodingReport) -> Drafter | None:
        """The drafter of the rows of `forward`; None with "off", for a model with recurrent layers, which cannot
        forget a wrong guess, and where a draft model is asked for and there is none: the text is the same without."""
        speculation, chooser = writing.speculation, Chooser(writing.temperature, writing.seed)
        draft_model = self.draft

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
        if speculation.drafter == "suffix":
            return SuffixDrafter(self._earlier)
        if speculation.drafter == "retrieval":
            return over_cache()
        if draft_model is None:
            return None
        if speculation.drafter == "draft":
            return draft(draft_model)
        # It also guesses alone, where prompts are too short for retrieval.
        return HierarchyDrafter(over_cache(draft(draft_model)), draft(draft_model))

"""The selection of the tokens to keep.

A prompt is cut into chunks of equal size, from its start. The `ceil(keep * chunks)` chunks with the largest mean
importance are kept, and always the first tokens and the last ones (the question). The tokens after the prefix that a
prompt shares count as its last ones, unless they are too many (see `tails`).

A common prefix is compressed once for all its prompts, so that it is still computed once. Its importance is the
maximum over its prompts. In a run of chunks that the same prompts share, as many are kept as raise the total from
`ceil(keep * chunks before)` to `ceil(keep * chunks)`. For a prompt that shares nothing this is the rule above.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from prefillcli.core.request import Thinning
from prefillcli.plan.trie import TokenArray, TrieNode, build_forest, token_order
from prefillcli.prompts.encoding import Spans
from prefillcli.prompts.translation import TEXT, Overlap
from prefillcli.reading.compress.settings import Compression
from prefillcli.rows.records import FALLBACK, FULL, Prompt, is_fallback, reading_method
from prefillcli.stats.arrays import Float32Array, Int64Array

if TYPE_CHECKING:
    from prefillcli.core.request import Tick


# The reasons why prompts that should be compressed are read in full, and the findings of pickers.


NO_MEMORY, TOO_LONG, VOCABULARY = "draft_memory", "draft_length", "draft_vocabulary"
NO_VOTE, NOT_FINITE, FAILED = "draft_window", "draft_not_finite", "draft_error"
ENOUGH_ROWS = 32  # a draft that has compressed none of this many rows is of no use


class Fallback(NamedTuple):
    """A reason: its meaning, and whether it is a fault of the draft rather than the prompt."""

    meaning: str
    fault: bool = False


# The reasons by name.
FALLBACKS = {
    NO_MEMORY: Fallback("the prompt does not fit the memory budget of the draft"),
    TOO_LONG: Fallback("the prompt is longer than the draft's position encoding allows"),
    VOCABULARY: Fallback("the prompt has a token that the draft's vocabulary lacks"),
    TEXT: Fallback("the draft's own tokenizer has no tokens for the prompt's text, or for too much of it"),
    NO_VOTE: Fallback("no layer of the draft attends to the whole prompt"),
    NOT_FINITE: Fallback("the draft's attention is not finite", fault=True),
    FAILED: Fallback("the draft failed on the prompt's pack, for lack of memory for example", fault=True),
}


def compressed_rows(methods: Mapping[str, int]) -> int:
    """Return the number of compressed rows among the rows by method."""
    return sum(rows for method, rows in _readings(methods).items() if method != FULL and not is_fallback(method))


def faulty_rows(methods: Mapping[str, int]) -> int:
    """Return the number of rows on which the draft was at fault, if no row was compressed, else 0. `methods`: rows by
    method."""
    if compressed_rows(methods):
        return 0
    readings = _readings(methods)
    return sum(readings[FALLBACK + reason] for reason, row in FALLBACKS.items() if row.fault)


def fallbacks_of_useless_draft(methods: Mapping[str, int]) -> dict[str, int]:
    """Return the number of rows by fallback, if no row was compressed and there is a fault or `ENOUGH_ROWS` rows; else
    an empty mapping."""
    fallbacks = {method: rows for method, rows in sorted(_readings(methods).items()) if is_fallback(method)}
    if compressed_rows(methods):
        return {}
    return fallbacks if faulty_rows(methods) or sum(fallbacks.values()) >= ENOUGH_ROWS else {}


def _readings(methods: Mapping[str, int]) -> Counter[str]:
    # The rows by the way of reading alone: an early exit shows nothing about the draft.
    readings: Counter[str] = Counter()
    for method, rows in methods.items():
        readings[reading_method(method)] += rows
    return readings


@dataclass(slots=True)
class ImportanceEstimate:
    """A picker's estimate of the importance of a prompt's tokens.

    `importance` is float32 [tokens], of any scale; the tokens with the largest are kept first. It is None for a prompt
    that is read in full. If it should have been compressed, `reason` is one of `FALLBACKS`.
    """

    importance: Float32Array | None = None
    reason: str | None = None
    seconds: float = 0.0  # the prompt's share of the time that the estimates took
    voters: tuple[int, ...] = ()  # the draft's layers that voted, by their numbers from 0


class Estimator(Protocol):
    """A draft model, or several at work in other processes."""

    tokens: int  # computed so far
    failure: BaseException | None  # its last error

    def estimate(
        self, prompts: Sequence[TokenArray], tick: Tick, overlaps: Sequence[Overlap] | None = None
    ) -> list[ImportanceEstimate]:
        """Make one estimate for each prompt, int32 [tokens] each; with `overlaps` of the tokens of another
        tokenizer.

        A failure concerns the prompts that were computed together and becomes their reason."""

    def close(self) -> None:
        """Free memory."""


class Picker(ABC):
    """Picks which tokens of a prompt the target reads, in two steps: one estimate serves any number of keep rates."""

    method: str  # in the output's column `method`, for the prompts that it compressed: its name in `PICKERS`
    tokens = 0  # that models have computed for it so far
    failure: BaseException | None = None  # its last error

    @abstractmethod
    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        """Make one estimate for each prompt.

        `tick` is called with the tokens of each step; it may raise to stop. A failure on a prompt becomes the reason
        in its estimate.
        """

    @abstractmethod
    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> Sequence[Int64Array | Thinning | None]:
        """Return the kept tokens of prompts that are computed together: ascending indices, None for a prompt in full,
        or the rule by which the target chooses them itself.

        A prompt is read in full without a keep rate in `keeps` and without importance in `estimates`. The first
        `settings.keep_first` tokens and the last ones, as many as `tails` counts, are always kept.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing
        """Free memory."""


# The draft's tokens that each token of the target overlaps, where the two have different tokenizers.


# The choice of the kept tokens.


def select(importance: Float32Array, keep: float, *, chunk: int, first: int, last: int) -> Int64Array:
    """Return the kept tokens of one prompt, ascending. `importance` is [tokens]; of equal chunks the earlier are
    kept."""
    tokens = len(importance)
    chunks = chunk_count(tokens, chunk)
    kept = ends(tokens, first, last)
    for number in _best(importance, 0, chunks, chunk, budget(keep, chunks)):
        kept[number * chunk : (number + 1) * chunk] = True
    return np.flatnonzero(kept)


def ends(tokens: int, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the `first` and the `last` ones of this many tokens, bool [tokens]."""
    kept = np.zeros(tokens, dtype=np.bool_)
    kept[:first] = True
    kept[max(0, tokens - last) :] = True
    return kept


def chunk_count(tokens: int, chunk: int) -> int:
    """Return the number of chunks of `chunk` tokens in this many tokens; the last one may be shorter."""
    return -(-tokens // chunk)


def budget(keep: float, count: int) -> int:
    """Return ceil(keep * count), safe from rounding: 0.3 of 10 are 3, even if 0.3 was a float32."""
    return ceil(Fraction(f"{keep:.6g}") * count)


def _best(importance: Float32Array, begin: int, end: int, chunk: int, count: int) -> Int64Array:
    # The `count` chunks of `begin:end` with the largest mean importance.
    if count <= 0 or begin >= end:
        return np.empty(0, dtype=np.int64)
    edges = np.arange(begin, end) * chunk
    part = importance[: end * chunk].astype(np.float64)
    lengths = np.diff(np.append(edges, len(part)))
    means = np.add.reduceat(part, edges) / lengths
    return begin + np.argsort(-means, kind="stable")[:count]


class _Forest:
    """The trie of some prompts; the prompts below a node are a range of `order`."""

    def __init__(self, prompts: Sequence[TokenArray]) -> None:
        self.prompts = prompts
        self.roots = build_forest(prompts, token_order(prompts))
        self.order: list[int] = []
        self._begin: dict[int, int] = {}
        self._end: dict[int, int] = {}
        stack: list[tuple[TrieNode, bool]] = [(root, True) for root in reversed(self.roots)]
        while stack:
            node, entering = stack.pop()
            if entering:
                self._begin[id(node)] = len(self.order)
                self.order.extend(node.ending)
                stack.append((node, False))
                stack.extend((child, True) for child in reversed(node.children))
            else:
                self._end[id(node)] = len(self.order)

    def below(self, node: TrieNode) -> list[int]:
        # The prompts that share `node`.
        return self.order[self._begin[id(node)] : self._end[id(node)]]

    def private(self) -> list[int]:
        # The number of tokens that each prompt has after the prefixes it shares. Duplicates share nothing.
        found = [0] * len(self.prompts)
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            if not node.children:
                for prompt in node.ending:
                    found[prompt] = node.end - node.start
        return found


def full_prefixes(prompts: Sequence[TokenArray], in_full: Sequence[bool]) -> list[int]:
    """Return how many first tokens of each prompt are computed anyway, for a prompt `in_full`."""
    reach = [0] * len(prompts)
    if any(in_full):
        forest = _Forest(prompts)
        stack = list(forest.roots)
        while stack:
            node = stack.pop()
            below = forest.below(node)
            if any(in_full[prompt] for prompt in below):
                for prompt in below:
                    reach[prompt] = max(reach[prompt], node.end)
                stack.extend(node.children)
    return reach


def select_all(
    prompts: Sequence[TokenArray],
    importances: Sequence[Float32Array | None],
    keeps: Sequence[float | None],
    settings: Compression,
    *,
    lasts: Sequence[int] | None = None,
) -> list[Int64Array | None]:
    """Return the kept tokens of prompts that are computed together; None for those without a rate or without
    importance.

    `lasts` is the number of each prompt's last tokens that are always kept; None: `tails` decides it.
    """
    if all(keep is None for keep in keeps):
        return [None] * len(prompts)
    forest = _Forest(prompts)
    tails = _tails(forest, keeps, settings) if lasts is None else lasts
    rates = [None if importance is None else keep for importance, keep in zip(importances, keeps, strict=True)]
    if not settings.per_row:
        return _ForestSelection(forest, importances, rates, tails, settings).kept()
    chunk, first = settings.select_chunk, settings.keep_first
    return [
        None if keep is None or importance is None else select(importance, keep, chunk=chunk, first=first, last=last)
        for importance, keep, last in zip(importances, rates, tails, strict=True)
    ]


def tails(prompts: Sequence[TokenArray], keeps: Sequence[float | None], settings: Compression) -> list[int]:
    """Return the number of each prompt's last tokens that are always kept.

    With `keep_private` these are all tokens after the longest prefix that it shares with another of the `prompts`,
    unless its keep rate allows fewer tokens for the whole prompt.
    """
    return _tails(_Forest(prompts), keeps, settings)


def _tails(forest: _Forest, keeps: Sequence[float | None], settings: Compression) -> list[int]:
    if not settings.keep_private:
        return [settings.tail] * len(keeps)
    return [
        max(settings.tail, private) if keep is not None and private <= keep * len(tokens) else settings.tail
        for tokens, private, keep in zip(forest.prompts, forest.private(), keeps, strict=True)
    ]


@dataclass(slots=True)
class _ForestSelection:
    """Selects from the roots of a forest downwards. Prompts without a rate in `keeps` are read in full; the last
    `tails` tokens of the others are always kept."""

    forest: _Forest
    importances: Sequence[Float32Array | None]
    keeps: Sequence[float | None]
    tails: Sequence[int]
    settings: Compression
    path: list[Int64Array] = field(default_factory=list)  # the tokens that each node above keeps for all below it

    def kept(self) -> list[Int64Array | None]:
        """Return the kept tokens of each prompt; None for those that are read in full."""
        found: list[Int64Array | None] = [None] * len(self.keeps)
        # Nodes, their depth, and tokens above that are computed in full.
        stack: list[tuple[TrieNode, int, int]] = [(root, 0, 0) for root in reversed(self.forest.roots)]
        while stack:
            node, depth, full = stack.pop()
            del self.path[depth:]
            below = self.forest.below(node)
            if any(self.keeps[prompt] is None for prompt in below):
                full = node.end
                self.path.append(np.arange(node.start, node.end))
            else:
                self.path.append(self._choose(node, below, full))
            for prompt in node.ending:
                found[prompt] = self._collected(node, prompt, full)
            stack.extend((child, depth + 1, full) for child in node.children)
        return found

    def _choose(self, node: TrieNode, below: list[int], full: int) -> Int64Array:
        # The best of the chunks that end in `node`, and those of its tokens that a prompt of `below` always keeps.
        chunk = self.settings.select_chunk
        end = node.end // chunk if node.children else chunk_count(node.end, chunk)
        keep = max(self.keeps[prompt] or 0.0 for prompt in below)
        chosen = self._chunks(node, below, node.start // chunk, end, keep, full)
        first = np.arange(node.start, min(self.settings.keep_first, node.end))
        tail = min(len(self.forest.prompts[prompt]) - self.tails[prompt] for prompt in below)
        return np.concatenate([chosen, first, np.arange(max(node.start, tail), node.end)])

    def _chunks(self, node: TrieNode, below: list[int], begin: int, end: int, keep: float, full: int) -> Int64Array:
        # Tokens of the best of the chunks `begin:end`, without the first `full` tokens, which are computed anyway.
        chunk = self.settings.select_chunk
        offset = full // chunk
        begin = max(begin, offset)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        stop = min(end * chunk, node.end)
        importance = np.zeros(stop, dtype=np.float32)
        candidates = importance[begin * chunk :]
        for prompt in below:
            own = self.importances[prompt]
            if own is not None:
                np.maximum(candidates, own[begin * chunk : stop], out=candidates)
        count = budget(keep, end - offset) - budget(keep, begin - offset)
        best = _best(importance, begin, end, chunk, count)
        tokens = (best[:, None] * chunk + np.arange(chunk)).ravel()
        return tokens[tokens < stop]

    def _collected(self, node: TrieNode, prompt: int, full: int) -> Int64Array | None:
        keep, chunk, parts = self.keeps[prompt], self.settings.select_chunk, list(self.path)
        if keep is None:
            return None
        if node.children and node.end % chunk:  # the prompt's last, shorter chunk is its own
            last = node.end // chunk
            parts.append(self._chunks(node, [prompt], last, last + 1, keep, full))
        return np.unique(np.concatenate(parts))


# Picking tokens of each prompt by itself, without a model.


class RowPicker(Picker):
    """Keeps the first and last tokens that SpecPrefill always keeps, and of the others `ceil(keep * others)`.

    SpecPrefill keeps as many if the tokens that it always keeps are chosen as often as others. A prefix that prompts
    share does not stay the same for all of them.
    """

    @abstractmethod
    def rank(self, prompt: Prompt) -> Float32Array | None:
        """Return the importance of a prompt's tokens, float32 [tokens]; None for a prompt that it cannot judge."""

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        found = []
        for prompt in prompts:
            begun = time.monotonic()
            importance = self.rank(prompt)
            found.append(ImportanceEstimate(importance, seconds=time.monotonic() - begun))
            tick(len(prompt.tokens))
        return found

    def select(
        self,
        prompts: Sequence[Prompt],
        estimates: Sequence[ImportanceEstimate],
        keeps: Sequence[float | None],
        settings: Compression,
    ) -> list[Int64Array | None]:
        lasts = tails([prompt.tokens for prompt in prompts], keeps, settings)
        kept: list[Int64Array | None] = []
        for estimate, keep, last in zip(estimates, keeps, lasts, strict=True):
            if keep is None or estimate.importance is None:
                kept.append(None)
            else:
                order = by_importance(estimate.importance)
                kept.append(fill(order, len(estimate.importance), keep, first=settings.keep_first, last=last))
        return kept


def by_importance(importance: Float32Array) -> Int64Array:
    """Return the tokens, the most important first, and the earlier of equal ones; those of minus infinity are never
    kept."""
    order = np.argsort(-importance, kind="stable")
    return order[importance[order] > -np.inf]


def fill(order: Int64Array, tokens: int, keep: float, *, first: int, last: int) -> Int64Array:
    """Return the kept ones of this many tokens, ascending: both ends, and the first of the others in `order`."""
    kept = ends(tokens, first, last)
    others = order[~kept[order]]
    kept[others[: budget(keep, len(others))]] = True
    return np.flatnonzero(kept)


# The sentences most like the question, by BM25.


_SENTENCE_END = re.compile(r"[.!?]\s+|[。！？]\s*|\n\s*")  # noqa: RUF001 - full-width marks
_ENDED = re.compile(r"[.!?。！？]\s*\Z")  # noqa: RUF001 - full-width marks
_WORD = re.compile(r"\w+")


class Bm25(RowPicker):
    """The sentences nearest to the prompt's last one; the last sentence that is kept is cut to the budget.

    Retrieval with the last sentence as the query (RAG-LLAMA LS of SpecPrefill's appendix B, there with embeddings).
    A prompt without `spans` is read in full.
    """

    method = "bm25"

    def __init__(self, spans: Callable[[Prompt], Spans | None]) -> None:
        self._spans = spans

    def rank(self, prompt: Prompt) -> Float32Array | None:
        spans = self._spans(prompt)
        return None if spans is None else sentence_importance(spans.text, spans.offsets.tolist())


def sentence_importance(text: str, offsets: Sequence[tuple[int, int]]) -> Float32Array:
    """Return the negated rank of each token's sentence by BM25, float32 [tokens]; minus infinity where there is no
    sentence.

    Sentences end at line ends and at ".", "!", "?"; the query is the last one that ends in such a mark, with the text
    after it ("Answer:"). Between equal scores the earlier sentence comes first. `offsets` are the tokens' (start, end)
    characters in `text`; those of special tokens may be (0, 0).
    """
    sentences = split_sentences(text)
    if not sentences:
        return np.full(len(offsets), -np.inf, dtype=np.float32)
    query = next((n for n in range(len(sentences) - 1, -1, -1) if _ENDED.search(sentences[n])), len(sentences) - 1)
    scores = _bm25([_words(s) for s in sentences], _words("".join(sentences[query:])))
    # A token belongs to the sentence of its last character: it may begin with the space before that.
    edges = np.cumsum([len(sentence) for sentence in sentences])
    characters = np.array([max(start, end - 1) for start, end in offsets])
    owner = np.minimum(np.searchsorted(edges, characters, side="right"), len(sentences) - 1)
    places = np.argsort(np.argsort(-scores, kind="stable"), kind="stable")[owner]
    return -places.astype(np.float32)


def split_sentences(text: str) -> list[str]:
    """Split `text` into its sentences, with the white space after them; joined, they make up `text`.

    "310.40" is not split, "Dr. Haas" is.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return [part for start, end in pairwise([0, *ends, len(text)]) if (part := text[start:end])]


def _bm25(sentences: list[list[str]], query: list[str]) -> npt.NDArray[np.float32]:
    # Lucene's BM25 of each sentence; zeros if no sentence has a word of the query.
    query = sorted(set(query).intersection(*[{word for words in sentences for word in words}]))
    if not query:
        return np.zeros(len(sentences), dtype=np.float32)
    import bm25s  # takes half a second

    index = bm25s.BM25()
    index.index(sentences, show_progress=False)
    return np.asarray(index.get_scores(query), np.float32)


def _words(sentence: str) -> list[str]:
    return _WORD.findall(sentence.lower())


# Chunks at random: what a draft must beat.


class RandomChunks(RowPicker):
    """Chunks of `chunk` tokens at random; the last one is cut to the budget. A row draws the same ones every time."""

    method = "random"

    def __init__(self, chunk: int, seed: int) -> None:
        self._chunk = chunk
        self._seed = seed

    def rank(self, prompt: Prompt) -> Float32Array:
        return random_importance(len(prompt.tokens), self._chunk, np.random.default_rng([self._seed, prompt.row]))


def random_importance(tokens: int, chunk: int, rng: np.random.Generator) -> Float32Array:
    """Return the negated place of each token's chunk in a random order, float32 [tokens]."""
    order = rng.permutation(chunk_count(tokens, chunk))
    places = np.argsort(order)[np.arange(tokens) // chunk]
    return -places.astype(np.float32)

"""Picking tokens of each prompt by itself, without a model."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from itertools import pairwise

import bm25s
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from prefillcli.core.request import Tick
from prefillcli.data.prompts.encoding import Spans
from prefillcli.data.rows import Int64Array, Prompt
from prefillcli.features.compress.base import NOT_FINITE, Float32Array, ImportanceEstimate
from prefillcli.features.compress.selection import budget, chunk_count, ends, tails
from prefillcli.features.compress.settings import Compression
from prefillcli.plan.pack import Limits, Pack, account
from prefillcli.plan.plan import make_plan, marked_positions
from prefillcli.prefill.forest import WatchedLayer
from prefillcli.prefill.layout import Tree
from prefillcli.prefill.walk import LayerWalk


class RowPicker(ABC):
    """Keeps the first and last tokens that SpecPrefill always keeps, and of the others `ceil(keep * others)`.

    That is as much as SpecPrefill keeps if what it always keeps is chosen as often as anything else. A prefix that
    prompts share is not the same for all of them any more.
    """

    method: str
    tokens = 0
    failure: BaseException | None = None

    @abstractmethod
    def rank(self, prompt: Prompt) -> Float32Array | None:
        """The importance of a prompt's tokens, float32 [tokens]; None for a prompt that it cannot judge."""

    def order(self, importance: Float32Array, first: int, last: int) -> Int64Array:
        """The tokens in the order in which they are kept; `first` and `last` tokens are kept anyway."""
        return by_importance(importance)

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
                order = self.order(estimate.importance, settings.keep_first, last)
                kept.append(fill(order, len(estimate.importance), keep, first=settings.keep_first, last=last))
        return kept

    def close(self) -> None:  # noqa: B027 - there is nothing to let go of
        pass


def by_importance(importance: Float32Array) -> Int64Array:
    """The tokens, the most important first and of equal ones the earlier; those of minus infinity are never kept."""
    order = np.argsort(-importance, kind="stable")
    return order[importance[order] > -np.inf]


def fill(order: Int64Array, tokens: int, keep: float, *, first: int, last: int) -> Int64Array:
    """Those of so many tokens that are kept, ascending: both ends, and of the others the first of `order`."""
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
    """Minus the place of each token's sentence by BM25, float32 [tokens]; minus infinity where there is no sentence.

    Sentences end at line ends and at ".", "!", "?"; the query is the last one that ends in such a mark, with what
    follows it ("Answer:"). Of equal scores the earlier sentence comes first. `offsets` are the tokens' (start, end)
    characters in `text`; those of special tokens may be (0, 0).
    """
    sentences = split_sentences(text)
    if not sentences:
        return np.full(len(offsets), -np.inf, dtype=np.float32)
    query = next((n for n in range(len(sentences) - 1, -1, -1) if _ENDED.search(sentences[n])), len(sentences) - 1)
    scores = _bm25([_words(s) for s in sentences], _words("".join(sentences[query:])))
    # A token belongs to the sentence of its last character: it may begin with the space before.
    edges = np.cumsum([len(sentence) for sentence in sentences])
    characters = np.array([max(start, end - 1) for start, end in offsets])
    owner = np.minimum(np.searchsorted(edges, characters, side="right"), len(sentences) - 1)
    places = np.argsort(np.argsort(-scores, kind="stable"), kind="stable")[owner]
    return -places.astype(np.float32)


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, with the white space behind them; joined they are `text`.

    "310.40" is not split, "Dr. Haas" is.
    """
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return [part for start, end in pairwise([0, *ends, len(text)]) if (part := text[start:end])]


def _bm25(sentences: list[list[str]], query: list[str]) -> npt.NDArray[np.float32]:
    """Lucene's BM25 of each sentence. Zeros where no word of the query is in any."""
    query = sorted(set(query).intersection(*[{word for words in sentences for word in words}]))
    if not query:
        return np.zeros(len(sentences), dtype=np.float32)
    index = bm25s.BM25()
    index.index(sentences, show_progress=False)
    scores: npt.NDArray[np.float32] = index.get_scores(query)
    return scores


def _words(sentence: str) -> list[str]:
    return _WORD.findall(sentence.lower())


# The first and the last tokens.


class Ends(RowPicker):
    """Half of the budget behind the first tokens, which are kept anyway, and half before the last ones."""

    method = "ends"

    def rank(self, prompt: Prompt) -> Float32Array:
        return np.zeros(len(prompt.tokens), dtype=np.float32)  # the place alone decides

    def order(self, importance: Float32Array, first: int, last: int) -> Int64Array:
        return outside_in(len(importance), first, last)


def outside_in(tokens: int, first: int, last: int) -> Int64Array:
    """The tokens between the `first` and the `last` ones, from the left and from the right in turn."""
    between = np.flatnonzero(~ends(tokens, first, last))
    half = len(between) // 2
    order = np.empty_like(between)
    order[::2], order[1::2] = between[: len(between) - half], between[::-1][:half]
    return order


# Chunks at random: what a draft must beat.


class RandomChunks(RowPicker):
    """Chunks of `chunk` tokens at random; the last one is cut to the budget. A row draws the same ones every time."""

    method = "random"

    def __init__(self, chunk: int, seed: int) -> None:
        self._chunk = chunk
        self._seed = seed

    def rank(self, prompt: Prompt) -> Float32Array:
        rng = np.random.default_rng([self._seed, prompt.row])
        return random_importance(len(prompt.tokens), self._chunk, rng)


def random_importance(tokens: int, chunk: int, rng: np.random.Generator) -> Float32Array:
    """Minus the place of each token's chunk in a random order, float32 [tokens]."""
    order = rng.permutation(chunk_count(tokens, chunk))
    places = np.argsort(order)[np.arange(tokens) // chunk]
    return -places.astype(np.float32)


POOL = 5


class GemFilter(RowPicker):
    """The model walks the prompts up to `layer`, and reads what it kept of them from its first layer on.

    Queries times keys of the last token, summed over the heads and averaged over `POOL` tokens, rank single tokens. As
    all pickers here it keeps the ends too, and the positions, which the paper counts anew. `walking` gives a walk of
    the model; `limits` are those of its packs.
    """

    method = "gemfilter"

    def __init__(self, layer: int, walking: Callable[[], AbstractContextManager[LayerWalk]], limits: Limits) -> None:
        self.layer = layer
        self._walking = walking
        self._limits = Limits(limits.tokens, limits.max_tokens, switch=limits.switch)

    def rank(self, prompt: Prompt) -> Float32Array | None:
        return self.estimate([prompt], lambda tokens: None)[0].importance

    def estimate(self, prompts: Sequence[Prompt], tick: Tick) -> list[ImportanceEstimate]:
        found = [ImportanceEstimate() for _ in prompts]
        with self._walking() as walk:
            tokens = [prompt.tokens for prompt in prompts]
            positions = [marked_positions(None, len(own), self._limits.switch) for own in tokens]
            for pack in make_plan(tokens, self._limits, positions=positions).packs:
                begun = time.monotonic()
                votes = self._votes(walk, pack, tick)
                self.tokens += len(pack.tokens)
                seconds = time.monotonic() - begun
                for part in account(pack):
                    own = found[part.prompt]
                    own.importance, own.seconds = votes[part.prompt], seconds * part.share
                    own.reason = NOT_FINITE if own.importance is None else None
        return found

    def _votes(self, walk: LayerWalk, pack: Pack, tick: Tick) -> dict[int, Float32Array | None]:
        tree = Tree(pack)
        ends = [pack.offsets[node + 1] - 1 for node, _ in pack.reads]
        watched = sorted(set(ends))
        with closing(walk.watch(pack, watched, tick)) as layers:
            layer = next(each for each in layers if each.number == self.layer)
        tick(len(pack.tokens) * (1 - (self.layer + 1) / len(walk.layers)))  # the other layers are left out
        votes: dict[int, Float32Array | None] = {}
        for (node, prompts), end in zip(pack.reads, ends, strict=True):
            own = summed_scores(layer, tree.path(node), watched.index(end))
            finite = bool(own.isfinite().all())
            votes |= dict.fromkeys(prompts, own.cpu().numpy() if finite else None)
        return votes


def summed_scores(layer: WatchedLayer, path: Sequence[tuple[int, int]], query: int) -> torch.Tensor:
    """A query's products with the keys of a path, summed over heads and pooled, float32 [tokens]."""
    keys = torch.cat([layer.keys[:, start:end] for start, end in path], dim=1).float()
    # The query heads of a K,V head are neighbours; their sum times the key is the sum of their products.
    queries = layer.queries[:, query].float().reshape(keys.shape[0], -1, keys.shape[2]).sum(dim=1)
    scores = torch.einsum("hw,htw->t", queries, keys)
    return F.avg_pool1d(scores[None, None], POOL, 1, POOL // 2)[0, 0]

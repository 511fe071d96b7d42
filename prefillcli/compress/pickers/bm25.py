"""The sentences most like the question, by BM25."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

import bm25s
import numpy as np
import numpy.typing as npt

from prefillcli.compress.base import Float32Array
from prefillcli.compress.pickers.row_picker import RowPicker
from prefillcli.data.prompts.spans import Spans
from prefillcli.data.rows import Prompt

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

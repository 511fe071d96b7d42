"""Which tokens are kept.

A prompt is cut into chunks of equal size, from its start. The `ceil(keep * chunks)` chunks with the largest mean
importance are kept, and always the first tokens and the last ones (the question). The tokens behind the prefix that a
prompt shares count as its last ones, unless they are too many (see `tails`).

A common prefix is compressed once for all its prompts, so that it is still computed once. Its importance is the
maximum over its prompts. Of a run of chunks that the same prompts share, as many are kept as raise the total from
`ceil(keep * chunks before)` to `ceil(keep * chunks)`. For a prompt that shares nothing this is the rule above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
import numpy.typing as npt

from prefillcli.data.rows import Int64Array
from prefillcli.features.compress.base import Float32Array
from prefillcli.features.compress.settings import Compression
from prefillcli.plan.trie import TokenArray, TrieNode, build_forest, token_order


def select(importance: Float32Array, keep: float, *, chunk: int, first: int, last: int) -> Int64Array:
    """The kept tokens of one prompt, ascending. `importance` is [tokens]; of equal chunks the earlier are kept."""
    tokens = len(importance)
    chunks = chunk_count(tokens, chunk)
    kept = ends(tokens, first, last)
    for number in _best(importance, 0, chunks, chunk, budget(keep, chunks)):
        kept[number * chunk : (number + 1) * chunk] = True
    return np.flatnonzero(kept)


def ends(tokens: int, first: int, last: int) -> npt.NDArray[np.bool_]:
    """Which of so many tokens are the `first` or the `last` ones, bool [tokens]."""
    kept = np.zeros(tokens, dtype=np.bool_)
    kept[:first] = True
    kept[max(0, tokens - last) :] = True
    return kept


def chunk_count(tokens: int, chunk: int) -> int:
    """How many chunks of `chunk` tokens so many tokens make; the last one may be shorter."""
    return -(-tokens // chunk)


def budget(keep: float, count: int) -> int:
    """ceil(keep * count), where 0.3 of 10 are 3, also if 0.3 was a float32."""
    return ceil(Fraction(f"{keep:.6g}") * count)


def _best(importance: Float32Array, begin: int, end: int, chunk: int, count: int) -> Int64Array:
    """The `count` chunks of `begin:end` with the largest mean importance."""
    if count <= 0 or begin >= end:
        return np.empty(0, dtype=np.int64)
    edges = np.arange(begin, end) * chunk
    part = importance[: end * chunk].astype(np.float64)
    lengths = np.diff(np.append(edges, len(part)))
    means = np.add.reduceat(part, edges) / lengths
    return begin + np.argsort(-means, kind="stable")[:count]


@dataclass(slots=True)
class _RatedPrompt:
    """A prompt of so many `tokens` and its keep rate; None: it is read in full. The last `tail` are always kept."""

    tokens: int
    importance: Float32Array | None
    keep: float | None
    tail: int


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
        """The prompts that share `node`."""
        return self.order[self._begin[id(node)] : self._end[id(node)]]

    def private(self) -> list[int]:
        """For each prompt how many tokens it has behind the prefixes it shares. Duplicates share nothing."""
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
    """For each prompt how many of its first tokens are computed anyway, for a prompt `in_full`."""
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
    """The kept tokens of prompts that are computed together; None for those without a rate or without importance.

    `lasts` says how many of each prompt's last tokens are always kept, where `tails` is not to say it.
    """
    if all(keep is None for keep in keeps):
        return [None] * len(prompts)
    forest = _Forest(prompts)
    tails = _tails(forest, keeps, settings) if lasts is None else lasts
    rated = [
        _RatedPrompt(len(tokens), importance, None if importance is None else keep, tail)
        for tokens, importance, keep, tail in zip(prompts, importances, keeps, tails, strict=True)
    ]
    if settings.per_row:
        return [_select_alone(prompt, settings) for prompt in rated]
    selection = _ForestSelection(forest, rated, settings)
    for root in selection.forest.roots:
        selection.descend(root)
    return selection.kept


def tails(prompts: Sequence[TokenArray], keeps: Sequence[float | None], settings: Compression) -> list[int]:
    """How many of each prompt's last tokens are always kept.

    With `keep_private` these are all tokens behind the longest prefix that it shares with another of the `prompts`,
    unless they are more than its keep rate leaves of the whole prompt.
    """
    return _tails(_Forest(prompts), keeps, settings)


def _tails(forest: _Forest, keeps: Sequence[float | None], settings: Compression) -> list[int]:
    if not settings.keep_private:
        return [settings.tail] * len(keeps)
    return [
        max(settings.tail, private) if keep is not None and private <= keep * len(tokens) else settings.tail
        for tokens, private, keep in zip(forest.prompts, forest.private(), keeps, strict=True)
    ]


def _select_alone(prompt: _RatedPrompt, settings: Compression) -> Int64Array | None:
    if prompt.keep is None or prompt.importance is None:
        return None
    return select(
        prompt.importance, prompt.keep, chunk=settings.select_chunk, first=settings.keep_first, last=prompt.tail
    )


class _ForestSelection:
    """Selects from the roots of a forest downwards."""

    def __init__(self, forest: _Forest, rated: list[_RatedPrompt], settings: Compression) -> None:
        self.forest = forest
        self.kept: list[Int64Array | None] = [None] * len(rated)
        self._rated = rated
        self._settings = settings
        self._path: list[Int64Array] = []  # what each node above keeps for all prompts below it

    def descend(self, root: TrieNode) -> None:
        stack: list[tuple[TrieNode, int, int]] = [(root, 0, 0)]  # node, its depth, tokens above computed in full
        while stack:
            node, depth, full = stack.pop()
            del self._path[depth:]
            below = self.forest.below(node)
            if any(self._rated[prompt].keep is None for prompt in below):
                full = node.end
                self._path.append(np.arange(node.start, node.end))
            else:
                self._path.append(self._choose(node, below, full))
            for prompt in node.ending:
                self._collect(node, prompt, full)
            stack.extend((child, depth + 1, full) for child in node.children)

    def _choose(self, node: TrieNode, below: list[int], full: int) -> Int64Array:
        """The best of the chunks that end in `node`, and those of its tokens that a prompt of `below` always keeps."""
        chunk = self._settings.select_chunk
        end = node.end // chunk if node.children else chunk_count(node.end, chunk)
        keep = max(self._rated[prompt].keep or 0.0 for prompt in below)
        chosen = self._chunks(node, below, node.start // chunk, end, keep, full)
        first = np.arange(node.start, min(self._settings.keep_first, node.end))
        tail = min(self._rated[prompt].tokens - self._rated[prompt].tail for prompt in below)
        return np.concatenate([chosen, first, np.arange(max(node.start, tail), node.end)])

    def _chunks(self, node: TrieNode, below: list[int], begin: int, end: int, keep: float, full: int) -> Int64Array:
        """Tokens of the best of the chunks `begin:end`, without the first `full` tokens, which are computed anyway."""
        chunk = self._settings.select_chunk
        offset = full // chunk
        begin = max(begin, offset)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        stop = min(end * chunk, node.end)
        importance = np.zeros(stop, dtype=np.float32)
        candidates = importance[begin * chunk :]
        for prompt in below:
            own = self._rated[prompt].importance
            if own is not None:
                np.maximum(candidates, own[begin * chunk : stop], out=candidates)
        count = budget(keep, end - offset) - budget(keep, begin - offset)
        best = _best(importance, begin, end, chunk, count)
        tokens = (best[:, None] * chunk + np.arange(chunk)).ravel()
        return tokens[tokens < stop]

    def _collect(self, node: TrieNode, prompt: int, full: int) -> None:
        """Collect what a prompt that ends with `node` keeps."""
        keep, chunk = self._rated[prompt].keep, self._settings.select_chunk
        if keep is None:
            return
        parts = list(self._path)
        if node.children and node.end % chunk:  # the prompt's last, shorter chunk is its own
            last = node.end // chunk
            parts.append(self._chunks(node, [prompt], last, last + 1, keep, full))
        self.kept[prompt] = np.unique(np.concatenate(parts))

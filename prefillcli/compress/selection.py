"""Which tokens are kept.

A prompt is cut into chunks of some tokens, counted from its start. Kept are the chunks of the largest mean importance,
`ceil(keep * chunks)` of them, the first tokens and the last ones (the question), in their order. What a prompt has
behind the prefix that it shares is kept whole, as if it were its last tokens, where that is not too long.

A common prefix is compressed once for all its prompts, so that it is still computed once. Its importance is the
maximum over its prompts. Of a run of chunks that the same prompts share, as many are kept as bring the total from
`ceil(keep * chunks before)` to `ceil(keep * chunks)`; for a prompt that shares nothing this is the rule above.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
import numpy.typing as npt

from prefillcli.compress.settings import Compression
from prefillcli.plan.trie import TokenArray, TrieNode, build_forest, token_order

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


def select(importance: FloatArray, keep: float, *, chunk: int, first: int, last: int) -> IntArray:
    """The kept tokens of one prompt, ascending. `importance` is [tokens]; of equal chunks the earlier are kept."""
    tokens = len(importance)
    chunks = -(-tokens // chunk)
    best = _best(importance, 0, chunks, chunk, _budget(keep, chunks))
    kept = np.zeros(tokens, dtype=bool)
    for number in best:
        kept[number * chunk : (number + 1) * chunk] = True
    kept[:first] = True
    kept[max(tokens - last, 0) :] = True
    return np.flatnonzero(kept)


def _budget(keep: float, chunks: int) -> int:
    """ceil(keep * chunks), where 0.3 of 10 chunks are 3 of them, also if 0.3 comes out of a float32."""
    return ceil(Fraction(f"{keep:.6g}") * chunks)


def _best(importance: FloatArray, begin: int, end: int, chunk: int, count: int) -> IntArray:
    """Those `count` of the chunks `begin:end` that have the largest mean importance."""
    if count <= 0 or begin >= end:
        return np.empty(0, dtype=np.int64)
    edges = np.arange(begin, end) * chunk
    part = importance[: end * chunk].astype(np.float64)
    lengths = np.diff(np.append(edges, len(part)))
    means = np.add.reduceat(part, edges) / lengths
    return begin + np.argsort(-means, kind="stable")[:count]


@dataclass(slots=True)
class _Wish:
    """A prompt and what is to be kept of it; `keep` None: all. Its last `tail` tokens are kept whatever they are."""

    tokens: int
    importance: FloatArray | None
    keep: float | None
    tail: int


class _Forest:
    """The trie of some prompts, whose prompts below a node are a range of `order`."""

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
                self.order.extend(node.reads)
                stack.append((node, False))
                stack.extend((child, True) for child in reversed(node.children))
            else:
                self._end[id(node)] = len(self.order)

    def below(self, node: TrieNode) -> list[int]:
        """The prompts that share `node`."""
        return self.order[self._begin[id(node)] : self._end[id(node)]]

    def private(self) -> list[int]:
        """For each prompt how many of its last tokens no other prompt has behind the same ones, but its duplicates."""
        found = [0] * len(self.prompts)
        stack = list(self.roots)
        while stack:
            node = stack.pop()
            stack.extend(node.children)
            if not node.children:
                for prompt in node.reads:
                    found[prompt] = node.end - node.start
        return found


def full_prefixes(prompts: Sequence[TokenArray], in_full: Sequence[bool]) -> list[int]:
    """For each prompt how many of its first tokens a prompt `in_full` computes anyway."""
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
    importances: Sequence[FloatArray | None],
    keeps: Sequence[float | None],
    settings: Compression,
) -> list[IntArray | None]:
    """The kept tokens of prompts that are computed together; None for those in full (keep None, or no importance)."""
    if all(keep is None for keep in keeps):
        return [None] * len(prompts)
    forest = _Forest(prompts)
    tails = _tails(forest, keeps, settings)
    wishes = [
        _Wish(len(tokens), importance, None if importance is None else keep, tail)
        for tokens, importance, keep, tail in zip(prompts, importances, keeps, tails, strict=True)
    ]
    if settings.per_row:
        return [_select_alone(wish, settings) for wish in wishes]
    selection = _Selection(forest, wishes, settings)
    for root in selection.forest.roots:
        selection.descend(root)
    return selection.kept


def tails(prompts: Sequence[TokenArray], keeps: Sequence[float | None], settings: Compression) -> list[int]:
    """How many of each prompt's last tokens are always kept.

    With `keep_private` these are all that it has behind the prefix it shares with any other of the `prompts`, unless
    they are more than its keep rate leaves of the whole prompt.
    """
    return _tails(_Forest(prompts), keeps, settings)


def _tails(forest: _Forest, keeps: Sequence[float | None], settings: Compression) -> list[int]:
    if not settings.keep_private:
        return [settings.tail] * len(keeps)
    return [
        max(settings.tail, private) if keep is not None and private <= keep * len(tokens) else settings.tail
        for tokens, private, keep in zip(forest.prompts, forest.private(), keeps, strict=True)
    ]


def _select_alone(wish: _Wish, settings: Compression) -> IntArray | None:
    if wish.keep is None or wish.importance is None:
        return None
    return select(wish.importance, wish.keep, chunk=settings.select_chunk, first=settings.keep_first, last=wish.tail)


class _Selection:
    """Selection down the trees of a forest."""

    def __init__(self, forest: _Forest, wishes: list[_Wish], settings: Compression) -> None:
        self.forest = forest
        self.kept: list[IntArray | None] = [None] * len(wishes)
        self._wishes = wishes
        self._settings = settings
        self._path: list[IntArray] = []  # what each node on the way down keeps, for all prompts below it

    def descend(self, root: TrieNode) -> None:
        stack: list[tuple[TrieNode, int, int]] = [(root, 0, 0)]  # node, its depth, tokens above computed in full
        while stack:
            node, depth, full = stack.pop()
            del self._path[depth:]
            below = self.forest.below(node)
            if any(self._wishes[prompt].keep is None for prompt in below):
                full = node.end
                self._path.append(np.arange(node.start, node.end))
            else:
                self._path.append(self._choose(node, below, full))
            for prompt in node.reads:
                self._close(node, prompt, full)
            stack.extend((child, depth + 1, full) for child in node.children)

    def _choose(self, node: TrieNode, below: list[int], full: int) -> IntArray:
        """The best of the chunks that end in `node`, and what of its own tokens is always kept for one of `below`."""
        chunk = self._settings.select_chunk
        end = node.end // chunk if node.children else -(-node.end // chunk)
        keep = max(self._wishes[prompt].keep or 0.0 for prompt in below)
        chosen = self._chunks(node, below, node.start // chunk, end, keep, full)
        first = np.arange(node.start, min(self._settings.keep_first, node.end))
        tail = min(self._wishes[prompt].tokens - self._wishes[prompt].tail for prompt in below)
        return np.concatenate([chosen, first, np.arange(max(node.start, tail), node.end)])

    def _chunks(self, node: TrieNode, below: list[int], begin: int, end: int, keep: float, full: int) -> IntArray:
        """Tokens of the best of the chunks `begin:end`; what is computed in full anyway takes no part."""
        chunk = self._settings.select_chunk
        offset = full // chunk
        begin = max(begin, offset)
        if begin >= end:
            return np.empty(0, dtype=np.int64)
        stop = min(end * chunk, node.end)
        importance = np.zeros(stop, dtype=np.float32)
        candidates = importance[begin * chunk :]
        for prompt in below:
            own = self._wishes[prompt].importance
            if own is not None:
                np.maximum(candidates, own[begin * chunk : stop], out=candidates)
        count = _budget(keep, end - offset) - _budget(keep, begin - offset)
        best = _best(importance, begin, end, chunk, count)
        tokens = (best[:, None] * chunk + np.arange(chunk)).ravel()
        return tokens[tokens < stop]

    def _close(self, node: TrieNode, prompt: int, full: int) -> None:
        """Collect what a prompt that ends with `node` keeps."""
        wish, chunk = self._wishes[prompt], self._settings.select_chunk
        if wish.keep is None:
            return
        parts = list(self._path)
        if node.children and node.end % chunk:  # the prompt's last, shorter chunk is its own
            last = node.end // chunk
            parts.append(self._chunks(node, [prompt], last, last + 1, wish.keep, full))
        self.kept[prompt] = np.unique(np.concatenate(parts))

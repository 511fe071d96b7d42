"""What the rows of an input hold: their lengths, and what their prompts have in common."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from prefillcli.data.rows import SKIPPED_CODES, ErrorCode, Int32Array, Prompt, Window
from prefillcli.plan.trie import build_forest, shared_nodes, token_order
from prefillcli.report.survey import (
    Bin,
    Duplicates,
    Lengths,
    SharedLevel,
    SharedPrefix,
    Sharing,
    SurveyRows,
)

LEVELS = (2, 10, 100)  # rows that share a prefix
PERCENTILES = (10, 50, 90, 95, 99)
LARGEST = 10
_REMEMBERED = 2000  # prefixes that may still turn out to be among the largest


class InputStatistics:
    """Adds up over windows what the rows hold, in about eight bytes a row."""

    def __init__(self) -> None:
        self.lengths: Counter[int] = Counter()
        """Number of prompts by their tokens."""
        self._rows = self._truncated = 0
        self._codes: Counter[str] = Counter()
        self._digests: list[npt.NDArray[np.uint64]] = []
        self._windows = 0
        self._unique = 0
        self._shared = dict.fromkeys(LEVELS, 0)
        self._largest: dict[bytes, SharedPrefix] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(length * rows for length, rows in self.lengths.items())

    def add(self, window: Window) -> None:
        """Count a window."""
        self._windows += 1
        self._rows += len(window.rows)
        self._codes.update(error.code for error in window.errors.values())
        self._truncated += sum(prompt.truncated for prompt in window.prompts)
        tokens = [prompt.tokens for prompt in window.prompts]
        self.lengths.update(map(len, tokens))
        digests = (int.from_bytes(_digest(each), "little") for each in tokens)
        self._digests.append(np.fromiter(digests, np.uint64, len(tokens)))
        self._share(window.prompts, tokens)

    def _share(self, prompts: Sequence[Prompt], tokens: Sequence[Int32Array]) -> None:
        nodes = shared_nodes(build_forest(tokens, token_order(tokens)))
        self._unique += sum(node.length for node, _ in nodes)
        for level in LEVELS:
            self._shared[level] += sum(node.length * rows for node, rows in nodes if rows >= level)
        candidates = [(node.length * (rows - 1), at) for at, (node, rows) in enumerate(nodes) if rows > 1]
        for saved, at in heapq.nlargest(_REMEMBERED // 10, candidates):
            node, rows = nodes[at]
            key = _digest(tokens[node.prompt][: node.end])
            known = self._largest.get(key)
            if known is None:
                first = prompts[node.prompt].row
                self._largest[key] = SharedPrefix(rows=rows, tokens=node.end, saved=saved, first_row=first)
            else:
                known.rows, known.saved = known.rows + rows, known.saved + saved
        if len(self._largest) > _REMEMBERED:
            ranked = sorted(self._largest.items(), key=lambda item: -item[1].saved)
            self._largest = dict(ranked[: _REMEMBERED // 2])

    def rows(self, more_errors: Counter[str]) -> SurveyRows:
        """Rows by what happens to them, with errors that were found elsewhere."""
        codes = self._codes + more_errors
        skipped = sum(codes.pop(code, 0) for code in SKIPPED_CODES)
        errors = codes.total()
        return SurveyRows(
            total=self._rows,
            prompts=self._rows - errors - skipped,
            errors=errors,
            skipped=skipped,
            errors_by_code=dict(sorted(codes.items())),
            too_long=self._truncated + skipped + codes[ErrorCode.PROMPT_TOO_LONG],
            truncated=self._truncated,
        )

    def duplicates(self) -> Duplicates:
        """Rows that have their prompt in common, over all windows."""
        digests = np.concatenate(self._digests) if self._digests else np.empty(0, dtype=np.uint64)
        counts = np.unique(digests, return_counts=True)[1]
        repeated = counts[counts > 1]
        return Duplicates(rows=int(repeated.sum()), prompts=len(repeated))

    def sharing(self, given: int = 0) -> Sharing:
        """What prompts have in common with others of their window; `given` tokens were computed by windows before."""
        levels = [
            SharedLevel(rows=level, tokens=shared, share=shared / self.tokens)
            for level, shared in self._shared.items()
            if shared
        ]
        largest = sorted(self._largest.values(), key=lambda prefix: -prefix.saved)[:LARGEST]
        return Sharing(windows=self._windows, unique_tokens=self._unique - given, levels=levels, largest=largest)


def lengths_of(counts: Counter[int]) -> Lengths:
    """The lengths of prompts, given how many prompts have each length. There is at least one."""
    lengths = sorted(counts)
    ends = np.cumsum([counts[length] for length in lengths])
    rows = int(ends[-1])
    nearest = {share: int(np.searchsorted(ends, math.ceil(share / 100 * rows))) for share in PERCENTILES}
    return Lengths(
        least=lengths[0],
        mean=sum(length * number for length, number in counts.items()) / rows,
        most=lengths[-1],
        percentiles={str(share): lengths[at] for share, at in nearest.items()},
        histogram=histogram_of(counts),
    )


def histogram_of(counts: Counter[int]) -> list[Bin]:
    """Bins whose edges grow by a factor of 2, or by a root of it where lengths differ little."""
    least, most = min(counts), max(counts)
    steps = next((n for n in (1, 2, 4) if n * math.log2((most + 1) / least) >= 6), 8)  # to a factor of 2
    at = math.floor(steps * math.log2(least))
    edges = [round(2 ** (at / steps))]
    while edges[-1] <= most:
        at += 1
        edge = round(2 ** (at / steps))
        if edge > edges[-1]:
            edges.append(edge)
    first = max(bisect.bisect_right(edges, least) - 1, 0)
    edges = [min(edges[first], least), *edges[first + 1 :]]
    bins = [Bin(low=low, high=high, rows=0) for low, high in itertools.pairwise(edges)]
    for length, rows in counts.items():
        bins[bisect.bisect_right(edges, length) - 1].rows += rows
    return bins


def _digest(tokens: Int32Array) -> bytes:
    return blake2b(tokens.tobytes(), digest_size=8).digest()

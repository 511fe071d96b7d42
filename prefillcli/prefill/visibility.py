"""Which runs of queries see which runs of keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefillcli.prefill.key_window import KeyWindow

_Depths = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Queries `q0:q1` of a chunk see the keys `k0:k1` of the buffer; key `k0` is token number `k_depth` of its path.

    `masked`: a window hides some of these keys from some of these queries.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    k_depth: int
    masked: bool = False


class SpanSet:
    """Collects what queries at these `depths` see: clips it to the window, joins what continues one another."""

    def __init__(self, depths: _Depths, window: KeyWindow | None) -> None:
        self._depths = depths
        self._window = window
        self._spans: dict[tuple[int, int], list[Span]] = {}  # by keys

    def add(self, q0: int, q1: int, k0: int, k1: int, k_depth: int) -> None:
        """Queries `q0:q1` see the keys `k0:k1`."""
        known = self._spans.setdefault((k0, k1), [])
        if known and known[-1].q1 == q0:
            known[-1] = Span(known[-1].q0, q1, k0, k1, k_depth)
        else:
            known.append(Span(q0, q1, k0, k1, k_depth))

    def merged(self) -> list[Span]:
        """All spans; those of the same queries whose keys follow one another are one."""
        by_queries: dict[tuple[int, int], list[Span]] = {}
        for spans in self._spans.values():
            for span in spans:
                by_queries.setdefault((span.q0, span.q1), []).append(span)
        result: list[Span] = []
        for spans in by_queries.values():
            spans.sort(key=lambda s: s.k0)
            joined = spans[:1]
            for span in spans[1:]:
                last = joined[-1]
                if last.k1 == span.k0 and last.k_depth + last.k1 - last.k0 == span.k_depth:
                    joined[-1] = Span(last.q0, last.q1, last.k0, span.k1, last.k_depth)
                else:
                    joined.append(span)
            result.extend(joined)
        if self._window is None:
            return result
        return [clipped for span in result if (clipped := self._clip(span, self._window)) is not None]

    def _clip(self, span: Span, window: KeyWindow) -> Span | None:
        seen = window.oldest(self._depths[span.q0 : span.q1])
        first, last = int(seen.min()), int(seen.max())
        end = span.k_depth + span.k1 - span.k0
        if first >= end:
            return None
        cut = max(0, first - span.k_depth)
        return Span(
            span.q0,
            span.q1,
            span.k0 + cut,
            span.k1,
            span.k_depth + cut,
            masked=last > span.k_depth + cut,
        )

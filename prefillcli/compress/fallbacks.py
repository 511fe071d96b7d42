"""Why prompts that should be compressed are read in full."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from prefillcli.data.rows import FULL, reading_method

FALLBACK = "fallback:"
"""What the column `method` begins with where a prompt in full should have been compressed; a reason follows."""

NO_MEMORY, TOO_LONG, VOCABULARY = "draft_memory", "draft_length", "draft_vocabulary"
NO_VOTE, NOT_FINITE, FAILED = "draft_window", "draft_not_finite", "draft_error"
TEXT = "draft_text"

ENOUGH_ROWS = 32
"""Rows that show that a draft is of no use if it has compressed none of them."""


class Fallback(NamedTuple):
    """A reason: what it means, and whether it is a fault of the draft and not of the prompt."""

    meaning: str
    fault: bool = False


FALLBACKS = {
    NO_MEMORY: Fallback("the prompt does not fit the memory budget of the draft"),
    TOO_LONG: Fallback("the prompt is longer than the draft's position encoding reaches"),
    VOCABULARY: Fallback("the prompt has a token that the draft's vocabulary lacks"),
    TEXT: Fallback("the draft's own tokenizer has no tokens for the prompt's text, or for too much of it"),
    NO_VOTE: Fallback("no layer of the draft attends to the whole prompt"),
    NOT_FINITE: Fallback("the draft's attention is not finite", fault=True),
    FAILED: Fallback("the draft failed on the prompt's pack, for lack of memory for example", fault=True),
}
"""The reasons by name."""


def is_fallback(method: str) -> bool:
    """Whether a prompt of this `method` should have been compressed and was read in full."""
    return method.startswith(FALLBACK)


def compressed_rows(methods: Mapping[str, int]) -> int:
    """Rows that were compressed, of the rows by method."""
    return sum(rows for method, rows in _readings(methods).items() if method != FULL and not is_fallback(method))


def faulty_rows(methods: Mapping[str, int]) -> int:
    """Rows on which the draft was at fault, if no row was compressed, else 0. `methods`: rows by method."""
    if compressed_rows(methods):
        return 0
    readings = _readings(methods)
    return sum(readings[FALLBACK + reason] for reason, row in FALLBACKS.items() if row.fault)


def fallbacks_of_useless_draft(methods: Mapping[str, int]) -> dict[str, int]:
    """Rows by fallback, if no row was compressed and there is a fault or `ENOUGH_ROWS` rows; else empty."""
    fallbacks = {method: rows for method, rows in sorted(_readings(methods).items()) if is_fallback(method)}
    if compressed_rows(methods):
        return {}
    return fallbacks if faulty_rows(methods) or sum(fallbacks.values()) >= ENOUGH_ROWS else {}


def _readings(methods: Mapping[str, int]) -> Counter[str]:
    """The rows by how they were read: whether a row left early says nothing of the draft."""
    readings: Counter[str] = Counter()
    for method, rows in methods.items():
        readings[reading_method(method)] += rows
    return readings

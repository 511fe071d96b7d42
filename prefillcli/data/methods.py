"""What the column `method` says of a row: how its prompt was read, and whether it left before the last layer.

A method is `full`, that of a picker (`specprefill`, ...), or `fallback:` and a reason. A row that left early has
`early-exit` instead of `full`, and `+early-exit` behind any other method: a picker's row stays one of that picker.
"""

from __future__ import annotations

FULL, EARLY_EXIT = "full", "early-exit"
_LEFT = f"+{EARLY_EXIT}"


def early_exit_method(reading: str) -> str:
    """The method of a row that left early, whose prompt was read by `reading`."""
    return EARLY_EXIT if reading == FULL else reading + _LEFT


def reading_method(method: str) -> str:
    """How a row's prompt was read, whether or not the row left early."""
    return FULL if method == EARLY_EXIT else method.removesuffix(_LEFT)


def left_early(method: str) -> bool:
    """Whether a row of this method left before the last layer."""
    return method == EARLY_EXIT or method.endswith(_LEFT)

"""What `--deterministic` is not promised for, and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prefillcli.errors import UsageError


@dataclass(frozen=True, slots=True)
class _Limit:
    """Other options with which a row's score would depend on more than the row, or may."""

    given: Callable[[Any], bool]
    reason: str
    remedy: str


_LIMITS = (
    _Limit(
        lambda s: s.compile,
        "compiled layers have kernels of their own for each size of chunk",
        "leave --compile out",
    ),
    _Limit(
        lambda s: s.compresses,
        "which tokens of a prompt are kept is not the same to the last bit with other neighbours",
        "leave --draft and --keep out",
    ),
    _Limit(
        lambda s: s.exit,
        "what is learnt about exits, and so where a row leaves, depends on the other rows",
        "leave --exit out",
    ),
    _Limit(
        lambda s: s.rationale > 0,
        "texts are written for several rows at a time, and a near tie may fall otherwise with others",
        "leave --rationale out; --evidence is covered",
    ),
)


def check_deterministic(settings: Any) -> None:
    """Raise UsageError for options of `prefill score` that `--deterministic`, if it is given, does not cover."""
    for limit in _LIMITS:
        if settings.deterministic and limit.given(settings):
            raise UsageError(f"--deterministic: {limit.reason}\n{limit.remedy}, or leave --deterministic out")

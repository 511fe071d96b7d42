"""A fuzzer: examples of one kind of input, and what must hold of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from tests.fuzz.workplace import Workplace


@dataclass(frozen=True, slots=True)
class Fuzzer:
    """`check` raises for an example that breaks a promise. `examples` are drawn `per_round` at a time."""

    name: str
    examples: SearchStrategy[Any]
    check: Callable[[Any, Workplace], None]
    per_round: int

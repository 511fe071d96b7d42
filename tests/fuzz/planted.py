"""Fuzzers that break each promise: they show that a broken one is noticed."""

from __future__ import annotations

import os
import time
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.workplace import Workplace


def _crash(example: int, place: Workplace) -> None:
    if example > 100:
        os.abort()


def _hang(example: int, place: Workplace) -> None:
    if example > 100:
        time.sleep(60)


def _compute(example: int, place: Workplace) -> None:
    while example > 100:
        pass


def _fill(example: int, place: Workplace) -> None:
    bytearray(2 << 30 if example > 100 else 1)


def _fail(example: int, place: Workplace) -> None:
    assert example <= 100, "more than a hundred"


def _keep(example: Any, place: Workplace) -> None:
    """Nothing is wrong with any example."""


_CHECKS = {"crash": _crash, "hang": _hang, "compute": _compute, "fill": _fill, "fail": _fail, "keep": _keep}
FUZZERS = {name: Fuzzer(name, st.integers(0, 1000), check, per_round=50) for name, check in _CHECKS.items()}
"""By name."""

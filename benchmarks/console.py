"""What a benchmark says on stderr while it runs."""

from __future__ import annotations

import sys


def log(text: str) -> None:
    """One line, at once."""
    print(text, file=sys.stderr, flush=True)


def log_run(turn: int, name: str, seconds: float) -> None:
    """A timed run; for `interleaved`. The warm-up, round 0, is not mentioned."""
    if turn:
        log(f"  round {turn}: {name} {seconds:.2f} s")

"""The files that a run writes beside the scores: how one of an earlier run is known, which may be replaced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SideFile:
    """A kind of file."""

    meaning: str
    knows: Callable[[str, bytes], bool]
    """Whether the file at a path, with its first bytes, is of this kind."""


def json_with(*names: str) -> Callable[[str, bytes], bool]:
    """Knows reports: JSON objects with a schema version and these names."""

    def knows(path: str, start: bytes) -> bool:
        try:
            content = json.loads(start)
        except (ValueError, RecursionError):
            return False
        return isinstance(content, dict) and content.keys() >= {"schema_version", *names}

    return knows

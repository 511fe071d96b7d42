"""The columns that only some outputs have, by what a job asks for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

Group = Literal["audit", "calibrated", "exits", "adapters", "rationales", "evidence"]


@dataclass(frozen=True, slots=True)
class ColumnGroups:
    """Which groups of columns an output has beside those that every output has."""

    audit: bool = False
    """The scores of an audit."""
    calibrated: bool = False
    """Calibrated probabilities."""
    exits: bool = False
    """Where rows left the model early."""
    adapters: bool = False
    """Which adapter read each row."""
    rationales: bool = False
    """What was written behind rows."""
    evidence: bool = False
    """What the sections of prompts contribute."""

    def has(self, group: Group | None) -> bool:
        """Whether columns of this group are there; those of no group always are."""
        found: bool = group is None or getattr(self, group)
        return found

    @property
    def names(self) -> list[Group]:
        """The groups that are there."""
        return [each.name for each in fields(self) if getattr(self, each.name)]  # type: ignore[misc]


NO_GROUPS = ColumnGroups()
"""The columns of every output, and no others."""

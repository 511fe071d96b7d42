"""Making a scorer of the parts of a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest

from prefillcli.core.roles import Reading
from prefillcli.judging.gates import Gates
from prefillcli.options.judging import GateOptions
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.scorer import make_scorer


class Skimming(Reading):
    """A reading that somebody adds."""

    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True)
class MoreParts(Parts):
    skimming: Skimming | None = None


def test_a_reading_that_nothing_asks_is_an_error() -> None:
    nothing = cast("Any", None)
    parts = MoreParts(nothing, Gates(GateOptions()), skimming=Skimming())
    with pytest.raises(NotImplementedError, match="Skimming: nothing asks it how prompts are read"):
        make_scorer(nothing, parts, nothing)

"""The commands that take options."""

from __future__ import annotations

from prefillcli.options.bench import BenchSettings
from prefillcli.options.groups import JobOptions
from prefillcli.options.inspect import InspectSettings
from prefillcli.options.profile import ProfileSettings
from prefillcli.options.score import ScoreSettings

COMMANDS: dict[str, type[JobOptions]] = {
    "score": ScoreSettings,
    "profile": ProfileSettings,
    "bench": BenchSettings,
    "inspect": InspectSettings,
}
"""The commands that take options, by name."""

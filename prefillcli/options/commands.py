"""The commands that take options."""

from __future__ import annotations

from prefillcli.options.bench import BenchSettings
from prefillcli.options.calibrate import CalibrateSettings
from prefillcli.options.doctor import DoctorSettings
from prefillcli.options.inspect import InspectSettings
from prefillcli.options.merge import MergeSettings
from prefillcli.options.option import Settings
from prefillcli.options.profile import ProfileSettings
from prefillcli.options.score import ScoreSettings

COMMANDS: dict[str, type[Settings]] = {
    "score": ScoreSettings,
    "profile": ProfileSettings,
    "bench": BenchSettings,
    "inspect": InspectSettings,
    "merge": MergeSettings,
    "calibrate": CalibrateSettings,
    "doctor": DoctorSettings,
}
"""The commands that take options, by name."""

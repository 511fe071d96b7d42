"""The sample model that ships with the package."""

from __future__ import annotations

from pathlib import Path

from prefillcli.errors import UsageError


def sample_model() -> Path:
    """Directory of the shipped target model: inside an installed wheel, or in the repository. Raises UsageError."""
    package = Path(__file__).parent
    for root in (package, package.parent):
        path = root / "samples" / "models" / "target"
        if (path / "config.json").is_file():
            return path
    raise UsageError("no --model given, and the sample model did not come with this installation")

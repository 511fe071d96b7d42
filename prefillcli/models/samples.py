"""The sample models."""

from __future__ import annotations

from pathlib import Path

from prefillcli.errors import UsageError


def sample_model() -> Path:
    """Directory of the shipped target model: inside an installed wheel, or in the repository. Raises UsageError."""
    found = _find("target")
    if found is None:
        raise UsageError("no --model given, and the sample model did not come with this installation")
    return found


def sample_draft() -> Path | None:
    """Directory of the draft of `sample_model`; None if it did not come with this installation."""
    return _find("draft")


def _find(name: str) -> Path | None:
    package = Path(__file__).parent.parent
    for root in (package, package.parent):
        path = root / "samples" / "models" / name
        if (path / "config.json").is_file():
            return path
    return None

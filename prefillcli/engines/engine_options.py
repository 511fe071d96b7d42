"""Options that go to an engine as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from prefillcli.errors import UsageError, did_you_mean


def check_options(
    engine: str, options: Mapping[str, Any], known: Collection[str], taken: Mapping[str, str] = {}
) -> None:
    """Raise UsageError for an option that is not `known`, with the nearest that is, and for one that is `taken`: what
    an option of prefill, or prefill itself, decides."""
    for key in options:
        if key in taken:
            raise UsageError(f"--engine-options {key}: {taken[key]}")
        if key not in known:
            raise UsageError(
                f"--engine-options {key}: the {engine} engine has no such option{did_you_mean(key, known)}"
            )

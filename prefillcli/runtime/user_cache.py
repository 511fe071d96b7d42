"""Where prefill keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/prefillcli`, or `~/.cache/prefillcli`. It need not be there yet.

    A user without a home gets one that cannot be made: nothing is kept.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~/.cache"))
    if not root.is_absolute():  # `~` stays as it is, and would be made in the working directory
        root = Path(os.devnull)
    return root / "prefillcli"

"""The engine that a job asks for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from prefillcli.engines.base import Loader
from prefillcli.engines.kinds import ENGINES


def loader_of(engine: str) -> Loader:
    """What opens and loads the engine of this name."""
    return cast(Loader, import_module(ENGINES[engine].module))

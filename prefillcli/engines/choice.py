"""The engine that a job asks for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from prefillcli.data.proof.fingerprints import hash_value
from prefillcli.engines.base import Loader
from prefillcli.engines.kinds import ENGINES
from prefillcli.options.score import ScoreSettings


def loader_of(engine: str) -> Loader:
    """What opens and loads the engine of this name."""
    return cast(Loader, import_module(ENGINES[engine].module))


def hash_engine(settings: ScoreSettings) -> str:
    """Digest of the engine and those of its options that may change a score."""
    sizes = ENGINES[settings.engine].sizes
    return hash_value(
        [settings.engine, {key: value for key, value in settings.engine_options.items() if key not in sizes}]
    )

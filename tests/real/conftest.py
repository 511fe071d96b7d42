"""A real model of 135M parameters, from its GGUF file and as safetensors, and what transformers says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from recipes.real_model import at_hand, gguf_file
from tests.gguf_files import GgufReference

FOLDER = Path(__file__).parents[2] / "out" / "real"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="the model and the reviews are not installed here; make test-real brings them")
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)
            if not at_hand(FOLDER):
                item.add_marker(missing)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PREFILL_MODEL", "PREFILL_LABELS", "PREFILL_QUIET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def reference() -> GgufReference:
    transformers_logging.disable_progress_bar()
    return GgufReference(gguf_file(FOLDER))


@pytest.fixture(scope="session")
def saved(reference: GgufReference, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the reference is, as a folder with safetensors."""
    return reference.save(tmp_path_factory.mktemp("real"))


@pytest.fixture(params=["gguf", "safetensors"])
def real(request: pytest.FixtureRequest) -> Path:
    """The real model in both formats."""
    if request.param == "gguf":
        return gguf_file(FOLDER)
    folder: Path = request.getfixturevalue("saved")
    return folder

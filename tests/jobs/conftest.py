"""Small models with random weights, rows to score, and what transformers says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs import Reference
from tests.jobs.models import CHAT_TEMPLATE, save_model


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test works in a folder of its own, without settings from the environment."""
    monkeypatch.chdir(tmp_path)
    for name in ("PREFILL_MODEL", "PREFILL_LABELS", "PREFILL_QUIET"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a causal language model whose tokenizer has no chat template."""
    return save_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a smaller model with the tokenizer of `model`."""
    return save_model(tmp_path_factory.mktemp("models") / "draft", seed=3, layers=1)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a causal language model whose tokenizer has a chat template."""
    return save_model(tmp_path_factory.mktemp("models") / "chat", chat_template=CHAT_TEMPLATE, seed=1)


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """transformers' own eager forward of `model`."""
    return Reference(model)


@pytest.fixture(scope="session")
def chat_reference(chat_model: Path) -> Reference:
    """transformers' own eager forward of `chat_model`."""
    return Reference(chat_model)

"""A real model of 135M parameters, from its GGUF file and as safetensors, and what transformers says of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers.utils import logging as transformers_logging

from recipes.real_model import GEMMA, QWEN, at_hand, gguf_file, has_room
from tests.gguf_files import GgufReference

FOLDER = Path(__file__).parents[2] / "out" / "real"
LARGER = {"gemma": GEMMA, "qwen": QWEN}  # by the names of fixtures


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for name, model in LARGER.items():
        asking = [item for item in items if name in getattr(item, "fixturenames", ())]
        if name in os.environ.get("WITHOUT", "").split():
            why = "WITHOUT names it"
        elif asking and not has_room(model, FOLDER):
            why = "the disk has no room for it"
        else:
            continue
        print(f"{model.name} is left out, with {len(asking)} tests: {why}")
        config.hook.pytest_deselected(items=asking)
        items[:] = [item for item in items if item not in asking]
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
    reference = GgufReference(gguf_file(FOLDER))
    # transformers reads every byte-level GGUF tokenizer as GPT-2's. This file's is `smollm`, which in llama.cpp
    # (`LLAMA_VOCAB_PRE_TYPE_SMOLLM`) splits at each digit first
    digits, letters = Digits(individual_digits=True), ByteLevel(add_prefix_space=False)
    reference.tokenizer.backend_tokenizer.pre_tokenizer = Sequence([digits, letters])
    return reference


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

"""A run fetches no code: not even where the package is installed by which libraries fetch compiled code from a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils.import_utils import KERNELS_MIN_VERSION

from prefillcli.errors import UsageError
from prefillcli.models.find import read_model_files
from tests.adapters import save_adapter
from tests.jobs.jobs import write_parquet
from tests.jobs.models import save_model

ROOT = Path(__file__).parents[2]
PACKAGE = """
import os
from unittest.mock import MagicMock
with open(os.environ["ASKED"], "a") as file:
    file.write("imported\\n")
def __getattr__(name):
    return MagicMock()
"""
LIBRARY = """
import prefillcli
with prefillcli.Scorer("model", adapter={"x": "adapter"}) as scorer:
    assert scorer.score(["The fox. Answer:"])["score"][0].as_py() > 0
import kernels  # what the program itself has installed is its own business
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the package notes that it was imported, in a folder with a model, an adapter and rows."""
    monkeypatch.chdir(tmp_path)
    information = tmp_path / "installed" / f"kernels-{KERNELS_MIN_VERSION}.dist-info"
    (tmp_path / "installed" / "kernels").mkdir(parents=True)
    (tmp_path / "installed" / "kernels" / "__init__.py").write_text(PACKAGE)
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS_MIN_VERSION}\n")
    save_adapter(save_model(tmp_path / "model", hidden=16, layers=1), tmp_path / "adapter")
    write_parquet("in.parquet", prompt=["The fox. Answer:"])
    return tmp_path / "asked"


def run(asked: Path, imports: str, *words: str) -> str:
    """Run Python where the package is installed, which is imported so often; gives what it says on stderr."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:installed", "ASKED": str(asked)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=False)
    assert (asked.read_text() if asked.exists() else "") == imports
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), pytest.param(("--workers", "2"), marks=pytest.mark.nightly)])
def test_a_command_neither_looks_for_code_to_fetch_nor_speaks_of_it(asked: Path, flags: tuple[str, ...]) -> None:
    words = ("score", "in.parquet", "-m", "model", "--adapter", "adapter", "-o", "out.parquet", *flags)
    assert "kernels" not in run(asked, "", "-m", "prefillcli", *words)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_scorer_fetches_no_code_and_leaves_the_package_to_its_program(asked: Path) -> None:
    run(asked, "imported\n", "-c", LIBRARY)  # by the program


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository_is_not_that_of_the_model(tmp_path: Path, name: str) -> None:
    file = save_model(tmp_path / "model", hidden=16, layers=1) / name
    content = json.loads(file.read_text())
    content["auto_map"] = {"AutoModelForCausalLM": "modeling.Own", "AutoTokenizer": ["someone/else--tokens.Own", None]}
    file.write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"auto_map names code of someone/else"):
        read_model_files(tmp_path / "model", trust_remote_code=True)
    assert read_model_files(tmp_path / "model").family == "llama"

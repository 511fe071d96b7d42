"""What an installed wheel brings along."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(_ROOT)], check=True
    )
    (built,) = folder.glob("prefillcli-*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_brings_the_whole_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(_ROOT)) for path in (_ROOT / "prefillcli").rglob("*.py")}
    files = {"py.typed", "schema/run.schema.json", "samples/post_recommendation.parquet"}
    assert modules | {f"prefillcli/{name}" for name in files} <= names
    for model in ("target", "draft", "tickets"):
        for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            assert f"prefillcli/samples/models/{model}/{name}" in names
    assert all(name.startswith("prefillcli/") for name in names)


@pytest.mark.slow
def test_an_unpacked_wheel_finds_its_samples(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from prefillcli.models.files import *; "
    code += "print(sample_model(), sample_draft(), sample_model(typed=True), sample_rows())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True
    )
    samples = tmp_path / "site/prefillcli/samples"
    assert done.stdout.split() == [
        str(samples / name)
        for name in ("models/target", "models/draft", "models/tickets", "post_recommendation.parquet")
    ]

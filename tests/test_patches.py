"""Tests that put something in the place of a name: a name that nobody reads guards nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import ROOT, dotted, tree


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """No later test carries the syntax of all files with it."""
    yield
    tree.cache_clear()


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
        called = call.func.attr if isinstance(call.func, ast.Attribute) else dotted(call.func)
        if called.endswith("setattr"):
            if isinstance(first, ast.Constant):
                target = str(first.value)
            elif others and isinstance(others[0], ast.Constant):
                head, _, rest = ast.unparse(first).partition(".")
                target = ".".join(filter(None, (names.get(head, head), rest, str(others[0].value))))
        elif called == "Hold" and isinstance(first, ast.Constant):
            target = str(first.value).replace(":", ".")
        module, _, name = target.rpartition(".")
        if module_file(module):
            yield call.lineno, module, name


def read_names(of: ast.Module) -> tuple[set[str], set[tuple[str, str]]]:
    """Names that functions of a file look up when they are called, and names of other modules that they look up there:
    by an import inside a function, or as an attribute of the module."""
    own, others, names = set(), set(), imported(of)
    for function in ast.walk(of):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            own |= {node.id for part in function.body for node in ast.walk(part) if isinstance(node, ast.Name)}
    for node in ast.walk(of):
        if isinstance(node, ast.ImportFrom) and node.col_offset > 0:
            others |= {(node.module or "", alias.name) for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            others.add((names.get(dotted(node.value), ""), node.attr))
    return own, others


def unread(patched: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Those whose name nobody looks up in its module at the time of a call."""
    own, elsewhere = {}, set()
    for file in sorted((ROOT / "prefillcli").rglob("*.py")):
        own[file], others = read_names(tree(file))
        elsewhere |= others
    return [
        (where, module, name)
        for where, module, name in patched
        if name not in own[module_file(module)] and (module, name) not in elsewhere
    ]


def patches() -> list[tuple[str, str, str]]:
    files = sorted((ROOT / "tests").rglob("*.py"))
    return [
        (f"{file.relative_to(ROOT)}:{line}", module, name)
        for file in files
        for line, module, name in patched(tree(file))
    ]


@pytest.mark.nightly
def test_what_a_test_replaces_is_read() -> None:
    assert len(patches()) > 30
    assert unread(patches()) == [], "bound elsewhere when it is called"


def test_a_name_that_was_imported_at_the_top_is_not_read_where_it_was_made() -> None:
    made, read = ("here", "prefillcli.scoring.loading", "load_walk"), ("here", "prefillcli.tools.inspect", "load_walk")
    assert unread([made, read]) == [made]

"""`python -m tests.house`: what a reader of the package must know, in counts; `test_architecture.py` holds some."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from prefillcli.core import asking, roles

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "prefillcli"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}


@cache
def tree(path: Path) -> ast.Module:
    """The syntax of a file."""
    return ast.parse(path.read_text())


def dotted(node: ast.expr) -> str:
    """A name with dots as it is written: `os.path.join`; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (value := dotted(node.value)):
        return f"{value}.{node.attr}"
    return ""


@cache
def imported(path: Path, modules: frozenset[str] = frozenset(MODULES)) -> tuple[str, ...]:
    """The modules that a file imports, wherever it does, for type checking too: of these, or those of a name."""
    return tuple(_imported(path, modules))


def _imported(path: Path, modules: frozenset[str]) -> Iterator[str]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else node.module


def circles() -> list[set[str]]:
    """The modules that import each other in a circle, wherever they do: strongly connected components."""
    numbers = {module: number for number, module in enumerate(MODULES)}
    edges = [
        (numbers[module], numbers[name])
        for module, path in MODULES.items()
        for name in imported(path)
        if name in numbers
    ]
    ends = np.array(edges).T
    graph = csr_array((np.ones(len(edges)), (ends[0], ends[1])), shape=(len(numbers), len(numbers)))
    _, component = connected_components(graph, connection="strong")
    names = list(MODULES)
    found = [{names[at] for at in np.flatnonzero(component == each)} for each in set(component.tolist())]
    return [each for each in found if len(each) > 1]


ROLES = (asking.Asking, roles.Reading, roles.FollowUp, roles.Judge)


def implementers(role: type) -> dict[str, list[str]]:
    """By each method of a role, the classes that have one of their own."""
    methods = [
        name for name, value in vars(role).items() if callable(getattr(value, "__func__", value)) and name[0] != "_"
    ]
    kinds = _below(role)
    return {name: [each.__name__ for each in kinds if name in vars(each)] for name in methods}


def _below(role: type) -> list[type]:
    return [each for own in role.__subclasses__() for each in (own, *_below(own))]


def statements() -> int:
    """The statements of the package."""
    return sum(isinstance(node, ast.stmt) for path in FILES for node in ast.walk(tree(path)))


def main() -> None:
    """Print the counts."""
    import prefillcli.scoring.compose  # noqa: F401 - which imports all parts

    print(f"{statements():,} statements in {len(FILES)} modules")
    print(f"circles of imports: {sorted(map(len, circles()), reverse=True)} files")
    for role in ROLES:
        print(f"{role.__name__}:")
        for name, kinds in implementers(role).items():
            print(f"  {name}: {len(kinds)} ({', '.join(kinds)})")


if __name__ == "__main__":
    main()

"""`python -m tests.changed [REVISION]`: the daily tests that the files changed since a revision of git can reach.

A test file is reached if it, or what it imports, however far behind, has changed or names a module that has: imports
inside functions count, and so do names in texts, by which parts are registered and replaced. Of a file that is not
Python, those that have its name in them are reached, or the name of its folder in quotes where none has. What is in no
file's text is in no graph: `make test` is the proof, this the quick look.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.house import ROOT, imported

ROOTS = ("prefillcli", "tests", "benchmarks", "recipes", "training")
DAILY = "not nightly and not matrix and not real"
EVERY_TEST = ("pyproject.toml", "tests/__init__.py")  # what pytest itself reads


def changed_files(root: Path, since: str = "") -> list[str]:
    """The files that differ from a revision, or from where this branch left origin/main, and those not yet added."""
    base = since or _git(root, "merge-base", "HEAD", "origin/main", check=False) or "HEAD"
    differing = _git(root, "diff", "--name-only", "--no-renames", base)
    return sorted({*differing.splitlines(), *_git(root, "ls-files", "--others", "--exclude-standard").splitlines()})


def reached(root: Path, changed: Iterable[str]) -> list[str]:
    """The test files that these files reach, by their paths from the root."""
    files = {path.relative_to(root).as_posix() for name in ROOTS for path in (root / name).rglob("*.py")}
    texts = {name: (root / name).read_text() for name in files}
    users = _users(root, texts)
    found: set[str] = set()
    waiting = [name for each in changed for name in _touched(each, texts)]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += users[name]
    return sorted(name for name in found & files if Path(name).name.startswith("test_"))


def _touched(name: str, texts: dict[str, str]) -> Iterator[str]:
    """What a change of this one file touches at once."""
    yield name
    folder = Path(name).parent.as_posix() + "/"
    if name in EVERY_TEST or name == "tests/conftest.py":
        yield from texts
    elif Path(name).name in ("__init__.py", "conftest.py"):  # which run for all that is below
        yield from (other for other in texts if other.startswith(folder))
    elif not name.endswith(".py"):
        by_name = [other for other, text in texts.items() if Path(name).name in text]
        yield from by_name or (other for other, text in texts.items() if f'"{Path(folder).name}"' in text)


def _users(root: Path, texts: dict[str, str]) -> dict[str, list[str]]:
    """By each file, those that import it or name it."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in texts}
    known = frozenset(modules)
    named = re.compile(rf"\b(?:{'|'.join(ROOTS)})(?:\.\w+)+")
    users = defaultdict(list)
    for name, text in texts.items():
        longer = (found.split(".") for found in named.findall(text))
        names = {".".join(words[:size]) for words in longer for size in range(2, len(words) + 1)}
        for used in names.union(imported(root / name, known)):
            if used in modules:
                users[modules[used]].append(name)
    return users


def _git(root: Path, *words: str, check: bool = True) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=check)
    return done.stdout.strip()


def main(since: str, *words: str) -> int:
    """Run these tests, with further `words` to pytest; returns its exit code."""
    files = reached(ROOT, changed_files(ROOT, since))
    print(f"{len(files)} files of tests are reached", flush=True)
    if not files:
        return 0
    return subprocess.run([sys.executable, "-m", "pytest", "-m", DAILY, *words, *files], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [""])))

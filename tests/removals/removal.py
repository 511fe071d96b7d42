"""What is taken out of the program for each fault of docs/reliability.md, so that its tests must fail.

The TOML files of this folder hold it, by topic:

    [[removal]]
    fault = "a misspelt `PREFILL_` variable"    # a row of the table, or how it alone begins
    tests = ["tests/test_options.py::test_..."]  # of that row; without it, all of them
    edits = [{ file = "prefillcli/options/environment.py", old = "...", new = "..." }]

`old` is in the file exactly once. Where two things protect, `edits` takes out both.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_HEADER = "| fault | promise | test |\n"


@dataclass(frozen=True, slots=True)
class Promise:
    """A row of docs/reliability.md."""

    fault: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of the program that is replaced."""

    file: str
    old: str
    new: str

    def places(self, root: Path) -> int:
        """How often `old` is in the file."""
        return (root / self.file).read_text().count(self.old)


@dataclass(frozen=True, slots=True)
class Removal:
    """What is taken out, and which tests must fail then."""

    fault: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]

    @property
    def name(self) -> str:
        """The beginning of the row, on one line."""
        return self.fault if len(self.fault) <= 80 else f"{self.fault[:77]}..."


def promises() -> list[Promise]:
    """The rows of the table."""
    table = (ROOT / "docs" / "reliability.md").read_text().partition(_HEADER)[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (?!---)(.*) \|$", table, re.MULTILINE)
    return [Promise(row.split(" | ")[0], tuple(re.findall(r"`(tests/[\w/]+\.py::test_\w+)`", row))) for row in rows]


def removals(folder: Path = Path(__file__).parent) -> list[Removal]:
    """All that the folder's files hold. Raises ValueError for one that is not of exactly one row."""
    rows = promises()
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["removal"]:
            of = [row for row in rows if row.fault == entry["fault"]]
            of = of or [row for row in rows if row.fault.startswith(entry["fault"])]
            if len(of) != 1:
                raise ValueError(f"{path.name}: {len(of)} rows of the table begin with {entry['fault']!r}")
            edits = tuple(Edit(**edit) for edit in entry.get("edits", []))
            tests = tuple(entry.get("tests", of[0].tests))
            if unknown := set(tests) - set(of[0].tests):
                raise ValueError(f"{path.name}: the row {entry['fault']!r} does not name {', '.join(sorted(unknown))}")
            if not edits:
                raise ValueError(f"{path.name}: nothing is taken out for {entry['fault']!r}")
            found.append(Removal(of[0].fault, tests, edits))
    return found

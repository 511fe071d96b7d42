"""The tests that a change reaches, in a repository made here."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.changed import changed_files, reached

FILES = {
    "prefillcli/__init__.py": "",
    "prefillcli/core/__init__.py": "",
    "prefillcli/core/rows.py": "ONE = 1",
    "prefillcli/core/late.py": "def late():\n    from prefillcli.core import rows",
    "prefillcli/core/named.py": "PARTS = ('prefillcli.core.late:late',)",
    "prefillcli/apart.py": "",
    "recipes/nightly.sh": "true",
    "tests/conftest.py": "",
    "tests/helpers.py": "from prefillcli.core.named import PARTS",
    "tests/test_late.py": "from tests.helpers import PARTS",
    "tests/test_rows.py": "import prefillcli.core.rows",
    "tests/test_apart.py": "def test(patch):\n    patch.setattr('prefillcli.apart.NAME', 1)",
    "tests/test_script.py": "SCRIPT = 'recipes/nightly.sh'",
    "tests/test_pages.py": 'PAGES = ROOT / "docs"',
    "tests/unit/conftest.py": "",
    "tests/unit/test_inner.py": "",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ("prefillcli/core/rows.py", "late rows"),  # by a lazy import, behind a name in a text, behind a helper
        ("prefillcli/core/late.py", "late"),
        ("prefillcli/core/__init__.py", "late rows"),
        ("prefillcli/apart.py", "apart"),
        ("recipes/nightly.sh", "script"),
        ("tests/helpers.py", "late"),
        ("tests/test_rows.py", "rows"),
        ("tests/unit/conftest.py", "inner"),
        ("tests/conftest.py", "apart late pages rows script inner"),
        ("pyproject.toml", "apart late pages rows script inner"),
        ("docs/news.md", "pages"),
        ("notes/news.md", ""),
        ("tests/test_gone.py", ""),
    ],
)
def test_a_change_reaches_what_imports_or_names_it(tree: Path, changed: str, names: str) -> None:
    assert {Path(each).stem.removeprefix("test_") for each in reached(tree, [changed])} == set(names.split())


def test_changed_are_files_since_a_revision_and_new_ones(tree: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *words], cwd=tree, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    assert changed_files(tree) == []
    (tree / "prefillcli/apart.py").write_text("NAME = 2")
    (tree / "tests/test_new.py").touch()
    (tree / "tests/helpers.py").unlink()
    assert changed_files(tree) == ["prefillcli/apart.py", "tests/helpers.py", "tests/test_new.py"]
    git("add", ".")
    git("commit", "-m", "two")
    assert changed_files(tree) == []
    assert changed_files(tree, "HEAD~1") == ["prefillcli/apart.py", "tests/helpers.py", "tests/test_new.py"]

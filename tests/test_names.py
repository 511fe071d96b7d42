"""Names of files, modules, tests and functions in prose: each is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house import PACKAGE, ROOT

FOLDERS = ("prefillcli", "tests", "benchmarks", "recipes", "training")
CODE = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
ENDS = {".md", ".sh", ".yaml", ".toml", ".cpp"}
TEXTS = [path for folder in (*FOLDERS, "docs") for path in sorted((ROOT / folder).rglob("*")) if path.suffix in ENDS]
TEXTS += [*ROOT.glob("*.md"), *ROOT.glob("samples/*.md"), ROOT / "Makefile"]
UPSTREAM = {
    "LLAMA_VOCAB_PRE_TYPE_SMOLLM": "llama.cpp",
    "_encode_pair": "lm-evaluation-harness",
    "block_info": "flash-attention",
    "column": "pyarrow's RowGroupMetaData",
    "compile_expression": "jinja2",
    "count_words": "lm-evaluation-harness",
    "flash_api": "PyTorch",
    "llm_tokenizer_bpe": "llama.cpp",
    "longest_first": "tokenizers",
    "mha_varlen_fwd": "PyTorch",
    "record_stream": "PyTorch",
}
"""Names of others' code that only prose mentions, and whose they are."""

OURS = {"benchmarks.md", "prefillcli.seal"}
"""Names with a dot that are no modules: a page, a key of an output's metadata."""

Prose = list[tuple[int, str]]
_STRING = r""""(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'"""
_PROSE = re.compile(rf'(?ms)^[ ]*r?"""(?P<docstring>.*?)"""|""".*?"""|{_STRING}|#(?P<comment>[^\n]*)')


@cache
def read(path: Path) -> tuple[Prose, set[str]]:
    """The docstrings and comments of a Python file with their lines, and the words of its code."""
    text, prose = path.read_text(), []

    def taken(found: re.Match[str]) -> str:
        if not (said := found["docstring"] or found["comment"]):
            return found[0]
        prose.append((text.count("\n", 0, found.start()) + 1, said))
        return ""

    code = _PROSE.sub(taken, text)
    return prose, set(re.findall(r"\w+", code))


def _prose(path: Path) -> Prose:
    if path.suffix == ".py":
        return read(path)[0]
    lines = list(enumerate(path.read_text().splitlines(), 1))
    return lines if path.suffix == ".md" else [(line, text) for line, text in lines if re.match(r"\s*(#|//)", text)]


def _in_prose(pattern: str, paths: list[Path] = CODE + TEXTS) -> Iterator[tuple[str, Path, str]]:
    """Each place that names something by this pattern: as `file:line`, with the file and the name."""
    for path in paths:
        for line, text in _prose(path):
            for name in re.findall(pattern, text):
                yield f"{path.relative_to(ROOT)}:{line}", path, name


def test_files_that_prose_names_are_there() -> None:
    folders = "|".join({path.name for path in PACKAGE.rglob("*") if path.is_dir()} | {*FOLDERS, "docs", "samples"})
    patterns = (r"(?<![\w/.-])((?:\w+/)+\w+\.(?:py|md|yaml|sh))\b", rf"`((?:{folders})/[\w/.]*)`")
    named = [found for pattern in patterns for found in _in_prose(pattern)]
    assert len(named) > 300
    for place, path, name in named:
        near = (ROOT, PACKAGE, PACKAGE / "rows", ROOT / "recipes", path.parent)
        assert any((folder / name).exists() for folder in near), (place, name)


def test_modules_that_prose_names_are_there() -> None:
    named = list(_in_prose(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})(?:\.[A-Za-z_]\w+)+)"))
    assert len(named) > 50
    for place, _, name in named:
        assert _found(name.removesuffix(".__init__")) or name in OURS, (place, name)


def _found(name: str) -> bool:
    """Whether this is a module, or a name that a module's code has."""
    module, words = name.split("."), set[str]()
    while module:
        file = ROOT.joinpath(*module)
        if file.is_dir() or file.with_suffix(".py").is_file():
            own = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            return not words or (own.is_file() and words <= read(own)[1])
        words.add(module.pop())
    return False


def test_names_in_docstrings_and_comments_are_names_of_the_code() -> None:
    words = {*UPSTREAM}.union(*(read(path)[1] for path in CODE))
    for path in TEXTS:
        words.update(re.findall(r"\w+", path.read_text()) if path.suffix != ".md" else ())
    named = list(_in_prose(r"`([A-Za-z_](?:[\w.]*\w)?)\.*(?:\([^`]*\))?`", CODE))
    assert len(named) > 2000
    for place, _, name in named:
        assert words.issuperset(name.split(".")), (place, name)


def test_tests_that_prose_names_are_there() -> None:
    tests = "".join(path.read_text() for path in CODE if path.is_relative_to(ROOT / "tests"))
    there = set(re.findall(r"def (test_\w+)\(", tests)) | {path.stem for path in CODE}
    for place, _, name in _in_prose(r"\b(test_\w+)\b"):
        assert name in there, (place, name)


RECIPES = "\n".join(line for line in (ROOT / "Makefile").read_text().splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("module", sorted(set(re.findall(r"python -m ([\w.]+)", RECIPES)) - {"pytest"}))
def test_make_runs_modules_that_are_there(module: str) -> None:
    file = ROOT.joinpath(*module.split("."))
    main = file / "__main__.py" if file.is_dir() else file.with_suffix(".py")
    assert main.is_file()
    if not file.is_dir():
        assert '__name__ == "__main__"' in main.read_text()


def test_make_names_files_and_targets_that_are_there() -> None:
    kept = rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w/.-]+)"
    files = set(re.findall(kept, RECIPES))
    assert len(files) > 20
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", RECIPES, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: ((?:.*\\\n)*.*)", RECIPES, re.MULTILINE)
    assert targets == set(phony.replace("\\", " ").split())
    asked = {name for _, _, name in _in_prose(r"`make ([a-z][\w-]*)", [*TEXTS, *CODE])}
    assert asked <= targets

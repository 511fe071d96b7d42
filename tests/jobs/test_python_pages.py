"""The Python code in the documentation and the recipe for an Airflow task, as they stand."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.jobs.jobs import Reference, assert_scored, texts, write_parquet

ROOT = Path(__file__).parents[2]


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _job(model: Path, tmp_path: Path) -> None:
    """The files that the pages name."""
    Path("models").mkdir()
    Path("models/judge").symlink_to(model)
    write_parquet(
        "posts.parquet",
        id=list(range(120)),
        day=["monday"] * 120,
        prompt=texts(120),
        history=["fox"] * 120,
        post=texts(120),
    )


def test_the_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = [block for block in blocks("docs/python.md") if "@task" not in block]
    assert len(code) >= 4
    names: dict[str, Any] = {}
    for block in code:
        exec(compile(block, "docs/python.md", "exec"), names)  # noqa: S102 - our own page
    assert list(names["scored"].columns[:3]) != []
    assert names["some"].column_names[:3] == ["id", "day", "score"]
    assert names["some"].num_rows == 100
    assert names["table"]["error"].to_pylist() == [None, "invalid_utf8"]
    assert capsys.readouterr().out.startswith("1 of 2 rows have no score (invalid_utf8 1); ")


def test_the_code_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("README.md")
    assert len(code.splitlines()) <= 6
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - our own page
    assert names["table"].num_rows == 120
    assert names["table"]["error"].null_count == 120


class _Dag:
    """What the recipe takes of Airflow: the decorators give the functions, and calls between tasks do nothing."""

    def __init__(self, **_options: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...


@pytest.fixture
def score_task(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The body of the recipe's task `score`, without Airflow."""
    found: dict[str, Callable[..., Any]] = {}

    def task(**_options: Any) -> Any:
        def decorate(function: Callable[..., Any]) -> Any:
            found[function.__name__] = function
            return lambda *arguments: None

        return decorate

    task.external_python = task  # type: ignore[attr-defined]
    sdk = ModuleType("airflow.sdk")
    sdk.DAG, sdk.task = _Dag, task  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "airflow", ModuleType("airflow"))
    monkeypatch.setitem(sys.modules, "airflow.sdk", sdk)
    runpy.run_path(str(ROOT / "recipes/airflow_task_dag.py"))
    assert found.keys() == {"score", "check"}
    return found["score"]


def test_the_airflow_task_scores_a_file_and_says_how_it_went(
    score_task: Callable[..., dict[str, Any]], model: Path, reference: Reference
) -> None:
    Path("in").mkdir()
    write_parquet("in/day.parquet", id=["a", "b", "c"], text=["fox", "dog", "Yes"])
    Path("prompt.jinja").write_text("{{ text }} Answer:")
    told = score_task(".", "in/day.parquet", "out/day.parquet", str(model), "prompt.jinja")
    table = pq.read_table("out/day.parquet")
    assert table["id"].to_pylist() == ["a", "b", "c"]
    assert_scored(table.to_pylist(), [reference.answer(f"{text} Answer:") for text in ("fox", "dog", "Yes")])
    mean = sum(table["score"].to_pylist()) / 3
    assert told == {"rows": 3, "errors": 0, "mean_score": pytest.approx(mean)}
    assert [path.name for path in Path("out").iterdir()] == ["day.parquet"]

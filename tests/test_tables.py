"""The recipes of docs/tables.md, each with the real package, against the scores of the same rows as a list."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import prefillcli

PACKAGES = ("deltalake", "pyiceberg", "duckdb", "lance")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.real,
    pytest.mark.skipif(
        not all(map(find_spec, PACKAGES)), reason="their packages are not installed here; make test-tables brings them"
    ),
    pytest.mark.filterwarnings("ignore"),  # their own
]

PAGE = (Path(__file__).parent.parent / "docs" / "tables.md").read_text()
ROWS = 30
POSTS = pa.table({
    "id": [f"r{number}" for number in range(ROWS)],
    "text": [None if number == 7 else f"The fox ran past house {number % 9}, {number}." for number in range(ROWS)],
    "day": [f"2026-01-0{1 + number % 3}" for number in range(ROWS)],
})  # fmt: skip


def delta() -> Callable[[], pa.Table]:
    from deltalake import DeltaTable, write_deltalake

    write_deltalake("posts", POSTS)
    return lambda: DeltaTable("scores").to_pyarrow_table()


def iceberg() -> Callable[[], pa.Table]:
    from pyiceberg.catalog import load_catalog

    here = Path.cwd()
    lines = [
        "catalog:",
        "  local:",
        "    type: sql",
        f"    uri: sqlite:///{here}/c.db",
        f"    warehouse: file://{here}",
    ]
    Path(".pyiceberg.yaml").write_text("\n".join(lines))
    catalog = load_catalog("local", type="sql", uri=f"sqlite:///{here}/c.db", warehouse=f"file://{here}")
    catalog.create_namespace("lake")
    catalog.create_table("lake.posts", schema=POSTS.schema).append(POSTS)
    return lambda: catalog.load_table("lake.scores").scan().to_arrow()


def duckdb() -> Callable[[], pa.Table]:
    import duckdb

    posts = POSTS  # DuckDB finds it by its name
    with duckdb.connect("posts.duckdb") as database:
        database.sql("CREATE TABLE posts AS SELECT * FROM posts")

    def read() -> pa.Table:
        with duckdb.connect("posts.duckdb") as database:
            return database.sql("SELECT * FROM scores").to_arrow_table()

    assert posts.num_rows == ROWS
    return read


def lance() -> Callable[[], pa.Table]:
    import lance

    lance.write_dataset(POSTS, "posts.lance")
    return lambda: lance.dataset("scores.lance").to_table()


@pytest.mark.parametrize(
    ("heading", "make", "rows"),
    [("Delta", delta, ROWS), ("Iceberg", iceberg, 2 * ROWS // 3), ("DuckDB", duckdb, ROWS), ("Lance", lance, ROWS)],
)
def test_a_recipe_writes_the_scores_of_its_rows(
    heading: str, make: Any, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYICEBERG_HOME", str(tmp_path))
    read = make()
    (code,) = re.findall(rf"^## {heading}\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    subprocess.run([sys.executable, "-c", code], check=True)
    found = {row["id"]: row for row in read().to_pylist()}
    assert len(found) == rows
    own = [row for row in POSTS.to_pylist() if row["id"] in found]
    wanted = prefillcli.score(own, template="{{ text }}\nIs this about a fox? Answer:").to_pylist()
    for row in wanted:
        assert found[row["id"]]["score"] == (None if row["score"] is None else pytest.approx(row["score"], abs=1e-5))
        assert found[row["id"]]["error"] == row["error"]
    assert {row["error"] for row in wanted} == {None, "template_error"} or heading == "Iceberg"

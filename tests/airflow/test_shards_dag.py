"""The shipped DAG with mapped shards through a real Airflow: `make test-airflow`."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.airflow.test_dag import (
    AIRFLOW,
    ROOT,
    Airflow,
    airflow,  # noqa: F401 - a fixture
    output,
    put_input,
    whole,  # noqa: F401 - a fixture
)

SHARDS = 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AIRFLOW, reason="AIRFLOW does not name the airflow command; make test-airflow does"),
]


def run(airflow: Airflow, day: str, trouble: str = "") -> tuple[dict[str, list[tuple[str, int]]], dict[str, Any], str]:  # noqa: F811
    """The DAG's run of a day, with two shards and a short delay before a retry.

    States and tries of the tasks, mapped ones in the order of the shards; what merge and check pushed; the log.
    """
    (airflow.home / "codes").unlink(missing_ok=True)
    (airflow.home / "trouble").write_text(trouble)
    shipped = (ROOT / "recipes" / "airflow_shards_dag.py").read_text()
    changed = shipped.replace("SHARDS = 4 ", f"SHARDS = {SHARDS} ").replace(
        "timedelta(minutes=5)", "timedelta(seconds=1)"
    )
    assert changed.count(f"SHARDS = {SHARDS} ") == changed.count("timedelta(seconds=1)") == 1
    (airflow.dags / "airflow_shards_dag.py").write_text(changed)
    log = airflow.call("dags", "test", "prefill_nightly_shards", day)
    with sqlite3.connect(airflow.dags.parent / "airflow.db") as database:
        found = "from {} t join dag_run r using (dag_id, run_id) where r.logical_date like ? and t.dag_id = ?"
        given = [f"{day}%", "prefill_nightly_shards"]
        states = defaultdict(list)
        query = f"select t.task_id, t.state, t.try_number {found.format('task_instance')} order by t.map_index"
        for task, state, tries in database.execute(query, given):
            states[task].append((state, tries))
        query = f"select t.task_id, t.value {found.format('xcom')} and t.key = 'return_value' and t.map_index < 0"
        xcom = {task: json.loads(value) for task, value in database.execute(query, given)}
    assert states.keys() == {"score", "merge", "check"}, log
    return dict(states), xcom, log


def test_shards_are_scored_apart_and_merged(airflow: Airflow, whole: list[dict[str, Any]]) -> None:  # noqa: F811
    put_input(airflow, "2026-02-01")
    states, xcom, log = run(airflow, "2026-02-01")
    assert [state for state, _ in states["score"]] == ["success"] * SHARDS, log
    assert states["merge"][0][0] == states["check"][0][0] == "success", log
    assert xcom["merge"]["rows"]["scored"] == xcom["check"]["scored"] == len(whole)
    assert_whole(output(airflow, "2026-02-01"), whole)
    assert not list((airflow.home / "out").glob("nightly.2026-02-01.*.prefill/part-*"))


def test_a_killed_shard_is_resumed_and_the_merge_waits(airflow: Airflow, whole: list[dict[str, Any]]) -> None:  # noqa: F811
    put_input(airflow, "2026-02-02")
    states, xcom, log = run(airflow, "2026-02-02", "kill")
    assert sorted(tries for _, tries in states["score"]) == [1, 2], log
    assert "return code -9" in log
    assert [state for state, _ in states["score"]] == ["success"] * SHARDS, log
    assert states["merge"] == [("success", 1)], log
    assert airflow.codes[0] == "-9"
    assert xcom["merge"]["rows"]["scored"] == len(whole)
    assert_whole(output(airflow, "2026-02-02"), whole)


def test_an_empty_night_skips_every_task(airflow: Airflow) -> None:  # noqa: F811
    put_input(airflow, "2026-02-03")
    path = airflow.home / "in" / "2026-02-03.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    states, _, log = run(airflow, "2026-02-03")
    assert {state for each in states.values() for state, _ in each} == {"skipped"}, log


def assert_whole(path: Path, whole: list[dict[str, Any]]) -> None:  # noqa: F811
    """The output is the one that a single process writes."""
    rows = pq.read_table(path).to_pylist()
    assert [row["id"] for row in rows] == [row["id"] for row in whole]
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in whole]
    assert [row["score"] for row in rows] == pytest.approx([row["score"] for row in whole], abs=1e-5)

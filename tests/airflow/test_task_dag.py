"""The shipped DAG with `prefillcli.score` in a task, through a real Airflow: `make test-airflow`."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
AIRFLOW = os.environ.get("AIRFLOW", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not AIRFLOW, reason="AIRFLOW does not name the airflow command; make test-airflow does"),
]


def test_a_night(tmp_path: Path) -> None:
    home, airflow = tmp_path / "job", tmp_path / "airflow"
    dags = airflow / "dags"
    (home / "in").mkdir(parents=True)
    dags.mkdir(parents=True)
    pq.write_table(pq.read_table(ROOT / "samples/labeling.parquet").slice(0, 50), home / "in/2026-01-31.parquet")
    (home / "prompt.jinja").write_text("{{ text }}\nAnswer:")
    (dags / "airflow_task_dag.py").write_text((ROOT / "recipes/airflow_task_dag.py").read_text())
    environment = os.environ | {
        "AIRFLOW_HOME": str(airflow),
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW_VAR_PREFILL_HOME": str(home),
        "AIRFLOW_VAR_PREFILL_PYTHON": sys.executable,
        "AIRFLOW_VAR_PREFILL_MODEL": str(ROOT / "samples/models/target"),
    }
    log = ""
    for arguments in (["db", "migrate"], ["dags", "test", "prefill_task", "2026-01-31"]):
        done = subprocess.run(
            [AIRFLOW, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=1200, check=False,  # a hang, not a busy machine
        )  # fmt: skip
        log = done.stdout
    scores = pq.read_table(home / "out/2026-01-31.parquet")
    assert scores.num_rows == 50, log
    assert scores["error"].null_count == 50
    with sqlite3.connect(airflow / "airflow.db") as database:
        states = dict(database.execute("select task_id, state from task_instance"))
        (found,) = database.execute("select value from xcom where task_id = 'score' and key = 'return_value'")
    assert states == {"score": "success", "check": "success"}, log
    mean = sum(scores["score"].to_pylist()) / 50
    assert json.loads(found[0]) == {"rows": 50, "errors": 0, "mean_score": pytest.approx(mean)}

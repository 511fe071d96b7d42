"""Airflow 3: score a table every night in a task that calls `prefillcli.score`, and hand on what came out.

For tables that are scored in minutes: a task that is stopped begins again. Jobs of hours are for airflow_dag.py.
Copy it to the DAGs folder. Airflow variables, all optional (or AIRFLOW_VAR_PREFILL_HOME, ... in the environment of the
workers); DATE in a path stands for the day of the run:

    prefill_home      folder in which the task runs; paths start there   /srv/scoring
    prefill_python    the Python that prefillcli is installed for        /srv/scoring/.venv/bin/python
    prefill_model     the model                                          models/judge
    prefill_template  the prompt, as a Jinja template or a file          prompt.jinja
    prefill_input     the rows                                           in/DATE.parquet
    prefill_output    where the scores go                                out/DATE.parquet
"""

from datetime import datetime, timedelta

from airflow.sdk import DAG, task


def variable(name: str, default: str) -> str:
    """An Airflow variable, read when the task runs, with the day for DATE."""
    return f"{{{{ var.value.get('prefill_{name}', '{default}') | replace('DATE', ds) }}}}"


with DAG(
    dag_id="prefill_task",
    schedule="15 2 * * *",
    start_date=datetime(2025, 1, 1),
    catchup=False,
    max_active_runs=1,  # one run has the device to itself
    tags=["prefill"],
) as dag:

    @task.external_python(
        python=variable("python", "/srv/scoring/.venv/bin/python"),
        expect_airflow=False,  # that Python has no Airflow, and Airflow's has no torch
        retries=2,
        retry_delay=timedelta(minutes=5),
        execution_timeout=timedelta(hours=1),
    )
    def score(home: str, path: str, output: str, model: str, template: str) -> dict[str, object]:
        """Score the rows of a file, write a row for each, and say how it went."""
        import os

        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        import prefillcli

        os.chdir(home)
        table = prefillcli.score(path, model, template=template, id_column="id", progress=True)
        os.makedirs(os.path.dirname(output) or ".", exist_ok=True)
        pq.write_table(table, f"{output}.part")
        os.replace(f"{output}.part", output)  # whole or not at all, also in the next try
        errors = table.num_rows - table["error"].null_count
        return {"rows": table.num_rows, "errors": errors, "mean_score": pc.mean(table["score"]).as_py()}

    @task(retries=0)  # the scores stay what they are
    def check(found: dict[str, object]) -> None:
        """Fail if a row could not be scored."""
        print(f"{found['rows']:,} rows, {found['errors']:,} errors, mean score {found['mean_score']}")
        if found["errors"]:
            raise ValueError(f"{found['errors']:,} of {found['rows']:,} rows have an error: see the column error")

    check(
        score(
            variable("home", "/srv/scoring"),
            variable("input", "in/DATE.parquet"),
            variable("output", "out/DATE.parquet"),
            variable("model", "models/judge"),
            variable("template", "prompt.jinja"),
        )
    )

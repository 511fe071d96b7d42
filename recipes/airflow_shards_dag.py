"""Airflow 3: score a file every night in shards, one mapped task for each, then merge and look at the summary.

Copy it to the DAGs folder, and set SHARDS. Workers share the folder in which the command runs, or the output is a URL.
Airflow variables, all optional (or AIRFLOW_VAR_PREFILL_HOME, ... in the environment of the workers), are those of
airflow_dag.py; DATE in a path stands for the day of the run:

    prefill_home            folder in which the command runs; paths start there   /srv/scoring
    prefill_command         the command                                           .venv/bin/prefill
    prefill_recipe          the job                                               recipes/labeling.yaml
    prefill_input           the file, if it is not the recipe's                   e.g. in/DATE.parquet
    prefill_output          where the scores go                                   out/nightly.DATE.parquet
    prefill_max_error_rate  share of error rows above which the run fails         0.01
"""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowException, AirflowFailException

SHARDS = 4  # as many as workers that may have a task at a time

# Values come as environment variables, never as part of the shell's text.
# --resume: a retry goes on where the last try was stopped, and a shard that is complete ends at once.
SCORE = """
cd "$SCORING_HOME" && exec "$SCORING_COMMAND" score ${SCORING_INPUT:+"$SCORING_INPUT"} --recipe "$SCORING_RECIPE" \
    --output "$SCORING_OUTPUT" --shard "$SCORING_SHARD" --resume --skip-empty --progress-interval 60
"""
# --max-error-rate 1: bad rows are not a reason to retry; `check` judges them by their number.
MERGE = """
cd "$SCORING_HOME" && exec "$SCORING_COMMAND" merge "$SCORING_OUTPUT" --recipe "$SCORING_RECIPE" --max-error-rate 1
"""


class PrefillOperator(BashOperator):
    """A command that Airflow tries again only where another try can help.

    Exit code 2 is a wrong option, 3 a failed gate or too many error rows, 4 the output of another job.
    """

    def execute(self, context: Any) -> Any:
        """Run the command. Raises AirflowFailException, which ends all tries, for these exit codes."""
        try:
            return super().execute(context)
        except AirflowException as error:
            process = self.subprocess_hook.sub_process
            if process is not None and process.returncode in (2, 3, 4):
                raise AirflowFailException(f"exit code {process.returncode}: another try would not help") from error
            raise


def variable(name: str, default: str) -> str:
    """An Airflow variable, read when the task runs, with the day for DATE."""
    return f"{{{{ var.value.get('prefill_{name}', '{default}') | replace('DATE', ds) }}}}"


ENVIRONMENT = {
    "SCORING_HOME": variable("home", "/srv/scoring"),
    "SCORING_COMMAND": variable("command", ".venv/bin/prefill"),
    "SCORING_RECIPE": variable("recipe", "recipes/labeling.yaml"),
    "SCORING_INPUT": variable("input", ""),
    "SCORING_OUTPUT": variable("output", "out/nightly.DATE.parquet"),
}
COMMON: dict[str, Any] = {
    "append_env": True,  # PREFILL_MODEL, PREFILL_THREADS, ... of the worker reach the command
    "skip_on_exit_code": 99,  # no rows tonight: all tasks are skipped
    "do_xcom_push": True,
    "output_processor": json.loads,  # the last line on stdout is the summary
    "retries": 3,
    "retry_delay": timedelta(minutes=5),
}

with DAG(
    dag_id="prefill_nightly_shards",
    schedule="15 2 * * *",
    start_date=datetime(2025, 1, 1),
    catchup=False,
    max_active_runs=1,
    tags=["prefill"],
) as dag:
    score = PrefillOperator.partial(
        task_id="score",
        bash_command=SCORE,
        execution_timeout=timedelta(hours=6),  # SIGTERM; the next try goes on
        map_index_template="{{ task.env['SCORING_SHARD'] }}",
        **COMMON,
    ).expand(env=[ENVIRONMENT | {"SCORING_SHARD": f"{number + 1}/{SHARDS}"} for number in range(SHARDS)])
    merge = PrefillOperator(task_id="merge", bash_command=MERGE, env=ENVIRONMENT, **COMMON)

    @task(retries=0)  # the scores stay what they are
    def check(summary: dict[str, Any], max_error_rate: str) -> dict[str, Any]:
        """Fail if the scores must not be used."""
        rows, mean = summary["rows"], summary.get("mean_score")
        print(f"{rows['scored']:,} of {rows['total']:,} rows scored: {summary['verdict']['text']}")
        if rows["errors"] > float(max_error_rate) * rows["total"]:
            raise ValueError(f"{rows['errors']:,} of {rows['total']:,} rows failed: {rows['errors_by_code']}")
        if "mean_score" in summary and (mean is None or not 0.01 < mean < 0.99):  # questions have `answers` instead
            raise ValueError(f"a mean score of {mean}: is it still the right model, prompt and labels?")
        return {"scored": rows["scored"], "mean_score": mean, "output": summary["output"]}

    score >> merge
    check(merge.output, variable("max_error_rate", "0.01"))

"""`python -m benchmarks.evaluation [ROWS]`: what `--truth` costs at the end of a job, by format and labels."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.output.columns import OutputSchema
from prefillcli.data.output.target import JsonlFormat
from prefillcli.data.prompts.labels import Label
from prefillcli.judging.evaluation import EvaluationPlan, evaluate_output
from prefillcli.runtime.memory import peak_memory

ROWS = 1_000_000
LABELS = {2: ("Yes", "No"), 10: tuple(f"label{at}" for at in range(10))}


def write_scores(folder: Path, rows: int, labels: int, ending: str) -> Path:
    """An output of scored rows with ids and right answers."""
    draws, names = np.random.default_rng(0), LABELS[labels]
    logits = draws.normal(size=(rows, labels))
    truth = (logits + draws.gumbel(size=(rows, labels))).argmax(axis=1)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    columns = {f"logprob_{name}": pa.array(logprobs[:, at]) for at, name in enumerate(names)}
    columns |= {"score": pa.array(np.exp(logprobs[:, 0]))}
    columns |= {"prediction": pa.array(names).take(pa.array(logprobs.argmax(axis=1)))}
    schema = OutputSchema(labels=tuple(names)).results
    known = [columns.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    ids, answers = pa.array([f"row-{at}" for at in range(rows)]), pa.array(names).take(pa.array(truth))
    table = pa.Table.from_arrays([ids, answers, *known], names=["id", "truth", *schema.names])
    path = folder / f"scores.{labels}{ending}"
    if ending == ".parquet":
        pq.write_table(table, path)
    else:
        with path.open("wb") as file:
            pieces = (table.slice(at, 10_000) for at in range(0, rows, 10_000))
            JsonlFormat(None).write(file, table.schema, pieces)
    return path


def measure(path: Path, labels: int) -> str:
    """Seconds and memory of one evaluation, in a process of its own."""
    plan = EvaluationPlan("truth", tuple(map(Label, LABELS[labels])), 1.0, None, False)
    evaluate_output(str(path.parent / "small.parquet"), plan, "id")  # imports what it needs
    before, begun, spent = peak_memory()["host"], time.perf_counter(), time.process_time()
    found = evaluate_output(str(path), plan, "id")
    seconds, processor = time.perf_counter() - begun, time.process_time() - spent
    more = (peak_memory()["host"] - before) / 2**20
    return f"{found.rows:,} | {seconds:.1f} | {processor:.1f} | {more:,.0f}"


def main() -> None:
    """Print a table; with three arguments, one of its rows."""
    if len(sys.argv) == 3:
        print(measure(Path(sys.argv[1]), int(sys.argv[2])))
        return
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    print("| output | labels | rows | seconds | processor seconds | MiB more |\n| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as name:
        for labels in LABELS:
            write_scores(Path(name), 2_000, labels, ".parquet").rename(Path(name) / "small.parquet")
            for ending in (".parquet", ".jsonl"):
                path = write_scores(Path(name), rows, labels, ending)
                command = [sys.executable, "-m", "benchmarks.evaluation", str(path), str(labels)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - our own
                print(f"| {ending} | {labels} | {done.stdout.strip()} |", flush=True)
                path.unlink()


if __name__ == "__main__":
    main()

"""Score the sample data sets with the sample model, and compare with the true answers.

python -m recipes.demo [FOLDER FOR THE OUTPUT]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

SAMPLES = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "samples"))
MODEL = SAMPLES / "models" / "target"
DATA = ("post_recommendation.parquet", "credit_verification.jsonl", "labeling.parquet")


def main() -> int:
    """Run the command line as a user would, once per data set. Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out")
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True, width=120)
    quality = Table("data set", "rows", "accuracy", "AUC", "rows/s", title="Scores against the true answers")
    files = []
    for name in DATA:
        output = folder / (name.partition(".")[0] + ".scores.parquet")
        command = ["score", str(SAMPLES / name), "--model", str(MODEL), "--output", str(output)]
        command += ["--id-column", "id", "--keep-columns", "answer", "--overwrite"]
        console.print(f"$ prefill {' '.join(command)}")
        run = subprocess.run(  # noqa: S603 - our own command line
            [sys.executable, "-m", "prefillcli", *command], stdout=subprocess.PIPE, text=True, check=False
        )
        summary = json.loads(run.stdout.splitlines()[-1])
        if run.returncode:
            return run.returncode
        scores = pq.read_table(output)
        console.print(_first_rows(name, scores))
        yes = np.asarray(scores["answer"]) == "Yes"
        score = scores["score"].to_numpy()
        report = json.loads(Path(summary["report"]).read_text())
        quality.add_row(
            name,
            f"{len(scores):,}",
            f"{np.mean((score > 0.5) == yes):.1%}",
            f"{area_under_curve(score, yes):.4f}",
            f"{report['rows_per_second']:.1f}",
        )
        files += [f"scores  {output}", f"report  {summary['report']}"]
    console.print(quality)
    console.print(*files, sep="\n")
    return 0


def _first_rows(name: str, scores: pa.Table, count: int = 6) -> Table:
    table = Table("id", "true answer", "P(Yes)", "label mass", "prompt tokens", "of these shared", title=name)
    for row in scores.slice(0, count).to_pylist():
        table.add_row(
            str(row["id"]),
            row["answer"],
            f"{row['score']:.4f}",
            f"{row['label_mass']:.3f}",
            f"{row['prompt_tokens']:,}",
            f"{row['shared_tokens']:,}",
        )
    return table


def area_under_curve(score: np.ndarray, positive: np.ndarray) -> float:
    """Share of (positive, negative) pairs that `score` puts in the right order; ties count half."""
    order = np.sign(score[positive][:, None] - score[~positive][None, :])
    return float((order + 1).mean() / 2)


if __name__ == "__main__":
    sys.exit(main())

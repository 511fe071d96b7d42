"""Score the sample data sets with the sample models, two of them also from a fifth of the tokens, and compare.

python -m recipes.demo [FOLDER FOR THE OUTPUT]
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

SAMPLES = Path(os.path.relpath(Path(__file__).resolve().parent.parent / "samples"))
MODEL, DRAFT = SAMPLES / "models" / "target", SAMPLES / "models" / "draft"
READS = ["--model", str(MODEL), "--keep-columns", "answer"]
COMPRESSED = [*READS, "--draft", str(DRAFT), "--keep", "0.2", "--audit", "240", "--truth", "answer"]
SEES = ["--model", str(SAMPLES / "models" / "pictures"), "--image-column", "photo", "--limit", "20"]
SEES += ["--ask", "Is there a purple shape?", "--keep-columns", "has_purple"]
RUNS: list[tuple[str, str, list[str]]] = [  # data set, name of the run, its options
    ("post_recommendation.parquet", "post_recommendation", READS),
    ("credit_verification.jsonl", "credit_verification", READS),
    ("labeling.parquet", "labeling", READS),
    ("pictures.parquet", "pictures", SEES),
    ("credit_verification.jsonl", "credit_verification.compressed", COMPRESSED),
    ("post_recommendation.parquet", "post_recommendation.compressed", COMPRESSED),
]


def main() -> int:
    """Run the command line as a user would. Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("out")
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, soft_wrap=True, width=120)
    quality = Table(
        "run", "rows", "tokens read", "answers flipped", "accuracy", "AUC", title="Scores against the true answers"
    )
    files = []
    for data, name, options in RUNS:
        output = folder / f"{name}.scores.parquet"
        command = ["score", str(SAMPLES / data), "--output", str(output), "--id-column", "id", "--overwrite", *options]
        console.print(f"$ prefill {shlex.join(command)}")
        run = subprocess.run(  # noqa: S603 - our own command line
            [sys.executable, "-m", "prefillcli", *command], stdout=subprocess.PIPE, text=True, check=False
        )
        summary = json.loads(run.stdout.splitlines()[-1])
        if run.returncode:
            return run.returncode
        scores = pq.read_table(output)
        if "--ask" in options:  # whose columns have the question's name
            scores = scores.rename_columns({"answer": "score", "answer.label_mass": "label_mass"})
        truth = options[options.index("--keep-columns") + 1]
        console.print(_first_rows(name, scores, truth))
        yes = np.asarray([answer.lower() == "yes" for answer in scores[truth].to_pylist()])
        score = scores["score"].to_numpy()
        report = json.loads(Path(summary["report"]).read_text())
        audit = report["audits"].get("answer")
        quality.add_row(
            name,
            f"{len(scores):,}",
            f"{report['tokens']['kept'] / report['tokens']['prompt']:.0%}",
            f"{audit['flips']} of {audit['rows']}" if audit else "",
            f"{np.mean((score > 0.5) == yes):.1%}",
            f"{area_under_curve(score, yes):.4f}",
        )
        files += [f"scores  {output}", f"report  {summary['report']}"]
    console.print(quality)
    console.print(*files, sep="\n")
    return 0


def _first_rows(name: str, scores: pa.Table, truth: str, count: int = 6) -> Table:
    table = Table("id", "true answer", "P(Yes)", "label mass", "prompt tokens", "shared", "read", title=name)
    for row in scores.slice(0, count).to_pylist():
        table.add_row(
            str(row["id"]),
            row[truth],
            f"{row['score']:.4f}",
            f"{row['label_mass']:.3f}",
            f"{row['prompt_tokens']:,}",
            f"{row['shared_tokens']:,}",
            f"{row['kept_tokens']:,}",
        )
    return table


def area_under_curve(score: np.ndarray, positive: np.ndarray) -> float:
    """Share of (positive, negative) pairs that `score` puts in the right order; ties count half."""
    order = np.sign(score[positive][:, None] - score[~positive][None, :])
    return float((order + 1).mean() / 2)


if __name__ == "__main__":
    sys.exit(main())

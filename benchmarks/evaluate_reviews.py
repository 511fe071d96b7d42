"""What the scores of a real model are worth: SmolLM2-135M on the test file's reviews, asked in two ways.

python -m benchmarks.evaluate_reviews [FOLDER]

Before every review stand the same two examples of the training file, the first short one of each kind, which nobody
chose. The model is asked for the sentiment, positive or negative, and whether the writer is content, Yes or No. The
table compares the two; the reports, with the charts, are in FOLDER (out/real by default).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.real_model import FOLDER, Review, real_model, reviews

SHORT = range(100, 300)  # characters of an example
WAYS = {  # question, and labels by sentiment
    "sentiment": ("Sentiment:", {"positive": "positive", "negative": "negative"}),
    "content": ("Is the writer content? Answer:", {"positive": "Yes", "negative": "No"}),
}
FIGURES = ("accuracy", "auc", "average_precision", "brier", "log_loss", "calibration_error")


def write_questions(folder: Path, way: str) -> Path:
    """The test file's reviews as prompts with the right answers."""
    question, labels = WAYS[way]
    training, asked = reviews("Train", folder), reviews("Test", folder)
    examples = [next(e for e in training if e.sentiment == kind and len(e.text) in SHORT) for kind in labels]
    shots = "".join(f"{_ask(each, question)} {labels[each.sentiment]}\n\n" for each in examples)
    table = pa.table(
        {
            "prompt": [shots + _ask(each, question) for each in asked],
            "right": [labels[each.sentiment] for each in asked],
        }
    )
    pq.write_table(table, folder / f"{way}.parquet")
    return folder / f"{way}.parquet"


def _ask(review: Review, question: str) -> str:
    return f"Review: {review.text}\n{question}"


def score_reviews(folder: Path, model: Path, way: str) -> dict[str, Any]:
    """The evaluation that `prefill score --truth` gives."""
    command = [sys.executable, "-m", "prefillcli", "score", str(write_questions(folder, way)), "--model", str(model)]
    command += ["--no-chat", "--dtype", "float32", "--labels", ",".join(WAYS[way][1].values()), "--truth", "right"]
    command += ["--wanted-precision", "0.9", "--output", str(folder / f"{way}.scores.parquet"), "--overwrite"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)  # noqa: S603 - our own command line
    found: dict[str, Any] = json.loads(Path(json.loads(done.stdout)["report"]).read_text())["evaluations"]["answer"]
    return found


def main() -> None:
    """Score, and print the table."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    model = real_model(folder)
    found = [score_reviews(folder, model, way) for way in WAYS]
    print(f"| {found[0]['rows']} reviews | {' | '.join(WAYS[way][0] for way in WAYS)} |\n| --- | --- | --- |")
    for name in FIGURES:
        print(f"| {name} | {' | '.join(_shown(each[name]) for each in found)} |")
    print(f"| says {' or '.join(each['labels'][0] for each in found)} | {' | '.join(map(_says, found))} |")
    print(f"| best F1 | {' | '.join(_at(each['best_f1']) for each in found)} |")
    print(f"| precision 0.9 | {' | '.join(_at(each['wanted_precision']['reached']) for each in found)} |")


def _shown(estimate: dict[str, Any]) -> str:
    low, high = estimate["interval"]
    return f"{estimate['value']:.3f} ({low:.3f}-{high:.3f})"


def _says(evaluation: dict[str, Any]) -> str:
    return f"{evaluation['by_label'][0]['predicted'] / evaluation['rows']:.1%}"


def _at(threshold: dict[str, Any] | None) -> str:
    if threshold is None:
        return "not reached"
    figures = f"F1 {threshold['f1']:.3f}, precision {threshold['precision']:.3f}, recall {threshold['recall']:.3f}"
    return f"from {threshold['threshold']:.3f}: {figures}"


if __name__ == "__main__":
    main()

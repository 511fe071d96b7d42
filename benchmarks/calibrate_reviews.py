"""What calibration does to the scores of a real model on real reviews: fitted on the training file, held to the other.

python -m benchmarks.calibrate_reviews [FOLDER]

Two questions about the same drug reviews: their sentiment, which SmolLM2-135M tells well, and whether the patient is
satisfied, Yes or No, which it hardly tells. Two examples of the training file stand before each review. Every row that
a calibration is judged on is of the package's test file. Prints a table; docs/calibrate.md quotes it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.judging.calibration import read_calibrations
from prefillcli.stats.evaluation import Evaluation, evaluate
from recipes.real_model import FOLDER, real_model, reviews

CONTENT_FREE = ("N/A", "[MASK]", "")
"""The texts of Zhao et al. (2021)."""
METHODS = ("temperature", "platt", "isotonic")
LONGEST_EXAMPLE = 400  # characters


class Request(NamedTuple):
    """What is asked of a review, and the answers for positive and for negative ones."""

    name: str
    asked: str
    labels: tuple[str, str]
    order: tuple[str, str] = ("positive", "negative")
    """Of the examples."""


QUESTIONS = (
    Request("sentiment", "Sentiment:", ("positive", "negative")),
    Request("satisfied", "Is the patient satisfied? Answer:", ("Yes", "No")),
    Request("satisfied-last", "Is the patient satisfied? Answer:", ("Yes", "No"), ("negative", "positive")),
)


def write_rows(folder: Path, question: Request) -> tuple[Path, Path]:
    """The rows to fit on, and those to judge on. The examples are in neither: they are the first of each kind that
    are short enough."""
    train, test = reviews("Train", folder), reviews("Test", folder)
    examples = []
    for sentiment in question.order:
        examples.append(
            next(each for each in train if each.sentiment == sentiment and len(each.text) < LONGEST_EXAMPLE)
        )
    answer = dict(zip(("positive", "negative"), question.labels, strict=True))
    shots = "".join(f"Review: {each.text}\n{question.asked} {answer[each.sentiment]}\n\n" for each in examples)
    paths = []
    for name, rows in (("train", [each for each in train if each not in examples]), ("test", test)):
        paths.append(folder / f"{question.name}.{name}.parquet")
        columns = {"shots": [shots] * len(rows), "review": [each.text for each in rows]}
        pq.write_table(pa.table(columns | {"truth": [answer[each.sentiment] for each in rows]}), paths[-1])
    return paths[0], paths[1]


def run(*words: object) -> None:
    """Run a command of prefill. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", "prefillcli", *map(str, words), "--quiet"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - our own command line


def probabilities(folder: Path, question: Request) -> tuple[dict[str, npt.NDArray[np.float64]], npt.NDArray[np.bool_]]:
    """Probabilities of the first label in the test file by method, and whether it is right [rows]."""
    paths = write_rows(folder, question)
    scores = [path.with_suffix(".scores.parquet") for path in paths]
    template = "{{ shots }}Review: {{ review }}\n" + question.asked
    options: list[object] = ["--template", template, "--labels", ",".join(question.labels), "--no-chat"]
    options += ["--model", real_model(folder), "--keep-columns", "truth", "--overwrite"]
    free = [word for text in CONTENT_FREE for word in ("--calibrate-with", text)]
    run("score", paths[0], "-o", scores[0], *options)
    run("score", paths[1], "-o", scores[1], *options, *free, "--set", "calibrate_columns=review")
    table = pq.read_table(scores[1])
    logprobs = np.stack([table[f"logprob_{label}"].to_numpy() for label in question.labels], axis=1)
    found = {"none": table["score"].to_numpy(), "contextual": table["probability"].to_numpy()}
    share = np.mean(pq.read_table(paths[0])["truth"].to_numpy(zero_copy_only=False) == question.labels[0])
    found["the same for all"] = np.full(len(table), share)
    for method in METHODS:
        path = folder / f"{question.name}.{method}.json"
        run("calibrate", scores[0], "--truth", "truth", "--method", method, "-o", path)
        found[method] = read_calibrations(str(path), {"": question.labels})[0].probabilities(logprobs)[:, 0]
    run("calibrate", scores[0], "--truth", "truth", "-o", folder / f"{question.name}.auto.json")
    return found, table["truth"].to_numpy(zero_copy_only=False) == question.labels[0]


def line(name: str, evaluation: Evaluation, share: float) -> str:
    """A row of the table."""
    error = evaluation.calibration_error
    low, high = error.interval or (0.0, 0.0)
    numbers = [evaluation.log_loss.value, evaluation.brier.value]
    cells = [name, *(f"{number:.3f}" for number in numbers), f"{error.value:.3f} ({low:.3f}-{high:.3f})"]
    cells += [f"{100 * (evaluation.accuracy.value or 0):.1f} %", f"{evaluation.auc.value:.3f}", f"{100 * share:.0f} %"]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Returns the exit code."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for question in QUESTIONS:
        found, truth = probabilities(folder, question)
        chosen = json.loads((folder / f"{question.name}.auto.json").read_text())["scaling"]["method"]
        print(f"\n`{question.asked}` {', '.join(question.labels)}; the {question.order[1]} example is the last one")
        print(f"{len(truth)} rows, {truth.mean():.1%} positive\n")
        print(f"| | log loss | Brier | ECE (95 % interval) | accuracy | AUC | says {question.labels[0]} |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for method in ("none", "contextual", *METHODS, "the same for all"):
            values = np.asarray(found[method])
            name = ("scores as they are" if method == "none" else method) + (" (chosen)" if method == chosen else "")
            print(line(name, evaluate(values, truth, question.labels), float(np.mean(values >= 0.5))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

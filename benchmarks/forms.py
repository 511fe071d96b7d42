"""`python -m benchmarks.forms`: how a typed question best becomes a prompt.

    python -m benchmarks.forms --model smollm2 --model gemma -o out/forms
    python -m benchmarks.forms --table -o out/forms     # what the runs that were made have found

Predicates, choices and scores about labelled texts are asked in several forms. A row's forms are the questions of one
job, so that its document is computed once. Each job's answers go to a file of their own, and tables of all of them to
stdout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import typer
from scipy.stats import binomtest
from transformers import AutoTokenizer

import prefillcli
from benchmarks.console import log
from benchmarks.rated_texts import SOURCES, rated_texts
from prefillcli.models.files import sample_model
from prefillcli.stats.acceptance import lowest_floor
from prefillcli.stats.arrays import BoolArray, Float64Array, Int64Array
from prefillcli.stats.evaluation import auc, correlation
from prefillcli.stats.labels import label_mass, label_probabilities
from recipes.real_model import FOLDER, GEMMA, QWEN, gguf_file, joined_file, reviews

ROTATIONS = 4  # orders that options are asked in, each a quarter further
ROTATED = ("letters, told", "words")
OURS = {"predicate": "Yes or No", "choice": "words", "score": "words"}  # how `prefill score` asks
GOALS = (0.8, 0.9, 0.95)  # rates at which accepted answers are to be right
RESAMPLED = 1000
Truth = float | None


class Form(NamedTuple):
    """How a question becomes a prompt. `list`: what is before each option, if they are listed; a comma: all of them
    in one line. `told`: a sentence says how to answer. `answers`: what stands for an option: its words, the
    first token of these, these and an end, or its code in the list. `before`: the question is before the document."""

    list: Literal["", "-", ",", "A", "1"] = ""
    told: bool = False
    answers: Literal["words", "first", "ended", "codes"] = "words"
    before: bool = False
    cued: bool = False
    options: tuple[str, ...] = ()  # instead of the question's own


LISTED = {
    "letters": Form("A", answers="codes"),
    "letters, told": Form("A", True, "codes"),
    "words": Form("-"),
    "words, told": Form("-", True),
    "words, told, first token": Form("-", True, "first"),
    "words, told, with an end": Form("-", True, "ended"),
    "words, in a line": Form(","),
    "words, not listed": Form(),
    "letters, told, cued": Form("A", True, "codes", cued=True),
    "words, told, cued": Form("-", True, cued=True),
    "letters, told, before": Form("A", True, "codes", before=True),
    "words, told, before": Form("-", True, before=True),
}
FORMS = {
    "predicate": {
        "Yes or No": Form(),
        "Yes or No, told": Form(told=True),
        "True or False, told": Form(told=True, options=("True", "False")),
        "Yes or No, listed, told": Form("-", True),
        "letters, told": Form("A", True, "codes"),
        "Yes or No, told, cued": Form(told=True, cued=True),
        "Yes or No, told, before": Form(told=True, before=True),
    },
    "choice": LISTED,
    "score": {**LISTED, "numbers, told": Form("1", True, "codes")},
}
TOLD = {
    "": "Answer {}.",
    "-": "Answer with one of these.",
    "A": "Answer with its letter.",
    "1": "Answer with its number.",
}


class Task(NamedTuple):
    """A question with its options; the rows' right answers are in the column `kind`."""

    kind: str
    instructions: str
    options: tuple[str, ...]


class Chosen(NamedTuple):
    """The forms to ask in: those with one of `only` in their name, if there are any, and with none of `without`."""

    only: Sequence[str] = ()
    without: Sequence[str] = ()

    def has(self, form: str) -> bool:
        """Whether a form is one of them."""
        only = not self.only or any(each in form for each in self.only)
        return only and not any(each in form for each in self.without)


class Texts(NamedTuple):
    """Labelled texts: the columns text, predicate, choice and score, and what is asked about them."""

    tasks: tuple[Task, ...]
    rows: list[dict[str, Any]]

    @property
    def questions(self) -> dict[str, dict[str, Any]]:
        """Return the tasks as the questions of a case, by their kinds."""
        asked: dict[str, dict[str, Any]] = {}
        for task in self.tasks:
            criteria = {"choice": dict.fromkeys(task.options), "score": list(task.options)}.get(task.kind)
            own = {"type": "noul" if criteria is None else task.kind, "instructions": task.instructions}
            asked[task.kind] = own if criteria is None else own | {"criteria": criteria}
        return asked


class Asked(NamedTuple):
    """A question of a job, as its file has it. `options` are not in the order of the rotation."""

    name: str
    task: Task
    form: str
    rotation: int
    options: tuple[str, ...]
    entry: dict[str, Any]


def drug_reviews(folder: Path, rows: int) -> Texts:
    """Reviews of drugs for the eight conditions that most are for, at most a sixth of the rows for one of them."""
    spelled = {"Bipolar Disorde": "Bipolar Disorder", "Diabetes, Type 2": "Type 2 Diabetes"}
    conditions = "Birth Control", "Depression", "Pain", "Acne", "Anxiety", "Bipolar Disorder", "Obesity", "Insomnia"
    levels = {"negative": 0, "neutral": 1, "positive": 2}
    found = [
        {
            "text": each.text,
            "predicate": {"positive": 1, "negative": 0}.get(each.sentiment),
            "choice": conditions.index(condition),
            "score": levels[each.sentiment],
        }
        for each in [*reviews("Train", folder, neutral=True), *reviews("Test", folder, neutral=True)]
        if (condition := spelled.get(each.condition, each.condition)) in conditions and len(each.text) <= 600
    ]
    tasks = (
        Task("predicate", "Is the patient satisfied with the drug?", ("Yes", "No")),
        Task("choice", "Which condition does the patient take the drug for?", conditions),
        Task("score", "How satisfied is the patient with the drug?", ("dissatisfied", "undecided", "satisfied")),
    )
    return Texts(tasks, drawn(found, rows, -(-rows // 6)))


def rated(folder: Path, rows: int) -> Texts:
    """Sentences of four sources, as many of each, with how positive twenty people find them."""
    bounds, sources = (-1.5, -0.5, 0.5, 1.5), tuple(SOURCES.values())
    found = [
        {
            "text": each.text,
            "predicate": int(each.rating > 0) if abs(each.rating) >= 1 else None,
            "choice": sources.index(each.source),
            "score": sum(each.rating > bound for bound in bounds),
            "rating": each.rating,
        }
        for each in rated_texts(folder)
        if 30 <= len(each.text) <= 300
    ]
    tasks = (
        Task("predicate", "Is the writer positive about the subject?", ("Yes", "No")),
        Task("choice", "What kind of text is this from?", sources),
        Task(
            "score", "How positive is the text?", ("very negative", "negative", "neutral", "positive", "very positive")
        ),
    )
    return Texts(tasks, drawn(found, rows, -(-rows // len(sources))))


def drawn(rows: list[dict[str, Any]], count: int, most: int) -> list[dict[str, Any]]:
    """Rows in random order, at most so many with one choice."""
    Random(0).shuffle(rows)
    taken: dict[int, int] = {}
    found: list[dict[str, Any]] = []
    for row in rows:
        taken[row["choice"]] = taken.get(row["choice"], 0) + 1
        if taken[row["choice"]] <= most and len(found) < count:
            found.append(row)
    return found


TEXTS = {"reviews": drug_reviews, "rated": rated}


def codes(form: Form, options: Sequence[str]) -> list[str]:
    """What is before each option in a list. Letters are enough for 26; more would need codes of equal length."""
    first = {"A": ord("A"), "1": ord("1")}.get(form.list)
    return ["-"] * len(options) if first is None else [chr(first + at) for at in range(len(options))]


def wording(form: Form, instructions: str, options: Sequence[str]) -> str:
    """The question as text."""
    if form.list == ",":
        return f"{instructions}\n{', '.join(options[:-1])} or {options[-1]}?"
    mark = " " if form.list == "-" else ". "
    listed = [f"{code}{mark}{each}" for code, each in zip(codes(form, options), options, strict=True)]
    told = [TOLD[form.list].format(" or ".join(options))] if form.told else []
    return "\n".join([instructions, *(listed if form.list else []), *told])


def labels(form: Form, options: Sequence[str], tokenizer: Any, chat: bool) -> list[str] | None:
    """The answers as `--labels` has them; None where first tokens do not tell them apart."""
    space = "" if chat else " "
    spelled = [f"{space}{each}" for each in (codes(form, options) if form.answers == "codes" else options)]
    if form.answers == "first":
        ids = tokenizer(spelled, add_special_tokens=False).input_ids
        spelled = [tokenizer.decode(each[:1]) for each in ids]
    elif form.answers == "ended" or any(one != two and two.startswith(one) for one in spelled for two in spelled):
        end = tokenizer.eos_token if chat else "\n"
        spelled = [each + end for each in spelled]
    if len(set(spelled)) < len(spelled):
        return None
    return [f"{each}={escaped(own)}" for each, own in zip(options, spelled, strict=True)]


def escaped(spelling: str) -> str:
    """A spelling of a label as `--labels` takes it."""
    return re.sub(r"([\\|=,])", r"\\\1", spelling)


def asked_of(task: Task, tokenizer: Any, chat: bool, rotate: bool, chosen: Chosen) -> Iterator[Asked]:
    """The questions that ask for a task in all forms but some, the rotated ones of a choice among them."""
    for number, (name, form) in enumerate(FORMS[task.kind].items()):
        if not chosen.has(name):
            continue
        turns = ROTATIONS if rotate and task.kind == "choice" and name in ROTATED else 1
        for turn in range(turns):
            own = form.options or task.options
            at = turn * len(own) // ROTATIONS
            options = (*own[at:], *own[:at])
            spelled = labels(form, options, tokenizer, chat)
            if spelled is None:
                log(f"{task.kind}, {name}: first tokens do not tell the options apart")
                continue
            words, end = wording(form, task.instructions, options), "\nAnswer:" if form.cued or not chat else ""
            place = f"{words}\n\n{{{{ text }}}}{end}" if form.before else f"\n\n{words}{end}"
            entry = {("template" if form.before else "text"): place, "labels": spelled}
            yield Asked(f"{task.kind}_{number}_{turn}", task, name, turn, own, entry)


def run(model: Path, chat: bool, texts: Texts, rotated: int, chosen: Chosen, **options: Any) -> dict[str, Any]:
    """Ask everything about the rows, the first `rotated` of them also in the other orders."""
    tokenizer = (
        AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
        if model.suffix == ".gguf"
        else AutoTokenizer.from_pretrained(model)
    )
    forms: dict[str, dict[str, Any]] = {}
    spent = {"seconds": 0.0, "computed_tokens": 0, "prompt_tokens": 0}
    with TemporaryDirectory() as folder:
        file = Path(folder, "questions.yaml")
        for rotate, rows in ((True, texts.rows[:rotated]), (False, texts.rows[rotated:])):
            if not rows:
                continue
            asked = [each for task in texts.tasks for each in asked_of(task, tokenizer, chat, rotate, chosen)]
            questions = [{"name": each.name, **each.entry} for each in asked]
            file.write_text(json.dumps({"document": "{{ text }}", "questions": questions}))
            with prefillcli.Scorer(str(model), questions=str(file), chat=chat, **options) as scorer:
                table = scorer.score(pa.Table.from_pylist([{"text": row["text"]} for row in rows]), on_error="raise")
            for name in spent:
                spent[name] += sum(table[name].to_pylist())
            for each in asked:
                entry = forms.setdefault(
                    each.name,
                    {
                        "kind": each.task.kind,
                        "form": each.form,
                        "rotation": each.rotation,
                        "tokens": len(tokenizer(each.entry.get("text", each.entry.get("template"))).input_ids),
                        "logprobs": [],
                    },
                )
                entry["logprobs"] += logprobs_of(table, each).tolist()
    return {"rows": len(texts.rows), "spent": spent, "truths": truths(texts), "forms": list(forms.values())}


def logprobs_of(table: pa.Table, asked: Asked) -> Float64Array:
    """The log-probability of each option [rows, options] over the whole vocabulary."""
    mass = table[f"{asked.name}.label_mass"].to_numpy()
    if len(asked.options) == 2:
        first = table[asked.name].to_numpy()
        shares = np.stack([first, 1 - first], axis=1)
    else:
        told = table[f"{asked.name}.probabilities"].to_pylist()
        shares = np.array([[row[option] for option in asked.options] for row in told])
    with np.errstate(divide="ignore"):
        found: Float64Array = np.log(shares * mass[:, None])
    return found


def kept(found: dict[str, Any], file: Path) -> dict[str, Any]:
    """With the forms of an earlier run about the same rows, where this one has not asked them."""
    if not file.exists() or (earlier := json.loads(file.read_text()))["truths"] != found["truths"]:
        return found
    asked = {(each["kind"], each["form"]) for each in found["forms"]}
    forms = [each for each in earlier["forms"] if (each["kind"], each["form"]) not in asked]
    spent = (
        {name: value + earlier["spent"][name] for name, value in found["spent"].items()} if forms else found["spent"]
    )
    return found | {"forms": forms + found["forms"], "spent": spent}


def truths(texts: Texts) -> dict[str, list[Truth]]:
    """The right answers, and the ratings that levels are of."""
    kinds = {task.kind: task.kind for task in texts.tasks} | {"rating": "score"}
    return {kind: [row.get(kind, row[other]) for row in texts.rows] for kind, other in kinds.items()}


def figures(kind: str, logprobs: Float64Array, truth: Sequence[Truth], rating: Sequence[Truth]) -> dict[str, float]:
    """How well a form ranks, how often it is right, and the mean mass of its labels."""
    known = np.array([each is not None for each in truth])
    shares, right = label_probabilities(logprobs)[known], np.array([each for each in truth if each is not None], int)
    if kind == "predicate":
        ranks, said = auc(shares[:, 0], right == 1), (shares[:, 0] < 0.5).astype(int) ^ 1
    else:
        said = shares.argmax(axis=1)
        ranks = areas(shares, right) if kind == "choice" else spearman(shares, np.array(rating, float)[known])
    found = {"ranks": ranks, "accuracy": float((said == right).mean()), "mass": float(label_mass(logprobs).mean())}
    return {name: float("nan") if each is None else each for name, each in found.items()}


def areas(shares: Float64Array, right: Int64Array) -> float | None:
    """The mean over the options of the area under the curve of each against the others."""
    each = [auc(shares[:, option], right == option) for option in range(shares.shape[1])]
    return float(np.mean(own)) if (own := [area for area in each if area is not None]) else None


def spearman(shares: Float64Array, rating: Float64Array) -> float | None:
    """The rank correlation of expected levels with ratings."""
    return correlation(shares @ np.arange(shares.shape[1]), rating, ranks=True).value


def tables(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Tables in Markdown: the figures of each run (ranks, accuracy) by form, with mean ranks over the runs. The form
    with the best of both ranks is first."""
    for kind, forms in FORMS.items():
        cells: dict[str, dict[str, dict[str, float]]] = {name: {} for name in forms}
        tokens: dict[str, list[int]] = {name: [] for name in forms}
        for run_name, found in runs.items():
            for each in found["forms"]:
                if each["kind"] == kind and not each["rotation"]:
                    logprobs, truth = np.array(each["logprobs"]), found["truths"]
                    cells[each["form"]][run_name] = figures(kind, logprobs, truth[kind], truth["rating"])
                    tokens[each["form"]].append(each["tokens"])
        yield f"\n| {kind} | " + " | ".join(runs) + " | mass | tokens | mean rank |"
        yield "| --- " * (len(runs) + 4) + "|"
        places = [mean_places(cells, runs, figure) for figure in ("ranks", "accuracy")]
        for name, own in sorted(cells.items(), key=lambda each: sum(place.get(each[0], 99) for place in places)):
            if not own:
                continue
            shown = [f"{own[each]['ranks']:.3f} {own[each]['accuracy']:.2f}" if each in own else "" for each in runs]
            mass = np.mean([each["mass"] for each in own.values()])
            yield (
                f"| {name} | {' | '.join(shown)} | {mass:.2f} | {np.mean(tokens[name]):.0f} | "
                f"{' '.join(f'{place[name]:.1f}' for place in places)} |"
            )
    yield from pair_table(runs)
    yield from order_table(runs)
    yield from promise_table(runs)


def mean_places(
    cells: dict[str, dict[str, dict[str, float]]], runs: dict[str, dict[str, Any]], figure: str
) -> dict[str, float]:
    """The mean rank of each form over the runs that have it, from 1 for the best; equal figures share theirs. Runs
    with fewer than half of the forms rank none."""
    found: dict[str, list[float]] = {}
    asked = sum(bool(each) for each in cells.values())
    for run_name in runs:
        if sum(run_name in each for each in cells.values()) * 2 < asked:
            continue
        own = {name: np.nan_to_num(each[run_name][figure]) for name, each in cells.items() if run_name in each}
        for name, value in own.items():
            better = sum(other > value for other in own.values())
            equal = sum(other == value for other in own.values())
            found.setdefault(name, []).append(better + (equal + 1) / 2)
    return {name: float(np.mean(each)) for name, each in found.items()}


def pair_table(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What listing options changes: rows that are right with a list alone, and without one alone."""
    yield "\n| run | question | rows | not listed: accuracy | listed: accuracy, won, lost |"
    yield "| --- " * 5 + "|"
    for run_name, found in runs.items():
        for kind in ("choice", "score"):
            own = {each["form"]: each for each in found["forms"] if each["kind"] == kind and not each["rotation"]}
            if {"words", "words, not listed"} <= own.keys():
                right = np.array(found["truths"][kind])
                listed, other = (
                    np.array(own[form]["logprobs"]).argmax(axis=1) == right for form in ("words", "words, not listed")
                )
                yield f"| {run_name} | {kind} | {len(right)} | {other.mean():.2f} | {_compared(listed, other)} |"


def _compared(found: BoolArray, before: BoolArray) -> str:
    # The accuracy, and the rows won and lost, with McNemar's exact test.
    won, lost = int((found & ~before).sum()), int((before & ~found).sum())
    chance = binomtest(won, won + lost).pvalue if won + lost else 1.0
    return f"{found.mean():.2f}, {won} won, {lost} lost (p = {chance:.2g})"


def order_table(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What asking for a choice in several orders changes."""
    yield "\n| orders | form | rows | 1: accuracy | 2: changed, accuracy | 4: changed, accuracy |"
    yield "| --- " * 6 + "|"
    for run_name, found in runs.items():
        for form in ROTATED:
            own = {
                each["rotation"]: each for each in found["forms"] if each["kind"] == "choice" and each["form"] == form
            }
            if len(own) < ROTATIONS:
                continue
            rows = len(own[1]["logprobs"])
            shares = np.array(
                [label_probabilities(np.array(own[turn]["logprobs"][:rows])) for turn in range(ROTATIONS)]
            )
            right, first = np.array(found["truths"]["choice"][:rows]), shares[0].argmax(axis=1)
            cells = [f"{(first == right).mean():.2f}"]
            for turns in ([0, ROTATIONS // 2], range(ROTATIONS)):
                said = shares[list(turns)].mean(axis=0).argmax(axis=1)
                cells.append(f"{(said != first).mean():.0%}, {_compared(said == right, first == right)}")
            yield f"| {run_name} | {form} | {rows} | {' | '.join(cells)} |"


def promise_table(runs: dict[str, dict[str, Any]]) -> Iterator[str]:
    """How often the floors of `prefill calibrate --accuracy` break their promise: in each of `RESAMPLED` draws, with
    replacement, as many rows as a run has choose a floor, and all its rows are what it promises about."""
    yield f"\n| floors | question | goal | right of all | found | accepted | broken of {RESAMPLED:,} |"
    yield "| --- " * 7 + "|"
    for run_name, found in runs.items():
        for each in found["forms"]:
            if each["rotation"] or each["form"] != OURS[each["kind"]]:
                continue
            truth = found["truths"][each["kind"]]
            known = np.array([own is not None for own in truth])
            shares = label_probabilities(np.array(each["logprobs"]))[known]
            said, right = shares.argmax(axis=1), np.array([own for own in truth if own is not None], int)
            correct = (said == right) if each["kind"] != "predicate" else (said == 1 - right)
            for goal in GOALS:
                accepted, broken = promised(shares.max(axis=1), correct, goal)
                if accepted:
                    cells = f"{len(accepted) / RESAMPLED:.0%} | {np.mean(accepted):.0%} | {broken:,}"
                    of = f"{correct.mean():.0%} of {len(correct)}"
                    yield f"| {run_name} | {each['kind']} | {goal:g} | {of} | {cells} |"


def promised(probabilities: Float64Array, right: BoolArray, goal: float) -> tuple[list[float], int]:
    """The shares of all rows that the floors of resampled rows accept, and how many of these are not right at the
    rate of the goal."""
    draws, accepted, broken = np.random.default_rng(0), list[float](), 0
    for _ in range(RESAMPLED):
        rows = draws.integers(len(right), size=len(right))
        floor = lowest_floor(probabilities[rows], right[rows], goal).floor
        if floor is not None:
            above = probabilities >= floor
            accepted.append(float(above.mean()))
            broken += bool(above.any() and right[above].mean() < goal)
    return accepted, broken


def model_of(name: str, folder: Path) -> tuple[Path, bool]:
    """A model's file, and whether it is asked in chats."""
    if name == "sample":
        return sample_model(), False
    if name == "smollm2":
        return gguf_file(folder), True
    return joined_file({"qwen": QWEN, "gemma": GEMMA}[name], folder), name == "qwen"


def main(
    model: Annotated[list[str] | None, typer.Option(help="smollm2, gemma, qwen or sample; repeatable.")] = None,
    texts: Annotated[list[str] | None, typer.Option(help=f"{' or '.join(TEXTS)}; repeatable.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of each, at most.")] = 240,
    rotated: Annotated[int, typer.Option(help="Of these, rows that are also asked in other orders.")] = 240,
    only: Annotated[list[str] | None, typer.Option(help="Forms with this in their name alone.")] = None,
    without: Annotated[list[str] | None, typer.Option(help="Leave out forms with this in their name.")] = None,
    folder: Annotated[Path, typer.Option(help="Where models and texts are, or go.")] = FOLDER,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the runs.")] = Path("out/forms"),
    table: Annotated[bool, typer.Option("--table", help="Print what was found before, and run nothing.")] = False,
) -> None:
    """Ask typed questions in several forms, and compare the answers with the right ones."""
    output.mkdir(parents=True, exist_ok=True)
    for name in [] if table else model or ["smollm2", "gemma", "qwen"]:
        for which in texts or TEXTS:
            file, chat = model_of(name, folder)
            log(f"{name}, {which}")
            found = run(
                file, chat, TEXTS[which](folder, rows), rotated, Chosen(only or (), without or ()), dtype="float32"
            )
            into = output / f"{name}-{which}.json"
            into.write_text(json.dumps(kept(found, into)))
            log(json.dumps(found["spent"]))
    runs = {file.stem: json.loads(file.read_text()) for file in sorted(output.glob("*.json"))}
    print("\n".join(tables(runs)))


if __name__ == "__main__":
    typer.run(main)

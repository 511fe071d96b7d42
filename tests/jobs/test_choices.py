"""Jobs with `--choices-column`: each row has answers of its own."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefillcli.options.commands import MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.labels import Labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.templates import Beginnings
from prefillcli.tools.merge import merge_job
from prefillcli.tools.verify import verify_job
from tests.jobs.jobs import Reference, read_output, read_report, score, write_jsonl, write_parquet
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_likelihood import encoded_pair, likelihood
from tests.jobs.test_rationales import Writer

ROWS: list[dict[str, Any]] = [
    {"prompt": "The dog:", "choices": ["was helped by it", "was harmed by it", "No"]},
    {"prompt": "The dog:", "choices": ["Yes", "No"]},
    {"prompt": "The dog: \n", "choices": ["Yes it is", "a fox"]},
    {"prompt": "The fox says", "choices": [", é", " Yes"]},
    {"prompt": "Alone:", "choices": ["only this"]},
]
WRONG: list[tuple[Any, str]] = [
    ([], "an empty list"),
    (None, "null"),
    (["Yes", "Yes"], "the same"),
    (["Yes", ""], "choice 1 is empty"),
    (["Yes", None], "choice 1 is NoneType"),
    (["a fox", "a fox and a dog"], "begins"),
]


def expected(reference: Reference, row: dict[str, Any]) -> list[float]:
    """As lm-evaluation-harness has it: the choice behind a space, unless the prompt or the choice brings one."""
    prompt, found = row["prompt"], []
    for choice in row["choices"]:
        space = "" if prompt[-1].isspace() or choice[0].isspace() else " "
        before, behind = encoded_pair(reference, prompt, space + choice)
        found.append(sum(likelihood(reference, before, behind)[0]))
    return found


@pytest.mark.parametrize(("engine", "kind"), [("torch", "parquet"), ("hf", "jsonl")])
def test_each_row_has_the_log_probabilities_of_its_own_choices(
    model: Path, reference: Reference, engine: str, kind: str
) -> None:
    data, output = f"d.{kind}", f"o.{kind}"
    if kind == "parquet":
        write_parquet(data, **{name: [row[name] for row in ROWS] for name in ROWS[0]})
    else:
        write_jsonl(data, ROWS)
    score(data, output, model=model, choices_column="choices", engine=engine)
    found = read_output(output)
    for row, own in zip(ROWS, found, strict=True):
        logprobs = expected(reference, row)
        np.testing.assert_allclose(own["logprobs"], logprobs, atol=1e-5, rtol=1e-6)
        shares = np.exp(np.array(logprobs) - np.logaddexp.reduce(logprobs))
        np.testing.assert_allclose(own["scores"], shares, atol=1e-5)
        assert own["score"] == own["scores"][0]
        assert own["prediction"] == int(np.argmax(logprobs))
        assert own["prediction_text"] == row["choices"][own["prediction"]]
    assert verify_job(output)["problems"] == []


def test_the_norm_divides_by_the_bytes_of_each_choice(model: Path, reference: Reference) -> None:
    """White space at a choice's ends is a part of it, but for the space between it and the prompt."""
    rows = [*ROWS, {"prompt": "The fox:", "choices": ["No  ", " Yes", "\nYes", "Yes \n"]}]
    write_jsonl("d.jsonl", rows)
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices", label_norm="bytes", label_end=".")
    ended = [row | {"choices": [f"{choice}." for choice in row["choices"]]} for row in rows]
    for row, whole, own in zip(rows, ended, read_output("o.jsonl"), strict=True):
        divided = [
            logprob / len(choice.removeprefix(" ").encode())
            for logprob, choice in zip(expected(reference, whole), row["choices"], strict=True)
        ]
        assert own["prediction"] == int(np.argmax(divided))
        np.testing.assert_allclose(own["scores"], np.exp(divided - np.logaddexp.reduce(divided)), atol=1e-5)


def test_wrong_choices_are_error_rows_and_the_others_are_scored(model: Path) -> None:
    rows = [{"prompt": "The dog:", "choices": value} for value, _ in WRONG]
    write_jsonl("d.jsonl", [*rows, ROWS[0], {"prompt": "The dog:", "choices": "['Yes', 'No']"}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices", max_error_rate=1.0)
    *wrong, right, text = read_output("o.jsonl")
    for own, (_, why) in zip(wrong, WRONG, strict=True):
        assert own["error"] == "invalid_labels"
        assert why in own["error_detail"]
    assert "not a list in JSON like" in text["error_detail"]
    assert right["error"] is None


def test_the_prompt_is_computed_once_for_all_its_choices(model: Path, reference: Reference) -> None:
    choices = ["was helped by it", "was harmed by it", "was neither"]
    write_jsonl("d.jsonl", [{"prompt": "The dog and the fox:", "choices": choices}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices")
    pairs = [encoded_pair(reference, "The dog and the fox:", f" {choice}") for choice in choices]
    prefixes = {tuple(behind[:end]) for _, behind in pairs for end in range(1, len(behind))}
    (own,) = read_output("o.jsonl")
    assert own["computed_tokens"] == len(pairs[0][0]) + len(prefixes)


def test_evidence_is_of_the_predicted_choice(model: Path) -> None:
    lines = ["The fox saw a dog.", "No dog saw the fox.", "yes, no, yes!"]
    rows = [
        {"prompt": "\n".join([*lines[at:], *lines[:at], "It"]), "choices": ROWS[at % 2]["choices"]} for at in range(3)
    ]
    edited = []
    for row in rows:
        text = row["prompt"].splitlines()
        edited += [{**row, "prompt": "\n".join(text[:at] + text[at + 1 :])} for at in range(3)]
    options = {"model": model, "choices_column": "choices", "temperature": 30}
    score(write_jsonl("edited.jsonl", edited), "whole.jsonl", **options)
    score(write_jsonl("d.jsonl", rows), "o.jsonl", evidence=True, show_text=True, **options)
    without = iter(read_output("whole.jsonl"))
    sizes = []
    for row in read_output("o.jsonl"):
        at = row["prediction"]
        wanted = {f"line {n + 1}": row["scores"][at] - next(without)["scores"][at] for n in range(3)}
        assert {each["section"]: each["change"] for each in row["evidence"]} == pytest.approx(wanted, abs=1e-5)
        sizes += [abs(each["change"]) for each in row["evidence"] if at]
    assert max(sizes) > 1e-3, "changes must be large enough to tell a wrong one"
    largest = max(row["prediction"] for row in read_output("o.jsonl"))
    assert largest > 0
    assert f"choice {largest}" in Path("o.run.html").read_text()


@pytest.mark.parametrize(
    ("template", "options"),
    [
        ("{{ label }} because", {"label_end": "eos", "workers": 2}),
        ("{{ label }} because", {"engine": "hf"}),
        ("{{ labels|join(' or ') }}? {{ label }}:", {"rationale_when": "score > 0.2"}),
    ],
)
def test_texts_are_written_behind_the_predicted_choice(model: Path, template: str, options: dict[str, Any]) -> None:
    rows = [row for row in ROWS if not row["prompt"][-1].isspace()] * 2
    options = {"rationale": 12, "rationale_template": template, **options}
    source = write_jsonl("d.jsonl", rows)
    assert score(source, "o.jsonl", model=model, choices_column="choices", **options)["exit_code"] == 0
    writer, many = Writer(model), 0
    for row, own in zip(rows, read_output("o.jsonl"), strict=True):
        if "rationale_when" in options and own["score"] <= 0.2:
            assert own["finish_reason"] is None
            continue
        chosen = own["prediction_text"].strip()
        text = f"{' or '.join(row['choices'])}? {chosen}:" if "labels" in template else f"{chosen} because"
        wanted = writer(f"{row['prompt']} {text.strip()}", 12)
        assert (own["rationale"], own["rationale_tokens"], own["finish_reason"]) == wanted
        many += 1
    assert many > 3
    assert read_report("o.run.json")["rationales"]["rows"] == many


def test_a_choice_that_no_text_can_follow_keeps_its_score(model: Path) -> None:
    rows = [
        {"prompt": "A fox:", "choices": [" brown fox" * 300]},
        {"prompt": "A fox:", "choices": ["Yes"]},
        {"prompt": "A fox:", "choices": ["</s>", "a dog"]},
    ]
    options = {"model": model, "choices_column": "choices", "rationale": 8}
    score(write_jsonl("d.jsonl", rows), "o.jsonl", rationale_template="{{ labels[1] }} {{ label }}", **options)
    assert [row["finish_reason"] for row in read_output("o.jsonl")] == ["error", "error", "length"]
    assert [row["error"] for row in read_output("o.jsonl")] == [None] * 3
    score("d.jsonl", "o.jsonl", overwrite=True, **options)
    assert [row["finish_reason"] for row in read_output("o.jsonl")] == ["error", "length", "length"]


def test_words_with_the_text_of_a_choice_have_no_control_tokens(reference: Reference) -> None:
    words = Beginnings(
        reference.tokenizer, Labels(reference.tokenizer, typed(())), "{{ labels|join(' ') }}: {{ label }}"
    )
    found = words.tokens(LabelSet.of([[5], [6]]).with_texts(["</s> fox", "a dog"]), 1)
    assert reference.tokenizer.eos_token_id not in found
    assert reference.tokenizer.decode(found) == "</s> fox a dog: a dog"


def test_an_end_tells_choices_apart_that_begin_alike(model: Path) -> None:
    write_jsonl("d.jsonl", [{"prompt": "The dog:", "choices": ["a fox", "a fox and a dog"]}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices", label_end="eos")
    (row,) = read_output("o.jsonl")
    assert row["error"] is None
    assert math.isclose(sum(row["scores"]), 1.0)


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_a_prompt_may_be_as_long_as_its_longest_choice_allows(model: Path, reference: Reference, engine: str) -> None:
    row = {"prompt": "The dog and the fox:", "choices": ["was helped by it", "No, never"]}
    pairs = [encoded_pair(reference, row["prompt"], f" {choice}") for choice in row["choices"]]
    longest = max(len(before) + len(behind) - 1 for before, behind in pairs)
    write_jsonl("d.jsonl", [row])
    for most, error in ((longest, None), (longest - 1, "prompt_too_long")):
        options = {"engine": engine, "max_length": most, "overwrite": True, "max_error_rate": 1.0}
        found = score("d.jsonl", "o.jsonl", model=model, choices_column="choices", **options)
        assert found["exit_code"] == (1 if error else 0), found
        assert [own["error"] for own in read_output("o.jsonl")] == [error]


def test_a_window_of_wrong_choices_ends_no_job(model: Path) -> None:
    write_jsonl("d.jsonl", [{"prompt": "The dog:", "choices": []}] * 3)
    found = score("d.jsonl", "o.jsonl", model=model, choices_column="choices", max_error_rate=1.0)
    assert (found["exit_code"], found["rows"]["errors"]) == (1, 3)
    assert [row["error"] for row in read_output("o.jsonl")] == ["invalid_labels"] * 3


def test_the_text_of_a_control_token_in_a_choice_stays_text(model: Path, reference: Reference) -> None:
    choices = ["a </s> fox", "No"]
    write_jsonl("d.jsonl", [{"prompt": "The dog:", "choices": choices}])
    score("d.jsonl", "o.jsonl", model=model, choices_column="choices")
    score("d.jsonl", "allowed.jsonl", model=model, choices_column="choices", literal=False)
    (row,), (allowed,) = read_output("o.jsonl"), read_output("allowed.jsonl")
    assert row["error"] is None, row["error_detail"]
    taken = expected(reference, {"prompt": "The dog:", "choices": choices})  # its tokenizer reads the control token
    np.testing.assert_allclose(allowed["logprobs"], taken, atol=1e-5, rtol=1e-6)
    assert abs(row["logprobs"][0] - taken[0]) > 1e-3
    assert row["logprobs"][1] == pytest.approx(taken[1], abs=1e-5)


#: Right answers as data has them, and the number of the choice that they stand for.
TRUTH: list[tuple[Any, int | None]] = [
    ("was harmed by it", 1), (0, 0), ("1", 1), (" Yes", 1), (2, None), ("perhaps", None), (None, None), (1.0, 1),
    (-1, None), (True, None),
]  # fmt: skip


def with_truth(kind: str) -> tuple[Path, list[tuple[dict[str, Any], int | None]]]:
    """Rows with choices and right answers, of which the last has wrong choices; with the number of the right one."""
    longer = {"prompt": "The dog:", "choices": ["Yes it is", "zz"]}  # likelier by its bytes alone
    different, rows, known = [*ROWS, longer], [], []
    for at in range(40):
        row, (answer, number) = different[at % len(different)], TRUTH[(at * 3 + at // 6) % len(TRUTH)]
        if number is not None and isinstance(answer, str) and not answer.isdigit():
            number = row["choices"].index(answer) if answer in row["choices"] else None
        elif number is not None or answer == 2:
            number = int(answer) if int(answer) < len(row["choices"]) else None
        rows.append({**row, "right": answer})
        known.append((row, number))
    rows.append({"prompt": "The dog:", "choices": [], "right": 0})
    if kind == "parquet":  # a column of texts
        columns = {name: [row[name] for row in rows] for name in ("prompt", "choices")}
        right = [None if row["right"] is None else str(row["right"]) for row in rows]
        return write_parquet("d.parquet", **columns, right=right), known
    return write_jsonl("d.jsonl", rows), known


@pytest.mark.parametrize(("kind", "output"), [("parquet", "o.jsonl"), ("jsonl", "o.parquet")])
def test_choices_are_held_against_right_ones(
    model: Path, reference: Reference, capsys: pytest.CaptureFixture[str], kind: str, output: str
) -> None:
    source, known = with_truth(kind)
    flags = {"choices_column": "choices", "truth": "right", "max_error_rate": 1.0, "show_text": True, "quiet": False}
    done = score(source, output, model=model, label_norm="bytes", **flags)
    found = read_report("o.run.json")["evaluations"]["answer"]
    rows = [(row, number, expected(reference, row)) for row, number in known if number is not None]
    assert (found["rows"], found["without_truth"], found["errors"]) == (len(rows), 40 - len(rows), 1)
    assert 5 < len(rows) < 35, len(rows)

    def accuracy(divide: bool) -> float:
        sizes = [
            [len(choice.removeprefix(" ").encode()) if divide else 1 for choice in row["choices"]]
            for row, _, _ in rows
        ]
        best = [np.argmax(np.divide(own, size)) for (_, _, own), size in zip(rows, sizes, strict=True)]
        return float(np.mean([at == number for at, (_, number, _) in zip(best, rows, strict=True)]))

    assert found["accuracy"]["value"] == pytest.approx(accuracy(True))
    assert found["choices"]["accuracy_whole"]["value"] == pytest.approx(accuracy(False))
    assert accuracy(True) != accuracy(False)
    assert found["choices"]["logprob"]["value"] == pytest.approx(np.mean([own[at] for _, at, own in rows]), abs=1e-5)
    assert found["choices"]["chance"] == pytest.approx(np.mean([1 / len(row["choices"]) for row, _, _ in rows]))
    written = [(own, at) for own, (_, at) in zip(read_output(output), known, strict=False) if at is not None]
    assert found["log_loss"]["value"] == pytest.approx(-np.mean([np.log(own["scores"][at]) for own, at in written]))
    assert done["evaluations"]["answer"]["accuracy"] == found["accuracy"]["value"]
    wrong = [max(own["scores"]) for own, at in written if own["prediction"] != at]
    assert [row["probability"] for row in found["surest_wrong"]] == pytest.approx(sorted(wrong, reverse=True)[:20])
    for row in found["surest_wrong"]:
        own, (asked, number) = read_output(output)[row["row"]], known[row["row"]]
        assert (row["truth"], row["prediction"]) == (str(number), str(own["prediction"]))
        assert row["text"].removeprefix("…").strip() in asked["prompt"]
    shown = " ".join(capsys.readouterr().err.split())
    assert "of guesses among each row's choices" in shown
    assert "perhaps (4 rows)" in shown
    assert "AUC" not in shown


def test_without_a_norm_there_is_one_accuracy_and_shards_are_merged(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    source, _ = with_truth("jsonl")
    flags = {"model": model, "choices_column": "choices", "truth": "right", "max_error_rate": 1.0}
    score(source, "whole.parquet", **flags)
    whole = read_report("whole.run.json")["evaluations"]["answer"]
    assert whole["choices"]["accuracy_whole"] is None
    for number in (1, 2):
        assert score(source, "o.parquet", shard=f"{number}/2", **flags)["exit_code"] == 0
    merge_job(load_settings(MergeSettings, {"output": "o.parquet", "quiet": True}, environment={}))
    merged = read_report("o.run.json")["evaluations"]["answer"]
    assert merged["accuracy"] == whole["accuracy"]
    assert merged["choices"]["logprob"]["value"] == pytest.approx(whole["choices"]["logprob"]["value"])


def test_right_answers_of_which_none_is_a_choice_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefillcli.scoring.score.ScoreJob._load_models", None)
    write_jsonl("d.jsonl", [{**row, "right": "A"} for row in ROWS])
    flags = {"model": model, "choices_column": "choices", "truth": "right"}
    assert score("d.jsonl", "o.jsonl", **flags)["exit_code"] == 2
    assert "--truth right: none of its values is a choice of its row: A (5 rows)" in capsys.readouterr().err
    assert score("d.jsonl", "o.jsonl", wanted_precision=0.9, **flags)["exit_code"] == 2
    assert "--wanted-precision is for two labels, and each row has its own choices" in capsys.readouterr().err

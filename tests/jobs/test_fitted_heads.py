"""Heads fitted to right answers answer as transformers' hidden states and scikit-learn's ridge say, after their layer
alone."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import minimize_scalar
from sklearn.linear_model import Ridge, RidgeCV
from sklearn.model_selection import LeaveOneOut, StratifiedKFold, cross_val_predict
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import prefillcli
from prefillcli.cli import app
from prefillcli.errors import ResourceError, UsageError
from prefillcli.options.commands import FitSettings, MergeSettings
from prefillcli.options.load import load_settings
from prefillcli.reading.heads.head import HeadFile, head_file_at
from prefillcli.reading.heads.heads import Heads, model_of
from prefillcli.rows.output.store import write_sealed
from prefillcli.rows.proof import ModelContents
from prefillcli.stats.ridge import STRENGTHS
from prefillcli.tools.fit.fit_job import fit_job
from prefillcli.tools.merge import merge_job
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, without_seconds, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.jobs.test_inspected import inspected

LAYERS, TOP = 6, 4  # of the model, and the highest that heads may read
KINDS = ("fox", "dog", "cat")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of several layers."""
    return save_model(tmp_path_factory.mktemp("deep") / "deep", layers=LAYERS, words="fox dog cat number")


def rows(count: int, seed: int = 0) -> dict[str, list[Any]]:
    """Prompts that name animals, and which of them comes last."""
    rng = np.random.default_rng(seed)
    drawn, numbers = rng.integers(0, len(KINDS), (count, 3)), rng.integers(0, 1_000_000, count).tolist()
    prompts = [
        f"number {n} {' '.join(KINDS[at] for at in own)}\nAnswer:" for n, own in zip(numbers, drawn, strict=True)
    ]
    return {
        "prompt": prompts,
        "kind": [KINDS[own[-1]] for own in drawn],
        "is_fox": ["yes" if own[-1] == 0 else "no" for own in drawn],
    }


def fit(data: Mapping[str, Any], output: str | None = "a.head", **flags: Any) -> dict[str, Any]:
    """The summary of a fit in this process, to rows with these columns."""
    path = write_parquet("judged.parquet", **data)
    given = {"inputs": [str(path)], "output": output, "quiet": True, "most_layers": TOP, "keep_worse": True, **flags}
    own = {key: str(value) if isinstance(value, Path) else value for key, value in given.items() if value is not None}
    return fit_job(load_settings(FitSettings, own, environment={}))


@pytest.fixture(scope="module")
def fitted(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of `is_fox`, fitted to 60 rows."""
    folder = tmp_path_factory.mktemp("fitted")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        summary = fit(rows(60), model=deep, truth="is_fox")
    assert summary["exit_code"] == 0, summary
    return folder / "a.head"


def states_of(model: Path, prompts: Sequence[str]) -> dict[int, np.ndarray]:
    """The hidden states after each layer, counted from 1, at the last token of each prompt: transformers'."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    own = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()
    found = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            found.append([each[0, -1].numpy() for each in own(ids, output_hidden_states=True).hidden_states])
    return {layer: np.stack([each[layer] for each in found]).astype(np.float64) for layer in range(1, LAYERS)}


def shares(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def by_hand(
    states: Mapping[int, np.ndarray], truth: np.ndarray, answers: int, others: Mapping[int, np.ndarray]
) -> np.ndarray:
    """The probabilities of `others` by scikit-learn's ridge of these rows' hidden states, by layer."""

    def scores(rows: np.ndarray, asked: Mapping[int, np.ndarray]) -> np.ndarray:
        wanted, found = np.eye(answers)[truth[rows]], []
        for layer, own in sorted(states.items()):
            mean, scale = own[rows].mean(axis=0), own[rows].std(axis=0)
            points = (own[rows] - mean) / scale
            alphas = np.array(STRENGTHS) * points.var(axis=0).sum() * len(points)
            alpha = RidgeCV(alphas, scoring="neg_mean_squared_error").fit(points, wanted).alpha_
            left_out = cross_val_predict(Ridge(alpha), points, wanted, cv=LeaveOneOut())
            errors = ((left_out - wanted) ** 2).sum(axis=1)
            found.append((errors, Ridge(alpha).fit(points, wanted).predict((asked[layer] - mean) / scale)))
        least = min((errors for errors, _ in found), key=np.mean)
        gaps = [errors - least for errors, _ in found]
        return next(
            each for (_, each), gap in zip(found, gaps, strict=True) if gap.mean() <= gap.std() / len(gap) ** 0.5
        )

    held = np.empty((len(truth), answers))
    for rows, rest in StratifiedKFold(5, shuffle=True, random_state=0).split(truth, truth):
        held[rest] = scores(rows, {layer: own[rest] for layer, own in states.items()})
    rows = np.arange(len(truth))

    def loss(temperature: float) -> float:
        return -float(np.log(shares(held / temperature)[rows, truth]).mean())

    temperature = minimize_scalar(loss, bounds=(0.01, 100), method="bounded", options={"xatol": 1e-12}).x
    return shares(scores(rows, others) / temperature)


@pytest.mark.parametrize(("truth", "labels"), [("is_fox", "Yes,No"), ("kind", "fox,dog,cat")])
def test_a_head_answers_as_hidden_states_and_ridge_by_hand(deep: Path, truth: str, labels: str) -> None:
    judged, asked = rows(60), rows(20, seed=1)
    summary = fit(judged, model=deep, truth=truth, labels=labels)
    layer = summary["heads"][0]["layer"]
    assert layer <= TOP
    score(write_parquet("in.parquet", **asked), model=deep, labels=labels, head="a.head")
    names = labels.lower().split(",")
    right = np.array([names.index(each) for each in judged[truth]])
    states, others = states_of(deep, judged["prompt"]), states_of(deep, asked["prompt"])
    states = {layer: own for layer, own in states.items() if layer in (2, 3, 4)}
    wanted = by_hand(states, right, len(names), others)
    found = read_output("out.parquet")
    columns = [f"logprob_{name}" for name in labels.split(",")]
    assert np.abs(np.exp([[row[name] for name in columns] for row in found]) - wanted).max() < TOLERANCE
    assert {row["method"] for row in found} == {"head"}
    assert {row["label_mass"] for row in found} == {None}
    head = read_report()["heads"]
    assert (head["read_layers"], head["model_layers"], head["loaded_layers"]) == (layer, LAYERS, layer)


def with_upper_layers(model: Path, folder: Path, number: float, first: int) -> Path:
    """A copy of a model whose layers from `first` on, counted from 0, have this number everywhere."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.startswith("model.layers.") and int(name.split(".")[2]) >= first:
            tensor.fill_(number)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def for_model(head: Path, model: Path, output: str) -> str:
    """The same heads, as if they were fitted to another model."""
    contents = ModelContents(model)
    digests = {"model": contents.model(), "tokenizer": contents.tokenizer()}
    write_sealed(output, head_file_at(str(head)).model_copy(update={"model": model_of(digests, [])}).to_json())
    return output


@pytest.mark.parametrize("weights", ["resident", "stream"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_above_a_head_are_not_read(deep: Path, fitted: Path, weights: str, dtype: str) -> None:
    head = head_file_at(str(fitted))
    write_sealed("own.head", head.model_copy(update={"dtype": dtype}).to_json())
    cut = with_upper_layers(deep, Path("cut"), float("nan"), head.deepest)
    source = write_parquet("in.parquet", **rows(12))
    flags = {"weights": weights, "dtype": dtype}
    assert score(source, model=deep, head="own.head", **flags)["exit_code"] == 0
    own = for_model(Path("own.head"), cut, "cut.head")
    assert score(source, "cut.parquet", model=cut, head=own, **flags)["exit_code"] == 0
    assert without_seconds("cut.parquet") == without_seconds()


def test_shards_resumed_runs_and_workers_give_the_same_bits(deep: Path, fitted: Path) -> None:
    source = write_parquet("in.parquet", **rows(40))
    flags = {"model": deep, "head": fitted, "deterministic": True}
    score(source, **flags)
    whole = without_seconds()
    for shard in ("1/2", "2/2"):
        score(source, "parts.parquet", shard=shard, **flags)
    merge_job(load_settings(MergeSettings, {"output": "parts.parquet", "quiet": True}, environment={}))
    score(source, "workers.parquet", workers=2, **flags)
    answers = [row["score"] for row in whole]
    for path in ("parts.parquet", "workers.parquet"):
        assert [row["score"] for row in read_output(path)] == answers
    reversed_rows = {name: values[::-1] for name, values in rows(40).items()}
    score(write_parquet("back.parquet", **reversed_rows), "back.out.parquet", **flags)
    assert [row["score"] for row in read_output("back.out.parquet")] == answers[::-1]


def test_an_audit_asks_the_model_itself(deep: Path, fitted: Path) -> None:
    source = write_parquet("in.parquet", **rows(20))
    score(source, "full.parquet", model=deep)
    score(source, "head.parquet", model=deep, head=fitted)
    score(source, model=deep, head=fitted, audit=10)
    full, head, found = (read_output(name) for name in ("full.parquet", "head.parquet", "out.parquet"))
    audited = [at for at, row in enumerate(found) if row["audit_score"] is not None]
    assert len(audited) == 10
    for at, row in enumerate(found):
        assert row["score"] == pytest.approx(head[at]["score"], abs=TOLERANCE)
        if at in audited:
            assert row["audit_score"] == pytest.approx(full[at]["score"], abs=TOLERANCE)
    assert read_report()["heads"]["loaded_layers"] == LAYERS


# Refusals.


def refused(summary: Mapping[str, Any], *texts: str) -> None:
    assert summary["exit_code"] == 2, summary
    for text in texts:
        assert text in summary["error"], summary["error"]


def test_a_head_is_for_its_model_wording_and_number_format(deep: Path, fitted: Path, model: Path) -> None:
    source = write_parquet("in.parquet", **rows(4))
    refused(score(source, model=model, head=fitted), "another model")
    other = {"model": deep, "head": fitted}
    refused(score(source, template="Text: {{ prompt }}", **other), "words around", "any_wording")
    refused(score(source, dtype="bfloat16", **other), "fitted in float32", "bfloat16")
    refused(score(source, labels="No,Yes", **other), "its answers are Yes, No, not No, Yes")
    refused(score(source, ask="Is it a fox?", options="Yes,No,Unsure", prompt_column="prompt", **other), "its answers")
    taken = score(source, template="Text: {{ prompt }}", any_wording=True, **other)
    assert taken["exit_code"] == 0


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"exit": True}, "--exit"),
        ({"first": "words"}, "--first"),
        ({"engine": "hf"}, "--head"),
        ({"rationale": True}, "--rationale"),
        ({"calibrate_with": ("N/A",), "template": "{{ prompt }}"}, "--calibrate-with"),
        ({"label_norm": "bytes"}, "--label-norm"),
        ({"min_label_mass": 0.5}, "--min-label-mass"),
        ({"temperature": 2.0}, "--temperature"),
        ({"draft": "self", "keep": 0.5}, "--draft self"),
        ({"target_column": "kind"}, "--target-column"),
        ({"choices_column": "kind"}, "--choices-column"),
    ],
)
def test_what_a_head_has_no_use_for_is_refused(deep: Path, fitted: Path, flags: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        score(write_parquet("in.parquet", **rows(4)), model=deep, head=fitted, **flags)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{}", "not a file of prefill fit"),
        ("no json", "not a file of prefill fit"),
        (None, "changed"),
        ("unsealed", "no checksum"),
    ],
)
def test_a_file_that_is_no_head_is_refused(deep: Path, fitted: Path, content: str | None, text: str) -> None:
    if content is None:
        content, text = fitted.read_text().replace('"layer": ', '"layer":  1', 1), "not as prefill wrote it"
    if content == "unsealed":
        content = head_file_at(str(fitted)).to_json()
    Path("b.head").write_text(content)
    refused(score(write_parquet("in.parquet", **rows(4)), model=deep, head="b.head"), text)
    assert not Path("out.parquet").exists()


def test_a_head_that_is_not_there_is_refused(deep: Path) -> None:
    refused(score(write_parquet("in.parquet", **rows(4)), model=deep, head="none.head"), "none.head")
    with pytest.raises(UsageError, match="--head 'nonsense': must be one of"):
        score(write_parquet("in.parquet", **rows(4)), model=deep, head="nonsense")


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"is_fox": ["yes"] * 60}, ("right answer of all 60 rows",)),
        ({"is_fox": ["yes", "no"] * 10 + [None] * 40}, ("20 rows with a right answer", "give 10 more")),
        ({"is_fox": ["perhaps"] * 60}, ("none of its values is a label",)),
        ({"prompt": ["the same"] * 60}, ("1 row with a right answer and another prompt", "give 29 more")),
    ],
)
def test_rows_that_teach_nothing_are_refused_and_nothing_is_written(
    deep: Path, change: dict[str, Any], texts: tuple[str, ...]
) -> None:
    refused(fit(rows(60) | change, model=deep, truth="is_fox"), *texts)
    assert not Path("a.head").exists()


def test_a_column_that_is_missing_and_truth_without_a_name_are_refused(deep: Path) -> None:
    refused(fit(rows(60), model=deep, truth="nothing"), "nothing")
    refused(fit(rows(60), model=deep), "--truth")


def test_hidden_states_that_are_not_finite_are_left_out(deep: Path, tmp_path: Path) -> None:
    broken = with_upper_layers(deep, tmp_path / "broken", float("nan"), 1)
    refused(fit(rows(60), model=broken, truth="is_fox"), "0 rows with a right answer", "not finite")


def test_a_head_that_is_no_better_is_not_written(deep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(5)
    data = rows(60) | {"is_fox": rng.permutation(["yes"] * 10 + ["no"] * 50).tolist()}
    summary = fit(data, model=deep, truth="is_fox", keep_worse=False)
    assert (summary["exit_code"], summary["output"]) == (0, None)
    assert summary["heads"][0]["better"] is False
    assert "no better" in capfd.readouterr().err
    assert not Path("a.head").exists()


# More rows.


def test_rows_that_are_added_give_the_head_of_all_rows(deep: Path) -> None:
    first, more = rows(40), rows(30, seed=2)
    fit(first, "part.head", model=deep, truth="is_fox")
    layer = head_file_at("part.head").heads[0].layer
    summary = fit(more, "both.head", model=deep, truth="is_fox", add="part.head", most_layers=None)
    assert summary["heads"][0]["rows"] == 70
    both = head_file_at("both.head").heads[0]
    every = {name: first[name] + more[name] for name in first}
    states = states_of(deep, every["prompt"])[layer]
    assert np.abs(both.hidden - states).max() < 1e-4
    right = np.array([0 if each == "yes" else 1 for each in every["is_fox"]])
    asked = rows(10, seed=3)
    score(write_parquet("in.parquet", **asked), model=deep, head="both.head")
    wanted = by_hand({layer: states}, right, 2, states_of(deep, asked["prompt"]))
    assert np.abs([row["score"] for row in read_output("out.parquet")] - wanted[:, 0]).max() < TOLERANCE


def test_a_correction_replaces_the_answer_of_the_same_prompt(deep: Path) -> None:
    data = rows(40)
    fit(data, model=deep, truth="is_fox")
    wrong = {name: values[:5] for name, values in data.items()}
    wrong["is_fox"] = ["no" if each == "yes" else "yes" for each in wrong["is_fox"]]
    fit(wrong, None, model=deep, truth="is_fox", add="a.head", most_layers=None)
    head = head_file_at("a.head").heads[0]
    assert len(head.truth) == 40
    own = ["yes" if at == 0 else "no" for at in head.truth[-5:]]
    assert own == wrong["is_fox"]


def test_one_row_may_be_added(deep: Path) -> None:
    fit(rows(40), model=deep, truth="is_fox")
    summary = fit(rows(1, seed=2), None, model=deep, truth="is_fox", add="a.head", most_layers=None)
    assert (summary["exit_code"], summary["heads"][0]["rows"]) == (0, 41)


def test_rows_without_right_answers_add_nothing(deep: Path) -> None:
    fit(rows(40), model=deep, truth="is_fox")
    before = Path("a.head").read_bytes()
    blank = rows(3, seed=2) | {"is_fox": ["", None, "yes"]}
    blank["prompt"][2] = None
    summary = fit(blank, None, model=deep, truth="is_fox", add="a.head", most_layers=None)
    refused(summary, "no row has a right answer (2 without a right answer, 1 that cannot be read)")
    assert Path("a.head").read_bytes() == before


def test_the_head_before_is_compared_on_rows_that_it_has_not_learnt_from(deep: Path) -> None:
    known, new = rows(40), rows(20, seed=2)
    fit(known, "part.head", model=deep, truth="is_fox")
    score(write_parquet("in.parquet", **new), model=deep, head="part.head", keep_columns="is_fox")
    right = [(row["score"] >= 0.5) == (row["is_fox"] == "yes") for row in read_output("out.parquet")]
    both = {name: known[name] + new[name] for name in known}
    summary = fit(both, model=deep, truth="is_fox", add="part.head", most_layers=None)
    assert summary["heads"][0]["rows"] == 60
    assert summary["heads"][0]["held_out"]["the head before"]["accuracy"] == np.mean(right)


def test_a_review_file_with_right_answers_is_added(deep: Path) -> None:
    asked = {"model": deep, "ask": "Is the last one a fox?"}
    fit(as_documents(rows(40)), truth="is_fox", **asked)
    more = as_documents(rows(20, seed=2))
    source = write_parquet("in.parquet", **more)
    score(source, head="a.head", keep_columns="document", review_below="1", review="look.csv", **asked)
    with Path("look.csv").open(encoding="utf-8-sig", newline="") as file:
        looked = list(csv.DictReader(file))
    for row in looked[:15]:
        row["answer.right"] = dict(zip(more["document"], more["is_fox"], strict=True))[row["document"]]
    data = {name: [row[name] for row in looked] for name in looked[0]}
    summary = fit(data, None, truth="answer.right", add="a.head", most_layers=None, **asked)
    assert (summary["exit_code"], summary["heads"][0]["rows"]) == (0, 55)


@pytest.mark.parametrize(
    "asked", [{"ask": "Is the last one a fox?"}, {"labels": "Yes,No", "template": "{{ document }}"}]
)
def test_a_blank_cell_of_a_review_file_may_confirm_the_answer_that_was_shown(
    deep: Path, asked: dict[str, str]
) -> None:
    given = {"model": deep, **asked}
    fit(as_documents(rows(40)), truth="is_fox", **given)
    source = write_parquet("in.parquet", **as_documents(rows(20, seed=2)))
    score(source, head="a.head", keep_columns="document", review_below="1", review="look.csv", **given)
    shown = [row["answer" if "ask" in asked else "prediction"] for row in read_output("out.parquet")]
    right = [each in (True, "Yes") or (isinstance(each, float) and each >= 0.5) for each in shown]
    with Path("look.csv").open(encoding="utf-8-sig", newline="") as file:
        looked = list(csv.DictReader(file))
    for row, own in zip(looked[:3], right, strict=False):
        row["answer.right"] = "no" if own else "yes"  # wrong answers are corrected
    looked[5]["review"] = ""  # which nobody was to look at
    data = {name: [row[name] for row in looked] for name in looked[0]}
    flags = {"truth": "answer.right", "add": "a.head", "most_layers": None, **given}
    assert fit(data, "three.head", **flags)["heads"][0]["rows"] == 43
    summary = fit(data, "all.head", review_blank="confirmed", **flags)
    assert (summary["heads"][0]["rows"], summary["heads"][0]["left_out"]) == (59, {"without a right answer": 1})
    learnt = [number == 0 for number in head_file_at("all.head").heads[0].truth[40:]]
    assert learnt == [*(not each for each in right[:3]), *right[3:5], *right[6:]]
    other = fit(data | {"kind": data["answer.right"]}, None, review_blank="confirmed", **flags | {"truth": "kind"})
    refused(other, "--review-blank confirmed: kind is no column")
    del data["review"]
    refused(fit(data, None, review_blank="confirmed", **flags), "review")


def test_the_numpy_of_the_manual_gives_the_answers_of_the_file(deep: Path, fitted: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "fitted-heads.md").read_text()
    code = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code, names)  # noqa: S102
    asked, head = rows(10, seed=1), json.loads(fitted.read_text())["heads"][0]
    found = names["probabilities"](head, states_of(deep, asked["prompt"])[head["layer"]])
    score(write_parquet("in.parquet", **asked), model=deep, head=fitted)
    assert np.abs([row["score"] for row in read_output("out.parquet")] - found[:, 0]).max() < TOLERANCE


def test_rows_are_not_added_to_heads_of_another_model(deep: Path, fitted: Path, model: Path) -> None:
    refused(fit(rows(40), model=model, truth="is_fox", add=str(fitted)), "another model")


# Several questions, other rows, other ways to read.


def test_a_calibration_of_the_model_is_none_of_a_head(deep: Path, fitted: Path) -> None:
    source = write_parquet("in.parquet", **rows(60))
    for name, flags in {"own": {}, "head": {"head": fitted}}.items():
        score(source, f"{name}.parquet", model=deep, keep_columns="is_fox", **flags)
        words = [f"{name}.parquet", "--truth", "is_fox", "-o", f"{name}.json"]
        assert CliRunner().invoke(app, ["calibrate", *words]).exit_code == 0
    refused(score(source, model=deep, head=fitted, calibration="own.json"), "another head")
    refused(score(source, model=deep, calibration="head.json"), "another head")
    assert score(source, model=deep, head=fitted, calibration="head.json")["exit_code"] == 0


QUESTIONS = [
    {"type": "predicate", "name": "fox", "instructions": "Is the last one a fox?"},
    {"type": "choice", "name": "kind", "instructions": "Which comes last?", "criteria": dict.fromkeys(KINDS)},
]


def as_documents(data: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {"document": data["prompt"], "kind": data["kind"], "is_fox": data["is_fox"]}


def test_each_question_has_its_head_and_others_are_answered_by_the_model(deep: Path) -> None:
    Path("asked.json").write_text(json.dumps({"questions": QUESTIONS}))
    judged, asked = as_documents(rows(60)), as_documents(rows(10, seed=1))
    summary = fit(judged, model=deep, questions="asked.json", truth="fox=is_fox,kind=kind")
    assert [each["question"] for each in summary["heads"]] == ["fox", "kind"]
    source = write_parquet("in.parquet", **asked)
    score(source, "own.parquet", model=deep, questions="asked.json")
    score(source, "both.parquet", model=deep, questions="asked.json", head="a.head")
    both = head_file_at("a.head")
    write_sealed("kind.head", both.model_copy(update={"heads": both.heads[1:]}).to_json())
    score(source, model=deep, questions="asked.json", head="kind.head")
    own, heads, found = (read_output(name) for name in ("own.parquet", "both.parquet", "out.parquet"))
    for row, by_model, by_heads in zip(found, own, heads, strict=True):
        assert row["fox"] == pytest.approx(by_model["fox"], abs=TOLERANCE)
        assert row["fox"] != pytest.approx(by_heads["fox"], abs=1e-3)
        assert row["kind.probabilities"] == pytest.approx(by_heads["kind.probabilities"], abs=TOLERANCE)
    assert read_report("both.run.json")["heads"]["read_layers"] == both.deepest
    assert read_report()["heads"]["read_layers"] == LAYERS


def test_merged_shards_have_the_drift_of_all_their_rows(
    deep: Path, fitted: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    same, strange = rows(30, seed=4), rows(30, seed=5)
    strange["prompt"] = ["dog " * 40 + each for each in strange["prompt"]]
    every = {name: same[name] + strange[name] for name in same}
    source = write_parquet("in.parquet", **every)
    for shard in ("1/2", "2/2"):
        score(source, "parts.parquet", shard=shard, model=deep, head=fitted)
    head = head_file_at(str(fitted)).heads[0]
    read = states_of(deep, every["prompt"])[head.layer]
    features = (read - head.hidden.mean(axis=0)) / head.hidden.std(axis=0)
    distance = (features.mean(axis=0) ** 2).mean() - 1 / len(features) - 1 / len(head.truth)
    merge = {"output": "parts.parquet", "quiet": True}
    capfd.readouterr()
    for _ in range(2):  # what was merged before is told again
        assert merge_job(load_settings(MergeSettings, merge, environment={}))["exit_code"] == 0
        found = read_report("parts.run.json")["heads"]
        own = found["questions"][""]
        assert (found["read_layers"], own["compared"]) == (head.layer, 60)
        assert own["shift"] == pytest.approx(distance**0.5, rel=1e-4)
        assert ("not like those" in capfd.readouterr().err) == (distance**0.5 > 0.5)
        assert own["spread"] == pytest.approx(np.median(features.std(axis=0)), rel=1e-4)


def test_other_rows_are_told_and_can_fail_the_run(deep: Path, fitted: Path, capfd: pytest.CaptureFixture[str]) -> None:
    same = write_parquet("same.parquet", **rows(60, seed=4))
    other = write_parquet("other.parquet", prompt=[f"{'Le renard ' * (n % 7 + 3)}{n}:" for n in range(60)])
    flags = {"model": deep, "head": fitted, "max_shift": 0.5}
    assert score(same, "same.out.parquet", **flags)["exit_code"] == 0
    assert "not like those" not in capfd.readouterr().err
    assert read_report("same.out.run.json")["heads"]["questions"][""]["shift"] < 0.3
    assert score(other, **flags)["exit_code"] == 3
    assert "not like those" in capfd.readouterr().err
    adapted = score(other, "adapted.parquet", model=deep, head=fitted, adapt=True)
    assert adapted["exit_code"] == 0
    assert read_report("adapted.run.json")["heads"]["questions"][""]["adapted"] == 60


def test_an_adapted_head_takes_mean_and_scale_of_the_job(deep: Path, fitted: Path) -> None:
    asked = rows(50, seed=6)
    asked["prompt"] = [f"Now {each}" for each in asked["prompt"]]
    score(write_parquet("in.parquet", **asked), model=deep, head=fitted, adapt=True)
    head = head_file_at(str(fitted)).heads[0]
    states = states_of(deep, asked["prompt"])[head.layer]
    logits = (states - states.mean(axis=0)) / states.std(axis=0) @ head.weights + head.bias
    assert np.abs([row["score"] for row in read_output("out.parquet")] - shares(logits)[:, 0]).max() < TOLERANCE


def test_a_resumed_run_keeps_what_heads_were_adapted_to(
    deep: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet("in.parquet", **rows(30, seed=6))
    flags = {"model": deep, "head": fitted, "adapt": True}
    score(source, "whole.parquet", **flags)

    def stop(*args: Any, **how: Any) -> None:
        raise ResourceError("stopped")

    with monkeypatch.context() as patch:
        patch.setattr("prefillcli.scoring.score.score", stop)
        assert score(source, **flags)["exit_code"] == 5
    monkeypatch.setattr(Heads, "_moments", stop)  # they are not taken again
    assert score(source, resume=True, **flags)["exit_code"] == 0
    found, whole = (read_output(path) for path in ("out.parquet", "whole.parquet"))
    assert [row["score"] for row in found] == pytest.approx([row["score"] for row in whole], abs=TOLERANCE)


def test_a_head_fitted_in_low_precision_answers_in_it(tmp_path: Path) -> None:
    wide = save_model(tmp_path / "wide", layers=4, hidden=128, words="fox dog cat number")
    data = rows(40)
    assert fit(data, model=wide, truth="is_fox", compute="int8", most_layers=3)["exit_code"] == 0
    source = write_parquet("in.parquet", **rows(10, seed=1))
    refused(score(source, model=wide, head="a.head"), "low precision", "--compute int8")
    assert score(source, "int8.parquet", model=wide, head="a.head", compute="int8")["exit_code"] == 0
    score(source, model=wide, head="a.head", any_wording=True)
    gaps = [
        a["score"] - b["score"] for a, b in zip(read_output("int8.parquet"), read_output("out.parquet"), strict=True)
    ]
    assert 0 < np.abs(gaps).max() < 0.3


def test_a_head_reads_what_a_draft_keeps(deep: Path, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", seed=3, layers=1, words="fox dog cat number")
    data = rows(40)
    data["prompt"] = [f"{'the quick brown fox ' * 10}{each}" for each in data["prompt"]]
    flags = {
        "model": deep,
        "draft": str(draft),
        "keep": 0.5,
        "compress_above": 0,
        "keep_last": 4,
        "keep_first": 1,
        "select_chunk": 4,
    }
    assert fit(data, truth="is_fox", **flags)["exit_code"] == 0
    source = write_parquet("in.parquet", **data)
    assert score(source, head="a.head", **flags)["exit_code"] == 0
    assert {row["method"] for row in read_output("out.parquet")} == {"specprefill+head"}
    refused(score(source, "b.parquet", head="a.head", model=deep), "another model")


def test_a_scorer_in_python_answers_by_heads(deep: Path, fitted: Path) -> None:
    asked = rows(8, seed=1)
    score(write_parquet("in.parquet", **asked), model=deep, head=fitted)
    with prefillcli.Scorer(model=str(deep), head=str(fitted)) as scorer:
        found = scorer.score(asked["prompt"])
    wanted = [row["score"] for row in read_output("out.parquet")]
    assert [row["score"] for row in found.to_pylist()] == pytest.approx(wanted, abs=TOLERANCE)


def test_an_inspected_row_has_the_answer_of_its_head(
    deep: Path, fitted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet("in.parquet", **rows(3, seed=1))
    score(source, model=deep, head=fitted)
    line, (shown,) = inspected(monkeypatch, inputs=[str(source)], model=str(deep), head=str(fitted), row="1")
    assert line["score"] == pytest.approx(read_output("out.parquet")[1]["score"], abs=TOLERANCE)
    assert (line["method"], shown.method, shown.margins, list(shown.next)) == ("head", "head", None, [])


@pytest.mark.parametrize("known", ["fox", "fox,kind"])
def test_requests_with_the_same_questions_are_answered_by_heads(deep: Path, known: str) -> None:
    Path("asked.json").write_text(json.dumps({"questions": QUESTIONS}))
    truth = {"fox": "fox=is_fox", "fox,kind": "fox=is_fox,kind=kind"}[known]
    fit(as_documents(rows(60)), model=deep, questions="asked.json", truth=truth)
    asked = as_documents(rows(6, seed=1))
    score(write_parquet("in.parquet", **asked), model=deep, questions="asked.json", head="a.head")
    questions = {
        "fox": {"type": "noul", "instructions": QUESTIONS[0]["instructions"]},
        "kind": {"type": "choice", "instructions": QUESTIONS[1]["instructions"], "criteria": dict.fromkeys(KINDS)},
    }
    lines = [{"state": text, "questions": questions} for text in asked["document"]]
    assert score(write_jsonl("in.jsonl", lines), "out.jsonl", model=deep, head="a.head")["exit_code"] == 0
    for row, line in zip(read_output("out.parquet"), read_output("out.jsonl"), strict=True):
        answers = line["response"]["body"]["answers"]
        assert answers["fox"]["noul"] == pytest.approx(row["fox"], abs=TOLERANCE)
        assert answers["kind"]["probabilities"] == pytest.approx(row["kind.probabilities"], abs=TOLERANCE)
    compared = {name: own["compared"] for name, own in read_report("out.run.json")["heads"]["questions"].items()}
    assert compared == dict.fromkeys(known.split(","), 6)


def test_other_words_in_requests_are_answered_by_the_model(deep: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("asked.json").write_text(json.dumps({"questions": QUESTIONS[:1]}))
    fit(as_documents(rows(60)), model=deep, questions="asked.json", truth="fox=is_fox")
    line = {"state": "a fox", "questions": {"fox": {"type": "noul", "instructions": "Is there a fox?"}}}
    source = write_jsonl("in.jsonl", [line])
    score(source, "own.jsonl", model=deep)
    score(source, "out.jsonl", model=deep, head="a.head")
    own, found = (read_output(path)[0]["response"]["body"]["answers"]["fox"] for path in ("own.jsonl", "out.jsonl"))
    assert found == own
    assert "no question" in capfd.readouterr().err
    score(source, "any.jsonl", model=deep, head="a.head", any_wording=True)
    assert read_output("any.jsonl")[0]["response"]["body"]["answers"]["fox"] != own


def test_a_file_is_the_same_for_the_same_rows(deep: Path) -> None:
    fit(rows(40), "one.head", model=deep, truth="is_fox")
    fit(rows(40), "two.head", model=deep, truth="is_fox")
    assert Path("one.head").read_bytes() == Path("two.head").read_bytes()
    assert isinstance(head_file_at("one.head"), HeadFile)

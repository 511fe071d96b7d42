"""Jobs that read a classification or reward head, against transformers' own pipeline and forward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
from typer.testing import CliRunner, Result

from prefillcli.cli import app
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.models import CHAT_TEMPLATE, save_model

CLASSES = ("bad", "fair", "good")


def save_classifier(folder: Path, classes: int | Sequence[str], **settings: Any) -> Path:
    """A checkpoint whose head has these classes, or so many without names."""
    if not isinstance(classes, int):
        settings["id2label"] = dict(enumerate(classes))
        settings["label2id"] = {name: number for number, name in enumerate(classes)}
    else:
        settings["num_labels"] = classes
    return save_model(folder, classifies=True, **settings)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes that exclude one another."""
    return save_classifier(tmp_path_factory.mktemp("heads") / "graded", CLASSES)


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes without names."""
    return save_classifier(tmp_path_factory.mktemp("heads") / "binary", 2, seed=4)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One output, and a tokenizer with a chat template."""
    return save_classifier(tmp_path_factory.mktemp("heads") / "reward", 1, seed=2, chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes, of which any number are right."""
    return save_classifier(
        tmp_path_factory.mktemp("heads") / "topics", CLASSES, problem_type="multi_label_classification", seed=3
    )


def own_values(model: Path, prompts: Sequence[str | list[int]], **given: Any) -> np.ndarray:
    """The outputs of transformers' own eager forward over each prompt, float64 [prompts, classes]."""
    loaded = AutoModelForSequenceClassification.from_pretrained(model, attn_implementation="eager", **given).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt for prompt in prompts]
    with torch.inference_mode():
        return np.array([loaded(input_ids=torch.tensor([each])).logits[0].double().numpy() for each in ids])


def by_pipeline(model: Path, prompts: Sequence[str]) -> list[dict[str, float]]:
    """What transformers' pipeline says of each class."""
    classify = pipeline("text-classification", str(model), device="cpu", top_k=None)
    return [{each["label"]: each["score"] for each in found} for found in classify(list(prompts))]


def column(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    assert all(row["error"] is None for row in rows), [row["error_detail"] for row in rows]
    return np.array([row[name] for row in rows])


def close(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)


def softmax(values: np.ndarray) -> np.ndarray:
    return np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)


def refused(*arguments: Any, **flags: Any) -> dict[str, Any]:
    """The summary of a job that is wrong usage."""
    summary = score(*arguments, **flags)
    assert summary["exit_code"] == 2, summary
    return summary


def test_a_class_has_the_probability_that_the_pipeline_gives_it(graded: Path) -> None:
    prompts = texts(20)
    summary = score(write_parquet("in.parquet", prompt=prompts), model=graded, pack_tokens=150)
    rows, wanted = read_output("out.parquet"), by_pipeline(graded, prompts)
    assert summary["exit_code"] == 0
    close(column(rows, "score"), [each["bad"] for each in wanted])
    for name in CLASSES:
        close(np.exp(column(rows, f"logprob_{name}")), [each[name] for each in wanted])
    assert [row["prediction"] for row in rows] == [max(each, key=each.__getitem__) for each in wanted]
    close(column(rows, "label_mass"), 1.0)
    assert sum(row["shared_tokens"] for row in rows) > 0
    assert len({row["prediction"] for row in rows}) > 1


def test_of_two_classes_the_second_is_the_positive_one(binary: Path) -> None:
    prompts = texts(9)
    score(write_parquet("in.parquet", prompt=prompts), model=binary)
    rows = read_output("out.parquet")
    close(column(rows, "score"), [each["LABEL_1"] for each in by_pipeline(binary, prompts)])
    assert [name for name in rows[0] if name.startswith("logprob_")] == ["logprob_LABEL_1", "logprob_LABEL_0"]


def test_labels_choose_classes_and_the_positive_one(graded: Path) -> None:
    prompts = texts(9)
    wanted = softmax(own_values(graded, prompts))
    source = write_parquet("in.parquet", prompt=prompts)
    score(source, model=graded, labels="good,bad")
    rows = read_output("out.parquet")
    close(column(rows, "score"), wanted[:, 2] / (wanted[:, 2] + wanted[:, 0]))
    close(column(rows, "label_mass"), wanted[:, 2] + wanted[:, 0])
    assert "logprob_fair" not in rows[0]
    score(source, "one.parquet", model=graded, labels="good")
    rows = read_output("one.parquet")
    close(column(rows, "score"), wanted[:, 2])
    assert "logprob_fair" in rows[0]


def test_a_label_that_is_no_class_is_refused_with_their_names(graded: Path, capsys: pytest.CaptureFixture) -> None:
    refused(write_parquet("in.parquet", prompt=texts(2)), model=graded, labels="good,ugly")
    assert "'ugly' is not a class of the model\nits classes are bad, fair, good" in capsys.readouterr().err


def test_a_single_output_is_a_probability_and_its_complement(reward: Path) -> None:
    prompts = texts(9)
    source = write_parquet("in.parquet", prompt=prompts)
    score(source, model=reward)
    rows, wanted = read_output("out.parquet"), by_pipeline(reward, prompts)
    close(column(rows, "score"), [each["LABEL_0"] for each in wanted])
    close(np.exp(column(rows, "logprob_not LABEL_0")), [1 - each["LABEL_0"] for each in wanted])
    assert {row["prediction"] for row in rows} == {"LABEL_0", "not LABEL_0"}
    score(source, "named.parquet", model=reward, labels="relevant,irrelevant")
    named = read_output("named.parquet")
    assert column(named, "score").tolist() == column(rows, "score").tolist()
    assert {row["prediction"] for row in named} == {"relevant", "irrelevant"}


def test_values_are_the_outputs_as_they_are(reward: Path, graded: Path) -> None:
    prompts = texts(12)
    source = write_parquet("in.parquet", prompt=prompts)
    summary = score(source, model=reward, head="value", pack_tokens=120)
    rows, wanted = read_output("out.parquet"), own_values(reward, prompts)
    close(column(rows, "score"), wanted[:, 0])
    close(column(rows, "value_LABEL_0"), wanted[:, 0])
    assert not {"label_mass", "logprob_LABEL_0"} & set(rows[0])
    assert {row["prediction"] for row in rows} == {None}
    assert min(column(rows, "score")) < 0 < max(column(rows, "score"))
    assert summary["mean_score"] == pytest.approx(wanted.mean(), abs=TOLERANCE)
    score(source, "graded.parquet", model=graded, head="value")
    rows, wanted = read_output("graded.parquet"), own_values(graded, prompts)
    close(np.stack([column(rows, f"value_{name}") for name in CLASSES], axis=1), wanted)
    assert [row["prediction"] for row in rows] == [CLASSES[best] for best in wanted.argmax(axis=1)]


def test_regression_gives_values_unless_probabilities_are_asked_for(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", 1, problem_type="regression")
    prompts = texts(6)
    source, wanted = write_parquet("in.parquet", prompt=prompts), own_values(model, prompts)[:, 0]
    score(source, model=model)
    close(column(read_output("out.parquet"), "score"), wanted)
    score(source, "p.parquet", model=model, head="probability")
    close(column(read_output("p.parquet"), "score"), 1 / (1 + np.exp(-wanted)))


def test_classes_that_do_not_exclude_one_another_have_probabilities_of_their_own(topics: Path) -> None:
    prompts = texts(9)
    source, wanted = write_parquet("in.parquet", prompt=prompts), by_pipeline(topics, prompts)
    score(source, model=topics)
    rows = read_output("out.parquet")
    close(column(rows, "score"), [each["bad"] for each in wanted])
    for name in CLASSES:
        close(np.exp(column(rows, f"logprob_{name}")), [each[name] for each in wanted])
    assert "label_mass" not in rows[0]
    score(source, "one.parquet", model=topics, labels="good")
    rows = read_output("one.parquet")
    close(column(rows, "score"), [each["good"] for each in wanted])
    close(column(rows, "label_mass"), 1.0)
    assert {row["prediction"] for row in rows} <= {"good", "not good"}


def test_text_is_read_as_it_is_and_a_conversation_without_the_beginning_of_an_answer(reward: Path) -> None:
    chat = [{"role": "user", "content": "brown fox?"}, {"role": "assistant", "content": "Yes"}]
    whole = "<s>[user] brown fox?\n[assistant] Yes\n"
    tokenizer = AutoTokenizer.from_pretrained(reward)
    (wanted,) = own_values(reward, [tokenizer(whole, add_special_tokens=False)["input_ids"]])[0]
    score(write_jsonl("in.jsonl", [{"messages": chat}]), "chat.parquet", model=reward, head="value")
    close(column(read_output("chat.parquet"), "score"), wanted)
    source = write_parquet("in.parquet", prompt=["brown fox?"])
    score(source, model=reward, head="value")
    close(column(read_output("out.parquet"), "score"), own_values(reward, ["brown fox?"])[:, 0])
    score(source, "user.parquet", model=reward, head="value", chat=True)
    ids = tokenizer("<s>[user] brown fox?\n", add_special_tokens=False)["input_ids"]
    close(column(read_output("user.parquet"), "score"), own_values(reward, [ids])[:, 0])


def test_padding_at_the_end_of_a_prompt_is_not_read(tmp_path: Path) -> None:
    model = save_classifier(tmp_path / "m", 3, pad_token_id=7)
    prompts = [[0, 9, 30, 41, 7, 7], [0, 9, 30, 7, 41], [0, 9, 30, 41]]
    score(write_parquet("in.parquet", prompt_token_ids=prompts), model=model)
    rows, wanted = read_output("out.parquet"), softmax(own_values(model, prompts))
    close(column(rows, "score"), wanted[:, 0])
    assert [row["prompt_tokens"] for row in rows] == [4, 5, 4]


def test_the_vocabulary_of_a_causal_model_stays_what_is_read(model: Path, capsys: pytest.CaptureFixture) -> None:
    source = write_parquet("in.parquet", prompt=texts(4))
    score(source, model=model)
    score(source, "same.parquet", model=model, head="vocabulary")
    assert [row["score"] for row in read_output("same.parquet")] == [
        row["score"] for row in read_output("out.parquet")
    ]
    refused(source, "none.parquet", model=model, head="value")
    assert "has no classification head: there is no tensor score.weight" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_name_its_head_is_read_where_it_is_asked_for(graded: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in graded.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": None}))
    source = write_parquet("in.parquet", prompt=texts(4))
    score(source, model=graded)
    score(source, "asked.parquet", model=copy, head="probability")
    assert (
        column(read_output("asked.parquet"), "score").tolist() == column(read_output("out.parquet"), "score").tolist()
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"temperature": "2"}, "--temperature: the model's head gives values"),
        ({"calibrate_with": "N/A", "template": "{{ prompt }}"}, "--calibrate-with: the model's head gives values"),
        ({"exit": True, "max_flips": "0.1"}, "--exit: the model's head gives values"),
        ({"draft": "self", "keep": "0.5", "audit": "2"}, "--audit: the model's head gives values"),
    ],
)
def test_what_has_no_meaning_for_values_is_refused_in_a_line(
    reward: Path, flags: dict[str, Any], said: str, capsys: pytest.CaptureFixture
) -> None:
    source = write_parquet("in.parquet", prompt=texts(4), answer=[1.0, 0.0, 1.0, 0.0])
    refused(source, model=reward, head="value", **flags)
    assert said in capsys.readouterr().err


def test_what_needs_exclusive_classes_is_refused_for_others(topics: Path, capsys: pytest.CaptureFixture) -> None:
    refused(write_parquet("in.parquet", prompt=texts(4)), model=topics, temperature="2")
    said = capsys.readouterr().err
    assert "--temperature: the classes of this model do not exclude one another" in said
    assert "--labels bad" in said


def test_plain_transformers_gives_the_same_answers(graded: Path, topics: Path, reward: Path) -> None:
    source = write_parquet("in.parquet", prompt=texts(9))
    for number, (model, flags) in enumerate([(graded, {}), (topics, {}), (reward, {}), (reward, {"head": "value"})]):
        score(source, f"{number}.parquet", model=model, **flags)
        score(source, f"{number}-hf.parquet", model=model, engine="hf", **flags)
        rows, plain = read_output(f"{number}.parquet"), read_output(f"{number}-hf.parquet")
        assert rows[0].keys() == plain[0].keys()
        for name in rows[0]:
            if name.startswith(("score", "logprob_", "value_", "label_mass")):
                close(column(rows, name), column(plain, name))


def test_a_draft_and_the_model_itself_choose_tokens_for_a_head(graded: Path, draft: Path) -> None:
    prompts = texts(6)
    source = write_parquet("in.parquet", prompt=prompts)
    whole = {"keep": "1.0", "compress_above": "0"}
    score(source, model=graded)
    plain = column(read_output("out.parquet"), "score")
    for number, name in enumerate((str(draft), "self")):
        score(source, f"{number}.parquet", model=graded, draft=name, keep="0.5", compress_above="0", select_chunk="4")
        rows = read_output(f"{number}.parquet")
        assert any(row["kept_tokens"] < row["prompt_tokens"] for row in rows)
        assert np.isfinite(column(rows, "score")).all()
        score(source, f"{number}-whole.parquet", model=graded, draft=name, **whole)
        close(column(read_output(f"{number}-whole.parquet"), "score"), plain)


def test_a_classifier_is_no_draft(graded: Path, model: Path, capsys: pytest.CaptureFixture) -> None:
    refused(write_parquet("in.parquet", prompt=texts(2)), model=model, draft=graded, keep="0.5")
    assert "it has a classification head, and must be a causal language model" in capsys.readouterr().err


def test_right_answers_may_be_names_or_numbers_of_classes(graded: Path, binary: Path) -> None:
    prompts = texts(12)
    best = [each["prediction"] for each in _scored(graded, prompts)]
    for truth in (best, [CLASSES.index(name) for name in best]):
        source = write_parquet("in.parquet", prompt=prompts, answer=pa.array(truth))
        score(source, model=graded, truth="answer", overwrite=True)
        assert read_report()["evaluations"]["answer"]["accuracy"]["value"] == 1.0
    positive = [row["score"] >= 0.5 for row in _scored(binary, prompts)]
    source = write_parquet("in.parquet", prompt=prompts, answer=[int(each) for each in positive])
    for labels in ("LABEL_1,LABEL_0", "LABEL_0,LABEL_1"):  # 1 is LABEL_1, whichever is the positive one
        score(source, model=binary, truth="answer", labels=labels, overwrite=True)
        assert read_report()["evaluations"]["answer"]["accuracy"]["value"] == 1.0


def _scored(model: Path, prompts: Sequence[str], **flags: Any) -> list[dict[str, Any]]:
    score(write_parquet("scored.parquet", prompt=prompts), "scored.out.parquet", model=model, overwrite=True, **flags)
    return read_output("scored.out.parquet")


def command(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_inspect_shows_the_answer_after_each_layer(graded: Path, reward: Path, topics: Path) -> None:
    prompts = texts(4)
    write_parquet("in.parquet", prompt=prompts)
    done = command("inspect", "in.parquet", "--row", "2", "-m", graded, "--quiet")
    assert done.exit_code == 0, done.output
    close(json.loads(done.stdout)["score"], softmax(own_values(graded, prompts))[2, 0])
    done = command("inspect", "in.parquet", "--row", "2", "-m", reward, "--quiet")
    close(json.loads(done.stdout)["score"], 1 / (1 + np.exp(-own_values(reward, prompts)[2, 0])))
    for flags, said in ((("-m", reward, "--head", "value"), "gives values"), (("-m", topics), "give --labels bad")):
        done = command("inspect", "in.parquet", "--row", "2", *flags)
        assert done.exit_code == 2
        assert said in done.stderr


def evaluated(model: Path, prompts: Sequence[str], answers: Sequence[Any], **flags: Any) -> dict[str, Any]:
    source = write_parquet("in.parquet", prompt=prompts, answer=pa.array(answers))
    summary = score(source, model=model, head="value", truth="answer", overwrite=True, **flags)
    assert summary["exit_code"] == 0, summary
    return read_report()["evaluations"]["answer"]


def test_values_are_evaluated_by_how_they_rank_the_rows(reward: Path, graded: Path) -> None:
    prompts = texts(24)
    values = own_values(reward, prompts)[:, 0]
    answers = np.random.default_rng(3).random(24) < 1 / (1 + np.exp(-values))
    for given in (answers.tolist(), [int(each) for each in answers]):
        found = evaluated(reward, prompts, given, wanted_precision="0.5")
        assert found["auc"]["value"] == pytest.approx(roc_auc_score(answers, values))
        assert found["average_precision"]["value"] == pytest.approx(average_precision_score(answers, values))
        assert found["brier"] == {"value": None, "interval": None, "reason": "values are not probabilities"}
        assert found["accuracy"]["value"] is None
        precision, _, thresholds = precision_recall_curve(answers, values)
        reaches = [at for at in range(len(thresholds)) if precision[at] >= 0.5]
        assert found["wanted_precision"]["reached"]["threshold"] == pytest.approx(
            thresholds[reaches[0]], abs=TOLERANCE
        )
    page = Path("out.run.html").read_text()
    assert "Precision and recall" in page
    assert "Reliability" not in page
    names = [CLASSES[at % 3] for at in range(24)]
    found = evaluated(graded, prompts, names, labels="good,bad,fair")
    wanted = roc_auc_score([name == "good" for name in names], own_values(graded, prompts)[:, 2])
    assert found["auc"]["value"] == pytest.approx(wanted)


@pytest.mark.parametrize(("head", "said"), [("value", "a head's values"), ("auto", "do not exclude one another")])
def test_what_is_no_distribution_over_labels_is_not_calibrated(
    topics: Path, head: str, said: str, capsys: pytest.CaptureFixture
) -> None:
    source = write_parquet("in.parquet", prompt=texts(30), answer=[CLASSES[at % 3] for at in range(30)])
    score(source, model=topics, head=head, keep_columns="answer")
    done = command("calibrate", "out.parquet", "--truth", "answer", "-o", "c.json", "--quiet")
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_single_output_is_calibrated_as_any_two_labels(reward: Path) -> None:
    prompts = texts(40)
    values = own_values(reward, prompts)[:, 0]
    answers = np.random.default_rng(1).random(40) < 1 / (1 + np.exp(-2 * values))
    source = write_parquet("in.parquet", prompt=prompts, answer=answers)
    score(source, model=reward, truth="answer", labels="good,bad")
    assert command("calibrate", "out.parquet", "--truth", "answer", "-o", "c.json", "--quiet").exit_code == 0
    score(source, "calibrated.parquet", model=reward, labels="good,bad", calibration="c.json")
    rows = read_output("calibrated.parquet")
    order = np.argsort(column(rows, "score"))
    assert (np.diff(column(rows, "probability")[order]) >= 0).all()
    assert (column(rows, "probability") != column(rows, "score")).any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("classes", [1, 2])
def test_rows_leave_early_with_the_class_that_they_would_have(classes: int, tmp_path: Path) -> None:
    folder, rows = save_classifier(tmp_path / "deep", classes, layers=6, seed=5), 320
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for layer in model.model.layers[3:]:  # the answer is nearly there after the third of six
            layer.self_attn.o_proj.weight.mul_(0.02)
            layer.mlp.down_proj.weight.mul_(0.02)
    model.save_pretrained(folder)
    draws = np.random.default_rng(7)
    words = ("fox", "dog", "brown", "quick", "number", "saw", "yes", "no")
    prompts = [f"{' '.join(draws.choice(words, 9))} {row}" for row in range(rows)]
    source, flags = write_parquet("in.parquet", prompt=prompts), {"exit": True, "max_flips": "0.1", "exit_rows": "200"}
    score(source, "full.parquet", model=folder)
    assert score(source, model=folder, **flags)["exit_code"] == 0
    found, full = read_output("out.parquet"), read_output("full.parquet")
    left = [at for at, row in enumerate(found) if row["exit_layer"] is not None]
    assert len(left) > 40
    assert sum(found[at]["prediction"] != full[at]["prediction"] for at in left) <= 0.1 * len(left)
    assert max(abs(found[at]["score"] - full[at]["score"]) for at in left) < 0.3
    assert {found[at]["label_mass"] for at in left} == {None}

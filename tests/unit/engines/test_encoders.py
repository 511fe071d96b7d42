"""Jobs with encoders, against transformers' own forward over each text or pair alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.prompts.encoding import Encoder
from prefillcli.prompts.fitting import fit_pair
from tests.jobs.jobs import TOLERANCE, read_output, read_report, score, write_parquet
from tests.jobs.processes import Command, Hold, cut_small_windows
from tests.unit.engines.encoder_models import FAMILIES, MAX_LENGTH, save_encoder

TEXTS = [f"{'The fox ' * (i * 5 % 7)}saw {i * 37 % 11} dogs" for i in range(24)]
SECONDS = [f"{i} lazy dogs{' saw a fox' * (i * 3 % 5)}" for i in range(24)]
TEXTS[7], SECONDS[7] = TEXTS[3], SECONDS[3]  # equal rows, which are computed once
SECONDS[5] = "no [SEP] is a separator in a row"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("encoders")


@pytest.fixture(autouse=True)
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_parquet("rows.parquet", prompt=TEXTS, text_pair=SECONDS)


@pytest.fixture(scope="module")
def bert(folder: Path) -> Path:
    return save_encoder(folder / "bert", num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})


def own_values(model: Path, texts: Sequence[str], seconds: Sequence[str] | None = None, **given: Any) -> np.ndarray:
    """The outputs of transformers' own eager forward over each text or pair, float64 [texts, classes]."""
    loaded = AutoModelForSequenceClassification.from_pretrained(model, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    pairs = zip(texts, seconds or [None] * len(texts), strict=True)
    with torch.inference_mode():
        found = [loaded(**tokenizer(*pair, return_tensors="pt", **given)).logits[0].double().numpy() for pair in pairs]
    return np.array(found)


def values(path: str = "out.parquet", start: str = "value_") -> np.ndarray:
    found = read_output(path)
    assert all(row["error"] is None for row in found), [row["error_detail"] for row in found]
    return np.array([[row[name] for name in row if name.startswith(start)] for row in found])


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # by transformers' DeBERTa
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_of_texts_and_pairs_are_those_of_each_alone(family: str, folder: Path, rows: Path) -> None:
    model = save_encoder(folder / f"{family}-values", family, num_labels=3)
    seconds = [each.replace("[SEP]", "SEP") for each in SECONDS]  # which transformers takes for a separator
    write_parquet(rows, prompt=TEXTS, text_pair=seconds)
    texts_too = ({},) if family in ("bert", "deberta", "modernbert") else ()
    for given in ({"pair_column": "text_pair"}, *texts_too):
        score(rows, model=model, head="value", overwrite=True, **given)
        wanted = own_values(model, TEXTS, seconds if given else None)
        assert float(wanted.std(axis=0).min()) > 0.1, "a wrong text would show"
        np.testing.assert_allclose(values(), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_longest_text_has_all_positions_and_longer_ones_are_cut_as_tokenizers_cut(
    family: str, folder: Path, rows: Path
) -> None:
    model = save_encoder(folder / f"{family}-long", family, num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "fox" * MAX_LENGTH
    while len(tokenizer(text)["input_ids"]) > MAX_LENGTH:
        text = text[:-1]
    longer = [text, text + " dog", "dog " * 90]
    write_parquet(rows, prompt=longer, text_pair=["fox " * 50, "a dog", "fox"])
    score(rows, model=model, head="value", max_error_rate=1)
    assert [row["error"] for row in read_output("out.parquet")] == [None, "prompt_too_long", "prompt_too_long"]
    score(rows, model=model, head="value", on_long="truncate-right", pair_column="text_pair", overwrite=True)
    cut = {"truncation": True, "max_length": MAX_LENGTH}
    wanted = own_values(model, longer, ["fox " * 50, "a dog", "fox"], **cut)
    np.testing.assert_allclose(values(), wanted, rtol=0, atol=TOLERANCE)
    assert all(row["truncated"] and row["prompt_tokens"] == MAX_LENGTH for row in read_output("out.parquet"))


@pytest.mark.parametrize(("first", "second"), [(3, 9), (9, 9), (9, 0), (1, 30)])
def test_pairs_are_cut_to_the_lengths_of_tokenizers(first: int, second: int, bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bert)
    texts = ("1" * first, "2" * second)[: 1 + bool(second)]
    (whole,) = Encoder(AutoTokenizer.from_pretrained(bert)).encode_pairs([texts])
    for most in range(5, len(whole.ids) + 1):
        wanted = tokenizer(*texts, truncation=True, max_length=most)["input_ids"]
        assert whole.ids[fit_pair(whole, most, "truncate-right")].tolist() == wanted
        left = AutoTokenizer.from_pretrained(bert, truncation_side="left")(*texts, truncation=True, max_length=most)
        assert whole.ids[fit_pair(whole, most, "truncate-left")].tolist() == left["input_ids"]


@pytest.mark.parametrize("on_long", ["truncate-left", "truncate-right"])
def test_in_a_template_the_longest_text_of_a_pair_is_cut(on_long: str, bert: Path, rows: Path) -> None:
    tokenizer, words = AutoTokenizer.from_pretrained(bert), " ".join(TEXTS)
    write_parquet(rows, title=["fox", words], body=[words, "dog"], text_pair=["no", "yes"])
    options = {"model": bert, "head": "value", "on_long": on_long, "pair_column": "text_pair"}
    score(rows, template="{{ title }}: {{ body }} end", **options)
    found = read_output("out.parquet")
    assert all(row["truncated"] and MAX_LENGTH - 3 <= row["prompt_tokens"] <= MAX_LENGTH for row in found)
    for row, (head, tail), second in zip(found, [("fox: ", " end"), ("", ": dog end")], ["no", "yes"], strict=True):
        rests = [words[:at] if on_long == "truncate-right" else words[at:] for at in range(len(words))]
        texts = [f"{head}{rest}{tail}" for rest in rests]
        fitting = [each for each in texts if len(tokenizer(each, second)["input_ids"]) == row["prompt_tokens"]]
        wanted = own_values(bert, fitting, [second] * len(fitting))
        mine = np.array([value for name, value in row.items() if name.startswith("value_")])
        assert np.abs(wanted - mine).max(axis=1).min() < TOLERANCE


def test_columns_are_those_of_any_head(bert: Path, folder: Path, rows: Path) -> None:
    score(rows, model=bert)
    outputs = own_values(bert, TEXTS)
    wanted = outputs - np.log(np.exp(outputs).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(values(start="logprob_"), wanted, rtol=0, atol=TOLERANCE)
    found = read_output("out.parquet")
    assert [row["prediction"] for row in found] == [("bad", "fair", "good")[each] for each in outputs.argmax(axis=1)]
    assert found[3]["shared_tokens"] == found[3]["prompt_tokens"]
    assert found[3]["computed_tokens"] + found[7]["computed_tokens"] == found[3]["prompt_tokens"]
    educated = save_encoder(folder / "educated", num_labels=1, problem_type="regression")
    score(rows, "educated.parquet", model=educated, engine="hf")
    grades = [row["score"] for row in read_output("educated.parquet")]
    np.testing.assert_allclose(grades, own_values(educated, TEXTS)[:, 0], rtol=0, atol=TOLERANCE)


def test_control_tokens_in_a_pair_stay_text(bert: Path, rows: Path) -> None:
    score(rows, model=bert, head="value", pair_column="text_pair")
    literal = values()
    score(rows, "special.parquet", model=bert, head="value", pair_column="text_pair", literal=False)
    special = values("special.parquet")
    np.testing.assert_allclose(special, own_values(bert, TEXTS, SECONDS), rtol=0, atol=TOLERANCE)
    differ = np.abs(literal - special).max(axis=1) > TOLERANCE
    assert np.flatnonzero(differ).tolist() == [5]


def test_rows_without_a_second_text_are_left_out(bert: Path, rows: Path) -> None:
    write_parquet(rows, prompt=["fox", "fox", "fox"], text_pair=["dog", None, " "])
    score(rows, model=bert, pair_column="text_pair")
    assert [row["error"] for row in read_output("out.parquet")] == [None, "skipped_empty", "skipped_empty"]


def test_workers_and_batches_that_run_out_of_memory_change_nothing(
    bert: Path, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefillcli.engines.encoders import EncoderEngine

    score(rows, "workers.parquet", model=bert, head="value", workers=2)
    forward, sizes = EncoderEngine.outputs, []

    def scarce(engine: EncoderEngine, texts: Sequence[Any]) -> torch.Tensor:
        sizes.append(len(texts))
        if len(texts) > 3:
            raise MemoryError
        return forward(engine, texts)

    monkeypatch.setattr(EncoderEngine, "outputs", scarce)
    score(rows, model=bert, head="value")
    assert max(sizes) > 3
    for path in ("out.parquet", "workers.parquet"):
        np.testing.assert_allclose(values(path), own_values(bert, TEXTS), rtol=0, atol=TOLERANCE)


def test_resume_after_kill_loses_no_row(bert: Path, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)
    write_parquet(rows, prompt=TEXTS * 3, text_pair=SECONDS * 3)
    given = ["score", rows, "-m", bert, "-o", "out.parquet", "--head", "value", "--pair-column", "text_pair"]
    command = Command(*given, hold=Hold("prefillcli.engines.encoders:EncoderEngine.outputs", 3))
    command.wait_until_held()
    safe = len(list(Path("out.parquet.prefill").glob("part-*.parquet")))
    command.kill()
    summary = score(rows, model=bert, head="value", pair_column="text_pair", resume=True)
    assert summary["rows"]["scored"] == len(TEXTS) * 3
    assert safe > 0
    report = read_report()
    assert report["resumed"]
    assert report["tokens"]["computed"] < sum(row["prompt_tokens"] for row in read_output("out.parquet"))
    whole = values()
    score(rows, "whole.parquet", model=bert, head="value", pair_column="text_pair")
    np.testing.assert_allclose(whole, values("whole.parquet"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--labels", "Yes,No"], "'Yes' is not a class of the model"),
        (["--draft", "self", "--keep", "0.5"], "the model is an encoder, which has no"),
        (["--exit"], "the model is an encoder, which has no early exits"),
        (["--rationale", "8"], "the model is an encoder, which has no texts after rows"),
        (["--memory", "1GiB"], "the model is an encoder, which has no memory budget"),
        (["--dry-run"], "the model is an encoder, which has no dry runs"),
        (["--deterministic"], "the model is an encoder, which has no scores with the same bits"),
        (["--target-column", "text_pair"], "classification head"),
        (["--pair-column", "other"], "no column 'other'"),
        (["--head", "vocabulary"], "is an encoder"),
    ],
)
def test_what_has_no_meaning_for_an_encoder_is_refused(flags: list[str], said: str, bert: Path, rows: Path) -> None:
    result = CliRunner().invoke(app, ["score", str(rows), "-m", str(bert), "-o", "out.parquet", *flags])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert not Path("out.parquet").exists()


def test_other_commands_and_other_models_say_who_takes_what(bert: Path, rows: Path) -> None:
    result = CliRunner().invoke(app, ["inspect", str(rows), "-m", str(bert), "--row", "0"])
    assert "an encoder is scored by prefill score alone" in result.stderr
    result = CliRunner().invoke(app, ["score", str(rows), "--pair-column", "text_pair"])
    assert "--pair-column: the model is no encoder" in result.stderr


def test_a_run_says_once_that_the_model_is_an_encoder(bert: Path, rows: Path) -> None:
    result = CliRunner().invoke(app, ["score", str(rows), "-m", str(bert), "-o", "out.parquet"])
    assert result.stderr.count("an encoder, scored in padded batches") == 1
    assert json.loads(result.stdout.splitlines()[-1])["status"] == "complete"
    assert read_report()["rows"]["scored"] == len(TEXTS)

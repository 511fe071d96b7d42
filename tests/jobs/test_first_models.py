"""First models with a classification head, against transformers' own forward of that head."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prefillcli.errors import UsageError
from prefillcli.models.law import memory_law
from prefillcli.options.commands import ScoreSettings
from prefillcli.options.load import load_settings
from prefillcli.plan.pack import Limits
from prefillcli.scoring import loading as load_job
from prefillcli.scoring.loading import open_models
from prefillcli.walk.narrow import int8_kernel
from tests.jobs.jobs import read_output, read_report, score, write_jsonl
from tests.jobs.models import save_model
from tests.unit.engines.encoder_models import MAX_LENGTH, save_encoder

ROWS = 420
NAMES = ("n", "t")
LABELS = "n=n,t=t"  # without the space that this tokenizer makes a token of its own
WORDS = {"n": ("saw", "no"), "t": ("fox", "quick")}  # after these the model answers like that
FIRST: dict[str, Any] = {"labels": LABELS, "max_flips": 0.1, "exit_rows": 210, "dtype": "float32"}


def prompts() -> list[str]:
    """Texts whose last word decides the answer; every tenth is too long for the encoders."""
    draws = np.random.default_rng(7)
    words = [word for own in WORDS.values() for word in own]
    longer = [" dog" * MAX_LENGTH if row % 10 == 9 else "" for row in range(ROWS)]
    return [
        f"{row} {' '.join(draws.choice(('The', 'a'), 3))}{longer[row]} {draws.choice(words)}" for row in range(ROWS)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return write_jsonl(folder / "rows.jsonl", [{"prompt": text} for text in prompts()])


@pytest.fixture(scope="module")
def large(folder: Path) -> Path:
    """A model whose layers change little, so that its answer follows from the last word."""
    return save_model(folder / "large", layers=24, hidden=128, seed=5, steady=True)


@pytest.fixture(scope="module")
def in_full(data: Path, large: Path, folder: Path) -> list[dict[str, Any]]:
    assert score(data, folder / "full.jsonl", model=large, labels=LABELS, dtype="float32")["exit_code"] == 0
    return read_output(folder / "full.jsonl")


@pytest.fixture(scope="module")
def encoder(folder: Path, in_full: list[dict[str, Any]]) -> Path:
    """An encoder that sees all words alike, and whose three classes tell the answer by those."""
    path = save_encoder(folder / "encoder", num_labels=3, hidden_size=64)
    model = AutoModelForSequenceClassification.from_pretrained(path)
    tokenizer, short = AutoTokenizer.from_pretrained(path), [row for row in range(ROWS) if row % 10 < 9]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query" in name:
                weight.zero_()
        seen = [model.bert(**tokenizer(prompts()[row], return_tensors="pt")).pooler_output[0] for row in short]
        wanted = [np.log(in_full[row]["score"] / (1 - in_full[row]["score"])) for row in short]
        weights = torch.from_numpy(np.linalg.lstsq(torch.stack(seen).double().numpy(), wanted, rcond=1e-3)[0])
        model.classifier.weight[1:] = torch.stack([weights, -weights]).float()
        model.classifier.bias.zero_()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reward(folder: Path, large: Path) -> Path:
    """The first two layers of the model, with the difference of its two answers as a single output."""
    path, model = folder / "reward", AutoModelForCausalLM.from_pretrained(large)
    tokenizer = AutoTokenizer.from_pretrained(large)
    n, t = (tokenizer.encode(label, add_special_tokens=False)[-1] for label in (" n", " t"))
    model.config.num_hidden_layers, model.config.num_labels = 2, 1
    graded = AutoModelForSequenceClassification.from_config(model.config)
    graded.model.load_state_dict(model.model.state_dict(), strict=False)
    with torch.no_grad():
        graded.score.weight[0] = 0.3 * (model.lm_head.weight[n] - model.lm_head.weight[t])
    graded.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def expected(first: Path, probe: dict[str, Any], text: str) -> np.ndarray:
    """The logits of the labels that a probe predicts by transformers' own forward of the first model, float64
    [labels]."""
    model = AutoModelForSequenceClassification.from_pretrained(first, attn_implementation="eager").eval()
    arrays = {
        name: np.frombuffer(base64.b64decode(value["float32"]), "<f4").reshape(value["shape"]).astype(np.float64)
        for name, value in probe.items()
        if name != "kind"
    }
    with torch.inference_mode():
        shown = model(**AutoTokenizer.from_pretrained(first)(text, return_tensors="pt"), output_hidden_states=True)
        inner = shown.hidden_states[-2][0, -1]
        if model.config.model_type == "bert":
            inner = model.bert.pooler(shown.hidden_states[-1])[0]
    if probe["kind"] == "ridge":
        own = inner.double().numpy()
        own /= np.linalg.norm(own)
    else:
        assert probe["kind"] == "affine"
        own = np.append(shown.logits[0].double().numpy(), 0.0)
        own -= own.mean()
    found: np.ndarray = own @ arrays["weights"] + arrays["bias"]
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["encoder", "reward"])
def test_a_head_that_knows_the_answer_decides_rows_by_its_own_forward(
    kind: str, data: Path, large: Path, in_full: list[dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    first = request.getfixturevalue(kind)
    assert score(data, "out.jsonl", model=large, first=first, audit=40, **FIRST)["status"] == "complete"
    rows, profile = read_output("out.jsonl"), json.loads(Path("out.exit.json").read_text())
    decided = [number for number, row in enumerate(rows) if row["method"] == "first"]
    assert len(decided) > ROWS / 8
    for label in NAMES:
        own = [row for row, full in zip(rows, in_full, strict=True) if full["prediction"] == label]
        assert sum(row["prediction"] != label for row in own) <= FIRST["max_flips"] * len(own)
    (found,) = profile["questions"][0]["exits"]
    thresholds = [np.inf if each is None else each for each in found["thresholds"]]
    for number in decided[:: len(decided) // 8]:
        logits = expected(first, found["probe"], prompts()[number])
        assert rows[number]["score"] == pytest.approx(1 / (1 + np.exp(logits[1] - logits[0])), abs=1e-5)
        assert abs(logits[0] - logits[1]) >= thresholds[int(logits.argmax())] - 1e-4
    for row, full in list(zip(rows, in_full, strict=True))[9::10] if kind == "encoder" else []:
        assert (row["method"], row["score"]) == ("full", pytest.approx(full["score"], abs=1e-5))
    (used,) = read_report("out.run.json")["exits"]["first"]
    assert (used["rows"], used["cost"] > 0, used["read_tokens"] > 0) == (len(decided), True, True)


@pytest.mark.nightly
def test_a_model_whose_head_is_read_takes_a_first_model_with_a_head_alone(
    data: Path, large: Path, reward: Path, tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(large, num_labels=2)
    with torch.no_grad():
        weights = AutoModelForSequenceClassification.from_pretrained(reward).score.weight[0]
        model.score.weight.copy_(torch.stack([weights, -weights]))
    model.save_pretrained(tmp_path / "graded")
    AutoTokenizer.from_pretrained(large).save_pretrained(tmp_path / "graded")
    given = {name: value for name, value in FIRST.items() if name != "labels"}
    assert score(data, "full.jsonl", model=tmp_path / "graded", dtype="float32")["exit_code"] == 0
    assert score(data, "out.jsonl", model=tmp_path / "graded", first=reward, **given)["exit_code"] == 0
    pairs = list(zip(read_output("out.jsonl"), read_output("full.jsonl"), strict=True))
    assert sum(row["method"] == "first" for row, _ in pairs) > ROWS / 8
    assert sum(row["prediction"] != full["prediction"] for row, full in pairs) <= FIRST["max_flips"] * ROWS
    said = score(data, "other.jsonl", model=tmp_path / "graded", first=large, **given)["error"]
    assert "the first model has only tokens" in said


def test_an_adapter_is_no_first_model(data: Path, large: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(large)}))
    said = score(data, "out.jsonl", model=large, first=tmp_path, **FIRST)["error"]
    assert "merge it into its model with PEFT, and give the merged model as --first" in said


def test_a_first_model_leaves_room_for_what_the_next_window_begins_with(data: Path, large: Path, reward: Path) -> None:
    given = {"inputs": [str(data)], "model": str(large), "first": str(reward), "memory": "150MiB", **FIRST}
    settings = load_settings(ScoreSettings, given, environment={})
    models = load_job.load_models(open_models(settings), settings)
    own, first = models.engine.limits, Limits(**models.settled["first"][0]["limits"])
    models.close()
    held = own.held_tokens * 24 * 2 * 2 * 32 * 4  # layers, K and V, heads, width of a head, bytes
    law = memory_law(models.opened.small[0].files.config, torch.float32, 1)
    chunk = models.settled["first"][0]["chunk_tokens"]
    assert held > 20 << 20
    assert held + law.constant(chunk, torch.device("cpu")) + first.max_tokens * law.token <= 150 << 20


@pytest.fixture
def fast_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with a kernel for it."""
    monkeypatch.setattr("prefillcli.models.dtype.times_as_long", lambda form, *_: 0.4)


@pytest.mark.nightly
@pytest.mark.skipif(int8_kernel() is None, reason="no kernel here: torch's products in int8 take minutes")
def test_the_model_in_int8_decides_rows_that_keep_their_answers(
    data: Path, large: Path, in_full: list[dict[str, Any]]
) -> None:
    given = FIRST | {"compute": "int8"}
    assert score(data, "out.jsonl", model=large, audit=40, **given)["status"] == "complete"
    rows, (used,) = read_output("out.jsonl"), read_report("out.run.json")["exits"]["first"]
    decided = [(row, full) for row, full in zip(rows, in_full, strict=True) if row["method"] == "first"]
    assert (used["model"], used["rows"]) == ("int8", len(decided))
    assert len(decided) > ROWS / 8
    assert sum(row["prediction"] != full["prediction"] for row, full in decided) <= FIRST["max_flips"] * ROWS / 2
    off = [abs(row["score"] - full["score"]) for row, full in decided]
    assert 0 < np.mean(off) < 0.02
    again = given | {"exit_profile": "out.exit.json"}
    other = {name: value for name, value in again.items() if name != "compute"} | {"exit": True}
    for changed in (other, other | {"exit": False, "first": large}):
        assert "different prompt settings" in score(data, "other.jsonl", model=large, **changed)["error"]
    assert score(data, "again.jsonl", model=large, **again)["exit_code"] == 0
    assert score(data, "two.jsonl", model=large, workers=2, threads=1, **given)["exit_code"] == 0
    assert [row["method"] for row in read_output("two.jsonl")].count("first") > ROWS / 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"compute": "fp8"}, "--compute fp8: cpu has no products in FP8"),
        ({"compute": "int8", "engine": "hf"}, "--compute"),
        ({"compute": "int4"}, "compute"),
    ],
)
def test_what_does_not_go_with_smaller_numbers_is_refused(
    data: Path, large: Path, flags: dict[str, Any], said: str
) -> None:
    try:
        found = score(data, "out.jsonl", model=large, **FIRST | flags)["error"]
    except UsageError as error:
        found = str(error)
    assert said in found


def test_an_encoder_has_no_smaller_numbers(data: Path, tmp_path: Path) -> None:
    encoder = save_encoder(tmp_path / "encoder")
    given = {name: value for name, value in FIRST.items() if name != "labels"}
    assert "an encoder" in score(data, "out.jsonl", model=encoder, compute="int8", **given)["error"]


def test_a_dry_run_counts_no_operations_of_smaller_numbers(data: Path, large: Path, fast_int8: None) -> None:
    assert score(data, "dry.jsonl", model=large, dry_run=True, compute="int8", **FIRST)["status"] == "complete"
    found = read_report("dry.dry-run.json")["outlooks"]["exits"]
    assert (found["first_cost"], found["rows_in_full"]) == ({}, FIRST["exit_rows"])


def test_words_that_decide_every_row_cost_nothing(large: Path) -> None:
    """So there is no work by which that in full could be divided."""
    write_jsonl("in.jsonl", [{"prompt": f"{row} a fox"} for row in range(120)])
    given = FIRST | {"exit_rows": 60, "flips_of": "all", "max_flips": 0.2}
    assert score("in.jsonl", "out.jsonl", model=large, first="words", **given)["exit_code"] == 0
    (use,) = read_report("out.run.json")["exits"]["questions"].values()
    assert use["predicted_gain"] == 1000

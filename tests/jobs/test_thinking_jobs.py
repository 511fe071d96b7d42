"""Jobs with models that think first: scores are those of transformers' forward on the prompt without thoughts."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import pytest

import prefillcli
from prefillcli.errors import UsageError
from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.rows.output.batches import CHAT
from prefillcli.tools.inspect import inspect_job
from tests.jobs.jobs import Reference, read_output, read_report, score, texts, write_jsonl, write_parquet
from tests.jobs.models import save_model
from tests.unit.prompts.test_thinking import HARMONY, SWITCHED

SAID = "the model's chat template is given enable_thinking=false"


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "thinker", chat_template=SWITCHED, seed=1)


@pytest.fixture(scope="module")
def judge(thinker: Path) -> Reference:
    return Reference(thinker)


def wanted(
    judge: Reference, prompts: list[str], closing: str = "", labels: Any = (("Yes",), ("No",)), **variables: Any
) -> list[float]:
    found = []
    for text in prompts:
        chat = [{"role": "user", "content": text}]
        prompt = judge.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False, **variables)
        found.append(judge.answer(judge.ids(prompt + closing, special=False), labels).score)
    return found


def scores(rows: list[dict[str, Any]], name: str = "score") -> list[float]:
    assert not any(row["error"] for row in rows)
    return [row[name] for row in rows]


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_the_answer_is_read_where_it_begins(
    engine: str, thinker: Path, judge: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = texts(6)
    given = {"model": thinker, "engine": engine, "quiet": False}
    assert score(write_parquet("in.parquet", prompt=prompts), **given)["exit_code"] == 0
    assert scores(read_output("out.parquet")) == pytest.approx(wanted(judge, prompts, enable_thinking=False), abs=1e-5)
    said = [line for line in capsys.readouterr().err.splitlines() if SAID in line]
    assert len(said) == 1
    assert said[0].endswith("so that the answer comes next (--thinking)")
    report = read_report()
    assert report["chat"] == {"said": SAID, "variables": {"enable_thinking": False}, "closings": {}, "date": None}
    assert "enable_thinking=false (--thinking)" in Path("out.run.html").read_text()

    assert score("in.parquet", **given, resume=True, thinking="on")["exit_code"] == 4
    assert score("in.parquet", "on.parquet", **given, thinking="on")["exit_code"] == 0
    thinking = scores(read_output("on.parquet"))
    assert thinking == pytest.approx(wanted(judge, prompts), abs=1e-5)
    assert thinking != pytest.approx(scores(read_output("out.parquet")), abs=1e-3)


def test_every_way_of_asking_reads_the_same_prompt(thinker: Path, judge: Reference) -> None:
    prompts = texts(3)
    labels = ((" Yes",), (" No",))
    right = pytest.approx(wanted(judge, prompts, "So:", labels, enable_thinking=False), abs=1e-5)
    choices: dict[str, Any] = {"model": str(thinker), "answer_prefix": "So:"}
    with prefillcli.Scorer(**choices) as scorer:
        assert scorer.score({"prompt": prompts})["score"].to_pylist() == right
    assert prefillcli.score({"prompt": prompts}, **choices)["score"].to_pylist() == right

    Path("two.yaml").write_text(
        "questions:\n- name: one\n  template: '{{ p }}'\n  labels: Yes,No\n"
        "- name: two\n  template: '{{ p }}'\n  labels: Yes,No\n"
    )
    write_parquet("in.parquet", p=prompts)
    assert score("in.parquet", questions="two.yaml", **choices)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert scores(rows, "one") == scores(rows, "two") == right

    bodies = [{"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": text}]} for text in prompts]
    lines = [{"custom_id": str(at), "method": "POST", "url": CHAT, "body": body} for at, body in enumerate(bodies)]
    write_jsonl("batch.jsonl", lines)
    served = {"served_model_name": "m", "labels": "Yes,No"}
    assert score("batch.jsonl", "batch.parquet", **choices, **served)["exit_code"] == 0
    assert scores(read_output("batch.parquet")) == right

    Path("job.yaml").write_text("thinking: off\nchat_option: {enable_thinking: false}\nanswer_prefix: 'So:'\n")
    recipe = load_settings(InspectSettings, {"inputs": ["in.parquet"], "row": "1"}, recipe="job.yaml", environment={})
    assert (recipe.prompts.thinking, recipe.prompts.chat_option) == ("off", {"enable_thinking": False})
    flags = {"inputs": ["in.parquet"], "row": "1", "prompt_column": "p", "html": "row.html", **choices}
    inspect_job(load_settings(InspectSettings, flags, environment={}))
    assert SAID in html.unescape(Path("row.html").read_text())


def test_the_final_channel_of_harmony(tmp_path: Path) -> None:
    model = save_model(tmp_path / "harmony", chat_template=HARMONY, seed=2)
    prompts = texts(3)
    assert score(write_parquet("in.parquet", prompt=prompts), model=model)["exit_code"] == 0
    labels = ((" Yes",), (" No",))  # the tokenizer has no token for the tag
    right = wanted(Reference(model), prompts, "<|channel|>final<|message|>", labels)
    assert scores(read_output("out.parquet")) == pytest.approx(right, abs=1e-5)


def test_chat_options_are_told_before_anything_is_loaded(thinker: Path) -> None:
    write_parquet("in.parquet", prompt=texts(2))
    summary = score("in.parquet", model=thinker, chat_option={"enable_thinkin": False})
    assert summary["exit_code"] == 2
    assert "reads no such variable; did you mean 'enable_thinking'" in summary["error"]
    with pytest.raises(UsageError, match="date must be a day"):
        score("in.parquet", model=thinker, chat_option={"date": "tomorrow"})

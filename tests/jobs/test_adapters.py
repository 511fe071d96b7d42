"""Jobs with adapters: each row has the score that PEFT's own forward of its adapter gives."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from typer.testing import CliRunner

from prefillcli.cli import app
from prefillcli.errors import UsageError
from prefillcli.options.commands import InspectSettings
from prefillcli.options.load import load_settings
from prefillcli.tools.inspect import inspect_job
from tests.adapters import PeftReference, save_adapter
from tests.jobs.jobs import (
    Answer,
    Reference,
    assert_scored,
    read_output,
    read_report,
    score,
    texts,
    write_jsonl,
    write_parquet,
)
from tests.jobs.models import CHAT_TEMPLATE, save_model
from tests.jobs.processes import cut_small_windows

BLOCK = 16
ROWS = 44  # 11 of each user, in windows of 20
ROOT = Path(__file__).parents[2]
NAMES = ("red", "dora", None)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch, block_tokens=BLOCK)


@dataclass(frozen=True)
class Adapters:
    """Folders of adapters, and what PEFT says with each of them; None: with none."""

    folders: dict[str, Path]
    references: dict[str | None, Reference]

    @property
    def flags(self) -> dict[str, Any]:
        """All of them, by the column `who`."""
        return {"adapter": {name: str(path) for name, path in self.folders.items()}, "adapter_column": "who"}

    def answers(self, prompts: list[str], names: list[str | None]) -> list[Answer]:
        return [self.references[name or None].answer(text) for text, name in zip(prompts, names, strict=True)]


@pytest.fixture(scope="module")
def adapters(model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    folders = {
        "red": save_adapter(model, folder / "red"),
        "dora": save_adapter(model, folder / "dora", seed=2, use_dora=True, modules_to_save=["lm_head"]),
    }
    found: dict[str | None, Reference] = {name: PeftReference(model, path) for name, path in folders.items()}
    return Adapters(folders, found | {None: reference})


def prompts() -> list[str]:
    histories = [f"Posts of {user * 7919}: {'aBcD'[user] * 200}\n" for user in range(4)]
    return [f"{histories[row // 11]}{chr(65 + row % 11)}{row * 31 % 97}: Answer:" for row in range(ROWS)]


def names(kind: str) -> list[str | None]:
    """An adapter for each row: others from row to row, or from user to user."""
    by_row = {"rows": lambda row: NAMES[row % 3], "users": lambda row: NAMES[row // 11 % 3]}
    return [by_row[kind](row) for row in range(ROWS)]


def make_input(kind: str = "rows") -> Path:
    return write_parquet("in.parquet", prompt=prompts(), who=names(kind))


def flags(model: Path, adapters: Adapters, **more: Any) -> dict[str, Any]:
    return {"model": model, "pack_tokens": 300, "memory": "64MiB", **adapters.flags, **more}


def rows_of(path: str = "out.parquet") -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in read_output(path)]


@pytest.mark.parametrize("kind", ["rows", "users"])
def test_each_row_has_the_score_of_its_adapter(model: Path, adapters: Adapters, kind: str) -> None:
    assert score(make_input(kind), **flags(model, adapters))["exit_code"] == 0
    rows = rows_of()
    assert_scored(rows, adapters.answers(prompts(), names(kind)))
    assert [row["adapter"] for row in rows] == names(kind)
    report = read_report()
    assert report["adapters"] == [
        {"name": name, "path": str(path), "rows": names(kind).count(name)} for name, path in adapters.folders.items()
    ] + [{"name": None, "path": None, "rows": names(kind).count(None)}]
    assert report["tokens"]["computed"] <= 1.02 * report["tokens"]["unique"]


def test_adapters_are_exchanged_once_in_a_window(
    model: Path, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefillcli.models.adapters import LoadedAdapter

    merged: list[str] = []
    merge = LoadedAdapter.merge

    def counted(self: LoadedAdapter) -> None:
        merged.append(self.files.name)
        merge(self)

    monkeypatch.setattr(LoadedAdapter, "merge", counted)
    make_input()
    assert score("in.parquet", **flags(model, adapters, prefix_kv="discard"))["exit_code"] == 0
    assert len(merged) <= 2 * 3  # of each window


@pytest.mark.parametrize("more", [{"workers": 2}, {"engine": "hf", "pack_tokens": None, "memory": None}])
def test_workers_and_the_plain_loop_read_with_adapters(model: Path, adapters: Adapters, more: dict[str, Any]) -> None:
    make_input()
    assert score("in.parquet", **flags(model, adapters, **more))["exit_code"] == 0
    assert_scored(rows_of(), adapters.answers(prompts(), names("rows")))


def test_one_adapter_without_a_column_is_for_all_rows(model: Path, adapters: Adapters) -> None:
    write_parquet("in.parquet", prompt=texts(8))
    folder = adapters.folders["dora"]
    assert score("in.parquet", model=model, adapter=str(folder))["exit_code"] == 0
    rows = rows_of()
    assert_scored(rows, adapters.answers(texts(8), ["dora"] * 8))
    assert "adapter" not in rows[0]
    assert read_report()["adapters"] == [{"name": "dora", "path": str(folder), "rows": 8}]


def test_a_draft_reads_without_adapters(model: Path, draft: Path, adapters: Adapters) -> None:
    """The rows are kept to the same tokens as without adapters."""
    make_input()
    own = {"draft": draft, "keep": 0.5, "compress_above": 0}
    assert score("in.parquet", **flags(model, adapters, **own))["exit_code"] == 0
    alone = {"pack_tokens": 300, "memory": "64MiB", **own}
    assert score("in.parquet", "base.parquet", model=model, **alone)["exit_code"] == 0
    for row, plain in zip(rows_of(), rows_of("base.parquet"), strict=True):
        assert row["kept_tokens"] == plain["kept_tokens"] < row["prompt_tokens"]
        assert (abs(row["score"] - plain["score"]) < 1e-5) == (row["adapter"] is None)


def test_names_that_no_adapter_has_are_error_rows(model: Path, adapters: Adapters) -> None:
    who = ["red", "", None, "blue", "Red"]
    write_jsonl("in.jsonl", [{"prompt": text, "who": name} for text, name in zip(texts(5), who, strict=True)])
    more = {"max_error_rate": 0.9}
    assert score("in.jsonl", **flags(model, adapters, **more))["exit_code"] == 0
    rows = rows_of()
    assert [row["error"] for row in rows] == [None, None, None, "unknown_adapter", "unknown_adapter"]
    assert rows[3]["error_detail"] == "who is 'blue': --adapter does not give it"
    assert [row["adapter"] for row in rows] == ["red", None, None, None, None]
    assert_scored(rows[:3], adapters.answers(texts(3), who[:3]))


def test_names_may_be_numbers(model: Path, adapters: Adapters) -> None:
    write_parquet("in.parquet", prompt=texts(3), who=[7, None, 7])
    given = {"adapter": {"7": str(adapters.folders["red"])}, "adapter_column": "who"}
    assert score("in.parquet", model=model, **given)["exit_code"] == 0
    assert_scored(rows_of(), adapters.answers(texts(3), ["red", None, "red"]))
    assert [row["adapter"] for row in rows_of()] == ["7", None, "7"]


def test_other_adapters_are_another_job(model: Path, adapters: Adapters) -> None:
    for name, folder in adapters.folders.items():
        shutil.copytree(folder, name)
    make_input()
    names_of = {"red": "red", "dora": "dora"}
    given = {"model": model, "adapter": names_of, "adapter_column": "who"}
    assert score("in.parquet", **given)["exit_code"] == 0
    assert score("in.parquet", resume=True, **given)["exit_code"] == 0
    elsewhere = {"adapter": {name: str(path) for name, path in adapters.folders.items()}}
    assert score("in.parquet", resume=True, **(given | elsewhere))["exit_code"] == 0
    for other in (
        {"adapter": {"red": "dora", "dora": "red"}},
        {"adapter": {"red": "red"}},
        {"adapter": {}, "adapter_column": None},
        {"adapter": "red", "adapter_column": None},
    ):
        again = score("in.parquet", resume=True, **(given | other))
        assert again["exit_code"] == 4
        assert "different adapters" in again["error"]
    config = Path("red/adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 9}))
    assert score("in.parquet", resume=True, **given)["exit_code"] == 4


def test_an_adapter_that_changes_while_it_is_read_ends_the_job(
    model: Path, adapters: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(adapters.folders["red"], "red")
    make_input()

    def changed(*arguments: Any, **options: Any) -> Any:
        Path("red/adapter_config.json").write_text("{}")
        return load(*arguments, **options)

    from prefillcli.scoring import scorer

    load = scorer.load_models
    monkeypatch.setattr(scorer, "load_models", changed)
    done = score("in.parquet", model=model, adapter="red")
    assert done["exit_code"] == 4
    assert "red/adapter_config.json changed while the job ran" in done["error"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"adapter_column": None}, "nothing assigns rows to them"),
        ({"engine": "vllm", "pack_tokens": None, "memory": None}, "the vllm engine has no adapters to merge"),
    ],
)
def test_what_adapters_cannot_be_with_is_refused(
    more: dict[str, Any], reason: str, model: Path, adapters: Adapters
) -> None:
    make_input()
    with pytest.raises(UsageError, match=re.escape(reason)):
        score("in.parquet", **flags(model, adapters, **more))


def test_a_column_that_no_row_has_is_refused(model: Path, adapters: Adapters) -> None:
    make_input()
    done = score("in.parquet", **flags(model, adapters, adapter_column="whom"))
    assert done["exit_code"] == 2
    assert "--adapter-column whom: the input has no such column; did you mean 'who'" in done["error"]


def test_a_dry_run_checks_adapters_and_plans_with_them(model: Path, adapters: Adapters) -> None:
    make_input("users")
    assert score("in.parquet", dry_run=True, **flags(model, adapters))["exit_code"] == 0
    assert score("in.parquet", **flags(model, adapters))["exit_code"] == 0
    (report,) = Path().glob("*dry*.json")
    plan = json.loads(report.read_text())["survey"]["plan"]
    assert plan["computed_tokens"] == read_report()["tokens"]["computed"]
    bad = flags(model, adapters) | {"adapter": {"red": str(model)}}
    assert score("in.parquet", dry_run=True, **bad)["exit_code"] == 2


def test_an_adapter_for_all_rows_brings_its_tokenizer(model: Path, adapters: Adapters) -> None:
    folder = Path("red")
    shutil.copytree(adapters.folders["red"], folder)
    save_model(Path("chat"), chat_template=CHAT_TEMPLATE)
    for path in Path("chat").glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy("chat/chat_template.jinja", folder)
    write_parquet("in.parquet", prompt=texts(4), who=["red"] * 4)
    assert score("in.parquet", model=model, adapter=str(folder))["exit_code"] == 0
    chats = PeftReference(model, folder, tokenizer=folder)
    prompts = [f"<s>[user] {text}\n[assistant]\n" for text in texts(4)]
    wanted = [chats.answer(chats.ids(prompt, special=False), (("Yes",), ("No",))) for prompt in prompts]
    assert_scored(rows_of(), wanted)
    again = score("in.parquet", resume=True, model=model, adapter=str(adapters.folders["red"]))
    assert again["exit_code"] == 4
    several = score("in.parquet", "two.parquet", model=model, adapter=str(folder), adapter_column="who")
    assert several["exit_code"] == 2
    assert "its tokenizer is not the model's: another chat template" in several["error"]


def test_a_row_is_inspected_with_its_adapter(model: Path, adapters: Adapters) -> None:
    make_input()
    given = {"model": str(model), **adapters.flags, "quiet": True, "html": "row.html"}
    for row in (0, 1, 2):
        found = inspect_job(
            load_settings(InspectSettings, {"inputs": ["in.parquet"], "row": str(row)} | given, environment={})
        )
        (wanted,) = adapters.answers(prompts()[row : row + 1], names("rows")[row : row + 1])
        assert found["exit_code"] == 0
        assert abs(found["score"] - wanted.score) < 1e-5


def test_an_adapter_of_a_classifier_reads_its_head(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "classifier"
    shutil.copytree(model, folder)
    torch.manual_seed(0)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, pad_token_id=1)
    torch.nn.init.normal_(base.score.weight, std=0.3)
    base.save_pretrained(folder)
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    adapted = get_peft_model(loaded, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"], r=4))
    with torch.no_grad():
        for name, tensor in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                tensor.normal_(0, 0.2)
    adapted.save_pretrained("adapter")
    write_parquet("in.parquet", prompt=texts(6))
    assert score("in.parquet", model=folder, adapter="adapter", labels="LABEL_1,LABEL_0")["exit_code"] == 0
    tokenizer = AutoTokenizer.from_pretrained(model)
    for row, text in zip(rows_of(), texts(6), strict=True):
        with torch.inference_mode():
            logits = adapted.eval()(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits[0].double()
        assert abs(row["score"] - float(torch.softmax(logits, -1)[1])) < 1e-5
    assert score("in.parquet", "other.parquet", model=model, adapter="adapter")["exit_code"] == 2


def test_the_recipe_runs(model: Path, adapters: Adapters) -> None:
    shutil.copytree(model, "models/base")
    for name, folder in zip(("risk", "fraud"), adapters.folders.values(), strict=True):
        shutil.copytree(folder, f"adapters/{name}")
    write_parquet("rows.parquet", prompt=texts(4), task=["risk", "fraud", "", None])
    done = CliRunner().invoke(app, ["score", "--recipe", str(ROOT / "recipes" / "adapters.yaml"), "--quiet"])
    assert done.exit_code == 0, done.stderr
    assert_scored(rows_of("out/adapters.parquet"), adapters.answers(texts(4), ["red", "dora", None, None]))

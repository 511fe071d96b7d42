"""`--draft-tokenizer translate`: a draft that means other words by its ids reads the prompts in its own tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from tests.jobs.compression import assert_close, compressed, lines_of
from tests.jobs.jobs import read_report, without_seconds, write_jsonl

ROWS = 24
WORDS = ["The", "quick", "brown", "fox", "Answer", "Yes", "no", "naïve", "你好", "🙂", "the", "lazy", "dog"]


def renumber(draft: Path, folder: Path) -> Path:
    """The same model and tokenizer, in which every token has another id."""
    shutil.copytree(draft, folder)
    size = len(AutoTokenizer.from_pretrained(draft))
    ids = np.random.default_rng(1).permutation(size).tolist()
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        if name == "tokenizer.json":
            content["model"]["vocab"] = {token: ids[at] for token, at in content["model"]["vocab"].items()}
            for token in content["added_tokens"]:
                token["id"] = ids[token["id"]]
            for token in content["post_processor"]["special_tokens"].values():
                token["ids"] = [ids[at] for at in token["ids"]]
        else:
            content |= {key: ids[content[key]] for key in ("bos_token_id", "eos_token_id")}
        (folder / name).write_text(json.dumps(content))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name][torch.tensor(ids)] = weights[name][:size].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def renumbered(draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renumber(draft, tmp_path_factory.mktemp("renumbered") / "draft")


@pytest.fixture
def source() -> Path:
    """Rows that share a history, rows by themselves, and short ones that are read in full."""
    rng = np.random.default_rng(0)
    history = " ".join(rng.choice(WORDS, 60))
    prompts = [
        f"{history if number % 2 else ' '.join(rng.choice(WORDS, 50))} {' '.join(rng.choice(WORDS, 9))}\nAnswer:"
        for number in range(ROWS - 2)
    ]
    return write_jsonl("in.jsonl", [{"prompt": text} for text in [*prompts, "short Answer:", "Answer:"]])


@pytest.mark.parametrize(
    "how",
    [
        {"query_window": 0, "lookahead": 4, "query_reduce": "rank", "keep_private": True},
        {"query_reduce": "max", "compress_per_row": True, "pool": 1, "select_chunk": 1},
    ],
    ids=["decoded tokens", "each row by itself"],
)
def test_a_draft_whose_tokens_have_other_ids_picks_what_it_did(
    model: Path, draft: Path, renumbered: Path, source: Path, how: dict[str, Any]
) -> None:
    assert compressed(source, "same.parquet", model=model, draft=draft, **how)["exit_code"] == 0
    done = compressed(source, model=model, draft=renumbered, draft_tokenizer="translate", **how)
    assert done["exit_code"] == 0
    found = without_seconds()
    assert [row["method"] for row in found].count("specprefill") == ROWS - 2
    assert found == without_seconds("same.parquet")
    assert read_report()["tokens"]["draft"] == read_report("same.run.json")["tokens"]["draft"] > 0


def test_a_draft_with_the_models_tokenizer_is_not_translated(model: Path, draft: Path, source: Path) -> None:
    compressed(source, "same.parquet", model=model, draft=draft)
    compressed(source, model=model, draft=draft, draft_tokenizer="translate")
    assert without_seconds() == without_seconds("same.parquet")


def test_another_tokenizer_is_refused_unless_it_is_asked_for(
    model: Path, renumbered: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compressed(source, model=model, draft=renumbered)["exit_code"] == 2
    message = capsys.readouterr().err
    assert "its tokenizer is not the model's" in message
    assert "--draft-tokenizer translate" in message
    assert len(message.splitlines()) <= 3


def test_a_tokenizer_that_cannot_say_where_tokens_lie_is_refused(
    model: Path, draft: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(draft, tmp_path / "bytes")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    done = compressed(source, model=model, draft=folder, draft_tokenizer="translate")
    assert done["exit_code"] == 2
    message = capsys.readouterr().err
    assert "the places of its tokens" in message
    assert len(message.splitlines()) <= 3


def test_token_ids_are_read_by_the_draft_as_the_text_that_they_say(
    model: Path, draft: Path, renumbered: Path, source: Path
) -> None:
    """Also ids that no text leads to; random ones spell broken letters, which the draft reads otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["prompt"] for line in source.read_text().splitlines()]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    apart = [token for text in texts[0] for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    random = np.random.default_rng(2).integers(2, 250, 200).tolist()
    given = write_jsonl("ids.jsonl", lines_of([*ids, apart, random]))
    compressed(source, "texts.parquet", model=model, draft=draft)
    assert compressed(given, model=model, draft=renumbered, draft_tokenizer="translate")["exit_code"] == 0
    found = without_seconds()
    wanted = without_seconds("texts.parquet")
    assert [row["kept_tokens"] for row in found[:ROWS]] == [row["kept_tokens"] for row in wanted]
    assert_close(found[:ROWS], wanted)
    assert [row["method"] for row in found[ROWS:]] == ["specprefill"] * 2


def test_another_tokenizer_of_the_draft_is_another_job(
    model: Path, renumbered: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(renumbered, tmp_path / "changed")
    flags = {"model": model, "draft": folder, "draft_tokenizer": "translate", "limit": 8}
    assert compressed(source, **flags)["exit_code"] == 0
    assert compressed(source, overwrite=False, resume=True, **flags)["exit_code"] == 0
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert compressed(source, overwrite=False, resume=True, **flags)["exit_code"] == 4

"""Rows that the draft cannot judge are read in full, and say why; the others are compressed all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

from prefillcli.models.law import PACK_TOKENS
from prefillcli.reading.compress.selection import FALLBACKS
from prefillcli.walk.walk import LayerWalk
from tests.jobs.compression import Prompt, assert_close, compressed, full_rows, lines_of, unrelated
from tests.jobs.jobs import Reference, read_output, write_jsonl
from tests.jobs.models import VOCABULARY, save_model
from tests.jobs.processes import cut_small_windows

LENGTHS = (300, 100, 250, 110)


def assert_falls_back(
    prompts: Sequence[Prompt], reason: str, rows: Sequence[int], model: Path, draft: Path, **options: Any
) -> None:
    """These rows are scored as without a draft, with the reason; the others are compressed and score as alone."""
    assert reason in FALLBACKS
    limits = {name: value for name, value in options.items() if name in ("memory", "chunk_tokens")}
    source = write_jsonl("in.jsonl", lines_of(prompts))
    full = full_rows(source, model, **limits)
    assert compressed(source, model=model, draft=draft, **options)["exit_code"] == 0
    found = read_output("out.parquet")
    wanted = [f"fallback:{reason}" if number in rows else "specprefill" for number in range(len(prompts))]
    assert [row["method"] for row in found] == wanted
    assert_close([found[number] for number in rows], [full[number] for number in rows])
    assert all(found[number]["kept_tokens"] == len(prompts[number]) for number in rows)
    others = [number for number in range(len(prompts)) if number not in rows]
    if others:
        compressed(write_jsonl("others.jsonl", lines_of([prompts[n] for n in others])), model=model, draft=draft,
                   **options)  # fmt: skip
        assert_close([found[number] for number in others], read_output("out.parquet"))


def test_every_reason_has_a_test() -> None:
    tested = {name.removeprefix("test_draft_") for name in globals() if name.startswith("test_draft_")}
    assert {reason.removeprefix("draft_") for reason in FALLBACKS} == tested


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layers", "how", "lengths"),
    [
        (8, {"query_window": 0, "lookahead": 8}, [300, 130, 280, 120]),
        (1, {"query_window": 64}, [500, 200, 450, 400]),
    ],
    ids=["keys of all layers", "votes of many queries"],
)
def test_draft_memory(
    model: Path, reference: Reference, tmp_path: Path, layers: int, how: dict[str, int], lengths: list[int]
) -> None:
    """Decoding keeps the keys of all the draft's layers; every query has a vote on every token."""
    draft = save_model(tmp_path / "draft", seed=3, layers=layers)
    prompts = unrelated(reference, lengths)
    assert_falls_back(prompts, "draft_memory", [0, 2], model, draft, memory="48.5MiB", chunk_tokens=16, **how)


def test_draft_length(model: Path, reference: Reference, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    change_config(draft, max_position_embeddings=250)
    assert_falls_back(unrelated(reference, [251, 100, 250, 300]), "draft_length", [0, 3], model, draft)


def test_decoded_tokens_need_positions_too(model: Path, reference: Reference, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    change_config(draft, max_position_embeddings=250)
    prompts = unrelated(reference, [243, 244, 100])
    assert_falls_back(prompts, "draft_length", [1], model, draft, query_window=0, lookahead=8)


def test_draft_vocabulary(model: Path, reference: Reference, tmp_path: Path) -> None:
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    rows = len(AutoTokenizer.from_pretrained(model))
    assert rows < VOCABULARY
    change_config(draft, vocab_size=rows)
    weights = load_file(draft / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:rows].clone()
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    prompts = unrelated(reference, LENGTHS)
    prompts[1][50], prompts[2][50], prompts[3][50] = rows, rows - 1, VOCABULARY - 1
    assert_falls_back(prompts, "draft_vocabulary", [1, 3], model, draft)


def test_draft_window(model: Path, reference: Reference, tmp_path: Path) -> None:
    """All layers of the draft slide: in a longer prompt none of them sees the beginning."""
    draft = shutil.copytree(model, tmp_path / "draft")
    torch.manual_seed(0)
    MistralForCausalLM(
        MistralConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            sliding_window=120,
            initializer_range=0.3,
        )
    ).save_pretrained(draft)
    assert_falls_back(unrelated(reference, [300, 100, 121, 120]), "draft_window", [0, 2], model, draft)


@pytest.mark.parametrize(("lookahead", "reduce"), [(0, "rank"), (4, "mean")])
def test_draft_not_finite(model: Path, reference: Reference, tmp_path: Path, lookahead: int, reduce: str) -> None:
    """One token of the draft's vocabulary is broken: prompts that have it are read in full, others are not hurt."""
    draft = save_model(tmp_path / "draft", seed=3, layers=2)
    break_token(draft, 350)
    prompts = unrelated(reference, LENGTHS)
    prompts[0][20] = prompts[3][90] = 350
    how = {"query_window": 0, "lookahead": lookahead} if lookahead else {}
    assert_falls_back(prompts, "draft_not_finite", [0, 3], model, draft, query_reduce=reduce, **how)


def test_draft_error(
    model: Path,
    draft: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Packs of the draft fail that hold a certain token; the reason is told once."""
    monkeypatch.setitem(PACK_TOKENS, "cpu", 300)
    watch = LayerWalk.watch

    def failing(self: LayerWalk, pack: Any, *arguments: Any) -> Any:
        sights = watch(self, pack, *arguments)
        yield next(sights)
        if 350 in pack.tokens:
            raise RuntimeError("out of something")
        yield from sights

    monkeypatch.setattr(LayerWalk, "watch", failing)
    prompts = unrelated(reference, [300, 290, 295, 299])
    prompts[1][30] = prompts[3][30] = 350
    assert_falls_back(prompts, "draft_error", [1, 3], model, draft)
    lines = [line for line in capsys.readouterr().err.splitlines() if "draft" in line]
    assert len(lines) == 1
    assert lines[0].startswith("prefill: warning: the draft failed")
    assert "RuntimeError: out of something" in lines[0]


def nan_draft(tmp_path: Path) -> Path:
    """A draft without any number."""
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    weights = load_file(draft / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    weights["model.embed_tokens.weight"].fill_(float("nan"))
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    return draft


def test_a_draft_that_fails_on_every_row_costs_no_row_but_is_an_error(
    model: Path, reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, draft = unrelated(reference, [*LENGTHS, 40]), nan_draft(tmp_path)  # the last is too short to compress
    source = write_jsonl("in.jsonl", lines_of(prompts))
    for again in ({}, {"overwrite": False, "resume": True}):  # told once more, as long as the output stands
        summary = compressed(source, model=model, draft=draft, **again)
        assert (summary["status"], summary["exit_code"]) == ("failed", 1)
        said = "none of the 4 rows that were to be compressed was (fallback:draft_not_finite 4)"
        assert said in summary["error"]
        assert f"prefill: {said}" in capsys.readouterr().err
    found = read_output("out.parquet")
    assert [row["method"] for row in found] == 4 * ["fallback:draft_not_finite"] + ["full"]
    assert_close(found, full_rows(source, model))


@pytest.mark.parametrize(("rows", "code"), [(31, 0), (32, 1)])
def test_a_draft_that_many_prompts_are_too_long_for_is_an_error(
    model: Path, reference: Reference, tmp_path: Path, rows: int, code: int
) -> None:
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    change_config(draft, max_position_embeddings=66)
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [70 + number for number in range(rows)])))
    summary = compressed(source, model=model, draft=draft)
    assert (summary["exit_code"], summary["rows"]["scored"]) == (code, rows)
    assert (f"fallback:draft_length {rows}" in summary.get("error", "")) == (code == 1)


@pytest.mark.parametrize(("failure", "code"), [(RuntimeError("no such kernel"), 1), (MemoryError("no room"), 5)])
def test_a_draft_that_always_fails_ends_the_job_before_it_is_read_in_full(
    model: Path, draft: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, failure: Exception, code: int
) -> None:
    def failing(*_: Any) -> Any:
        raise failure
        yield

    cut_small_windows(monkeypatch)
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [70 + number for number in range(70)])))
    monkeypatch.setattr(LayerWalk, "watch", failing)
    summary = compressed(source, model=model, draft=draft)
    assert (summary["status"], summary["exit_code"]) == ("failed", code)
    assert f"failed on all rows so far, 40: {type(failure).__name__}: {failure}" in summary["error"]
    assert summary["rows"]["scored"] == 20  # the first window's, which are fewer than say it for certain
    auto = {"keep": "auto", "max_flips": 0.5, "limit": 20}
    tried = compressed(source, model=model, draft=draft, **auto)
    assert (tried["exit_code"], tried["rows"]["scored"]) == (code, 0)  # no rate is chosen with such a draft


def test_a_draft_that_has_compressed_a_row_may_fail_on_many(
    model: Path, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    break_token(draft, 350)
    prompts = unrelated(reference, [70 + number for number in range(50)])
    for prompt in prompts[1:]:
        prompt[20] = 350
    assert_falls_back(prompts, "draft_not_finite", range(1, 50), model, draft)


def change_config(path: Path, **changes: Any) -> None:
    """Change what a model's config.json says."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def break_token(path: Path, token: int) -> None:
    """Make the embedding of a token NaN."""
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def test_draft_text(model: Path, tmp_path: Path) -> None:
    """The draft's own tokenizer knows no letters but those of ASCII, and drops the others."""
    draft = save_model(tmp_path / "draft", seed=3, layers=1)
    content = json.loads((draft / "tokenizer.json").read_text())
    letters = [
        letter for letter in content["model"]["vocab"] if len(letter) == 1 and ord(letter) > 127 and letter not in "ĠĊ"
    ]
    content["model"]["vocab"] = {
        f"unused {number}" if token in letters else token: number
        for token, number in content["model"]["vocab"].items()
    }
    (draft / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = ["the brown fox " * 20, "你好世界 " * 20, "the quick dog " * 20 + "é", "the " + "naïve 你" * 30]
    prompts = [tokenizer(text + "Answer:")["input_ids"] for text in texts]
    assert_falls_back(prompts, "draft_text", [1, 3], model, draft, draft_tokenizer="translate")

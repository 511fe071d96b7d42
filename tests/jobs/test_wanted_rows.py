"""Rows that are written about after their window: first in the input, compressed, left early, or too large to keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from prefillcli.models import law as text_room
from prefillcli.models.law import KeepOrAgain
from prefillcli.rows.output.sink import Sink
from prefillcli.scoring import loop
from tests.jobs.compression import ByHand, compressed, lines_of, unrelated
from tests.jobs.jobs import Reference, read_output, read_report, score, texts, write_jsonl
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_exits import EXITS, prompts
from tests.jobs.test_exits import deep_model as deep_model
from tests.jobs.test_rationales import Writer

ROWS, TOKENS = 44, 8
TEXT = ("rationale", "rationale_tokens", "finish_reason", "rationale_source")


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_windows(monkeypatch)


def make_input() -> Path:
    return write_jsonl("in.jsonl", [{"prompt": text} for text in texts(ROWS)])


def of_rows(output: str = "out.parquet") -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in TEXT) for row in read_output(output)]


@pytest.fixture(scope="module")
def all_texts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What is written about every row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("all"))
        cut_small_windows(patch)
        assert score(make_input(), model=model, rationale=TOKENS)["exit_code"] == 0
        return of_rows()


@pytest.mark.parametrize("flags", [{"workers": 2}, {"pack_tokens": 64}])
def test_a_limit_takes_the_first_rows_of_the_input(
    model: Path, all_texts: list[tuple[Any, ...]], flags: dict[str, Any]
) -> None:
    numbered = {"rationale": TOKENS, "rationale_when": "row % 3 == 1", "rationale_limit": 6}
    assert score(make_input(), model=model, **numbered, **flags)["exit_code"] == 0
    chosen = range(1, 18, 3)
    assert of_rows() == [each if row in chosen else (None,) * 4 for row, each in enumerate(all_texts)]
    assert read_report()["rationales"]["rows"] == 6


def test_a_resumed_job_takes_the_same_rows_up_to_its_limit(
    model: Path, all_texts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered = {"rationale": TOKENS, "rationale_when": "row % 3 == 1", "rationale_limit": 6, "model": model}
    write, parts = Sink.write, []

    def stop_in_the_second(sink: Sink, *args: Any, **kwargs: Any) -> None:
        parts.append(None)
        if len(parts) == 2:
            raise KeyboardInterrupt
        write(sink, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Sink, "write", stop_in_the_second)
        assert score(make_input(), **numbered)["status"] != "complete"
    assert score("in.jsonl", resume=True, **numbered)["exit_code"] == 0
    chosen = range(1, 18, 3)
    assert of_rows() == [each if row in chosen else (None,) * 4 for row, each in enumerate(all_texts)]


def keep_at_most(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """K,V of all layers fit for so many tokens, and packs are not made smaller for that."""
    monkeypatch.setattr(
        text_room,
        "limits_with_texts",
        lambda limits, law, **_: replace(limits, kept_tokens=tokens, written_tokens=500),
    )
    monkeypatch.setattr(text_room, "keep_or_again", lambda limits, **_: KeepOrAgain(False, "for a test"))


def test_packs_that_cannot_be_kept_are_read_again_for_wanted_rows(
    model: Path, all_texts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_at_most(monkeypatch, 120)
    assert score(make_input(), model=model, rationale=TOKENS, rationale_when="row < 5 or row > 40")["exit_code"] == 0
    assert of_rows() == [each if row < 5 or row > 40 else (None,) * 4 for row, each in enumerate(all_texts)]
    report = read_report()["rationales"]
    assert (report["kept_prompts"], report["again_prompts"]) == (0, 8)
    assert 0 < report["again_tokens"] < read_report()["tokens"]["computed"]


class TextByHand:
    """What transformers' eager forward writes behind some tokens of a prompt at their places, without a cache."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager").eval()

    @torch.inference_mode()
    def __call__(self, prompt: list[int], kept: np.ndarray, beginning: list[int]) -> list[int]:
        tokens = [*np.asarray(prompt)[kept].tolist(), *beginning]
        found: list[int] = []
        while len(found) < TOKENS:
            after = len(prompt) + np.arange(len(tokens) - len(kept))
            places = torch.tensor([*kept.tolist(), *after.tolist()])[None]
            unseen = torch.full((len(tokens), len(tokens)), torch.finfo(torch.float32).min).triu(1)[None, None]
            logits = self._model(
                torch.tensor(tokens)[None], position_ids=places, attention_mask=unseen, use_cache=False
            ).logits[0, -1]
            best = int(logits.argmax())
            if best == self._model.config.eos_token_id:
                break
            found.append(best)
            tokens.append(best)
        return found


def test_a_compressed_row_is_written_about_from_the_tokens_that_are_kept(
    reference: Reference, model: Path, draft: Path
) -> None:
    prompts = unrelated(reference, (150, 180, 40, 210))
    inputs = write_jsonl("in.jsonl", lines_of(prompts))
    assert compressed(inputs, model=model, draft=draft, rationale=TOKENS, speculation="lookup")["exit_code"] == 0
    hand, writer = ByHand(reference, model, draft), TextByHand(model)
    for row, prompt in zip(read_output("out.parquet"), prompts, strict=True):
        short = len(prompt) == 40
        kept = np.arange(len(prompt)) if short else hand.kept(prompt)
        assert row["rationale_source"] == ("full" if short else "specprefill") == row["method"]
        beginning = reference.ids(f" {row['prediction']} because", special=False)
        wanted = writer(prompt, kept, beginning)
        assert row["rationale_tokens"] == len(wanted)
        assert row["rationale"] == reference.tokenizer.decode(wanted, skip_special_tokens=True).strip()


def test_a_row_that_chooses_its_own_tokens_is_written_about_in_full(reference: Reference, model: Path) -> None:
    prompts = unrelated(reference, (150, 180, 40))
    inputs = write_jsonl("in.jsonl", lines_of(prompts))
    own = {"draft": "self", "keep": 0.5, "compress_above": 64, "select_chunk": 8, "model": model}
    assert score(inputs, rationale=TOKENS, **own)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert any(row["kept_tokens"] < row["prompt_tokens"] for row in rows)
    writer = TextByHand(model)
    for row, prompt in zip(rows, prompts, strict=True):
        wanted = writer(prompt, np.arange(len(prompt)), reference.ids(f" {row['prediction']} because", special=False))
        assert row["rationale_tokens"] == len(wanted)
        assert row["rationale_source"] == "full"


def test_a_prompt_without_room_for_a_text_keeps_its_score(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_at_most(monkeypatch, 24)
    rows = [{"prompt": "no yes number 3\nAnswer:"}, {"prompt": "fox " * 60 + "\nAnswer:"}]
    assert score(write_jsonl("in.jsonl", rows), model=model, rationale=TOKENS)["exit_code"] == 0
    short, long = read_output("out.parquet")
    assert short["finish_reason"] in ("stop", "length")
    assert (long["rationale"], long["rationale_tokens"], long["finish_reason"]) == (None, 0, "memory")
    assert long["score"] is not None


def test_many_wanted_rows_follow_their_window_in_groups(
    model: Path, all_texts: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"model": model, "rationale": TOKENS, "evidence": True}
    assert score(make_input(), "whole.parquet", **flags)["exit_code"] == 0
    monkeypatch.setattr(loop, "GROUP_TOKENS", 2500)  # of two rows or so
    assert score("in.jsonl", **flags)["exit_code"] == 0
    assert of_rows() == all_texts
    for row, wanted in zip(read_output("out.parquet"), read_output("whole.parquet"), strict=True):
        changes = [{each["section"]: each["change"] for each in of["evidence"]} for of in (row, wanted)]
        assert changes[0] == pytest.approx(changes[1], abs=1e-6)
        assert changes[0]


def test_a_row_that_left_early_goes_through_all_layers_to_be_written_about(deep_model: Path) -> None:
    source = write_jsonl("rows.jsonl", [{"prompt": text} for text in prompts(300)])
    when = "row >= 240 and row % 4 == 0"
    flags = {**EXITS, "rationale": TOKENS, "rationale_when": when}
    assert score(source, "out.jsonl", model=deep_model, **flags)["exit_code"] == 0
    rows, writer = read_output("out.jsonl"), Writer(deep_model)
    chosen = [number for number, row in enumerate(rows) if row["rationale"] is not None]
    assert chosen == [*range(240, 300, 4)]
    assert any(rows[number]["exit_layer"] is not None for number in chosen)
    for number in chosen:
        row = rows[number]
        wanted = writer(f"{prompts(300)[number]}{row['prediction']} because", TOKENS)  # no token has a space
        assert (row["rationale"], row["rationale_tokens"], row["finish_reason"]) == wanted
        assert row["rationale_source"] == "full"
    assert read_report()["rationales"]["again_prompts"] > 0

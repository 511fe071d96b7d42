"""What a text is written from: the whole prompt, or what compression has kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.score.compression import compressed, lines_of, unrelated
from tests.score.jobs import Reference, read_output, read_report, score, write_jsonl
from tests.score.models import save_model
from tests.score.test_exits import EXITS, prompts
from tests.score.test_exits import deep_model as deep_model
from tests.score.test_rationales import EXACT, Writer, written

TOKENS = 6


def test_a_compressed_row_is_written_about_from_what_was_kept(model: Path, draft: Path, reference: Reference) -> None:
    lengths = [100, 40, 160, 130, 30, 90]
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, lengths)))
    flags: dict[str, Any] = {"model": model, "draft": draft, "rationale": TOKENS}
    assert compressed(source, **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    methods = [row["method"] for row in rows]
    assert methods == ["specprefill" if length > 64 else "full" for length in lengths]
    assert [row["rationale_source"] for row in rows] == methods
    texts = written()
    compressed(source, pack_tokens=64, rationale_when="score >= 0", **flags)
    assert written() == texts
    score(source, "full.parquet", model=model, rationale=TOKENS)
    pairs = zip(written("full.parquet"), texts, methods, strict=True)
    assert all(full == ours for full, ours, method in pairs if method == "full")
    assert written("full.parquet") != texts
    assert read_report()["rationales"]["sources"] == {"specprefill": 4, "full": 2}


def test_a_model_that_drafts_itself_reads_the_whole_prompt_to_write(tmp_path: Path, reference: Reference) -> None:
    deep = save_model(tmp_path / "deep", layers=4, seed=5)
    source = write_jsonl("in.jsonl", lines_of(unrelated(reference, [100, 160, 130])))
    own = {"draft": "self", "self_layer": 2, "query_window": 1, "lookahead": None, "compress_above": 64}
    flags = {name: value for name, value in own.items() if value is not None}
    given: dict[str, Any] = {"model": deep, "keep": 0.4, "keep_last": 16, "select_chunk": 8, "keep_private": False}
    assert score(source, rationale=TOKENS, **given, **flags)["exit_code"] == 0
    rows = read_output("out.parquet")
    assert {row["method"] for row in rows} == {"self-draft"}
    assert {row["rationale_source"] for row in rows} == {"full"}
    assert score(source, "full.parquet", model=deep, rationale=TOKENS)["exit_code"] == 0
    same = [ours == full for ours, full in zip(read_output("out.parquet"), read_output("full.parquet"), strict=True)]
    assert not all(same)  # the scores differ
    for row, full in zip(rows, read_output("full.parquet"), strict=True):
        if row["prediction"] == full["prediction"]:
            assert [row[name] for name in EXACT] == [full[name] for name in EXACT]


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

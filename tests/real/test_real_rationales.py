"""Texts behind real reviews, by a real model: those that transformers writes, and evidence of each sentence."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.review_rationales import WORDS, flags, sentences, template, write_rows
from recipes.real_model import reviews
from tests.jobs.jobs import read_output, score, write_parquet
from tests.real.conftest import FOLDER

ROWS = 3
NEAR = 1e-4  # of the logits: nearer tokens may change places


def test_texts_and_evidence_of_real_reviews(saved: Path) -> None:
    write_rows(reviews("Test", FOLDER), Path("ten.parquet"))
    rows = pq.read_table("ten.parquet").slice(0, ROWS)
    pq.write_table(rows, "rows.parquet")
    Path("prompt.j2").write_text(template())
    given = [str(each) for each in flags(Path("prompt.j2"))]
    options = {
        "template": "prompt.j2", "chat": False, "labels": "positive,negative", "rationale": 48, "evidence": True,
        "rationale_template": given[given.index("--rationale-template") + 1], "dtype": "float32",
    }  # fmt: skip
    assert score("rows.parquet", "out.parquet", model=saved, **options)["exit_code"] == 0
    found = read_output("out.parquet")

    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    edited = []
    for row, own in zip(rows["review"].to_pylist(), found, strict=True):
        prompt = template().replace("{{ review }}", row) + f" {own['prediction']} {WORDS}"
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.inference_mode():
            written = model.generate(ids, max_new_tokens=48, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
        if own["rationale_gap"] > NEAR:
            assert own["rationale"] == tokenizer.decode(written, skip_special_tokens=True).strip()
        assert own["rationale"]
        lines = row.split("\n")
        assert lines == sentences(" ".join(lines))
        edited += ["\n".join([*lines[:at], *lines[at + 1 :]]) for at in range(len(lines))]
    plain = {name: options[name] for name in ("template", "chat", "labels", "dtype")}
    assert (
        score(write_parquet("edited.parquet", review=edited), "edited.out.parquet", model=saved, **plain)["exit_code"]
        == 0
    )
    scores = iter([row["score"] for row in read_output("edited.out.parquet")])
    for row, own in zip(rows["review"].to_pylist(), found, strict=True):
        changes = {each["section"]: each["change"] for each in own["evidence"]}
        for at in range(len(row.split("\n"))):
            assert changes[f"review, line {at + 1}"] == pytest.approx(own["score"] - next(scores), abs=1e-4)

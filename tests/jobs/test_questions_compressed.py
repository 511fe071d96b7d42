"""Several questions about compressed documents: each one's tokens choose, and an audit counts each one's flips."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.answers import likeliest, shares_of
from tests.jobs.compression import ByHand, compressed
from tests.jobs.jobs import Reference, read_output, read_report, write_jsonl
from tests.jobs.test_questions import Eager

FILE = """
document: "{{ text }}"
questions:
  - name: fox
    text: "\\nIs it a fox? Answer:"
    labels: [Yes, No]
  - name: tone
    text: "\\nThe dog and the {{ one }} or {{ other }} was"
    labels: [quick, brown, very quick]
    when: "fox > 0.5"
    swap: [one, other]
"""
LABELS = {"fox": ("Yes", "No"), "tone": ("quick", "brown", "very quick")}
ROWS = 24
AUDIT = 15
TEXTS = [
    f"{at} {'saw a dog, and no fox. ' * (4 + at % 6)}A {'brown ' * (at % 4)}fox {at * 7919 % 1000}"
    for at in range(ROWS)
]
TEXTS[3] = "A fox."  # too short to be compressed


@pytest.fixture
def source() -> Path:
    Path("q.yaml").write_text(FILE)
    return write_jsonl("in.jsonl", [{"text": text, "one": "fox", "other": "yes"} for text in TEXTS])


def test_each_question_has_its_own_tokens_and_its_own_flips(
    source: Path, model: Path, draft: Path, reference: Reference
) -> None:
    options = {"model": model, "draft": draft, "questions": "q.yaml", "compress_per_row": True, "audit": AUDIT}
    assert compressed(source, **options)["exit_code"] == 0
    rows, report = read_output("out.parquet"), read_report()
    by_hand, eager = ByHand(reference, model, draft), Eager(model)
    for row, text in zip(rows, TEXTS, strict=True):
        prompt = f"{text}\nIs it a fox? Answer:"
        ids = reference.ids(prompt)
        kept = by_hand.kept(ids) if len(ids) > 64 else np.arange(len(ids))
        assert row["fox"] == pytest.approx(by_hand.score(ids, kept), abs=1e-5)
        if row["fox.audit_score"] is not None:
            yes, no = (math.exp(eager.logprob(prompt, label)) for label in (" Yes", " No"))
            assert row["fox.audit_score"] == pytest.approx(yes / (yes + no), abs=1e-5)
        assert (row["tone.audit_score"] is not None) == (row["fox.audit_score"] is not None and row["fox"] > 0.5)
        if row["tone.audit_score"] is not None:
            shares = []
            for words, names in (("fox or yes", ["quick", "brown"]), ("yes or fox", ["brown", "quick"])):
                asked = f"{text}\nThe dog and the {words} was"
                found = [math.exp(eager.logprob(asked, f" {name}")) for name in (*names, "very quick")]
                shares.append([each / sum(found) for each in found])
            means = np.mean(shares, axis=0)
            assert row["tone.audit_score"] == pytest.approx(means[0], abs=1e-5)
            assert row["tone.audit_prediction"] == ("quick", "brown", "very quick")[int(means.argmax())]
    assert rows[3]["fox.audit_score"] is None
    assert sum(row["fox.audit_score"] is not None for row in rows) == AUDIT
    assert list(report["audits"]) == ["fox", "tone"]
    for name, audit in report["audits"].items():
        audited = [row for row in rows if row[f"{name}.audit_score"] is not None]
        flips = sum(likeliest(row, name, LABELS[name]) != row[f"{name}.audit_prediction"] for row in audited)
        assert (audit["rows"], audit["flips"]) == (len(audited), flips)
        first = [shares_of(row, name, LABELS[name])[0] for row in audited]
        largest = max(abs(own - row[f"{name}.audit_score"]) for own, row in zip(first, audited, strict=True))
        assert audit["max_difference"] == pytest.approx(largest)
        assert largest > 1e-3, "reading less must change an answer, or nothing is tested"
        assert audit["rows"] > 3
    assert "audit of tone" in Path("out.run.html").read_text()

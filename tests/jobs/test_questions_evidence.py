"""Evidence and texts of several questions, against rows that are edited by hand, and what transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jinja2 import Template

from tests.jobs.answers import likeliest, shares_of
from tests.jobs.jobs import read_output, read_report, score, texts, write_jsonl
from tests.jobs.processes import cut_small_windows
from tests.jobs.test_rationales import Writer

FILE = """
document: "{{ title }}: {{ text }}"
questions:
  - name: fox
    text: "\\nIs it a fox? Answer:"
    labels: [Yes, No]
  - name: tone
    text: "\\nThe {{ animal }} was"
    labels: [very quick, not quick at all, brown]
    when: "fox > 0.5"
"""
ASKED = {
    "fox": ("{{ title }}: {{ text }}\nIs it a fox? Answer:", ["Yes", "No"]),
    "tone": ("{{ title }}: {{ text }}\nThe {{ animal }} was", ["very quick", "not quick at all", "brown"]),
}
ROWS = 30


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    Path("q.yaml").write_text(FILE)
    found = [{"title": f"fox {at % 7}", "text": text, "animal": "dog"} for at, text in enumerate(texts(ROWS))]
    write_jsonl("in.jsonl", found)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"rationale_when": "fox > 0.3", "rationale_limit": 20}])
def test_each_question_has_its_own_evidence(
    rows: list[dict[str, Any]], model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    assert score("in.jsonl", model=model, questions="q.yaml", evidence=True, **options)["exit_code"] == 0
    found = read_output("out.parquet")
    chosen = [at for at, row in enumerate(found) if not options.get("rationale_when") or row["fox"] > 0.3]
    chosen = chosen[: options.get("rationale_limit", ROWS)]
    assert [at for at, row in enumerate(found) if row["fox.evidence"] is not None] == chosen
    assert read_report()["rationales"]["evidence_rows"] == len(chosen)
    sizes = []
    for name, (template, labels) in ASKED.items():
        edited = {
            section: write_jsonl(f"{section}.jsonl", [{**row, section: ""} for row in rows])
            for section in ("title", "text", "animal")
            if f"{{{{ {section} }}}}" in template
        }
        without: dict[str, list[dict[str, Any]]] = {}
        for section, source in edited.items():
            score(source, f"{section}.parquet", model=model, template=template, labels=labels, overwrite=True)
            without[section] = read_output(f"{section}.parquet")
        for at, row in enumerate(found):
            if at not in chosen or row[name] is None:
                assert row[f"{name}.evidence"] is None
                continue
            own = {each["section"]: each["change"] for each in row[f"{name}.evidence"]}
            first = shares_of(row, name, labels)[0]
            wanted = {section: first - each[at]["score"] for section, each in without.items()}
            assert own == pytest.approx(wanted, abs=1e-5)
            sizes += map(abs, own.values())
    assert max(sizes) > 1e-3, "changes must be large enough to tell a wrong one"
    assert any(row["tone.evidence"] for row in found)
    assert any(row["tone.evidence"] is None for row in found)


def test_both_orders_have_no_evidence(
    rows: list[dict[str, Any]], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("q.yaml").write_text(FILE.partition("    when:")[0] + "    swap: [title, text]\n")
    assert score("in.jsonl", model=model, questions="q.yaml", evidence=True)["exit_code"] == 2
    assert "swap" in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"workers": 2, "evidence": True}, {"engine": "hf"}, {"pack_tokens": 128}])
def test_a_text_is_written_behind_the_answer_to_each_question(
    rows: list[dict[str, Any]], model: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small_windows(monkeypatch)
    options = {"rationale": 10, "rationale_when": "fox > 0.2", "rationale_limit": 15, **options}
    assert score("in.jsonl", model=model, questions="q.yaml", **options)["exit_code"] == 0
    found, writer, many = read_output("out.parquet"), Writer(model), dict.fromkeys(ASKED, 0)
    chosen = [at for at, row in enumerate(found) if row["fox"] > 0.2][:15]
    for at, (row, values) in enumerate(zip(found, rows, strict=True)):
        for name, (template, labels) in ASKED.items():
            if at not in chosen or row[name] is None:
                assert row[f"{name}.finish_reason"] is None
                continue
            many[name] += 1
            prompt = Template(template).render(values)
            wanted = writer(f"{prompt} {likeliest(row, name, labels)} because", 10)
            written = (f"{name}.rationale", f"{name}.rationale_tokens", f"{name}.finish_reason")
            assert tuple(row[column] for column in written) == wanted
    assert many["fox"] == 15
    assert 0 < many["tone"] < 15
    assert read_report()["rationales"]["rows"] == 15
    assert ("fox.evidence" in found[0]) == ("evidence" in options)

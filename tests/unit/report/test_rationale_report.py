"""What a run reports of its rationales and evidence: run.json, the table, the metrics and the page."""

from __future__ import annotations

from prefillcli.followup.evidence import WHAT_EVIDENCE_IS
from prefillcli.followup.rationale import NO_REASON, RationaleFollowUp, RationaleUse, WrittenRow
from prefillcli.report.run import RunReport, run_html, run_lines
from prefillcli.rows.output.destination import Manifest
from prefillcli.rows.output.tallies import Counts, RationaleTally, Tallies
from prefillcli.walk.continuations import DecodingReport, DrafterCounts
from tests.unit.report.test_metrics import metrics
from tests.unit.report.test_run_page import HOSTILE, Page

DECODED = DecodingReport(
    texts=6, tokens=300, passes=60, row_passes=150, seconds=2.0, kept_prompts=4, again_prompts=2, prompt_tokens=5000,
    prompt_seconds=0.5, drafters={"lookup": DrafterCounts(100, 400, 150), "draft": DrafterCounts(10, 0, 0)},
)  # fmt: skip
TALLIES = Tallies(
    rationales=RationaleTally(512, {"stop": 7, "length": 2, "memory": 1}, {"full": 9, "specprefill": 1}), evidence=10
)
COUNTS = Counts(total=1000, scored=1000, tallies=TALLIES)


def report_with(use: RationaleUse | None) -> RunReport:
    report = RunReport(status="complete", exit_code=0, output="out.parquet")
    if use is None:  # of a merge
        RationaleFollowUp.merged(report, "", Manifest(None, {}, counts=COUNTS))  # type: ignore[arg-type]
    else:
        use.take(COUNTS)
        report.add(use)
    report.take(COUNTS)
    return report


def test_the_table_says_how_many_why_they_end_and_what_it_took() -> None:
    lines = dict(run_lines(report_with(RationaleUse.of(DECODED, "lookup"))))
    assert lines["rationales"] == "10 rows of 512 tokens; stop 7, length 2, memory 1"
    assert lines["written from"] == "full 9, specprefill 1"
    assert lines["writing"] == "300 tokens in 2.0 s, 150 tokens/s, 0.50 passes a token"
    assert lines["read again"] == "2 prompts, 5,000 tokens in 500 ms; 4 kept from scoring"
    assert lines["speculation"] == "draft 0 of 0 tokens right; lookup 150 of 400 tokens right (37.5%)"
    assert lines["evidence"] == "10 rows without each of their sections"
    assert not {"rationales", "evidence", "writing"} & dict(run_lines(RunReport())).keys()


def test_metrics_have_rows_tokens_seconds_and_acceptance() -> None:
    found = metrics(report_with(RationaleUse.of(DECODED, "lookup")))
    expected = {
        ("prefill_rationale_rows", "reason=stop"): 7,
        ("prefill_rationale_tokens", ""): 512,
        ("prefill_evidence_rows", ""): 10,
        ("prefill_rationale_decode_seconds", ""): 2.0,
        ("prefill_rationale_prefill_seconds", ""): 0.5,
        ("prefill_rationale_passes_per_token", ""): 0.5,
        ("prefill_rationale_acceptance", "drafter=lookup"): 0.375,
    }
    assert expected.items() <= found.items()
    assert ("prefill_rationale_acceptance", "drafter=draft") not in found
    assert not any(name.startswith("prefill_rationale") for name, _ in metrics(RunReport()))


def test_the_page_has_figures_always_and_texts_where_they_are_shown() -> None:
    use = RationaleUse.of(DECODED, "lookup")
    plain = Page(run_html(report_with(use)))
    assert "10 rows of 512 tokens" in plain.text
    assert NO_REASON in plain.text
    assert WHAT_EVIDENCE_IS in plain.text
    use.shown = [
        WrittenRow(
            row=None, id="case-7", score=0.75, prediction="Yes", rationale=f"the text says {HOSTILE}",
            finish_reason="stop", source="full",
            evidence=[
                {"section": f"history {HOSTILE}", "change": 0.5}, {"section": "b", "change": -0.1}
            ],
        )
    ]  # fmt: skip
    page = Page(run_html(report_with(use)))
    assert "case-7: Yes, score 0.7500" in page.text
    assert "the text says <script>alert(1)</script>" in page.text
    assert "+0.5000" in page.text
    assert "-0.1000" in page.text
    assert not [name for name, _ in page.elements if name in ("script", "img")]
    assert "\x1b" not in page.text
    assert "\u202e" not in page.text

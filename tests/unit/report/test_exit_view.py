"""What exits have done, in the table, the metrics and on the page of a run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from scipy.stats import binomtest

from prefillcli.reading.exits.findings import GainPoint, JudgedLabel
from prefillcli.reading.exits.report import ExitUse, QuestionExits, UsedExit, exit_lines, gain_plot, state_of
from prefillcli.report.run import RunReport, run_html, run_lines, to_json
from prefillcli.rows.output.tallies import AuditedExits, Counts, LayerRows
from tests.unit.report.test_metrics import metrics
from tests.unit.report.test_run_page import HOSTILE, Page, assert_fetches_nothing

COUNTS = Counts(
    total=1010,
    scored=1000,
    errors=10,
    audited_exits={"answer": {"yes": AuditedExits(40, 30, 2), "no": AuditedExits(160, 140, 0)}},
)
COUNTS.tallies.exit_layers = {
    "answer": {
        "full": LayerRows(100, 20_000),
        "22": LayerRows(300, 40_000),
        "9": LayerRows(600, 60_000),
    }
}


def use_of(**changes: object) -> ExitUse:
    own = QuestionExits(
        status="learnt",
        classes=[
            JudgedLabel(label="yes", fitted=350, judged=350, flips=0, bound=0.0085, rows_needed=299),
            JudgedLabel(label="no", fitted=350, judged=150, flips=0, bound=0.0198, rows_needed=299),
        ],
        layers=[
            UsedExit(layer=9, probe="ridge", peek=True, thresholds={"yes": 1.5, "no": None}, expected=0.55),
            UsedExit(layer=22, probe="lens", peek=False, thresholds={"yes": 0.25, "no": 2.0}, expected=0.35),
        ],
        predicted_gain=1.61,
        curve=[
            GainPoint(leaving=0.0, flip_rate=0.0, gain=1.0),
            GainPoint(leaving=0.9, flip_rate=0.02, gain=1.5),
            GainPoint(leaving=0.5, flip_rate=0.004, gain=1.25),
        ],
    )
    own = own.model_copy(update={name: value for name, value in changes.items() if name in QuestionExits.model_fields})
    given = {
        "max_flips": 0.01,
        "model_layers": 30,
        "rows_in_full": 1400,
        "layers_saved": 0.4321,
        "layers_gain": 1.52,
        "measured_gain": 1.48,
        "kept_alive": {"1": 300.0, "2": 100.0, "3-5": 0.0, ">10": 600.0},
    }
    given |= {name: value for name, value in changes.items() if name not in QuestionExits.model_fields}
    return ExitUse.model_validate(state_of({"answer": own}) | {"questions": {"answer": own}} | given)


def bare(own: QuestionExits, **more: Any) -> ExitUse:
    questions = {"answer": own}
    return ExitUse(**state_of(questions), max_flips=0.01, model_layers=4, questions=questions, **more)


def report_with(use: ExitUse, counts: Counts = COUNTS) -> RunReport:
    report = RunReport(status="complete", exit_code=0, output="out.parquet")
    report.add(use)
    use.take(counts)
    report.take(counts)
    return report


def test_the_report_has_rows_by_layer_and_exact_intervals_of_the_audit() -> None:
    use = ExitUse.from_report(report_with(use_of()))
    assert use is not None
    assert [(name, each.rows, each.prompt_tokens) for name, each in use.by_layer.items()] == [
        ("9", 600, 60_000), ("22", 300, 40_000), ("full", 100, 20_000),
    ]  # fmt: skip
    (own,) = use.questions.values()
    assert [(each.rows, each.share) for each in own.layers] == [(600, 0.6), (300, 0.3)]
    for each in own.audited:
        found = COUNTS.audited_exits["answer"][each.label]
        exact = binomtest(found.flips, found.rows).proportion_ci(0.95, "exact")
        assert each.interval == pytest.approx((exact.low, exact.high))
        one_sided = binomtest(found.flips, found.rows, alternative="less").proportion_ci(0.95, "exact")
        assert each.bound == pytest.approx(one_sided.high)
        assert (each.rows, each.left, each.flips) == found
    assert [each.label for each in own.audited] == ["no", "yes"]


def test_the_table_says_who_left_where_and_what_it_brought() -> None:
    lines = dict(run_lines(report_with(use_of())))
    assert lines["exits"] == (
        "learnt from 1,400 rows in full; of the rows of each label at most 1 % flip (95 % confidence)"
    )
    assert lines["exits, judged"] == ("yes 0 flips of 350, at most 0.85 %; no 150 rows, too few: it takes 299")
    assert lines["exit layers"] == (
        "of 30: after 9 60.0%, 55.0% expected; after 22 30.0%, 35.0% expected; to the end 10.0%"
    )
    assert lines["exit gain"] == (
        "43.2% of the tokens' layers spared, 1.48x measured, 1.52x by these layers, 1.61x predicted for "
        "tokens that no two rows share"
    )
    low, high = binomtest(2, 40).proportion_ci(0.95, "exact")
    assert f"yes 2 flips of 40 ({100 * low:.1f}-{100 * high:.1f} %), 30 would leave" in lines["exits, audited"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"status": "none", "reason": "too few rows of\x1b[31m yes"}, "none: too few rows of␛[31m yes"),
        (
            {"status": "reused", "reused": True, "rows_in_full": 300},
            "from --exit-profile, checked on 300 rows in full; of the rows that it was learnt from at most 1 %",
        ),
        ({"status": "stopped", "reason": "9 of 90 flip", "stopped_window": 1234}, "stopped at window 1,234: 9 of 90"),
        ({"status": "stopped", "reason": "9 of 90 flip"}, "stopped: 9 of 90 flip; learnt from 1,400 rows in full"),
    ],
)
def test_the_table_says_why_there_are_no_exits_or_whose_they_are(changes: dict[str, object], said: str) -> None:
    assert dict(run_lines(report_with(use_of(**changes))))["exits"].startswith(said)


def test_rows_to_learn_from_could_not_leave() -> None:
    report = report_with(use_of(learnt_rows=60))
    use = ExitUse.from_report(report)
    assert use is not None
    assert (use.rows, use.free_rows) == (1000, 940)
    assert [each.share for each in use.questions["answer"].layers] == pytest.approx([600 / 940, 300 / 940])
    assert dict(run_lines(report))["exit layers"] == (
        "of 30: after 9 63.8%, 55.0% expected; after 22 31.9%, 35.0% expected; to the end 4.3%; "
        "without 60 rows to learn from"
    )
    text = Page(run_html(report)).text
    assert "100 (10.0%), 20k tokens; 60 rows to learn from" in text
    assert "95.7%" in text


def test_where_nothing_is_proven_no_bound_is_shown() -> None:
    refused = use_of(
        status="none", reason="no exit pays", layers=[], layers_saved=0.0, layers_gain=None, measured_gain=None,
        classes=[JudgedLabel(label="no", fitted=350, judged=578, flips=0, bound=1.0, rows_needed=299)],
    )  # fmt: skip
    none_left = Counts(total=9, scored=9, audited_exits={"answer": {"no": AuditedExits(5, 0, 0)}})
    report = report_with(refused, none_left)
    lines = dict(run_lines(report))
    assert lines["exits, judged"] == "no 578 rows, nothing proven"
    assert not {"exit layers", "exit gain", "exits, audited"} & lines.keys()
    assert "nothing proven" in Page(run_html(report)).text


def test_whose_rows_the_bound_is_of_is_told() -> None:
    own, other = (Page(run_html(report_with(use_of(reused=reused)))).text for reused in (False, True))
    assert "drawn from the whole job" in own
    assert "drawn from the whole job" not in other
    assert "of the job that made the exit profile" in other


def test_without_exits_nothing_speaks_of_them() -> None:
    report = RunReport()
    report.take(Counts(total=2, scored=2))
    assert not [name for name, _ in run_lines(report) if name.startswith("exit")]
    assert "Early exit" not in run_html(report)
    assert not [name for name, _ in metrics(report) if name.startswith("prefill_exit_")]
    assert "exits" not in report.summary()


def test_a_run_whose_exits_were_refused_shows_the_reason_and_no_empty_table() -> None:
    refused = bare(QuestionExits(status="none", reason="no label had enough rows"))
    report = report_with(refused, Counts(total=3, scored=3))
    text = Page(run_html(report)).text
    assert "none: no label had enough rows" in text
    for missing in ("Rows by layer", "Exit layers", "Audited rows", "kept alive", "Gain over flips"):
        assert missing not in text
    assert report.summary()["exits"] == {"status": "none", "left": 0, "layers_saved": None}
    assert metrics(report)["prefill_exit_active", ""] == 0


def test_the_page_shows_all_of_it_and_hostile_labels_as_text() -> None:
    use = use_of(layers=[
        UsedExit(layer=9, probe="ridge", peek=True, thresholds={HOSTILE: 1.5, "no": None}, expected=0.55),
    ])  # fmt: skip
    own = use.questions["answer"]
    own.classes[0] = own.classes[0].model_copy(update={"label": HOSTILE})
    html = run_html(report_with(use))
    assert_fetches_nothing(html)
    assert "\u202e" not in html
    text = Page(html).text
    for known in (
        "after layer 9", "to the end", "600 (60.0%)", "Exit layers", "Learning rows", "takes 299 rows", "0.85%",
        "Audited rows", "left early", "90.0%", "Shared beginnings kept alive", "1 row", "300 (30.0%)", "600 (60.0%)",
        "Gain over flips", "stays", "void",
    ):  # fmt: skip
        assert known in text, known


def test_the_curve_goes_through_the_points_of_the_judged_rows() -> None:
    use = use_of().questions["answer"]
    plot = gain_plot(use, 0.01)
    assert plot is not None
    x, y = [float(tick.text.split()[0]) for tick in plot.x], [float(tick.text.rstrip("x")) for tick in plot.y]
    points = [tuple(map(float, point.split(","))) for point in plot.lines[0].split()]
    drawn = [(across / 100 * x[-1] / 100, y[0] + (1 - up / 100) * (y[-1] - y[0])) for across, up in points]
    wanted = sorted((each.flip_rate, each.gain) for each in use.curve)
    for (flips, gain), (own_flips, own_gain) in zip(drawn, wanted, strict=True):
        assert flips == pytest.approx(own_flips, abs=1e-4)
        assert gain == pytest.approx(own_gain, abs=1e-3)
    assert float(plot.lines[1].split(",")[0]) / 100 * x[-1] == pytest.approx(1.0, abs=0.01)
    assert gain_plot(use.model_copy(update={"curve": use.curve[:1]}), 0.01) is None


def test_the_metrics_and_the_last_line_have_the_numbers_of_the_report() -> None:
    report = report_with(use_of())
    found = metrics(report)
    assert found["prefill_exit_rows", "layer=9"] == 600
    assert found["prefill_exit_rows", "layer=full"] == 100
    assert found["prefill_exit_layers_saved", ""] == 0.4321
    assert found["prefill_exit_audited_rows", "label=yes"] == 40
    assert found["prefill_exit_audited_flips", "label=yes"] == 2
    assert found["prefill_exit_active", ""] == 1
    assert report.summary()["exits"] == {"status": "learnt", "left": 900, "layers_saved": 0.4321}
    assert json.loads(to_json(report))["exits"]["by_layer"]["22"] == {"rows": 300, "prompt_tokens": 40_000}


def test_a_bound_for_all_rows_together_is_said_to_be_one() -> None:
    use = bare(QuestionExits(status="learnt"), flips_of="all", rows_in_full=600)
    assert dict(exit_lines(use))["exits"] == (
        "learnt from 600 rows in full; of all rows at most 1 % flip (95 % confidence)"
    )
    found = report_with(use).sections()[0]
    assert found is not None
    assert "The bound is of all rows together" in found.parts[0].note

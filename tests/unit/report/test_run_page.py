"""The page of a run: it shows what is known, runs and fetches nothing, and reads on any screen."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from prefillcli.reading.compress.compress import KeepRate
from prefillcli.report.run import FailedRow, Histogram, MemoryTrace, RunReport, run_html, write_files
from prefillcli.report.section import OTHERS, SERIES, length_plot, memory_plot, score_plot
from prefillcli.rows.output.tallies import Counts
from prefillcli.stats.flips import audit_of
from tests.unit.report.browser import CHROMIUM, browser

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202egnp.exe\x00\"'><img src=http://evil/x onerror=alert(2)>&amp;"
VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Elements with their attributes, and text; raises if tags are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def output_of(rows: int, *, failed: int = 0, label: str = "Yes", text: str = "the prompt is null") -> pa.Table:
    """Output rows with ids, the first ones errors."""
    rng = np.random.default_rng(0)
    scores = rng.beta(0.5, 0.6, rows)
    good = np.arange(rows) >= failed

    def of_scored(values: list) -> list:
        return [value if fine else None for value, fine in zip(values, good.tolist(), strict=True)]

    return pa.table(
        {
            "__row": pa.array(range(rows)),
            "id": [f"{text if at < failed else ''} {at}" for at in range(rows)],
            "score": pa.array(of_scored(scores.tolist()), pa.float64()),
            "prediction": pa.array(of_scored([label if score >= 0.5 else "No" for score in scores]), pa.string()),
            "prompt_tokens": pa.array(of_scored(rng.lognormal(6, 1, rows).astype(int).tolist()), pa.int64()),
            "computed_tokens": pa.array(of_scored([100] * rows), pa.int64()),
            "seconds": pa.array(of_scored(rng.exponential(0.02, rows).tolist()), pa.float64()),
            "method": pa.array(of_scored(["specprefill"] * (rows - 3) + ["fallback:draft_memory"] * 3), pa.string()),
            "truncated": pa.array([False] * rows),
            "error": pa.array([None if fine else "null_prompt" for fine in good.tolist()], pa.string()),
            "error_detail": pa.array([None if fine else text for fine in good.tolist()], pa.string()),
        }
    )


def report_of(rows: pa.Table) -> RunReport:
    """A run that was slow enough to have a trace, with an audit."""
    counts = Counts()
    counts.add_rows(rows, id_name="id")
    report = RunReport(status="complete", exit_code=0, started="2025-01-02T03:04:05+00:00", output="out.parquet")
    report.take(counts)
    report.add(KeepRate(0.2))
    report.rows_per_second = 123.4
    tokens = report.tokens
    tokens.prompt, tokens.kept, tokens.unique, tokens.computed, tokens.draft, tokens.audit = 900, 300, 200, 220, 90, 20
    seconds = report.seconds
    seconds.total, seconds.load, seconds.model, seconds.tokenize = 20.0, 3.0, 15.0, 1.0
    report.memory_trace = MemoryTrace.of([(at / 5, (200 + at) << 20, at << 22) for at in range(100)])
    report.audits["answer"] = audit_of([(0.2, 0.7, True), (0.4, 0.3, False), (0.9, 0.8, True)] * 10)
    report.settings = {"model": "some/model", "labels": "Yes,No", "limit": None, "keep_columns": ["a", "b"]}
    report.versions, report.fingerprint = {"torch": "2.8"}, {"input": "abc"}
    return report


def assert_fetches_nothing(html: str) -> None:
    for tag, attributes in Page(html).elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "form", "base")
        assert not attributes.keys() & {"src", "href", "srcset", "xlink:href"}
        assert not [name for name in attributes if name.startswith("on")]
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_everything_of_a_run_is_shown() -> None:
    report = report_of(output_of(500, failed=30))
    html = run_html(report)
    assert_fetches_nothing(html)
    assert "http" not in html.replace("http-equiv", "")
    text = Page(html).text
    for known in (
        "complete", "470", "30", f"{report.mean_score:.4f}", "20.0 s", "123", "33.3%", "null_prompt", "some/model",
        "20 of 30", "specprefill", "fallback:draft_memory", "10 flips", "host", "device", "2025-01-02 03:04:05 UTC",
        "tokenise", "abc", "a, b",
    ):  # fmt: skip
        assert known in text, known
    assert len(report.failed) == len(report.slowest) == 20


def test_a_run_of_which_nothing_is_known_has_a_page() -> None:
    html = run_html(RunReport(error="no such file: in.parquet", exit_code=2))
    assert_fetches_nothing(html)
    text = Page(html).text
    assert "no such file: in.parquet" in text
    assert "failed, exit code 2" in text
    for missing in ("Scores", "Tokens of a prompt", "Audit", "Slowest rows", "Memory", "nan", "None"):
        assert missing not in text


def test_nothing_in_the_data_is_markup_or_hides() -> None:
    report = report_of(output_of(50, failed=5, label=HOSTILE, text=HOSTILE))
    report.error, report.output, report.settings = HOSTILE, HOSTILE, {"template": HOSTILE}
    report.slowest[0].id, report.slowest[0].method = HOSTILE, HOSTILE
    html = run_html(report)
    assert_fetches_nothing(html)
    for hidden in "\x1b\u202e\x00":
        assert hidden not in html
    text = Page(html).text
    assert text.count("<script>alert(1)</script>␛[31m⟨U+202E⟩gnp.exe␀") >= 10


def test_a_large_run_has_a_small_page() -> None:
    labels = [f"label {at}" for at in range(30)]
    report = report_of(output_of(16_000, failed=2000, text="x" * 5000))
    report.histograms.score.counts = {label: [7] * 50 for label in labels}
    report.memory_trace = MemoryTrace.of([(at, at << 30, at << 30) for at in range(500)])
    assert len(run_html(report)) < 250_000
    assert len(score_plot(report.histograms.score).series) == SERIES
    assert score_plot(report.histograms.score).series[-1] == (OTHERS, f"{(30 - SERIES + 1) * 350:,}")


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
@pytest.mark.parametrize("longest", [1, 2, 30, 500, 10**6])
def test_bins_of_lengths_lose_no_row_when_they_are_joined(rows: int, longest: int) -> None:
    lengths = np.random.default_rng(rows).integers(1, longest + 1, rows)
    table = output_of(max(rows, 3)).slice(0, rows)
    at = table.column_names.index("prompt_tokens")
    counts = Counts()
    counts.add_rows(table.set_column(at, "prompt_tokens", pa.array(lengths)), id_name="id")
    report = RunReport()
    report.take(counts)
    plot = length_plot(report.histograms.prompt_tokens)
    assert sum(int(box.title.rpartition(" ")[2].replace(",", "")) for box in plot.boxes) == rows
    assert all(box.x >= 0 and box.x + box.width <= 100.01 and box.y >= -1 for box in plot.boxes)
    assert 2 <= len(plot.x) <= 7
    assert all(0 <= tick.at <= 100.01 for tick in [*plot.x, *plot.y])


def test_a_chart_of_no_time_is_left_out() -> None:
    assert memory_plot(MemoryTrace()) is None
    assert memory_plot(MemoryTrace.of([(0.1, 5, 0)])) is None
    assert memory_plot(MemoryTrace.of([(0.1, 0, 0), (0.2, 0, 0)])) is None


def test_the_bars_of_a_histogram_stand_where_the_scores_are() -> None:
    counts = [0] * 50
    counts[25] = 4
    plot = score_plot(Histogram(edges=[at / 50 for at in range(51)], counts={"Yes": counts}))
    (box,) = plot.boxes
    assert box.x == pytest.approx(50)
    assert box.y == pytest.approx(0)
    assert box.title == "0.50 to 0.52: Yes 4"


def test_a_page_that_cannot_be_made_leaves_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("prefillcli.report.run.run_html", broken)
    report = RunReport(status="complete", exit_code=0, report=str(tmp_path / "run.json"))
    write_files(report, str(tmp_path))  # a folder cannot be written as a file either
    assert report.exit_code == 0
    assert '"page": null' in (tmp_path / "run.json").read_text()
    warnings = capsys.readouterr().err
    assert "cannot write the page: ZeroDivisionError" in warnings
    assert "cannot write the metrics" in warnings


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_page_fits_every_screen_and_complains_of_nothing(tmp_path: Path) -> None:
    report = report_of(output_of(800, failed=25, text=HOSTILE))
    report.failed.append(FailedRow(row=7, id="x" * 200, code="chat_error", detail="y" * 200))
    report.settings["template"] = "z" * 2000
    report.error = "w" * 300
    path = tmp_path / "run.html"
    path.write_text(run_html(report))
    with browser(tmp_path / "profile") as tab:
        for width in (390, 1200):
            colours = set()
            for dark in (False, True):
                tab.open(path, width=width, dark=dark)
                tab.evaluate("document.querySelector('details').open = true")
                assert tab.evaluate("document.documentElement.scrollWidth") <= width
                assert tab.evaluate("document.querySelectorAll('svg rect').length") > 20
                assert tab.complaints() == []
                assert tab.requests() == [path.as_uri()]
                colours.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert len(colours) == 2, "light and dark differ"


def test_colours_are_named_once_for_each_scheme() -> None:
    html = run_html(RunReport())
    light, dark = re.findall(r":root \{(.*?)\}", html, re.DOTALL)
    assert set(re.findall(r"--\w+(?=:)", light)) == set(re.findall(r"--\w+(?=:)", dark))

"""A run of `prefill score` as one HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prefillcli.compress.fallbacks import is_fallback
from prefillcli.data.rows import FULL, ErrorCode
from prefillcli.report.charts import Bar, bars, length_plot, memory_plot, score_plot
from prefillcli.report.rationale import rationale_lines, rationale_view
from prefillcli.report.rendering import (
    mebibytes,
    minutes_and_seconds,
    pairs_table,
    render_page,
    stderr_console,
    three_digits,
    visible,
)
from prefillcli.report.run import Histogram, RunReport
from prefillcli.stats.audit import audit_lines

_BESIDE = ("read", "render", "tokenize")
_PHASES = {
    "load": "load the models",
    "waiting": "wait for prompts",
    "plan": "plan",
    "exits": "learn the exits",
    "draft": "draft",
    "model": "model",
    "write": "write",
    "evaluate": "evaluate",
    "read": "read",
    "render": "render",
    "tokenize": "tokenise",
}
_TOKENS = {
    "prompt": "in prompts",
    "kept": "kept",
    "unique": "unique",
    "computed": "computed",
    "draft": "by the draft",
    "audit": "for the audit",
}


def run_html(report: RunReport) -> str:
    """The page of a run."""
    histograms = report.histograms
    return render_page(
        "prefillcli.report",
        "run.html.j2",
        {"visible": lambda text: visible(str(text), line=True), "visible_lines": visible},
        report=report,
        verdict=_verdict(report),
        started=report.started.replace("T", " ").replace("+00:00", " UTC"),
        tiles=_tiles(report),
        scores=score_plot(histograms.score) if histograms.score.counts else None,
        results=_results(report),
        lengths=length_plot(histograms.prompt_tokens) if histograms.prompt_tokens.counts else None,
        length_note=_length_note(report),
        phases=_phases(report),
        time_note=_time_note(report),
        memory=memory_plot(report.memory_trace),
        tokens=_tokens(report),
        methods=_methods(report),
        flips=_flips(report),
        audit=audit_lines(report.audit) if report.audit is not None else [],
        rationales=rationale_view(report.rationales),
        sections=[each for each in report.sections() if each.title],
        trials=(report.keep_auto or {}).get("trials", ()),
        settings={name: _text(value) for name, value in report.settings.items() if value not in (None, [], False, "")},
    )


def _verdict(report: RunReport) -> tuple[str, str]:
    """How the run ended, and how good that is: a class of the page's style."""
    if report.status == "complete" and report.exit_code == 0:
        return "complete", "good"
    if report.status == "complete":
        return f"complete, exit code {report.exit_code}", "poor"
    return f"{report.status}, exit code {report.exit_code}", "bad" if report.status == "failed" else "poor"


def _tiles(report: RunReport) -> list[tuple[str, str]]:
    rows = report.rows
    tiles = [("scored", f"{rows.scored:,}"), ("errors", f"{rows.errors:,}")]
    if rows.skipped:
        tiles.append(("skipped", f"{rows.skipped:,}"))
    if report.mean_score is not None:
        tiles.append(("mean score", f"{report.mean_score:.4f}"))
    if report.rows_per_second:
        tiles.append(("rows/s", three_digits(report.rows_per_second)))
    if report.tokens_per_second:
        tiles.append(("tokens/s", f"{report.tokens_per_second:,.0f}"))
    tiles.append(("wall time", minutes_and_seconds(report.seconds.total)))
    for section in report.sections():
        tiles += section.tiles
    if report.audit is not None and report.audit.flip_rate is not None:
        tiles.append(("audited flips", f"{report.audit.flip_rate:.1%}"))
    return tiles


def _results(report: RunReport) -> list[Bar]:
    """What became of the rows: each prediction, each error."""
    values = {}
    if report.histograms.score.counts:
        plot = score_plot(report.histograms.score)
        sums = {name: sum(bins) for name, bins in report.histograms.score.counts.items()}
        rest = report.rows.scored - sum(sums.get(name, 0) for name, _ in plot.series)
        values = {name: sums.get(name, rest) for name, _ in plot.series}
    kinds = {name: f"s{at}" for at, name in enumerate(values)}
    failed = dict(sorted(report.rows.errors_by_code.items(), key=lambda pair: -pair[1]))
    if report.rows.skipped:
        failed[ErrorCode.SKIPPED_TOO_LONG] = report.rows.skipped
    return [
        *_counted(values, report.rows.total, kinds),
        *_counted(failed, report.rows.total, dict.fromkeys(failed, "alarm")),
    ]


def _counted(values: dict[str, int], total: int, kinds: dict[str, str]) -> list[Bar]:
    return [
        Bar(name, 100 * value / max(total, 1), f"{value:,} ({value / max(total, 1):.1%})", kinds[name])
        for name, value in values.items()
    ]


def _length_note(report: RunReport) -> str:
    histogram = report.histograms.prompt_tokens
    too_long = {
        ErrorCode.PROMPT_TOO_LONG: report.rows.errors_by_code.get(ErrorCode.PROMPT_TOO_LONG, 0),
        ErrorCode.SKIPPED_TOO_LONG: report.rows.skipped,
    }
    notes = []
    if histogram.counts:
        low, high = _quartile(histogram, 0.5)
        notes.append(
            f"Half of the prompts have fewer than about {(low + high) / 2:,.0f} tokens. The scale is logarithmic."
        )
    notes += [f"{number:,} rows are not in it: {code.meaning}." for code, number in too_long.items() if number]
    return " ".join(notes)


def _quartile(histogram: Histogram, share: float) -> tuple[float, float]:
    """The edges of the bin in which this share of the rows is reached."""
    totals = [sum(column) for column in zip(*histogram.counts.values(), strict=True)]
    below, wanted = 0, share * sum(totals)
    for at, number in enumerate(totals):
        below += number
        if below >= wanted:
            return histogram.edges[at], histogram.edges[at + 1]
    return histogram.edges[-2], histogram.edges[-1]


def _phases(report: RunReport) -> list[Bar]:
    seconds = report.seconds.model_dump()
    total = seconds.pop("total")
    rest = total - sum(value for name, value in seconds.items() if name not in _BESIDE)
    values = {text: seconds[name] for name, text in _PHASES.items() if name not in _BESIDE}
    values["other"] = max(rest, 0.0)
    values |= {_PHASES[name]: seconds[name] for name in _BESIDE}
    values = {name: value for name, value in values.items() if value >= 0.0005}
    kinds = {_PHASES[name]: "s6" for name in _BESIDE} | {"other": "s7"}
    texts = {name: f"{minutes_and_seconds(value)} ({value / max(total, 1e-9):.0%})" for name, value in values.items()}
    return bars(values, texts, kinds)


def _time_note(report: RunReport) -> str:
    note = (
        "Reading, rendering and tokenising go on beside the model, a window ahead of it. Other: start, fingerprints, "
    )
    note += "and what lies between."
    if report.predicted_seconds is not None:
        note += f" The profile predicted {minutes_and_seconds(report.predicted_seconds)} for the model."
    return note


def _tokens(report: RunReport) -> list[Bar]:
    tokens = report.tokens.model_dump()
    if not tokens["prompt"]:
        return []
    values = {text: tokens[name] for name, text in _TOKENS.items() if tokens[name]}
    if report.keep is None:
        values.pop(_TOKENS["kept"], None)
    texts = {name: f"{value:,} ({value / tokens['prompt']:.1%})" for name, value in values.items()}
    kinds = {_TOKENS["draft"]: "s1", _TOKENS["audit"]: "s3"}
    return bars(values, texts, kinds)


def _methods(report: RunReport) -> list[Bar]:
    if not report.methods or (report.keep is None and set(report.methods) == {"full"}):
        return []
    order = sorted(report.methods, key=lambda name: (is_fallback(name), -report.methods[name]))
    kinds = {name: "alarm" if is_fallback(name) else "s0" if name == FULL else "s2" for name in order}
    return _counted({name: report.methods[name] for name in order}, report.rows.scored, kinds)


def _flips(report: RunReport) -> dict[str, float]:
    """The audit's flip rate and its interval, in percent of twice the upper bound."""
    audit = report.audit
    if audit is None or audit.flip_rate is None or audit.interval is None:
        return {}
    low, high = audit.interval
    scale = 100 / min(2 * high, 1.0)
    return {"rate": scale * audit.flip_rate, "low": scale * low, "width": scale * (high - low), "end": 100 / scale}


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


# A run of `prefill score` in the terminal.


def print_table(report: RunReport) -> None:
    """The run in a few lines, on stderr."""
    stderr_console().print(pairs_table(run_lines(report)))


def run_lines(report: RunReport) -> Iterator[tuple[str, str]]:
    """The lines of the table: a name and a text each."""
    rows, tokens, seconds = report.rows, report.tokens, report.seconds
    counts = f"{rows.scored:,} scored of {rows.total:,}"
    if rows.errors:
        codes = ", ".join(f"{code} {count:,}" for code, count in sorted(rows.errors_by_code.items()))
        counts += f", {rows.errors:,} errors ({codes})"
    if rows.skipped:
        counts += f", {rows.skipped:,} skipped"
    yield "rows", counts
    if report.mean_score is not None:
        yield "mean score", f"{report.mean_score:.4f}"
    if report.mean_label_mass is not None:
        yield "label mass", f"{report.mean_label_mass:.4f} on average"
    for section in report.sections():
        yield from section.lines
    if tokens.prompt:
        own = tokens.computed - tokens.audit - tokens.follow_up
        yield (
            "tokens",
            f"{tokens.prompt:,} in prompts, {tokens.computed:,} computed "
            f"({tokens.kept / max(own, 1):.2f}x shared), {tokens.unique:,} unique",
        )
    if report.keep is not None and tokens.prompt:
        yield (
            "compression",
            f"{tokens.kept:,} tokens kept ({tokens.kept / tokens.prompt:.1%}, keep rate {report.keep:g}), "
            f"{tokens.draft:,} computed by the draft",
        )
    if report.audit is not None:
        yield from audit_lines(report.audit)
    if report.rationales is not None:
        yield from rationale_lines(report.rationales)
    phases = {k: v for k, v in seconds.model_dump().items() if k != "total" and v >= 0.05}
    detail = ", ".join(f"{name} {value:.1f}" for name, value in phases.items())
    yield "seconds", f"{seconds.total:.1f}" + (f" ({detail})" if detail else "")
    if report.predicted_seconds is not None:
        yield "model", f"{seconds.model:.1f} seconds, {report.predicted_seconds:.1f} predicted by the profile"
    yield "speed", f"{report.rows_per_second:,.1f} rows/s, {report.tokens_per_second:,.0f} prompt tokens/s"
    peak = report.peak_memory_bytes
    yield (
        "peak memory",
        f"{mebibytes(peak.host)} MiB host" + (f", {mebibytes(peak.device)} MiB device" if peak.device else ""),
    )
    if report.weights is not None and report.weights.mode == "stream":
        used = report.weights
        yield (
            "weights",
            f"{mebibytes(used.bytes)} MiB streamed in {mebibytes(used.memory_bytes)} MiB; "
            f"{mebibytes(used.bytes_read)} MiB read, {used.seconds_waited:.1f} seconds waited for them",
        )
    yield "output", report.output or "none"
    yield "report", ", ".join(filter(None, (report.report, report.page))) or "none"

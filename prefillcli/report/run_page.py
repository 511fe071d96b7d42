"""A run of `prefill score` as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prefillcli.data.output.store import put_text
from prefillcli.data.rows import FULL, ErrorCode, is_fallback
from prefillcli.errors import NOTHING_TO_DO, Interrupted, PrefillError, ResourceError
from prefillcli.redaction import shown_report, without_secrets
from prefillcli.report.rationale import RationaleUse, rationale_lines, rationale_view
from prefillcli.report.rendering import (
    mebibytes,
    minutes_and_seconds,
    page_of,
    pairs_table,
    render_page,
    stderr_console,
    three_digits,
    visible,
)
from prefillcli.report.run import Histogram, RunReport, to_json
from prefillcli.report.section import Bar, bars, length_plot, memory_plot, score_plot
from prefillcli.runtime import log
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


# A run as metrics in Prometheus' text format, for the textfile collector of node_exporter.
#
# The format: https://prometheus.io/docs/instrumenting/exposition_formats/. All are gauges, about the last run.


_Sample = tuple[dict[str, str], float]


def to_metrics(report: RunReport, now: float) -> str:
    """All metrics of a run that ended at `now`, in seconds since 1970."""
    return "".join(line for name, text, samples in _metrics(report, now) for line in _family(name, text, samples))


def _metrics(report: RunReport, now: float) -> Iterator[tuple[str, str, list[_Sample]]]:
    rows = report.rows
    success = float(report.exit_code in (0, NOTHING_TO_DO))
    yield "run_success", "1 if the last run was done or had nothing to do, else 0.", _one(success)
    yield "run_exit_code", "Exit code of the last run.", _one(report.exit_code)
    results = {"scored": rows.scored, "error": rows.errors, "skipped": rows.skipped}
    yield "rows_total", "Rows of the output by result.", _by("result", results)
    yield "rows_errors", "Error rows of the output by code.", _by("code", rows.errors_by_code)
    yield "tokens_total", "Tokens of the last run by kind.", _by("kind", report.tokens.model_dump())
    phases = report.seconds.model_dump(exclude={"total"})
    yield "phase_seconds", "Wall time of the last run by phase.", _by("phase", phases)
    yield "run_seconds", "Wall time of the last run.", _one(report.seconds.total)
    yield "rows_per_second", "Rows scored per second by the last run.", _one(report.rows_per_second)
    peak = report.peak_memory_bytes.model_dump()
    yield "peak_memory_bytes", "Largest memory used by the last run.", _by("where", peak)
    if report.mean_score is not None:
        yield "score_mean", "Mean score of the output.", _one(report.mean_score)
    if report.mean_label_mass is not None:
        yield "label_mass_mean", "Mean label mass of the output.", _one(report.mean_label_mass)
    for section in report.sections():
        yield from section.metrics
    if report.audit is not None and report.audit.flip_rate is not None:
        yield (
            "audit_flip_rate",
            "Share of audited rows that compression or early exits flip.",
            _one(report.audit.flip_rate),
        )
    if report.rationales is not None:
        yield from _rationale_metrics(report.rationales)
    yield "last_run_timestamp_seconds", "When the last run ended, in Unix time.", _one(now)


def _rationale_metrics(use: RationaleUse) -> Iterator[tuple[str, str, list[_Sample]]]:
    yield "rationale_rows", "Rows of the output with a rationale by why it ends.", _by("reason", use.finish_reasons)
    yield "rationale_tokens", "Tokens of the output's rationales.", _one(use.tokens)
    yield "evidence_rows", "Rows of the output whose sections were weighed.", _one(use.evidence_rows)
    yield "rationale_decode_seconds", "Seconds in which the last run wrote.", _one(use.decode_seconds)
    yield "rationale_prefill_seconds", "Seconds in which it read prompts once more.", _one(use.prefill_seconds)
    if use.passes_per_token is not None:
        yield "rationale_passes_per_token", "Passes of the model for one token.", _one(use.passes_per_token)
    accepted = {name: each.acceptance for name, each in use.drafters.items() if each.acceptance is not None}
    yield "rationale_acceptance", "Share of the tokens guessed ahead that were right.", _by("drafter", accepted)


def _one(value: float) -> list[_Sample]:
    return [({}, value)]


def _by(label: str, values: Mapping[str, float]) -> list[_Sample]:
    return [({label: name}, value) for name, value in values.items()]


def _family(name: str, text: str, samples: Iterable[_Sample]) -> Iterator[str]:
    yield f"# HELP prefill_{name} {text}\n# TYPE prefill_{name} gauge\n"
    for labels, value in samples:
        pairs = ",".join(f'{label}="{_escaped(own)}"' for label, own in labels.items())
        yield f"prefill_{name}{f'{{{pairs}}}' if pairs else ''} {value!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_with_page(path: str, report: str, page: str) -> None:
    """Write a report as JSON, and its page beside it; a reader sees an old file or a whole new one.

    Raises PrefillError.
    """
    for name, text in ((path, report), (page_of(path), page)):
        try:
            put_text(name, text)
        except OSError as error:
            raise ResourceError(f"{name}: cannot write: {error.strerror or error}") from None


def write_files(report: RunReport, metrics_file: str | None = None) -> None:
    """Write the files of a run; a reader sees an old one or a whole new one. Failures are reported on stderr.

    Without `report.report` there is neither `run.json` nor page. A run without `run.json` is a failed one; page and
    metrics are for watching it: without them it ends as it would have.
    """
    if report.report is not None:
        report.page = page_of(report.report)
        try:
            put_text(report.page, run_html(shown_report(report)))
        except Exception as error:  # whatever goes wrong, the scores are written
            report.page = None
            _warn("page", error)
        except Interrupted:  # a store hangs, and a signal has come
            report.report = report.page = None
            raise
        try:
            put_text(report.report, to_json(shown_report(report)))
        except (OSError, PrefillError) as error:
            log.error(f"cannot write the report: {error}")
            report.report = None
            report.exit_code = report.exit_code or ResourceError.exit_code
        except Interrupted:
            report.report = None
            raise
    if metrics_file is not None:
        try:
            put_text(metrics_file, to_metrics(report, time.time()))
        except Exception as error:
            _warn("metrics", error)


def _warn(what: str, error: Exception) -> None:
    why = without_secrets(str(error)) or type(error).__name__
    log.warning(f"cannot write the {what}: {why}")

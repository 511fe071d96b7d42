"""The page of `prefill profile`: the charts of figures 3, 6, 7, 10 and 11 of PrefillOnly, completion times, INPUT."""

from __future__ import annotations

from typing import Any

from prefillcli.forecast.profile import Profile
from prefillcli.forecast.replay_results import Replay
from prefillcli.profile.profile_tables import (
    completion_table,
    law_table,
    leaving_costs,
    length_table,
    no_times,
    profile_headline,
    profile_remarks,
    replay_lines,
    replay_table,
    terms,
)
from prefillcli.replay.charts import distribution_chart, latency_chart
from prefillcli.report import charts as plot
from prefillcli.report.charts import Axis, Chart
from prefillcli.report.rendering import byte_size, render_page, shown_settings, three_digits
from prefillcli.report.survey import ESTIMATE, Survey, keep_rows, plan_rows, survey_lines


def memory_chart(profile: Profile) -> Chart | None:
    """Memory above the loaded model over the time of one run, each mode scaled to its own duration."""
    traces = [each for each in profile.traces if len(each.points) > 1 and each.points[-1].seconds > 0]
    top = max((point.used_bytes for each in traces for point in each.points), default=0)
    if not top:
        return None
    chart = Chart(Axis("percent of the run", 100.0), Axis("MiB", top * 1.05, unit=2.0**20))
    for number, each in enumerate(traces):
        length = each.points[-1].seconds
        chart.line(number, [(100 * point.seconds / length, point.used_bytes) for point in each.points])
        peak = max(point.used_bytes for point in each.points)
        chart.series.append((number, f"{each.mode}, peak {byte_size(peak)}, {length:.1f} s"))
    return chart


def completion_chart(profile: Profile) -> Chart | None:
    """Seconds over input tokens: points as measured (hollow: not used for the fit), a fitted line for each prefix."""
    points = [] if profile.completion is None else profile.completion.points
    if not points:
        return None
    top = max(max(p.seconds, p.predicted) for p in points)
    chart = Chart(Axis("input tokens", max(p.input_tokens for p in points) * 1.03), Axis("seconds", top * 1.05))
    for number, cached in enumerate(sorted({p.cached_tokens for p in points})):
        own = sorted((p for p in points if p.cached_tokens == cached), key=lambda p: p.input_tokens)
        chart.line(number, [(p.input_tokens, max(p.predicted, 0.0)) for p in own])
        for p in own:
            title = f"{p.input_tokens:,} tokens, {p.cached_tokens:,} of them cached: {p.seconds:.3g} s"
            chart.dot(number, p.input_tokens, p.seconds, hollow=p.heldout, title=title)
        chart.series.append((number, f"{cached:,} cached"))
    return chart


def length_bars(profile: Profile) -> list[dict[str, Any]]:
    """For each mode the lengths of its bars in percent of the longest, and what stands beside them."""
    longest = max((each.predicted_tokens or 0 for each in profile.modes), default=0) or 1
    return [
        {
            "mode": each.mode,
            "predicted": 100 * (each.predicted_tokens or 0) / longest,
            "confirmed": 100 * min(1.0, (each.max_tokens or 0) / longest),
            "text": _length_text(each.predicted_tokens, each.max_tokens, each.limited_by),
        }
        for each in profile.modes
    ]


def _length_text(predicted: int | None, confirmed: int | None, limit: str | None) -> str:
    if predicted is None:
        return "does not fit"
    text = f"{predicted:,} tokens{' (the limit of the model)' if limit == 'model' else ''}"
    return text + (", not confirmed" if confirmed is None else f", confirmed up to {confirmed:,}")


def replay_view(replay: Replay) -> dict[str, Any]:
    """What the page shows of a replay."""
    return {
        "name": replay.workload,
        "lines": replay_lines(replay),
        "table": replay_table(replay),
        "charts": [
            ("Mean latency over the arrival rate", latency_chart(replay, "mean_latency")),
            ("P99 latency over the arrival rate", latency_chart(replay, "p99_latency")),
            (
                f"Latency of srjf-calibrated at {three_digits(replay.distribution_rate)} requests/s, by λ",
                distribution_chart(replay),
            ),
        ],
    }


def survey_view(survey: Survey) -> dict[str, Any]:
    """What the page shows of the input; bars are names, percent and texts."""
    bins = survey.lengths.histogram if survey.lengths is not None else []
    most = max((each.rows for each in bins), default=1)
    return {
        "lines": [(name, text) for name, text in survey_lines(survey) if name],
        "lengths": [(f"{each.low:,} - {each.high - 1:,}", 100 * each.rows / most, f"{each.rows:,}") for each in bins],
        "levels": [
            (f"by {each.rows} rows or more", 100 * each.share, f"{each.share:.1%}") for each in survey.sharing.levels
        ],
        "plans": plan_rows(survey.plans),
        "keeps": keep_rows(survey.keeps) if survey.keeps else None,
        "estimate": ESTIMATE,
    }


def profile_html(profile: Profile) -> str:
    """The page of a profile."""
    return render_page(
        "prefillcli.profile",
        "page.html.j2",
        profile=profile,
        headline=profile_headline(profile),
        exits=leaving_costs(profile),
        remarks=profile_remarks(profile),
        bars=length_bars(profile),
        memory=memory_chart(profile),
        completion=completion_chart(profile),
        trace_tokens=profile.traces[0].tokens if profile.traces else 0,
        no_times=None if profile.no_completion is None else no_times(profile),
        tables=[
            ("Longest prompts", length_table(profile)),
            ("Memory for each token", law_table(profile)),
            *([("Completion times", completion_table(profile))] if profile.completion is not None else []),
        ],
        laws=[(each.mode, terms(each)) for each in profile.modes],
        survey=survey_view(profile.survey) if profile.survey is not None else None,
        replays=[replay_view(each) for each in profile.replays],
        longest_timed=max((point.input_tokens for point in profile.times.points), default=0) if profile.replays else 0,
        plot=plot,
        settings=shown_settings(profile.settings),
    )

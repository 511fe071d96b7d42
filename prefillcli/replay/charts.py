"""The charts of a replay: figures 6, 7 and 11 of PrefillOnly."""

from __future__ import annotations

from typing import Literal

from prefillcli.forecast.replay_results import OFFLINE, Replay
from prefillcli.report.charts import Axis, Chart
from prefillcli.report.rendering import three_digits

_ROOM = 1.15  # beyond the outermost points of a logarithmic axis


def latency_chart(replay: Replay, kind: Literal["mean_latency", "p99_latency"]) -> Chart:
    """Latency over the arrival rate, a line for each policy; the offline plan's throughput is marked."""
    offline = replay.result(OFFLINE).throughput
    points = [point for curve in replay.curves for point in curve.points]
    rates = [point.rate for point in points] + [offline]
    seconds = [getattr(point, kind) for point in points]
    chart = Chart(
        Axis("requests/s", max(rates) * _ROOM, low=min(rates) / _ROOM),
        Axis("seconds", max(seconds) * _ROOM, low=min(seconds) / _ROOM),
    )
    for colour, curve in enumerate(replay.curves):
        chart.line(colour, [(point.rate, getattr(point, kind)) for point in curve.points])
        for point in curve.points:
            title = f"{curve.policy}, {point.rate:.3g} requests/s: {getattr(point, kind):.3g} s"
            chart.dot(colour, point.rate, getattr(point, kind), title=title)
        chart.series.append((colour, curve.policy))
    chart.mark(len(replay.curves), offline)
    chart.series.append((len(replay.curves), f"{OFFLINE}, a batch: {three_digits(offline)}/s"))
    return chart


def distribution_chart(replay: Replay) -> Chart:
    """Percent of the requests over the latency that they do not exceed, a line for each lambda."""
    seconds = [each for found in replay.distributions for each in found.latencies]
    chart = Chart(Axis("seconds", max(seconds) * _ROOM, low=min(seconds) / _ROOM), Axis("% of the requests", 100.0))
    for colour, found in enumerate(replay.distributions):
        chart.line(colour, [(latency, percent) for percent, latency in enumerate(found.latencies)])
        chart.series.append((colour, f"λ {found.fairness:g} ({three_digits(found.tokens_per_second)} tokens/s)"))
    return chart

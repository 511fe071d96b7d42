"""The page of `prefill profile`: the charts of figures 3 and 10 of PrefillOnly, and of completion times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from prefillcli.profile.store import Profile
from prefillcli.profile.tables import completion_table, headline, law_table, length_table, mebibytes, remarks, terms

WIDTH, HEIGHT = 720.0, 300.0
"""Of a chart, in SVG units; the plot leaves room for the ticks' texts."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 12.0, 10.0, 40.0
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class Chart:
    """Lines and dots over two axes that start at 0, in SVG units. `series` are names with the number of a colour."""

    x_name: str
    y_name: str
    x_top: float
    y_top: float
    x_unit: float = 1.0  # what a tick's text counts in
    y_unit: float = 1.0
    lines: list[tuple[int, str]] = field(default_factory=list)
    dots: list[tuple[int, float, float, bool, str]] = field(default_factory=list)  # colour, x, y, hollow, title
    series: list[tuple[int, str]] = field(default_factory=list)

    def x(self, value: float) -> float:
        return round(_LEFT + value / self.x_top * (WIDTH - _LEFT - _RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - _BOTTOM - value / self.y_top * (HEIGHT - _TOP - _BOTTOM), 1)

    def line(self, colour: int, points: list[tuple[float, float]]) -> None:
        """Through `points`, in the values' own units."""
        self.lines.append((colour, " ".join(f"{self.x(x)},{self.y(y)}" for x, y in points)))

    def dot(self, colour: int, x: float, y: float, *, hollow: bool, title: str) -> None:
        self.dots.append((colour, self.x(x), self.y(y), hollow, title))

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return [(self.x(at * self.x_unit), f"{at:,g}") for at in ticks(self.x_top / self.x_unit)]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return [(self.y(at * self.y_unit), f"{at:,g}") for at in ticks(self.y_top / self.y_unit)]


def ticks(top: float) -> list[float]:
    """0 and up to five round numbers more, none above `top`."""
    raw = top / 4
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(step * size for step in _STEPS if step * size >= raw * 0.999)
    return [round(at * step, 10) for at in range(int(top / step + 1e-9) + 1)]


def memory_chart(profile: Profile) -> Chart | None:
    """Memory above the loaded model over the time of one run, each mode scaled to its own duration."""
    traces = [each for each in profile.traces if len(each.points) > 1 and each.points[-1].seconds > 0]
    top = max((point.used_bytes for each in traces for point in each.points), default=0)
    if not top:
        return None
    chart = Chart("percent of the run", "MiB", 100.0, top * 1.05, y_unit=2.0**20)
    for number, each in enumerate(traces):
        length = each.points[-1].seconds
        chart.line(number, [(100 * point.seconds / length, point.used_bytes) for point in each.points])
        peak = max(point.used_bytes for point in each.points)
        chart.series.append((number, f"{each.mode}, peak {mebibytes(peak)}, {length:.1f} s"))
    return chart


def completion_chart(profile: Profile) -> Chart | None:
    """Seconds over input tokens: points as measured (hollow: not used for the fit), a fitted line for each prefix."""
    points = profile.completion.points
    if not points:
        return None
    top = max(max(p.seconds, p.predicted) for p in points)
    chart = Chart("input tokens", "seconds", max(p.input_tokens for p in points) * 1.03, top * 1.05)
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


def to_html(profile: Profile) -> str:
    """One page that needs nothing else: no network, no script, inline CSS and SVG for light and dark screens."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("prefillcli.profile").joinpath("page.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        profile=profile,
        headline=headline(profile),
        remarks=remarks(profile),
        bars=length_bars(profile),
        memory=memory_chart(profile),
        completion=completion_chart(profile),
        trace_tokens=profile.traces[0].tokens if profile.traces else 0,
        tables=[
            ("Longest prompts", length_table(profile)),
            ("Memory for each token", law_table(profile)),
            ("Completion times", completion_table(profile)),
        ],
        laws=[(each.mode, terms(each)) for each in profile.modes],
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
        top=_TOP,
        bottom=HEIGHT - _BOTTOM,
        settings={name: value for name, value in profile.settings.items() if value not in (None, [], False)},
    )

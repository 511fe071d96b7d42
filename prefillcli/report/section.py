"""Sections of a report: what a part of a run says in the terminal, on the page, to Prometheus and on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefillcli.report.charts import Bar, Plot
from prefillcli.report.rendering import TableRows

Samples = list[tuple[dict[str, str], float]]


@dataclass(kw_only=True)
class Part:
    """A part of a section on the page, in this order: title, note above, table, bars, plot or text, note below.

    Without any of the four it is left out, but for a note without a title.
    """

    title: str = ""
    above: str = ""
    table: TableRows | None = None
    """A header and rows; a row with one cell is text below the row before."""
    bars: Sequence[Bar] = ()
    plot: Plot | None = None
    text: str = ""
    note: str = ""

    @property
    def shown(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.table or self.bars or self.plot or self.text or not self.title)


@dataclass(kw_only=True)
class Section:
    """All that is said of a part of a run. Texts may be untrusted: who renders them makes them safe to show."""

    title: str = ""
    """Of its section on the page; without one it has none there."""
    lines: list[tuple[str, str]] = field(default_factory=list)
    """Name and text, for the terminal and the page."""
    tiles: list[tuple[str, str]] = field(default_factory=list)
    """Name and value, at the top of the page."""
    charts: list[Part] = field(default_factory=list)
    """Parts that stand beside one another."""
    parts: list[Part] = field(default_factory=list)
    metrics: list[tuple[str, str, Samples]] = field(default_factory=list)
    """Name, help text and samples of Prometheus' gauges."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Keys of the last line on stdout."""

    def metric(self, name: str, text: str, value: float | Mapping[str, float], label: str = "") -> None:
        """Add a gauge: a value, or with a `label` one for each of its values."""
        samples = (
            [({label: each}, own) for each, own in value.items()] if isinstance(value, Mapping) else [({}, value)]
        )
        self.metrics.append((name, text, samples))

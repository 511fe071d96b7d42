"""What the page of a run shows of its exits: charts and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefillcli.data.output.counts import TO_THE_END
from prefillcli.report.charts import Bar, Plot, Tick, bars, round_ticks
from prefillcli.report.exit_lines import exit_lines, threshold_text
from prefillcli.report.exit_use import KEPT_ALIVE, ExitUse, JudgedLabel
from prefillcli.report.numbers import abbreviated, counted, percent_interval, percent_or_nothing

BOUND_NOTE = (
    "The bound is of the rows that the model answers with that label when it reads all layers, and it does not say "
    "that the model is right."
)
OWN_ROWS_NOTE = (
    "It holds for rows like those that were judged, which are drawn from the whole job. If others come it is void."
)
OTHER_ROWS_NOTE = (
    "It holds for rows like those of the job that made the exit profile. If tonight's are others, it is void: only "
    "the audit shows that."
)
CURVE_NOTE = (
    "Across: share of the judged rows that flip. Up: how much less is computed, for tokens that no two rows share. "
    "Each point is another level for all thresholds: an estimate, which proves nothing."
)
ALIVE_NOTE = (
    "A shared beginning goes on as long as one row below it does. These are layers of shared tokens, by the number of "
    "rows that they still went on for."
)


def exit_view(use: ExitUse | None) -> dict[str, Any] | None:
    """None without exits."""
    if use is None:
        return None
    return {
        "lines": list(exit_lines(use)),
        "by_layer": _by_layer(use),
        "layers": _layers(use),
        "classes": _classes(use),
        "audited": _audited(use),
        "kept_alive": _kept_alive(use.kept_alive),
        "curve": gain_plot(use),
        "bound_note": f"{BOUND_NOTE} {OTHER_ROWS_NOTE if use.reused else OWN_ROWS_NOTE}",
        "curve_note": CURVE_NOTE,
        "alive_note": ALIVE_NOTE,
    }


def gain_plot(use: ExitUse) -> Plot | None:
    """The gain over the flip rate of the judged rows, from 1 up; None unless there are two points."""
    points = sorted({(each.flip_rate, each.gain) for each in use.curve})
    if len(points) < 2:
        return None
    best = max(gain for _, gain in points)
    x = round_ticks(100 * max(use.max_flips, *(flips for flips, _ in points)))
    y = round_ticks(max(best - 1, 0.05))
    wide, high = x[-1] / 100, y[-1]
    limit = f"{100 * use.max_flips / wide:.2f}"
    return Plot(
        x=[Tick(100 * at / x[-1], f"{at:g} %") for at in x],
        y=[Tick(100 * at / high, f"{1 + at:g}x") for at in y],
        series=[("gain", f"up to {best:.2f}x"), ("--max-flips", f"{100 * use.max_flips:g} %")],
        lines=[
            " ".join(f"{100 * flips / wide:.2f},{100 - 100 * max(gain - 1, 0) / high:.2f}" for flips, gain in points),
            f"{limit},0 {limit},100",
        ],
    )


def _by_layer(use: ExitUse) -> list[Bar]:
    values = {name: float(own.rows) for name, own in use.by_layer.items()}
    names = {name: "to the end" if name == TO_THE_END else f"after layer {name}" for name in values}
    texts = {
        names[name]: f"{own.rows:,} ({own.rows / max(use.rows, 1):.1%}), {abbreviated(own.prompt_tokens)} tokens"
        for name, own in use.by_layer.items()
    }
    kinds = {names[name]: "s0" if name == TO_THE_END else "s2" for name in values}
    if use.free_rows < use.rows:
        texts[names[TO_THE_END]] += f"; {use.rows - use.free_rows:,} rows to learn from"
    return bars({names[name]: value for name, value in values.items()}, texts, kinds)


def _layers(use: ExitUse) -> list[list[str]]:
    if not use.layers:
        return []
    labels = list(use.layers[0].thresholds)
    header = ["after layer", "probe", "peek", *(f"ahead for {label}" for label in labels), "expected", "left"]
    return [
        header,
        *(
            [
                f"{each.layer}",
                each.probe,
                "yes" if each.peek else "no",
                *(threshold_text(each.thresholds[label]) for label in labels),
                f"{each.expected:.1%}",
                percent_or_nothing(each.share),
            ]
            for each in use.layers
        ),
    ]


def _classes(use: ExitUse) -> list[list[str]]:
    if not use.classes:
        return []
    header = ["label in full", "fitted", "judged", "flips", f"at most ({100 * use.confidence:g} %)"]
    return [header, *([each.label, f"{each.fitted:,}", f"{each.judged:,}", *_proven(each)] for each in use.classes)]


def _proven(each: JudgedLabel) -> list[str]:
    if each.judged < each.rows_needed:
        return [f"{each.flips:,}", f"takes {counted(each.rows_needed, 'row')}"]
    return [f"{each.flips:,}", f"{each.bound:.2%}" if each.proven else "nothing proven"]


def _audited(use: ExitUse) -> list[list[str]]:
    if not use.audited:
        return []
    header = ["label in full", "audited", "would leave", "flips", f"{100 * use.confidence:g} % interval"]
    rows = (
        [each.label, f"{each.rows:,}", f"{each.left:,}", f"{each.flips:,}", percent_interval(each.interval)]
        for each in use.audited
    )
    return [header, *rows]


def _kept_alive(found: Mapping[str, float]) -> list[Bar]:
    total = sum(found.values())
    if not total:
        return []
    order = [name for name in KEPT_ALIVE if name in found]
    names = {name: "1 row" if name == "1" else f"{name} rows" for name in order}
    values = {names[name]: found[name] for name in order}
    return bars(values, {name: f"{abbreviated(value)} ({value / total:.1%})" for name, value in values.items()})

"""The exits of a run in a few lines, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator

from prefillcli.data.output.counts import TO_THE_END
from prefillcli.report.exit_use import AuditedLabel, ExitUse, JudgedLabel
from prefillcli.report.numbers import counted, percent_interval
from prefillcli.report.visible import visible


def exit_lines(use: ExitUse) -> Iterator[tuple[str, str]]:
    """The lines that exits add to the table of a run: name and text."""
    yield "exits", _status(use)
    if use.classes:
        yield "exits, judged", "; ".join(_judged(each) for each in use.classes)
    if use.left_early:
        yield "exit layers", _layers(use)
        if (saved := _saved(use)) is not None:
            yield "exit gain", saved
    if any(each.left for each in use.audited):
        yield "exits, audited", "; ".join(_audited(each) for each in use.audited)


def threshold_text(ahead: float | None) -> str:
    """A threshold, or that rows with the label stay."""
    return "stays" if ahead is None else f"{ahead:.2f}"


def _status(use: ExitUse) -> str:
    if use.status == "none":
        return f"none: {visible(use.reason or '', line=True)}"
    rows, most = counted(use.calibration_rows, "row"), _percent(use.max_flips)
    sure = f"({100 * use.confidence:g} % confidence)"
    text = f"learnt from {rows} in full; of the rows of each label at most {most} flip {sure}"
    if use.reused:
        text = (
            f"from --exit-profile, checked on {rows} in full; of the rows that it was learnt from at most {most} of "
            f"each label flip {sure}"
        )
    if use.status == "stopped":
        at = "" if use.stopped_window is None else f" at window {use.stopped_window:,}"
        return f"stopped{at}: {visible(use.reason or '', line=True)}; {text}"
    return text


def _judged(each: JudgedLabel) -> str:
    label = visible(each.label, line=True)
    if each.judged < each.rows_needed:
        return f"{label} {counted(each.judged, 'row')}, too few: it takes {each.rows_needed:,}"
    if not each.proven:
        return f"{label} {counted(each.judged, 'row')}, nothing proven"
    return f"{label} {counted(each.flips, 'flip')} of {each.judged:,}, at most {_percent(each.bound)}"


def _layers(use: ExitUse) -> str:
    expected = {str(each.layer): each.expected for each in use.layers}
    texts = []
    for name, own in use.by_layer.items():
        learnt = use.rows - use.free_rows if name == TO_THE_END else 0
        share = f"{(own.rows - learnt) / use.free_rows:.1%}"
        wanted = f", {expected[name]:.1%} expected" if name in expected else ""
        texts.append(f"to the end {share}" if name == TO_THE_END else f"after {name} {share}{wanted}")
    others = f"; without {counted(use.rows - use.free_rows, 'row')} to learn from" if use.free_rows < use.rows else ""
    return f"of {use.model_layers}: " + "; ".join(texts) + others


def _saved(use: ExitUse) -> str | None:
    texts = []
    if use.layers_saved is not None:
        texts.append(f"{use.layers_saved:.1%} of the tokens' layers spared")
    if use.measured_gain is not None:
        texts.append(f"{use.measured_gain:.2f}x measured")
    if use.layers_gain is not None:
        texts.append(f"{use.layers_gain:.2f}x by these layers")
    if texts and use.predicted_gain is not None:
        texts.append(f"{use.predicted_gain:.2f}x predicted for tokens that no two rows share")
    return ", ".join(texts) or None


def _audited(each: AuditedLabel) -> str:
    return (
        f"{visible(each.label, line=True)} {counted(each.flips, 'flip')} of {each.rows:,} "
        f"({percent_interval(each.interval)}), {each.left:,} would leave"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"

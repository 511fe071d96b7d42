"""What a run reports of its exits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefillcli.jobs.job_exits import EXITS, JobExits, Spared
from prefillcli.report.exit_use import ExitStatus, ExitUse, GainPoint, JudgedLabel, UsedExit
from prefillcli.report.run import Tokens


def exit_use(exits: JobExits, spared: Spared, tokens: Tokens) -> ExitUse | None:
    """The exits of a run, without the counts of its output; None where none are asked for."""
    learnt = exits.learnt
    if learnt is None:
        return None
    names = [each.label for each in learnt.classes]
    status: ExitStatus = "reused" if exits.reused else "calibrated"
    if exits.reason is not None:
        status = "none" if exits.stopped_window is None else "stopped"
    layers = tokens.computed * exits.layers
    return ExitUse(
        status=status,
        reason=exits.reason,
        reused=exits.reused,
        stopped_window=exits.stopped_window,
        max_flips=exits.max_flips,
        confidence=learnt.confidence,
        model_layers=exits.layers,
        calibration_rows=exits.rows_read,
        learnt_rows=len(exits.known),
        classes=[
            JudgedLabel(
                label=each.label,
                fitted=each.fitted,
                judged=each.judged,
                flips=each.flips,
                bound=each.bound,
                rows_needed=each.rows_needed,
            )
            for each in learnt.classes
        ],
        layers=[
            UsedExit(
                layer=each.layer + 1,
                probe=each.probe,
                peek=each.peek,
                thresholds=dict(zip(names, each.thresholds, strict=True)),
                expected=each.leaving,
            )
            for each in learnt.exits
        ],
        layers_saved=tokens.skipped / layers if layers else None,
        predicted_gain=learnt.gain,
        layers_gain=spared.layers / (spared.layers - spared.skipped) if spared.layers else None,
        measured_gain=spared.full_seconds / spared.seconds if spared.seconds else None,
        kept_alive=spared.kept_alive,
        curve=[GainPoint(leaving=each.leaving, flip_rate=each.flip_rate, gain=each.gain) for each in learnt.curve],
    )


def stored_exit_use(plan: Mapping[str, Any]) -> ExitUse | None:
    """The exits of a job by its plan, for those who have not run it: without the gain, which is a run's own."""
    stored = plan.get(EXITS, {})
    if "use" not in stored:
        return None
    use = ExitUse.model_validate(stored["use"])
    if "stopped_window" not in stored:
        return use
    return use.model_copy(
        update={"status": "stopped", "reason": stored["reason"], "stopped_window": stored["stopped_window"]}
    )

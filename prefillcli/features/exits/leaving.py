"""The exits of a job while it runs: what is done between layers, what that spares, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefillcli.data.output.sink import Sink
from prefillcli.data.rows import ScoredRow
from prefillcli.engines.base import PLAIN, Answer, EarlyExits, Treatment
from prefillcli.features.exits.judging import drifted_classes
from prefillcli.features.exits.policy import ExitPolicy
from prefillcli.features.exits.profile_file import ExitFindings, FlipsOf
from prefillcli.features.exits.report import ExitStatus, ExitUse, GainPoint, JudgedLabel, ProvableFlips, UsedExit
from prefillcli.plan.account import carried_by_few, in_full
from prefillcli.plan.pack import Pack
from prefillcli.report.run import Tokens
from prefillcli.runtime import log

EXITS = "exits"  # in the plan of a job
ENDED = ("reason", "stopped_window")  # what the plan has there once drift has ended the exits


@dataclass(slots=True)
class Spared:
    """What exits have spared packs: the seconds that they took, and would have taken without exits.

    `layers` are those of a token that they would have taken, and `skipped` how many fewer they did. `kept_alive` are
    token-layers of shared prefixes, by how few rows they went on for.
    """

    seconds: float = 0.0
    full_seconds: float = 0.0
    layers: float = 0.0
    skipped: float = 0.0
    kept_alive: dict[str, float] = field(default_factory=dict)

    def add(self, other: Spared) -> None:
        """Count those of other packs too."""
        self.seconds += other.seconds
        self.full_seconds += other.full_seconds
        self.layers += other.layers
        self.skipped += other.skipped
        for rows, tokens in other.kept_alive.items():
            self.kept_alive[rows] = self.kept_alive.get(rows, 0.0) + tokens


@dataclass(eq=False, slots=True)
class JobExits:
    """What `--exit` does in a job.

    `policy` is None where rows do not leave: none is asked for, none could be proven, or the exits have ended.
    To learn them, `rows_read` rows were read in full, and those that are `known`, by number, need not be read again.
    `layers` are those of the model.
    """

    policy: ExitPolicy | None = None
    learnt: ExitFindings | None = None  # what the policy was made of; None where no exits are asked for
    reused: bool = False  # whether an earlier job has learnt it
    layers: int = 0
    max_flips: float = 0.0
    flips_of: FlipsOf = "each"
    labels: tuple[str, ...] = ()
    provable: ProvableFlips | None = None
    known: Mapping[int, ScoredRow] = field(default_factory=dict)
    rows_read: int = 0
    regroup_cost: float | None = None
    reason: str | None = None  # why there are no exits, or none any more
    # The first window without exits, where they have ended before the job did.
    stopped_window: int | None = None

    @property
    def asked(self) -> bool:
        """Whether rows may leave in this job, if that can be proven to be right."""
        return self.learnt is not None

    def treatment(self, in_full: frozenset[int]) -> Treatment:
        """What happens between layers; the prompts `in_full` go on to the end."""
        if self.policy is None:
            return PLAIN
        return Treatment(EarlyExits(self.policy, in_full), self.regroup_cost)

    def spared(self, pack: Pack, answers: Sequence[Answer]) -> Spared | None:
        """What exits have spared a pack, by all of its answers."""
        if self.policy is None or not answers:
            return None
        left = {answer.prompt: answer.exit_layer for answer in answers}
        through = [_layers_through([left[prompt] for prompt in prompts]) for _, prompts in pack.reads]
        return Spared(
            sum(answer.seconds for answer in answers),
            sum(answer.full_seconds for answer in answers),
            in_full(self.layers) * len(pack.tokens),
            sum(answer.skipped for answer in answers),
            dict(carried_by_few(pack, through, self.layers)),
        )

    def watch(self, sink: Sink, window: int) -> None:
        """End the exits after a `window` where the audited rows that are written show that too many answers flip."""
        if self.policy is None:
            return
        audited = sink.counts.audited_exits
        counts = {f"audited rows that are {label!r} in full": (own.flips, own.rows) for label, own in audited.items()}
        if self.flips_of == "all" and counts:
            counts = {"audited rows": (sum(flips for flips, _ in counts.values()), sum(n for _, n in counts.values()))}
        drifted = drifted_classes(list(counts.values()), self.max_flips)
        if not drifted:
            return
        of, (flips, rows) = list(counts.items())[drifted[0]]
        self.policy, self.stopped_window = None, window + 1
        self.reason = (
            f"{flips:,} of {rows:,} {of} have flipped, more than --max-flips {self.max_flips:g} explains: the "
            "rows are not like those that the exits were learnt on"
        )
        ended = {name: getattr(self, name) for name in ENDED}
        sink.plan = sink.plan | {EXITS: sink.plan[EXITS] | ended}
        log.warning(f"--exit: {self.reason}; all further rows are read in full")


NO_EXITS = JobExits()


def _layers_through(exit_layers: Sequence[int | None]) -> int | None:
    # How many layers a read goes through, by the layers after which its prompts leave; None: all.
    numbers = [layer for layer in exit_layers if layer is not None]
    return max(numbers) + 1 if len(numbers) == len(exit_layers) else None


# What a run reports of its exits.


def exit_use(exits: JobExits, spared: Spared, tokens: Tokens) -> ExitUse | None:
    """The exits of a run, without the counts of its output; None where none are asked for."""
    learnt = exits.learnt
    if learnt is None:
        return None
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
        flips_of=exits.flips_of,
        confidence=learnt.confidence,
        model_layers=exits.layers,
        provable=exits.provable,
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
                thresholds=dict(zip(exits.labels, each.thresholds, strict=True)),
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

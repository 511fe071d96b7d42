"""What a run reports of early exits: what they were learnt from, who left where, and what that spared and flipped.

Layers are numbered as users count them: a row that left after layer 16 went through 16 layers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from prefillcli.data.output.counts import TO_THE_END, Counts
from prefillcli.stats.audit import flip_bound, flip_interval

ExitStatus = Literal["calibrated", "reused", "none", "stopped"]
"""Learnt by this job; taken from an earlier one; not there, for a `reason`; ended before the job, for a `reason`."""
KEPT_ALIVE = ("1", "2", "3-5", "6-10", ">10")
"""How many rows a shared prefix went on for."""


class JudgedLabel(BaseModel):
    """Calibration rows that the model, read in full, answers with a label."""

    label: str
    fitted: int  # rows that the probes were fitted to
    judged: int  # other rows, which the thresholds were tested on
    flips: int  # of the judged ones, at the thresholds in use
    bound: float  # exact upper bound of the flip rate, at the report's confidence; 1 where nothing is proven
    rows_needed: int  # judged rows that it takes to prove the bound without a flip

    @property
    def proven(self) -> bool:
        """Whether anything is proven of the label."""
        return self.judged >= self.rows_needed and self.bound < 1


class AuditedLabel(BaseModel):
    """Audited rows that the model, read in full, answers with a label. Of all attempts at the job."""

    label: str
    rows: int
    left: int  # that would leave early
    flips: int  # that leave with another label
    flip_rate: float  # of the rows
    interval: tuple[float, float]  # of the flip rate, exact and two-sided
    bound: float  # one-sided


class UsedExit(BaseModel):
    """A layer after which rows may leave."""

    layer: int
    probe: str  # the kind of predictor
    peek: bool  # whether only the last tokens went through the layer before it was decided who leaves
    thresholds: dict[str, float | None]  # by label: how far it must be ahead; None where rows with it stay
    expected: float  # share of the rows that leave here, as the calibration has it
    rows: int = 0  # of the output, that left here
    share: float | None = None  # of the scored rows, without those that exits were learnt from


class LayerCount(BaseModel):
    """Rows of the output that went through the same number of layers."""

    rows: int
    prompt_tokens: int


class GainPoint(BaseModel):
    """What the judged calibration rows would have done at other thresholds: an estimate, which proves nothing."""

    leaving: float  # share of the rows
    flip_rate: float
    gain: float


class ExitUse(BaseModel):
    """The exits of a run."""

    status: ExitStatus
    reason: str | None = None  # why there are none, or none any more
    reused: bool = False  # whether an earlier job has learnt them
    stopped_window: int | None = None  # the first window without them
    max_flips: float
    confidence: float = 0.95
    model_layers: int
    calibration_rows: int = 0  # read in full before the first window
    learnt_rows: int = 0  # those of them that are rows of the output as they were read then
    classes: list[JudgedLabel] = Field(default_factory=list)
    layers: list[UsedExit] = Field(default_factory=list)
    by_layer: dict[str, LayerCount] = Field(default_factory=dict)  # the layers that rows went through, then "full"
    layers_saved: float | None = None  # share of the layers of computed tokens that exits spared this run
    predicted_gain: float | None = None  # by the calibration, for tokens that no two rows share
    layers_gain: float | None = None  # by the layers that exits spared the packs of this run
    measured_gain: float | None = None  # of the same packs, in seconds
    kept_alive: dict[str, float] = Field(default_factory=dict)  # layers of shared tokens, by rows they went on for
    audited: list[AuditedLabel] = Field(default_factory=list)
    curve: list[GainPoint] = Field(default_factory=list)

    def take(self, counts: Counts) -> None:
        """Take over what is known of the output's rows, those of earlier attempts included."""
        found = counts.tallies.exit_layers
        order = sorted(found, key=lambda name: (name == TO_THE_END, int(name) if name != TO_THE_END else 0))
        self.by_layer = {
            name: LayerCount(rows=found[name].rows, prompt_tokens=found[name].prompt_tokens) for name in order
        }
        for each in self.layers:
            own = self.by_layer.get(str(each.layer))
            each.rows = own.rows if own is not None else 0
            each.share = each.rows / self.free_rows if self.free_rows else None
        self.audited = [
            AuditedLabel(
                label=label,
                rows=own.rows,
                left=own.left,
                flips=own.flips,
                flip_rate=own.flips / own.rows,
                interval=flip_interval(own.flips, own.rows, self.confidence),
                bound=flip_bound(own.flips, own.rows, self.confidence),
            )
            for label, own in sorted(counts.audited_exits.items())
        ]

    @property
    def left_early(self) -> int:
        """Rows of the output that left before the last layer."""
        return sum(each.rows for name, each in self.by_layer.items() if name != TO_THE_END)

    @property
    def free_rows(self) -> int:
        """Scored rows of the output that were not read to learn exits from."""
        full = self.by_layer.get(TO_THE_END)
        return self.rows - min(self.learnt_rows, full.rows if full is not None else 0)

    @property
    def rows(self) -> int:
        """Scored rows of the output."""
        return sum(each.rows for each in self.by_layer.values())

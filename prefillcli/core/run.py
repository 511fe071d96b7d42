"""A run of `prefill score`, for the parts of the job: what is opened, written and measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefillcli.core.inputs import Inputs
from prefillcli.core.scorer import LoadedModels
from prefillcli.options.settings import JobSettings
from prefillcli.report.run import RunReport, Tokens
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.signals import Stop

if TYPE_CHECKING:
    from prefillcli.rows.output.sink import Sink
    from prefillcli.rows.output.tallies import Counts


@dataclass(frozen=True)
class Run:
    """A run whose inputs and output are open. `scoring/score.py` has its steps."""

    report: RunReport
    clock: Clock
    stop: Stop
    inputs: Inputs
    """The rows, the models' files and the prompts."""
    sink: Sink
    """The output."""

    @property
    def tokens(self) -> Tokens:
        """The tokens that were computed so far, by purpose."""
        return self.report.tokens

    @property
    def settings(self) -> JobSettings:
        """The settings of the job."""
        return self.inputs.settings

    def tick(self, tokens: float) -> None:
        """Let a signal stop the run. Called while something is computed; `tokens` are those of the step."""
        self.stop.check()


@dataclass
class Reached:
    """What a run has opened so far. Its report tells of that, however the run ends."""

    inputs: Inputs | None = None
    sink: Sink | None = None
    models: LoadedModels | None = None

    @property
    def counts(self) -> Counts | None:
        """Counts of the output's rows; None where it was not opened."""
        return None if self.sink is None else self.sink.counts

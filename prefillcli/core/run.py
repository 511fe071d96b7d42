"""The state of a run of `prefill score`, for the parts of the job: what is opened, written and measured so far."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prefillcli.core.inputs import Inputs
from prefillcli.core.scorer import ModelScorer
from prefillcli.options.settings import JobSettings
from prefillcli.report.run import RunReport, Tokens
from prefillcli.runtime.clock import Clock
from prefillcli.runtime.signals import Stop
from prefillcli.stats.arrays import Int64Array

if TYPE_CHECKING:
    from prefillcli.engines.memory_plan import Measured
    from prefillcli.rows.output.sink import Sink


class Run:
    """The state of a run. `scoring/score.py` has its steps."""

    scorer: ModelScorer
    sink: Sink
    profile: Measured | None = None
    """Predicts times, and sizes packs."""

    def __init__(self, settings: JobSettings, report: RunReport, output: str, clock: Clock, stop: Stop) -> None:
        self.settings = settings
        self.report = report
        """The report of the run; nothing is read back from it."""
        self.output = output
        self.clock = clock
        self.stop = stop
        self.tokens = Tokens()
        """The tokens that were computed so far, by purpose."""
        self.load_models: Callable[[], None] = lambda: None
        """Loads the models here or in workers."""
        self.require_unchanged: Callable[[Int64Array | None], None] = lambda rows: None
        """Raises ContentChangedError unless the models and the sources of these rows (None: of all rows) are
        unchanged."""
        self.reopen: Callable[[Any], Inputs] = Inputs
        """Opens the rows of other settings, with the models that are open."""

    @property
    def inputs(self) -> Inputs:
        """The rows, the models' files and the prompts."""
        return self.scorer.inputs

    def tick(self, tokens: float) -> None:
        """Let a signal stop the run. Called while something is computed; `tokens` are those of the step."""
        self.stop.check()

"""The roles of a job's parts besides its asking: reading, following up, judging.

`scoring/compose.py` chooses a job's parts. What only one class does is a method of that class, which the steps of the
job call by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefillcli.core.further import Condition, Further, RowSelection, WantedRow
    from prefillcli.core.inputs import Inputs, OpenRows
    from prefillcli.core.run import Reached, Run
    from prefillcli.prompts.labels import Labels
    from prefillcli.report.run import RunReport
    from prefillcli.report.section import Section
    from prefillcli.rows.output.columns import Group
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.output.schema import OutputSchema


class JobPart:
    """A part of a job: the `groups` of columns that it adds to the output, and the columns of the input that it needs
    there."""

    groups: frozenset[Group] = frozenset()
    carried: Sequence[str] = ()


class Reading(JobPart, ABC):
    """A way to read prompts cheaper than in full: fewer tokens, or fewer layers."""

    @abstractmethod
    def identity(self, values: dict[str, Any]) -> Mapping[str, str]:
        """Return its parts of the job's fingerprint, as `Asking.identity`."""


class FollowUp(JobPart, ABC):
    """Questions about rows that are already scored."""

    @abstractmethod
    def further(self, inputs: Inputs, choice: RowSelection) -> Further | None:
        """Return its questions about the chosen ones of the scored rows; None if it has none."""

    def condition(self, schema: OutputSchema) -> Condition | None:
        """Return the condition by which it chooses rows of an output with this schema; None for all. Raises UsageError
        for columns that the output lacks."""
        return None

    @abstractmethod
    def shown(self, row: WantedRow, labels: Sequence[str]) -> Section | None:
        """Return the section of `prefill inspect` on the answers about a row of a job with these labels; None if there
        is none."""


class Judge(JobPart):
    """Judges the answers, in the report and its exit code."""

    def check(self, rows: OpenRows, labels: Labels, schema: OutputSchema) -> None:
        """Check the labels: first by their names alone, before torch is imported, then as they are. Raise UsageError
        if their answers, in an output with this schema, cannot be judged."""

    def ended(self, run: Run) -> None:
        """Evaluate the whole output, and write the files beside it."""

    def reported(self, report: RunReport, reached: Reached) -> None:
        """Put its figures into the report of a run that is over, however it ended, by what it has `reached`."""

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        """Put its figures into the report of an output that `prefill merge` has made of shards."""

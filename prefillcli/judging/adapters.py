"""The adapters of a job, and the rows that each of them scored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, RootModel

from prefillcli.core.roles import Judge
from prefillcli.models.adapters import adapter_paths
from prefillcli.options.reading import AdapterOptions
from prefillcli.report.finding import Finding
from prefillcli.rows.output.columns import added

if TYPE_CHECKING:
    from prefillcli.core.run import Reached
    from prefillcli.report.run import RunReport
    from prefillcli.rows.output.destination import Manifest
    from prefillcli.rows.output.tallies import Counts


class AdapterUse(BaseModel):
    """An adapter, or with `name` None the model without one, and the rows that it scored."""

    name: str | None
    path: str | None = None  # None where it is not known, as in a merge
    rows: int = 0


class AdapterUses(Finding, RootModel[list[AdapterUse]]):
    """The adapters of a job."""

    key: ClassVar[str] = "adapters"


class AdapterJudge(Judge):
    """Counts the rows of each adapter."""

    def __init__(self, adapters: AdapterOptions) -> None:
        self.groups = added({"adapters": adapters.adapter_column is not None})

    def reported(self, report: RunReport, reached: Reached) -> None:
        opened = None if reached.inputs is None else reached.inputs.opened
        report.add(AdapterUses([*_uses(adapter_paths(opened), reached.counts)]))

    @classmethod
    def merged(cls, report: RunReport, output: str, manifest: Manifest) -> None:
        report.add(AdapterUses([*_uses({}, manifest.counts)]))


def _uses(paths: Mapping[str, str], counts: Counts | None) -> Iterable[AdapterUse]:
    # Rows by adapter: counted in the output's column, or all rows where one adapter reads them all.
    by_name = {} if counts is None else counts.tallies.adapters
    if not by_name:
        scored = 0 if counts is None else counts.scored
        yield from (AdapterUse(name=name, path=path, rows=scored) for name, path in paths.items())
        return
    for name in dict.fromkeys([*paths, *filter(None, by_name)]):
        yield AdapterUse(name=name, path=paths.get(name), rows=by_name.get(name, 0))
    if by_name.get(""):
        yield AdapterUse(name=None, rows=by_name[""])

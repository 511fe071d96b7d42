"""What a part of a job finds: a key of `run.json`, and sections of page and terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar, Self

from pydantic import BaseModel

if TYPE_CHECKING:
    from prefillcli.report.run import RunReport
    from prefillcli.report.section import Section


class Finding(BaseModel):
    """What a part of a job has found. With `RootModel` beside it, it may be a list, a mapping or a single value."""

    key: ClassVar[str]
    """Its key in `run.json`."""
    place: ClassVar[int] = 0
    """Its place among those of a report, in whose order terminal and page show them."""

    @classmethod
    def from_report(cls, report: RunReport) -> Self | None:
        """Return that of a report, which may come from a file; None without one. Raises ValidationError."""
        found = report.findings.get(cls.key)
        return found if found is None or isinstance(found, cls) else cls.model_validate(found)

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return its sections."""
        return ()

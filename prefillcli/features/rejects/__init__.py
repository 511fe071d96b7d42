"""`--rejects`: the rows without a score once more, as the input has them, for whoever repairs them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature, SideFile
from prefillcli.errors import PrefillError, UsageError
from prefillcli.options.option import FILES, Settings, option

if TYPE_CHECKING:
    from prefillcli.core.feature import Job, Opening




def _knows_rejects(path: str, start: bytes) -> bool:
    from prefillcli.data.output.columns import ROW_COLUMN
    from prefillcli.data.reading.source import Source

    try:
        names = Source.open([path]).available
    except PrefillError:
        return False
    return names[:1] == (ROW_COLUMN,) and names[-2:] == ("error", "error_detail") and "computed_tokens" not in names


class Rejects(Feature):
    """The rejects of a run. The key `rejects` of its report names their file."""

    order = 90
    options = {"score": RejectsOptions}
    keys = {"rejects": None}
    side_files = {"rejects": SideFile("rejects of an earlier run", _knows_rejects)}

    @classmethod
    def asked(cls, settings: RejectsOptions) -> bool:
        return settings.rejects is not None

    def check(self) -> None:
        if self.settings.shard is not None:
            raise UsageError(
                "--shard: --rejects is for the rows of the whole output, which prefill merge makes\n"
                "after the merge, give it to prefill score with --resume and without --shard: only they are written"
            )

    def source_opened(self, opening: Opening) -> None:
        from prefillcli.judging.rejects import check_rejects

        check_rejects(self.settings.rejects, opening.source)

    def ended(self, job: Job) -> None:
        from prefillcli.judging.rejects import write_rejects

        with job.clock.phase("write"), job.stop.at_once():
            write_rejects(self.settings.rejects, job.source, job.sink)
        job.report.blocks["rejects"] = self.settings.rejects


FEATURE = Rejects

"""`--retry-errors`: the error rows of a job are scored again, and all other rows stay as they are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pyarrow as pa

from prefillcli.data.output import parts
from prefillcli.data.output.counts import Counts
from prefillcli.data.output.manifest import Manifest, replaced
from prefillcli.data.output.parts import PartInfo
from prefillcli.data.output.schema import OutputSchema
from prefillcli.data.output.store import Store
from prefillcli.data.output.target import Target
from prefillcli.data.rows import is_error
from prefillcli.errors import OutputConflictError


def retried(target: Target, found: Manifest, id_name: str | None) -> Manifest | None:
    """With what a complete job begins anew to score its error rows again; None if it is not complete, or has none.

    Raises OutputConflictError if its other rows could not be taken over.
    """
    if found.state != "complete" or not (found.counts or target.count(id_name)).errors:
        return None
    if found.digests is None:
        raise OutputConflictError(
            f"--retry-errors: {target.path} has no digests of its rows: its work folder is gone, or of an earlier "
            "version\nscore all rows again with --overwrite"
        )
    return Manifest(found.job, found.plan, before=replaced(target.work), retries=True)


def without_errors(work: Store, found: Iterable[PartInfo], schema: OutputSchema) -> Iterator[PartInfo]:
    """The parts of a job, those with error rows replaced by others without.

    A part is written before the one that it replaces is removed: a run that is killed between loses no row, because of
    two parts with the same rows the first one counts.
    """
    infos = list(found)
    numbers: dict[int, int] = defaultdict(int)
    for info in infos:
        numbers[info.window] = max(numbers[info.window], info.number)
    for info in infos:
        if not info.counts.errors:
            yield info
            continue
        rows = parts.read_part(work, info.name)[1]
        kept = rows.filter(pa.array([not is_error(code) for code in rows["error"].to_pylist()], pa.bool_()))
        if len(kept):
            numbers[info.window] += 1
            counts = schema.count(Counts(), kept)
            mended = replace(info, number=numbers[info.window], counts=counts)
            parts.write_part(work, mended, kept)
            yield mended
        work.delete(info.name)

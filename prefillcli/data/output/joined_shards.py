"""The shards of a job, joined to the output that one process would have written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.data.output import heartbeat, parts
from prefillcli.data.output.assembly import write_output
from prefillcli.data.output.counts import Counts
from prefillcli.data.output.manifest import Manifest
from prefillcli.data.output.parts import PartInfo, WindowRows
from prefillcli.data.output.publication import recover_publication
from prefillcli.data.output.resuming import find_resumable
from prefillcli.data.output.row_digests import DigestFile, writing_digests
from prefillcli.data.output.shard_folders import (
    ShardFolder,
    ShardRecord,
    folder_of,
    named,
    shards_beside,
    to_partitions,
    to_schema,
)
from prefillcli.data.output.tallies import ROW
from prefillcli.data.output.target import Target
from prefillcli.data.shard import Shard
from prefillcli.errors import (
    DamagedFileError,
    OutputBusyError,
    OutputConflictError,
    OutputExistsError,
    PrefillError,
    UsageError,
)

_KEPT = ("evaluation",)  # of a shard's plan, in the output's


class JoinedShards:
    """All shards of a job, found beside its output; none of them is being written.

    Use it as a context manager: it holds the locks of the output and of the shards.
    """

    def __init__(self, target: Target) -> None:
        self.merged: Manifest | None = None
        """The manifest of the output, if that was made of these shards already."""
        self._target = target
        self._held = ExitStack()
        self._locked = False
        self._folders: list[ShardFolder] = []
        self._records: list[ShardRecord] = []
        self._kinds: dict[str, set[str]] = defaultdict(set)

    @property
    def count(self) -> int:
        """Of how many shards the job is made."""
        return len(self._folders)

    @property
    def manifest(self) -> Manifest:
        """Of one of the shards; they are of one job."""
        return self._manifest

    def __enter__(self) -> JoinedShards:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._held.close()

    def open(self, *, overwrite: bool) -> None:
        """Find the shards, lock them, and see whether they may be merged.

        Raises UsageError if there are none, or of several counts, or if the output exists; OutputConflictError if
        they are of different jobs, or the output is another job's; OutputBusyError if one is being written;
        PrefillError if one is missing, incomplete or damaged.
        """
        self._find(overwrite=overwrite)  # a refusal leaves no trace
        if self.merged is None or self._folders:
            self._held.callback(self._target.work.lock().release)
            for folder in self._folders:
                self._held.callback(folder.work.lock().release)
            self._locked = True
            self._find(overwrite=overwrite)

    def _find(self, *, overwrite: bool) -> None:
        target = self._target
        self._folders = shards_beside(target)
        before = self._merged_before()
        if before is not None and not overwrite and set(self._tokens()) <= set(before.merged):
            self.merged = before
            return
        if not self._folders:
            raise UsageError(
                f"no shards of {target.path}: there is no {target.path}.shard-1-of-N.prefill\n"
                "run them with prefill score --shard I/N, with this --output, or copy their folders beside it"
            )
        self._require_all()
        self._manifest = self._require_one_job()
        self._require_complete()
        if not overwrite:
            self._require_room()

    def _merged_before(self) -> Manifest | None:
        """The manifest of the output, if it is there and was made of shards."""
        try:
            manifest = Manifest.load(self._target.work)
        except DamagedFileError:
            return None
        made = manifest is not None and manifest.state == "complete" and manifest.merged and self._target.exists()
        return manifest if made else None

    def _tokens(self) -> list[str]:
        """One for each folder; empty where it cannot be read."""
        found = []
        for folder in self._folders:
            try:
                manifest = folder.manifest()
            except PrefillError:
                manifest = None
            record = None if manifest is None else ShardRecord.of_json(manifest.shard)
            found.append("" if record is None else record.token)
        return found

    def _require_all(self) -> None:
        """Every shard of one count is there."""
        path, counts = self._target.path, sorted({folder.shard.count for folder in self._folders})
        if len(counts) > 1:
            listed = " and ".join(map(str, counts))
            raise UsageError(
                f"beside {path} are shards of {listed}: which of them?\n"
                f"remove the folders {path}.shard-*-of-N.prefill of those that are not to be merged"
            )
        there = {folder.shard for folder in self._folders}
        missing = [each for number in range(counts[0]) if (each := Shard(number + 1, counts[0])) not in there]
        if missing:
            raise PrefillError(
                f"{named(missing[:10])} of {path} {'is' if len(missing) == 1 else 'are'} missing: there is no "
                f"{folder_of(self._target, missing[0]).work.location}\n"
                f"run it with --shard {missing[0]}, or copy its folder beside the output"
            )

    def _require_one_job(self) -> Manifest:
        """The first shard's manifest; all are of its job, and each lies in its own folder."""
        found: list[Manifest] = []
        self._records = []
        for folder in self._folders:
            again = f"run it again with --shard {folder.shard} --resume"
            try:
                manifest = folder.manifest()
            except DamagedFileError as error:
                raise DamagedFileError(f"{folder.work.location}/manifest.json is damaged: {error}\n{again}") from None
            record = None if manifest is None else ShardRecord.of_json(manifest.shard)
            if manifest is None or record is None:
                raise PrefillError(f"{folder.work.location} does not say which shard it is\n{again}")
            if record.shard != str(folder.shard):
                raise PrefillError(
                    f"{folder.work.location} is a copy of shard {record.shard}\n"
                    f"remove it, and run shard {folder.shard} or copy that"
                )
            found.append(manifest)
            self._records.append(record)
        for folder, manifest in zip(self._folders, found, strict=True):
            different = found[0].job.differing(manifest.job)
            if different or manifest.job != found[0].job:
                pair = named([self._folders[0].shard, folder.shard])
                raise OutputConflictError(
                    f"{pair} of {self._target.path} belong to different jobs: different "
                    f"{', '.join(different) or 'rows'}\nrun the wrong one again with --overwrite"
                )
        return found[0]

    def _require_complete(self) -> None:
        for folder, record in zip(self._folders, self._records, strict=True):
            if not self._locked and folder.work.in_use():
                folder.work.lock().release()  # raises, and says who uses it
            if record.windows is None:
                raise PrefillError(
                    f"{named([folder.shard])} of {self._target.path} is not complete\n"
                    f"run it again with --shard {folder.shard} --resume; prefill status shows how far it is"
                )
        first = self._records[0]
        for folder, record in zip(self._folders, self._records, strict=True):
            same = (record.windows, record.schema, record.partitions)
            if same != (first.windows, first.schema, first.partitions):
                raise PrefillError(
                    f"{named([self._folders[0].shard, folder.shard])} of {self._target.path} have different columns, "
                    "or read different windows\nrun them again with --overwrite, by one version of prefill"
                )

    def _require_room(self) -> None:
        """Nothing is in the place of the output, but what a merge that was killed has left there."""
        target, job = self._target, self.manifest.job
        begun = any(map(parts.is_part, target.work.names()))
        found = find_resumable(target, job, True, False, quiet=True)
        if found is None or (found.state == "running" and not begun):
            return
        state = "exists" if found.state == "complete" else "is there in part, from a run without --shard"
        raise OutputExistsError(f"{target.path} {state}\nkeep it, or replace it with --overwrite")

    def check(self) -> None:
        """Raise PrefillError unless every row of the input is in the parts of these shards exactly once."""
        self._kinds.clear()
        last = -1
        for window, members in self._windows():
            numbers, whole = [], None
            for folder, name in members:
                info, rows = self._read(folder, name, [ROW])
                if whole is not None and info.window_rows != whole:
                    raise self._wrong(window)
                whole = info.window_rows
                numbers.append(rows[ROW].to_numpy())
                for column, kinds in info.kinds.items():
                    self._kinds[column].update(kinds)
            together = np.sort(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)
            if whole is None or len(together) == 0 or WindowRows.of(together) != whole or whole.first <= last:
                raise self._wrong(window)
            last = whole.last

    def write(self) -> Counts:
        """Make the output of the shards, in the order of the input, and mark it as complete; returns its counts.

        Call `check` before, and `remove` afterwards. Raises as `check` does if parts have changed since.
        """
        target, job, record = self._target, self.manifest.job, self._records[0]
        target.work.clean(lambda name: True)
        recover_publication(target)
        target.clean()
        for name in filter(parts.is_part, target.work.names()):
            target.work.delete(name)
        target.work.delete(heartbeat.NAME)
        manifest = Manifest(job, self._kept_plan())
        manifest.save(target.work)
        schema = to_schema(record.schema, json_text=target.file_format.json_text)
        arrow, counts = schema.arrow(job, self._kinds), Counts()

        def tables(digests: DigestFile) -> Iterator[pa.Table]:
            for rows in self._tables():
                schema.count(counts, rows)
                digests.add(rows)
                yield schema.table(rows, arrow)

        partitions = None if record.partitions is None else to_partitions(record.partitions)
        with writing_digests(target.work) as digests:
            manifest.files = write_output(
                target, job, arrow, tables(digests), json_columns=schema.json_columns, partitions=partitions
            )
        manifest.digests = digests.digest
        manifest.state, manifest.counts = "complete", counts
        manifest.merged = [record.token for record in self._records]
        manifest.save(target.work)
        return counts

    def _kept_plan(self) -> dict[str, Any]:
        """What the shards have stored for this, in all of them alike."""
        return {name: value for name, value in self.manifest.plan.items() if name in _KEPT}

    def remove(self) -> None:
        """Remove the shards, and what a merge that was killed here has left of their folders: the output is there."""
        for folder in self._folders:
            folder.delete()
        for folder in shards_beside(self._target, empty=True):
            with suppress(OutputBusyError):  # a shard that begins anew
                lock = folder.work.lock()
                if not folder.begun():
                    folder.work.remove()
                lock.release()

    def damage(self) -> list[str]:
        """What is wrong with the output that was merged before."""
        merged = self.merged
        return [] if merged is None else self._target.damage(self._target.stored(merged.job, merged.files))

    def _windows(self) -> Iterator[tuple[int, list[tuple[ShardFolder, str]]]]:
        """Every window of the input with its parts. Raises PrefillError for a part of another window."""
        found: dict[int, list[tuple[ShardFolder, str]]] = defaultdict(list)
        for folder in self._folders:
            for name in filter(parts.is_part, folder.work.names()):
                found[parts.window_of(name)].append((folder, name))
        count = self._records[0].windows or 0
        for window in range(max(count, max(found, default=-1) + 1)):
            if window >= count:
                raise self._wrong(window)
            yield window, found.pop(window, [])

    def _tables(self) -> Iterator[pa.Table]:
        for window, members in self._windows():
            read = [self._read(folder, name) for folder, name in members]
            rows = pa.concat_tables([table for _, table in read], promote_options="default")
            rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
            if WindowRows.of(rows[ROW].to_numpy()) != read[0][0].window_rows:
                raise self._wrong(window)
            yield rows

    def _read(self, folder: ShardFolder, name: str, columns: Sequence[str] | None = None) -> tuple[PartInfo, pa.Table]:
        """A part, which must be of its shard and of the job."""
        again = f"run it again with --shard {folder.shard} --resume, then merge again"
        try:
            info, rows = parts.read_part(folder.work, name, columns)
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}\n{again}") from None
        if info.job.digest != self.manifest.job.digest or info.shard != str(folder.shard):
            raise PrefillError(f"{folder.work.location}/{name} belongs to another job or shard\n{again}")
        return info, rows

    def _wrong(self, window: int) -> PrefillError:
        return PrefillError(
            f"the shards of {self._target.path} do not hold every row of window {window} exactly once\n"
            "run each of them again with --resume: rows that are missing are scored again"
        )

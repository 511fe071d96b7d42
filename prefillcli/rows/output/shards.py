"""The shards of a job: each leaves its parts in a work folder beside the output, and these are then joined into the
output.
"""

from __future__ import annotations

import base64
import uuid
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from prefillcli.errors import (
    DamagedFileError,
    OutputBusyError,
    OutputConflictError,
    OutputExistsError,
    PrefillError,
    UsageError,
)
from prefillcli.rows.filesystems import WORK_ENDING, split_path
from prefillcli.rows.input.discovery import Partitions
from prefillcli.rows.output import Shard, parts, store
from prefillcli.rows.output.answers import AnswerColumns
from prefillcli.rows.output.batches import Responses
from prefillcli.rows.output.columns import ROW
from prefillcli.rows.output.destination import NAME, Destination, Manifest
from prefillcli.rows.output.parts import PartIndex
from prefillcli.rows.output.publication import commit, recover_publication
from prefillcli.rows.output.resumption import find_resumable, is_merged, proven_parts
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.output.sink import Sink
from prefillcli.rows.output.store import Store, open_store
from prefillcli.rows.output.tallies import Counts
from prefillcli.stats.arrays import Int64Array


@dataclass
class ShardRecord:
    """The part of a shard's manifest that is needed to write the output."""

    shard: str  # like `2/4`
    schema: dict[str, Any]  # the output's columns (`of_schema`)
    partitions: dict[str, Any] | None  # the folders of a partitioned output (`of_partitions`)
    # Distinguishes this attempt from others, until it starts anew.
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    windows: int | None = None  # windows of the input; set when complete

    @classmethod
    def of(cls, shard: Shard | None, schema: OutputSchema, partitions: Partitions | None) -> ShardRecord:
        return cls(str(shard), of_schema(schema), None if partitions is None else of_partitions(partitions))

    @classmethod
    def of_json(cls, content: Any) -> ShardRecord | None:
        """Return the record that `dataclasses.asdict` gave; None for anything else."""
        try:
            record = cls(**content)
            Shard.parse(record.shard)
        except (TypeError, ValueError):
            return None
        return record


@dataclass(frozen=True)
class ShardFolder:
    """The work folder of a shard."""

    shard: Shard
    work: Store

    def begun(self) -> bool:
        """Return whether it holds anything of a job; a left-over lock does not count."""
        names = self.work.names()
        return NAME in names or any(map(parts.is_part, names))

    def delete(self) -> None:
        """Remove it, the manifest after the parts: a run that is killed here leaves the record that it was merged."""
        self.work.delete_all(filter(parts.is_part, self.work.names()))
        self.work.delete(store.NAME)
        self.work.delete(NAME)
        self.work.remove()


def shards_beside(destination: Destination, *, empty: bool = False) -> list[ShardFolder]:
    """Return the folders of shards that lie beside an output, by count and number: those of a job, or the `empty`
    ones."""
    place, name = split_path(destination.path)
    found = []
    for folder in open_store(place).folders():
        named = Shard.of_name(folder.removesuffix(WORK_ENDING)) if folder.endswith(WORK_ENDING) else None
        if named is not None and named[0] == name:
            found.append(folder_of(destination, named[1]))
    return sorted(
        (each for each in found if each.begun() != empty), key=lambda each: (each.shard.count, each.shard.number)
    )


def folder_of(destination: Destination, shard: Shard) -> ShardFolder:
    """Return the folder of a shard of an output; it need not exist."""
    return ShardFolder(shard, Destination(destination.path, destination.format, shard).work)


_OF_JOB = ("id_name", "json_carried")


def of_schema(schema: OutputSchema) -> dict[str, Any]:
    """Return an output's columns as JSON; whether JSON is written as text follows from the format."""
    plain = {name: getattr(schema, name) for name in _OF_JOB}
    plain |= {
        "responses": schema.lines and {"model": schema.lines.model},
        "groups": sorted(schema.groups),
        "carried": _packed(schema.carried),
    }
    return plain | {"questions": [own.to_json() for own in schema.questions]}


def to_schema(content: dict[str, Any], *, json_text: bool) -> OutputSchema:
    """Return the columns of `of_schema`. Raises KeyError, TypeError, ValueError or ArrowException for anything
    else."""
    questions = tuple(map(AnswerColumns.of_json, content["questions"]))
    rest = {"carried": _unpacked(content["carried"]), "groups": frozenset(content["groups"]), "questions": questions}
    rest["responses"] = None if (found := content["responses"]) is None else Responses(**found)
    return OutputSchema(**content | rest, json_text=json_text)


def of_partitions(partitions: Partitions) -> dict[str, Any]:
    """Return the folders of a partitioned output as JSON."""
    return {
        "schema": _packed(partitions.schema),
        "values": list(partitions.values),
        "folders": list(partitions.folders),
    }


def to_partitions(content: dict[str, Any]) -> Partitions:
    """Return the folders of `of_partitions`. Raises as `to_schema`."""
    return Partitions(_unpacked(content["schema"]), tuple(content["values"]), tuple(content["folders"]))


def named(shards: Sequence[Shard]) -> str:
    """Return the shards' name for a message: `shard 2 of 4`, `shards 2 and 3 of 4`."""
    *others, last = [str(each.number) for each in shards]
    listed = f"shards {', '.join(others)} and {last}" if others else f"shard {last}"
    return f"{listed} of {shards[0].count}"


def _packed(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _unpacked(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


class ShardSink(Sink):
    """Collects the results of a shard in `<output>.shard-I-of-N.prefill/`.

    It is complete when it has all of them, or when the shards were merged and the output exists.
    """

    _without: set[int]  # windows of the input that have no rows of this shard, as far as they were read
    _record: ShardRecord

    @property
    def merged(self) -> bool:
        """Return whether the job's output exists already."""
        return is_merged(self._manifest)

    @property
    def location(self) -> str:
        """The work folder with the parts, or the output if it exists."""
        return self._destination.path if self.merged else self.work.location

    @property
    def empty_input(self) -> bool:
        if self.merged:
            return self.counts.total == 0
        return self._record.windows == 0

    def window_before(self, window: int) -> int:
        """Return the last window before this one that has rows of the shard."""
        before = window - 1
        while before in self._without:
            before -= 1
        return before

    def finished(self, window: int, rows: Int64Array) -> bool:
        """Return whether all of these rows, the shard's rows in a window, are in its parts. Raises as in a `Sink`."""
        if len(rows) == 0:
            self._without.add(window)
            return True
        return super().finished(window, rows)

    def finish(self, windows: int) -> None:
        """Mark the shard as complete. Raises PrefillError if rows are missing.

        `windows` is the number of windows of the input.
        """
        if self.complete:
            return
        self._parts.require_complete(windows, self._without)
        self._lock.check()
        self._record.windows = windows
        manifest = self._manifest
        manifest.state, manifest.counts, manifest.shard = "complete", self._parts.counts, asdict(self._record)
        manifest.save(self.work)

    def _begin(self, *, fresh: bool) -> None:
        self._without = set()
        manifest, shard = self._manifest, self._destination.shard
        if self.merged:
            self._final = manifest.counts or self._destination.count(self.schema.id_name)
            return
        self.work.clean(lambda name: True)
        if fresh:
            self._delete_parts()
        else:
            self._add_parts(proven_parts(self.work, manifest.job, shard))
        found = ShardRecord.of_json(manifest.shard)
        named = found is not None and found.shard == str(shard)
        lost = manifest.counts is None or manifest.counts.total != self._parts.counts.total
        self._record = found if found is not None and named else ShardRecord.of(shard, self.schema, self._partitions)
        if fresh or not named or (manifest.state == "complete" and lost):
            self._record.windows = None
            manifest.state, manifest.counts, manifest.shard = "running", None, asdict(self._record)
            manifest.save(self.work)


SUMS = "sums"  # the key in a shard's ledger of lists of numbers by name, which are added up over all shards
_KEPT = ("evaluation", "max_error_rate", "head_use", SUMS)  # what is settled for the output as it was for the shards


class JoinedShards(ExitStack):
    """All shards of a job, found beside its output; none of them is being written.

    Use it as a context manager: it holds the locks of the output and of the shards.
    """

    def __init__(self, destination: Destination) -> None:
        super().__init__()
        self.manifest: Manifest  # of one of the shards, set by `open`; they are of one job
        self.merged: Manifest | None = None  # that of the output, if it was made from these shards already
        self._destination = destination
        self._locked = False
        self._folders: list[ShardFolder] = []
        self._records: list[ShardRecord] = []

    @property
    def count(self) -> int:
        """The number of the job's shards."""
        return len(self._folders)

    def open(self, *, overwrite: bool) -> None:
        """Find the shards, lock them, and see whether they may be merged.

        Raises UsageError if there are none, if their counts differ, or if the output exists; OutputConflictError if
        they are of different jobs, or the output is another job's; OutputBusyError if one is being written;
        PrefillError if one is missing, incomplete or damaged.
        """
        self._find(overwrite=overwrite)  # a refusal leaves no trace
        if self.merged is None or self._folders:
            self.callback(self._destination.work.lock().release)
            for folder in self._folders:
                self.callback(folder.work.lock().release)
            self._locked = True
            self._find(overwrite=overwrite)

    def _find(self, *, overwrite: bool) -> None:
        destination = self._destination
        self._folders = shards_beside(destination)
        before = self._merged_before()
        if before is not None and not overwrite and set(self._tokens()) <= set(before.merged):
            self.merged = before
            return
        if not self._folders:
            raise UsageError(
                f"no shards of {destination.path}: there is no {destination.path}.shard-1-of-N.prefill\n"
                "run them with prefill score --shard I/N, with this --output, or copy their folders beside it"
            )
        self._require_all()
        self.manifest = self._require_one_job()
        self._require_complete()
        if not overwrite:
            self._require_room()

    def _merged_before(self) -> Manifest | None:
        # The manifest of the output, if that exists and was made from shards.
        try:
            manifest = Manifest.load(self._destination.work)
        except DamagedFileError:
            return None
        made = manifest is not None and manifest.state == "complete" and manifest.merged and self._destination.exists()
        return manifest if made else None

    def _tokens(self) -> list[str]:
        # One for each folder; empty where it cannot be read.
        found = []
        for folder in self._folders:
            try:
                manifest = Manifest.load(folder.work)
            except PrefillError:
                manifest = None
            record = None if manifest is None else ShardRecord.of_json(manifest.shard)
            found.append("" if record is None else record.token)
        return found

    def _require_all(self) -> None:
        # Every shard of one count exists.
        path, counts = self._destination.path, sorted({folder.shard.count for folder in self._folders})
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
                f"{folder_of(self._destination, missing[0]).work.location}\n"
                f"run it with --shard {missing[0]}, or copy its folder beside the output"
            )

    def _require_one_job(self) -> Manifest:
        # The first shard's manifest; all are of its job, and each lies in its own folder.
        found: list[Manifest] = []
        self._records = []
        for folder in self._folders:
            again = f"run it again with --shard {folder.shard} --resume"
            try:
                manifest = Manifest.load(folder.work)
            except DamagedFileError as error:
                raise DamagedFileError(f"{folder.work.location}/manifest.json is damaged: {error}\n{again}") from None
            record = None if manifest is None else ShardRecord.of_json(manifest.shard)
            if manifest is None or record is None:
                raise PrefillError(f"{folder.work.location} does not name its shard\n{again}")
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
                    f"{pair} of {self._destination.path} belong to different jobs: different "
                    f"{', '.join(different) or 'rows'}\nrun the wrong one again with --overwrite"
                )
        sums: dict[str, list[float]] = {}
        for manifest in found:
            for name, numbers in manifest.settled.get(SUMS, {}).items():
                sums[name] = np.add(numbers, sums.get(name, 0.0)).tolist()
        return replace(found[0], settled=found[0].settled | ({SUMS: sums} if sums else {}))

    def _require_complete(self) -> None:
        for folder, record in zip(self._folders, self._records, strict=True):
            if not self._locked and folder.work.in_use():
                folder.work.lock().release()  # raises an error that names its owner
            if record.windows is None:
                raise PrefillError(
                    f"{named([folder.shard])} of {self._destination.path} is not complete\n"
                    f"run it again with --shard {folder.shard} --resume; prefill status shows how far it is"
                )
        first = self._records[0]
        for folder, record in zip(self._folders, self._records, strict=True):
            same = (record.windows, record.schema, record.partitions)
            if same != (first.windows, first.schema, first.partitions):
                raise PrefillError(
                    f"{named([self._folders[0].shard, folder.shard])} of {self._destination.path} have different "
                    "columns, or read different windows\nrun them again with --overwrite, by one version of prefill"
                )

    def _require_room(self) -> None:
        # Nothing is in the output's place but remains of a merge that was killed.
        destination, job = self._destination, self.manifest.job
        begun = any(map(parts.is_part, destination.work.names()))
        found = find_resumable(destination, job, True, False, quiet=True)
        if found is None or (found.state == "running" and not begun):
            return
        state = "exists" if found.state == "complete" else "is there in part, from a run without --shard"
        raise OutputExistsError(f"{destination.path} {state}\nkeep it, or replace it with --overwrite")

    def check(self) -> None:
        """Raise PrefillError unless every row of the input is in the parts of these shards exactly once."""
        path = self._destination.path
        self._parts = PartIndex(f"the shards of {path}", "run each of them again with --resume, then merge again")
        members = defaultdict(list)
        for folder in self._folders:
            for name in filter(parts.is_part, folder.work.names()):
                members[parts.window_of(name)].append((folder, name))
        for window in sorted(members):
            numbers = [self._add(folder, name) for folder, name in members[window]]
            self._parts.require_rows(window, np.sort(np.concatenate(numbers)))
        self._parts.require_complete(self._records[0].windows or 0)

    def _add(self, folder: ShardFolder, name: str) -> Int64Array:
        # Take in a part, which must be of its shard and of the job; returns the numbers of its rows.
        again = f"run it again with --shard {folder.shard} --resume, then merge again"
        try:
            info, rows = parts.read_part(folder.work, name, [ROW])
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}\n{again}") from None
        if info.job.digest != self.manifest.job.digest or info.shard != str(folder.shard):
            raise PrefillError(f"{folder.work.location}/{name} belongs to another job or shard\n{again}")
        self._parts.add(folder.work, info, expected=info.window_rows)
        return np.asarray(rows[ROW], np.int64)

    def write(self) -> Counts:
        """Make the output from the shards, in the order of the input, and mark it as complete; returns its counts.

        Call `check` before, and `remove` afterwards. Raises as `check` does if parts have changed since.
        """
        destination, job, record = self._destination, self.manifest.job, self._records[0]
        destination.work.clean(lambda name: True)
        recover_publication(destination)
        destination.clean()
        for name in filter(parts.is_part, destination.work.names()):
            destination.work.delete(name)
        destination.work.delete(store.NAME)
        # The values that the shards have stored for the output; but for sums they are the same in all of them.
        manifest = Manifest(job, {name: value for name, value in self.manifest.settled.items() if name in _KEPT})
        manifest.save(destination.work)
        schema = to_schema(record.schema, json_text=destination.file_format.json_text)
        partitions = None if record.partitions is None else to_partitions(record.partitions)
        manifest.merged = [record.token for record in self._records]
        return commit(destination, manifest, schema, self._parts, partitions)

    def remove(self) -> None:
        """Remove the shards, and remains of their folders from a merge that was killed here: the output exists."""
        for folder in self._folders:
            folder.delete()
        for folder in shards_beside(self._destination, empty=True):
            with suppress(OutputBusyError):  # a shard that starts anew
                lock = folder.work.lock()
                if not folder.begun():
                    folder.work.remove()
                lock.release()

    def damage(self) -> list[str]:
        """List the changed or missing files of an output that was merged before."""
        merged = self.merged
        return [] if merged is None else self._destination.damage(self._destination.stored(merged.job, merged.files))

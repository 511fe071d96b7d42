"""The output in its place: made from the parts of a job, all at once or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import chain
from typing import IO

import pyarrow as pa

from prefillcli.errors import PrefillError, run_again
from prefillcli.rows.filesystems import writing
from prefillcli.rows.input.discovery import Partitions
from prefillcli.rows.output import parts
from prefillcli.rows.output.destination import OLD, SUCCESS, Destination, Job, Manifest, Published, is_partition
from prefillcli.rows.output.parts import PartIndex
from prefillcli.rows.output.schema import OutputSchema
from prefillcli.rows.output.store import LocalStore, Store, make_folder, walk_folder
from prefillcli.rows.output.tallies import Counts
from prefillcli.rows.proof import JOB_KEY, Digesting
from prefillcli.runtime import file_calls

_NEW = "new"


def publication(destination: Destination) -> _Renamed | _InPlace:
    """Return the way to write the output of a directory: `create` its files, then `publish` them together."""
    store, work = destination.store, destination.work
    if isinstance(store, LocalStore) and isinstance(work, LocalStore) and not _shared(destination, store.location):
        return _Renamed(destination, store.location, work.location)
    return _InPlace(destination, store)


def recover_publication(destination: Destination) -> None:
    """Clear up after a run that was killed while publishing: an output that was put aside comes back."""
    work = destination.work
    if not destination.directory or not isinstance(destination.store, LocalStore) or not isinstance(work, LocalStore):
        return
    old, new, place = (os.path.join(work.location, OLD), os.path.join(work.location, _NEW), destination.store.location)
    with writing(place):
        if file_calls.is_folder(old) and not file_calls.is_folder(place):
            file_calls.move_folder(old, place)
        for folder in (old, new):
            _remove(folder)


class _Renamed:
    """Built in the work folder, and put in place by a rename.

    An older output is put aside first, so for an instant there is none.
    """

    def __init__(self, destination: Destination, place: str, work: str) -> None:
        self._destination = destination
        self._place = place
        self._new, self._old = os.path.join(work, _NEW), os.path.join(work, OLD)
        self._store = LocalStore(self._new)
        recover_publication(destination)

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._store.create(name)

    def publish(self, published: Published) -> None:
        self._store.put_bytes(SUCCESS, published.to_json())
        with writing(self._place):
            parent = os.path.dirname(self._place)
            make_folder(parent)
            if _shared(self._destination, self._place):  # since the publication began
                raise PrefillError(f"{self._place} now holds other files too\n{run_again()}")
            if file_calls.is_folder(self._place):
                with suppress(OSError):  # the modes of a folder that its users have set up
                    file_calls.copy_modes(self._place, self._new)
                file_calls.move_folder(self._place, self._old)
            file_calls.move_folder(self._new, self._place)
            file_calls.sync_folder(parent)
            _remove(self._old)


class _InPlace:
    """Written directly into its final folder, `_SUCCESS` last: in object stores, and where the folder holds other
    files too."""

    def __init__(self, destination: Destination, store: Store) -> None:
        self._destination = destination
        self._store = store
        self._begun = False

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        if not self._begun:
            self._store.delete(SUCCESS)
            self._begun = True
        with self._store.create(name) as file:
            yield file

    def publish(self, published: Published) -> None:
        # Raises OutputBusyError if another run has published an output meanwhile, where the store can detect that.
        self._store.delete_all(sorted(set(self._destination.files()) - published.files.keys() - {SUCCESS}))
        self._store.put_bytes(SUCCESS, published.to_json(), new=True)


def _shared(destination: Destination, place: str) -> bool:
    # Whether a local folder cannot be put aside: it holds other files too, something is mounted there, or this
    # process is in it.
    if os.path.ismount(place) or f"{os.path.abspath('.')}/".startswith(f"{os.path.realpath(place)}/"):
        return True
    with writing(place):
        return any(
            not (is_partition(os.path.basename(path)) if is_folder else destination.is_ours(path))
            for path, is_folder in walk_folder(place, is_partition)
        )


def _remove(folder: str) -> None:
    with suppress(FileNotFoundError):
        file_calls.remove_tree(folder)


def commit(
    destination: Destination,
    manifest: Manifest,
    schema: OutputSchema,
    index: PartIndex,
    partitions: Partitions | None = None,
    *,
    new: bool = False,
) -> Counts:
    """Make the output from the rows in the parts of a job, in the order of the input, and its digests.

    Returns the counts of its rows. As the last step the manifest of the work folder records that the job is complete.
    With `partitions` the files of a directory lie in folders named like those of the input. A `new` file replaces no
    other (`Store.create`).
    """
    metadata = {JOB_KEY: json.dumps(manifest.job.to_json()).encode()}
    arrow, counts = schema.arrow(index.json_kinds).with_metadata(metadata), Counts()
    with destination.work.create(parts.NAME) as file:
        digests = Digesting(file)

        def tables() -> Iterator[pa.Table]:
            for rows in index.tables():
                schema.count(counts, rows)
                digests.write(parts.digests_of(rows))
                yield schema.table(rows, arrow)

        if destination.directory:
            files = _write_directory(destination, manifest.job, arrow, tables(), schema.json_columns, partitions)
        else:
            with destination.store.create(destination.name, new=new) as output:
                files = {destination.name: destination.file_format.write(output, arrow, tables(), schema.json_columns)}
    manifest.files, manifest.digests, manifest.before, manifest.retries = files, digests.digest(), None, False
    manifest.state, manifest.counts = "complete", counts
    manifest.save(destination.work)
    return counts


def _write_directory(
    destination: Destination,
    job: Job,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    json_columns: tuple[str, ...],
    partitions: Partitions | None,
) -> dict[str, str]:
    output, files = publication(destination), {}
    runs = (run for table in tables for run in ([("", table)] if partitions is None else partitions.runs(table)))
    first = next(runs, ("", schema.empty_table()))
    for number, (folder, rows) in enumerate(chain([first], runs)):  # the numbers are in the order of the input
        name = f"{folder}/part-{number:05d}.parquet".removeprefix("/")
        with output.create(name) as file:
            files[name] = destination.file_format.write(file, rows.schema, [rows], json_columns)
    output.publish(Published(job, files))
    return files

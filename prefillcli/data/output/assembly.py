"""The files of an output, made of the rows of all parts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import pyarrow as pa

from prefillcli.data.output.manifest import Job
from prefillcli.data.output.publication import publication
from prefillcli.data.output.target import Published, Target
from prefillcli.data.reading.partitions import Partitions


def write_output(
    target: Target,
    job: Job,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    *,
    json_columns: tuple[str, ...] = (),
    partitions: Partitions | None = None,
    new: bool = False,
) -> dict[str, str]:
    """Write the tables, which have this schema, as the output of a job; returns its files by name, with their digests.

    The values of `json_columns` are JSON already. With `partitions` the files of a directory lie in folders named like
    those of the input. With `new` a file replaces none (`Store.create`).
    """
    if target.directory:
        return _write_directory(target, job, schema, tables, json_columns, partitions)
    with target.store.create(target.name, new=new) as file:
        return {target.name: target.file_format.write(file, schema, tables, json_columns)}


def _write_directory(
    target: Target,
    job: Job,
    schema: pa.Schema,
    tables: Iterable[pa.Table],
    json_columns: tuple[str, ...],
    partitions: Partitions | None,
) -> dict[str, str]:
    output, files = publication(target), {}
    runs = (run for table in tables for run in ([("", table)] if partitions is None else partitions.runs(table)))
    first = next(runs, ("", schema.empty_table()))
    for number, (folder, rows) in enumerate(chain([first], runs)):  # the numbers are in the order of the input
        name = f"{folder}/part-{number:05d}.parquet".removeprefix("/")
        with output.create(name) as file:
            files[name] = target.file_format.write(file, rows.schema, [rows], json_columns)
    output.publish(Published(job, files))
    return files

"""Where the output of a job goes."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from prefillcli.data.counts import Counts
from prefillcli.data.discovery import WORK_ENDING
from prefillcli.data.filesystems import filesystem_of
from prefillcli.data.store import Store, open_store
from prefillcli.errors import UsageError

METADATA = b"prefillcli"
"""Key of the job's digest in the metadata of a Parquet output."""
_COUNTED = (
    "score", "prediction", "prompt_tokens", "computed_tokens", "seconds", "method", "truncated", "error",
    "error_detail",
)  # fmt: skip
_DIRECTORY_PART = re.compile(r"part-\d{5,}\.parquet")


@dataclass(frozen=True)
class Target:
    """Where the output goes, and in which form."""

    path: str
    kind: Literal["parquet", "jsonl", "directory"]
    codec: str | None = None

    @classmethod
    def parse(cls, output: str) -> Target:
        """Raises UsageError for an unknown ending."""
        path = output.rstrip("/")
        lower = path.lower()
        if output.endswith("/") or _is_directory(output):
            return cls(path, "directory")
        if lower.endswith((".parquet", ".pq")):
            return cls(path, "parquet")
        for ending, codec in ((".jsonl", None), (".jsonl.gz", "gzip"), (".jsonl.zst", "zstd")):
            if lower.endswith(ending):
                return cls(path, "jsonl", codec)
        raise UsageError(
            f"unknown ending of --output {output}\n"
            "use .parquet, .jsonl (.gz, .zst), or end it in / for a directory of parts"
        )

    @cached_property
    def store(self) -> Store:
        """The folder that holds the output."""
        return open_store(self.path if self.kind == "directory" else _parent(self.path))

    @cached_property
    def work(self) -> Store:
        """The work folder."""
        return open_store(self.path + WORK_ENDING)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def is_ours(self, name: str) -> bool:
        """Whether a file of `store` is part of the output."""
        return bool(_DIRECTORY_PART.fullmatch(name)) if self.kind == "directory" else name == self.name

    def exists(self) -> bool:
        return any(map(self.is_ours, self.store.names()))

    def digest(self) -> str | None:
        """The digest of the job that wrote the output, if the output tells."""
        if self.kind == "jsonl":
            return None
        try:
            with self.store.read(next(filter(self.is_ours, self.store.names()))) as file:
                return str(json.loads(pq.read_schema(file).metadata[METADATA])["digest"])
        except (StopIteration, pa.ArrowException, OSError, ValueError, KeyError, TypeError):
            return None

    def count(self, id_name: str | None = None) -> Counts:
        """Count the rows of a Parquet output, whose ids are in the column `id_name`."""
        counts = Counts()
        for name in filter(self.is_ours, self.store.names()):
            with self.store.read(name) as file:
                for batch in pq.ParquetFile(file).iter_batches(columns=[*_COUNTED, id_name or "row"]):
                    counts.add_rows(pa.Table.from_batches([batch]), id_name=id_name)
        return counts


def _parent(path: str) -> str:
    folder, slash, _ = path.rpartition("/")
    return f"{folder}/" if folder.endswith(("/", ":")) else folder or slash or "."


def _is_directory(path: str) -> bool:
    filesystem, inner = filesystem_of(path)
    return bool(filesystem.isdir(inner))

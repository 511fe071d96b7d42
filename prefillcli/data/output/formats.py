"""The formats of an output: the ending that asks for each, and how its files are written and read back.

What a format needs is imported only when a file is written or read, so that `--help` may read the registry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa


class FileFormat(Protocol):
    """How rows are written to one file, and read back. A damaged file raises what pyarrow raises, or ValueError."""

    @property
    def sealed(self) -> bool:
        """Whether a file proves itself: it names its job, and holds the digest of its other bytes."""

    @property
    def json_text(self) -> bool:
        """Whether values carried from JSON Lines are written as the JSON that they are, not with a column's type."""

    def write(
        self, file: IO[bytes], schema: pa.Schema, tables: Iterable[pa.Table], json_columns: Collection[str]
    ) -> str:
        """Write the tables, whose columns are those of `schema`; returns the digest of the file (`seals.digest_of`).

        `file` is open for writing and reading. The values of `json_columns` are JSON already.
        """

    def read(self, file: IO[bytes], names: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of a file, piece by piece; where `json_text` holds, carried columns come as JSON text."""

    def column_type(self, file: IO[bytes], name: str) -> pa.DataType:
        """The type in which a carried column is read back."""

    def job_of(self, file: IO[bytes]) -> Any:
        """What a sealed file says of its job, as `Job.of_json` takes it."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A row of the registry."""

    endings: tuple[str, ...]
    """Any of these asks for it; messages name the first."""
    meaning: str
    open: Callable[[], FileFormat]
    """The format of its file; of a directory that of every part."""
    directory: bool = False

    @property
    def ending(self) -> str:
        return self.endings[0]


def _parquet() -> FileFormat:
    from prefillcli.data.output.file_formats import ParquetFormat

    return ParquetFormat()


def _jsonl(codec: str | None) -> FileFormat:
    from prefillcli.data.output.file_formats import JsonlFormat

    return JsonlFormat(codec)


DIRECTORY = OutputFormat(("/",), "a folder of Parquet parts", _parquet, directory=True)
FORMATS = (
    OutputFormat((".parquet", ".pq"), "a Parquet file", _parquet),
    OutputFormat((".jsonl",), "JSON Lines", lambda: _jsonl(None)),
    OutputFormat((".jsonl.gz",), "JSON Lines, compressed with gzip", lambda: _jsonl("gzip")),
    OutputFormat((".jsonl.zst",), "JSON Lines, compressed with Zstandard", lambda: _jsonl("zstd")),
    DIRECTORY,
)
FILE_ENDINGS = tuple(each.ending for each in FORMATS if not each.directory)


def format_of(path: str) -> OutputFormat | None:
    """The format that a path asks for; None for an unknown ending."""
    lower = path.lower()
    return next((each for each in FORMATS if lower.endswith(each.endings)), None)


# The share of a job that one process scores, where several machines share it.


_TEXT = re.compile(r"\s*(\d{1,6})\s*/\s*(\d{1,6})\s*")
_ENDING = re.compile(r"\.shard-(\d{1,6})-of-(\d{1,6})$")


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Share `number`, from 1, of `count` shares."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard of a text like `2/4`. Raises ValueError."""
        found = _TEXT.fullmatch(text)
        shard = cls(int(found[1]), int(found[2])) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise ValueError("must be I/N, with I from 1 to N: 2/4 is the second of four shards")
        return shard

    @classmethod
    def of_name(cls, name: str) -> tuple[str, Shard] | None:
        """The name before a shard's `ending`, and the shard; None for a name without one."""
        found = _ENDING.search(name)
        if found is None or found[0] != cls(int(found[1]), int(found[2])).ending:
            return None
        return name[: found.start()], cls(int(found[1]), int(found[2]))

    @property
    def ending(self) -> str:
        """What the names of its files have behind the name of the job's output."""
        return f".shard-{self.number}-of-{self.count}"

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

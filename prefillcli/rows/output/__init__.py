"""Rows out: the formats of an output, and the shares of a job.

This maps endings to formats, without importing the code that reads and writes them, so that `--help` may use it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ANSWER = "answer"  # the name of the only question: that of `--ask`, or of an output without named ones


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """A row of the registry."""

    endings: tuple[str, ...]  # any of these asks for it; messages name the first
    meaning: str
    codec: str | None = None  # of JSON Lines: as pyarrow's streams name it
    delimiter: str = ""  # of CSV, else empty
    parquet: bool = False
    directory: bool = False

    @property
    def ending(self) -> str:
        return self.endings[0]


DIRECTORY = OutputFormat(("/",), "a folder of Parquet parts", parquet=True, directory=True)
FORMATS = (
    OutputFormat((".parquet", ".pq"), "a Parquet file", parquet=True),
    OutputFormat((".jsonl",), "JSON Lines"),
    OutputFormat((".jsonl.gz",), "JSON Lines, compressed with gzip", "gzip"),
    OutputFormat((".jsonl.zst",), "JSON Lines, compressed with Zstandard", "zstd"),
    OutputFormat((".csv",), "CSV", delimiter=","),
    OutputFormat((".tsv",), "TSV", delimiter="\t"),
    DIRECTORY,
)
FILE_ENDINGS = tuple(each.ending for each in FORMATS if not each.directory)


def format_of(path: str) -> OutputFormat | None:
    """Return the format that a path asks for; None for an unknown ending."""
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
        """Parse the shard of a text like `2/4`. Raises ValueError."""
        found = _TEXT.fullmatch(text)
        shard = cls(int(found[1]), int(found[2])) if found else None
        if shard is None or not 1 <= shard.number <= shard.count:
            raise ValueError("must be I/N, with I from 1 to N: 2/4 is the second of four shards")
        return shard

    @classmethod
    def of_name(cls, name: str) -> tuple[str, Shard] | None:
        """Return the name before a shard's `ending`, and the shard; None for a name without one."""
        found = _ENDING.search(name)
        if found is None or found[0] != cls(int(found[1]), int(found[2])).ending:
            return None
        return name[: found.start()], cls(int(found[1]), int(found[2]))

    @property
    def ending(self) -> str:
        """The ending of its files' names, after the name of the job's output."""
        return f".shard-{self.number}-of-{self.count}"

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

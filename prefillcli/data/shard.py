"""Which share of a job's rows one process scores, where several machines share a job."""

from __future__ import annotations

import re
from dataclasses import dataclass

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

"""What must hold of an output after a fault: it is absent or whole, `verify` agrees, and its job can go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prefillcli.errors import OutputBusyError
from prefillcli.rows.output.destination import SUCCESS, Destination
from prefillcli.tools.verify import Verification
from tests.faults.file_faults import Kind
from tests.faults.nursery import Nursery, Outcome
from tests.unit.rows.outputs import EXPECTED, FINGERPRINT, open_sink, read


def rows_shown(output: str) -> list[dict[str, Any]] | None:
    """What a reader finds; None for nothing."""
    if output.endswith("/"):
        return read(output) if os.path.exists(output + SUCCESS) else None
    return read(output) if os.path.exists(output) else None


def proven(output: str) -> bool:
    """Whether `prefill verify` finds nothing wrong."""
    verification = Verification(Destination.parse(output))
    verification.run()
    return not verification.problems


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


@dataclass(frozen=True)
class OutputChecks:
    """Of one output, in whichever folder."""

    nursery: Nursery
    kind: Kind
    name: str
    again: Callable[..., None]
    """Goes on with the job in a folder."""
    anew: Callable[..., None] | None = None
    """Begins it anew where going on is refused because the output is another job's."""
    makes_output: bool = True
    """Whether the job itself makes the output, not only `again`."""
    older: list[dict[str, Any]] | None = None
    """The rows of an output that was there."""
    others: tuple[str, ...] = ()
    """Other files in the folder of the output."""
    begin: Path | None = None
    """How the folder was when the job began."""

    def absent_or_whole(self, folder: Path) -> None:
        shown = rows_shown(f"{folder}/{self.name}")
        allowed = [self.older, EXPECTED] if self.makes_output else [self.older]
        assert shown is None or shown in allowed
        if proven(f"{folder}/{self.name}"):
            assert shown is not None

    def kept_out(self, folder: Path) -> None:
        """Of a process that hangs: nothing is shown in part, and none gets in beside it."""
        self.absent_or_whole(folder)
        output = f"{folder}/{self.name}"
        if Destination.parse(output).work.in_use():
            with pytest.raises(OutputBusyError):
                open_sink(output, fingerprint=FINGERPRINT | {"model": "another"}, overwrite=True)
        elif self.makes_output:
            before = set() if self.begin is None else files_in(self.begin)
            assert {path for path in files_in(folder) - before if not path.endswith("/lock")} == set()

    def goes_on(self, folder: Path, outcome: Outcome) -> None:
        output, name = f"{folder}/{self.name}", self.name.rstrip("/")
        self.absent_or_whole(folder)
        if outcome.done and self.makes_output:
            assert rows_shown(output) == EXPECTED
            assert proven(output)
        if outcome.refusal is not None:
            assert self.kind is not Kind.SHORT
            assert str(folder) in outcome.refusal
        resumed = self.nursery.run(None, self.again, folder)
        if self.anew is not None and resumed.refusal is not None and "belongs to another job" in resumed.refusal:
            assert rows_shown(output) == self.older
            resumed = self.nursery.run(None, self.anew, folder)
        assert resumed.done
        assert rows_shown(output) == EXPECTED
        assert proven(output)
        assert sorted(os.listdir(f"{folder}/{name}.prefill")) == ["lock", "manifest.json", "row-digests.bin"]
        assert sorted(os.listdir(folder)) == sorted([name, f"{name}.prefill"])
        if self.name.endswith("/"):
            assert sorted(os.listdir(output)) == sorted(
                [SUCCESS, *(f"part-0000{n}.parquet" for n in range(3)), *self.others]
            )

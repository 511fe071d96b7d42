"""The parts that a work folder holds: which rows of which window, and whether they are all there."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import numpy as np
import pyarrow as pa

from prefillcli.data.output import parts
from prefillcli.data.output.counts import Counts
from prefillcli.data.output.parts import PartInfo, WindowRows
from prefillcli.data.output.store import Store
from prefillcli.data.output.tallies import ROW
from prefillcli.data.rows import Int64Array
from prefillcli.errors import DamagedFileError, OutputConflictError, PrefillError


class _WindowParts:
    """The parts of one window."""

    def __init__(self, rows: WindowRows) -> None:
        self.rows = rows
        self.numbers: list[int] = []
        self.written = 0
        self.carried: list[tuple[int, str]] = []

    @property
    def whole(self) -> bool:
        return self.written == self.rows.count


class PartIndex:
    """The parts of a job by window. Parts are added one by one; their rows are read only when asked for."""

    def __init__(self, work: Store) -> None:
        self.counts = Counts()
        """Of all rows in the parts."""
        self.json_kinds: dict[str, set[str]] = {}
        """Of every column carried from JSON Lines which kinds of values it holds (see json_columns)."""
        self.next_sequence = 0
        """The number of the next part in the job."""
        self._work = work
        self._windows: dict[int, _WindowParts] = {}
        self._rows: dict[int, set[int]] = {}  # of windows that were asked for and are not whole

    def __bool__(self) -> bool:
        return bool(self._windows)

    def add(self, info: PartInfo, rows: Sequence[int] = ()) -> None:
        """Take in a part; `rows` are its row numbers where its window is being written."""
        window = self._windows.setdefault(info.window, _WindowParts(info.expected_rows))
        window.numbers.append(info.number)
        window.written += info.counts.total
        if info.carried is not None:
            window.carried = info.carried
        self.next_sequence = max(self.next_sequence, info.sequence + 1)
        self.counts.add(info.counts)
        for name, kinds in info.kinds.items():
            self.json_kinds.setdefault(name, set()).update(kinds)
        if window.whole:
            self._rows.pop(info.window, None)
        elif info.window in self._rows:
            self._rows[info.window].update(rows)

    def next_number(self, window: int) -> int:
        """The number of the next part in its window."""
        found = self._windows.get(window)
        return max(found.numbers, default=-1) + 1 if found else 0

    def rows(self, window: int) -> set[int]:
        """Numbers of the rows of a window that are in its parts."""
        found = self._windows.get(window)
        if found is None or window in self._rows:
            return set(self._rows.setdefault(window, set()))
        rows = set(self._read(window, [ROW])[ROW].to_pylist())
        if not found.whole:
            self._rows[window] = rows
        return set(rows)

    def carried(self, window: int) -> list[tuple[int, str]]:
        """The blocks that a window hands to the next one."""
        found = self._windows.get(window)
        return list(found.carried) if found else []

    def holds(self, window: int, rows: Int64Array) -> bool:
        """Whether every row of a window of the input, which has these rows, is in its parts.

        Raises OutputConflictError if the parts are of other rows.
        """
        found = self._windows.get(window)
        if found is None:
            return False
        if found.rows != WindowRows.of(rows):
            raise OutputConflictError(
                f"{self._work.location} holds other rows for window {window} than the input has now\n"
                "start over with --overwrite"
            )
        return found.whole

    def require_complete(self, windows: int, without: Container[int] = ()) -> None:
        """Raise PrefillError unless each of the input's `windows` windows is there, once and whole.

        There must be nothing of those `without` rows of this shard.
        """
        last = -1
        for window in range(max(windows, max(self._windows, default=-1) + 1)):
            found = self._windows.get(window)
            if found is None and window in without:
                continue
            if found is None or not found.whole or found.rows.first <= last or window >= windows:
                raise PrefillError(
                    f"{self._work.location}: rows of window {window} are missing or doubled\n"
                    "run again with --resume; if this stays, with --overwrite"
                )
            last = found.rows.last

    def tables(self) -> Iterator[pa.Table]:
        """The rows, window by window, each in the order of the input.

        Raises DamagedFileError or PrefillError if the parts of a window do not hold its rows any more.
        """
        for window in sorted(self._windows):
            rows = self._read(window)
            rows = rows.take(pa.array(np.argsort(rows[ROW].to_numpy(), kind="stable")))
            if WindowRows.of(rows[ROW].to_numpy()) != self._windows[window].rows:
                raise PrefillError(
                    f"{self._work.location}: the parts of window {window} do not hold its rows any more\n"
                    "run again with --resume: they are scored again"
                )
            yield rows

    def _read(self, window: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows in the parts of a window. Raises DamagedFileError if a part is damaged."""
        names = [parts.part_name(window, number) for number in self._windows[window].numbers]
        try:
            found = [part.result()[1] for _, part in parts.read_parts(self._work, names, columns)]
            return pa.concat_tables(found, promote_options="default")  # an earlier version wrote fewer columns
        except DamagedFileError as error:
            raise DamagedFileError(f"{error}\nrun again with --resume: its rows are scored again") from None

"""When a run will end."""

from __future__ import annotations

import time
from collections.abc import Callable

from prefillcli.plan.pack import Pack
from prefillcli.plan.plan import Plan

#: Seconds that the model takes for a plan.
Predict = Callable[[Plan], float]


class RemainingTime:
    """Seconds to the end of a run: the prediction for the rest, scaled by how the first part kept to its own.

    `rows` are all rows of the job, None if not known. Rows that are not planned yet are expected to take as long as
    those that are. So many `workers` compute packs at a time.
    """

    def __init__(self, predict: Predict, rows: int | None, workers: int = 1) -> None:
        self.ran = 0.0
        """Seconds that were predicted for the packs that are done."""
        self.least_pack = 0.0
        """Seconds that a pack takes at least: in which its weights are read."""
        self._predict = predict
        self._rows_left = rows
        self._workers = workers
        self._rows = 0  # of windows that were planned
        self._planned = 0.0  # predicted seconds of these windows
        self._other = 0.0  # what the draft took for them
        self._done = 0.0  # predicted seconds of what is done of the packs that are not ...
        self._took = 0.0  # ... and what the finished packs took
        self._running: dict[int, tuple[float, float]] = {}  # by a pack's number: predicted seconds, and when it began

    def skip(self, rows: int) -> None:
        """Leave out rows that were done before this run."""
        if self._rows_left is not None:
            self._rows_left -= rows

    def plan(self, packs: list[Pack], rows: int, draft_seconds: float) -> None:
        """A window of `rows` rows will run as `packs`."""
        self.skip(rows)
        self._rows += rows
        self._planned += sum(map(self._seconds, packs)) if self.least_pack else self._predict(Plan(packs, 0))
        self._other += draft_seconds

    def begin(self, pack: Pack) -> None:
        """A pack starts."""
        self._running[pack.index] = self._seconds(pack), time.monotonic()

    def _seconds(self, pack: Pack) -> float:
        return max(self._predict(Plan([pack], 0)), self.least_pack)

    def step(self, pack: Pack, share: float) -> None:
        """A further `share` of the pack is done, 0 to 1."""
        self._done += self._running[pack.index][0] * share

    def end(self, pack: Pack) -> None:
        """The pack is done."""
        predicted, begun = self._running.pop(pack.index)
        self.ran += predicted
        if not self._running:
            self._done = self.ran
        self._took += time.monotonic() - begun

    def seconds_left(self) -> float | None:
        """None while nothing is planned, or the number of rows is not known."""
        if self._rows_left is None or not self._rows:
            return None
        now = time.monotonic()
        took = self._took + sum(now - begun for _, begun in list(self._running.values()))
        scale = took / self._done if self._done > 0 and took > 0 else 1.0
        more = max(self._rows_left, 0) / self._rows
        packs = (max(self._planned - self._done, 0.0) + self._planned * more) * scale
        return packs / self._workers + self._other * more

"""A warning where the model hardly ever answers with a label: then the scores compare what it would not say."""

from __future__ import annotations

from collections.abc import Iterable

from prefillcli.data.prompts.labels import ClassLabels, Labels
from prefillcli.data.rows import ScoredRow
from prefillcli.runtime import log
from prefillcli.stats.probabilities import label_mass

LEAST_MASS = 1e-3
"""Of the label mass, on average over a window."""


class LabelMassCheck:
    """Looks at the first window with rows that are read to the end, and warns once at most.

    Classes of a head are all that it can say, so they have no such mass.
    """

    def __init__(self, labels: Labels) -> None:
        self._looks = not isinstance(labels, ClassLabels)
        self._window: int | None = None
        self._masses: list[float] = []

    def take(self, window: int, rows: Iterable[ScoredRow]) -> None:
        """Rows of the window with this index are scored."""
        if self._looks and self._window in (None, window):
            self._masses += [float(label_mass(each.logprobs)) for each in rows if each.exit_layer is None]
            self._window = window if self._masses else None

    def end(self, window: int) -> None:
        """All rows of a window are scored."""
        if not self._looks or window != self._window:
            return
        self._looks, rows = False, len(self._masses)
        mean = sum(self._masses) / rows
        if mean < LEAST_MASS:
            log.warning(
                f"the labels have {mean:.1g} of the probability on average over the first rows ({rows:,}): the model "
                "hardly ever answers with one of them; check that the model is the right one, that the template asks "
                "for the labels, and how --labels spells them (a space before a word is part of its token)"
            )

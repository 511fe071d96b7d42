"""Labels that are classes of a model's head: the same after every prompt."""

from __future__ import annotations

from collections.abc import Sequence

from prefillcli.data.prompts.labels import Label, LabelError, Labels, LabelSet
from prefillcli.stats.probabilities import Measure


class ClassLabels(Labels):
    """The labels that some outputs of a head stand for.

    `outputs` has the number of each label's output, alone in a tuple; ~number is the complement of an output, which is
    as probable as that output is not.
    """

    def __init__(self, labels: Sequence[Label], outputs: LabelSet, measure: Measure) -> None:
        self.labels = tuple(labels)
        self.names = tuple(label.name for label in labels)
        self.sets = [outputs]
        self.measure = measure

    def resolve_all(self, tails: Sequence[str], *, literal: bool = False) -> list[int | LabelError]:
        """The one set of labels for each prompt, however it ends."""
        return [0] * len(tails)

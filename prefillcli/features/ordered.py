"""`--label-values`: labels that stand for numbers, and the mean over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature
from prefillcli.options.groups import LabelValues
from prefillcli.options.option import ANSWERS, Settings, option

if TYPE_CHECKING:
    from prefillcli.core.feature import Labels, Opened, Opening




class Ordered(Feature):
    """The values of a job's labels."""

    order = 6
    options = {"score": ValueOptions}
    columns = ("ordered",)

    @classmethod
    def asked(cls, settings: ValueOptions) -> bool:
        return bool(settings.label_values)

    def labels(self, opened: Opened) -> Labels:
        from prefillcli.models.open import answer_labels
        from prefillcli.stats.evaluation import Measure

        found = answer_labels(opened, self.settings)
        if found.measure is Measure.SHARES:  # the values of other labels are refused as `meaningless`
            found.values = self.settings.label_values
        return found

    def labels_named(self, opening: Opening) -> None:
        from prefillcli.data.prompts.labels import require_values
        from prefillcli.stats.evaluation import Measure

        if opening.labels.measure is Measure.SHARES:
            require_values(self.settings.label_values, opening.labels.names)
            opening.labels.values = self.settings.label_values  # also where labels are known by their names alone

    def meaningless(self, labels: Labels) -> list[str]:
        return ["label-values"]


FEATURE = Ordered

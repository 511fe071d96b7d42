"""`--choices-column`: each row has answers of its own, a list of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prefillcli.core.feature import Feature, features_of
from prefillcli.errors import UsageError
from prefillcli.options.option import ANSWERS, Settings, option

if TYPE_CHECKING:
    from pathlib import Path

    from prefillcli.core.feature import Labels, Opened




class Choices(Feature):
    """The choices of a job."""

    order = 5
    options = {"score": ChoiceOptions}

    @classmethod
    def asked(cls, settings: ChoiceOptions) -> bool:
        return settings.choices_column is not None

    def check(self) -> None:
        settings = self.settings
        if "labels" in settings.model_fields_set:
            raise UsageError("--labels: with --choices-column each row has answers of its own\nleave one of them out")
        others = [each for each in features_of(settings) if type(each) is not type(self)]
        refused = {
            next(filter(None, (each.learns() for each in others if each.flips and not each.rewrites)), ""): (
                any(each.flips and not each.rewrites for each in others),
                "exits learn what decides between labels, and rows have none in common",
            ),
            "--calibration and --calibrate-with": (
                any("calibrated" in each.columns for each in others),
                "they fit a number to each label, and rows have none in common; only a temperature fits choices, and "
                "--temperature takes it",
            ),
            "--label-values": (
                bool(getattr(settings, "label_values", ())),
                "these are the numbers of labels, and rows have none in common",
            ),
        }
        for name, (given, why) in refused.items():
            if given:
                raise UsageError(f"--choices-column cannot be combined with {name}: {why}\nleave one of them out")

    def check_columns(self, available: Sequence[str]) -> None:
        from prefillcli.data.rows import require_columns

        require_columns([self.settings.choices_column], available, "the input")

    def own_labels(self, model: Path) -> bool:
        return True

    def labels(self, opened: Opened) -> Labels:
        if opened.files.head is not None:
            raise UsageError(
                "--choices-column: the model's classification head is read, which has classes of its own\n"
                "read the next token with --head vocabulary"
            )
        from prefillcli.asking.choices import RowChoices

        return RowChoices(opened.tokenizer, self.settings)


FEATURE = Choices

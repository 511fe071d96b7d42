"""`--choices-column`: each row has answers of its own, a list of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prefillcli.core.feature import Feature, features_of
from prefillcli.errors import UsageError
from prefillcli.options.option import ANSWERS, Settings, option

if TYPE_CHECKING:
    from prefillcli.core.feature import Labels, Opened


class ChoiceOptions(Settings):
    """The answers of each row."""

    choices_column: str | None = option(
        None,
        "Column with a list of texts: the answers of this row, in place of --labels.",
        ANSWERS, changes="scores", metavar="COLUMN",
    )  # fmt: skip


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
            "--exit": any(each.flips and not each.rewrites for each in others),
            "--calibration and --calibrate-with": any("calibrated" in each.columns for each in others),
            "--rationale and --evidence": any(each.asks() for each in others),
            "--truth": any(each.truth_column() is not None for each in others),
            "--keep auto": getattr(settings, "keep", None) == "auto",
        }
        for name, given in refused.items():
            if given:
                raise UsageError(
                    f"--choices-column cannot be combined with {name}: they know the labels of all rows\n"
                    "leave one of them out; --keep-columns carries a column with right answers to the output"
                )

    def check_columns(self, available: Sequence[str]) -> None:
        from prefillcli.data.rows import require_columns

        require_columns([self.settings.choices_column], available, "the input")

    def labels(self, opened: Opened) -> Labels:
        if opened.files.head is not None:
            raise UsageError(
                "--choices-column: the model's classification head is read, which has classes of its own\n"
                "read the next token with --head vocabulary"
            )
        return _row_choices(opened.tokenizer, self.settings)


def _row_choices(tokenizer: Any, settings: Any) -> Labels:
    from prefillcli.data.prompts.encoding import NotLiteral
    from prefillcli.data.prompts.labels import Following, Label, LabelError, Labels
    from prefillcli.plan.behind import LabelSet
    from prefillcli.stats.evaluation import Measure

    class RowChoices(Labels):
        """The labels of each prompt: the texts in its row's `columns`. Control tokens in them stay plain text,
        unless the job allows them.
        """

        measure = Measure.CHOICES

        def resolve_all(
            self, tails: Sequence[str], *, literal: bool = False, values: Sequence[Sequence[Any]] = ()
        ) -> list[Following | LabelError]:
            found: list[Following | LabelError] = []
            for tail, (value,) in zip(tails, values, strict=True):
                try:
                    found.append(self._following_choices(tail, self._labels_of(value), literal=literal))
                except LabelError as error:
                    found.append(error)
                except NotLiteral as error:
                    found.append(LabelError(f"a choice has the text of a control token: {error}"))
            return found

        def _following_choices(self, tail: str, labels: Sequence[Label], *, literal: bool) -> Following:
            controls = self._encoder.controls
            own = any(controls.may_be_in(each.name, joined=False) for each in labels) or controls.opens(tail)
            if settings.literal and own and not literal and controls.literal_backend:
                tail, literal = controls.respell(tail), True
            (base,) = self._encode([tail], literal)
            return self._sequences(tail, base, labels, literal=literal)

        def _labels_of(self, value: Any) -> list[Label]:
            if not isinstance(value, list | tuple) or not value:
                what = {type(None): "null", list: "an empty list"}.get(type(value), f"{type(value).__name__}, no list")
                raise LabelError(f"the row's choices are {what}")
            for number, each in enumerate(value):
                if not isinstance(each, str) or not each.strip():
                    what = "empty" if isinstance(each, str) else f"{type(each).__name__}, not text"
                    raise LabelError(f"choice {number} is {what}")
                if each in value[:number]:
                    raise LabelError(f"choices {value.index(each)} and {number} are the same: {each!r}")
            return [Label(each) for each in value]

        def _interned(self, chosen: LabelSet, labels: Sequence[Label]) -> LabelSet:
            self._known.clear()  # hardly two rows have the same choices
            return super()._interned(chosen, labels).with_texts([label.name for label in labels])

    found = RowChoices(tokenizer, (), norm=settings.label_norm, end=settings.label_end)
    found.columns = (settings.choices_column,)
    return found


FEATURE = Choices

"""Questions in the layout of a model that was trained for typed decisions: what a layout excludes, and its report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

from prefillcli.asking.forms import Order, orders_of, with_answers
from prefillcli.core.asking import Asking
from prefillcli.errors import UsageError
from prefillcli.options.combinations import given
from prefillcli.options.settings import JobSettings
from prefillcli.prompts.layouts import LayoutForm, at_temperature
from prefillcli.prompts.questions import Question
from prefillcli.report.finding import Finding
from prefillcli.report.section import Section

if TYPE_CHECKING:
    from prefillcli.models.open import Opened
    from prefillcli.report.run import RunReport

# Of layouts whose options are read at places of the prompt, options that they have no part in, and why.
_OF_MARKERS = {
    "kev": {
        **dict.fromkeys(("--exit", "--first", "--compute"), "its head reads the last layer of the model alone"),
        "--rationale": "its head reads options, and no words",
        "--adapter": "its head is that of the model without one",
        "--engine vllm": "vLLM has no such head",
    },
}
# The same of models with a readout.
_OF_READOUTS = {
    "--rationale": "its head reads answers, and no words",
    "--adapter": "its head is that of the model without one",
    "--engine vllm": "vLLM has no such head",
}
# Options that say how a prompt is made or answered, which a layout does itself.
_OF_PROMPTS = ("chat", "system", "thinking", "chat_option", "answer_prefix", "labels", "label_norm", "label_end")
# Why the orders of a question cannot be chosen.
MIRRORED = (
    "the model's own layout asks a choice in two orders, and no other question in several\n"
    "leave it out, or ask the model like any other with --layout generic"
)


def require_own_layout(settings: JobSettings, form: LayoutForm) -> None:
    """Raise UsageError for an option that would change the layout of a model."""
    if form.mirrored and "orders" in settings.given:
        raise UsageError(f"--orders {settings.asking.orders}: {MIRRORED}")
    compresses = settings.compression.draft is not None and not settings.rationales.speculates_by_draft
    if compresses or given(settings, "--keep"):
        raise UsageError(
            f"{'--draft' if compresses else '--keep'}: the model answers in a layout of its own ({form.type}), in "
            "which no token of the question and its options may be left out\n"
            "leave it out, or ask it like any other model with --layout generic"
        )
    for name in _OF_PROMPTS:
        if name in settings.given:
            raise UsageError(
                f"--{name.replace('_', '-')}: the model answers in a layout of its own ({form.type})\n"
                "leave it out, or ask it like any other model with --layout generic"
            )
    for text, why in (_OF_READOUTS if form.readout else _OF_MARKERS.get(form.type, {})).items():
        if given(settings, text):
            raise UsageError(f"{text}: the model is a decision model of the type {form.type}: {why}\nleave it out")


def orders_in(form: LayoutForm | None, question: Question, count: int) -> Sequence[Order]:
    """Return the orders of a question's options in its prompts: those of the model's layout, or else `count`."""
    fixed = None if form is None else form.orders(question)
    return orders_of(question, count) if fixed is None else fixed


def answered_by(opened: Opened) -> Callable[[Question, Order | None], Question]:
    """Return what gives a question the answers that its prompt asks for, which lists the options in an order; None:
    the question's own prompt."""
    if opened.layout is not None:
        return opened.layout.answered
    return lambda question, order: at_temperature(
        question if order is None else with_answers(question, order), opened.temperatures
    )


class LayoutUse(Finding):
    """The model's own layout, in which the questions were asked, or the temperatures beside it."""

    key: ClassVar[str] = "layout"

    type: str | None  # None: this program's own form
    temperatures: Mapping[str, float]  # by type of question, or by that and the number of options
    curve: tuple[float, float, float] | None = None  # instead a + b log n at n options, at least the third number

    @classmethod
    def of(cls, opened: Opened, asking: Asking) -> Self | None:
        """Return that of a job which asks so; None without one."""
        if (layout := opened.layout) is not None:
            return cls(type=layout.form.type, temperatures=dict(layout.temperatures), curve=layout.curve)
        heats = dict(opened.temperatures) if asking.typed else {}
        return cls(type=None, temperatures=heats) if heats else None

    @property
    def text(self) -> str:
        """It in words."""
        heats = ", ".join(f"{name} {each:g}" for name, each in self.temperatures.items())
        if self.curve is not None:
            heats = "{:g} + {:g} ln n at n options, at least {:g}".format(*self.curve)
        form = f"{self.type}, the model's own" if self.type else "this program's own"
        return form + (f"; the model's temperatures: {heats}" if heats else "")

    def sections(self, report: RunReport) -> Iterable[Section]:
        """Return the line that names it."""
        return [Section(lines=[("layout", self.text)])]

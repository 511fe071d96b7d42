"""What drafters are made of, and the drafter that a job asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from prefillcli.decode.continuations import DecodingReport, Writing
from prefillcli.decode.contracts import Drafter
from prefillcli.decode.speculation.auto_drafter import AutoDrafter
from prefillcli.decode.speculation.controller import Controller
from prefillcli.decode.speculation.hierarchy import HierarchyDrafter
from prefillcli.decode.speculation.registry import DRAFTERS, DrafterKind, maker_of
from prefillcli.decode.speculation.retrieval import RetrievalDrafter
from prefillcli.decode.speculation.suffixes import EarlierTexts
from prefillcli.decode.token_choice import Chooser
from prefillcli.errors import PrefillError

T = TypeVar("T")


@dataclass(slots=True)
class JobMemory:
    """What speculation learns while a job goes on: the texts so far, and what has paid."""

    earlier: EarlierTexts = field(default_factory=EarlierTexts)
    controller: Controller = field(default_factory=Controller)


@dataclass(slots=True)
class DraftingMeans:
    """What drafters of rows that are written together are made of.

    `retrieval` makes one of the model itself over a retrieval cache of these rows; another drafter may guess for it.
    `draft` makes one of the draft model. None: there is none.
    """

    writing: Writing
    chooser: Chooser
    report: DecodingReport
    memory: JobMemory
    retrieval: Callable[[Drafter | None], RetrievalDrafter] | None = None
    draft: Callable[[], Drafter] | None = None

    def meet(self, kind: DrafterKind) -> bool:
        """Whether there is what a drafter of this kind needs."""
        return all(getattr(self, need) is not None for need in kind.needs)


Maker = Callable[[DraftingMeans], Drafter]


def drafter_of(means: DraftingMeans) -> Drafter | None:
    """The drafter that the job asks for. None with "off", and where there is not what it needs: text is as without."""
    name = means.writing.speculation.drafter
    if name == "off":
        return None
    if name == "auto":
        makers = {kind: partial(maker_of(kind), means) for kind in DRAFTERS.values() if means.meet(kind)}
        return AutoDrafter(means.memory.controller, makers, means.writing.tokens)
    kind = DRAFTERS[name]
    return maker_of(kind)(means) if means.meet(kind) else None


def retrieval_of(means: DraftingMeans) -> Drafter:
    """The model itself over a retrieval cache."""
    return _there(means.retrieval)(None)


def draft_model_of(means: DraftingMeans) -> Drafter:
    """The draft model over the first and latest tokens."""
    return _there(means.draft)()


def hierarchy_of(means: DraftingMeans) -> Drafter:
    """Retrieval, for which the draft model guesses, which also guesses alone where prompts are short."""
    draft = _there(means.draft)
    return HierarchyDrafter(_there(means.retrieval)(draft()), draft())


def _there(maker: T | None) -> T:
    if maker is None:
        raise PrefillError("speculation: there is nothing that this drafter guesses with\ngive --speculation auto")
    return maker

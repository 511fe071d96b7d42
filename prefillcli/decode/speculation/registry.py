"""Which drafters there are, what each needs, and the module that makes it: known before anything is imported."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    from prefillcli.decode.speculation.means import Maker

Need = Literal["draft", "retrieval"]
NEEDS: dict[Need, str] = {
    "draft": "a draft model with the same tokens",
    "retrieval": "a model whose layers' K,V are kept",
}
"""What a drafter may need, as it is said to the user."""


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """A drafter by name: `guesses` says for people where its tokens come from. `module` has its `maker`.

    One that is `free` guesses without a model, and guessing leaves no trace: its guesses may be compared only.
    """

    name: str
    guesses: str
    module: str
    maker: str
    needs: frozenset[Need] = frozenset()
    free: bool = False


DRAFTERS: dict[str, DrafterKind] = {
    kind.name: kind
    for kind in (
        DrafterKind(
            "lookup",
            "what followed the same tokens in the row's own prompt and text",
            "prefillcli.decode.speculation.lookup",
            "PromptLookup.of",
            free=True,
        ),
        DrafterKind(
            "suffix",
            "what followed the same tokens most often in earlier texts of the job",
            "prefillcli.decode.speculation.suffixes",
            "SuffixDrafter.of",
            free=True,
        ),
        DrafterKind(
            "retrieval",
            "what the model writes when it sees only the best parts of the prompt",
            "prefillcli.decode.speculation.means",
            "retrieval_of",
            frozenset({"retrieval"}),
        ),
        DrafterKind(
            "draft",
            "what the draft model writes when it sees the first and the latest tokens",
            "prefillcli.decode.speculation.means",
            "draft_model_of",
            frozenset({"draft"}),
        ),
        DrafterKind(
            "hierarchy",
            "what retrieval writes, with the guesses of the draft model checked on the way",
            "prefillcli.decode.speculation.means",
            "hierarchy_of",
            frozenset({"draft", "retrieval"}),
        ),
    )
}

SPECULATIONS = ("auto", "off", *DRAFTERS)
"""The values of `Speculation.drafter`."""


def maker_of(kind: DrafterKind) -> Maker:
    """What makes the drafter of this kind."""
    found: object = import_module(kind.module)
    for name in kind.maker.split("."):
        found = getattr(found, name)
    return cast("Maker", found)

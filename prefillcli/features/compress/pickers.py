"""The ways to pick tokens: known by name before anything is imported or loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prefillcli.data.prompts.encoding import Spans
    from prefillcli.data.rows import Prompt
    from prefillcli.features.compress.base import Estimator, Picker
    from prefillcli.features.compress.settings import Compression
    from prefillcli.plan.pack import Limits
    from prefillcli.prefill.walk import LayerWalk


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerResources:
    """What pickers are made of; each takes what it needs.

    The target can pick tokens itself after `own_layers` layers; `walking` gives a walk over it, for packs within
    `limits`. `seed` is that of random draws. `spans` gives a prompt's text and where its tokens lie in it, or None
    where the text does not give the tokens.
    """

    settings: Compression
    seed: int = 0
    draft: Estimator | None = None
    own_layers: int | None = None
    walking: Callable[[], AbstractContextManager[LayerWalk]] | None = None
    limits: Limits | None = None
    spans: Callable[[Prompt], Spans | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerKind:
    """A way to pick tokens. `name` is also what the output's column `method` says of a prompt that it compressed."""

    name: str
    summary: str
    """What it is, in the tables of `prefill bench`."""
    needs: Literal["draft", "self", "text"] | None
    """What it needs besides the tokens: a draft model, the target's own layers, or the prompt's text."""
    random: bool = False
    """Whether it draws at random."""
    make: Callable[[PickerResources], Picker]
    """Raises ValueError where a resource is missing."""


def _specprefill(resources: PickerResources) -> Picker:
    from prefillcli.features.compress.draft import SpecPrefill

    if resources.draft is None:
        raise ValueError("specprefill needs a draft model")
    return SpecPrefill(resources.draft)


def _self_draft(resources: PickerResources) -> Picker:
    from prefillcli.features.compress.self_draft import SelfDraft

    if resources.own_layers is None:
        raise ValueError("self-draft needs to know after which layer the model chooses")
    return SelfDraft(resources.own_layers - 1)


def _gemfilter(resources: PickerResources) -> Picker:
    from prefillcli.features.compress.row_pickers import GemFilter

    if resources.own_layers is None or resources.walking is None or resources.limits is None:
        raise ValueError("gemfilter needs a walk over the model, and to know after which layer it chooses")
    return GemFilter(resources.own_layers - 1, resources.walking, resources.limits)


def _random(resources: PickerResources) -> Picker:
    from prefillcli.features.compress.row_pickers import RandomChunks

    return RandomChunks(resources.settings.select_chunk, resources.seed)


def _ends(resources: PickerResources) -> Picker:
    from prefillcli.features.compress.row_pickers import Ends

    return Ends()


def _bm25(resources: PickerResources) -> Picker:
    from prefillcli.features.compress.row_pickers import Bm25

    if resources.spans is None:
        raise ValueError("bm25 needs the text of the prompts")
    return Bm25(resources.spans)


PICKERS: dict[str, PickerKind] = {
    kind.name: kind
    for kind in (
        PickerKind(
            name="specprefill",
            summary="the draft picks the tokens that the model reads",
            needs="draft",
            make=_specprefill,
        ),
        PickerKind(
            name="self-draft",
            summary="the model's own first layers pick the tokens that the others read",
            needs="self",
            make=_self_draft,
        ),
        PickerKind(
            name="gemfilter",
            summary="the model's own first layers pick the tokens that all of its layers read",
            needs="self",
            make=_gemfilter,
        ),
        PickerKind(
            name="random",
            summary="random chunks instead: what a draft must beat",
            needs=None,
            random=True,
            make=_random,
        ),
        PickerKind(name="ends", summary="the first and last tokens instead", needs=None, make=_ends),
        PickerKind(name="bm25", summary="the sentences most like the question instead", needs="text", make=_bm25),
    )
}

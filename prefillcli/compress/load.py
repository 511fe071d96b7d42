"""A job's compressor, and the draft model that it loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from prefillcli.compress.compressor import WorthCompressing
from prefillcli.compress.pickers.registry import PICKERS, PickerResources
from prefillcli.compress.settings import Compression
from prefillcli.errors import UsageError, brief
from prefillcli.models.open import Opened
from prefillcli.models.shape import NoCostModel, Shape
from prefillcli.plan.pack import Limits
from prefillcli.runtime import log

if TYPE_CHECKING:  # these take torch along
    from prefillcli.compress.compressor import Compressor
    from prefillcli.compress.draft import Draft
    from prefillcli.compress.translation import Translator

DEPTH = 0.45
"""Share of the layers that read the whole prompt: FastKV takes 16 of 32, GemFilter 14 of 32 or 20 of 40."""


def load_draft(opened: Opened, *, trust_remote_code: bool) -> Any:
    """The draft's weights on the model's device. Raises as `load_model`, and UsageError if it cannot be a draft."""
    from prefillcli.models.load import load_model
    from prefillcli.models.rehearsal import check_uses

    if opened.draft is None:
        raise ValueError("no draft was opened")
    draft = load_model(opened.draft, opened.device, trust_remote_code=trust_remote_code)
    check_uses(draft, drafts=f"--draft {opened.draft.origin}", compresses=False)
    return draft


def plan_draft(
    opened: Opened, compression: Compression, budget: int, chunk_tokens: int | None, before: Mapping[str, Any]
) -> dict[str, Any]:
    """What fits one pack of the draft in `budget` bytes; what an earlier attempt had planned stands if it still fits.

    Raises ResourceError where nothing fits.
    """
    from prefillcli.models.law import choose_chunk, draft_limits, memory_law

    if opened.draft is None:
        raise ValueError("no draft was opened")
    law = memory_law(opened.draft.config, opened.draft.dtype)
    chunk = chunk_tokens or choose_chunk(law, budget, opened.device)
    limits = draft_limits(
        law,
        budget=budget,
        device=opened.device,
        chunk_tokens=chunk,
        queries=compression.queries,
        all_layers=compression.decoded > 0,
    )
    if before and before["limits"]["max_tokens"] <= limits.max_tokens:
        return dict(before)
    return {"chunk_tokens": chunk, "limits": asdict(limits)}


def make_draft(opened: Opened, model: Any, compression: Compression, plan: Mapping[str, Any]) -> Draft:
    """The loaded draft `model` at work under its `plan`. Each of its failures is told once on stderr."""
    from prefillcli.compress.draft import Draft

    if opened.draft is None:
        raise ValueError("no draft was opened")
    told: set[str] = set()

    def warn(error: BaseException) -> None:
        text = f"{type(error).__name__}: {brief(error)}"
        if text not in told:
            told.add(text)
            log.warning(f"the draft failed, its rows are read in full: {text}")

    return Draft(
        model,
        compression,
        limits=Limits(**plan["limits"]),
        chunk_tokens=plan["chunk_tokens"],
        max_length=opened.draft.max_length,
        on_failure=warn,
    )


def make_compressor(picker: str, resources: PickerResources, opened: Opened, keep: float) -> Compressor:
    """The compressor of a job, with the picker of this name, to the rate `keep`.

    Raises UsageError where the model is to pick tokens itself, and none of its layers can.
    """
    from prefillcli.compress.compressor import Compressor
    from prefillcli.models.shape import Shape

    own = PICKERS[picker].needs == "self"
    if own:
        resources = replace(resources, own_layers=own_layers(resources.settings, opened))
    if resources.draft is not None and (translator := translator_of(opened)) is not None:
        from prefillcli.compress.translation import TranslatedDraft

        resources = replace(resources, draft=TranslatedDraft(resources.draft, translator))
    return Compressor(
        PICKERS[picker].make(resources),
        resources.settings,
        keep=keep,
        worth=worth_of(resources.settings, opened, own=own),
        target_window=Shape(opened.files.config).sliding_window,
    )


def translator_of(opened: Opened) -> Translator | None:
    """What maps prompts to the tokens of the draft, where it has another tokenizer than the model."""
    from prefillcli.compress.translation import Translator

    return None if opened.draft_tokenizer is None else Translator(opened.tokenizer, opened.draft_tokenizer)


def worth_of(compression: Compression, opened: Opened, *, own: bool) -> WorthCompressing:
    """Which prompts compression pays for, by a draft or by the model's `own` layers."""
    if own:
        return WorthCompressing(compression, opened.files.config, own_layers=own_layers(compression, opened))
    return WorthCompressing(compression, opened.files.config, opened.draft and opened.draft.config)


def own_layers(compression: Compression, opened: Opened) -> int:
    """After how many of its layers the model chooses tokens itself. Raises UsageError where none of them can."""
    return choosing_layers(opened.files.config, compression.self_layer, opened.max_length)


def choosing_layers(config: Any, wanted: int | None, max_length: int) -> int:
    """How many first layers of a model with this text configuration read the whole prompt; the last of them chooses.

    It must see whole prompts of `max_length` tokens: no sliding window. Where None is `wanted`, it is `DEPTH` of the
    layers, or the nearest number that sees them (of two, the larger). Raises UsageError where `wanted` does not, or no
    layer does.
    """
    try:
        windows = Shape(config).windows
    except NoCostModel as error:
        raise UsageError(
            f"--draft self: which layers of this model see the whole prompt is not known: {error}"
        ) from None
    able = [number for number, window in enumerate(windows[:-1], start=1) if window is None or window >= max_length]
    if not able:
        raise UsageError(
            f"--draft self: no layer but the last attends to prompts of {max_length:,} tokens: the model has "
            f"{len(windows)} layers, and the others have sliding windows or are recurrent\n"
            "name a small model with the same tokenizer as --draft"
        )
    if wanted is None:
        return min(able, key=lambda number: (abs(number - DEPTH * len(windows)), -number))
    if wanted not in able:
        near = min(able, key=lambda number: abs(number - wanted))
        why = (
            "has a sliding window or is recurrent, so it does not attend to a whole prompt"
            if wanted < len(windows)
            else f"leaves no layer that reads less: the model has {len(windows)}"
        )
        raise UsageError(f"--self-layer {wanted}: that layer {why}\nthe nearest that can choose is {near}")
    return wanted

"""After how many of its layers a model that is its own draft chooses the tokens that go on."""

from __future__ import annotations

from typing import Any

from prefillcli.errors import UsageError
from prefillcli.models.shape import NoCostModel, Shape

DEPTH = 0.45
"""Share of the layers that read the whole prompt: FastKV takes 16 of 32, GemFilter 14 of 32 or 20 of 40."""


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

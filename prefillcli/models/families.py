"""What is known of model families."""

from __future__ import annotations

from typing import Any

#: Families whose walk is compared with their own eager forward by the tests of this project. Others must agree with
#: it in a rehearsal when they are loaded.
VERIFIED = frozenset(
    {
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "olmo2",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
    }
)
WALKABLE_LAYERS = {"full_attention", "sliding_attention", "attention"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def sliding_window(config: Any) -> int | None:
    """How many tokens the layers with a sliding window see, by a text config; None if there are no such layers."""
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    return int(window) if window and slides and getattr(config, "use_sliding_window", True) else None

"""Decision models: checkpoints that were trained to answer typed questions, each in a layout of its own.

Asked in another layout, such a model gives probabilities without meaning. Its files say which layout it needs: a GGUF
file by `<family>.decision.type` (llama.cpp), a folder by a file of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefillcli.errors import UsageError
from prefillcli.models.files import read_json
from prefillcli.models.gguf_header import read_gguf_header
from prefillcli.rows.proof import gguf_parts

TYPE = "decision.type"  # of a GGUF file, after the family
# A file that only such a model's folder has, and what it says: a type, or the name of the key that has it.
_FOLDERS: Mapping[str, str] = {
    "decider_config.json": "decider",
    "decision_config.json": "pplx-decider",
}
# The same beside the adapter_config.json of a LoRA.
_ADAPTERS: Mapping[str, str] = {
    "training_config.json": "kev",
    "schema_config.json": "nimble",
    "calibration.json": "lev",
}
SAYS_SO = (*_FOLDERS, *_ADAPTERS)  # files of a folder by which its type is known
_TEMPERATURES = "temperatures.json"  # one for each of these types of questions
_TYPES = {"choice", "score", "noul"}


def require_layout(model: Path, option: str, layout: str) -> None:
    """Raise UsageError for the model of an option that needs a layout of its own, unless the `layout` asked for is
    that of any model."""
    if layout == "generic" or (found := decision_type(model)) is None:
        return
    kind, said_by = found
    raise UsageError(
        f"{option} {model}: a decision model of the type {kind} (by {said_by}), which answers only in the layout that "
        "it was trained on, and that is not read yet\n"
        "take another model; --layout generic asks it as any other, for answers that it was not trained to give"
    )


def decision_type(model: Path) -> tuple[str, str] | None:
    """Return the type of the decision model in a folder or GGUF file, and what says so; None for any other model.
    Raises UsageError for a damaged GGUF file."""
    if parts := gguf_parts(model):
        header = read_gguf_header(parts[0])
        kind = header.setting(TYPE)
        return None if kind is None else (str(kind)[:60], f"{header.architecture}.{TYPE}")
    adapter = (model / "adapter_config.json").is_file()
    for name, kind in {**_FOLDERS, **(_ADAPTERS if adapter else {})}.items():
        if (model / name).is_file():
            return kind, name
    if _has_temperatures(model / _TEMPERATURES):
        return "with temperatures by question", _TEMPERATURES
    return None


def _has_temperatures(file: Path) -> bool:
    found: Any = read_json(file) if file.is_file() else None
    return isinstance(found, dict) and bool(_TYPES & found.keys())

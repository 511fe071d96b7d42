"""Models that many tests open, read once in a test process: opening is the subject of few of them.

What a folder says is kept by the names, sizes and times of its files, so a changed folder is read anew; what is
handed out is a copy, so no test sees what another one did with it. GGUF files, quantised weights and code that comes
with a model are read each time, and so is everything in the tests of opening itself (`fresh_models`).
"""

from __future__ import annotations

import copy
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

_MOST = 48  # of each kind


class _Kept:
    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, read: Callable[[], Any]) -> Any:
        """What was read under this key, or is read now. An error is kept by nobody."""
        if key not in self._values:
            self._values[key] = read()
            if len(self._values) > _MOST:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return self._values[key]


_FILES, _TOKENIZERS, _WEIGHTS, _EXPLICIT = _Kept(), _Kept(), _Kept(), _Kept()


def keep_models(patch: pytest.MonkeyPatch) -> None:
    """While `patch` lasts, jobs of this process open folders of models that they know already from memory."""
    for module, name, kept in _OPENING:
        if module in sys.modules:  # else this test needs no torch
            patch.setattr(sys.modules[module], name, kept(getattr(sys.modules[module], name)))


def keep_explicit_scores(patch: pytest.MonkeyPatch) -> None:
    """While `patch` lasts, checks of attention know the explicit scores of their cases, which are always the same."""
    checks = sys.modules.get("prefillcli.walk.attention_checks")
    if checks is None:
        return
    compute = checks._explicit

    def explicit(case: Any, dtype: Any) -> Any:
        return _EXPLICIT.get((case, dtype), lambda: compute(case, dtype))

    explicit.cache_clear = compute.cache_clear  # type: ignore[attr-defined]
    patch.setattr(checks, "_explicit", explicit)


def _content(folder: Path) -> Hashable:
    """What tells whether a folder is still the same."""
    found = sorted((entry.name, entry.stat()) for entry in os.scandir(folder))
    return folder, tuple((name, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns) for name, of in found)


def _files_kept(read: Callable[..., Any]) -> Callable[..., Any]:
    def read_model_files(path: Path, **choice: Any) -> Any:
        if choice.get("trust_remote_code") or not path.is_dir():
            return read(path, **choice)
        key = (_content(path), *sorted(choice.items()))
        found = _FILES.get(key, lambda: read(path, **choice))
        return replace(found, config=copy.deepcopy(found.config))

    return read_model_files


def _tokenizers_kept(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_tokenizer(folder: Path, *, trust_remote_code: bool, **more: Any) -> Any:
        def read() -> Any:
            return load(folder, trust_remote_code=trust_remote_code, **more)

        if trust_remote_code:
            return read()
        return copy.deepcopy(_TOKENIZERS.get((_content(folder), *sorted(more.items())), read))

    return load_tokenizer


def _weights_kept(load: Callable[..., Any]) -> Callable[..., Any]:
    def load_weights(files: Any, device: Any, *, attention: Any = None, trust_remote_code: bool = False) -> Any:
        def read() -> Any:
            return load(files, device, attention=attention, trust_remote_code=trust_remote_code)

        if trust_remote_code or files.gguf is not None or files.quantised is not None or device.type != "cpu":
            return read()
        key = (_content(files.path), files.dtype, attention, repr(files.head), files.part_of)
        model, changes = _WEIGHTS.get(key, lambda: _counted(read()))
        if changes != _counted(model)[1]:  # a job has written into its numbers
            return read()
        return _sharing(model)

    return load_weights


def _tensors(model: Any) -> Iterator[Any]:
    yield from model.parameters()
    yield from model.buffers()


def _counted(model: Any) -> tuple[Any, list[int]]:
    return model, [tensor._version for tensor in _tensors(model)]


def _sharing(model: Any) -> Any:
    """A copy of a model with the same numbers in the same memory: elsewhere, products may have other bits."""
    from torch import nn

    memory: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach(), requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else tensor.detach()
        for tensor in _tensors(model)
    }
    # `deepcopy` takes six times as long for the ten empty dictionaries of hooks that each part has.
    for part in model.modules():
        for value in vars(part).values():
            if type(value) in (dict, OrderedDict) and not value:
                memory[id(value)] = type(value)()
    return copy.deepcopy(model, memory)


_OPENING = (
    ("prefillcli.models.dtype", "read_model_files", _files_kept),
    ("prefillcli.models.open", "load_tokenizer", _tokenizers_kept),
    ("prefillcli.models.load", "load_weights", _weights_kept),
    ("prefillcli.engines.hf", "load_weights", _weights_kept),
    ("prefillcli.engines.encoders", "load_weights", _weights_kept),
)

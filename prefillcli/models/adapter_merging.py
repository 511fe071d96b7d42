"""Adapters merged into a loaded model, and exchanged for one another.

PEFT finds each tensor's place and computes what is added there. The model keeps its modules: while an adapter is
merged, some of their parameters hold other tensors, and afterwards the model's own again, the very same ones. So
nothing drifts however often adapters are exchanged.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import regex
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from prefillcli.errors import PrefillError, UsageError, brief, out_of_resource
from prefillcli.models.adapters import CONFIG, OPTION, AdapterFiles
from prefillcli.models.open import Opened

_NAME = "default"  # of each adapter, in PEFT
_PATTERN_SECONDS = 10.0  # for matching all patterns of an adapter with the names of a model's modules
Slot = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


class LoadedAdapter:
    """An adapter whose tensors are there, and their places in a model, which stays as it is.

    Raises UsageError where something of the adapter has no place in the model.
    """

    def __init__(self, model: PreTrainedModel, files: AdapterFiles) -> None:
        self.files = files
        modules = [(module, dict(module._modules), dict(module._parameters)) for module in model.modules()]
        with _quiet():
            wrapped = _wrapped(model, files)
            _load_into(wrapped, files)
        self._layers, self._replaced = _parts_of(wrapped)
        vars(model).pop("peft_config", None)
        for module, children, parameters in modules:
            module._modules = children
            for name, own in parameters.items():
                now = module._parameters[name]
                if now is not own and now is not None:  # saved beside the low-rank parts: a bias, or an embedding
                    self._replaced.append(((module, name), now.data))
            module._parameters = parameters
        for part in (*self._layers, *(module for (module, _), _ in self._replaced)):
            part.requires_grad_(False)
        self.slots = list(_distinct([*(slot for slot, _ in self._replaced), *self._slots_of_layers()]))
        """The parameters that it changes."""

    @property
    def merged_numbers(self) -> int:
        """Numbers of the model's tensors that it changes."""
        return sum(_parameter(slot).numel() for slot in self.slots)

    @torch.no_grad()
    def merge(self) -> None:
        """Change the model's tensors. Each of its `slots` must hold a tensor of its own."""
        for slot, tensor in self._replaced:
            _parameter(slot).data.copy_(tensor)
        for layer in self._layers:
            layer.merge(adapter_names=[_NAME])
            layer.merged_adapters.clear()  # the next time it begins with the model's tensors again

    def _slots_of_layers(self) -> Iterator[Slot]:
        for layer in self._layers:
            base = layer.get_base_layer()
            own = getattr(layer, "parameter_name", None)
            for name, parameter in base._parameters.items():
                if parameter is not None and own in (None, name):
                    yield base, name


class ExchangedAdapters:
    """A model whose adapters take turns. It begins without one."""

    def __init__(self, model: PreTrainedModel, adapters: Sequence[AdapterFiles]) -> None:
        self._loaded = {each.name: LoadedAdapter(model, each) for each in adapters}
        self._own: list[tuple[Slot, Tensor]] = []
        self._active: str | None = None
        for each in self._loaded.values():
            for slot in each.slots:
                _untie(model, slot)

    @torch.no_grad()
    def use(self, name: str | None) -> None:
        """Make the model that of this adapter; with None the model as it was loaded."""
        if name == self._active:
            return
        for slot, tensor in self._own:
            _parameter(slot).data = tensor
        self._own, self._active = [], None
        if name is None:
            return
        adapter = self._loaded[name]
        for slot in adapter.slots:
            parameter = _parameter(slot)
            self._own.append((slot, parameter.data))
            parameter.data = parameter.data.clone()
        self._active = name
        adapter.merge()


def merge_adapters(model: PreTrainedModel, opened: Opened) -> ExchangedAdapters | None:
    """Load the adapters of an opened model into its loaded one,.

    One that is for all rows is merged for good. Those of rows come back, to take turns. Raises UsageError where
    something of an adapter has no place in the model.
    """
    if not opened.adapters:
        return None
    adapters = ExchangedAdapters(model, opened.adapters)
    if opened.adapter_by_row:
        return adapters
    adapters.use(opened.adapters[0].name)
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what PEFT, and the packages that it looks for, warn of: what matters of it is refused."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _wrapped(model: PreTrainedModel, files: AdapterFiles) -> Any:
    """PEFT's model around `model`, with the adapter's tensors on the meta device. Raises UsageError."""
    from peft import PeftModel

    try:
        with _timed_patterns():
            return PeftModel(model, copy.deepcopy(files.config), adapter_name=_NAME, low_cpu_mem_usage=True)
    except TimeoutError:
        raise UsageError(
            f"{OPTION} {files.path}: a regular expression in {CONFIG} takes longer than {_PATTERN_SECONDS:g} seconds\n"
            "name the modules in target_modules instead"
        ) from None
    except Exception as error:  # PEFT takes a configuration as it is, and fails somewhere
        if isinstance(error, PrefillError) or out_of_resource(error):
            raise
        raise UsageError(f"{OPTION} {files.path}: it does not fit the model: {brief(error)}") from None


@contextmanager
def _timed_patterns() -> Iterator[None]:
    """PEFT matches an adapter's patterns in bounded time: by another library than `re`, which can be stopped."""
    timed: Any = _TimedPatterns()
    places = [
        part for name, part in list(sys.modules.items()) if name.startswith("peft.") and vars(part).get("re") is re
    ]
    for part in places:
        vars(part)["re"] = timed
    try:
        yield
    finally:
        for part in places:
            vars(part)["re"] = re


class _TimedPatterns:
    """The module `re`, but for two functions that raise TimeoutError once all calls together took too long."""

    def __init__(self) -> None:
        self._left = _PATTERN_SECONDS

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    def match(self, pattern: str, text: str) -> Any:
        return self._timed(_compiled(pattern).match, text)

    def fullmatch(self, pattern: str, text: str) -> Any:
        return self._timed(_compiled(pattern).fullmatch, text)

    def _timed(self, find: Any, text: str) -> Any:
        begun = time.perf_counter()
        try:
            return find(text, timeout=self._left)
        finally:
            self._left = max(self._left - (time.perf_counter() - begun), 1e-6)


@cache
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern)


def _load_into(wrapped: Any, files: AdapterFiles) -> None:
    """Read the adapter's tensors. Raises UsageError unless each has its place, and each place its tensor."""
    try:
        found = wrapped.load_adapter(files.path, _NAME, torch_device="cpu", low_cpu_mem_usage=True)
    except KeyError as error:
        raise UsageError(f"{OPTION} {files.path}: its file lacks {error.args[0]}") from None
    except Exception as error:
        if isinstance(error, PrefillError) or out_of_resource(error):
            raise
        lines = str(error).splitlines()
        wrong = next((line.strip() for line in lines if "size mismatch" in line), brief(error))
        raise UsageError(f"{OPTION} {files.path}: it does not fit the model: {wrong}") from None
    for keys, what in (
        (found.unexpected_keys, "has no place in the model"),
        (found.missing_keys, "is not in its file"),
    ):
        if keys:
            name = keys[0].removeprefix("base_model.model.").replace(f".{_NAME}", "")
            more = f" ({len(keys) - 1:,} more)" if len(keys) > 1 else ""
            raise UsageError(f"{OPTION} {files.path}: {name}{more} {what}\nis it an adapter of this model?")


def _parts_of(wrapped: Any) -> tuple[list[Any], list[tuple[Slot, Tensor]]]:
    """The layers of PEFT that can be merged, and the tensors that take the place of the model's."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    layers: list[Any] = []
    replaced: list[tuple[Slot, Tensor]] = []
    for module in wrapped.modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save[_NAME]
            for (inner, name), (other, _) in zip(_slots(module.original_module), _slots(saved), strict=True):
                replaced.append(((inner, name), _parameter((other, name)).data))
        elif isinstance(module, BaseTunerLayer):
            layers.append(module)
    return layers, replaced


def _slots(model: nn.Module) -> Iterator[Slot]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name


def _distinct(slots: Sequence[Slot]) -> Iterator[Slot]:
    seen = set()
    for module, name in slots:
        if (id(module), name) not in seen:
            seen.add((id(module), name))
            yield module, name


def _parameter(slot: Slot) -> nn.Parameter:
    module, name = slot
    parameter = module._parameters[name]
    if parameter is None:
        raise ValueError(f"{type(module).__name__} has no {name}")
    return parameter


def _untie(model: PreTrainedModel, slot: Slot) -> None:
    """Give the slot a parameter of its own: one that others share, like a tied embedding, would change there too."""
    module, name = slot
    own = _parameter(slot)
    if sum(_parameter(each) is own for each in _slots(model)) > 1:
        module._parameters[name] = nn.Parameter(own.data, requires_grad=False)

"""Whether a device computes what it should: checked once, remembered in the user's cache for later runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from prefillcli.errors import ResourceError
from prefillcli.models.families import VERIFIED
from prefillcli.models.find import ModelFiles
from prefillcli.models.rehearsal import Rehearsal, rehearse
from prefillcli.prefill.attention_checks import CHECKED, PathCheck, check_paths
from prefillcli.prefill.attention_paths import PATHS, may_take, only_blocks, rule_out
from prefillcli.prefill.forest import UnsupportedModelError
from prefillcli.prefill.layer_place import embedding_device
from prefillcli.prefill.layers import LayerSource
from prefillcli.runtime import device_key as devices
from prefillcli.runtime import log
from prefillcli.runtime.kept_entries import KeptEntries

FILE = "devices.json"
MOST = 64  # devices that are remembered
TESTED = frozenset({"cpu"})
"""Kinds of devices on which the tests compare the verified families with their own forward."""

SLOW_TO_CHECK = frozenset({"flex"})
"""Paths that the doctor alone checks, because they are compiled for that. Rehearsals cover them for runs that take
them."""


class DeviceRecord:
    """What is known of a device: which of its attention paths failed, and which families were rehearsed on it.

    `paths` has None, or why it failed, under PATH/DTYPE. `families` has, under FAMILY/DTYPE, whether only explicit
    blocks of scores agreed.
    """

    def __init__(self, device: torch.device) -> None:
        self.key = devices.device_key(device)
        self._kept = KeptEntries(FILE)
        self.paths: dict[str, str | None] = {}
        self.families: dict[str, bool] = {}
        known = self._kept.read().get(self.key.digest)
        if isinstance(known, dict) and isinstance(known.get("paths"), dict) and isinstance(known["families"], dict):
            self.paths, self.families = known["paths"], known["families"]

    @property
    def tested(self) -> bool:
        """Whether the tests know such a device."""
        return self.key.kind in TESTED

    def save(self) -> bool:
        """Remember it; gives whether the cache could be written. What others have found meanwhile stays."""
        entries = self._kept.read()
        before: dict[str, Any] = entries.get(self.key.digest, {"paths": {}, "families": {}})
        entries[self.key.digest] = {
            "of": asdict(self.key),
            "paths": before["paths"] | self.paths,
            "families": before["families"] | self.families,
            "time": int(time.time()),
        }
        return self._kept.write(dict(sorted(entries.items(), key=lambda item: -item[1]["time"])[:MOST]))

    def note(self, checks: Iterable[PathCheck]) -> None:
        """Take note of checks; of paths that are not here there is nothing to remember."""
        for check in checks:
            if check.status != "not here":
                self.paths[f"{check.path}/{check.dtype}"] = None if check.status == "agrees" else str(check.why)


def settle_paths(device: torch.device, dtype: torch.dtype) -> None:
    """Before a model of this `dtype` computes on `device`: no path is taken that differs from explicit scores.

    What is not known yet of this device is checked and remembered. A path that is not taken is told on stderr. Raises
    ResourceError where even explicit scores are wrong.
    """
    record, name = DeviceRecord(device), str(dtype).removeprefix("torch.")
    quick = [path for path in CHECKED if path not in SLOW_TO_CHECK and may_take(path, device)]
    unknown = [path for path in quick if f"{path}/{name}" not in record.paths]
    checks = [check for check in check_paths(unknown, device, dtype) if check.status != "not here"]
    if checks:
        record.note(checks)
        record.save()
    for path in CHECKED:
        why = record.paths.get(f"{path}/{name}")
        if why is None or not may_take(path, device):
            continue
        if path == "blocks":
            raise ResourceError(
                f"{device} computes attention wrongly in {name}: {why}\ntake another --device or --dtype; "
                "prefill doctor shows what it can do"
            )
        log.warning(
            f"attention on {device} goes without {path}, which is wrong there in {name}: {why} "
            "(prefill doctor checks again)"
        )
        rule_out(path, device, why)


def prove_model(
    model: PreTrainedModel, files: ModelFiles, layers: LayerSource | None = None, *, tolerance: float | None = None
) -> None:
    """Before a model is walked: compare it with its own forward, unless that is known to agree.

    It is known of verified families on devices that the tests know, and of those that have agreed on this device
    before. Where a model does not agree on a device that the tests do not know, attention goes by explicit scores
    alone. Raises UnsupportedModelError where it does not agree then either. `layers` and `tolerance` as in `rehearse`.
    """
    device, family = embedding_device(model), files.family
    record = DeviceRecord(device)
    once = partial(rehearse, model, files.config, layers, tolerance=tolerance)
    if record.tested:
        if family not in VERIFIED:
            once()
        return
    name = f"{family}/{str(files.dtype).removeprefix('torch.')}"
    if files.quantised is not None:
        name += f"/{files.quantised.get('quant_method')}"
    known = record.families.get(name)
    if known:
        _go_by_blocks(family, device)
    if known is None or family not in VERIFIED:
        found, by_blocks = _rehearse_on_unknown(partial(once, strictly=True), family, device)
        if found.gaps and not found.own_cache:  # else the next run must find out again how it is walked
            record.families[name] = by_blocks
            record.save()


def _rehearse_on_unknown(once: Callable[[], Rehearsal], family: str, device: torch.device) -> tuple[Rehearsal, bool]:
    """Rehearse on a device that the tests do not know; gives also whether only explicit scores agreed."""
    others = any(may_take(path, device) for path in PATHS if path != "blocks")
    found: Rehearsal | None = None
    try:
        found = once()
    except UnsupportedModelError:
        if not others:
            raise
    if found is not None and not (found.own_cache and family in VERIFIED and others):
        return found, False
    _go_by_blocks(family, device)
    return once(), True


def _go_by_blocks(family: str, device: torch.device) -> None:
    log.warning(
        f"on {device} a {family} model agrees with its own forward only where attention goes by "
        "explicit scores, which are slower (prefill doctor checks the others)"
    )
    only_blocks(device, f"a {family} model did not agree with its own forward")

"""Whether a device computes what it should: checked once, remembered in the user's cache for later runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

from prefillcli.errors import ResourceError
from prefillcli.prefill.attention_checks import CHECKED, PathCheck, check_paths
from prefillcli.prefill.attention_paths import may_take, rule_out
from prefillcli.runtime import device_key as devices
from prefillcli.runtime.kept_entries import KeptEntries

FILE = "devices.json"
MOST = 64  # devices that are remembered
PROVEN = frozenset({"cpu"})
"""Kinds of devices on which the verified families are tested. On others, each family is rehearsed at first."""


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
    unknown = [path for path in CHECKED if f"{path}/{name}" not in record.paths and may_take(path, device)]
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
        print(
            f"prefill: warning: attention on {device} goes without {path}, which is wrong there in {name}: {why} "
            "(prefill doctor checks again)",
            file=sys.stderr,
        )
        rule_out(path, device, why)

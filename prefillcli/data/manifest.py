"""What a work folder says of its job: which job it is, how far it is, and the plan to go on with."""

from __future__ import annotations

import datetime
import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prefillcli.data.counts import Counts
from prefillcli.data.store import Store
from prefillcli.errors import PrefillError

NAME = "manifest.json"
SCHEMA_VERSION = 1


def digest(fingerprint: dict[str, str]) -> str:
    """One digest of all parts of a job's fingerprint."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def differing(mine: dict[str, str], other: dict[str, str]) -> list[str]:
    """The parts in which two jobs differ, in the order of `mine`."""
    return [part for part in dict.fromkeys([*mine, *other]) if mine.get(part) != other.get(part)]


@dataclass
class Manifest:
    """The content of `manifest.json`."""

    fingerprint: dict[str, str]
    """Digest of every part of the job: input, model, tokenizer, template, labels, settings."""
    plan: dict[str, Any]
    """What the job wants back when it goes on; anything that JSON holds."""
    state: Literal["running", "complete"] = "running"
    counts: Counts | None = None
    """Set when complete."""
    created: str = field(default_factory=lambda: _now())

    def save(self, store: Store) -> None:
        """Write it, whole."""
        content = {
            "schema_version": SCHEMA_VERSION,
            "digest": digest(self.fingerprint),
            **asdict(self),
            "updated": _now(),
        }
        store.put_bytes(NAME, json.dumps(content, indent=1).encode())

    @classmethod
    def load(cls, store: Store) -> Manifest | None:
        """The manifest of a work folder; None if there is none. Raises PrefillError if it cannot be used."""
        try:
            with store.read(NAME) as file:
                content = json.load(file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise PrefillError(f"cannot read {store.location}/{NAME}: {error}\nremove the folder") from None
        try:
            if content["schema_version"] != SCHEMA_VERSION:
                raise PrefillError(
                    f"{store.location} was written by another version of prefill\n"
                    "finish the job with that version, or remove the folder"
                )
            counts = content["counts"] and Counts.of_json(content["counts"])
            return cls(content["fingerprint"], content["plan"], content["state"], counts, content["created"])
        except (KeyError, TypeError):
            raise PrefillError(f"{store.location}/{NAME} is no manifest\nremove the folder") from None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

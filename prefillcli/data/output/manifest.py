"""What a work folder says of its job: which one it is, how far it is, and the plan to go on with."""

from __future__ import annotations

import datetime
import hashlib
import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prefillcli.data.output.counts import Counts
from prefillcli.data.output.store import Store
from prefillcli.data.proof import take_checksum, with_checksum
from prefillcli.errors import DamagedFileError, OutputConflictError, PrefillError

NAME = "manifest.json"
SCHEMA_VERSION = 2
MEASURE = "measure"
"""The part of a fingerprint that says what the labels' numbers are, where they are no shares."""


@dataclass(frozen=True)
class Job:
    """Which job an output belongs to, with what is needed to recognise it."""

    fingerprint: dict[str, str]
    """Digest of every part of the job: input, model, tokenizer, template, labels, settings."""
    selection: dict[str, Any] = field(default_factory=dict)
    """The options `limit`, `sample` and `seed`: which rows of the input were taken."""
    id_name: str | None = None
    """The column with the ids; None where rows go by their number."""

    @property
    def digest(self) -> str:
        """One digest of all parts of the fingerprint."""
        return hashlib.sha256(json.dumps(self.fingerprint, sort_keys=True).encode()).hexdigest()

    def differing(self, other: Job) -> list[str]:
        """The parts in which two jobs differ, in the order of this one."""
        mine, others = self.fingerprint, other.fingerprint
        return [part for part in dict.fromkeys([*mine, *others]) if mine.get(part) != others.get(part)]

    def to_json(self) -> dict[str, Any]:
        """Its content for a file that belongs to the job."""
        return {"schema_version": SCHEMA_VERSION, "digest": self.digest, **asdict(self)}

    @classmethod
    def of_json(cls, content: dict[str, Any]) -> Job:
        """The job of `to_json`. Raises KeyError, TypeError or ValueError for anything else."""
        job = cls(dict(content["fingerprint"]), dict(content["selection"]), content["id_name"])
        if content["schema_version"] != SCHEMA_VERSION or content["digest"] != job.digest:
            raise ValueError("another version, or another digest")
        return job


@dataclass
class Manifest:
    """The content of `manifest.json`."""

    job: Job
    plan: dict[str, Any]
    """What the job stores for when it goes on; anything that JSON holds."""
    state: Literal["running", "complete"] = "running"
    counts: Counts | None = None
    """Set when complete."""
    files: dict[str, str] = field(default_factory=dict)
    """Set when complete: the output's files by name, with their digests (`seals.digest_of`)."""
    shard: dict[str, Any] | None = None
    """What a shard's work folder says of itself beside the job (see `shard_folders.ShardRecord`); else None."""
    merged: list[str] = field(default_factory=list)
    """The tokens of the shards that the output was made of, if it was."""
    digests: str | None = None
    """Set when complete: SHA-256 of the digests of its rows (see `row_digests`)."""
    before: dict[str, Any] | None = None
    """The complete output that this job is to replace (see `replaced`); None where there was none."""
    retries: bool = False
    """Whether that is the job's own, of which the error rows alone are scored again."""
    created: str = field(default_factory=lambda: _now())
    updated: str = field(default_factory=lambda: _now())

    def save(self, store: Store) -> None:
        """Write it, whole."""
        self.updated = _now()
        content = {**asdict(self), **self.job.to_json()}
        del content["job"]
        store.put_bytes(NAME, with_checksum(content))

    @classmethod
    def load(cls, store: Store) -> Manifest | None:
        """The manifest of a work folder; None if there is none.

        Raises DamagedFileError if it has changed since, OutputConflictError if another version wrote it.
        """
        try:
            content = json.loads(store.read_bytes(NAME))
            right = take_checksum(content)
            version = content["schema_version"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, AttributeError, TypeError, KeyError):
            raise DamagedFileError("it cannot be read") from None
        if right is False or (right is None and version == SCHEMA_VERSION):
            raise DamagedFileError("it is not what was written")
        if version != SCHEMA_VERSION:
            raise OutputConflictError(
                f"{store.location} was written by another version of prefill\n"
                "finish the job with that version, or start over with --overwrite"
            )
        try:
            counts = content["counts"] and Counts.of_json(content["counts"])
            rest = {name: content[name] for name in ("plan", "state", "files", "created", "updated")}
            rest |= {
                name: content[name] for name in ("shard", "merged", "digests", "before", "retries") if name in content
            }
            return cls(Job.of_json(content), counts=counts, **rest)
        except (KeyError, TypeError, ValueError):
            raise DamagedFileError("it is not a manifest") from None


def replaced(store: Store) -> dict[str, Any] | None:
    """What a new job in a work folder has to know of the complete output that it is to replace, if there is one."""
    with suppress(PrefillError):
        found = Manifest.load(store)
        if found is not None and found.state == "complete" and found.digests is not None:
            return {"job": found.job.to_json(), "files": found.files, "digests": found.digests}
        return None if found is None else found.before
    return None


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

"""The file of `--exit-profile`: read before anything loads, and held against the job that it is used in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from prefillcli.data.proof.fingerprints import hash_value
from prefillcli.errors import UsageError
from prefillcli.exits.profile_file import ExitProfile, exit_profile_of, require_same_job
from prefillcli.jobs.load import compression_of
from prefillcli.jobs.sealed_file import read_sealed
from prefillcli.models.open import Opened
from prefillcli.options.score import ScoreSettings
from prefillcli.redaction import without_secrets

AGAIN = "leave it out: the exits are then learnt on rows of this job"


def read_exit_profile(settings: ScoreSettings) -> ExitProfile | None:
    """What `--exit-profile` names, if anything. Raises UsageError if that is no profile."""
    return None if settings.exit_profile is None else exit_profile_at(settings.exit_profile)


def exit_profile_at(path: str) -> ExitProfile:
    """The profile at a local path or URL. Raises UsageError if it is none, or not as a job wrote it."""
    content, sealed = read_sealed("--exit-profile", path, AGAIN)
    profile = exit_profile_of(content, without_secrets(path))
    if not sealed:  # it is what proves the bound on flips
        raise UsageError(
            f"--exit-profile {without_secrets(path)}: it has no checksum: an older version of prefill or another "
            f"program wrote it\n{AGAIN}"
        )
    return profile


def require_same_exits(
    profile: ExitProfile, settings: ScoreSettings, opened: Opened, labels: tuple[str, ...], digests: Mapping[str, str]
) -> None:
    """Raise UsageError if a profile was learnt in another kind of job, or proves less than this one asks."""
    own = job_of_exits(settings, opened, labels, digests)
    require_same_job(profile, without_secrets(settings.exit_profile or ""), max_flips=settings.max_flips, **own)


def job_of_exits(
    settings: ScoreSettings, opened: Opened, labels: tuple[str, ...], digests: Mapping[str, str]
) -> dict[str, Any]:
    """Whose the exits are that a job learns, by its fingerprint: what must be the same where they are used again."""
    # Not the digest of all options of compression: an audit changes nothing that a model reads.
    kept: list[Any] = [settings.keep, asdict(compression_of(settings))] if settings.compresses else []
    if "adapters" in digests:
        kept.append(digests["adapters"])
    return {
        "model": digests["model"],
        "prompt": hash_value([*(digests.get(part) for part in ("tokenizer", "prompt", "draft")), *kept]),
        "labels": labels,
        "label_tokens": digests["labels"],
        "layers": opened.files.config.get_text_config().num_hidden_layers,
    }

"""The labels after one prompt."""

from __future__ import annotations

from prefillcli.data.prompts.labels import LabelError, Labels, tail_of


def resolve(labels: Labels, prompt: str) -> int:
    """Index into `labels.sets` after a prompt. Raises LabelError."""
    (found,) = labels.resolve_all([tail_of(prompt)])
    if isinstance(found, LabelError):
        raise found
    return found

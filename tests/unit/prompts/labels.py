"""The labels after one prompt."""

from __future__ import annotations

from prefillcli.plan.behind import LabelSet
from prefillcli.prompts.labels import LabelError, Labels, tail_of


def resolve(labels: Labels, prompt: str) -> LabelSet:
    """The labels after a prompt. Raises LabelError."""
    (found,) = labels.resolve_all([tail_of(prompt)])
    if isinstance(found, LabelError):
        raise found
    return found.labels

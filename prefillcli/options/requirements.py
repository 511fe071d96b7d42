"""What an option needs to have an effect. An option that would be ignored is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Requirement:
    """What must be true of a command's settings for an option to have an effect.

    `unmet` goes on behind the option's name to say why it has none, `remedy` says what to do besides leaving it out. A
    `standing` option is one that a recipe may keep for the commands and runs that use it.
    """

    met: Callable[[Any], bool]
    unmet: str
    remedy: str
    standing: bool = False

    def refusal(self, option: str) -> str:
        """What is said where it is not met."""
        return f"{option} {self.unmet}\nit would be ignored: {self.remedy}, or leave it out"


def _on_the_hub(name: str | None) -> bool:
    return name is not None and not Path(name).expanduser().exists()


DRAFT = Requirement(lambda s: s.drafts, "is for a draft model, and none picks tokens", "give --draft and --keep")
COMPRESSION = Requirement(
    lambda s: s.compresses, "is for compression, and nothing is compressed", "give --draft and --keep"
)
SPECPREFILL = Requirement(
    lambda s: s.compares("specprefill"),
    "is for the method specprefill, and others are compared",
    "give --method specprefill",
)
KEEP_AUTO = Requirement(lambda s: s.keep == "auto", "is for --keep auto, and that is not given", "give --keep auto")
AUDIT = Requirement(lambda s: s.audit > 0, "is for the audit, and there is none", "give --audit N")
RANDOM = Requirement(lambda s: s.draws, "is for random draws, and nothing is drawn", "give --sample N", standing=True)
HUB_MODEL = Requirement(
    lambda s: _on_the_hub(s.model), "is for a model from the hub, and none is named", "name one with --model"
)
FORECAST = Requirement(
    lambda s: s.dry_run, "is for predicted costs, and a run predicts none", "give --dry-run", standing=True
)
PROGRESS = Requirement(
    lambda s: not s.quiet, "is for progress lines, and --quiet leaves them out", "drop --quiet", standing=True
)
NO_TEMPLATE = Requirement(
    lambda s: s.template is None, "names the prompt's column, but --template makes the prompt", "drop --template"
)
INPUT = Requirement(lambda s: bool(s.inputs), "is for INPUT, and none is given", "name a file", standing=True)
MADE_WORKLOADS = Requirement(
    lambda s: not s.inputs,
    "is for made workloads, and INPUT is given",
    "choose rows with --limit or --sample",
    standing=True,
)
REPLAY = Requirement(
    lambda s: "none" not in s.replay, "is for a replay, and --replay is none", "name a workload with --replay"
)

"""Conditions under which options have an effect. Options that would be ignored are refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

AnySettings = TypeVar("AnySettings", bound=Any)


@dataclass(frozen=True, slots=True)
class Requirement:
    """A condition on a command's settings without which an option has no effect.

    `reason` follows the option's name and explains why it has no effect. `remedy` names something to do besides
    leaving the option out. With `recipe_may_keep` a recipe may hold the option for other commands and runs, which do
    use it.
    """

    met: Callable[[Any], bool]
    reason: str
    remedy: str
    recipe_may_keep: bool = False

    def message(self, option: str) -> str:
        """Return the error where it is not met; `option` as the user wrote it."""
        return f"{option} {self.reason}\nit would be ignored: {self.remedy}, or leave it out"


def compresses(settings: Any) -> bool:
    """Return whether these settings let the model read some tokens of a prompt only."""
    return settings.compression.draft is not None or settings.compression.keep != 1


def bounds_alone(settings: Any) -> bool:
    """Return whether these settings bound flips and name no way to spend them: then every way is tried that may pay on
    this machine (`spelled_out`). --keep has a bound of its own, and a head flips no answers."""
    named = settings.exits.exit or settings.exits.chain or settings.lm.head_file is not None
    return settings.flips.is_given("max_flips") and not named and not compresses(settings)


def spelled_out(settings: AnySettings) -> AnySettings:
    """Return these settings with the ways that --max-flips stands for where it is alone."""
    ways = {"exit": True, "first": "words", "compute": "int8"}
    found: AnySettings = settings.with_options(ways) if bounds_alone(settings) else settings
    return found


def leaves_early(settings: Any) -> bool:
    """Return whether these settings let rows be decided before the model's last layer."""
    return bool(settings.exits.exit or first_readers(settings) or bounds_alone(settings))


def first_readers(settings: Any) -> Sequence[str]:
    """Return what reads rows before the model, in this order. With a head the model itself computes in --compute."""
    return () if settings.lm.head_file is not None else tuple(settings.exits.chain)


def asks_more(settings: Any) -> bool:
    """Return whether these settings ask more about rows that are scored."""
    return bool(settings.rationales.rationale or settings.rationales.evidence)


def _is_on_hub(name: str | None) -> bool:
    return name is not None and not Path(name).expanduser().exists()


DRAFT = Requirement(lambda s: s.uses_draft, "needs a draft model", "give --draft and --keep")
BOUNDED_FLIPS = Requirement(
    lambda s: s.compression.keep == "auto" or leaves_early(s),
    "has no flips to bound beside a rate of --keep or a head's file",
    "give --keep auto",
)
AUDITABLE = Requirement(
    lambda s: compresses(s) or leaves_early(s) or s.lm.head_file is not None,
    "has no effect where all rows are read in full",
    "give --draft and --keep, --exit or --first",
)
SHOWN_TEXT = Requirement(
    lambda s: bool(s.truth.columns) or asks_more(s),
    "has no effect on a report that names no rows",
    "name the right answers with --truth, or give --rationale or --evidence",
)
RANDOM = Requirement(
    lambda s: s.is_random,
    "has no effect without a random sample",
    "give --sample N",
    recipe_may_keep=True,
)
HUB_MODEL = Requirement(lambda s: _is_on_hub(s.lm.model), "needs a model from the hub", "name one with --model")
FORECAST = Requirement(
    lambda s: s.prediction.dry_run,
    "needs a dry run, which predicts costs",
    "give --dry-run",
    recipe_may_keep=True,
)
SCORES = Requirement(
    lambda s: not s.prediction.dry_run,
    "has no effect on a dry run, which scores no rows",
    "drop --dry-run",
    recipe_may_keep=True,
)
PROGRESS = Requirement(
    lambda s: not s.run.quiet,
    "has no effect with --quiet",
    "drop --quiet",
    recipe_may_keep=True,
)
NO_TEMPLATE = Requirement(
    lambda s: s.prompts.template is None, "has no effect beside --template, which makes the prompt", "drop --template"
)
INPUT = Requirement(lambda s: bool(s.input.inputs), "needs INPUT", "name a file", recipe_may_keep=True)
ALL_ROWS = Requirement(
    lambda s: s.finishes,
    "needs all rows of a finished output: a shard has some of them, a dry run none",
    "give it to the run that finishes the output: prefill merge for shards",
    recipe_may_keep=True,
)
RAY = Requirement(lambda s: s.processes.runner == "ray", "needs --runner ray", "give --runner ray")

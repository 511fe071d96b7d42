"""What an option is: a field with a help text and a panel, and what it needs to have an effect."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from prefillcli.engines.kinds import Capability
from prefillcli.options.requirements import Requirement

FILES, MODEL, PROMPTS, ANSWERS, RUN, MEMORY, COMPRESSION, BENCH, PROFILE, REPLAY = (
    "Files",
    "Model",
    "Prompts",
    "Answers",
    "Run",
    "Memory and speed",
    "Compression (SpecPrefill)",
    "What is compared",
    "What is measured",
    "Replay",
)


def option(
    default: Any,
    help: str,
    panel: str,
    *,
    short: str = "",
    metavar: str = "",
    repeatable: bool = False,
    negative: str = "",
    needs: Capability | None = None,
    requires: Requirement | None = None,
    off: Any = None,
    **field: Any,
) -> Any:
    """A field that is an option of the command line; `repeatable` ones may be given several times.

    `negative` is the flag that turns an option off which is on by default.
    `needs` is what the engine must be able to do if the option is given; those of compression need that. `requires` is
    what the other options must say for it to have an effect: without, it is refused. `off` is the value that asks for
    nothing, besides None and what a switch is anyway.
    """
    extra: dict[str, Any] = {"panel": panel, "short": short, "metavar": metavar, "repeatable": repeatable}
    extra |= {"negative": negative, "requires": requires, "off": off}
    extra["needs"] = needs or ("compression" if panel == COMPRESSION else None)
    return Field(default, description=help, json_schema_extra=extra, **field)


class Settings(BaseModel):
    """A group of options, or all options of a command."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    _flags: frozenset[str] = PrivateAttr(frozenset())

    def from_flags(self, names: Iterable[str]) -> Self:
        """These settings, of which flags gave the options of these names."""
        self._flags = frozenset(names)
        return self

    def is_flag(self, name: str) -> bool:
        """Whether the option was given for this very run, on the command line."""
        return name in self._flags

    def check(self) -> None:
        """Raise UsageError for options that contradict one another."""

    @classmethod
    def required(cls) -> dict[str, list[Requirement]]:
        """What each option requires to have an effect, by field name; those that always have one are left out."""
        found = {name: extra_of(cls, name).get("requires") for name in cls.model_fields}
        return {name: [required] for name, required in found.items() if required is not None}

    def idle(self) -> dict[str, Requirement]:
        """The options that were given, ask for something, and would be ignored, each with what it lacks first."""
        found = {}
        for name, required in self.required().items():
            field, value = type(self).model_fields[name], getattr(self, name)
            off = field.default if field.annotation is bool else extra_of(type(self), name)["off"]
            if name in self.model_fields_set and value is not None and value != off:
                missing = [each for each in required if not each.met(self)]
                if missing:
                    found[name] = missing[0]
        return found


def extra_of(kind: type[BaseModel], name: str) -> dict[str, Any]:
    """What `option` has put down beside a field; nothing for one that is no option."""
    extra: dict[str, Any] = kind.model_fields[name].json_schema_extra or {}  # type: ignore[assignment]
    return extra


def require(found: dict[str, list[Requirement]], names: Iterable[str], required: Requirement) -> None:
    """Let the options of these names require this first."""
    for name in names:
        found[name] = [required, *found.get(name, ())]

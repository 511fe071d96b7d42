"""Kinds of values that options take, read alike from a flag, an environment variable and a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.engines.registry import ENGINES
from prefillcli.plan.schedules import SCHEDULES
from prefillcli.runtime.sizes import parse_size


def _as_list(value: object) -> object:
    """`a,b` is a list in a flag, an environment variable and a recipe alike."""
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())


def _as_texts(value: object) -> object:
    """In a recipe, the labels 1 and 0 are numbers."""
    return tuple(str(v) if type(v) is int else v for v in value) if isinstance(value, list | tuple) else value


def _check_size(text: str) -> str:
    parse_size(text)
    return text


def _check_odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("must be odd, to be centred on a token")
    return number


def _as_rates(value: object) -> object:
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(rate for part in parts for rate in str(part).split(",") if rate)


def _as_rate(value: object) -> object:
    if value == "auto":
        return value
    try:
        return float(str(value))
    except ValueError:
        raise ValueError("must be a rate above 0 and up to 1, or auto") from None


def _as_count(value: object) -> object:
    """In the environment and on the command line a number is text."""
    if value == "auto":
        return value
    try:
        return int(str(value))
    except ValueError:
        raise ValueError("must be a whole number, or auto") from None


def _check_engine(name: str) -> str:
    if name not in ENGINES:
        raise ValueError(f"not an engine: use {', '.join(ENGINES)}")
    return name


def _as_mapping(value: object) -> object:
    """`key=value` texts, or a mapping as in a recipe; values are read as YAML reads them."""
    if isinstance(value, dict):
        return value
    import yaml  # takes a while

    try:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            return yaml.safe_load(value)
        pairs = [str(text).partition("=") for text in (value if isinstance(value, list | tuple) else [value])]
        if not all(key.strip() and equals for key, equals, _ in pairs):
            raise ValueError("must be KEY=VALUE, block_size=32 for example")
        return {key.strip(): yaml.safe_load(own) for key, _, own in pairs}
    except yaml.YAMLError:
        raise ValueError("its value is not valid YAML") from None


Size = Annotated[str, AfterValidator(_check_size)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
Rate = Annotated[float | Literal["auto"], BeforeValidator(_as_rate)]
ThreadCount = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(_as_count)]
Threshold = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_as_count)]
Fairness = Annotated[tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], BeforeValidator(_as_rates)]
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
EngineName = Annotated[str, AfterValidator(_check_engine)]
KeyValues = Annotated[dict[str, Any], BeforeValidator(_as_mapping)]
Rates = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(_as_rates)]
Labels = Annotated[str | tuple[str, ...], BeforeValidator(_as_texts)]
Odd = Annotated[int, AfterValidator(_check_odd)]

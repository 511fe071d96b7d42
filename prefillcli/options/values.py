"""Types of option values. Each is read the same way from a flag, an environment variable and a recipe."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from prefillcli.data.shard import Shard
from prefillcli.engines.registry import ENGINES
from prefillcli.errors import brief
from prefillcli.plan.schedules import SCHEDULES
from prefillcli.runtime.memory import parse_size


def _split_names(value: object) -> object:
    """`a,b` is a list of two names."""
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(name.strip() for part in parts for name in str(part).split(",") if name.strip())


def _as_texts(value: object) -> object:
    """One text, or several. A whole number in a recipe is written as it is; of 1.10 the last 0 would be lost."""
    texts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) or type(text) is int for text in texts):
        raise ValueError("must be text: put it in quotes")
    return tuple(map(str, texts))


def _labels_as_text(value: object) -> object:
    """The labels 1 and 0 are numbers in a recipe."""
    return tuple(str(v) if type(v) is int else v for v in value) if isinstance(value, list | tuple) else value


def _check_size(text: str) -> str:
    parse_size(text)
    return text


def _check_odd(number: int) -> int:
    if number % 2 == 0:
        raise ValueError("must be odd, to be centred on a token")
    return number


def _split_numbers(value: object) -> object:
    parts = value if isinstance(value, list | tuple) else [value]
    return tuple(rate for part in parts for rate in str(part).split(",") if rate)


def _number_or_auto(value: object) -> object:
    if value == "auto":
        return value
    try:
        return float(str(value))
    except ValueError:
        raise ValueError("must be a rate above 0 and up to 1, or auto") from None


def _count_or_auto(value: object) -> object:
    """Numbers are text in the environment and on the command line."""
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


def _check_shard(text: str) -> str:
    return str(Shard.parse(text))


def _check_rows(value: object) -> object:
    """A number of rows, or a range of them; a number in a recipe is no text."""
    text = str(value).replace(" ", "")
    found = re.fullmatch(r"(\d*)(-?)(\d*)", text)
    if type(value) is bool or found is None or not (found[1] or found[3]):
        raise ValueError("must be a number of rows, or a range like 900-1100, 900- or -1100")
    if found[1] and found[3] and int(found[1]) > int(found[3]):
        raise ValueError("is no range: its first number is above its last one")
    return text


def _read_mapping(value: object) -> object:
    """A mapping from texts like `key=value`, or as a recipe has it. The values are YAML."""
    if isinstance(value, dict):
        return value
    if isinstance(value, str) and value.lstrip().startswith("{"):
        return _parsed(value)
    pairs = [str(text).partition("=") for text in (value if isinstance(value, list | tuple) else [value])]
    if not all(key.strip() and equals for key, equals, _ in pairs):
        raise ValueError("must be KEY=VALUE, block_size=32 for example")
    found = {key.strip(): _parsed(own) for key, _, own in pairs}
    if len(found) < len(pairs):
        raise ValueError("has a key twice")
    return found


def _parsed(text: str) -> object:
    from prefillcli.options.recipe import parse_yaml  # YAML takes a while to import

    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"its value is not valid YAML: {brief(error)}") from None


def _read_adapters(value: object) -> object:
    """Folders by adapter name, from texts like `DIR` and `NAME=DIR`, or as a recipe has them.

    An adapter without a name is called like its folder.
    """
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _read_mapping(value)
    if isinstance(value, dict):
        return {str(name): str(folder) for name, folder in value.items()}
    found: dict[str, str] = {}
    for text in map(str, value if isinstance(value, list | tuple) else [value]):
        name, equals, folder = text.partition("=")
        if not equals or "/" in name:
            name, folder = os.path.basename(os.path.abspath(os.path.expanduser(text))), text
        if not name or not folder:
            raise ValueError("must be a folder, or NAME=FOLDER")
        if name in found:
            raise ValueError(f"two adapters are called {name!r}: name them, NAME=FOLDER")
        found[name] = folder
    return found


def _check_resources(value: object) -> object:
    """Amounts by name; memory may be a size."""
    if not isinstance(value, dict):
        return value
    found: dict[str, float] = {}
    for name, amount in value.items():
        if name.lower() in ("cpu", "cpus", "num_cpu", "gpu", "gpus", "num_gpu"):
            raise ValueError(f"{name} is not a resource: use num_cpus or num_gpus")
        try:
            found[name] = float(parse_size(str(amount)) if name == "memory" else amount)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number") from None
        if not 0 <= found[name] < float("inf"):
            raise ValueError(f"{name} must be 0 or more")
    return found


ByteSize = Annotated[str, AfterValidator(_check_size)]
TextList = Annotated[tuple[str, ...], BeforeValidator(_as_texts)]
NameList = Annotated[tuple[str, ...], BeforeValidator(_split_names)]
KeepRate = Annotated[float | Literal["auto"], BeforeValidator(_number_or_auto)]
ThreadCount = Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], BeforeValidator(_count_or_auto)]
TokenThreshold = Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_count_or_auto)]
if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[tuple(SCHEDULES)]
EngineName = Annotated[str, AfterValidator(_check_engine)]
RowRange = Annotated[str, BeforeValidator(_check_rows)]
ShardName = Annotated[str, AfterValidator(_check_shard)]
KeyValues = Annotated[dict[str, Any], BeforeValidator(_read_mapping)]
AdapterFolders = Annotated[dict[str, str], BeforeValidator(_read_adapters)]
Resources = Annotated[dict[str, float], BeforeValidator(_check_resources), BeforeValidator(_read_mapping)]
KeepRates = Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], BeforeValidator(_split_numbers)]
LabelTexts = Annotated[str | tuple[str, ...], BeforeValidator(_labels_as_text)]
OddNumber = Annotated[int, AfterValidator(_check_odd)]

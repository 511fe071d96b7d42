"""Settings of a job: recipe < environment < flag.

The fields of `ScoreSettings` are the options of `prefill score`: name, default, help text and help panel are
written here once, and the command line is made from them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from prefillcli.errors import UsageError

ENVIRONMENT_PREFIX = "PREFILL_"

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of a size like `8GiB`, `500MB` or `1048576`. Raises ValueError."""
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 8GiB, 500MB or 1048576")
    number, prefix, binary = match.groups()
    size = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))
    if size <= 0:
        raise ValueError("a size is more than 0")
    return size


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


Size = Annotated[str, AfterValidator(_check_size)]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list)]

FILES, MODEL, PROMPTS, ANSWERS, RUN, MEMORY = (
    "Files",
    "Model",
    "Prompts",
    "Answers",
    "Run",
    "Memory and speed",
)


def _option(default: Any, help: str, panel: str, *, short: str = "", metavar: str = "", **field: Any) -> Any:
    extra: dict[str, Any] = {"panel": panel, "short": short, "metavar": metavar}
    return Field(default, description=help, json_schema_extra=extra, **field)


class ScoreSettings(BaseModel):
    """Everything `prefill score` can be told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[str, ...] = Field(description="Parquet or JSONL: files, directories, globs or URLs.", min_length=1)

    output: str | None = _option(
        None,
        "Where the scores go: .parquet, .jsonl, or a directory (ending in /). (default: INPUT.scores.parquet)",
        FILES, short="-o", metavar="PATH",
    )  # fmt: skip
    report: str | None = _option(
        None, "Where run.json goes. (default: OUTPUT.run.json beside the output)", FILES, metavar="PATH"
    )
    id_column: str | None = _option(
        None, "Column that names a row in the output. (default: the row number)", FILES, metavar="NAME"
    )
    keep_columns: Names = _option((), "Input columns to copy to the output, comma-separated.", FILES, metavar="NAMES")
    resume: bool = _option(False, "Go on with this job where it was stopped.", FILES)
    overwrite: bool = _option(False, "Replace an output that exists.", FILES)
    limit: int | None = _option(None, "Score the first N rows only.", FILES, metavar="N", ge=1)
    sample: int | None = _option(None, "Score N rows drawn at random.", FILES, metavar="N", ge=1)
    seed: int = _option(0, "Seed of --sample.", FILES, metavar="N")

    model: str | None = _option(
        None,
        "A model directory or a hub name. (default: the shipped sample model)",
        MODEL,
        short="-m",
        metavar="MODEL",
    )
    revision: str | None = _option(None, "Revision of a hub model.", MODEL, metavar="NAME")
    trust_remote_code: bool = _option(False, "Run code that the model's directory brings along.", MODEL)
    device: str = _option("auto", "cpu, cuda, cuda:1, ... or auto.", MODEL, metavar="DEVICE")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _option(
        "auto", "Number format of weights and activations; auto: as the model is saved.", MODEL
    )

    prompt_column: str = _option(
        "prompt", "Column with the text, the chat messages or the token ids.", PROMPTS, metavar="NAME"
    )
    template: str | None = _option(
        None, "Jinja text, or a file with it, rendered from the row's columns.", PROMPTS, metavar="JINJA"
    )
    chat: bool | None = _option(None, "Apply the tokenizer's chat template. (default: if it has one)", PROMPTS)
    system: str | None = _option(None, "System message before each chat.", PROMPTS, metavar="TEXT")
    max_length: int | None = _option(
        None, "Longest prompt in tokens. (default: the model's limit)", PROMPTS, metavar="N", ge=1
    )
    on_long: Literal["error", "truncate-left", "truncate-middle", "skip"] = _option(
        "error", "What happens to a longer prompt.", PROMPTS
    )

    labels: Annotated[str | tuple[str, ...], BeforeValidator(_as_texts)] = _option(
        "Yes,No",
        "Answers, the positive one first; 'Yes= Yes|yes|YES' sums variants.",
        ANSWERS, metavar="LABELS",
    )  # fmt: skip
    temperature: float = _option(1.0, "Divides the label logits.", ANSWERS, metavar="T", gt=0, allow_inf_nan=False)

    memory: Size | None = _option(
        None, "Budget for activations and K,V, e.g. 8GiB. (default: what is free)", MEMORY, metavar="SIZE"
    )
    pack_tokens: int | None = _option(
        None, "Tokens of one pass over the model. (default: from --memory)", MEMORY, metavar="N", ge=1
    )
    chunk_tokens: int | None = _option(
        None, "Tokens of one call of a layer. (default: from the model)", MEMORY, metavar="N", ge=1
    )
    schedule: Literal["prefix-tree", "fifo"] = _option("prefix-tree", "Order in which rows are computed.", MEMORY)
    prefix_kv: Literal["auto", "discard", "keep", "offload"] = _option(
        "auto",
        "K,V of a prefix that spans packs: compute again, keep on the device, keep in host memory.",
        MEMORY,
    )

    max_error_rate: float = _option(
        0.0, "Share of error rows above which the exit code is 3.", RUN, metavar="RATE", ge=0, le=1
    )
    skip_empty: bool = _option(False, "Exit 99 if the input has no rows.", RUN)
    progress_interval: float = _option(
        30.0, "Seconds between progress lines off a terminal.", RUN, metavar="SECONDS", gt=0
    )
    quiet: bool = _option(False, "Warnings and errors only.", RUN, short="-q")
    debug: bool = _option(False, "Show tracebacks.", RUN)


def load_settings(
    flags: Mapping[str, Any], *, recipe: str | None = None, environment: Mapping[str, str] = os.environ
) -> ScoreSettings:
    """Merge `flags` (what was given on the command line) over the environment over the recipe file.

    Raises UsageError naming the option, and for an unknown key the nearest known one.
    """
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    known = ScoreSettings.model_fields
    if recipe is not None:
        for key, value in _read_recipe(recipe).items():
            name = "inputs" if key == "input" else key
            if name not in known:
                raise UsageError(f"{recipe}: unknown key {key!r}{nearest(key, known)}")
            values[name], origin[name] = value, f"{recipe}: {key}"
    for name in known:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if name != "inputs" and environment.get(variable):
            values[name], origin[name] = environment[variable], variable
    for name, value in flags.items():
        values[name], origin[name] = value, "INPUT" if name == "inputs" else "--" + name.replace("_", "-")
    if isinstance(values.get("inputs"), str):
        values["inputs"] = (values["inputs"],)
    if not values.get("inputs"):
        raise UsageError("no INPUT given: name a Parquet or JSONL file, a directory or a glob")
    try:
        settings = ScoreSettings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        reason = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
        raise UsageError(f"{origin.get(name, name)} {first['input']!r}: {reason}") from None
    if settings.resume and settings.overwrite:
        raise UsageError("--resume goes on with the output, --overwrite replaces it: give one of them")
    if settings.limit is not None and settings.sample is not None:
        raise UsageError("--limit takes the first rows, --sample random ones: give one of them")
    return settings


def nearest(word: str, known: Mapping[str, object]) -> str:
    """`; did you mean 'labels'?`, or nothing where no known word is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class _RecipeLoader(yaml.SafeLoader):
    """YAML in which Yes and No are the labels they look like: of the words for a truth value, only true and false."""


_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, words) for tag, words in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def _read_recipe(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.load(Path(path).read_text(encoding="utf-8"), _RecipeLoader)  # noqa: S506 - a SafeLoader
    except OSError as error:
        raise UsageError(f"{path}: cannot read the recipe: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the recipe is not YAML: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: a recipe is a mapping of option names to values")
    return {str(key): value for key, value in loaded.items()}

"""`python -m tests.reference`: what is made of the options themselves, docs/options.md and the keywords of
`prefillcli.Scorer` and `prefillcli.score`, and schema/run.schema.json, made of the report's classes. A test compares
them."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import create_model
from pydantic.json_schema import GenerateJsonSchema

from prefillcli.command_line import TEXT, option_help
from prefillcli.options.commands import COMMANDS, ScoreSettings
from prefillcli.options.groups import QUOTED
from prefillcli.options.option import PANELS, STEPS, as_typed, details_of
from prefillcli.report.finding import Finding
from prefillcli.report.run import SCHEMA_VERSION, RunReport
from prefillcli.scoring import compose  # noqa: F401 - all parts, and so all findings

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "options.md"
SCHEMA = ROOT / "schema" / "run.schema.json"
KEYWORDS = ROOT / "prefillcli" / "options" / "keywords.py"
#: What the parts of a job put into `run.json`.
BLOCKS: dict[str, Any] = {kind.key: kind for kind in sorted(Finding.__subclasses__(), key=lambda kind: kind.key)}
#: The page that explains the options of a panel.
PAGES = {
    "Input": "score.md",
    "Output": "score.md",
    "Model": "score.md",
    "Prompts": "score.md",
    "Answers": "score.md",
    "Run": "score.md",
    "Memory and speed": "scale.md",
    "Several processes": "scale.md",
    "Compression (SpecPrefill)": "compression.md",
    "Early exit and flips": "exit.md",
    "Rationales": "rationales.md",
    "Evaluation": "evaluation.md",
    "Gates": "gates.md",
    "What is compared": "bench.md",
    "What is measured": "profile.md",
    "Fit": "calibrate.md",
}
HEAD = """# All options

Made from the options themselves (`make reference`). An option is one of `prefill score`, unless its meaning ends with
the commands that have it. Its name is also its key in a recipe, with underscores, and its variable in the environment,
in capitals with the prefix `PREFILL_`. Rare options have no flag: `--set NAME=VALUE` gives them.

- *jobs*: `score`, `profile`, `bench` and `inspect`.
- †: text of prompts, in which `\\n` is a line break and `\\t` a tab.
- A list of names is comma-separated; quote a name that has a comma: `'a,"b, c"'`.
"""
JOBS = ["score", "profile", "bench", "inspect"]


def reference() -> str:
    """The page."""
    # By panel and option, the commands of each meaning. What other commands do comes behind `prefill score`.
    panels: dict[str, dict[str, dict[str, list[str]]]] = {
        panel: {} for panel in sorted(PANELS, key=STEPS["What to do"].__contains__)
    }
    for command, kind in COMMANDS.items():
        for name in kind.of_level("first", "more", "rare"):
            details = details_of(kind, name)
            negative = f"--{details.negative}" if details.negative else ""
            negative = negative or (
                as_typed(kind, name, False) if kind.options()[name].annotation == bool | None else ""
            )
            words = [as_typed(kind, name), negative, details.short]
            shown = ", ".join(f"`{word}`" for word in words if word)
            meanings = panels[details.panel].setdefault(shown, {})
            meaning = option_help(kind, name).replace(f" {QUOTED}", "")
            if TEXT in meaning:
                meaning = meaning.replace(TEXT, "") + " †"
            meanings.setdefault(meaning, []).append(command)
    lines = [HEAD]
    for panel, options in panels.items():
        lines += [f"## {panel}", "", f"| option | meaning ([{PAGES[panel]}]({PAGES[panel]})) |", "| --- | --- |"]
        lines += [_row(shown, meanings) for shown, meanings in options.items()]
        lines.append("")
    return "\n".join(lines)


def _row(shown: str, meanings: dict[str, list[str]]) -> str:
    """The row of an option; commands in which it has another meaning than in the first ones are named with it."""
    (first, names), *others = meanings.items()
    told = [_cell(first), *(f"**{', '.join(named)}**: {_cell(text)}" for text, named in others)]
    commands = [*names, *(name for _, named in others for name in named)]
    if {*JOBS} <= {*commands}:
        commands = ["jobs", *(name for name in commands if name not in JOBS)]
    if commands != ["score"]:
        told.append(f"*({', '.join(commands)})*")
    return f"| {shown} | {' '.join(told)} |"


class _Schema(GenerateJsonSchema):
    """Every field is in the file, whether or not it has a default."""

    def field_is_required(self, *_: Any, **__: Any) -> bool:
        return True

    def field_title_should_be_set(self, *_: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> dict[str, Any]:
        return self.generate_inner(schema["schema"])


# The groups whose options determine how a row is scored, and their options that are for jobs alone.
_OF_ROWS = (
    *("prompts", "images", "answers", "choices", "asking", "pairs", "likelihood", "probabilities", "lm", "heads"),
    *("adapters", "engine", "packs", "layers", "compression", "requests", "rationales", "chosen"),
)
_OF_JOBS = {"model", "gguf_cache", "format", "rationale_limit", "adapt", "max_shift"}
_OF_FILES = ("id_column", "keep_columns", "limit", "sample", "seed", "csv_separator", "csv_quoting")
# Types that no rule makes of an option's own.
_TYPES = {
    "adapter": "StrPath | Sequence[str] | Mapping[str, StrPath]",
    "head": "StrPath",
    "keep": "float",
    "questions": "StrPath | Sequence[Question | Mapping[str, Any]] | None",
}
_KEYWORDS = '''"""The options that Python takes as keywords, made of the options themselves (`make reference`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from prefillcli.prompts.questions import Question

StrPath = str | PathLike[str]


class ScorerOptions(TypedDict, total=False):
    """The options of `prefill score` that determine how a row is scored. docs/score.md explains each."""

{scorer}


class FileOptions(TypedDict, total=False):
    """The options of `prefill score` that choose the rows and columns of files."""

{files}


class ScoreOptions(ScorerOptions, FileOptions, total=False):
    """The options of `prefillcli.score`."""
'''


def keywords() -> str:
    """The module with the keywords and their types."""
    groups = ScoreSettings.groups()
    of_rows = [name for group in _OF_ROWS for name in groups[group].model_fields if name not in _OF_JOBS]
    scorer, files = ("\n".join(f"    {name}: {_type(name)}" for name in names) for names in (of_rows, _OF_FILES))
    return _KEYWORDS.format(scorer=scorer, files=files)


def _type(name: str) -> str:
    details, own = details_of(ScoreSettings, name), _written(ScoreSettings.options()[name].annotation)
    if name in _TYPES:
        return _TYPES[name]
    if details.metavar == "SIZE":
        return own.replace("str", "str | int")
    return own.replace("str", "StrPath") if details.path is not None and own.startswith("str |") else own


def _written(annotation: Any) -> str:
    """A type as a keyword has it: wider than what the command line's texts become, and without what validates it."""
    origin, own = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _written(own[0])
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(each) for each in own)}]"
    if origin is tuple:
        return f"str | Sequence[{_written(own[0])}]"
    if origin is dict:
        return "Mapping[str, Any]"
    if own:
        return " | ".join(dict.fromkeys(" | ".join(map(_written, own)).split(" | ")))
    return "None" if annotation is NoneType else str(annotation.__name__)


def run_schema() -> str:
    """The schema of `run.json`, with a line for each key and each class."""
    whole: Any = create_model("run.json", __base__=RunReport, __doc__=RunReport.__doc__, **BLOCKS)
    schema = whole.model_json_schema(schema_generator=_Schema, mode="serialization")
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema["required"] = [name for name in schema["required"] if name not in BLOCKS]  # a job may lack the part
    lists = {name: schema.pop(name) for name in ("properties", "$defs")}
    lines = [json.dumps({"$schema": _Schema.schema_dialect, **schema})[:-1]]
    for name, each in lists.items():
        lines += [f', "{name}": {{', ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in each.items()), "}"]
    return "\n".join(lines) + "}\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("{{", "`{{").replace("}}", "}}`").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(reference())
    SCHEMA.write_text(run_schema())
    KEYWORDS.write_text(keywords())

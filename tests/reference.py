"""`python -m tests.reference`: docs/options.md, made of the options themselves. A test compares the two."""

from __future__ import annotations

from pathlib import Path

from prefillcli.command_line import option_help
from prefillcli.options.commands import COMMANDS
from prefillcli.options.option import as_typed, details_of

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
#: The page that explains the options of a panel.
PAGES = {
    "Files": "score.md",
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

Made from the options themselves (`make reference`). A command has an option where its name stands in the last column.
The name of an option is also its key in a recipe, with underscores, and its variable in the environment, in capitals
behind `PREFILL_`. `--set NAME=VALUE` gives the settings that have no flag: measurement has settled them.
"""


def reference() -> str:
    """The page."""
    panels: dict[str, dict[tuple[str, str], list[str]]] = {}
    for command, kind in COMMANDS.items():
        for name in kind.of_level("first", "more", "settled"):
            details = details_of(kind, name)
            negative = f"--{details.negative}" if details.negative else ""
            negative = negative or (
                as_typed(kind, name, False) if kind.model_fields[name].annotation == bool | None else ""
            )
            words = [as_typed(kind, name), negative, details.short]
            shown = ", ".join(f"`{word}`" for word in words if word)
            panels.setdefault(details.panel, {}).setdefault((shown, option_help(kind, name)), []).append(command)
    lines = [HEAD]
    for panel, options in panels.items():
        lines += [f"## {panel}", "", f"Explained in [{PAGES[panel]}]({PAGES[panel]}).", ""]
        lines += ["| option | meaning | commands |", "| --- | --- | --- |"]
        lines += [f"| {shown} | {_cell(help)} | {', '.join(names)} |" for (shown, help), names in options.items()]
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("{{", "`{{").replace("}}", "}}`").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(reference())

"""The documentation against the code it speaks of."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from prefillcli import cli, command_line
from prefillcli.cli import app
from prefillcli.command_line import MOST_OPTIONS, Commands
from prefillcli.models.files import sample_model
from prefillcli.models.weights import FORMATS as QUANTISED
from prefillcli.models.weights import QuantisedFormat
from prefillcli.options.commands import COMMANDS, ContestOptions, ScoreSettings
from prefillcli.plan import SCHEDULES
from prefillcli.prompts.builder import PromptBuilder
from prefillcli.prompts.labels import Labels, parse_labels
from prefillcli.prompts.questions import typed
from prefillcli.prompts.settings import PromptSettings
from prefillcli.report.run import RunReport
from prefillcli.rows.output import FORMATS
from prefillcli.rows.records import ErrorCode
from prefillcli.tools.bench.methods import METHODS
from prefillcli.tools.bench.report import BenchReport, MethodResult, WorkloadResult
from prefillcli.tools.status import Status
from prefillcli.tools.verify import Verified
from tests.reference import BLOCKS, KEYWORDS, PAGE, SCHEMA, keywords, reference, run_schema
from tests.unit.prompts.test_prompts import batch_of

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def options(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))


def options_of(command: str) -> set[str]:
    kind = COMMANDS[command]
    flags = kind.of_level("first", "more")
    no = {"--no-chat", "--allow-special"} if "chat" in flags else set()
    more = {"--recipe", "--set"} if kind.of_level("rare") else {"--recipe"}
    return {"--" + name.replace("_", "-") for name in flags} | more | no


def help_of(command: str, flag: str) -> tuple[str, set[str]]:
    """A help page, and the flags that it lists."""
    wide = {"COLUMNS": "300", "TERMINAL_WIDTH": "300"}
    shown = CliRunner(env=wide).invoke(app, [command, flag]).output
    lists = re.findall(r"^  ((?:-\w, )?--[a-z-]+(?: / --[a-z-]+)?)", shown, re.MULTILINE)
    return shown, set().union(*map(options, lists)) - {"--help", "--help-all"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_help(command: str) -> None:
    kind = COMMANDS[command]
    short, flags = help_of(command, "--help")
    assert "-h" in re.split(r"[\s,]+", short)
    if len(kind.options()) <= MOST_OPTIONS:
        assert flags == options_of(command)
        return
    whole, all_flags = help_of(command, "--help-all")
    assert all_flags == options_of(command)
    assert all(f"\n  {name}=" in whole for name in kind.of_level("rare"))
    first = {"--" + name.replace("_", "-") for name in kind.of_level("first")}
    assert flags == first | {"--no-chat", "--recipe"}
    assert f"\n{len(kind.of_level('more'))} more options" in short


def test_the_index_links_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "README.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_a_first_job_needs_twenty_options() -> None:
    assert len([*ScoreSettings.of_level("first"), "recipe"]) == 20


def test_the_first_options_are_shown_by_the_step_of_a_job() -> None:
    shown, _ = help_of("score", "--help")
    titles = re.findall(r"^(\w[\w ]+):$", shown, re.MULTILINE)
    assert titles[:7] == [
        "Arguments", "What is asked", "Of what", "By which model", "How cheaply", "Where to", "How safely",
    ]  # fmt: skip


def test_the_reference_is_made_of_the_options_and_reports() -> None:
    assert PAGE.read_text() == reference(), "make reference"
    assert SCHEMA.read_text() == run_schema(), "make reference"
    assert KEYWORDS.read_text() == keywords(), "make reference"
    assert not BLOCKS.keys() & RunReport.model_fields.keys()


@pytest.mark.parametrize("command", ["verify", "status"])
def test_commands_that_only_look_have_a_page_with_their_options_and_keys(command: str) -> None:
    shown = CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).invoke(app, [command, "--help"]).output
    assert options(shown) == {"--help", "--quiet"}
    text = (ROOT / "docs" / "verify.md").read_text()
    assert f"## `prefill {command} OUTPUT" in text
    assert "--quiet" in options(text)
    for key in (*Verified.__annotations__, *Status.__annotations__):
        assert f"`{key}`" in text, key
    assert Commands.makers.keys() == {*COMMANDS, "verify", "status"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_page_names_an_option_that_does_not_exist(page: Path) -> None:
    known = set().union(*map(options_of, COMMANDS)) | {"--help", "--help-all", "--version"}
    known |= {"--install-completion", "--show-completion"}
    known |= {"--case", "--dtype", "--model", "--rounds", "--scale", "--size", "--real", "--skip"}  # of benchmarks
    known |= {"--jobs", "--large"}  # of python -m benchmarks.chains and benchmarks.packed
    known |= {"--document", "--documents", "--questions"}  # of python -m benchmarks.details
    known |= {"--characters", "--numbers"}
    known |= {"--tasks", "--batch"}  # of lm_eval
    known |= {"--reworded", "--int"}  # of python -m benchmarks.heads, as --int8
    known |= {"--lengths", "--tokens", "--budget", "--cpu-time"}  # of python -m benchmarks.rationales
    known |= {"--workload", "--contender", "--try", "--no-try"}  # of python -m benchmarks.peers
    known |= {"--texts", "--rows", "--rotated", "--only", "--table", "--cases"}  # of python -m benchmarks.forms
    known |= {"--checkpoint", "--pictures", "--edge", "--peers", "--no-peers"}  # of python -m benchmarks.images
    known |= {"--only", "--seconds"}  # of the GPU kit
    known |= {"--steps", "--rate", "--batch-tokens"}  # of python -m training.train_sample_models
    known |= {"--layers", "--train", "--epochs"}  # of python -m benchmarks.distill_draft and recipes.train_first
    known |= {"--tag", "--rm", "--read-only", "--network", "--build-arg"}  # of podman
    known |= {"--spec", "--out", "--corrections", "--emit-cases", "--state", "--choice"}  # of jev-table and typed-gguf
    # of python -m tests.soak
    known |= {"--long", "--kill-every", "--short-sample", "--long-sample", "--memory-every"}
    assert options(page.read_text()) <= known


def test_every_fallback_is_documented() -> None:
    from prefillcli.reading.compress.selection import FALLBACKS

    text = (ROOT / "docs" / "score.md").read_text()
    for reason, (why, _) in FALLBACKS.items():
        assert f"| `fallback:{reason}` | {why} |" in text


def anchors(page: Path) -> set[str]:
    """What links to the page's headings may end in, as GitHub makes it of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_headings_have_one(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), (target, anchor)


def commands_of(page: Path) -> list[list[str]]:
    """The words of each prefill command of a page, as the shell gives them to the program."""
    lines = []
    for kind, block in re.findall(r"^```(sh|cron)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "cron":
                lines += re.findall(r"prefill [^>]*", line.replace("\\%", "%"))
            elif re.match(r" *prefill |[A-Za-z]+=|for .* do$|done", line):
                lines.append(line)
    program = "prefill() { printf '%s\\0' \"$@\"; printf '\\1\\0'; }"
    said = subprocess.run(["bash", "-c", "\n".join([program, *lines])], capture_output=True, text=True, check=True)
    return [words.split("\0")[:-1] for words in said.stdout.split("\1\0")[:-1]]


class Read(Exception):
    """A command line was read."""


def read_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that a command would run with; None where it only looks at an output."""

    def load(*given: Any) -> None:
        raise Read(command_line.load_options(*given))

    monkeypatch.setattr(cli, "load_options", load)
    for name in ("prepare", "prepare_allocator"):
        monkeypatch.setattr(command_line, name, lambda *_: None)
    try:
        app(words)
    except Read as read:
        return read.args[0]
    except SystemExit:
        assert words[0] in ("verify", "status"), words
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_are_taken_and_their_prompts_are_those_that_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("labels: [Yes, No]")
    Path("nightly.yaml").write_text("review_below: 0.9")
    tokenizer = AutoTokenizer.from_pretrained(sample_model())
    compared = 0
    for words in commands_of(page):
        settings = read_command(words, monkeypatch)
        if "--template" not in words or "{{" not in (given := words[words.index("--template") + 1]):
            continue
        shown = given.encode().decode("unicode_escape")  # what a reader takes \n for
        jinja = jinja2.Environment(keep_trailing_newline=True)  # noqa: S701
        names = sorted(jinja2.meta.find_undeclared_variables(jinja.parse(shown)))
        values = {name: f"a {name} of\ntwo lines" for name in names}
        wanted = tokenizer(jinja.from_string(shown).render(values))["input_ids"]
        made = PromptSettings(
            template=settings.prompts.template, max_length=10_000, vocab_size=len(tokenizer), chat=False
        )
        builder = PromptBuilder(tokenizer, made, names)
        (prompt,), _ = builder.build(
            batch_of(**{name: [value] for name, value in values.items()}),
            Labels(tokenizer, typed(parse_labels("Yes,No"))),
        )
        builder.close()
        assert prompt.tokens.tolist() == wanted, words
        compared += 1
    assert compared == len(re.findall(r"--template '.*\{\{", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_error_code_and_report_key_is_documented() -> None:
    text = (ROOT / "docs" / "score.md").read_text()
    for code in ErrorCode:
        assert f"| `{code}` | {code.meaning} |" in text
    for key in [*RunReport.model_fields, *BLOCKS]:
        assert f"`{key}`" in text, key


def test_the_manual_lists_the_formats_of_an_output() -> None:
    text = (ROOT / "docs" / "score.md").read_text().partition("\n| ending |")[2].partition("\n\n")[0]
    rows = [f"| {', '.join(f'`{ending}`' for ending in each.endings)} | {each.meaning} |" for each in FORMATS]
    assert text.splitlines()[2:] == rows


def test_every_order_is_compared() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    for name in SCHEDULES:
        assert f"| `{name}` |" in text, name


def test_bench_names_its_options_methods_and_keys() -> None:
    text = (ROOT / "docs" / "bench.md").read_text()
    own = ContestOptions.model_fields
    assert {"--" + name.replace("_", "-") for name in own} <= options(text)
    for name in METHODS:
        assert f"| `{name}` |" in text, name
    for kind in (BenchReport, WorkloadResult, MethodResult):
        for key in kind.model_fields:
            assert f"`{key}`" in text, key


def test_every_promise_of_reliability_names_a_test_that_exists() -> None:
    table = (ROOT / "docs" / "reliability.md").read_text().partition("| fault | promise | test |\n")[2]
    rows = re.findall(r"^\| (?!---)(.*) \|$", table.partition("\n\n")[0], re.MULTILINE)
    assert len(rows) > 100
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), (path, name)


def test_the_manual_lists_the_formats_of_quantised_weights() -> None:
    text = (ROOT / "docs" / "quantised.md").read_text().partition("\n| `quant_method` |")[2].partition("\n\n")[0]
    assert text.splitlines()[2:] == [_quantised_row(each) for each in QUANTISED.values()]


def _quantised_row(each: QuantisedFormat) -> str:
    install = f"`prefillcli[{each.extra}]`" if each.extra else ""
    install = ", ".join(filter(None, [install, *(f"`{package}`" for package in each.packages)]))
    cuda: str = each.cuda or "no"
    if each.kernels:
        packages = " and ".join(f"`{name}`" for name in each.kernels)
        cuda += f" from compute capability {'.'.join(map(str, each.capability))} with {packages}, else unpacked"
    elif each.capability > (0, 0):
        cuda += f" from compute capability {'.'.join(map(str, each.capability))}"
    method = each.method.partition("_")[0] if each.extra == "bitsandbytes" else each.method
    cells = [f"`{method}`", each.name, install, each.cpu or "no", cuda, "yes" if each.tested else "no"]
    return f"| {' | '.join(cells)} |"

"""An option of any command has an effect or is refused, and comes from a recipe, the environment or a flag."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import Field, ValidationError
from typer.testing import CliRunner

from prefillcli.asking.question_file import read_questions
from prefillcli.cli import app
from prefillcli.command_line import load_options
from prefillcli.errors import UsageError
from prefillcli.options import asking, followup, groups, judging, reading, requirements
from prefillcli.options.commands import COMMANDS, ScoreSettings
from prefillcli.options.keywords import FileOptions, ScorerOptions
from prefillcli.options.load import load_settings, rare_options, scorer_settings
from prefillcli.options.option import COMPRESSION, RUN, Options, Settings, as_typed, details_of, option
from prefillcli.options.requirements import Requirement
from prefillcli.prompts.labels import parse_labels
from prefillcli.rows import filesystems

Values = dict[str, Any]

ROOMS = [requirements, asking, groups, reading, followup, judging]
NAMES = {id(value): name for room in ROOMS for name, value in vars(room).items() if isinstance(value, Requirement)}
#: Each requirement: what else is told where it is met, and where it is not.
TOLD: dict[str, tuple[Values, Values]] = {
    "ASK": ({"ask": "Is it?"}, {"ask": None, "questions": None}),
    "DRAFT": ({"draft": "d"}, {"draft": None}),
    "COMPRESSED": ({"draft": "d"}, {"draft": None}),
    "VOTES": ({"draft": "d"}, {"draft": None}),
    "SELF_DRAFT": ({"draft": "self"}, {"draft": None}),
    "SPECPREFILL": ({"method": "specprefill"}, {"method": "hf"}),
    "EXIT": ({"exit": "true"}, {"exit": "false"}),
    "HEAD": ({"head": "refund.head"}, {"head": None}),
    "EXIT_METHOD": ({"method": "early-exit"}, {"method": "hf"}),
    "FIRST": ({"first": "words"}, {"first": None}),
    "FIRST_METHOD": ({"method": "first"}, {"method": "hf"}),
    "BOUNDED_FLIPS": ({"draft": "d", "keep": "auto"}, {"keep": "0.5"}),
    "AUDITABLE": ({"exit": "true"}, {"exit": "false"}),
    "RATIONALE": ({"rationale": "9"}, {"rationale": "0"}),
    "CHOSEN_ROWS": ({"evidence": "true"}, {"evidence": "false"}),
    "CONDITION": ({"evidence": "true", "rationale_when": "score > 0.5"}, {"evidence": "true", "rationale_when": None}),
    "DRAWN_RATIONALES": ({"rationale": "9", "rationale_temperature": "1"}, {"rationale_temperature": "0"}),
    "SPECULATION": ({"rationale": "9"}, {"speculation": "off"}),
    "RETRIEVAL": ({"rationale": "9", "speculation": "retrieval"}, {"speculation": "lookup"}),
    "SHOWN_TEXT": ({"evidence": "true"}, {"evidence": "false"}),
    "ASKED_TYPED": ({"questions": "q.yaml"}, {"questions": None}),
    "TARGET": ({"target_column": "t"}, {"target_column": None}),
    "TRUTH": ({"truth": "answer"}, {"truth": None}),
    "RANDOM": ({"inputs": ["x.parquet"], "sample": "9"}, {"sample": None}),
    "ADAPTERS": ({"adapter": "a"}, {"adapter": None}),
    "HUB_MODEL": ({"model": "someone/some-model"}, {"model": "."}),
    "FORECAST": ({"dry_run": "true"}, {"dry_run": "false"}),
    "STREAMABLE": ({"weights": "stream"}, {"weights": "resident"}),
    "SCORES": ({"dry_run": "false"}, {"dry_run": "true"}),
    "PROGRESS": ({"quiet": "false"}, {"quiet": "true"}),
    "NO_TEMPLATE": ({}, {"template": "{{ text }}"}),
    "CONTENT": ({"template": "{{ text }}"}, {"template": None}),
    "CALIBRATE_WITH": ({"template": "{{ text }}", "calibrate_with": "N/A"}, {"calibrate_with": None}),
    "TRUTH_FROM": ({"truth_from": "t.parquet"}, {"truth_from": None}),
    "ACCURACY": ({"accuracy": "0.9"}, {"accuracy": None}),
    "FITS": ({}, {"accuracy": "0.9"}),
    "CHOSEN_METHOD": ({}, {"prior": "rows"}),
    "FOLDED": ({}, {"prior": "rows", "truth": None}),
    "REVIEW_BELOW": ({"review_below": "0.9"}, {"review_below": None}),
    "INPUT": ({"inputs": ["x.parquet"]}, {"inputs": None}),
    "ALL_ROWS": ({}, {"shard": "1/2"}),
    "DRIFT": ({"max_drift": "0.1"}, {"max_drift": None}),
    "RAY": ({"runner": "ray"}, {"runner": "local"}),
}
LEAST: dict[str, Values] = {
    "score": {"inputs": ["x.parquet"]},
    "inspect": {"inputs": ["x.parquet"], "row": "0"},
    "bench": {"model": "."},
    "profile": {},
    "merge": {"output": "o.parquet"},
    "calibrate": {"scores": "s.parquet", "truth": "answer"},
    "doctor": {},
    "fit": {"inputs": ["x.parquet"], "truth": "answer"},
}
#: Of these each option takes the first that it can.
VALUES = (0.5, 5, 100, "5MiB", "text", True, "num_cpus=1", ";")
CASES = [
    (command, option, NAMES[id(required)])
    for command, kind in COMMANDS.items()
    for option, all_required in kind.required().items()
    for required in all_required
    if required is not requirements.ALL_ROWS or "shard" in kind.options()
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def load(command: str, told: Values, flags: Values, recipe: Values | None = None) -> Settings:
    """`flags` beside what else is `told`: by the environment, which is never refused, and INPUT."""
    told = {name: value for name, value in told.items() if value is not None}
    environment = {f"PREFILL_{name.upper()}": value for name, value in told.items() if name != "inputs"}
    if recipe is not None:
        Path("job.yaml").write_text(json.dumps(recipe))
    given = {name: value for name, value in told.items() if name == "inputs"} | flags
    path = None if recipe is None else "job.yaml"
    return load_settings(COMMANDS[command], given, recipe=path, environment=environment)


def value_of(command: str, option: str) -> Any:
    """A value that asks for something."""
    kind = COMMANDS[command]
    field = kind.options()[option]
    if field.annotation is bool:
        return not field.default
    kinds = get_args(field.annotation)  # values, or kinds that may be None
    for value in (*VALUES, *kinds, *(each for own in kinds for each in get_args(own))):
        try:
            kind.model_validate({**LEAST[command], option: value})
        except ValidationError:
            continue
        return value
    raise AssertionError(f"--{option}: no value of {VALUES} is one")


def told(command: str, option: str, unmet: str | None = None) -> Values:
    """What gives the option an effect, but for what is `unmet`."""
    values = LEAST[command] | ({"draft": "d"} if option == "keep" else {})
    for required in COMMANDS[command].required()[option]:
        values |= TOLD[NAMES[id(required)]][0]
    return values if unmet is None else values | TOLD[unmet][1]


def test_all_requirements_are_walked() -> None:
    assert {name for _, _, name in CASES} == TOLD.keys() == set(NAMES.values())
    for command, kind in COMMANDS.items():
        for name in kind.options():
            if details_of(kind, name).panel == COMPRESSION and name not in ("keep", "draft"):
                assert name in kind.required(), f"{command} --{name}: what does it require?"


@pytest.mark.parametrize(("command", "option", "unmet"), CASES)
def test_an_option_that_would_be_ignored_is_refused(command: str, option: str, unmet: str) -> None:
    value = value_of(command, option)
    flag = as_typed(COMMANDS[command], option, value)
    (required,) = [each for each in COMMANDS[command].required()[option] if NAMES[id(each)] == unmet]
    assert option in load(command, told(command, option), {option: value}).given
    lacking = told(command, option, unmet)
    with pytest.raises(UsageError) as caught:
        load(command, lacking, {option: value})
    assert f"{flag} {required.reason}" in str(caught.value)
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 3

    # One environment serves all commands and runs: there the option is left out.
    assert option not in load(command, lacking | {option: str(value)}, {}).given
    # A recipe is for a job. What a run may do without stays there, anything else is refused too.
    if required.recipe_may_keep:
        assert option not in load(command, lacking, {}, recipe={option: value}).given
    else:
        alone = {name: text for name, text in lacking.items() if text is not None}
        with pytest.raises(UsageError, match=f"job.yaml: {option} {required.reason.split(',')[0]}"):
            load(command, LEAST[command], {}, recipe={**alone, option: value})


def test_a_flag_may_take_the_effect_from_an_option_of_the_recipe() -> None:
    recipe = {"draft": "d", "keep": "auto", "max_flips": 0.02, "audit": 20, "truth": "answer", "model": "a/model"}
    recipe |= {"revision": "v1", "prompt_column": "text", "query_window": 8}
    flags = {"keep": 0.3, "audit": 0, "model": ".", "template": "{{ text }}"}
    settings = load("score", LEAST["score"], flags, recipe)
    assert settings.given >= {"draft", "keep", "query_window"}
    assert not settings.given & {"max_flips", "revision", "prompt_column"}
    with pytest.raises(UsageError, match="--max-flips"):
        load("score", LEAST["score"], {**flags, "max_flips": 0.1}, recipe)


def test_options_that_are_off_need_nothing() -> None:
    off = {"query_window": 0, "audit": 0, "compress_per_row": False, "quiet": True}
    assert load("score", LEAST["score"], off).given >= off.keys()


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("PREFILL_LABLES", "did you mean 'PREFILL_LABELS'?"),
        ("PREFILL_PRICE_PER_HOURS", "did you mean 'PREFILL_PRICE_PER_HOUR'?"),
        ("PREFILL_XYZZY", "no option has this name"),
        ("PREFILL_INPUT", "command line or a recipe"),
        ("PREFILL_INPUTS", "command line or a recipe"),
    ],
)
def test_an_unknown_name_in_the_environment_is_refused(variable: str, said: str) -> None:
    done = CliRunner().invoke(app, ["score", "x.parquet"], env={variable: "1"})
    assert done.exit_code == 2
    assert variable in done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) <= 3


def load_with(environment: Mapping[str, str], command: str = "score") -> Settings:
    least = dict(LEAST[command])
    return load_settings(COMMANDS[command], least, environment=environment)


def test_one_environment_and_one_recipe_serve_all_commands() -> None:
    Path("job.yaml").write_text("row: 3\nrounds: 2\nfit_seconds: 9\nmax_error_rate: 0.1\nhtml: p.html\n")
    environment = {"PREFILL_ROW": "3", "PREFILL_ROUNDS": "2", "PREFILL_MAX_ERROR_RATE": "0.1"}
    for command in COMMANDS:
        load_with(environment, command)
        load_settings(COMMANDS[command], LEAST[command], recipe="job.yaml", environment={})


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"{{ a }}\nAnswer:\n", "{{ a }}\nAnswer:\n"),
        (r"{{ a }}\tyes\\no C:\data", "{{ a }}\tyes\\no C:\\data"),
        (r"{{ a }}\\\n", "{{ a }}\\\n"),
        (r"{{ a.replace('\\n', '\n') }}\n", "{{ a.replace('\\\\n', '\\n') }}\n"),
        (r"{% if '\t' in a %}\t{% endif %}", "{% if '\\t' in a %}\t{% endif %}"),
        ("{{ a }}\nAnswer:", "{{ a }}\nAnswer:"),
    ],
)  # fmt: skip
def test_backslash_n_is_a_line_break_where_a_shell_gives_it_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, typed: str, meant: str
) -> None:
    monkeypatch.setenv("PREFILL_SYSTEM", typed)
    recipe = tmp_path / "job.yaml"
    recipe.write_text(json.dumps({"label_end": typed}))
    flags = {"inputs": ["x.parquet"], "template": typed, "calibrate_with": [typed], "id_column": typed}
    found = load_options(ScoreSettings, str(recipe), flags)
    assert [found.value(name) for name in ("template", "system", "calibrate_with")] == [meant, meant, (meant,)]
    assert (found.value("label_end"), found.value("id_column")) == (typed, typed)
    assert scorer_settings(None, {"template": typed}, owner="Scorer").value("template") == typed


def test_the_environment_may_name_the_recipe_and_a_flag_another_one() -> None:
    Path("a.yaml").write_text("labels: [A, B]\n")
    Path("b.yaml").write_text("labels: [C, D]\n")
    environment = {"PREFILL_RECIPE": "a.yaml"}
    assert load_with(environment).answers.labels == ("A", "B")
    settings = load_settings(ScoreSettings, LEAST["score"], recipe="b.yaml", environment=environment)
    assert settings.answers.labels[0] == "C"


def test_a_file_at_a_host_that_does_not_answer_is_told_of_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        recipe = f"http://127.0.0.1:{silent.getsockname()[1]}/job.yaml"
        with pytest.raises(UsageError, match=f"^--recipe {recipe}: cannot read .*: no answer within 1 seconds\n"):
            load_settings(ScoreSettings, {"inputs": ["x.parquet"]}, recipe=recipe)


def test_variables_of_others_are_let_be() -> None:
    service = ["PREFILL_MODEL_SERVICE_HOST", "PREFILL_SERVICE_PORT", "PREFILL_SERVICE_PORT_HTTP", "PREFILL_PORT"]
    ports = [f"PREFILL_PORT_80_TCP{end}" for end in ("", "_PROTO", "_PORT", "_ADDR")]
    names = [*service, *ports, "PREFILLED", "MY_PREFILL_LABLES", "PREFILL"]
    assert load_with(dict.fromkeys(names, "10.0.0.1") | {"PREFILL_LABLES": ""}) == load_with({})


NO_PATHS = {
    "ADDRESS", "CHAR|tab|none|auto", "COLUMN", "DEVICE", "DISTANCE", "EXPR", "FACTOR", "I/N", "ID", "KEY=VALUE",
    "LABELS", "MASS", "N", "N|auto", "NAME", "NAMES", "NAME=NUMBER", "NUMBERS", "PRICE", "RANGE", "RATE", "RATE|auto",
    "[NAME=]COLUMN", "SECONDS", "SHARE", "SIZE", "T", "TEXT", "TEXT|eos", "int8|fp8", "openai|systemone", "rows",
    "torch|hf|vllm",
}  # fmt: skip
"""Metavars of options that name no file or folder."""


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_that_names_a_path_says_what_is_done_with_it(command: str) -> None:
    """So it is in the table of `scoring/path_table.py`. An option with a metavar of its own is sorted here."""
    for name, field in COMMANDS[command].options().items():
        details = details_of(COMMANDS[command], name)
        words = field.annotation is bool or get_origin(field.annotation) is Literal
        names_path = details.metavar not in NO_PATHS and bool(details.metavar or not details.panel) and not words
        if name == "rationale_template":
            names_path = False  # Jinja text itself
        assert names_path == (details.path is not None), name
        if details.same_as:
            assert details_of(COMMANDS[command], details.same_as).path, name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_with_a_null_character_is_refused(command: str) -> None:
    kind = COMMANDS[command]
    for name, field in kind.options().items():
        if details_of(kind, name).path is None:
            continue
        for value in ("a\0b", ["a\0b"], "./a\0b"):  # lists, and paths beside words
            with suppress(ValidationError):
                kind.model_validate({**LEAST.get(command, {}), name: value})
                with pytest.raises(UsageError, match=r"a\\x00b': it holds a null character"):
                    load_settings(kind, {**LEAST.get(command, {}), name: value}, environment={})
                break
        else:
            pytest.fail(f"{name} takes no text: {field.annotation}")


def test_an_option_must_say_what_it_changes() -> None:
    with pytest.raises(TypeError, match="changes"):
        option(None, "Help.", RUN)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Silent.inputs: make it with `option`, which states what it changes"):

        class Silent(Options):
            inputs: tuple[str, ...] = Field(())


def test_from_python_every_option_that_changes_a_score_is_taken() -> None:
    taken = {"model", *ScorerOptions.__annotations__, *FileOptions.__annotations__}
    assert taken <= set(ScoreSettings.options())
    of_jobs = {
        "adapt",
        "compute",
        "exit",
        "first",
        "exit_rows",
        "exit_profile",
        "max_flips",
        "flips_of",
        "precision",
        "recall",
        "rationale_limit",
        "inputs",
        "questions",
    }
    assert set(ScoreSettings.changing("scores", "rows")) - taken <= of_jobs


@pytest.mark.parametrize(
    "text",
    [
        "seed: !!timestamp 2026-13-45",
        "seed: !!timestamp 2026-01-01",
        "limit: !!int x",
        "temperature: !!float ''",
        "engine_options: {a: !!binary /w==}",
        "engine_options: {a: !!set {b}}",
        "labels: &a [*a]",
        "labels: " + "[" * 500,
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n" for a, b in pairwise("abcdefghi"))
        + "labels: *i",
    ],
)
def test_a_recipe_of_values_that_are_none_is_refused(text: str) -> None:
    Path("job.yaml").write_text(text)
    with pytest.raises(UsageError, match=r"job\.yaml: the recipe is not valid YAML: ") as refused:
        load_settings(ScoreSettings, LEAST["score"], recipe="job.yaml", environment={})
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limit: 3\nlabels: [A, B]\nlimit: 5", "line 3: the key 'limit' is there twice"),
        ("'limit': 3\n\"limit\": 3", "line 2: the key 'limit' is there twice"),
        ("{limit: 3, limit: 3}", "line 1: the key 'limit' is there twice"),
        ("engine_options:\n  a: 1\n  b: {c: 1, c: 2}", "line 3: the key 'c' is there twice"),
        ("limit: 010", "line 1: 010: leave out the first 0, or put it in quotes"),
        ("labels: [01, 02]", "line 1: 01: leave out"),
        ("seed: -007", "line 1: -007: leave out"),
        ("limit: 1:10", "should be a valid integer"),
        ("calibrate_with: [N/A, 1.10]", "must be text: put it in quotes"),
    ],
)
def test_a_recipe_that_could_be_read_in_two_ways_is_refused(text: str, said: str) -> None:
    Path("job.yaml").write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)) as refused:
        load_settings(ScoreSettings, LEAST["score"], recipe="job.yaml", environment={})
    assert str(refused.value).startswith("job.yaml: ")
    assert len(str(refused.value).splitlines()) == 1


def test_values_are_those_of_yaml_1_2() -> None:
    """https://yaml.org/spec/1.2.2/#103-core-schema, in a recipe, in a flag and in the environment alike."""
    wanted = {
        **{"0": 0, "10": 10, "-3": -3, "+12": 12, "0o14": 12, "0x1F": 31},
        **{"1e3": 1000.0, "-.5": -0.5, "5.": 5.0, "12e-1": 1.2, ".inf": math.inf, "-.INF": -math.inf},
        **{"true": True, "FALSE": False, "null": None, "~": None, "": None},
        **{each: each for each in ("Yes", "no", "on", "Off", "y", "n", "1:10", "1_000", "0b11", "2026-01-31", "=")},
        **{each: each for each in ("1.2.3", "e3", "0o8", "0xG", "nan", "tRUE", ".", "1 2")},
        **{"'010'": "010", '"true"': "true", "!!str 010": "010"},
    }
    Path("job.yaml").write_text(
        "engine_options:\n" + "".join(f"  k{number}: {text}\n" for number, text in enumerate(wanted))
    )
    flow = "{" + ", ".join(f"k{number}: {text}" for number, text in enumerate(wanted)) + "}"
    for flags, recipe, environment in [
        ({}, "job.yaml", {}),
        ({"engine_options": [f"k{number}={text}" for number, text in enumerate(wanted)]}, None, {}),
        ({}, None, {"PREFILL_ENGINE_OPTIONS": flow}),
    ]:
        given = LEAST["score"] | {"engine": "vllm"} | flags
        settings = load_settings(ScoreSettings, given, recipe=recipe, environment=environment)
        found = list(settings.engine.engine_options.values())
        assert [(type(value), value) for value in found] == [(type(value), value) for value in wanted.values()]


def test_an_option_of_the_engine_is_given_once() -> None:
    with pytest.raises(UsageError, match="has a key twice"):
        load_settings(ScoreSettings, LEAST["score"] | {"engine_options": ["a=1", "b=2", "a=3"]}, environment={})


def test_a_recipe_may_merge_mappings() -> None:
    Path("job.yaml").write_text(
        "engine: vllm\nworker_resources: &own {num_cpus: 2, memory: 8}\nengine_options: {<<: *own, memory: 9}"
    )
    settings = load_settings(ScoreSettings, LEAST["score"] | {"runner": "ray"}, recipe="job.yaml", environment={})
    assert settings.engine.engine_options == {"num_cpus": 2, "memory": 9}


def test_a_recipe_may_use_aliases() -> None:
    Path("job.yaml").write_text("labels: &own [Yes, No]\nkeep_columns: *own")
    settings = load_settings(ScoreSettings, LEAST["score"], recipe="job.yaml", environment={})
    assert settings.answers.labels == settings.files.keep_columns == ("Yes", "No")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"memory": "9" * 400}, "must be less than 8EiB"),
        ({"memory": "9000000TiB"}, "must be less than 8EiB"),
        ({"engine_options": ["a=" + "[" * 500]}, "not valid YAML"),
        ({"temperature": "x" * 10_000}, "valid number"),
        ({"speculation": "x" * 10_000}, "should be"),
    ],
)
def test_a_value_that_is_refused_is_quoted_in_short(flags: Values, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        load_settings(ScoreSettings, {**LEAST["score"], **flags}, environment={})
    assert len(str(refused.value)) < 800


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pool", "13"], "--pool: this option has no flag, give --set pool=VALUE"),
        (["--keep-last=4"], "--keep-last=4: this option has no flag, give --set keep_last=VALUE"),
        (["--set", "pol=13"], "--set pol: no rare option has this name; did you mean 'pool'?"),
        (["--set", "keep=0.2"], "--set keep: this option has a flag\ngive --keep"),
        (["--set", "pool"], "--set pool: must be KEY=VALUE"),
        (["--set", "pool=3", "--set", "pool=5"], "has a key twice"),
        (["--set", "pool=many"], "--set pool 'many': "),
        (["--set", "pool=3"], "--set pool needs a draft that picks tokens"),
    ],
)
def test_a_rare_option_is_given_by_set(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(SystemExit) as ended:
        app(["score", str(tmp_path / "in.jsonl"), *words])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "word", "said"),
    [
        ("bench", "--rationale-when=x", "--rationale-when: an option of prefill score, not of prefill bench"),
        ("profile", "--row", "--row: an option of prefill inspect, not of prefill profile"),
        ("score", "--html", "--html: an option of prefill inspect, not of prefill score"),
    ],
)
def test_an_option_of_other_commands_names_them(
    command: str, word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app([command, "in.jsonl", word])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_settings_may_have_dashes_and_reach_the_job() -> None:
    given = rare_options(ScoreSettings, ["select-chunk=8", "query_reduce=mean"])
    settings = load("score", {"inputs": ["x.parquet"]}, {"draft": "d", "keep": 0.5, **given})
    assert (settings.compression.select_chunk, settings.compression.query_reduce) == (8, "mean")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (r"a\,b", ("a,b",)),
        (r" a\,b , c, d\\", ("a,b", "c", "d\\")),
        ("a\\b\\", ("a\\b\\",)),
    ],
)
def test_a_comma_in_a_name_is_escaped_in_a_text_and_not_in_a_list(text: str, names: tuple[str, ...]) -> None:
    Path("job.json").write_text(json.dumps({"keep_columns": [*names, " e"]}))
    in_list = load_settings(ScoreSettings, {"inputs": ["i"]}, recipe="job.json", environment={})
    of_flag = load_settings(ScoreSettings, {"inputs": ["i"], "keep_columns": text}, environment={})
    of_environment = load_settings(ScoreSettings, {"inputs": ["i"]}, environment={"PREFILL_KEEP_COLUMNS": text})
    assert in_list.files.keep_columns == (*names, " e")
    assert of_flag.files.keep_columns == of_environment.files.keep_columns == names


LISTS = [
    ("score", "labels", {}),
    ("score", "options", {"ask": "Which?"}),
    ("score", "levels", {"ask": "Which?"}),
    ("score", "keep_columns", {}),
    ("score", "calibrate_columns", {"template": "{{ a }}", "calibrate_with": "N/A"}),
    ("score", "served_model_name", {}),
    ("bench", "method", {}),
    ("profile", "mode", {}),
    ("bench", "keep", {"draft": "d"}),
    ("score", "label_values", {}),
    ("score", "truth", {"questions": "q.yaml"}),
]
"""Options that take a list of names or numbers, with what they need beside them."""


def test_every_list_of_names_is_read_as_a_line_of_csv() -> None:
    """What Python's csv module writes is read back, by each option."""
    names = ["billing", "a,b", 'say "no"', "two  spaces", "back\\slash", "c"]
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(names)
    for command, name, beside in LISTS[:6]:
        text = line.getvalue().replace("\\", "\\\\")  # a backslash may take a comma literally, so it is doubled
        settings: Any = load_settings(COMMANDS[command], LEAST[command] | beside | {name: text}, environment={})
        found = settings.value(name)
        assert ([label.name for label in parse_labels(found)] if name == "labels" else list(found)) == names
        told = COMMANDS[command].options()[name].description
        assert name == "levels" or "Quote a name that has a comma" in str(told), name


@pytest.mark.parametrize(("command", "name", "beside"), LISTS)
@pytest.mark.parametrize("text", ["a,,b", ",b", "a,", "a, ,b", 'a,""', ","])
def test_an_empty_item_of_a_list_is_refused_alike(command: str, name: str, beside: Values, text: str) -> None:
    def read() -> None:
        settings: Any = load_settings(COMMANDS[command], LEAST[command] | beside | {name: text}, environment={})
        parse_labels(settings.answers.labels)  # when they are asked for

    with pytest.raises(UsageError, match=r"item \d is empty: separate items by single commas") as caught:
        read()
    assert str(caught.value).startswith(as_typed(COMMANDS[command], name))


@pytest.mark.parametrize("value", [["a", ""], ["a", None], ["a", 1.5], ["a", True], ["a", " "]])
@pytest.mark.parametrize("name", ["options", "levels", "keep_columns", "labels"])
def test_an_item_of_a_list_in_a_recipe_is_a_text(name: str, value: list[Any]) -> None:
    Path("job.json").write_text(
        json.dumps({name: value, **({"ask": "Is it?"} if name in ("options", "levels") else {})})
    )
    with pytest.raises(UsageError) as caught:
        load_settings(ScoreSettings, LEAST["score"], recipe="job.json", environment={})
    said = "item 2 is empty" if isinstance(value[1], str) else f"{json.dumps(value[1])} must be text: put it in quotes"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("on_long", "eror", "--on-long 'eror': should be .*; did you mean 'error'\\?"),
        ("dtype", "bfloat", "did you mean 'bfloat16'\\?"),
        ("thinking", "maybe", "should be 'auto', 'off' or 'on'$"),
    ],
)
def test_the_nearest_word_is_suggested_where_there_is_one(name: str, value: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_settings(ScoreSettings, LEAST["score"] | {name: value}, environment={})


@pytest.mark.parametrize("other", [{"labels": "a,b"}, {"choices_column": "c"}, {"label_values": "1,2"}])
def test_a_question_beside_labels_is_refused_without_a_word_of_files(other: Values) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(ScoreSettings, LEAST["score"] | {"ask": "Is it?"} | other, environment={})
    assert str(caught.value).startswith("--ask cannot be combined with --")
    assert "file" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        {"questions": {"late": {"type": "predicate", "instructions": "Is it?"}}},
        {"questions": [{"name": "late", "type": "predicate", "instructions": "Is it?"}]},
        {"document": "{{ a }}", "questions": {}},
    ],
)
def test_a_file_of_questions_is_no_recipe_and_the_reverse(content: Values) -> None:
    Path("q.yaml").write_text(json.dumps(content))
    with pytest.raises(UsageError, match=r"^q.yaml: it is a file of questions, .*\ngive it with --questions q.yaml$"):
        load_settings(ScoreSettings, LEAST["score"], recipe="q.yaml", environment={})
    Path("job.yaml").write_text(json.dumps({"input": "x.parquet", "labels": ["a", "b"]}))
    with pytest.raises(UsageError, match=r"^--questions job.yaml: it is a recipe, .*\ngive it with --recipe$"):
        read_questions("job.yaml")

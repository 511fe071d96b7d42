"""The house: which package may import which."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from typing import Any, get_args, get_type_hints

import pytest
import typer

from prefillcli import cli
from prefillcli.command_line import is_long
from prefillcli.core.inputs import Inputs, OpenRows
from prefillcli.core.run import Run
from prefillcli.core.scorer import LoadedModels, ModelScorer
from prefillcli.options.commands import COMMANDS, ScoreSettings
from prefillcli.options.option import Change, details_of
from prefillcli.scoring import identity
from prefillcli.scoring.compose import Parts
from prefillcli.scoring.score import ScoreJob
from tests.house import FILES, MODULES, PACKAGE, ROLES, ROOT, circles, dotted, implementers, imported, tree


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """No later test carries the syntax of all files with it."""
    yield
    tree.cache_clear()


def test_no_circle_has_more_than_four_files() -> None:
    assert max(map(len, circles())) <= 4, circles()


def test_no_module_imports_itself() -> None:
    assert [module for module, path in MODULES.items() if module in imported(path)] == []


def test_every_method_of_a_role_has_several_implementers() -> None:
    import prefillcli.scoring.compose  # noqa: F401 - which imports all parts

    tables = {role.__name__: implementers(role) for role in ROLES}
    assert sum(map(len, tables.values())) <= 30
    for role, methods in tables.items():
        for name, kinds in methods.items():
            assert len(kinds) >= 2, (role, name, kinds)


def test_every_class_has_a_name_of_its_own() -> None:
    homes = defaultdict(list)
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path.relative_to(PACKAGE).as_posix())
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_few_modules_lie_at_the_root() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 7  # with those that others import by name: ray, lm_eval


@pytest.mark.parametrize("package", ["rows", "prompts", "images", "plan", "options", "report"])
def test_what_needs_no_model_knows_no_torch(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        heavy = {name for name in imported(path) if name.split(".")[0] == "torch"}
        assert not heavy, path


def test_the_walk_opens_no_file() -> None:
    for path in (PACKAGE / "walk").rglob("*.py"):
        assert not {"io", "os", "pathlib"} & set(imported(path)), path
        calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        assert "open" not in {call.id for call in calls if isinstance(call, ast.Name)}, path


def test_only_runtime_reads_what_the_kernel_says() -> None:
    for path in FILES:
        texts = [node.value for node in ast.walk(tree(path)) if isinstance(node, ast.Constant)]
        files = [text for text in texts if isinstance(text, str) and text.startswith(("/proc", "/sys/"))]
        assert not files or path.parent.name == "runtime", path


TOUCHES_FILES = {"os", "shutil", "fcntl", "io", "tempfile", "pathlib"}
ONLY_NAMES = {"os.path.join", "os.path.normpath", "os.path.dirname", "os.path.basename", "os.path.abspath"}


@pytest.mark.parametrize("package", ["rows/output", "report"])
def test_files_of_a_run_are_touched_by_one_module(package: str) -> None:
    """`runtime/file_calls.py`, each of whose calls the tests let fail; what takes names apart may be elsewhere."""
    allowed = ONLY_NAMES | {"os.getpid", "os.close", "tempfile.gettempdir", "io.BytesIO", "io.StringIO", "io.SEEK_END"}
    allowed |= {"os.path", "os.path.expanduser", "os.path.islink", "os.path.realpath", "os.path.ismount"}
    allowed |= {"os.path.getsize", "tempfile.TemporaryFile"}  # of files that only this process knows
    for path in (PACKAGE / package).rglob("*.py"):
        used = {dotted(node) for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
        used = {name for name in used if name.partition(".")[0] in TOUCHES_FILES}
        assert used <= allowed, path
        calls = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        assert "open" not in map(dotted, calls), path


OPTIONS_READ = {
    "prefillcli.errors",
    "prefillcli.prompts.labels",
    "prefillcli.prompts.lists",
    "prefillcli.prompts.questions",
    "prefillcli.rows.filesystems",
    "prefillcli.rows.output",
    "prefillcli.options.engines",
    "prefillcli.plan",
    "prefillcli.runtime.extras",
    "prefillcli.runtime.memory",
}


def test_options_know_registries_only() -> None:
    for path in (PACKAGE / "options").rglob("*.py"):
        others = {name for name in imported(path) if name.startswith("prefillcli.")}
        assert {name for name in others if not name.startswith("prefillcli.options")} <= OPTIONS_READ, path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_changes(command: str) -> None:
    for name in COMMANDS[command].options():
        assert details_of(COMMANDS[command], name).changes in get_args(Change), name


def test_the_digests_name_only_options_that_make_the_job() -> None:
    named = [*(name for names in identity.STANDS_FOR.values() for name in names)]
    assert len(named) == len(set(named))
    assert set(named) <= set(ScoreSettings.changing("scores", "columns", "rows"))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_command_line_has_the_options_of_its_settings(command: str) -> None:
    kind = COMMANDS[command]
    lines: Any = typer.main.get_command(cli.app)
    has_flag = {*kind.options(), "recipe"} - {*kind.of_level("rare")}
    has_flag |= {"set"} if kind.of_level("rare") else set()
    has_flag |= {"help_all"} if is_long(kind) else set()
    assert {each.name for each in lines.commands[command].params} == has_flag
    run = getattr(cli, f"{command}_", None) or getattr(cli, command)
    assert get_type_hints(run)["settings"] is kind


def test_no_packages_import_each_other_in_a_circle() -> None:
    needs = defaultdict(set)
    for module, path in MODULES.items():
        for name in imported(path):
            if name.startswith("prefillcli."):
                needs[_package(module)].add(_package(name))
    TopologicalSorter({package: wanted - {package} for package, wanted in needs.items()}).prepare()


def _package(module: str) -> str:
    return ".".join(module.split(".")[:2])


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_one_row_passes_few_files_and_none_twice() -> None:
    way = ARCHITECTURE.partition("## One row's way")[2].partition("\n## ")[0]
    files = re.findall(r"^\d+\. `([\w/.]+)`", way, re.MULTILINE)
    assert 8 < len(files) <= 12
    assert len(set(files)) == len(files)
    assert all((PACKAGE / file).is_file() for file in files)


def test_the_page_fits_on_two_screens_and_lists_the_roles() -> None:
    assert ARCHITECTURE.count("\n") <= 120
    table = ARCHITECTURE.partition("| role |")[2].partition("\n\n")[0]
    rows = {line.split("|")[1].strip(" `"): line for line in table.splitlines()[2:]}
    assert list(rows) == [role.__name__ for role in ROLES]
    for role in ROLES:
        assert set(re.findall(r"`(\w+)`", rows[role.__name__].split("|")[3])) == set(implementers(role))


def test_the_composition_of_a_job_fits_on_a_few_screens() -> None:
    assert (PACKAGE / "scoring" / "compose.py").read_text().count("\n") <= 240


def test_the_packages_are_listed_in_an_order_that_they_import_in() -> None:
    table = ARCHITECTURE.partition("| package |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    place = {package: at for at, row in enumerate(rows) for package in row}
    assert place.keys() == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    for module, path in MODULES.items():
        parts = module.split(".")
        for other in imported(path):
            if len(parts) > 2 and other.startswith("prefillcli.") and other.split(".")[1] in place:
                assert place[other.split(".")[1]] <= place[parts[1]], (module, other)


def test_what_can_be_added_has_a_room() -> None:
    table = (ROOT / "docs" / "extending.md").read_text()
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| a")]
    assert len(rows) >= 10
    for what, where, _ in rows:
        named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", where)
        assert named, what
        assert all((PACKAGE / name).exists() or (ROOT / name).exists() for name in named), where


def test_only_the_command_line_and_what_tells_of_options_asks_for_one_by_its_name() -> None:
    """A part of a job takes its group of settings, whose types mypy checks."""
    for module, path in MODULES.items():
        if module.startswith(("prefillcli.options", "prefillcli.command_line")):
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.arg) and node.arg == "settings" and node.annotation is not None:
                assert ast.unparse(node.annotation) != "Any", (module, node.lineno)
            if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr"):
                assert not ast.unparse(node.args[0]).endswith("settings"), (module, node.lineno)


# What a library of others, or this system, may have or not have.
PROBED = {
    "prefillcli.errors": {"model_copy"},
    "prefillcli.library.session": {"name", "__arrow_c_stream__", "__arrow_c_array__"},
    "prefillcli.models.files": {"embedding_size"},
    "prefillcli.models.image_processing": {"get_rope_index", "smart_resize"},
    "prefillcli.models.law": {"__dict__"},
    "prefillcli.models.placement": {"compressor"},
    "prefillcli.models.shape": {"sliding_window"},
    "prefillcli.prompts.nursery": {"pidfd_open"},
    "prefillcli.rows.output.tallies": {"_make"},
    "prefillcli.runtime.cores": {"sched_getaffinity", "sched_setaffinity"},
    "prefillcli.scoring.runners.worker": {"is_initialized"},
    "prefillcli.walk.cuda_kernels": {"AuxRequest"},
    "prefillcli.walk.narrow": {"prefill_int8_product"},
    "prefillcli.walk.recurrent": {"goes_through"},
}


def test_no_object_of_ours_is_asked_what_it_has_by_now() -> None:
    """A phase returns a value that is whole; what a run has not reached yet is None, in `core/run.py`'s `Reached`."""
    for module, path in MODULES.items():
        calls = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
        asked = [node.args for node in calls if dotted(node.func) == "hasattr"]
        asked += [node.args for node in calls if dotted(node.func) == "getattr" and _of_ours(node)]
        assert {_name(args[1]) for args in asked} <= PROBED.get(module, set()), module


def _of_ours(call: ast.Call) -> bool:
    # Whether an attribute that may be missing is asked of one of these.
    words = ast.unparse(call.args[0]).replace("_", ".").split(".")
    return len(call.args) > 2 and words[-1] in ("self", "run", "job", "inputs", "scorer", "pool", "sink", "reached")


def _name(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


@pytest.mark.parametrize("kind", [OpenRows, Inputs, Run, LoadedModels, ModelScorer, Parts, ScoreJob])
def test_what_a_phase_returns_is_whole(kind: Any) -> None:
    assert kind.__dataclass_params__.frozen

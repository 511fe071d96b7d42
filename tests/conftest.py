"""For all tests."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from inspect import isfunction
from typing import Any

import pytest

from prefillcli.runtime.extras import quiet_imports
from prefillcli.runtime.memory import total_memory
from prefillcli.runtime.user_cache import cache_folder

try:
    import hypothesis
except ImportError:  # vLLM's environment has none, nor tests that need it
    hypothesis = None

# One thread for each test and the processes that it starts, whatever the machine has: the models are tiny, so a second
# costs them more than it gives, and scores on as many threads are the same bit for bit. torch reads it when it is
# imported, which comes after this.
os.environ["OMP_NUM_THREADS"] = "1"

# Python keeps the bytecode of all that is imported, as it does under make, whatever the machine says: a process that
# compiles torch and transformers itself takes three times as long to start, and hundreds of tests start one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Folders of tests are in memory where there is room: `fsync` waits there for no disk, and removing them takes no time.
_IN_MEMORY, _ROOM = "/dev/shm", 4 << 30  # noqa: S108 - pytest makes a folder of its own in it
with suppress(OSError):
    if shutil.disk_usage(_IN_MEMORY).free >= _ROOM and total_memory() >= 4 * _ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _IN_MEMORY)

# As the command does before it imports them: tests look at what a job says on stderr.
quiet_imports()

# A busy machine does not fail a test.
if hypothesis:
    hypothesis.settings.register_profile("prefill", deadline=None)
    hypothesis.settings.load_profile("prefill")

# The share of its examples that each property test tries, always others: `make test` tries some, CI all.
_EXAMPLES = float(os.environ.get("EXAMPLES", "1"))
_FEWEST = 5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A job in this process that asks for more leaves as many for the next test, whose scores then have other bits."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _known_models(request: pytest.FixtureRequest) -> Iterator[None]:
    """Jobs open models that this process knows from memory, but where opening them is the subject, and checks of
    attention take the numbers that they are held against from there, but where these checks are."""
    from tests.kept_models import keep_explicit_scores, keep_models

    folders = set(request.path.relative_to(request.config.rootpath / "tests").parts[:-1])
    with pytest.MonkeyPatch.context() as patch:
        if not folders & _OPENING and not request.node.get_closest_marker("fresh_models"):
            keep_models(patch)
        if "walk" not in folders:
            keep_explicit_scores(patch)
        yield


_OPENING = frozenset({"models", "faults", "fuzz", "install", "airflow", "real", "llama_cpp", "soak"})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="Fail if a test was skipped: what it needs must be here.")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of a test that are left to the night, and those that a short night leaves out: always the same ones.

    Of the cases of a `sampled` test so many as it says are no nightly ones. Of the cases of a nightly test one of
    `NIGHTLY_EVERY` runs, and at least one.
    """
    for cases in _cases(items, "sampled"):
        (most,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        for case in cases[most:]:
            case.add_marker("nightly")
    if (every := int(os.environ.get("NIGHTLY_EVERY", "1"))) == 1:
        return
    left_out = {case for cases in _cases(items, "nightly") for case in cases[-(-len(cases) // every) :]}
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
    items[:] = [item for item in items if item not in left_out]


def pytest_itemcollected(item: pytest.Item) -> None:
    """A property test tries the share of its examples, but for machines of states, which are methods."""
    test, name = getattr(item, "obj", None), "_hypothesis_internal_use_settings"
    own = getattr(test, name, None)
    if own is not None and isfunction(test) and _EXAMPLES < 1 and test not in _FEWER:
        _FEWER.add(test)
        most = min(own.max_examples, max(round(own.max_examples * _EXAMPLES), _FEWEST))
        setattr(test, name, hypothesis.settings(own, max_examples=most))


_FEWER: set[Any] = set()


def pytest_collection_finish() -> None:
    """A collection of garbage no longer looks at the million objects that were imported, as in the command."""
    gc.collect()
    gc.freeze()


def _cases(items: list[pytest.Item], marker: str) -> Iterator[list[pytest.Item]]:
    """The cases of each test with a marker, in an order that looks like chance."""
    of_test: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if item.get_closest_marker(marker):
            of_test[item.nodeid.partition("[")[0]].append(item)
    yield from of_test.values()


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many faults were injected, by their kind."""
    faults: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        faults.update(dict(value for name, value in report.user_properties if name == "faults"))
    if faults:
        terminalreporter.section("injected faults")
        for kind, number in faults.most_common():
            terminalreporter.line(f"{number:>7,} {kind}")
        terminalreporter.line(f"{faults.total():>7,} together")


@pytest.fixture
def count_faults(record_property: Callable[[str, object], None]) -> Callable[[str, int], None]:
    """Have faults of a kind counted for the summary at the end."""
    return lambda kind, number: record_property("faults", (kind, number))


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is remembered in the user's cache folder but what was compiled: that takes a compiler 20 seconds."""
    compiled, own = cache_folder() / "compiled", tmp_path_factory.mktemp("cache")
    with suppress(OSError):
        compiled.mkdir(mode=0o700, parents=True, exist_ok=True)
        (own / "prefillcli").mkdir()
        (own / "prefillcli" / "compiled").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(own))
        yield


@pytest.fixture(scope="session")
def _s3_server() -> Iterator[Any]:
    from tests.s3_server import serving

    with serving() as server:
        yield server


@pytest.fixture
def s3_server(_s3_server: Any) -> Iterator[Any]:
    """A real S3 server, without faults at first."""
    _s3_server.reset()
    yield _s3_server
    _s3_server.reset()


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's memory filesystem, empty before and after."""
    import fsspec

    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]

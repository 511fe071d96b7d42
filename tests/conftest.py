"""For all tests."""

from __future__ import annotations

import os

import pytest

# One thread for each test and the processes that it starts, whatever the machine has: the models are tiny, so a second
# costs them more than it gives, and scores on as many threads are the same bit for bit. torch reads it when it is
# imported, which comes after this.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="Fail if a test was skipped: what it needs must be here.")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""What breaks a promise is found and told with the line that repeats it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import __main__ as driver
from tests.fuzz.registry import FUZZERS
from tests.fuzz.rounds import Ended, examine, run_round

PLANTED = "tests.fuzz.planted"


def planted(name: str) -> Ended:
    return run_round(PLANTED, name, 7, 50, seconds=1.0, memory=1 << 30)


@pytest.mark.nightly
def test_the_smallest_example_that_fails_is_told() -> None:
    ended = planted("fail")
    assert "more than a hundred" in "".join(ended.failures)
    assert "example=101" in "".join(ended.failures)


@pytest.mark.nightly
def test_a_process_that_crashes_is_told_with_its_example() -> None:
    (failure,) = planted("crash").failures
    assert "exit code -6" in failure
    assert int(failure.rpartition("example: ")[2]) > 100
    assert "_crash" in failure


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["hang", "compute"])
def test_an_example_that_does_not_end_is_ended_and_told_with_its_stack(name: str) -> None:
    (failure,) = planted(name).failures
    assert f"_{name}" in failure
    assert int(failure.rpartition("example: ")[2]) > 100


def test_an_example_that_fills_the_memory_fails() -> None:
    assert "MemoryError" in "".join(planted("fill").failures)


def test_a_seed_gives_the_same_examples_again(tmp_path: Path) -> None:
    def seen(number: int) -> list[Any]:
        found: list[Any] = []
        lines = FUZZERS["lines"]
        examine(
            type(lines)("same", lines.examples, lambda example, _: found.append(example), 20), number, 20, tmp_path
        )
        return found

    assert repr(seen(1)) == repr(seen(1)) != repr(seen(2))


def test_the_command_tells_seeds_examples_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    assert driver.main(["keep", "fail", "--minutes", "0", "--seed", "5", "--examples", "40"], PLANTED) == 1
    said = capsys.readouterr().out
    assert said.startswith("seed 5: keep, fail\n")
    again = said.partition("repeat with\n")[2].splitlines()[0].split()
    assert again[:4] == ["python", "-m", "tests.fuzz", "fail"]
    assert said.splitlines()[-1].endswith("examples, 1 failures")
    assert driver.main(again[3:], PLANTED) == 1
    assert "example=101" in capsys.readouterr().out
    assert driver.main(["keep", "--minutes", "0"], PLANTED) == 0


# Both are planted where many examples get: which are drawn depends on the modules that are loaded.
def lost_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.rows.input.source import BatchMaker

    append = BatchMaker._append
    monkeypatch.setattr(BatchMaker, "_append", lambda self, line: None if b"x" in line else append(self, line))


def untyped_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefillcli.rows.input.source import BatchMaker

    append = BatchMaker._append
    monkeypatch.setattr(BatchMaker, "_append", lambda self, line: [][0] if b"x" in line else append(self, line))


@pytest.mark.nightly
@pytest.mark.parametrize(("plant", "told"), [(untyped_error, "IndexError"), (lost_row, "assert")])
def test_a_fault_in_the_product_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, told: str
) -> None:
    plant(monkeypatch)
    ended = examine(FUZZERS["lines"], 3, 60, tmp_path)
    assert told in "".join(ended.failures)

"""Measurements in child processes, and how their ends are told."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from prefillcli.errors import ResourceError, UsageError
from prefillcli.profile.children import ChildEnded, ChildFailed, Subject, confirm, in_child
from tests.score.models import save_model

MIB = 1 << 20


def count(send, most: int) -> None:
    for number in range(most):
        send(number)


def end_badly(send, how: str) -> None:
    send("begun")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "usage":
        raise UsageError("no such thing")
    if how == "memory":
        raise MemoryError
    if how == "value":
        raise ValueError("three is no even number")
    time.sleep(60)


def test_what_a_task_sends_comes_in_order() -> None:
    assert list(in_child(count, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("signal", ChildEnded, "ended by signal 9"),
        ("usage", UsageError, "no such thing"),
        ("memory", ResourceError, "MemoryError"),
        ("value", ChildFailed, "ValueError: three is no even number"),
    ],
)
def test_how_a_task_ends_is_told(how: str, kind: type[Exception], said: str) -> None:
    found = []
    with pytest.raises(kind, match=said) as ended:
        found.extend(in_child(end_badly, how))
    if kind is ChildFailed:  # an error in a program: the traceback says where
        assert "in end_badly" in "".join(ended.value.__notes__)


def test_a_task_that_takes_too_long_is_ended() -> None:
    with pytest.raises(ChildEnded, match="more than 0 seconds"):
        list(in_child(end_badly, "sleep", timeout=0.01))


def test_a_run_with_too_small_a_budget_is_reported_and_one_that_fits_confirmed(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", hidden=256)
    subject = Subject(model, "float32", "cpu", False, 1, 64)
    embedded = 2000 * 256 * 4  # bytes of the embeddings, with which a run begins
    with closing(in_child(confirm, subject, "full", 2000, MIB)) as found:
        refused = next(found)
    assert (refused.tokens, refused.fits, refused.peak_bytes) == (2000, False, None)
    assert embedded - MIB <= refused.excess_bytes <= embedded
    assert "memory" in refused.reason
    with closing(in_child(confirm, subject, "full", 2000, 128 * MIB)) as found:
        kept = next(found)
    assert kept.fits
    assert 4 * MIB < kept.peak_bytes <= 128 * MIB

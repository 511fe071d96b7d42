"""Measurements in processes of their own, and how their ends are told."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import torch

from prefillcli.errors import ResourceError, UsageError
from prefillcli.runtime.memory import with_peak
from prefillcli.tools.profile.measuring import in_child, make_malloc_exact

MIB = 1 << 20


def end(how: str) -> int:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "usage":
        raise UsageError("no such thing")
    if how == "memory":
        raise MemoryError
    if how == "value":
        raise ValueError("three is no even number")
    if how == "sleep":
        time.sleep(60)
    return os.getpid()


def test_a_task_has_a_process_of_its_own() -> None:
    assert in_child(end, "well") != os.getpid()


@pytest.mark.parametrize(
    ("how", "kind", "said"),
    [
        ("signal", ResourceError, "the process was ended before"),
        ("usage", UsageError, "no such thing"),
        ("memory", ResourceError, "MemoryError"),
        ("value", ValueError, "three is no even number"),
    ],
)
def test_how_a_task_ends_is_told(how: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said) as ended:
        in_child(end, how)
    if kind is ValueError:  # an error in a program: the traceback says where
        assert "in end" in str(ended.value.__cause__)


def test_a_task_that_takes_too_long_is_ended() -> None:
    begun = time.monotonic()
    with pytest.raises(ResourceError, match="the process was ended after 0 seconds"):
        in_child(end, "sleep", timeout=0.01)
    assert time.monotonic() - begun < 50


def peaks() -> list[int | None]:
    """The peaks of steps, one after the other in the same process."""
    make_malloc_exact()
    torch.ones(MIB)  # threads take their stacks when there is first something to share
    steps = [
        lambda: np.ones(48 * MIB, dtype=np.uint8),
        lambda: np.ones(8 * MIB, dtype=np.uint8),
        lambda: [torch.ones(MIB, dtype=torch.uint8) for _ in range(24)],
    ]
    return [with_peak(step)[1] for step in steps]


def test_the_peak_of_each_step_is_its_own() -> None:
    for peak, size in zip(in_child(peaks), (48, 8, 24), strict=True):
        assert peak is not None
        assert (size - 0.5) * MIB <= peak <= (size + 1.5) * MIB

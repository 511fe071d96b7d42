"""What a process allocates: measured at its peak, and limited."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prefillcli.errors import out_of_memory
from prefillcli.profile.children import enforced, in_child, make_malloc_exact, peak_bytes

MIB = 1 << 20


def fill(send, budget: int, size: int) -> None:
    """Sends whether numpy and torch get `size` bytes within `budget`, and what they lacked."""
    for make in (lambda: np.ones(size, dtype=np.uint8), lambda: torch.ones(size, dtype=torch.uint8)):
        with enforced("cpu", budget) as enforcement:
            try:
                make()
            except (MemoryError, RuntimeError) as error:
                send((out_of_memory(error), enforcement.excess(error)))
            else:
                send("fits")
    make()  # the limit is gone


@pytest.mark.nightly
def test_a_budget_is_kept_by_the_system() -> None:
    assert list(in_child(fill, 64 * MIB, 40 * MIB)) == ["fits", "fits"]
    (by_numpy, _), (by_torch, lacked) = in_child(fill, 64 * MIB, 80 * MIB)
    assert by_numpy
    assert by_torch
    assert 14 * MIB <= lacked <= 20 * MIB


def allocate(send) -> None:
    """Sends the peaks of steps, one after the other in the same process."""
    make_malloc_exact()
    torch.ones(MIB)  # threads take their stacks when there is first something to share
    send(peak_bytes(lambda: np.ones(48 * MIB, dtype=np.uint8), "cpu"))
    send(peak_bytes(lambda: np.ones(8 * MIB, dtype=np.uint8), "cpu"))
    send(peak_bytes(lambda: torch.empty(16 * MIB, dtype=torch.uint8), "cpu"))
    send(peak_bytes(lambda: [torch.ones(MIB, dtype=torch.uint8) for _ in range(24)], "cpu"))


def test_the_peak_of_each_step_is_its_own_touched_or_not() -> None:
    for peak, size in zip(in_child(allocate), (48, 8, 16, 24), strict=True):
        assert size * MIB <= peak <= (size + 1) * MIB


def run_within(send, budget: int, size: int) -> None:
    with enforced("cpu", budget):
        send(peak_bytes(lambda: np.ones(size, dtype=np.uint8), "cpu"))


def test_what_is_measured_is_what_the_limit_counts() -> None:
    (peak,) = in_child(run_within, 64 * MIB, 63 * MIB)
    assert 63 * MIB <= peak <= 64 * MIB

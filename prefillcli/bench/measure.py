"""Times and memory of methods, measured so that they can be compared on a shared machine."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from prefillcli.runtime.memory import process_memory, reserved_at_peak, reset_peak_memory, trim_heap

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


def interleaved(
    methods: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: bool = True,
    within: float = math.inf,
    on_run: Callable[[int, str, float], None] = lambda turn, name, seconds: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of each method, run in turn for `rounds` rounds after one warm-up of each.

    A disturbance of the machine then hits all methods: compare within a round. After the first round none
    begins that would, by the longest so far, end more than `within` seconds after the first began. `on_run` is
    called after each run with the round (0: the warm-up), the name and the seconds. `clock` measures the methods; with
    `time.process_time` what other programs take of the machine does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    first, longest = time.perf_counter(), 0.0
    for turn in range(0 if warm_up else 1, rounds + 1):
        round_begun = time.perf_counter()
        if turn > 1 and round_begun - first + longest > within:
            break
        for name, method in methods.items():
            begun = clock()
            method()
            taken = clock() - begun
            if turn:
                seconds[name].append(taken)
            on_run(turn, name, taken)
        longest = max(longest, time.perf_counter() - round_begun)
    return seconds


def with_peak(step: Callable[[], T], device: torch.device | None = None) -> tuple[T, int | None]:
    """What `step` returns, and the bytes at its peak above what was in use before, in this process.

    Of a CUDA `device` what torch has reserved, else of the host. None off Linux, as it resets and reads
    VmHWM. Memory that earlier steps freed is given back to the system first: otherwise a step that
    uses it again would seem to need none.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        return reserved_at_peak(step, device)
    trim_heap()
    try:
        reset_peak_memory()
        before = process_memory("VmRSS")
    except OSError:
        return step(), None
    result = step()
    return result, max(0, process_memory("VmHWM") - before)

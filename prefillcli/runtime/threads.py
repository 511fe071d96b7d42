"""How many threads compute, how they wait for one another, and how much code for products they keep.

torch's operators run on OpenMP threads that share each operator out evenly and wait for the last one. OpenMP's own way
to wait is to spin for some milliseconds. On free cores that is the fastest; beside another program it takes the core
from the thread that is waited for.

On CPUs, oneDNN generates code for each shape of product. Two caches keep it for the last thousand shapes, with half a
megabyte or more for each. Chunks have ever other lengths, so a process grew by hundreds of megabytes. One pack has few
shapes, and to generate their code again takes no time beside computing them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Literal

from prefillcli.runtime.cores import Left, allowed, quotas

#: What a user says of OpenMP's threads in the environment; a number or a place given there is not changed.
_NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
#: How many shapes of products code is kept for, where it is generated and where torch asks for it.
_KEPT_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
_LOOK = 0.2  # seconds for which the cores are looked at before anything is computed
LEAST_SHARE = 0.5
"""Of the threads that may run, those that do whatever others use: a job that always gave way would never end."""


def prepare(asked: int | Literal["auto"], environment: MutableMapping[str, str] = os.environ) -> None:
    """Before torch is imported: threads that wait sleep where cores are not free, tokenising takes as many as
    computing, and code is kept for few products. What the user has set in the environment stays. For commands: a
    library leaves the environment to the program that imports it."""
    for name, number in _KEPT_PRODUCTS.items():
        environment.setdefault(name, number)
    if not any(environment.get(name) for name in _WAITING) and not _free():
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    if asked != "auto":
        environment.setdefault("RAYON_NUM_THREADS", str(asked))
    elif not given_numbers(environment):
        environment.setdefault("RAYON_NUM_THREADS", str(allowed()))


class Threads:
    """The threads that torch computes with in this process.

    A number that was asked for stands. `auto` begins with what affinity and quotas allow; each `adjust` then takes the
    cores that others have left since the one before, at least half of those allowed. Where the environment says how
    many or where they run, `auto` leaves them alone.
    """

    def __init__(self, asked: int | Literal["auto"], left: Left | None = None) -> None:
        import torch

        self._left = None
        if asked != "auto":
            torch.set_num_threads(asked)
        elif not given_numbers(os.environ):
            torch.set_num_threads(allowed())
            self._left = left or Left()
        self.most = torch.get_num_threads()
        """The threads that may run."""
        self.ran: list[int] = []
        """Of what has been computed, the fewest threads and the most; empty before."""
        _limit_arrow(self.most)

    def resume(self) -> None:
        """As many as may run, where something else has set another number since."""
        import torch

        torch.set_num_threads(self.most)
        _limit_arrow(self.most)

    def adjust(self) -> None:
        """Choose for what is computed next; at most every half second this changes anything."""
        import torch

        cores = None if self._left is None else self._left.cores()
        if cores is not None:
            torch.set_num_threads(threads_for(cores, self.most))
        now = torch.get_num_threads()
        self.ran = [min([now, *self.ran]), max([now, *self.ran])]


@contextmanager
def left_as_found() -> Iterator[None]:
    """For a library: afterwards torch and Arrow have as many threads as before, whatever was set inside."""
    import pyarrow
    import torch

    computing, reading = torch.get_num_threads(), pyarrow.cpu_count()
    try:
        yield
    finally:
        torch.set_num_threads(computing)
        pyarrow.set_cpu_count(reading)


def _free() -> bool:
    """Whether nobody else uses the cores that may be used here. A quota is spent by threads that spin, too."""
    left = Left()
    if quotas():
        return False
    time.sleep(_LOOK)
    return threads_for(left.cores(_LOOK) or 0.0, allowed()) == allowed()


def threads_for(cores: float, most: int) -> int:
    """Threads for so many free cores, `most` if all are: whole ones, and one more for half of a core."""
    return min(most, max(int(cores + 0.5), int(most * LEAST_SHARE + 0.5), 1))


def given_numbers(environment: Mapping[str, str]) -> list[str]:
    """The variables by which a user says how many threads compute, or where."""
    return [name for name in _NUMBERS if environment.get(name)]


def _limit_arrow(threads: int) -> None:
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and arrow.cpu_count() > threads:
        arrow.set_cpu_count(threads)

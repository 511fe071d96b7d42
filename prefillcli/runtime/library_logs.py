"""What other libraries do while they are imported, of no use to who runs a command.

They log, and they look for code to fetch. A run loads nothing from a hub but the model and adapters that it is told.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: torchao says which of its kernels this machine cannot load, torch which of torchao's types it knows already, and
#: bitsandbytes that it has fetched no kernels.
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")

FETCHES = "kernels"
"""The package by which transformers, bitsandbytes and others fetch compiled code from a hub and load it."""
ALLOWED = "USE_HUB_KERNELS"
"""transformers' own variable of the environment that allows it: here only where somebody has set it."""
_ABSENT: Any = object()
_found: Any = _ABSENT  # what was imported under that name before the first thread came inside
_inside = 0
_lock = threading.Lock()


def quiet_imports() -> None:
    """Only errors of these libraries are logged from now on, and none of them fetches code.

    To be called before they are imported, in processes that are this program's own.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    if not _allowed():
        sys.modules.setdefault(FETCHES, None)  # type: ignore[arg-type]  # who imports it is told that it is not there


def _allowed() -> bool:
    return os.environ.get(ALLOWED, "").upper() in ("1", "ON", "YES", "TRUE")


@contextmanager
def without_fetched_code() -> Iterator[None]:
    """For a library: inside, that package is not there for whoever imports it; afterwards it is as it was.

    Any number of threads may be inside.
    """
    global _inside, _found
    if _allowed():
        yield
        return
    with _lock:
        if not _inside:
            _found = sys.modules.get(FETCHES, _ABSENT)
            sys.modules[FETCHES] = None  # type: ignore[assignment]
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and _found is _ABSENT:
                del sys.modules[FETCHES]
            elif not _inside:
                sys.modules[FETCHES] = _found

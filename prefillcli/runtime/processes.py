"""Which process a process id means: ids are reused, and each machine and container has its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def start_of(pid: int) -> str:
    """When a process began, in ticks since the machine did; empty if there is none, or off Linux."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def process_space() -> str:
    """Names what process ids are unique in: this start of the machine, and its namespace. Empty off Linux."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""

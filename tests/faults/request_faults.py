"""One request of a process to S3 fails: the n-th that its client sends, whatever it asks for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import s3fs

from prefillcli.rows import filesystems

SEND = s3fs.S3FileSystem._call_s3


class RequestKind(Enum):
    """What happens to a request."""

    BUSY = "a request that does not reach its store"
    LOST = "a request whose answer is lost"
    DENIED = "a request that is refused"
    KILL = "kill -9 before a request"
    HANG = "a request that hangs"

    @property
    def meaning(self) -> str:
        return self.value

    @property
    def passes(self) -> bool:
        """Whether the run goes on."""
        return self in (RequestKind.BUSY, RequestKind.LOST)

    @property
    def hangs(self) -> bool:
        return self is RequestKind.HANG

    def fault(self, number: int) -> RequestFault:
        return RequestFault(self, number)


@dataclass(frozen=True)
class RequestFault:
    kind: RequestKind
    number: int
    """Of the request that fails, from 1."""

    def arm(self, report: Callable[[str], None]) -> None:
        """Let one request of this process fail from now on; `report` hears which, before."""
        filesystems._FIRST_WAIT = filesystems._LONGEST_WAIT = 0.001
        seen = 0

        async def send(self_: Any, method: str, *arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen != self.number:
                return await SEND(self_, method, *arguments, **options)
            report(method)
            if self.kind is RequestKind.LOST:
                await SEND(self_, method, *arguments, **options)
            if self.kind is RequestKind.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            while self.kind is RequestKind.HANG:
                await asyncio.sleep(60)
            if self.kind is RequestKind.DENIED:
                raise PermissionError("Access Denied")
            raise ConnectionError("the connection was reset")

        s3fs.S3FileSystem._call_s3 = send

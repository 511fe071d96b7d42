"""A copy stream on the CPU that is as late as a GPU's may be: a copy is made when something waits for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class _Copy(NamedTuple):
    target: Tensor
    source: Tensor
    on_device: Tensor  # one of them


class LateCopies:
    """Instead of `CopyStream`. Until something waits for a copy, its target holds no numbers, and what is on the
    device's side of it has to be alive: memory that is let go of would be used again while it is copied."""

    def __init__(self) -> None:
        self.queue: list[_Copy] = []
        self.done = 0
        self.waited_for_all = 0
        self.most_waiting = 0
        self._hosts: set[int] = set()
        self._pinned: list[Tensor] = []  # torch itself does not use it again before its copies are done
        self._let_go = _users(torch.empty(1).detach())

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        memory = torch.full(shape, torch.nan, dtype=dtype)
        self._pinned.append(memory)
        self._hosts.add(memory.untyped_storage().data_ptr())
        return memory

    def start(self, target: Tensor, source: Tensor) -> int:
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.shape == source.shape
        at_home = [each.untyped_storage().data_ptr() in self._hosts for each in (target, source)]
        assert at_home.count(True) == 1, "a copy is between the device and pinned memory"
        target.fill_(torch.nan)
        aliases = target.detach(), source.detach()
        self.queue.append(_Copy(*aliases, on_device=aliases[at_home.index(False)]))
        self.most_waiting = max(self.most_waiting, len(self.queue) - self.done)
        return len(self.queue)

    def wait(self, copied: int) -> None:
        for copy in self.queue[self.done : copied]:
            assert _users(copy.on_device) > self._let_go, "memory of the device was let go of before it was copied"
            copy.target.copy_(copy.source)
        self.done = max(self.done, copied)

    def finish(self) -> None:
        self.waited_for_all += 1
        self.wait(len(self.queue))


def _users(tensor: Tensor) -> int:
    """Tensors that share its memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))

"""What other libraries log while they are imported, of no use to who runs a command."""

from __future__ import annotations

import logging

#: torchao says which of its kernels this machine cannot load, and torch which of torchao's types it knows already.
_TALKATIVE = ("torchao", "torch.utils._pytree")


def quiet_imports() -> None:
    """Only errors of these libraries are logged from now on. To be called before they are imported."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)

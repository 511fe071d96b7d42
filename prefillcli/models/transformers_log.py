"""What transformers says while it loads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars or advice from transformers; errors are raised."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def limit_kernel_advice(device_type: str) -> None:
    """On CPUs, leave out the advice to install kernels for recurrent layers: there are none for CPUs."""
    logger = logging.getLogger("transformers.integrations.hub_kernels")
    if device_type == "cpu":
        logger.addFilter(_is_no_fallback)
    else:
        logger.removeFilter(_is_no_fallback)


def _is_no_fallback(record: logging.LogRecord) -> bool:
    return "falling back to its reference" not in record.getMessage()


def limit_cast_advice() -> None:
    """Leave out what bitsandbytes says at each product of 8 bits: that it computes in float16."""
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_is_no_cast)


def _is_no_cast(record: logging.LogRecord) -> bool:
    return "inputs will be cast" not in record.getMessage()

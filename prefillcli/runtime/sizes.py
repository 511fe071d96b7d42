"""Numbers of bytes as people write them."""

from __future__ import annotations

import re

_TOO_LARGE = 1 << 63
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of a size like `8GiB`, `500MB` or `1048576`. Raises ValueError."""
    match = _SIZE.match(str(text))
    if match is None:
        raise ValueError(f"{text!r} is not a size: use 8GiB, 500MB or 1048576")
    number, prefix, binary = match.groups()
    size = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
    if size < 1:
        raise ValueError("must be more than 0")
    if size >= _TOO_LARGE:
        raise ValueError("must be less than 8EiB")
    return int(size)

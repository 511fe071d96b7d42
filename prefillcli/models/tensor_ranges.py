"""Where the tensors of a file begin and end."""

from __future__ import annotations

from collections.abc import Iterable


def check_ranges(ranges: Iterable[tuple[int, int, str]], size: int, *, alignment: int = 1) -> None:
    """Raise ValueError unless the tensors of a file fill its `size` bytes of data one after the other.

    `ranges` are the first byte of each tensor, the byte behind its last, and its name, in any order. Each begins at a
    multiple of `alignment`, and fewer bytes than that lie between two of them and behind the last one.
    """
    end, before = 0, ""
    for begin, stop, name in sorted(ranges):
        if begin % alignment:
            raise ValueError(f"{name} begins at byte {begin:,} of the data, which is not a multiple of {alignment}")
        if begin < end:
            raise ValueError(f"{name} and {before} share bytes")
        if begin - end >= alignment:
            raise ValueError(f"{begin - end:,} bytes before {name} belong to no tensor")
        end, before = stop, name
    if end > size:
        raise ValueError(f"truncated: {size:,} bytes of data, {before} ends after {end:,}")
    if size - end >= alignment:
        raise ValueError(f"{size - end:,} bytes at its end belong to no tensor")

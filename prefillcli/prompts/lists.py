"""Lists of names in one text, as the command line and the environment give them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

# A line of CSV has no line breaks outside quotes, and an item may: they are told as what no text holds.
_BREAKS = {ord("\n"): "\ud800", ord("\r"): "\ud801"}
_UNBROKEN = {0xD800: "\n", 0xD801: "\r"}
_ESCAPE = re.compile(r"\\(.?)", re.DOTALL)


def split_list(text: str, *, keep_escapes: bool = False) -> list[str]:
    r"""Split a text at its commas, as a line of CSV: an item in quotes, like "a,b", may have commas, and two quotes in
    it are one. A backslash before a comma, a quote or another backslash takes it literally.

    With `keep_escapes` backslashes before backslashes stay, and so does white space at the end, for whoever splits the
    items further.
    Raises ValueError for an empty item.
    """
    line = _ESCAPE.sub(_for_csv, text).translate(_BREAKS)
    try:
        (items,) = csv.reader([line], escapechar="\\", skipinitialspace=True, strict=True)
    except csv.Error as error:
        raise ValueError(f"{error}: put an item with a comma in quotes, and double the quotes in it") from None
    items = [item.translate(_UNBROKEN) for item in items]
    items = items if keep_escapes else [item.strip().replace("\\\\", "\\") for item in items]
    return non_empty(items)


def _for_csv(found: re.Match[str]) -> str:
    # Commas and quotes are escaped for the reader of CSV; the escapes of all else go through it as they are.
    return found[0] if found[1] and found[1] in ',"' else "\\\\" + ("\\\\" if found[1] == "\\" else found[1])


def non_empty(items: Sequence[str]) -> list[str]:
    """Return these items. Raises ValueError, with its number, for an empty one."""
    for number, item in enumerate(items, 1):
        if not item.strip():
            raise ValueError(f"item {number} is empty: separate items by single commas")
    return list(items)

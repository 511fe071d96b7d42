"""Untrusted text made safe to show.

No character of it reaches the terminal or a page that could move the cursor, reorder the line or hide.
"""

from __future__ import annotations

import unicodedata

_PREVIEW = 240  # characters


def visible(text: str, *, line: bool = False) -> str:
    """`text` with control, escape, direction and other invisible characters spelled out.

    Newlines and tabs stay, unless it has to be one `line`. The joiners that scripts and emoji are written with stay.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelled(char, line) for char in text)


def preview(text: str) -> str:
    """The beginning of `text` in one line."""
    start = visible(text[: _PREVIEW + 1].lstrip(" "), line=True)
    return start if len(text) <= _PREVIEW else start[:-1] + "…"


def _spelled(char: str, line: bool) -> str:
    if char in "\n\t":
        return char if not line else "↵" if char == "\n" else " "
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # Unicode's control pictures
    if code == 0x7F:
        return "\u2421"
    if char in "\u200c\u200d" or unicodedata.category(char) in ("Zs", "Co", "Cn"):
        return char
    return f"⟨U+{code:04X}⟩"

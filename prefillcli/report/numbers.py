"""Numbers as tables, charts and pages show them; durations as one would say them are in `prefillcli.runtime.clock`."""

from __future__ import annotations

import math

_BAR = 40  # characters of the longest bar
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def three_digits(value: float) -> str:
    """Three digits, and all that are before the point: `0.0123`, `12.3`, `12,345`."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def abbreviated(number: float) -> str:
    """`1,234`, `12.3k`, `1.23M`."""
    for size, unit, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if number >= size:
            return f"{number / unit:.3g}{letter}"
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """`1 token`, `1,234 tokens`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def mebibytes(size: float) -> str:
    """Bytes in MiB, without the unit: `1,234`."""
    return f"{size / 2**20:,.0f}"


def byte_size(size: float) -> str:
    """`1.5 GiB`, `300 MiB`."""
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{mebibytes(size)} MiB"


def minutes_and_seconds(seconds: float) -> str:
    """`120 ms`, `12.3 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def small_seconds(seconds: float, sign: str = "") -> str:
    """`3.1 ms`, `-12 us`; with `sign` "+" the sign is always there."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:{sign}.3g} {unit}"
    return f"{seconds / 1e-9:{sign}.3g} ns"


def price(value: float) -> str:
    """In the currency of --price-per-hour: `12.34`, `0.0012`."""
    return f"{value:,.2f}" if value >= 1 else f"{value:.2g}"


def percent_interval(bounds: tuple[float, float]) -> str:
    """Bounds from 0 to 1: `1.2-3.4 %`."""
    return f"{100 * bounds[0]:.1f}-{100 * bounds[1]:.1f} %"


def percent_or_nothing(value: float | None) -> str:
    """`12.3%`; nothing where the value is not known."""
    return "" if value is None else f"{value:.1%}"


def bar(value: float, most: float, width: int = _BAR) -> str:
    """A bar of up to `width` characters, in eighths of one; whatever is above zero can be seen."""
    eighths = round(8 * width * value / most) if most else 0
    eighths = max(eighths, 1 if value > 0 else 0)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def signed_bar(value: float, most: float, side: int) -> str:
    """A bar of up to `side` characters to the left or the right of a line."""
    length = min(round(side * abs(value) / most), side) if most and math.isfinite(value) else 0
    left, right = ("█" * length, "") if value < 0 else ("", "█" * length)
    return f"{left:>{side}}│{right:<{side}}"

"""Numbers as tables and charts show them."""

from __future__ import annotations


def three_digits(value: float) -> str:
    """Three digits, and those before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

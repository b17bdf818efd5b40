"""Formats of times and shares in reports."""

from __future__ import annotations


def format_us(nanoseconds: float) -> str:
    """Format a time in ns as microseconds, with three decimals and without a unit."""
    return f"{nanoseconds / 1000:.3f}"


def format_share(amount: float, total: float) -> str:
    """Format an amount as a percentage of a total, such as "12.5 %"; "-" if the total is 0."""
    return f"{100 * amount / total:.1f} %" if total else "-"

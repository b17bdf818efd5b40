"""Formats of times and shares in reports."""

from __future__ import annotations


def us(nanoseconds: float) -> str:
    """Format nanoseconds as microseconds, with three decimals."""
    return f"{nanoseconds / 1000:.3f}"


def share(amount: float, total: float) -> str:
    """Format an amount as a percentage of a total; "-" if the total is 0."""
    return f"{100 * amount / total:.1f} %" if total else "-"

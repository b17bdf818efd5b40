"""How reports write times and shares."""

from __future__ import annotations


def us(nanoseconds: float) -> str:
    """Nanoseconds as microseconds."""
    return f"{nanoseconds / 1000:.3f}"


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"

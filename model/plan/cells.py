"""Cells of the tables of plans: meshes, times, counts, and published over predicted values."""

from __future__ import annotations

from model.plan.memory import MeshShape
from model.plan.stacks import Ratios


def format_mesh(shape: MeshShape) -> str:
    """Return the sizes of a mesh, without axes of size 1 but for tp."""
    sizes = (("pp", shape.pp), ("ep", shape.ep))
    return " ".join([f"tp {shape.tp}", *(f"{axis} {size}" for axis, size in sizes if size > 1)])


def format_ms(time_ns: float) -> str:
    """Return milliseconds with two decimals; without decimals from 10 s on, which fill a column."""
    milliseconds = time_ns / 1e6
    return f"{milliseconds:,.2f}" if milliseconds < 10_000 else f"{milliseconds:,.0f}"


def format_plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {noun}{'s' if count > 1 else ''}"


def format_ratios(ratios: Ratios | None) -> str:
    """Return the range of published over predicted values, and how many of its runs are near."""
    if ratios is None:
        return "no runs"
    return f"{ratios.low:.2f}..{ratios.high:.2f}, {ratios.near}/{ratios.runs} near"

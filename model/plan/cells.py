"""Cells of the tables of plans: meshes, times, counts, and published over predicted values."""

from __future__ import annotations

from model.plan.memory import MeshShape
from model.plan.stacks import Ratios


def format_mesh(shape: MeshShape) -> str:
    """Return a mesh such as "tp 8" or "tp 8 pp 2"; pp and ep are left out where they are 1."""
    sizes = (("pp", shape.pp), ("ep", shape.ep))
    return " ".join([f"tp {shape.tp}", *(f"{axis} {size}" for axis, size in sizes if size > 1)])


def format_ms(time_ns: float) -> str:
    """Return a time in milliseconds with two decimals; from 10 s on without decimals, to fit a table's column."""
    milliseconds = time_ns / 1e6
    return f"{milliseconds:,.2f}" if milliseconds < 10_000 else f"{milliseconds:,.0f}"


def format_plural(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural for a count above 1."""
    return f"{count:,} {noun}{'s' if count > 1 else ''}"


def format_ratios(ratios: Ratios | None) -> str:
    """Return a cell such as "0.93..1.04, 3/13 near": the range of published over predicted values, and its runs.

    In the example, 3 of 13 published runs have sizes near the prediction's; see `Ratios`. Returns "no runs" for None.
    """
    if ratios is None:
        return "no runs"
    return f"{ratios.low:.2f}..{ratios.high:.2f}, {ratios.near}/{ratios.runs} near"

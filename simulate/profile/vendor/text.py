"""Prediction and measurement as tables and sentences, and as an object of the document of `time --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nkw.errors import shown
from nkw.report import Hanging, Name, Noted, Part, Table, table
from simulate.profile.numbers import format_share, format_us
from simulate.profile.vendor.records import DeviceProfile
from simulate.profile.vendor.side_by_side import Pair, SideBySide

_COLUMNS = "predicted|measured|ratio"
_MOST_WARNINGS = 3
_LONGEST_WARNING = 200


def make_report(comparison: SideBySide, rows: int = 8) -> list[Part]:
    """Return the report of a prediction beside a measurement, as parts of a text.

    Ratios are measured over predicted. The tables of DMA, counts, memory and bounds are left out if the
    profile has no figure for them.

    Args:
        rows: Most lines and tensors in their tables; the others are summed in a row.
    """
    predicted, measured = comparison.predicted, comparison.measured
    out: list[Part] = [
        Hanging(
            f"{predicted.title}: {format_us(predicted.length_ns)} us ({predicted.reading.value} reading)",
            style="bold",
        ),
        Hanging(f"against {shown(measured.path)}{_format_origin(measured)}"),
        Hanging(f"total time: {format_verdict(comparison)}", style="bold"),
    ]
    warnings = measured.warnings[:_MOST_WARNINGS]
    out += [Hanging(f"the profiler warns: {shown(warning, _LONGEST_WARNING)}") for warning in warnings]
    if len(measured.warnings) > len(warnings):
        out.append(f"{len(measured.warnings) - len(warnings)} more warnings")
    out += [Hanging(f"note: {shown(note, _LONGEST_WARNING)}") for note in comparison.notes]
    out += ["", make_pairs_table("time, us", [*comparison.times, *comparison.dma_ns], format_us)]
    out += ["", make_pairs_table("active, us", comparison.engines, format_us)]
    for head, pairs, format_amount in (
        ("DMA, MB", comparison.dma_bytes, _format_mb),
        ("count", comparison.counts, _format_count),
        ("SBUF, bytes of a partition", comparison.memory, _format_count),
        ("the vendor's bounds, us", comparison.bounds, format_us),
    ):
        if any(pair.measured is not None for pair in pairs):
            out += ["", make_pairs_table(head, pairs, format_amount)]
    if comparison.lines:
        out += ["", make_named_table("line, us", comparison.lines, rows, format_us)]
    if comparison.tensors:
        out += ["", make_named_table("HBM tensor, MB", comparison.tensors, rows, _format_mb)]
    return [*out, *_list_measured_only(measured)]


def format_verdict(comparison: SideBySide) -> str:
    """Return both total times in us and their ratio, as a sentence without a full stop."""
    total = comparison.total
    return (
        f"{format_us(total.predicted or 0.0)} us predicted, {format_us(comparison.measured.total_ns)} us measured, "
        f"ratio {_format_ratio(total)}"
    )


def make_contents(comparison: SideBySide) -> dict[str, Any]:
    """Return a prediction beside a measurement as JSON types for `time --json`.

    Times are in ns, sizes in bytes; null replaces missing figures.
    """
    measured = comparison.measured
    origin, waiting = measured.origin, measured.synchronization
    return {
        "profile": measured.path,
        "reading": comparison.predicted.reading.value,
        "schema": origin.schema,
        "instance": origin.instance,
        "times": make_records(comparison.times, "_ns"),
        "engines": make_records(comparison.engines, "_ns"),
        "dma_active": make_records(comparison.dma_ns, "_ns"),
        "dma": make_records(comparison.dma_bytes, "_bytes"),
        "counts": make_records(comparison.counts, ""),
        "memory": make_records(comparison.memory, "_bytes"),
        "bounds": make_records(comparison.bounds, "_ns"),
        "lines": make_records(comparison.lines, "_ns"),
        "tensors": make_records(comparison.tensors, "_bytes"),
        "semaphore_updates": waiting.semaphore_updates,
        "barrier_ns": waiting.barrier_ns,
        "pending_dmas_most": waiting.pending_dmas_most,
        "throttled_ns": waiting.throttled_ns,
        "throttled_to": waiting.throttled_to,
        "dependences": dict(waiting.dependences),
        "sbuf_fullest": measured.on_chip.sbuf_fullest,
        "psum_fullest": measured.on_chip.psum_fullest,
        "warnings": list(measured.warnings),
        "notes": list(comparison.notes),
    }


def make_records(pairs: Sequence[Pair], unit: str) -> list[dict[str, Any]]:
    """Return pairs as JSON types, with keys such as `predicted_ns` and `measured_ns`.

    Args:
        unit: End of these two keys, such as "_ns"; may be empty.
    """
    return [
        {
            "name": pair.name,
            f"predicted{unit}": _to_python_number(pair.predicted),
            f"measured{unit}": _to_python_number(pair.measured),
            "ratio": pair.ratio,
        }
        for pair in pairs
    ]


def _to_python_number(amount: float | None) -> float | int | None:
    """Return an amount as a Python number, since numpy's types are not JSON's."""
    return amount if amount is None or isinstance(amount, int) else float(amount)


def make_pairs_table(head: str, pairs: Sequence[Pair], format_amount: Callable[[float], str]) -> Table:
    """Return a table of predicted, measured and ratio, a row for each pair.

    Args:
        head: Heading of the first column, with the unit.
        format_amount: Formats an amount without its unit.
    """
    return table(
        f"{head}|{_COLUMNS}",
        [(_format_name(pair.name), *_format_amounts(pair, format_amount)) for pair in pairs],
    )


def make_named_table(
    head: str, pairs: Sequence[Pair], rows: int, format_amount: Callable[[float], str]
) -> Part:
    """Return a table of the first `rows` pairs, each with its text below; a last row sums the remaining pairs.

    Args:
        head: Heading of the first column, with the unit.
        format_amount: Formats an amount without its unit.
    """
    table_rows: list[tuple[Part, ...]] = [
        (Name(_format_name(pair.name)), *_format_amounts(pair, format_amount)) for pair in pairs[:rows]
    ]
    if len(pairs) > rows:
        omitted = pairs[rows:]
        sums = Pair(
            f"{len(omitted)} more",
            sum(pair.predicted or 0 for pair in omitted),
            sum(pair.measured or 0 for pair in omitted),
        )
        table_rows.append((sums.name, *_format_amounts(sums, format_amount)))
    notes = [pair.text for pair in pairs[:rows]] + [""] * (len(table_rows) - min(rows, len(pairs)))
    return Noted(table(f"{head}|{_COLUMNS}", table_rows), notes)


def _format_name(text: str) -> str:
    """Format a name that comes from a profile on a single line, with control characters escaped, cut if it is long."""
    return shown(text, _LONGEST_WARNING).replace("\n", "\\n").replace("\t", "\\t")


def _format_amounts(pair: Pair, format_amount: Callable[[float], str]) -> tuple[str, str, str]:
    """Return (predicted, measured, ratio) of a pair, formatted; "-" for a missing figure."""
    predicted, measured = (
        "-" if amount is None else format_amount(amount) for amount in (pair.predicted, pair.measured)
    )
    return predicted, measured, _format_ratio(pair)


def _format_ratio(pair: Pair) -> str:
    """Format the ratio of a pair with two decimals, or two digits if it is very small or large.

    "-" for None.
    """
    if pair.ratio is None:
        return "-"
    return f"{pair.ratio:.2f}" if 0.1 <= pair.ratio < 1000 else f"{pair.ratio:.2g}"


def _format_origin(measured: DeviceProfile) -> str:
    """Return schema, instance and tools of a measurement in brackets, after a space.

    Empty if the profile has none.
    """
    origin = measured.origin
    words = [
        f"schema {origin.schema}" if origin.schema else "",
        origin.instance,
        f"neuron-explorer {origin.explorer}" if origin.explorer else "",
        f"compiler {origin.compiler}" if origin.compiler else "",
    ]
    description = ", ".join(shown(word, 60) for word in words if word)
    return f" ({description})" if description else ""


def _list_measured_only(measured: DeviceProfile) -> list[Part]:
    """Return sentences about figures that only the measurement has, preceded by an empty line.

    They are on throttling, barriers, pending DMAs, waits for semaphores, and fullness of memories. Empty if
    the profile has none of them.
    """
    waiting, memory, total = measured.synchronization, measured.on_chip, measured.total_ns
    sentences = []
    if waiting.throttled_ns:
        lowest = format_share(waiting.throttled_to or 0.0, 1)
        sentences.append(
            f"throttled for {format_us(waiting.throttled_ns)} us, "
            f"{format_share(waiting.throttled_ns, total)}, to {lowest}"
        )
    if waiting.barriers:
        sentences.append(f"core barriers: {format_us(waiting.barrier_ns or 0.0)} us in {waiting.barriers}")
    if waiting.pending_dmas_most is not None:
        sentences.append(f"most DMAs pending at one time: {waiting.pending_dmas_most:,}")
    wait_ns = sum(engine.wait_ns or 0.0 for engine in measured.engines)
    if wait_ns:
        sentences.append(f"instructions waited for semaphores {format_us(wait_ns)} us, added up over engines")
    for name, fullest in (("SBUF", memory.sbuf_fullest), ("PSUM", memory.psum_fullest)):
        if fullest is not None:
            sentences.append(
                f"{name} at most {format_share(fullest, 1)} full on average of its partitions or banks"
            )
    return ["", *(Hanging(sentence) for sentence in sentences)] if sentences else []


def _format_mb(size: float) -> str:
    """Format bytes as megabytes, with three decimals."""
    return f"{size / 1e6:.3f}"


def _format_count(number: float) -> str:
    """Format a rounded count with thousands separators."""
    return f"{round(number):,}"

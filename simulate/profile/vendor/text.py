"""A prediction beside a measurement, as tables and sentences, and as a part of the document of `time --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nkw.errors import shown
from nkw.parts import Hanging, Name, Noted, Part, Table, table
from simulate.profile.numbers import share, us
from simulate.profile.vendor.records import DeviceProfile
from simulate.profile.vendor.side_by_side import Pair, SideBySide

_COLUMNS = "predicted|measured|ratio"
_MOST_WARNINGS = 3
_LONGEST_WARNING = 200


def report(found: SideBySide, rows: int = 8) -> list[Part]:
    """The parts of the text, with at most `rows` lines and tensors; ratios are measured over predicted."""
    predicted, measured = found.predicted, found.measured
    out: list[Part] = [
        Hanging(
            f"{predicted.title}: {us(predicted.length_ns)} us ({predicted.reading.value} reading)",
            style="bold",
        ),
        Hanging(f"against {shown(measured.path)}{_origin(measured)}"),
        Hanging(f"total time: {verdict(found)}", style="bold"),
    ]
    warnings = measured.warnings[:_MOST_WARNINGS]
    out += [Hanging(f"the profiler warns: {shown(each, _LONGEST_WARNING)}") for each in warnings]
    if len(measured.warnings) > len(warnings):
        out.append(f"{len(measured.warnings) - len(warnings)} more warnings")
    out += [Hanging(f"note: {shown(each, _LONGEST_WARNING)}") for each in found.notes]
    out += ["", pairs_table("time, us", [*found.times, *found.dma_ns], us)]
    out += ["", pairs_table("active, us", found.engines, us)]
    for head, pairs, worded in (
        ("DMA, MB", found.dma_bytes, _mb),
        ("count", found.counts, _count),
        ("SBUF, bytes of a partition", found.memory, _count),
        ("the vendor's bounds, us", found.bounds, us),
    ):
        if any(each.measured is not None for each in pairs):
            out += ["", pairs_table(head, pairs, worded)]
    if found.lines:
        out += ["", named_table("line, us", found.lines, rows, us)]
    if found.tensors:
        out += ["", named_table("HBM tensor, MB", found.tensors, rows, _mb)]
    return [*out, *_more(measured)]


def verdict(found: SideBySide) -> str:
    """Both total times, and measured over predicted."""
    total = found.total
    return (
        f"{us(total.predicted or 0.0)} us predicted, {us(found.measured.total_ns)} us measured, "
        f"ratio {_ratio(total)}"
    )


def contents(found: SideBySide) -> dict[str, Any]:
    """The pairs for `time --json`: times in ns, sizes in bytes, null where one side does not say it."""
    measured = found.measured
    origin, waiting = measured.origin, measured.synchronization
    return {
        "profile": measured.path,
        "reading": found.predicted.reading.value,
        "schema": origin.schema,
        "instance": origin.instance,
        "times": records(found.times, "_ns"),
        "engines": records(found.engines, "_ns"),
        "dma_active": records(found.dma_ns, "_ns"),
        "dma": records(found.dma_bytes, "_bytes"),
        "counts": records(found.counts, ""),
        "memory": records(found.memory, "_bytes"),
        "bounds": records(found.bounds, "_ns"),
        "lines": records(found.lines, "_ns"),
        "tensors": records(found.tensors, "_bytes"),
        "semaphore_updates": waiting.semaphore_updates,
        "barrier_ns": waiting.barrier_ns,
        "pending_dmas_most": waiting.pending_dmas_most,
        "throttled_ns": waiting.throttled_ns,
        "throttled_to": waiting.throttled_to,
        "dependences": dict(waiting.dependences),
        "sbuf_fullest": measured.on_chip.sbuf_fullest,
        "psum_fullest": measured.on_chip.psum_fullest,
        "warnings": list(measured.warnings),
        "notes": list(found.notes),
    }


def records(pairs: Sequence[Pair], unit: str) -> list[dict[str, Any]]:
    """Pairs as plain values; `unit` ends the keys of both sides."""
    return [
        {
            "name": each.name,
            f"predicted{unit}": _plain(each.predicted),
            f"measured{unit}": _plain(each.measured),
            "ratio": each.ratio,
        }
        for each in pairs
    ]


def _plain(value: float | None) -> float | int | None:
    """A value of its own type; numpy's are not JSON's."""
    return value if value is None or isinstance(value, int) else float(value)


def pairs_table(head: str, pairs: Sequence[Pair], worded: Callable[[float], str]) -> Table:
    """Predicted, measured and their ratio, a row for each pair."""
    return table(f"{head}|{_COLUMNS}", [(_word(each.name), *_three(each, worded)) for each in pairs])


def named_table(head: str, pairs: Sequence[Pair], rows: int, worded: Callable[[float], str]) -> Part:
    """The same of the first `rows` pairs, each with its text below; the others are added up."""
    listed: list[tuple[Part, ...]] = [
        (Name(_word(each.name)), *_three(each, worded)) for each in pairs[:rows]
    ]
    if len(pairs) > rows:
        rest = pairs[rows:]
        sums = Pair(
            f"{len(rest)} more",
            sum(each.predicted or 0 for each in rest),
            sum(each.measured or 0 for each in rest),
        )
        listed.append((sums.name, *_three(sums, worded)))
    notes = [each.text for each in pairs[:rows]] + [""] * (len(listed) - min(rows, len(pairs)))
    return Noted(table(f"{head}|{_COLUMNS}", listed), notes)


def _word(text: str) -> str:
    """A name from outside, on one line."""
    return shown(text, _LONGEST_WARNING).replace("\n", "\\n").replace("\t", "\\t")


def _three(pair: Pair, worded: Callable[[float], str]) -> tuple[str, str, str]:
    predicted, measured = ("-" if each is None else worded(each) for each in (pair.predicted, pair.measured))
    return predicted, measured, _ratio(pair)


def _ratio(pair: Pair) -> str:
    if pair.ratio is None:
        return "-"
    return f"{pair.ratio:.2f}" if 0.1 <= pair.ratio < 1000 else f"{pair.ratio:.2g}"


def _origin(measured: DeviceProfile) -> str:
    origin = measured.origin
    words = [
        f"schema {origin.schema}" if origin.schema else "",
        origin.instance,
        f"neuron-explorer {origin.explorer}" if origin.explorer else "",
        f"compiler {origin.compiler}" if origin.compiler else "",
    ]
    said = ", ".join(shown(each, 60) for each in words if each)
    return f" ({said})" if said else ""


def _more(measured: DeviceProfile) -> list[Part]:
    """What only the measurement says, a line each."""
    waiting, memory, total = measured.synchronization, measured.on_chip, measured.total_ns
    said = []
    if waiting.throttled_ns:
        lowest = share(waiting.throttled_to or 0.0, 1)
        said.append(
            f"throttled for {us(waiting.throttled_ns)} us, {share(waiting.throttled_ns, total)}, to {lowest}"
        )
    if waiting.barriers:
        said.append(f"core barriers: {us(waiting.barrier_ns or 0.0)} us in {waiting.barriers}")
    if waiting.pending_dmas_most is not None:
        said.append(f"most DMAs pending at one time: {waiting.pending_dmas_most:,}")
    waits = sum(each.wait_ns or 0.0 for each in measured.engines)
    if waits:
        said.append(f"instructions waited for semaphores {us(waits)} us, added up over engines")
    for name, fullest in (("SBUF", memory.sbuf_fullest), ("PSUM", memory.psum_fullest)):
        if fullest is not None:
            said.append(f"{name} at most {share(fullest, 1)} full on average of its partitions or banks")
    return ["", *(Hanging(each) for each in said)] if said else []


def _mb(size: float) -> str:
    return f"{size / 1e6:.3f}"


def _count(number: float) -> str:
    return f"{round(number):,}"

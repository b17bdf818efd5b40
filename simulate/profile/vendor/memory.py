"""The tables TensorInfo, SbufAllocation, SbufUsage and PsumUsage: what tensors are moved, and how full memories are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulate.profile.vendor.engines import CORE, SPAN, by_core, span
from simulate.profile.vendor.errors import Broken
from simulate.profile.vendor.intervals import most_at_once
from simulate.profile.vendor.records import OnChip, Tensor
from simulate.profile.vendor.tables import Kind, Names, Tables

_MOST_ALLOCATIONS = 5_000_000  # rows that are sorted at once: 40 bytes each
_MOST_PARTITIONS = 1 << 20
_FULL_PERCENT = 100.0
_ROUNDED_PERCENT = 1.0  # by which a full memory may exceed it
_MOST_TENSORS = 100_000
_NECESSARY = {"IN", "OUT", "WEIGHT"}
_SIZES = ("size", "load_to_sbuf_total_size_bytes")


def tensors(tables: Tables, moved: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Tensors of TensorInfo and of DMAs, by moved bytes, largest first. `moved` has the bytes of each variable."""
    names = Names()
    found: dict[str, Tensor] = {}
    optional = {
        "variable_name": Kind.text,
        "type": Kind.text,
        **dict.fromkeys(_SIZES, Kind.whole),
        "load_to_sbuf_repeat_factor": Kind.number,
    }
    for batch in tables.batches("TensorInfo", {}, optional, names):
        for number, use, size, loaded, loads in zip(*(batch[name].tolist() for name in optional)):
            name = names.of(number)
            if not name:
                continue
            found[name] = Tensor(
                name,
                names.of(use),
                size if size >= 0 else None,
                moved.get(name),
                loaded if loaded >= 0 else None,
                loads if loads >= 0 else None,  # NaN is none too
            )
    found.update(
        {name: Tensor(name, "", None, size, None, None) for name, size in moved.items() if name not in found}
    )
    ordered = sorted(
        found.values(), key=lambda each: (-(each.moved_bytes or each.loaded_bytes or 0), each.name)
    )
    if len(ordered) > _MOST_TENSORS:
        raise Broken(f"it has more than {_MOST_TENSORS:,} tensors")
    return tuple(ordered)


def necessary_bytes(listed: tuple[Tensor, ...]) -> int | None:
    """Bytes of inputs, outputs and weights, each once; None where no tensor says what it is used for."""
    sizes = [each.bytes for each in listed if each.bytes is not None and each.use.upper() in _NECESSARY]
    return sum(sizes) if sizes else None


def on_chip(tables: Tables) -> OnChip:
    """The most occupied partition of SBUF, and the highest samples of fullness."""
    return OnChip(_occupied(tables), _fullest(tables, "SbufUsage"), _fullest(tables, "PsumUsage"))


def _occupied(tables: Tables) -> int | None:
    if "SbufAllocation" not in tables:
        return None
    if tables.count("SbufAllocation") > _MOST_ALLOCATIONS:
        tables.notes.append(f"SbufAllocation is left out: it has more than {_MOST_ALLOCATIONS:,} rows")
        return None
    needed = {**SPAN, **dict.fromkeys(("start_address", "end_address", "partition"), Kind.whole)}
    found = tables.rows("SbufAllocation", needed, CORE)
    starts, ends = span(found, "SbufAllocation")
    first, last, partition = (found[name] for name in list(needed)[2:])
    if np.any((first < 0) | (last < first)):
        raise Broken("SbufAllocation has a region that ends before it starts")
    if np.any((partition < 0) | (partition >= _MOST_PARTITIONS)):
        raise Broken("SbufAllocation has a partition out of range")
    sizes = last - first + 1  # the last byte belongs to it
    groups = by_core(found, partition, (), "SbufAllocation")
    return max((most_at_once(starts[rows], ends[rows], sizes[rows]) for _, _, rows in groups), default=None)


def _fullest(tables: Tables, table: str) -> float | None:
    highest = None
    for batch in tables.batches(table, {"avg_util_percent": Kind.number}):
        values = batch["avg_util_percent"]
        known = values[~np.isnan(values)]
        if np.any((known < 0) | (known > _FULL_PERCENT + _ROUNDED_PERCENT)):
            raise Broken(f"{table}.avg_util_percent holds a value that is no share")
        if len(known):
            highest = max(float(known.max()), highest or 0.0)
    return highest / _FULL_PERCENT if highest is not None and highest > 1.0 else highest

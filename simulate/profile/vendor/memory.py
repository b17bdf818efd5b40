"""Reading of a device profile's tables TensorInfo, SbufAllocation, SbufUsage and PsumUsage.

They give the traffic of tensors, and the fullness of memories.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from simulate.profile.vendor.engines import CORE, SPAN, get_span, split_by_core
from simulate.profile.vendor.errors import Broken
from simulate.profile.vendor.intervals import find_peak_overlap
from simulate.profile.vendor.records import OnChip, Tensor
from simulate.profile.vendor.tables import ColumnType, Names, Tables

_MOST_ALLOCATIONS = 5_000_000  # most rows to sort at once, 40 bytes each
_MOST_PARTITIONS = 1 << 20
_FULL_PERCENT = 100.0
_ROUNDED_PERCENT = 1.0  # most by which rounding lets a full memory exceed 100 %
_MOST_TENSORS = 100_000
_NECESSARY = {"IN", "OUT", "WEIGHT"}
_SIZES = ("size", "load_to_sbuf_total_size_bytes")


def list_tensors(tables: Tables, moved_bytes: Mapping[str, int]) -> tuple[Tensor, ...]:
    """Return the tensors of TensorInfo and those that only DMAs name, in descending order of moved bytes.

    Args:
        moved_bytes: Bytes that DMAs move of each variable.

    Raises:
        Broken: If there are too many tensors.
    """
    names = Names()
    tensors: dict[str, Tensor] = {}
    optional = {
        "variable_name": ColumnType.text,
        "type": ColumnType.text,
        **dict.fromkeys(_SIZES, ColumnType.integer),
        "load_to_sbuf_repeat_factor": ColumnType.number,
    }
    for batch in tables.read_batches("TensorInfo", {}, optional, names):
        for number, use_number, num_bytes, loaded_bytes, repeat_factor in zip(
            *(batch[name].tolist() for name in optional)
        ):
            name = names.get_text(number)
            if not name:
                continue
            tensors[name] = Tensor(
                name,
                names.get_text(use_number),
                num_bytes if num_bytes >= 0 else None,
                moved_bytes.get(name),
                loaded_bytes if loaded_bytes >= 0 else None,
                repeat_factor if repeat_factor >= 0 else None,  # NaN is none too
            )
    tensors.update(
        {
            name: Tensor(name, "", None, num_bytes, None, None)
            for name, num_bytes in moved_bytes.items()
            if name not in tensors
        }
    )
    ordered = sorted(
        tensors.values(), key=lambda tensor: (-(tensor.moved_bytes or tensor.loaded_bytes or 0), tensor.name)
    )
    if len(ordered) > _MOST_TENSORS:
        raise Broken(f"it has more than {_MOST_TENSORS:,} tensors; profile a single kernel")
    return tuple(ordered)


def count_necessary_bytes(tensors: tuple[Tensor, ...]) -> int | None:
    """Return the bytes of inputs, outputs and weights, each counted once; None if no such tensor has a size."""
    sizes = [
        tensor.bytes for tensor in tensors if tensor.bytes is not None and tensor.use.upper() in _NECESSARY
    ]
    return sum(sizes) if sizes else None


def read_occupancy(tables: Tables) -> OnChip:
    """Return the peak occupancy of an SBUF partition, and the highest samples of fullness of SBUF and PSUM."""
    return OnChip(
        _find_peak_occupancy(tables),
        _find_peak_fullness(tables, "SbufUsage"),
        _find_peak_fullness(tables, "PsumUsage"),
    )


def _find_peak_occupancy(tables: Tables) -> int | None:
    """Return the most bytes of an SBUF partition that are allocated at one time, over all partitions and cores.

    Returns None without the table, or with too many rows, which a note says.

    Raises:
        Broken: If a region or a partition is out of range.
    """
    if "SbufAllocation" not in tables:
        return None
    if tables.count_rows("SbufAllocation") > _MOST_ALLOCATIONS:
        tables.notes.append(f"SbufAllocation is left out: it has more than {_MOST_ALLOCATIONS:,} rows")
        return None
    needed = {**SPAN, **dict.fromkeys(("start_address", "end_address", "partition"), ColumnType.integer)}
    allocations = tables.read_rows("SbufAllocation", needed, CORE)
    starts, ends = get_span(allocations, "SbufAllocation")
    first, last, partition = (allocations[name] for name in list(needed)[2:])
    if np.any((first < 0) | (last < first)):
        raise Broken("SbufAllocation has a region that ends before it starts")
    if np.any((partition < 0) | (partition >= _MOST_PARTITIONS)):
        raise Broken("SbufAllocation has a partition out of range")
    sizes = last - first + 1  # end_address is the last byte
    groups = split_by_core(allocations, partition, (), "SbufAllocation")
    return max(
        (find_peak_overlap(starts[rows], ends[rows], sizes[rows]) for _, _, rows in groups), default=None
    )


def _find_peak_fullness(tables: Tables, table: str) -> float | None:
    """Return the highest fullness in a table of samples, between 0 and 1; None without samples.

    Samples count as percentages if any exceeds 1, else as shares.

    Raises:
        Broken: If a sample is outside 0 to 100 %.
    """
    highest = None
    for batch in tables.read_batches(table, {"avg_util_percent": ColumnType.number}):
        samples = batch["avg_util_percent"]
        known = samples[~np.isnan(samples)]
        if np.any((known < 0) | (known > _FULL_PERCENT + _ROUNDED_PERCENT)):
            raise Broken(f"{table}.avg_util_percent has a sample outside 0 to 100 %")
        if len(known):
            highest = max(float(known.max()), highest or 0.0)
    return highest / _FULL_PERCENT if highest is not None and highest > 1.0 else highest

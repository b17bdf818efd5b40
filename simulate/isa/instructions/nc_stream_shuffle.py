"""nc_stream_shuffle: move rows between the partitions of each quadrant of 32."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Masked, Plan
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor

_UNMODIFIED = 255


@instruction
def nc_stream_shuffle(
    hardware: Hardware, dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int], name: str | None = None
) -> Plan:
    """Copy src[32 q + shuffle_mask[i]] to dst[32 q + i] for every quadrant q, on the Vector engine; bits are kept.

    dst, src: [P, ...] @ SBUF or PSUM, same dtype and elements per partition. shuffle_mask: 32 entries, each 0
    to 31 or 255, which leaves that partition of dst unmodified. src may lie in another quadrant than dst, be
    dst itself, or have fewer partitions: a [1, ...] src with a mask of zeros broadcasts it.

    The number of partitions need not be a multiple of 32; then the first entries of the mask count. An entry
    that names a partition outside src would read what lies there physically, and is refused.

    Raises RuleViolation. Cost: one element per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    rules.check_tile(hardware, "src", src)
    rules.same_dtype("dst", dst, "src", src)
    rules.same_free_size("dst", dst, "src", src)
    mask = _well_formed(hardware, shuffle_mask)
    width = hardware.partitions_per_quadrant
    active = -(-max(src.shape[0], dst.shape[0]) // width) * width
    for operand, tile in (("dst", dst), ("src", src)):
        active_partitions_start(hardware, operand, tile, active)
    targets = np.array([row for row in range(dst.shape[0]) if mask[row % width] != _UNMODIFIED], np.int64)
    sources = targets // width * width + np.array(mask)[targets % width]
    sources_inside(sources, src)

    def compute(rows: np.ndarray) -> tuple[np.ndarray | Masked]:
        moved = flat(rows)[sources]
        if len(targets) == dst.shape[0]:
            return (moved,)
        values = np.zeros((dst.shape[0], moved.shape[1]), moved.dtype)
        values[targets] = moved
        chosen = np.zeros(values.shape, bool)
        chosen[targets] = True
        return (Masked(values.reshape(dst.shape), chosen),)

    return Plan(
        engine=Engine.vector,
        reads=(src,),
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=costs.vector(hardware, src.free_size),
        name=name,
        propagate=propagation.moved,
    )


def _well_formed(hardware: Hardware, shuffle_mask: Any) -> list[int]:
    try:
        mask = [operator.index(entry) for entry in shuffle_mask]
    except TypeError:
        mask = []
    mask_of_quadrant(hardware, mask, shuffle_mask)
    return mask


@rule(
    "NKW-SHUFFLE-MASK",
    hint="give a list of 32 Python ints: entry i is the source of partition i of a quadrant",
)
def mask_of_quadrant(hardware: Hardware, mask: list[int], shuffle_mask: Any) -> None:
    """shuffle_mask has one entry per partition of a quadrant, each the number of one or 255.

    Raises RuleViolation otherwise.
    """
    width = hardware.partitions_per_quadrant
    if len(mask) != width or any(entry != _UNMODIFIED and not 0 <= entry < width for entry in mask):
        raise RuleViolation(
            mask_of_quadrant,
            f"shuffle_mask={shuffle_mask!r:.80}",
            limit=f"{width} integers, each 0 to {width - 1} or {_UNMODIFIED}",
        )


@rule("NKW-SHUFFLE-START", hint="shuffle one quadrant at a time")
def active_partitions_start(hardware: Hardware, operand: str, tile: NkiTensor, active: int) -> None:
    """96 or 128 active partitions start at partition 0, 64 at 0 or 64, 32 at 0, 32, 64 or 96.

    Raises RuleViolation otherwise.
    """
    step = hardware.partitions if active > 64 else active
    start = rules.first_partition(tile)
    if start % step:
        raise RuleViolation(
            active_partitions_start,
            f"{operand} starts at partition {start}, {active} partitions are active",
            limit=f"start partition a multiple of {step}",
        )


@rule(
    "NKW-SHUFFLE-SOURCE", hint="give src all partitions it is read from, or use 255 for those to leave alone"
)
def sources_inside(sources: np.ndarray, src: NkiTensor) -> None:
    """Every partition that the mask names belongs to src.

    Raises RuleViolation otherwise.
    """
    if sources.size and sources.max() >= src.shape[0]:
        raise RuleViolation(
            sources_inside, f"the mask reads partition {sources.max()} of src, which has {src.shape[0]}"
        )

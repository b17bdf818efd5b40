"""bn_stats: count, mean and count * variance of the even and of the odd elements of each partition."""

from __future__ import annotations

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import JOINS_COLUMNS, Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import NkiTensor

_STATISTICS = 6


@instruction
def bn_stats(hardware: Hardware, dst: NkiTensor, data: NkiTensor, name: str | None = None) -> Plan:
    """Compute count, mean, count * variance per partition of the even elements, then of the odd ones, on Vector.

    data: [P, ...] @ SBUF or PSUM, at most 512 elements per partition. dst: [P, 6] @ SBUF or PSUM. Computes in
    float32 with the population variance; elements are even or odd by their place in streaming order. A single
    element has no odd ones, whose three statistics are then 0 (not documented; bn_aggr ignores such a
    triple).

    Raises RuleViolation. Cost: one element per cycle.
    """
    rules.check_unpacked(hardware, dst=dst, data=data)
    rules.same_partitions("dst", dst, "data", data)
    statistics_fit(hardware, data)
    six_statistics(dst)
    return Plan(
        engine=Engine.vector,
        reads=(data,),
        writes=(dst,),
        domain=Domain.float32,
        compute=_compute,
        cost=costs.vector(hardware, data.free_size),
        name=name,
        propagate=propagation.within_partitions,
        effects=JOINS_COLUMNS,
    )


def _compute(values: np.ndarray) -> tuple[np.ndarray]:
    rows = flat(values)
    result = np.zeros((rows.shape[0], _STATISTICS), np.float32)
    for parity in range(min(2, rows.shape[1])):
        elements = rows[:, parity::2]
        mean = np.add.reduce(elements, axis=1, dtype=np.float32, keepdims=True) / np.float32(
            elements.shape[1]
        )
        deviation = elements - mean
        column = 3 * parity
        result[:, column] = elements.shape[1]
        result[:, column + 1] = mean[:, 0]
        result[:, column + 2] = np.add.reduce(deviation * deviation, axis=1, dtype=np.float32)
    return (result,)


@rule(
    "NKW-BN-STATS-SIZE",
    hint="one bn_stats per 512 elements, each into its columns of one tile, and one bn_aggr over all",
)
def statistics_fit(hardware: Hardware, data: NkiTensor) -> None:
    """bn_stats takes at most 512 elements per partition.

    Raises RuleViolation otherwise.
    """
    limit = hardware.bn_stats_free_max
    if data.free_size > limit:
        raise RuleViolation(
            statistics_fit,
            f"data has {data.free_size} elements per partition",
            limit=f"{limit} (nl.tile_size.bn_stats_fmax)",
        )


@rule("NKW-BN-STATS-OUTPUT", hint="allocate dst as (P, 6), or slice six columns of it")
def six_statistics(dst: NkiTensor) -> None:
    """bn_stats writes six elements per partition.

    Raises RuleViolation if dst has another number of elements per partition.
    """
    if dst.free_size != _STATISTICS:
        raise RuleViolation(
            six_statistics, f"dst has {dst.free_size} elements per partition", limit=f"{_STATISTICS}"
        )

"""topk: the K largest elements of each group of 16 partitions, and where they were."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Masked, Plan
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import to_float32

_ELEMENTS = (8, 65536)
_RESULTS = (1, 32768)


@instruction
def topk(
    hardware: Hardware,
    val_dst: NkiTensor,
    idx_dst: NkiTensor,
    src: NkiTensor,
    n: int,
    name: str | None = None,
) -> Plan:
    """Find the K largest of n elements per group of 16 partitions, ascending, and their positions, on GpSimd.

    src: [P, >= ceil(n / 16)] bfloat16 @ SBUF, P a multiple of 16: element j of a group lies in its partition
    j % 16, column j // 16 (the snake layout). val_dst: [P, K] bfloat16, idx_dst: [P, K] uint32, both @ SBUF.
    8 <= n < 65536, 1 <= K < 32768, K <= n.

    The text says in one place that partitions are independent and in another that 16 of them hold one list;
    public kernels and their references write and read one list per group, and find the results in the snake
    layout too: result j in partition j % 16, column j // 16. So it is done here; the other elements of
    val_dst and idx_dst keep their content. Of equal values the lower position counts as larger, and NaN as
    smallest (not documented).

    Raises RuleViolation. Cost: 4 n + K cycles.
    """
    operands = (("src", src, "bfloat16"), ("val_dst", val_dst, "bfloat16"), ("idx_dst", idx_dst, "uint32"))
    for operand, tile, dtype in operands:
        rules.check_tile(hardware, operand, tile, MemoryRegion.sbuf)
        rules.dtype_among(operand, tile, dtype)
        is_matrix(operand, tile)
        rules.same_partitions(operand, tile, "src", src)
    rules.same_free_size("val_dst", val_dst, "idx_dst", idx_dst)
    lanes = hardware.partitions_per_gpsimd_core
    whole_groups(lanes, src)
    count = val_dst.shape[1]
    within_limits(n, count)
    columns = -(-n // lanes)
    holds_snake(src, columns)
    groups, filled = src.shape[0] // lanes, -(-count // lanes)

    def compute(tile: np.ndarray) -> tuple[Masked, Masked]:
        lists = tile.reshape(groups, lanes, columns).transpose(0, 2, 1).reshape(groups, -1)[:, :n]
        descending = -to_float32(np.ascontiguousarray(lists), src.dtype)
        order = np.argsort(descending, axis=1, kind="stable")[:, :count][:, ::-1]
        values = np.take_along_axis(lists, order, axis=1)
        chosen = in_snake(np.ones(order.shape, bool))
        return Masked(in_snake(values), chosen), Masked(in_snake(order.astype(np.uint32)), chosen)

    def in_snake(results: np.ndarray) -> np.ndarray:
        laid = np.zeros((groups, filled * lanes), results.dtype)
        laid[:, :count] = results
        return laid.reshape(groups, filled, lanes).transpose(0, 2, 1).reshape(-1, filled)

    return Plan(
        engine=Engine.gpsimd,
        reads=(src[:, :columns],),
        writes=(val_dst[:, :filled], idx_dst[:, :filled]),
        domain=Domain.bits,
        compute=compute,
        cost=costs.largest(hardware, n, count),
        name=name,
    )


@rule("NKW-TOPK-DIMS", hint="reshape it to (P, free)")
def is_matrix(operand: str, tile: NkiTensor) -> None:
    """Operands of topk have two dims.

    Raises RuleViolation otherwise.
    """
    if tile.ndim != 2:
        raise RuleViolation(is_matrix, f"{operand} has shape {tile.shape}")


@rule(
    "NKW-TOPK-GROUPS",
    hint="allocate src on 16, 32, … partitions",
)
def whole_groups(lanes: int, src: NkiTensor) -> None:
    """topk works on whole groups of 16 partitions.

    Raises RuleViolation if src covers another number of partitions.
    """
    if src.shape[0] % lanes:
        raise RuleViolation(
            whole_groups, f"src has {src.shape[0]} partitions", limit=f"a multiple of {lanes}"
        )


@rule("NKW-TOPK-LIMITS", hint="split the list into pieces of fewer elements, or ask for fewer results")
def within_limits(n: Any, count: int) -> None:
    """8 <= n < 65536, 1 <= K < 32768 and K <= n, where K is the free size of val_dst.

    Raises RuleViolation otherwise.
    """
    is_integer = isinstance(n, (int, np.integer)) and not isinstance(n, bool)
    if not (
        is_integer and _ELEMENTS[0] <= n < _ELEMENTS[1] and _RESULTS[0] <= count < _RESULTS[1] and count <= n
    ):
        raise RuleViolation(within_limits, f"n={n!r:.40}, K={count}")


@rule("NKW-TOPK-SOURCE", hint="load the list as src[j % 16, j // 16], or pass a smaller n")
def holds_snake(src: NkiTensor, columns: int) -> None:
    """src has at least ceil(n / 16) columns.

    Raises RuleViolation otherwise.
    """
    if src.shape[1] < columns:
        raise RuleViolation(holds_snake, f"src has {src.shape[1]} columns", limit=f"{columns} for this n")

"""Builder of matrix products and of the optimisation steps of such kernels."""

from __future__ import annotations

import numpy as np

from benchmarks.fidelity.builders.variants import is_late_step, refuse_bare_speed_up
from benchmarks.fidelity.case import (
    Case,
    NotCovered,
    Run,
    Schedule,
    array,
    chip_of,
    compiled_mode,
    dtype_of,
    quantity_of,
)
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import matmul
from simulate.hardware import Hardware


def build(entry: Entry) -> Case:
    """Return the case of a matrix product; the description says which operands are transposed and which stay in SBUF.

    Raises NotCovered for a variant described by its speed-up alone, and if the sizes are missing.
    """
    refuse_bare_speed_up(entry)
    chip = chip_of(entry)
    dtype = dtype_of(entry)
    sizes = entry.sizes()
    if not {"M", "K", "N"} <= set(sizes):
        product = entry.product()
        if len(product) == 3:
            sizes = dict(zip("MKN", product))
        else:
            sizes = read_problem_sizes(entry)
    m, k, n = sizes["M"], sizes["K"], sizes["N"]
    a_t, a, b = array((k, m), dtype), array((m, k), dtype), array((k, n), dtype)
    schedule = Schedule.explicit if entry.says("scheduler off") or entry.says("hand") else Schedule.compiler

    def case(kernel: object, *arguments: object) -> Case:
        runs = (Run(kernel, (arguments,)),)  # type: ignore[arg-type]
        return Case(chip, runs, quantity_of(entry), schedule)

    if entry.says("double-row"):
        return case(matmul.double_row, a_t, b)
    if entry.says("batched"):
        batches = sizes.get("B")
        if batches is None:
            raise NotCovered("the number of batches is not given")
        return case(matmul.batched, array((batches, m, k), dtype), array((batches, k, n), dtype))
    if entry.says("one PSUM bank"):
        return case(matmul.single_bank, a_t, b)
    if entry.says("rmsnorm"):
        return case(matmul.transposing, a, b, fits(chip, b), array((1, k), dtype))
    if entry.says("rhs^T"):
        return case(matmul.transposing, a, array((n, k), dtype), True, None, None, True)
    if entry.says("A^T B^T") or entry.says("transpose", "style"):
        return case(matmul.contraction_first, a_t, b)
    if entry.says("lhs @ rhs") or entry.says("untransposed"):
        if fits(chip, a, b):
            return case(matmul.columns_outermost, a, b)
        if fits(chip, b):
            return case(matmul.transposing, a, b, True)
        block = 1024
        return case(matmul.column_blocks, a, b, block, fits(chip, array((k, block), dtype)))
    if entry.says("starting kernel") or (entry.says("optimisation step") and not is_late_step(entry)):
        return case(matmul.reloaded, a_t, b)
    if entry.says("loads sunk into the innermost"):
        return case(matmul.reloaded, a_t, b, compiled_mode(chip))
    if entry.says("blocked along the free"):
        return case(matmul.free_blocked, a_t, b)
    if entry.says("hoisted"):
        return case(matmul.hoisted, a_t, b)
    blocks = (
        entry.integer(r"blocks (\d+)/\d+/\d+"),
        entry.integer(r"blocks \d+/(\d+)/"),
        entry.integer(r"/(\d+)$"),
    )
    return case(matmul.blocked, a_t, b, *(blocks if all(blocks) else (4, 1, 8)))


def fits(chip: Hardware, *operands: np.ndarray) -> bool:
    """Return whether operands may stay in SBUF: together they fill at most three quarters of it."""
    per_partition = sum(operand.nbytes for operand in operands) // chip.partitions
    return per_partition <= 0.75 * chip.sbuf_usable_bytes_per_partition


def read_problem_sizes(entry: Entry) -> dict[str, int]:
    """Return the sizes M, K and N that `shapes` names, as in `matmul_M4096_N12288_K5120_0`.

    Raises NotCovered if one is missing.
    """
    sizes = entry.sizes()
    if not {"M", "K", "N"} <= set(sizes):
        raise NotCovered(f"shapes {entry.shapes!r} do not give M, K and N")
    return sizes

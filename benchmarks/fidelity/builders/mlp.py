"""Builder of a matrix product with bias and GELU, fused in one launch or in two launches."""

from __future__ import annotations

from benchmarks.fidelity.builders.matmul import fits
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
from benchmarks.fidelity.kernels import mlp


def build(entry: Entry) -> Case:
    """Return the case of GEMM + bias + GELU in one launch, or in two whose times add up.

    Raises NotCovered if the description names neither form, or `shapes` does not give M x K x N.
    """
    chip = chip_of(entry)
    dtype = dtype_of(entry)
    product = entry.product()
    if len(product) != 3:
        raise NotCovered(f"shapes {entry.shapes!r} do not give M x K x N")
    m, k, n = product
    operands = array((k, m), dtype), array((k, n), dtype), array((1, n), dtype)
    resident = fits(chip, operands[1])
    mode = compiled_mode(chip)
    if entry.says("two launches"):
        first = Run(mlp.gemm, ((*operands, None, resident, mode),))
        runs: tuple[Run, ...] = (first, Run(mlp.gelu, ((array((m, n), dtype), mode),)))
    elif entry.says("one launch"):
        curve = "tanh" if entry.says("tanh") else "gelu"
        runs = (Run(mlp.gemm, ((*operands, curve, resident, mode),)),)
    else:
        raise NotCovered("neither one launch nor two")
    return Case(chip, runs, quantity_of(entry), Schedule.compiler)

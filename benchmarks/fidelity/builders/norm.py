"""Builder of RMSNorm followed by a matrix product."""

from __future__ import annotations

from benchmarks.fidelity.builders.matmul import fits, read_problem_sizes
from benchmarks.fidelity.builders.variants import refuse_bare_speed_up
from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, array, chip_of, dtype_of, quantity_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import matmul


def build(entry: Entry) -> Case:
    """Return the case of RMSNorm(X) W, RMSNorm(X + residual) W, or RMSNorm and the QKV projection.

    Raises NotCovered for other normalisations and if the sizes are missing.
    """
    refuse_bare_speed_up(entry)
    chip = chip_of(entry)
    dtype = dtype_of(entry)
    if entry.says("QKV"):
        shapes = entry.brackets()
        if len(shapes) != 2 or len(shapes[0]) != 3 or len(shapes[1]) != 2:
            raise NotCovered(f"shapes {entry.shapes!r} do not give hidden [B, S, H] and weight [H, N]")
        (batch, tokens, depth), (_, columns) = shapes
        rows = batch * tokens
    elif entry.says("RMSNorm(X"):
        sizes = read_problem_sizes(entry)
        rows, depth, columns = sizes["M"], sizes["K"], sizes["N"]
    else:
        raise NotCovered("a normalisation that the description does not spell out")
    b = array((depth, columns), dtype)
    residual = array((rows, depth), dtype) if entry.says("residual") else None
    arguments = (array((rows, depth), dtype), b, fits(chip, b), array((1, depth), dtype), residual)
    return Case(chip, (Run(matmul.transposing, (arguments,)),), quantity_of(entry), Schedule.compiler)

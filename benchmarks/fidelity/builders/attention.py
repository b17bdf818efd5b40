"""Builder of attention over a whole prompt."""

from __future__ import annotations

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
from benchmarks.fidelity.kernels import attention


def build(entry: Entry) -> Case:
    """Return the case of a single head in three passes, a single head fused, or of grouped-query attention.

    Raises NotCovered if the description does not say how the work is divided, or the sizes do not fit the kernels.
    """
    refuse_bare_speed_up(entry)
    chip = chip_of(entry)
    dtype = dtype_of(entry)
    sizes = entry.sizes()
    if entry.says("grouped-query"):
        heads, groups = entry.integer(r"(\d+) query heads"), entry.integer(r"(\d+) kv heads")
        if heads is None or groups is None or not {"N", "D"} <= set(sizes):
            raise NotCovered(f"shapes {entry.shapes!r} do not give the heads, N and D")
        shape = (sizes["N"], groups, sizes["D"])
        arguments: tuple[object, ...] = (
            array((sizes["N"], heads, sizes["D"]), dtype), array(shape, dtype), array(shape, dtype), 0.1,
        )  # fmt: skip
        return Case(chip, (Run(attention.grouped, (arguments,)),), quantity_of(entry), Schedule.compiler)
    if entry.says("fused with projections") or entry.says("version"):
        raise NotCovered("the description does not say how the kernel divides its work")
    tokens = sizes.get("seqlen")
    depth = sizes.get("d", 128)
    if tokens is None or tokens % 512 or depth > 128:
        raise NotCovered(f"shapes {entry.shapes!r} give no multiple of 512 tokens with heads of at most 128")
    inputs = tuple(array((depth, tokens), dtype) for _ in range(3))
    # The library's kernels for small heads, and what a search arrives at, keep the weights in 16 bits.
    narrow = entry.says("small head") or entry.says("Stable-Diffusion") or is_late_step(entry)
    kernel = attention.fused
    if entry.says("three passes") or (not narrow and (entry.says("starting kernel") or entry.says("step"))):
        kernel = attention.three_pass
    arguments = (
        (*inputs, compiled_mode(chip), narrow)
        if kernel is attention.fused
        else (*inputs, compiled_mode(chip))
    )
    return Case(chip, (Run(kernel, (arguments,)),), quantity_of(entry), Schedule.compiler)

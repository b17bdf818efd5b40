"""Builders of kernels that have little or no contraction: additions, SiLU, AdamW, transposes, k-means."""

from __future__ import annotations

import re

from benchmarks.fidelity.builders.variants import refuse_bare_speed_up
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
from benchmarks.fidelity.kernels import elementwise, kmeans
from benchmarks.fidelity.kernels import transpose as transposes


def build(entry: Entry) -> Case:
    """Return the case of a vector addition, SiLU or an AdamW step.

    Raises NotCovered for other kernels or missing sizes.
    """
    refuse_bare_speed_up(entry)
    chip = chip_of(entry)
    dtype = dtype_of(entry)
    sizes = entry.sizes()

    def case(kernel: object, *arguments: object) -> Case:
        runs = (Run(kernel, (arguments,)),)  # type: ignore[arg-type]
        return Case(chip, runs, quantity_of(entry), Schedule.compiler)

    if entry.says("a + b", "per step"):
        chunk = entry.integer(r"CHUNK=(\d+)")
        if "N" not in sizes or chunk is None:
            raise NotCovered(f"shapes {entry.shapes!r} do not give N and the chunk")
        vector = array((sizes["N"], 1), dtype)
        return case(elementwise.add_column_chunks, vector, vector, chunk, compiled_mode(chip))
    if entry.says("a + b", "viewed as [128"):
        width = entry.integer(r"FREE_DIM=(\d+)")
        if "N" not in sizes or width is None or sizes["N"] % 128:
            raise NotCovered(f"shapes {entry.shapes!r} do not give N, a multiple of 128, and the width")
        matrix = array((128, sizes["N"] // 128), dtype)
        return case(elementwise.add_streams, matrix, matrix, width, compiled_mode(chip))
    if not {"M", "N"} <= set(sizes):
        raise NotCovered(f"shapes {entry.shapes!r} do not give M and N")
    matrix = array((sizes["M"], sizes["N"]), dtype)
    if entry.says("AdamW"):
        return case(elementwise.adamw, matrix, matrix, matrix, matrix)
    if entry.says("sigmoid(x)"):
        return case(elementwise.silu, matrix)
    raise NotCovered("an element-wise kernel that no builder knows")


def transpose(entry: Entry) -> Case:
    """Return the case of a matrix transposed in 128 x 128 tiles on the Tensor engine.

    Raises NotCovered for other entries.
    """
    sizes = entry.product()
    if len(sizes) != 2 or not entry.says("tensor engine"):
        raise NotCovered("not a matrix transposed on the Tensor engine")
    matrix = array((sizes[0], sizes[1]), dtype_of(entry))
    runs = (Run(transposes.by_tiles, ((matrix,),)),)
    return Case(chip_of(entry), runs, quantity_of(entry), Schedule.compiler)


def cluster(entry: Entry) -> Case:
    """Return the case of one core's part of a k-means assignment of points to centroids.

    The points are divided over the cores. Raises NotCovered if the description or the sizes are others.
    """
    match = re.search(r"N=(\d+) points, D=(\d+), K=(\d+)", entry.shapes)
    if match is None or not entry.says("arg-max"):
        raise NotCovered("not an assignment step with points, D and K")
    points, depth, centroids = map(int, match.groups())
    dtype = dtype_of(entry)
    arguments = (
        array((depth, points // entry.cores), dtype),
        array((depth, centroids), dtype),
        array((1, centroids)),
    )
    runs = (Run(kmeans.assign, (arguments,)),)
    return Case(chip_of(entry), runs, quantity_of(entry), Schedule.compiler)

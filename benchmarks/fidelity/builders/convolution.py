"""Builder of convolutions: sums of matmuls over filter taps, and depthwise ones on the Vector engine."""

from __future__ import annotations

from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, array, chip_of, dtype_of, quantity_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import convolution


def build(entry: Entry) -> Case:
    """Return the case of a 3 x 3 convolution of one image, perhaps with pooling, or of a depthwise one.

    A depthwise convolution runs along the width. Raises NotCovered for other shapes.
    """
    chip = chip_of(entry)
    dtype = dtype_of(entry)
    sizes = entry.sizes()
    if entry.says("depthwise"):
        wanted = ("batch", "channels", "width", "filter")
        if not set(wanted) <= set(sizes):
            raise NotCovered(f"shapes {entry.shapes!r} do not give {', '.join(wanted)}")
        batch, channels, width, taps = (sizes[name] for name in wanted)
        arguments: tuple[object, ...] = (
            array((batch, channels, width), dtype),
            array((channels, taps), dtype),
        )
        # A search starts from the plain form, one output position at a time.
        plain = entry.says("starting kernel") or entry.says("optimisation step")
        runs = (Run(convolution.by_positions if plain else convolution.depthwise, (arguments,)),)
        return Case(chip, runs, quantity_of(entry), Schedule.compiler)
    shapes = entry.brackets()
    if len(shapes) != 2 or len(shapes[0]) != 4 or shapes[0][0] != 1 or shapes[1][2:] != (3, 3):
        raise NotCovered(f"shapes {entry.shapes!r} are no single image and 3 x 3 filters")
    bias = array((shapes[1][0], 1))
    pooled = entry.says("pooling")
    arguments = (array(shapes[0][1:], dtype), array(shapes[1], dtype), bias, pooled)
    copied = entry.says("contiguous tile per filter tap") and shapes[0][2] % 2 == 0
    kernel = convolution.by_copied_taps if copied else convolution.by_taps
    return Case(chip, (Run(kernel, (arguments,)),), quantity_of(entry), Schedule.explicit)

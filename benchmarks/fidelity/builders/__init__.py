"""Builders by family: each turns the fields of an entry into a case, or raises NotCovered with the reason.

A builder looks at the family, the description, the shapes, the dtype, the metrics and how the time was taken. It never
looks at the id, the source or the measured time, which would let the answer into the prediction.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.fidelity.builders import (
    attention,
    collective,
    convolution,
    decode,
    dma,
    elementwise,
    instructions,
    matmul,
    mlp,
    named,
    norm,
    ssm,
)
from benchmarks.fidelity.case import Case, NotCovered
from benchmarks.fidelity.entry import Entry

Builder = Callable[[Entry], Case]

BUILDERS: dict[str, Builder] = {
    "attention": attention.build,
    "cluster": elementwise.cluster,
    "collective": collective.build,
    "conv": convolution.build,
    "decode-layer": decode.layer,
    "dma": dma.build,
    "elementwise": elementwise.build,
    "instr": instructions.build,
    "kernel": named.build,
    "matmul": matmul.build,
    "mlp": mlp.build,
    "moe": decode.experts,
    "norm": norm.build,
    "ssm": ssm.build,
    "transpose": elementwise.transpose,
}


def build(entry: Entry) -> Case:
    """Return the case of an entry: the kernels to run in the place of the measured one, and the quantity to read.

    Raises NotCovered if the entry has a flaw, its family has no builder, or the builder cannot rebuild it.
    """
    if entry.flaw:
        raise NotCovered(entry.flaw)
    builder = BUILDERS.get(entry.family)
    if builder is None:
        raise NotCovered(f"family {entry.family!r} has no kernel: it is not the time of one kernel on a core")
    return builder(entry)

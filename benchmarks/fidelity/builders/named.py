"""Kernels that an entry names, with their arguments as the commands take them."""

from __future__ import annotations

from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, chip_of, quantity_of
from benchmarks.fidelity.entry import Entry
from nkw.errors import InvalidArgument
from simulate.bind import install
from simulate.calibrate.measurement import resolve_call


def build(entry: Entry) -> Case:
    """Build the case of a kernel found by its name, scheduled in the compiler's order."""
    install("simulate")
    try:
        kernel, arguments = resolve_call(entry.kernel, entry.shapes)
    except InvalidArgument as refused:
        raise NotCovered(refused.message) from None
    run = Run(kernel, (arguments,), entry.cores)
    return Case(chip_of(entry), (run,), quantity_of(entry), Schedule.compiler)

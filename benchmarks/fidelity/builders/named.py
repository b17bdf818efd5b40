"""Builder of entries that name their kernel, in the form that `nkw compare --measurements` writes."""

from __future__ import annotations

from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, chip_of, quantity_of
from benchmarks.fidelity.entry import Entry
from nkw.errors import InvalidArgument
from simulate.bind import install
from simulate.calibrate.measurement import resolve_call


def build(entry: Entry) -> Case:
    """Return the case of the kernel that `entry.kernel` names as MODULE:NAME or FILE.py:NAME.

    `entry.shapes` gives the arguments. The schedule is the compiler's. Raises NotCovered if there is no such kernel
    or its arguments are invalid.
    """
    install("simulate")
    try:
        kernel, arguments = resolve_call(entry.kernel, entry.shapes)
    except InvalidArgument as refused:
        raise NotCovered(refused.message) from None
    run = Run(kernel, (arguments,), entry.cores)
    return Case(chip_of(entry), (run,), quantity_of(entry), Schedule.compiler)

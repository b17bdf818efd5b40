"""Readings of a stream: how much of the hardware's concurrency a predicted time assumes."""

from __future__ import annotations

from enum import Enum

from nkw.errors import InvalidArgument


class Reading(Enum):
    """Assumption about what may overlap when a stream is placed in time.

    serial: nothing; each core carries out one event after another, each for its whole duration. An upper bound.
    program: engines and DMA queues run concurrently, each in program order; tiles rotate as deep as they fit.
    scheduled: as program, but each engine takes its events oldest ready first, within a window; weights that
    are in the array are not loaded again, and tables are loaded in idle time. As program if that is no longer.
    dataflow: everything that no dependence forbids, in unlimited memory. Events wait neither for engines nor for DMA
    bandwidth; the end of the launch waits until each engine, and the DMA engines, can have done all their work. A lower
    bound, and never below the work at peak rates.
    """

    serial = "serial"
    program = "program"
    scheduled = "scheduled"
    dataflow = "dataflow"


def check_reading(reading: object) -> None:
    """Raise InvalidArgument for an argument that is no Reading."""
    if not isinstance(reading, Reading):
        raise InvalidArgument(
            "NKW-TIMING-READING", f"{reading!r:.60} is no reading; pass {', '.join(map(str, Reading))}"
        )


WINDOW = 64
"""Events of one engine among which the scheduled reading chooses. Our choice: the compiler's is not published."""

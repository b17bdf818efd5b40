"""Predicted time: a stream is placed on the engines it ran on, and shown as a timeline or a trace."""

from simulate.timing.causes import PathStep, Reason
from simulate.timing.dependences import Dependences, Wait, dependences
from simulate.timing.listing import listing
from simulate.timing.readings import Reading, check_reading
from simulate.timing.schedule import Bracket, bracket, list_deciding_numbers, schedule
from simulate.timing.timeline import Slice, SliceKind, Timeline
from simulate.timing.trace import write_trace

__all__ = [
    "Bracket",
    "Dependences",
    "PathStep",
    "Reading",
    "Reason",
    "Slice",
    "SliceKind",
    "Timeline",
    "Wait",
    "bracket",
    "check_reading",
    "dependences",
    "list_deciding_numbers",
    "listing",
    "schedule",
    "write_trace",
]

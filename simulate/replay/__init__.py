"""Replay: the program of an earlier launch runs again on new arrays.

A program is the instructions of a recorded eager launch. `key` and `guards` decide which launches may share a
program. `cache` keeps programs, `program` runs one exactly as recorded, `fusion` rewrites it into few numpy calls,
and `verify` compares a replay with an eager launch.
"""

from simulate.replay.cache import ReplayCache, ReplayReport
from simulate.replay.launch import replay_or_record
from simulate.replay.options import ReplayOptions
from simulate.replay.program import Program, why_not_replayed
from simulate.replay.verify import ReplayMismatch

__all__ = [
    "Program",
    "ReplayCache",
    "ReplayMismatch",
    "ReplayOptions",
    "ReplayReport",
    "replay_or_record",
    "why_not_replayed",
]

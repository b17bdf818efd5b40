"""Replay: a launch like an earlier one runs its recorded program again on new data.

`key` and `guards` decide which launches may share a program, `cache` keeps programs, `program` runs one exactly as
recorded, `fusion` rewrites it into few numpy calls, and `verify` compares a replay with an eager launch.
"""

from simulate.replay.cache import REPLAYS, ReplayReport
from simulate.replay.options import ReplayOptions
from simulate.replay.verify import ReplayMismatch

__all__ = ["REPLAYS", "ReplayMismatch", "ReplayOptions", "ReplayReport"]

"""How the arguments of each instruction are drawn: every call is legal on the generation at hand.

A draw returns the arguments by their documented names, or None where the generation has no such instruction.
"""

from tests.oracle.streams import (  # noqa: F401  (imported for the draws they enter)
    accumulating,
    elementwise,
    loops,
    moving,
    random_numbers,
    selecting,
    tensor_engine,
)
from tests.oracle.streams.common import DRAWS
from tests.oracle.streams.indirect import drawn
from tests.oracle.streams.loops import loop

__all__ = ["DRAWS", "drawn", "loop"]

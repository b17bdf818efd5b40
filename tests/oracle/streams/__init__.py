"""How the arguments of each instruction are drawn: every call is legal on the generation at hand.

A draw returns the arguments by their documented names, or None where the generation has no such instruction.
"""

from tests.oracle.streams import (  # noqa: F401  (imported for the draws they enter)
    accumulating,
    elementwise,
    moving,
    selecting,
    tensor_engine,
)
from tests.oracle.streams.common import DRAWS

__all__ = ["DRAWS"]

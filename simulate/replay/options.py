"""How replayed launches run: exactly as recorded or rewritten, verified or trusted, with numpy alone or with torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from simulate.errors import InvalidArgument

REPLAY_VARIABLE = "NKW_REPLAY"
EXACT_VARIABLE = "NKW_EXACT_REPLAY"
VERIFY_VARIABLE = "NKW_VERIFY_REPLAY"


@dataclass(frozen=True)
class ReplayOptions:
    """Switches of replay; `from_environment` gives the defaults.

    exact: replay instruction by instruction, for the bytes of an eager launch. Otherwise programs are rewritten, and
    the float32 sums of matrix products may be taken in another order.
    verify: launch eagerly as well, every time, and raise ReplayMismatch where a replay differs.
    speed: multiply bfloat16 matrices with the CPU's bfloat16 instructions, if torch is installed, which brings them.
    """

    exact: bool = False
    verify: bool = False
    speed: bool = False

    @classmethod
    def from_environment(cls) -> ReplayOptions:
        """NKW_EXACT_REPLAY=1, NKW_VERIFY_REPLAY=1 and NKW_SPEED=torch switch on; raises InvalidArgument."""
        from simulate.replay.fusion import (
            speed,  # what rewrites programs is loaded when something is replayed
        )

        return cls(_flag(EXACT_VARIABLE), _flag(VERIFY_VARIABLE), speed.wanted())


def replay_is_wanted() -> bool:
    """Whether NKW_REPLAY=1 asks for kernels that are called like functions to be replayed."""
    return REPLAY_VARIABLE in os.environ and _flag(REPLAY_VARIABLE)


def _flag(variable: str) -> bool:
    text = os.environ.get(variable, "0")
    if text not in ("0", "1", ""):
        raise InvalidArgument("NKW-REPLAY-OPTION", f"{variable}={text!r}; it is 0 or 1")
    return text == "1"

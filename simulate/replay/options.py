"""Switches of replay: exact or rewritten, verified or not, with numpy alone or with torch."""

from __future__ import annotations

from dataclasses import dataclass

from simulate.run.environment import read_switch

EXACT_VARIABLE = "NKW_EXACT_REPLAY"
VERIFY_VARIABLE = "NKW_VERIFY_REPLAY"


@dataclass(frozen=True)
class ReplayOptions:
    """Switches of replay; `from_environment` gives the defaults.

    Attributes:
        exact: Replay instruction by instruction, with the bytes of an eager launch. Otherwise programs are rewritten,
            which may change the order of the float32 sums of matmuls.
        verify: Launch eagerly as well, every time, and raise ReplayMismatch where a replay differs.
        speed: Multiply bfloat16 matrices with the CPU's bfloat16 instructions, through torch if it is installed.
    """

    exact: bool = False
    verify: bool = False
    speed: bool = False

    @classmethod
    def from_environment(cls) -> ReplayOptions:
        """Return the options that NKW_EXACT_REPLAY, NKW_VERIFY_REPLAY and NKW_SPEED set.

        Raises:
            InvalidArgument: A variable is neither 0, 1 nor empty.
        """
        from simulate.replay.fusion import speed  # fusion is loaded when something is replayed

        return cls(read_switch(EXACT_VARIABLE), read_switch(VERIFY_VARIABLE), speed.is_enabled())

"""How replayed launches run: exactly as recorded or rewritten, verified or trusted, with numpy alone or with torch."""

from __future__ import annotations

from dataclasses import dataclass

from simulate.run.target import flag

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
        from simulate.replay.fusion import speed  # fusion is loaded when something is replayed

        return cls(flag(EXACT_VARIABLE), flag(VERIFY_VARIABLE), speed.wanted())

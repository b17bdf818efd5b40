"""The memories a tensor can lie in."""

from __future__ import annotations

from enum import Enum


class MemoryRegion(Enum):
    """HBM is private to a core or shared by the cores of a rank; SBUF and PSUM are on the chip, per core.

    `register` is not an NKI name: it is where the cells of an engine's registers live.
    """

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"
    register = "register"

    def __init__(self, name: str) -> None:
        self.on_chip = name in ("sbuf", "psum")  # whether this is SBUF or PSUM

    def __repr__(self) -> str:
        return f"nl.{self.value}"
